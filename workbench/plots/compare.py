"""Comparisons A, B and A - B, with the difference on its own scale, and animations over steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from workbench.errors import WorkbenchError
from workbench.plots.forms import whole_ticks
from workbench.plots.records import checked, form_of, name_sorted_heads, plot, sorted_heads
from workbench.plots.style import (
    DIVERGING,
    GREY,
    MINUS,
    axis_title,
    colour,
    dressed,
    label,
    ordered,
    symbol,
    values_by_axis,
)

AXES = ("metric", "data", "T", "site", "part", "layer", "source", "head", "position", "index", "variant", "unit")

DODGE = 0.1  # layers between the marks of two models


def difference(
    a: pd.DataFrame, b: pd.DataFrame, more_seeds: Sequence[tuple[pd.DataFrame, pd.DataFrame]] = ()
) -> pd.DataFrame:
    """Return records of A - B for all axes that both have, without controls and random init.

    `more_seeds`: pairs of the same two models with other seeds. The standard error assumes independent means, so it is too
    wide if both saw the same documents.
    """
    differences = []
    for i, pair in enumerate([(a, b), *more_seeds]):
        last = []
        for frame in map(checked, pair):
            rows = frame[frame["control"].isna()]
            last.append(rows[rows["step"].isna() | (rows["step"] == rows["step"].max())].reset_index(drop=True))
        differences.append(subtracted(last[0], last[1], AXES, "above 0: higher in A").assign(run=f"{MINUS}, pair {i}"))
    return pd.concat(differences, ignore_index=True)


def subtracted(a: pd.DataFrame, b: pd.DataFrame, keys: Sequence[str], reading: str) -> pd.DataFrame:
    """Subtract rows of B from rows of A with equal keys; the standard error assumes independent means."""
    keyed = [f.assign(**{c: f[c].astype("str").fillna("") for c in keys}) for f in (a, b)]
    both = keyed[0].reset_index(names="row").merge(keyed[1], on=list(keys), suffixes=("", "_b"))
    rows = a.loc[both["row"]].reset_index(drop=True)
    return rows.assign(
        value=both["value"] - both["value_b"], se=np.sqrt(both["se"] ** 2 + both["se_b"] ** 2), architecture=MINUS,
        run=MINUS, unit=rows["unit"].astype("str").fillna("") + f", {MINUS}", provenance=json.dumps({"reading": reading}),
    )  # fmt: skip


def compared(
    parts: Sequence[pd.DataFrame], more_seeds: Sequence[tuple[pd.DataFrame, pd.DataFrame]] = (), **options: Any
) -> go.Figure:
    """Plot records of one subject, or of two and their difference in another panel; takes the options of `plot`.

    `more_seeds`: see `difference`. Heads of different runs are sorted by value first. Raises `WorkbenchError` without records.
    """
    full = [p for p in parts if len(p)]
    if len(full) < 2:
        return plot(pd.concat(full) if full else parts[0], **options)
    runs = [set(part["run"].dropna()) for part in full]
    sort = runs[0] != runs[1] and (options.get("form") or form_of(checked(full[0]))) == "heads"
    if sort:
        full = [sorted_heads(part) for part in full]
        more_seeds = [(sorted_heads(a), sorted_heads(b)) for a, b in more_seeds]
    minus = difference(full[0], full[1], more_seeds)
    if minus.empty:
        return plot(pd.concat(full, ignore_index=True), **options)
    names = full[0]["metric"].unique()
    title = options.pop("title", "") or (str(names[0]).replace("_", " ").capitalize() if len(names) == 1 else "")
    figure = plot(pd.concat([*full, minus], ignore_index=True), title=title, **options)
    if sort:
        name_sorted_heads(figure)
    return figure


def layer_differences(table: pd.DataFrame, title: str, under: str, axis: tuple[str, str]) -> go.Figure:
    """Plot paired differences over layers, a line for each architecture, with their intervals; hollow if not `significant`.

    table: architecture, layer, value, low, high (NaN without an interval), significant. `axis`: unit and reading direction.
    Custom data: the layer.
    """
    figure, series = go.Figure(), ordered(table["architecture"])
    for i, name in enumerate(series):
        rows = table[table["architecture"] == name].sort_values("layer")
        bars = {
            "array": rows["high"] - rows["value"],
            "arrayminus": rows["value"] - rows["low"],
            "thickness": 1.4,
            "width": 3,
        }
        marks = [symbol(name, series) + ("" if clear else "-open") for clear in rows["significant"]]
        figure.add_scatter(
            x=rows["layer"] + DODGE * (i - (len(series) - 1) / 2), y=rows["value"], mode="lines+markers", name=label(name),
            line={"color": colour(name, series), "width": 1}, marker={"size": 8, "symbol": marks},
            error_y=bars if rows["low"].notna().any() else None, customdata=[[int(n)] for n in rows["layer"]],
            hovertemplate=f"{label(name)}<br>layer %{{customdata[0]}}: %{{y:.3g}}<extra></extra>",
        )  # fmt: skip
    figure.add_hline(y=0, line={"color": GREY, "dash": "dot"})
    figure.update_layout(showlegend=True)  # also of one model, which the title does not name
    figure.update_xaxes(title_text="layer", dtick=whole_ticks(table["layer"]))
    figure.update_yaxes(title_text=axis_title(*axis))
    return dressed(figure, title, under, 330)


def timelapse_figure(figures: Sequence[tuple[str, go.Figure]]) -> go.Figure:
    """Animate figures of one kind: a slider over their labels, play and stop buttons, fixed scales.

    Raises `WorkbenchError` for no figures.
    """
    if not figures:
        raise WorkbenchError("no checkpoints to play over")
    most = max(len(f.data) for _, f in figures)
    stage = max(i for i, (_, f) in enumerate(figures) if len(f.data) == most)  # the last one with all curves
    base = go.Figure(figures[stage][1])
    frames = []
    for name, figure in figures:
        present = [trace.update(visible=True) for trace in go.Figure(figure).data]
        absent = [{"type": trace.type, "visible": False} for trace in base.data[len(present) :]]
        title = figure.layout.title
        layout: dict[str, Any] = {"title": {"text": title.text, "subtitle": {"text": title.subtitle.text}}}
        layout["shapes"] = [s.to_plotly_json() for s in figure.layout.shapes]
        if len(figure.layout.annotations) == len(base.layout.annotations):  # panels are named after their step
            layout["annotations"] = [a.to_plotly_json() for a in figure.layout.annotations]
        for axis in figure.select_yaxes():
            if axis.categoryarray is not None:  # rows that are other ones at each step
                layout[axis.plotly_name] = {k: axis[k] for k in ("categoryarray", "tickvals", "ticktext")}
        frames.append(go.Frame(data=[*present, *absent], name=name, traces=list(range(most)), layout=layout))
    base.frames = frames
    _hold(base, [f for _, f in figures])
    play = {"frame": {"duration": 500, "redraw": True}, "transition": {"duration": 0}, "fromcurrent": True}
    stop = {"frame": {"duration": 0, "redraw": False}, "mode": "immediate"}
    at = {"frame": {"duration": 0, "redraw": True}, "mode": "immediate", "transition": {"duration": 0}}
    steps = [{"method": "animate", "label": name, "args": [[name], at]} for name, _ in figures]
    margin, height = base.layout.margin, base.layout.height or 450
    under = 110
    return base.update_layout(
        updatemenus=[{
            "type": "buttons", "direction": "left", "x": 0, "xanchor": "left", "y": 0, "yanchor": "top", "showactive": False,
            "pad": {"t": 66, "r": 10},
            "buttons": [{"label": "▶ play", "method": "animate", "args": [None, play]},
                        {"label": "❚❚ stop", "method": "animate", "args": [[None], stop]}],
        }],
        sliders=[{"active": stage, "steps": steps, "x": 0.28, "len": 0.72, "y": 0, "yanchor": "top", "pad": {"t": 56},
                  "currentvalue": {"prefix": "", "visible": True}}],
        height=height + under, margin_b=(margin.b or 50) + under,
    )  # fmt: skip


def _hold(base: go.Figure, figures: Sequence[go.Figure]) -> None:
    """Fix axes and colour scales to the range of all frames."""
    values = [values_by_axis(figure) for figure in figures]
    for name in values_by_axis(base):
        axis = base.layout[name]
        finite = np.concatenate([of.get(name, np.zeros(0)) for of in values])
        if axis.type == "log":  # whose range is in powers of ten
            finite = np.log10(finite[finite > 0])
        fixed = [f.layout[name].range for f in figures if name in f.layout and f.layout[name].range is not None]
        if fixed:
            axis.range = [min(r[0] for r in fixed), max(r[1] for r in fixed)]
        elif len(finite):
            room = 0.05 * (float(finite.max() - finite.min()) or 1.0)
            axis.range = [float(finite.min()) - room, float(finite.max()) + room]
    for name in [k for k in base.layout if k.startswith("coloraxis")]:
        found = [f.layout[name] for f in figures if name in f.layout and f.layout[name].cmin is not None]
        if not found:
            continue
        low, high = min(c.cmin for c in found), max(c.cmax for c in found)
        both = go.layout.Coloraxis(colorscale=DIVERGING).colorscale
        signed = next((c for c in found if c.colorscale == both), None)
        if signed is not None:  # white stays where it is, at zero or a baseline, in the frames of one side too
            white = (signed.cmin + signed.cmax) / 2
            reach = max(white - low, high - white)
            low, high = white - reach, white + reach
            base.layout[name].colorscale = signed.colorscale
        base.layout[name].update(cmin=low, cmax=high)
