"""Figures of one make side by side: A, B and A - B in columns, the first two on shared scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.style import MINUS, PANEL, at_least, dressed, wrapped

KEPT = ("type", "dtick", "rangemode", "tickvals", "ticktext")  # of an axis, beside its title


def beside(figures: Sequence[tuple[str, go.Figure]], title: str, under: str = "") -> go.Figure:
    """Figures (name, figure) in columns, their panels one below the other; panels of a row share their y scale.

    Panel titles are at the left of their rows. The column `A − B` has its own scales. The subtitle is the
    first figure's unless given.
    """
    panels = [
        sorted({trace.yaxis or "y" for trace in figure.data}, key=lambda axis: int(axis[1:] or 1))
        for _, figure in figures
    ]
    count = max(map(len, panels))
    first = max((figure for _, figure in figures), key=lambda f: len(_titles(f)))
    named = (_titles(first) + [""] * count)[:count] if count > 1 else [""]
    titles = [name for name, _ in figures]
    made = make_subplots(
        count, len(figures), subplot_titles=titles, horizontal_spacing=0.24 / len(figures), vertical_spacing=0.3 / count
    )
    for column, ((name, figure), axes) in enumerate(zip(figures, panels, strict=True), 1):
        known = {str(t.name) for t in made.data}
        for trace in figure.data:
            row = axes.index(trace.yaxis or "y") + 1
            options = {"showlegend": bool(trace.showlegend is not False and str(trace.name) not in known)}
            made.add_trace(trace.update(xaxis=None, yaxis=None, legendgroup=str(trace.name), **options), row, column)
        for row, axis in enumerate(axes, 1):
            _same_axes(made, figure, axis, row, column, shared=name != MINUS and column > 1)
            if column == 1 and named[row - 1]:
                units = (next(made.select_yaxes(row=r, col=1)).title.text for r in (row, 1))
                old = next((unit for unit in units if unit), "").rpartition("</b><br>")[2]
                made.update_yaxes(
                    title_text="<br>".join(t for t in (f"<b>{named[row - 1]}</b>", old) if t), row=row, col=1
                )
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
        under = wrapped(f"{under.replace('<br>', ' ')}; {MINUS}: ± standard error of independent means", 125)
    made = dressed(made, title, under, height)
    made.update_layout(legend={"orientation": "h", "x": 0, "y": -0.22 / count, "yanchor": "top"}, margin_b=90)
    return at_least(made, PANEL * len(figures)) if len(figures) > 1 else made


def _titles(figure: go.Figure) -> list[str]:
    return [str(a.text) for a in figure.layout.annotations if a.xref == "paper" and a.yref == "paper"]


def _same_axes(made: go.Figure, figure: go.Figure, axis: str, row: int, column: int, *, shared: bool) -> None:
    number = axis[1:]
    for kind, update in (("x", made.update_xaxes), ("y", made.update_yaxes)):
        old = figure.layout[f"{kind}axis{number}"]
        options: dict[str, Any] = {key: old[key] for key in KEPT if old[key] is not None}
        if kind == "x" or column == 1:
            options["title_text"] = old.title.text
        update(**options, row=row, col=column)
    if shared:
        left = next(made.select_yaxes(row=row, col=1))
        made.update_yaxes(matches=left.plotly_name.replace("axis", ""), row=row, col=column)
