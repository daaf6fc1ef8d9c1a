"""The demo's two experiments as figures and verdicts: the race to copying, and replaced values."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.findings import copying, formation_steps
from workbench.plots.records import checked, lines
from workbench.plots.style import GREY, axis_title, colour, dressed, label, ordered, pale, subtitle

# ---- the race to induction -------------------------------------------------------------------------------------------


def race(frame: pd.DataFrame, *, log_x: bool = False) -> go.Figure:
    """Copy loss over training: mean and range over seeds, the halfway line, a diamond where each seed crosses it."""
    rows = checked(copying(frame))
    figure, shown, bands = make_subplots(1, 1), set[str](), set[str]()
    lines(figure, rows, "step", {"row": 1, "col": 1}, shown, bands)
    start = rows[rows["step"] == rows["step"].min()].groupby("run")["value"].mean()
    half = float(start.mean()) / 2
    figure.add_hline(
        y=half,
        line={"color": GREY, "dash": "dot"},
        annotation={
            "text": "half of the loss at the start",
            "xanchor": "left",
            "x": 0,
            "yanchor": "top",
            "font": {"color": GREY},
        },
    )
    steps = formation_steps(frame).dropna(subset="formation_step")
    for architecture in ordered(steps["architecture"]):
        mine = steps[steps["architecture"] == architecture]
        figure.add_scatter(
            x=mine["formation_step"].astype(int).tolist(), y=[float(start[r]) / 2 for r in mine["run"]], mode="markers",
            marker={"symbol": "diamond", "size": 10, "color": colour(architecture), "line": {"color": "white", "width": 1}},
            name=f"{label(architecture)}: crossing", legendgroup=label(architecture), showlegend=False,
            hovertemplate=[f"{label(architecture)}, seed {s}: step %{{x}}<extra></extra>" for s in mine["seed"]],
        )  # fmt: skip
    figure.update_xaxes(title_text="training step", type="log" if log_x else "linear")
    figure.update_yaxes(
        title_text=axis_title("loss where copying works (nats)", "lower: copies better"), rangemode="tozero"
    )
    under = subtitle(
        rows, "sequences of random tokens, written twice", *sorted(bands), "diamond: a seed crosses the line"
    )
    return dressed(figure, "When does each model learn to copy?", under, 340)


# ---- replaced values -------------------------------------------------------------------------------------------------


def ablation(frame: pd.DataFrame) -> go.Figure:
    """Change of the loss where deep values are replaced by their mean per token, or by zero: per layer and together."""
    rows = checked(frame[(frame["metric"] == "value_ablation") & frame["variant"].isin(["token_mean", "zero"])])
    deep = rows[(rows["layer"].isna()) | (rows["layer"] > 0)]
    if deep.empty:
        raise WorkbenchError("no values after the first layer were replaced; measure value_ablation on a deeper model")
    names = ordered(deep["architecture"])
    figure = make_subplots(
        1, len(names), shared_yaxes=True, subplot_titles=[label(n) for n in names], horizontal_spacing=0.03
    )
    last = int(deep["layer"].max())
    ticks = {**{float(n): str(n) for n in range(1, last + 1)}, last + 1.0: f"1–{last}"}
    for i, name in enumerate(names):
        for variant, look in (("zero", pale(name, 0.35)), ("token_mean", colour(name))):
            part = deep[(deep["architecture"] == name) & (deep["variant"] == variant)]
            found = part.assign(x=part["layer"].fillna(last + 1.0)).groupby("x")["value"].agg(["mean", "min", "max"])
            said = {"zero": "zero", "token_mean": "mean of its token"}[variant]
            figure.add_bar(
                x=[ticks[x] for x in found.index],
                y=found["mean"],
                name=said,
                marker={"color": look, "line": {"color": colour(name), "width": 1}},
                error_y={
                    "array": found["max"] - found["mean"],
                    "arrayminus": found["mean"] - found["min"],
                    "color": GREY,
                    "thickness": 1,
                },
                showlegend=False,
                hovertemplate=f"{label(name)}, layer %{{x}} replaced by {said}: %{{y:+.4f}} nats<extra></extra>",
                row=1,
                col=i + 1,
            )
        figure.update_xaxes(title_text="layer", type="category", row=1, col=i + 1)
    figure.update_yaxes(title_text=axis_title("change of the loss (nats)", "higher: it mattered more"), row=1, col=1)
    missing = [label(a) for a in ordered(set(rows["architecture"]) - set(names))]
    without = f"{', '.join(missing)}: no values of its own after the first layer" if missing else ""
    under = subtitle(
        deep,
        "pale: values set to zero",
        "full: values replaced by their token's mean",
        f"1–{last}: all of these layers at once" if last > 1 else "",
        "whisker: range over seeds",
        without,
    )
    return dressed(figure, "What is lost when deep values forget their context?", under, 320)
