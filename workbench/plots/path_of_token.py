"""Diagram of a token's path: parts on both sides of its value, with widths in proportion to their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.heat_maps import safe
from workbench.plots.style import at_least, dressed, true_minus, wrapped

THICK, PITCH, LINE = 190.0, 21.0, 24.0
"""Pixels: of all strands together, between two labels of one line, of the line of the value's name and of the line of headings."""
LEAST = 340  # pixels of the whole, in which the words of both sides have their room
LEFT, CENTRE, RIGHT, BAR = 0.33, 0.44, 0.555, 0.014
"""Where the bars stand, from 0 to 1, and how wide they are."""
HEADS = ("#C18A00", "#009E73", "#CC79A7", "#0497FC", "#6F7F8F", "#B5651D")
"""Colours of heads in turn: Okabe and Ito's and two of the registry's, without the Transformer's and ResFormer's."""


@dataclass(frozen=True, kw_only=True)
class Strand:
    """One band of the diagram: name, size (in the unit of its side), colour, and its numbers in words."""

    name: str
    size: float
    says: str
    colour: str


@dataclass(frozen=True, kw_only=True)
class DrawnPath:
    """One model's path: a heading and bands on both sides of the value."""

    title: str
    centre: str
    colour: str
    sources: tuple[str, list[Strand]]
    readers: tuple[str, list[Strand]]


def value_path(paths: Sequence[DrawnPath], title: str, under: str = "") -> go.Figure:
    """Draw paths below each other: parts of the score at the left, then the value, then its effect.

    Widths are shares of their side. Negative bands are hatched.
    """
    sides = ((sum(_slots(p.sources[1], PITCH)), sum(_slots(p.readers[1], 2 * PITCH))) for p in paths)
    heights = [2 * LINE + max(THICK, *both) for both in sides]
    titles = [safe(path.title) for path in paths] if len(paths) > 1 else None
    gap = 40 / (sum(heights) + 40 * (len(paths) - 1))
    figure = make_subplots(len(paths), 1, row_heights=heights, vertical_spacing=gap, subplot_titles=titles)
    for row, (path, height) in enumerate(zip(paths, heights, strict=True), 1):
        where = {"row": row, "col": 1}
        _side(figure, path, path.sources, height, where, left=True)
        _side(figure, path, path.readers, height, where, left=False)
        top = LINE + (height - THICK) / 2
        _box(figure, (CENTRE, CENTRE + BAR), (top, top + THICK), path.colour, "", where)
        _text(figure, 0.5, LINE / 2, [f"<b>{path.centre}</b>"], "middle center", path.title, where)
        figure.update_xaxes(range=[0, 1], visible=False, fixedrange=True, **where)
        figure.update_yaxes(range=[height, 0], visible=False, fixedrange=True, **where)
    figure.update_layout(showlegend=False)
    figure = dressed(figure, title, wrapped(under, 125), int(sum(heights) + 40 * (len(paths) - 1)))
    figure.layout.margin.l = figure.layout.margin.r = figure.layout.margin.b = 12
    return at_least(figure, LEAST)


def _slots(strands: Sequence[Strand], pitch: float) -> list[float]:
    """Heights of the bands in their column (pixels)."""
    whole = sum(abs(s.size) for s in strands) or 1.0
    return [max(pitch, abs(s.size) / whole * THICK + 4) for s in strands]


def _side(
    figure: go.Figure, path: DrawnPath, bands: tuple[str, list[Strand]], height: float, where: dict[str, int], *, left: bool
) -> None:  # fmt: skip
    """Draw the bands of one side, spaced so that labels do not overlap, and join them to the value."""
    heading, strands = bands
    slots = _slots(strands, PITCH if left else 2 * PITCH)
    whole = sum(abs(s.size) for s in strands) or 1.0
    y, joint = LINE + (height - sum(slots)) / 2, LINE + (height - THICK) / 2
    bar = (LEFT - BAR, LEFT) if left else (RIGHT, RIGHT + BAR)
    x, side = (bar[0] - 0.008, "middle left") if left else (bar[1] + 0.008, "middle right")
    _text(figure, x, 1.5 * LINE, [f"<i>{heading}</i>"], side, "", where)
    labels, places = [], []
    for slot, strand in zip(slots, strands, strict=True):
        thick = abs(strand.size) / whole * THICK
        top, says = y + (slot - thick) / 2, f"{safe(strand.name)}:{' ' if left else '<br>'}{strand.says}"
        begin, end = ((LEFT, top), (CENTRE, joint)) if left else ((CENTRE + BAR, joint), (RIGHT, top))
        t = np.linspace(0.0, 1.0, 24)  # along a curved band from one bar to the next
        band_x, band_y = begin[0] + (end[0] - begin[0]) * t, begin[1] + (end[1] - begin[1]) * (3 * t**2 - 2 * t**3)
        hatch: dict[str, Any] = {"fillpattern": {"shape": "/", "size": 6, "solidity": 0.4}} if strand.size < 0 else {}
        _area(
            figure, [*band_x, *band_x[::-1]], [*band_y, *(band_y + thick)[::-1]], strand.colour, says, where,
            opacity=0.8 if hatch else 0.45, line={"width": 0, "simplify": False}, **hatch,
        )  # fmt: skip
        _box(figure, bar, (top, top + thick), strand.colour, says, where)
        labels.append(says)
        places.append(y + slot / 2)
        y, joint = y + slot, joint + thick
    _text(figure, x, places, labels, side, f"{path.title}: {heading}", where)


def _box(
    figure: go.Figure, x: tuple[float, float], y: tuple[float, float], look: str, says: str, where: dict[str, int]
) -> None:
    line = {"color": "rgba(255,255,255,0.6)", "width": 0.5}
    _area(figure, [x[0], x[1], x[1], x[0]], [y[0], y[0], y[1], y[1]], look, says, where, line=line)


def _area(
    figure: go.Figure,
    x: Sequence[float],
    y: Sequence[float],
    look: str,
    says: str,
    where: dict[str, int],
    **options: Any,
) -> None:
    figure.add_scatter(
        x=list(x), y=list(y), mode="lines", fill="toself", fillcolor=look, hoveron="fills", text=true_minus(says),
        hoverinfo="text" if says else "skip", showlegend=False, **options, **where,
    )  # fmt: skip


def _text(
    figure: go.Figure,
    x: float,
    y: float | Sequence[float],
    words: Sequence[str],
    side: str,
    name: str,
    where: dict[str, int],
) -> None:
    places = [y] if isinstance(y, int | float) else list(y)
    figure.add_scatter(
        x=[x] * len(words), y=places, text=[*map(true_minus, words)], mode="text", textposition=side, textfont_size=12, name=name,
        hoverinfo="none", showlegend=False, cliponaxis=False, **where,
    )  # fmt: skip
