"""The demo's two experiments as figures and verdicts: the race to copying, and replaced values."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.errors import WorkbenchError
from workbench.plots.records import checked, lines
from workbench.plots.style import GREY, LABELS, axis_title, colour, dressed, label, ordered, pale, subtitle

# ---- the race to induction -------------------------------------------------------------------------------------------


def _copying(frame: pd.DataFrame) -> pd.DataFrame:
    rows = frame[(frame["metric"] == "copy_loss") & frame["variant"].isna()]
    if rows.empty:
        raise WorkbenchError("no copy_loss here; it is written while training on repeated tokens")
    return checked(rows)


def formation_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """The step each run learned to copy at: the first whose copy loss is below half of its value at step 0.

    Columns architecture, seed, formation_step (null where it has not formed), formed (the step in words), last_step.
    """
    found = []
    for (architecture, run, seed), rows in _copying(frame).groupby(["architecture", "run", "seed"], dropna=False):
        curve = rows.sort_values("step").set_index("step")["value"]
        below = curve[curve < curve.iloc[0] / 2]
        step = int(below.index[0]) if len(below) else None
        row = {
            "architecture": architecture,
            "run": run,
            "seed": seed,
            "formation_step": step,
            "last_step": int(curve.index[-1]),
        }
        found.append(row | {"formed": "not formed" if step is None else f"step {step}"})
    table = pd.DataFrame(found).astype({"formation_step": "Int64", "seed": "Int64"})
    middle = table["formation_step"].astype("float64").fillna(np.inf).groupby(table["architecture"]).median()
    order = table["architecture"].map(middle)
    return (
        table.assign(order=order)
        .sort_values(["order", "architecture", "seed"])
        .drop(columns="order")
        .reset_index(drop=True)
    )


def formation_table(steps: pd.DataFrame) -> pd.DataFrame:
    """Formation steps as people read them: a row per architecture, fastest first, a column per seed."""
    wide = steps.pivot_table(index="architecture", columns="seed", values="formed", aggfunc="first", sort=False)
    wide = wide.loc[list(dict.fromkeys(steps["architecture"]))].fillna("")
    names = [LABELS.get(str(a), str(a)) for a in wide.index]
    return wide.rename(columns=lambda s: f"seed {s}").assign(model=names).set_index("model").reset_index()


def verdict(steps: pd.DataFrame) -> str:
    """The order of the architectures in words, and which neighbours the seeds do not tell apart; derived from the numbers."""
    groups = {
        a: rows["formation_step"].astype("float64").fillna(np.inf)
        for a, rows in steps.groupby("architecture", sort=False)
    }
    if len(groups) < 2:
        return "One architecture so far: nothing to compare."
    names = sorted(groups, key=lambda a: float(groups[a].median()))
    close = [(a, b) for a, b in pairwise(names) if not groups[a].max() < groups[b].min()]
    order = " before ".join(_short(a) for a in names)
    if min(len(g) for g in groups.values()) < 2:
        return f"{order}: one seed, so the order is not established."
    if not close:
        return f"{order}: seeds disjoint."
    pairs = "; ".join(f"{_short(a)} and {_short(b)}" for a, b in close)
    return f"{order} by the middle seed; overlapping, so unresolved: {pairs}."


def race(frame: pd.DataFrame, *, log_x: bool = False) -> go.Figure:
    """Copy loss over training: mean and range over seeds, the halfway line, a diamond where each seed crosses it."""
    rows = _copying(frame)
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


def unresolved(frame: pd.DataFrame) -> list[str]:
    """One line each on what the records of small models do not settle: losses inside seed bands, sinks, published sizes."""
    return [*_loss_lines(frame), *_sink_lines(frame), *TOO_SMALL]


SINK_FLOOR = 0.05  # of a layer's heads: below, single documents pass the threshold by chance
TOO_SMALL = (
    "Published savings in parameters and tokens, results at a billion parameters and long contexts cannot be checked here.",
)


def _last(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    rows = frame[(frame["metric"] == metric) & frame["variant"].isna()]
    return rows[rows["step"] == rows.groupby("run")["step"].transform("max")]


def _loss_lines(frame: pd.DataFrame) -> list[str]:
    rows = _last(frame, "loss")
    spans = rows.groupby("architecture")["value"].agg(["min", "mean", "max", "size"]).sort_values("mean")
    if len(spans) < 2 or spans["size"].min() < 2:
        return ["Final losses are compared once two architectures have two seeds each."]
    close = [
        f"{_short(a)} and {_short(b)}" for a, b in pairwise(spans.index) if spans.loc[a, "max"] >= spans.loc[b, "min"]
    ]
    if close:
        return [f"Final losses inside each other's seed range, so unresolved: {'; '.join(close)}."]
    order = ", ".join(f"{_short(a)} {spans.loc[a, 'mean']:.2f}" for a in spans.index)
    return [
        f"Final losses do not overlap over seeds ({order} nats), but after so few steps that says who learns fastest, "
        "not who ends best."
    ]


def _sink_lines(frame: pd.DataFrame) -> list[str]:
    mass, rate = _last(frame, "sink_mass"), _last(frame, "sink_rate")
    found, even = mass[mass["control"].isna()]["value"], mass[mass["control"].notna()]["value"]
    if found.empty or even.empty:
        return []
    heads = rate[rate["control"].isna()].groupby(["architecture", "layer"])["value"].mean()
    formed = float(heads.max()) if len(heads) else 0.0
    if formed > SINK_FLOOR:
        return [
            f"Some heads count as attention sinks here, at most {formed:.0%} of a layer's heads; see sink rate on Depth."
        ]
    return [
        f"No attention sink formed: the strongest head gives the first token {found.max():.1%} of its attention, even "
        f"attention would give {even.max():.1%}. So claims about sinks and drained values are not tested here."
    ]


def _short(architecture: Any) -> str:
    return LABELS.get(str(architecture), str(architecture)).removesuffix(" (control)")
