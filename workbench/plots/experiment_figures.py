"""Figures of the demo's experiments, of one model's X-ray, of verdicts on claims, and of measures against the loss."""

from __future__ import annotations

import html as markup
from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.record_figures import Legend, checked, fewer_seeds, lines, steps_after_init, whole_ticks
from workbench.plots.style import (
    GREY,
    MINUS,
    at_least,
    axis_title,
    beyond_range,
    colour,
    dressed,
    label,
    ordered,
    pale,
    subtitle,
    with_signs,
    words,
    wrapped,
)
from workbench.plots.training_and_gradient_figures import thinned
from workbench.statistics.copying_and_sink_steps import copying, formation_steps
from workbench.statistics.intervals import confidence, percent

HALF_POINTS = 200  # of a curve that fills half a page


def race_figure(frame: pd.DataFrame, *, log_x: bool = False) -> go.Figure:
    """Plot copy loss over training: mean and range over seeds, half of the initial loss, and each seed's crossing."""
    rows = checked(copying(frame))
    figure, legend = make_subplots(1, 1), Legend(ordered(rows["architecture"]))
    drawn, width = thinned(rows, HALF_POINTS)
    lines(figure, drawn, "step", {"row": 1, "col": 1}, legend)
    start = rows.sort_values("step").groupby("run")["value"].first()
    half = float(start.mean()) / 2
    figure.add_hline(y=half, line={"color": GREY, "dash": "dot"})
    steps = formation_steps(frame).dropna(subset="formation_step")
    for architecture in ordered(steps["architecture"]):
        mine = steps[steps["architecture"] == architecture]
        figure.add_scatter(
            x=mine["formation_step"].astype(int).tolist(), y=[float(start[r]) / 2 for r in mine["run"]], mode="markers",
            marker={"symbol": "circle-open", "size": 13, "color": colour(architecture, legend.series),
                    "line": {"width": 2}},
            name=f"{label(architecture)}: crossing", legendgroup=label(architecture), showlegend=False,
            hovertemplate=[f"{label(architecture)}, seed {s}: step %{{x}}<extra></extra>" for s in mine["seed"]],
        )  # fmt: skip
    figure.update_xaxes(title_text="training step", type="log" if log_x else "linear")
    figure.update_yaxes(title_text=axis_title("copy loss (nats)", "lower: copies better"), rangemode="tozero")
    under = subtitle(
        rows, "loss of the tokens that can be copied from earlier ones", *fewer_seeds([("step", drawn)], rows), *sorted(legend.bands),
        f"each point the mean of all records within {width} steps" if width > 1 else "", "dotted: half of the loss at the start",
        "ring: a seed crosses it",
    )  # fmt: skip
    return dressed(figure, "Copy loss", under, 340)


def formation_table(steps: pd.DataFrame) -> pd.DataFrame:
    """Return a table of the numbers of formation steps: one row per architecture, fastest first, one column per seed."""
    wide = steps.pivot_table(index="architecture", columns="seed", values="formed", aggfunc="first", sort=False)
    wide = wide.loc[list(dict.fromkeys(steps["architecture"]))].fillna("").map(lambda x: x.removeprefix("step "))
    names = [label(str(a)) for a in wide.index]
    return wide.rename(columns=lambda s: f"seed {s}").assign(model=names).set_index("model").reset_index()


def ablation(frame: pd.DataFrame) -> go.Figure:
    """Plot the change of the loss when values are replaced by their token mean or zero, by layer and in all deep layers.

    A model that was measured at several steps is drawn at its last one.
    """
    of_values = frame["metric"].str.endswith("value_ablation")
    rows = checked(frame[of_values & frame["variant"].isin(["token_mean", "zero"])])
    rows = rows[rows["step"].isna() | (rows["step"] == rows.groupby("architecture")["step"].transform("max"))]
    deep = after_the_first(rows)
    names = ordered(deep["architecture"])
    titles = [label(n) for n in names]
    figure = make_subplots(1, len(names), shared_yaxes=True, subplot_titles=titles, horizontal_spacing=0.03)
    layers = sorted(deep["layer"].dropna().unique())
    together = f"{layers[0]:.0f}–{layers[-1]:.0f}" if layers else "all"
    order = {**{float(n): f"{n:.0f}" for n in layers}, np.inf: together}
    seeds = deep.groupby("architecture")["run"].nunique().max() > 1
    for i, name in enumerate(names):
        for variant, fill in (("zero", pale(name, 0.35)), ("token_mean", colour(name))):
            rows_of = deep[(deep["architecture"] == name) & (deep["variant"] == variant)]
            if rows_of.empty:
                continue
            bars = rows_of.assign(x=rows_of["layer"].fillna(np.inf)).groupby("x").agg(
                mean=("value", "mean"), low=("value", "min"), high=("value", "max"), se=("se", "mean")
            )  # fmt: skip
            above, below = (bars["high"] - bars["mean"], bars["mean"] - bars["low"]) if seeds else (bars["se"],) * 2
            by = {"zero": "zero", "token_mean": "mean of its token"}[variant]
            figure.add_bar(
                x=[order[x] for x in bars.index], y=bars["mean"], name=by, showlegend=False,
                marker={"color": fill, "line": {"color": colour(name), "width": 1}},
                error_y={"array": above, "arrayminus": below, "color": GREY, "thickness": 1},
                hovertemplate=f"{label(name)}, layer %{{x}} replaced by {by}: %{{y:+.3g}} nats<extra></extra>", row=1, col=i + 1,
            )  # fmt: skip
        figure.update_xaxes(title_text="layer", type="category", row=1, col=i + 1)
    figure.update_yaxes(title_text=axis_title("loss change (nats)", "higher: it mattered more"), row=1, col=1)
    missing = [label(a) for a in ordered(set(rows["architecture"]) - set(names))]
    without = f"{', '.join(missing)}: no values of its own after the first layer" if missing else ""
    if layers == [0]:
        without = "no later layer has values of its own, so the first layer is drawn"
    under = subtitle(
        deep, "pale: values set to zero", "full: values replaced by their token's mean",
        f"{together}: all of these layers at once" if deep["layer"].isna().any() and len(layers) > 1 else "",
        f"whisker: {'range over seeds' if seeds else 'standard error over documents'}", steps_after_init(deep), without,
    )  # fmt: skip
    figure = dressed(figure, "Loss change under value replacement", under, 320)
    return at_least(figure, 110 * len(names)) if len(names) > 1 else figure


def after_the_first(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of layers after the first and of all layers together; rows of the first layer if there are no others."""
    deep = rows[rows["layer"].isna() | (rows["layer"] > 0)]
    return deep if len(deep) else rows


PARTS = {
    "first_position": ("first position", 1.0),
    "profile": ("other positions", 0.55),
    "content": ("particular tokens", 0.15),
}
"""In words, and how strong a shade of the model's colour."""


def concentration_figure(frame: pd.DataFrame) -> go.Figure:
    """Plot attention concentration per layer, stacked from its three parts; uniform causal attention is 0."""
    rows = checked(frame[frame["metric"] == "concentration_parts"])
    figure, architecture = go.Figure(), str(rows["architecture"].iloc[0])
    for part, (name, shade) in PARTS.items():
        means = rows[rows["variant"] == part].groupby("layer")["value"].mean()
        figure.add_bar(
            x=means.index, y=means, name=name,
            marker={"color": pale(architecture, shade), "line": {"color": colour(architecture), "width": 1}},
            hovertemplate=f"layer %{{x}}, {name}: %{{y:.3f}} nats<extra></extra>",
        )  # fmt: skip
    sums = rows[rows["variant"].isna()].groupby("layer")[["value", "se"]].mean()
    figure.add_scatter(
        x=sums.index, y=sums["value"], mode="markers", name="sum", marker={"color": GREY, "symbol": "line-ew-open", "size": 12},
        error_y={"array": sums["se"], "color": GREY, "thickness": 1}, hovertemplate="layer %{x}: %{y:.3f} nats<extra></extra>",
    )  # fmt: skip
    figure.update_layout(barmode="relative")  # a difference has both signs
    figure.update_xaxes(title_text="layer", dtick=whole_ticks(sums.index))
    figure.update_yaxes(title_text=axis_title("nats from uniform causal attention", "higher: further from uniform"))
    about = "divergence from uniform attention; importance entropy can hide it, as the parts can cancel there"
    under = subtitle(rows, about, "whisker: standard error of the sum")
    return dressed(figure, "Concentration of attention", under, 300)


def sinks_figure(mass: pd.DataFrame, drain: pd.DataFrame) -> go.Figure:
    """Plot each head's attention to position 0 and the first token's relative value norm, per layer."""
    rows, values = checked(mass), checked(drain) if len(drain) else drain
    titles = ["attention to the first token", "norm of its value"]
    figure = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.36)
    heads = rows[rows["control"].isna()]
    look = colour(str(heads["architecture"].iloc[0]))
    figure.add_scatter(
        x=heads["layer"], y=heads["value"], mode="markers", name="a head", marker={"color": look, "size": 6},
        customdata=heads["head"], hovertemplate="layer %{x}, head %{customdata}: %{y:.3f}<extra></extra>", row=1, col=1,
    )  # fmt: skip
    even = rows[rows["control"] == "uniform_causal"].groupby("layer")["value"].mean()
    if even.nunique() == 1:
        figure.add_hline(y=float(even.iloc[0]), line={"dash": "dot", "color": GREY}, row=1, col=1)
    elif len(even):  # windows differ by layer
        figure.add_scatter(x=even.index, y=even, mode="lines", line={"dash": "dot", "color": GREY}, row=1, col=1)
    if len(values):
        norms = values[values["control"].isna()].sort_values("layer")
        figure.add_scatter(
            x=norms["layer"], y=norms["value"], mode="lines+markers", name="first token's value", line={"color": look},
            error_y={"array": norms["se"], "color": GREY, "thickness": 1}, row=1, col=2,
            hovertemplate="layer %{x}: %{y:.3f}<extra></extra>",
        )  # fmt: skip
        figure.add_hline(y=1.0, line={"dash": "dot", "color": GREY}, row=1, col=2)
    figure.update_xaxes(title_text="layer", dtick=whole_ticks(heads["layer"]))
    figure.update_yaxes(title_text=axis_title("share of attention", "higher: sink"), rangemode="tozero", row=1, col=1)
    figure.update_yaxes(
        title_text=axis_title("ratio to the median", "lower: drained"), rangemode="tozero", row=1, col=2
    )
    figure.update_layout(showlegend=False)
    whisker = "whisker: standard error" if len(values) and values["se"].notna().any() else ""
    under = subtitle(rows, "dot: one head; dotted: uniform attention; ratio 1, no drain", whisker)
    return at_least(dressed(figure, "Sinks and their values", under, 300), 420)


STATUSES = {
    "supported": ("", "supported", "#009E73"), "refuted": ("x", "refuted", "#D55E00"),
    "unresolved": ("/", "unresolved: no clear difference, or too few seeds", "#C18A00"),
    "gated": (".", "not tested: a condition is not met", "rgba(128,128,128,0.45)"),
    "not_checkable": ("", "not checkable with these runs", "rgba(128,128,128,0.18)"),
}  # fmt: skip
"""Hatching, words and colour: the emptiest is the palest, by day and by night."""

ROW_PX = 28  # a topic


def verdicts_figure(verdicts: Sequence[tuple[str, str, str]], under: str = "") -> go.Figure:
    """Draw claims (topic, name, status) as cells of one bar per topic; custom data: the claim in words and its name."""
    figure, topics = go.Figure(), list(dict.fromkeys(topic for topic, _, _ in verdicts))
    for status, (mark, status_name, look) in STATUSES.items():
        mine = [(topic, name) for topic, name, of in verdicts if of == status]
        figure.add_bar(
            y=[topic for topic, _ in mine], x=[1] * len(mine), orientation="h", name=status_name,
            marker={"color": look, "line": {"color": GREY, "width": 1}, "pattern": {"shape": mark, "solidity": 0.25}},
            customdata=[[words(name), name] for _, name in mine], hovertemplate=f"%{{customdata[0]}}: {status_name}<extra></extra>",
        )  # fmt: skip
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title_text="number of claims", dtick=1)
    figure.update_yaxes(categoryorder="array", categoryarray=topics[::-1], showgrid=False)
    figure = dressed(figure, "Verdicts on published claims", wrapped(under, 125), 100 + ROW_PX * len(topics))
    below = {"orientation": "h", "x": 0, "xref": "paper", "y": -54 / (ROW_PX * len(topics)), "yanchor": "top"}
    return figure.update_layout(legend={**below, "traceorder": "normal"}, margin_b=110)


def intervals(table: pd.DataFrame, title: str, under: str = "", *, adjusted: str = "") -> go.Figure:
    """Plot comparisons (comparison, value, low, high, unit), one panel per unit; those whose `verdict` is unresolved are hollow.

    `adjusted`: the tests over which the intervals are Holm-corrected, to the column `level` of the table.
    Whiskers are `low_adjusted` and `high_adjusted` if the table has them.
    """
    if "low_adjusted" in table:
        table = table.assign(low=table["low_adjusted"], high=table["high_adjusted"])
    units = list(dict.fromkeys(table["unit"].fillna(""))) if "unit" in table else [""]
    parts = [table[table["unit"].fillna("") == unit] if "unit" in table else table for unit in units]
    beyond = [
        beyond_range(u, p["value"], p["low"], p["high"], difference=True) for u, p in zip(units, parts, strict=True)
    ]
    figure = make_subplots(
        len(units), 1, row_heights=[len(part) for part in parts], vertical_spacing=min(0.3, 60 / (60 + 30 * len(table)))
    )
    unclear = (
        "not significant after Holm" if "verdict" in table else "not significant" if "significant" in table else ""
    )
    for i, (unit, part) in enumerate(zip(units, parts, strict=True), 1):
        value, low, high = (part[c].astype(float) for c in ("value", "low", "high"))
        between = [f"[{a:.3g}, {b:.3g}]" for a, b in zip(low, high, strict=True)]
        if "censored" in part:
            tests = zip(between, part["p_unadjusted"], part["censored"], strict=True)
            between = [f"log-rank p = {p:.2g}" if censored else text for text, p, censored in tests]
        unclear_rows = ~part.get("significant", value.notna()).astype(bool)
        hollow = part["verdict"] == "unresolved" if "verdict" in part else unclear_rows
        context = part["role"] == "context" if "role" in part else value.isna()
        for look, shown in ((colour(MINUS), ~context), (GREY, context)):
            if not shown.any():
                continue
            figure.add_scatter(
                x=value[shown], y=[markup.escape(with_signs(str(c))) for c in part.loc[shown, "comparison"]], mode="markers",
                showlegend=False,
                name="value" if look != GREY else "context",
                marker={"color": look, "size": 9, "symbol": ["circle-open" if h else "circle" for h in hollow[shown]]},
                error_x={"array": (high - value)[shown], "arrayminus": (value - low)[shown], "color": look, "thickness": 1.6},
                customdata=pd.Series(between, part.index)[shown].tolist(), hovertemplate="%{y}<br>%{x:.3g} %{customdata}<extra></extra>",
                row=i, col=1,
            )  # fmt: skip
        figure.add_vline(x=0, line={"color": GREY, "dash": "dot"}, row=i, col=1)
        figure.update_xaxes(title_text=markup.escape(str(unit)) or "value", row=i, col=1)
        names = [markup.escape(with_signs(str(c))) for c in part["comparison"]]
        figure.update_yaxes(
            autorange="reversed", type="category", categoryorder="array", categoryarray=names, row=i, col=1
        )
    whisker = f"whisker: {confidence()} interval"
    if adjusted and "level" in table:  # of each row, as Holm's correction demands
        levels = list(dict.fromkeys(map(percent, sorted(table.loc[table["low"].notna(), "level"]))))
        ends = " to ".join(dict.fromkeys((*levels[:1], *levels[-1:])))
        whisker = f"whisker: {ends} interval{'s' * (len(levels) > 1)}, as Holm's correction over {adjusted} demands"
    whisker = whisker if table["low"].notna().any() else "no interval: these are no means over several seeds"
    if "censored" in table and table["censored"].any():
        by_test = "no whisker: some run did not reach its step, a log-rank test decides"
        whisker = f"{whisker}; {by_test}" if table["low"].notna().any() else by_test
    grey = "grey: not part of the verdict" if "role" in table and (table["role"] == "context").any() else ""
    caption = wrapped(
        "; ".join(s for s in (under, unclear and f"hollow: {unclear}", whisker, max(beyond), grey) if s), 125
    )
    return dressed(figure, title, caption, 40 + 70 * len(units) + 26 * len(table))


def against_loss_figure(frame: pd.DataFrame) -> go.Figure:
    """Plot each checkpoint as a point, one panel per quantity; a line joins the checkpoints of a run.

    Models that differ only in progress lie on one curve; the distance at equal loss is an effect of the architecture.
    """
    quantities = list(dict.fromkeys(frame["quantity"]))
    figure = make_subplots(1, len(quantities), subplot_titles=quantities, horizontal_spacing=0.27 / len(quantities))
    series = ordered(frame["architecture"])
    for i, quantity in enumerate(quantities):
        where = {"row": 1, "col": i + 1}
        mine = frame[frame["quantity"] == quantity].sort_values(["run", "step"])
        for architecture in ordered(mine["architecture"]):
            name, look = label(architecture), colour(architecture, series)
            figure.add_scatter(
                x=[None], y=[None], mode="markers", name=name, marker={"color": look, "size": 9}, legendgroup=name,
                showlegend=i == 0, hoverinfo="skip", **where,
            )  # fmt: skip
            for _, rows in mine[mine["architecture"] == architecture].groupby("run"):
                symbols = ["circle-open" if step == 0 else "circle" for step in rows["step"]]
                figure.add_scatter(
                    x=rows["loss"].astype(float), y=rows["value"].astype(float), mode="lines+markers", name=name,
                    line={"color": pale(architecture, 0.35, series), "width": 1},
                    marker={"color": look, "size": [6] * (len(rows) - 1) + [10], "symbol": symbols},
                    legendgroup=name, showlegend=False, customdata=rows[["seed", "step"]].astype(str),
                    hovertemplate=f"{name}, seed %{{customdata[0]}}, step %{{customdata[1]}}<br>loss %{{x:.3f}}: %{{y:.3g}}"
                    "<extra></extra>", **where,
                )  # fmt: skip
        figure.update_yaxes(title_text=axis_title(str(mine["unit"].iloc[0]), ""), **where)
        figure.update_xaxes(title_text="validation loss (nats), falling", autorange="reversed", **where)
    seeds = frame.groupby("architecture")["seed"].nunique()
    under = (
        f"{frame['run'].nunique()} runs, {seeds.min()}{f' to {seeds.max()}' if seeds.max() > seeds.min() else ''} seeds per model; "
        "each point a checkpoint, training goes to the right; open: random init, large: the last; "
        "points on one curve differ only in progress, a distance at equal loss is the architecture's"
    )
    return dressed(figure, "Concentration and similarity against the loss", wrapped(under, 125), 330)
