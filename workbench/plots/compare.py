"""Comparisons A, B and A - B, with the difference on its own scale, and animations over steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from workbench.errors import WorkbenchError
from workbench.plots.records import checked, plot
from workbench.plots.style import DIVERGING, MINUS

AXES = ("metric", "data", "T", "site", "part", "layer", "source", "head", "position", "index", "variant", "unit")


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

    `more_seeds`: see `difference`. Raises `WorkbenchError` if there are no records.
    """
    full = [p for p in parts if len(p)]
    if len(full) < 2:
        return plot(pd.concat(full) if full else parts[0], **options)
    minus = difference(full[0], full[1], more_seeds)
    if minus.empty:
        return plot(pd.concat(full, ignore_index=True), **options)
    names = full[0]["metric"].unique()
    title = options.pop("title", "") or (str(names[0]).replace("_", " ").capitalize() if len(names) == 1 else "")
    return plot(pd.concat([*full, minus], ignore_index=True), title=title, **options)


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
    for label, figure in figures:
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
        frames.append(go.Frame(data=[*present, *absent], name=label, traces=list(range(most)), layout=layout))
    base.frames = frames
    _hold(base, [f for _, f in figures])
    play = {"frame": {"duration": 500, "redraw": True}, "transition": {"duration": 0}, "fromcurrent": True}
    stop = {"frame": {"duration": 0, "redraw": False}, "mode": "immediate"}
    at = {"frame": {"duration": 0, "redraw": True}, "mode": "immediate", "transition": {"duration": 0}}
    steps = [{"method": "animate", "label": label, "args": [[label], at]} for label, _ in figures]
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
    for name in {scale for trace in base.data if (scale := _scale_of(base, trace))}:
        axis, ends = base.layout[name], [e for f in figures for e in _ends(f, name)]
        finite = np.array([e for e in ends if np.isfinite(e)])
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


def _scale_of(figure: go.Figure, trace: Any) -> str | None:
    """Name of the numeric axis of a curve or bar, or of the axis it matches; None for other traces."""
    if trace.type not in ("scatter", "bar") or (trace.type == "scatter" and trace.mode == "text"):
        return None
    letter = "x" if trace.orientation == "h" else "y"
    axis = str(trace[f"{letter}axis"] or letter)
    axis = str(figure.layout[f"{letter}axis{axis[1:]}"].matches or axis)
    numbers = trace[letter]
    is_category = figure.layout[f"{letter}axis{axis[1:]}"].type == "category"
    if is_category or numbers is None or not len(numbers) or any(isinstance(v, str) for v in numbers):
        return None
    return f"{letter}axis{axis[1:]}"


def _ends(figure: go.Figure, name: str) -> Iterator[float]:
    """Yield all values drawn along an axis: points, error bars, bars from zero and stacked sums."""
    stacks: dict[Any, float] = {}
    for trace in figure.data:
        if _scale_of(figure, trace) != name:
            continue
        letter = name[0]
        values, error = np.asarray(trace[letter], dtype=float), trace[f"error_{letter}"]
        up = np.zeros(len(values)) if error.array is None else np.nan_to_num(np.asarray(error.array, dtype=float))
        down = up if error.arrayminus is None else np.nan_to_num(np.asarray(error.arrayminus, dtype=float))
        if trace.type == "bar":
            yield 0.0
            if figure.layout.barmode in ("stack", "relative"):
                places = trace["y" if letter == "x" else "x"]
                for place, value in zip(places if places is not None else range(len(values)), values, strict=True):
                    key = trace.xaxis, trace.yaxis, trace.offsetgroup, place, value >= 0
                    stacks[key] = stacks.get(key, 0.0) + float(np.nan_to_num(value))
        yield from values + up
        yield from values - down
    yield from stacks.values()
