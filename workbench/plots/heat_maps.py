"""Heat maps over two named axes (layer by position, layer by head, query by key), single or as A, B and A - B."""

from __future__ import annotations

import html as markup
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.colors import sample_colorscale, unlabel_rgb
from plotly.subplots import make_subplots

from workbench.errors import WorkbenchError
from workbench.plots.style import DIVERGING, MINUS, SEQUENTIAL, at_least, colour_axis, dressed, wrapped

MARKED = "#d55e00"  # a frame around what is chosen
CHOSEN = "chosen"  # its name, by which the dashboard scrolls there
AROUND, CELL, LETTER, ROW, SQUARE = 220, 26, 5, 17, 300
# pixels: around a map of words, width of a cell that has one, of a letter in it, height of the cell, of a square map beside another
MAX_TICKS, MAX_TEXTS, MAX_LETTERS, LINE, MAX_CELLS = 26, 32, 7, 120, 512 * 512
# ticks of a panel, columns with texts, letters of a text and of a row of them, cells


@dataclass(frozen=True)
class Grid:
    """Numbers [row, column] with row and column names; NaN is blank.

    `texts` are written into cells if there is room. `span` is the range of the colour scale. `mark` is a framed cell, or column (row None).
    """

    values: np.ndarray
    rows: Sequence[str]
    columns: Sequence[str]
    unit: str
    row_title: str
    column_title: str
    texts: np.ndarray | None = None
    span: tuple[float, float] | None = None
    upward: bool = True
    mark: tuple[int | None, int] | None = None
    square: bool = False

    def __post_init__(self) -> None:
        if self.values.shape != (len(self.rows), len(self.columns)):
            shape = f"{len(self.rows)} rows, {len(self.columns)} columns"
            raise WorkbenchError(f"a map {self.values.shape} does not fit {shape}")

    def minus(self, other: Grid) -> Grid:
        """Subtract another map; raises `WorkbenchError` if their axes differ."""
        if list(self.rows) != list(other.rows) or list(self.columns) != list(other.columns):
            raise WorkbenchError("A and B have different rows or columns here, so A − B is not drawn")
        return replace(self, values=self.values - other.values, texts=None, span=None)


def grids(parts: Sequence[tuple[str, Grid]], title: str, under: str = "", *, height: int = 420) -> go.Figure:
    """Draw one map, or A and B on one scale and, if their axes agree, A - B on another."""
    first = parts[0][1]
    if any(g.values.size > MAX_CELLS for _, g in parts):
        raise WorkbenchError(f"a map of {first.values.shape} cells is too large to draw; choose a window")
    shown, signed = list(parts), False
    if len(parts) == 2:
        try:
            shown.append((MINUS, first.minus(parts[1][1])))
            signed = True
        except WorkbenchError as reason:
            under = f"{under}; {reason}" if under else str(reason)
    wide = len(first.columns) > 2 * len(first.rows)  # such maps are read above each other
    rows, columns = (len(shown), 1) if wide else (1, len(shown))
    if wide:
        height = max(170 if len(shown) == 1 else 0, len(shown) * max(90, 24 * len(first.rows))) + 70 * len(shown)
    elif first.texts is not None:
        height = max(height, ROW * len(first.rows))
    figure = make_subplots(
        rows, columns, subplot_titles=[markup.escape(t) for t, _ in shown] if len(shown) > 1 else None,
        horizontal_spacing=0.09 if len(shown) > 2 else 0.12, vertical_spacing=44 / height, shared_xaxes="all" if wide else False,
    )  # fmt: skip
    abreast = 1 if wide else len(shown)
    for i, (name, grid) in enumerate(shown):
        minus = signed and i == len(shown) - 1
        where = {"row": i + 1 if wide else 1, "col": 1 if wide else i + 1}
        last, scale = not wide or i == len(shown) - 1, "coloraxis2" if minus else "coloraxis"
        _add(figure, grid, name, where, scale, row_title=wide or i == 0, ticks=last, abreast=abreast)
    values = np.concatenate([g.values[np.isfinite(g.values)].ravel() for _, g in parts])
    low, high = first.span or ((float(values.min()), float(values.max())) if len(values) else (0.0, 1.0))
    both = low < 0 < high
    limit = max(abs(low), abs(high)) or 1.0
    span = first.span or ((-limit, limit) if both else (low, high if high > low else low + 1.0))
    scale = DIVERGING if both else SEQUENTIAL
    _write(figure, [grid for _, grid in shown], abreast, scale, span)
    figure = dressed(figure, title, wrapped(under, 125), height)
    figure.update_layout(coloraxis=colour_axis(scale, *span, markup.escape(first.unit)))
    if signed:  # one colour bar above the other: beside each other, titles and numbers would run into the next
        minus_values = shown[-1][1].values[np.isfinite(shown[-1][1].values)]
        limit = (float(np.abs(minus_values).max()) if len(minus_values) else 1.0) or 1.0
        figure.update_layout(coloraxis2=colour_axis(DIVERGING, -limit, limit, MINUS))
        halves = {"len": 0.5, "y": 1, "yanchor": "top"}, {"len": 0.5, "y": 0, "yanchor": "bottom"}
        figure.update_layout(coloraxis_colorbar=halves[0], coloraxis2_colorbar=halves[1])
    if first.square and len(shown) > 1:
        return at_least(figure, SQUARE * len(shown))
    written = 0 if first.texts is None else len(first.columns)
    wide_enough = max(CELL, LETTER * (_letters(first, abreast) + 1))
    return at_least(figure, AROUND + wide_enough * written) if 0 < written <= MAX_TEXTS else figure


def grid_table(parts: Sequence[tuple[str, Grid]], most: int = 100_000) -> pd.DataFrame:
    """Return the numbers of maps as rows, without blanks, at most `most`."""
    frames = []
    for name, grid in parts:
        row, column = np.nonzero(np.isfinite(grid.values))
        columns = {
            "model": name, grid.row_title: np.asarray(grid.rows, dtype=object)[row],
            grid.column_title: np.asarray(grid.columns, dtype=object)[column], grid.unit: grid.values[row, column],
        }  # fmt: skip
        if grid.texts is not None:
            columns["text"] = np.asarray(grid.texts, dtype=object)[row, column]
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True).head(most)


def _add(
    figure: go.Figure, grid: Grid, name: str, where: dict[str, int], colours: str, *, row_title: bool, ticks: bool,
    abreast: int,
) -> None:  # fmt: skip
    x, y = (unique([safe(t) for t in names]) for names in (grid.columns, grid.rows))
    hover = f"{grid.row_title} %{{y}}<br>{grid.column_title} %{{x}}<br>%{{z:.3g}} {markup.escape(grid.unit)}"
    texts = None if grid.texts is None else [[safe(t) for t in row] for row in grid.texts]
    figure.add_heatmap(
        z=grid.values.astype("float32"), x=x, y=y, name=name, coloraxis=colours, hoverongaps=False, customdata=texts,
        hovertemplate=hover + ("<br>%{customdata}" if texts else "") + "<extra></extra>", **where,
    )  # fmt: skip
    for update, names, title in (
        (figure.update_xaxes, x, grid.column_title if ticks else ""), (figure.update_yaxes, y, grid.row_title if row_title else ""),
    ):  # fmt: skip
        values = names[:: every(len(names), MAX_TICKS * (2 if abreast == 1 else 1))]
        update(title_text=title, type="category", showgrid=False, tickvals=values, tickfont_size=11, **where)
    figure.update_xaxes(tickangle=-90 if max(map(len, x)) > 3 else 0, showticklabels=ticks, **where)
    # plotly's own range leaves room beside cells that are words alone
    figure.update_xaxes(range=[-0.5, len(x) - 0.5], **where)
    figure.update_yaxes(range=[-0.5, len(y) - 0.5][:: 1 if grid.upward else -1], **where)
    if grid.square:
        across = next(figure.select_xaxes(**where)).plotly_name.replace("axis", "")
        figure.update_yaxes(scaleanchor=across, constrain="domain", **where)
        figure.update_xaxes(constrain="domain", **where)
    if grid.mark is not None:
        row, column = grid.mark
        low, high = (0, len(y) - 1) if row is None else (row, row)
        box = {"x0": column - 0.5, "x1": column + 0.5, "y0": low - 0.5, "y1": high + 0.5}
        figure.add_shape(type="rect", name=CHOSEN, line={"color": MARKED, "width": 2}, **box, **where)


def signed(values: np.ndarray) -> np.ndarray:
    """Write numbers with a sign for cells, the largest with three digits; 0 where they round to nothing beside it."""
    places = max(0, 2 - math.floor(math.log10(np.abs(values).max(initial=1e-12) or 1e-12)))
    # a cell has room for seven letters
    form = (lambda x: f"{x:+.{places}f}") if places < 5 else (lambda x: f"{x:+.1e}".replace("e-0", "e-"))
    return np.vectorize(lambda x: form(x).replace("-", "−") if round(float(x), places) else "0", otypes=[object])(
        values
    )


def _write(figure: go.Figure, shown: Sequence[Grid], abreast: int, scale: str, span: tuple[float, float]) -> None:
    """Write words into cells in black or white, whichever has more contrast (plotly's greys have too little), if there is room."""
    table = np.array([unlabel_rgb(c) for c in sample_colorscale(scale, 64)]) / 255
    linear = np.where(table <= 0.04045, table / 12.92, ((table + 0.055) / 1.055) ** 2.4)
    bright = linear @ (0.2126, 0.7152, 0.0722) > 0.179
    for trace, grid in zip(list(figure.data), shown, strict=True):
        if grid.texts is None or abreast * len(grid.columns) > MAX_TEXTS:
            continue
        share = np.nan_to_num((grid.values - span[0]) / (span[1] - span[0])).clip(0, 1)
        inks = np.where(bright[(63 * share).round().astype(int)], "black", "white")
        most, texts = _letters(grid, abreast), [[counted_spaces(str(t)) for t in row] for row in grid.texts]
        words = np.array(
            [[safe(t if len(t) <= most else f"{t[: most - 1]}…") for t in row] for row in texts], dtype=object
        )
        marked, known = '<span style="color:' + inks.astype(object) + '">' + words + "</span>", np.isfinite(grid.values)
        trace.update(text=np.where(known, marked, ""), texttemplate="%{text}", textfont_size=11)
        row, column = np.nonzero(~known)  # blank cells, whose words have the page's text colour
        figure.add_scatter(
            x=[trace.x[n] for n in column], y=[trace.y[n] for n in row], text=words[row, column], mode="text", textfont_size=11,
            hoverinfo="skip", showlegend=False, xaxis=trace.xaxis, yaxis=trace.yaxis,
        )  # fmt: skip


def _letters(grid: Grid, abreast: int) -> int:
    return max(3, min(MAX_LETTERS, LINE // (abreast * len(grid.columns))))


def every(count: int, most: int = MAX_TICKS) -> int:
    """Return how many places apart at most `most` ticks of `count` places are."""
    return max(1, -(-count // most))


def safe(text: object) -> str:
    """Escape text for a figure, with long runs of spaces counted; quotes stay, because plotly would show `&quot;`."""
    return markup.escape(counted_spaces(str(text)), quote=False)


def counted_spaces(token: str) -> str:
    """Return a token with the number of its spaces in place of four or more: `·×8`."""
    return re.sub("·{4,}", lambda run: f"·×{len(run[0])}", token)


def unique(names: Sequence[str]) -> list[str]:
    """Make names unique with zero-width spaces, because a category axis merges equal names."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, -1) + 1
        result.append(name + "\u200b" * seen[name])
    return result
