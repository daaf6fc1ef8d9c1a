"""Comparisons A, B and A - B in panels or columns, with the difference on its own scale, and animations over steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.errors import WorkbenchError
from workbench.plots.record_figures import checked, form_of, name_sorted_heads, plot, sorted_heads, whole_ticks
from workbench.plots.style import (
    DIVERGING,
    GREY,
    MINUS,
    PANEL,
    at_least,
    axis_title,
    beyond_range,
    colour,
    dressed,
    label,
    ordered,
    symbol,
    true_minus,
    values_by_axis,
    wrapped,
)

AXES = ("metric", "data", "T", "site", "part", "layer", "source", "head", "position", "index", "variant", "unit")
KEPT = ("type", "dtick", "rangemode", "tickvals", "ticktext")  # of an axis beside another, with its title

DODGE = 0.1  # layers between the marks of two models


def difference(
    a: pd.DataFrame, b: pd.DataFrame, more_seeds: Sequence[tuple[pd.DataFrame, pd.DataFrame]] = ()
) -> pd.DataFrame:
    """Return records of A - B for all axes that both have; the standard error is that of independent means."""
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
    """Plot records of one subject, or of two and their difference in another panel; takes the options of `plot`."""
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

    table: architecture, layer, value, low_adjusted, high_adjusted (NaN without an interval), significant. `axis`: unit and reading
    direction. Custom data: the layer.
    """
    figure, series = go.Figure(), ordered(table["architecture"])
    for i, name in enumerate(series):
        rows = table[table["architecture"] == name].sort_values("layer")
        up, down = rows["high_adjusted"] - rows["value"], rows["value"] - rows["low_adjusted"]
        bars = {"array": up, "arrayminus": down, "thickness": 1.4, "width": 3}
        marks = [symbol(name, series) + ("" if clear else "-open") for clear in rows["significant"]]
        ends = [
            true_minus("" if np.isnan(low) else f" [{low:.3g}, {high:.3g}]")
            for low, high in rows[["low_adjusted", "high_adjusted"]].to_numpy(float)
        ]
        figure.add_scatter(
            x=rows["layer"] + DODGE * (i - (len(series) - 1) / 2), y=rows["value"], mode="lines+markers", name=label(name),
            line={"color": colour(name, series), "width": 1.5}, marker={"size": 8, "symbol": marks},
            error_y=bars if rows["low_adjusted"].notna().any() else None,
            customdata=[[int(n), end] for n, end in zip(rows["layer"], ends, strict=True)],
            hovertemplate=f"{label(name)}<br>layer %{{customdata[0]}}: %{{y:.3g}}%{{customdata[1]}}<extra></extra>",
        )  # fmt: skip
    figure.add_hline(y=0, line={"color": GREY, "dash": "dot"})
    figure.update_layout(showlegend=True)  # also of one model, which the title does not name
    figure.update_xaxes(title_text="layer", dtick=whole_ticks(table["layer"]))
    figure.update_yaxes(title_text=axis_title(*axis))
    note = beyond_range(axis[0], table["value"], table["low_adjusted"], table["high_adjusted"], difference=True)
    return dressed(figure, title, wrapped("; ".join(filter(None, (under, note))), 125), 330)


def beside(figures: Sequence[tuple[str, go.Figure]], title: str, under: str = "") -> go.Figure:
    """Figures (name, figure) in columns, their panels one below the other; panels of a row share their y scale.

    The column `A − B` has its own scales. The subtitle is the first figure's unless given.
    """
    axes_of = [sorted({t.yaxis or "y" for t in f.data}, key=lambda axis: int(axis[1:] or 1)) for _, f in figures]
    count = max(map(len, axes_of))
    panel_titles = [[str(a.text) for a in f.layout.annotations if a.xref == a.yref == "paper"] for _, f in figures]
    named = (max(panel_titles, key=len) + [""] * count)[:count] if count > 1 else [""]
    titles = [name for name, _ in figures]
    made = make_subplots(
        count, len(figures), subplot_titles=titles, horizontal_spacing=0.24 / len(figures), vertical_spacing=0.3 / count
    )
    for column, ((name, figure), axes) in enumerate(zip(figures, axes_of, strict=True), 1):
        known = {str(t.name) for t in made.data}
        for trace in figure.data:
            row = axes.index(trace.yaxis or "y") + 1
            legend = bool(trace.showlegend is not False and str(trace.name) not in known)
            made.add_trace(
                trace.update(xaxis=None, yaxis=None, legendgroup=str(trace.name), showlegend=legend), row, column
            )
        for row, axis in enumerate(axes, 1):
            for kind, update in (("x", made.update_xaxes), ("y", made.update_yaxes)):
                old = figure.layout[f"{kind}axis{axis[1:]}"]
                options = {key: old[key] for key in KEPT if old[key] is not None}
                if kind == "x" or column == 1:
                    options["title_text"] = old.title.text
                update(**options, row=row, col=column)
            if name != MINUS and column > 1:
                left = next(made.select_yaxes(row=row, col=1))
                made.update_yaxes(matches=left.plotly_name.replace("axis", ""), row=row, col=column)
            if column == 1 and named[row - 1]:
                units = (next(made.select_yaxes(row=r, col=1)).title.text for r in (row, 1))
                unit = next((unit for unit in units if unit), "").rpartition("</b><br>")[2]
                title_text = "<br>".join(t for t in (f"<b>{named[row - 1]}</b>", unit) if t)
                made.update_yaxes(title_text=title_text, row=row, col=1)
        for shape in figure.layout.shapes if name != MINUS else ():  # horizontal lines across a panel
            if shape.type == "line" and shape.yref in axes:
                made.add_hline(y=shape.y0, line=shape.line, row=axes.index(shape.yref) + 1, col=column)
    for row in range(1, count):
        made.update_xaxes(title_text="", row=row)  # the lowest one says it
    made.update_layout(barmode=figures[0][1].layout.barmode)
    height = max(220, int(figures[0][1].layout.height - figures[0][1].layout.margin.t)) if count == 1 else 230 * count
    under = under or str(figures[0][1].layout.title.subtitle.text or "")
    shown = [trace for name, figure in figures if name == MINUS for trace in figure.data]
    if any(t.error_y.array is not None or (t.type == "scatter" and t.fill == "toself") for t in shown):
        under = (
            f"{under.replace('<br>', ' ')}; {MINUS}: ± standard error as if the documents of A and B were independent"
        )
        under = wrapped(under, 125)
    made = dressed(made, title, under, height)
    made.update_layout(legend={"orientation": "h", "x": 0, "y": -0.22 / count, "yanchor": "top"}, margin_b=90)
    return at_least(made, PANEL * len(figures)) if len(figures) > 1 else made


def timelapse_figure(figures: Sequence[tuple[str, go.Figure]]) -> go.Figure:
    """Animate figures of one kind: a slider over their labels, play and stop buttons, fixed scales."""
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
        scales = [f.layout[name] for f in figures if name in f.layout and f.layout[name].cmin is not None]
        if not scales:
            continue
        low, high = min(c.cmin for c in scales), max(c.cmax for c in scales)
        both = go.layout.Coloraxis(colorscale=DIVERGING).colorscale
        signed = next((c for c in scales if c.colorscale == both), None)
        if signed is not None:  # white stays where it is, at zero or a baseline, in the frames of one side too
            white = (signed.cmin + signed.cmax) / 2
            reach = max(white - low, high - white)
            low, high = white - reach, white + reach
            base.layout[name].colorscale = signed.colorscale
        base.layout[name].update(cmin=low, cmax=high)
