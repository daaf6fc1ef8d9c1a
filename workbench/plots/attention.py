"""Figures of one prompt's attention: small pictures of all heads, received attention, one query's row, numbers per head."""

from __future__ import annotations

import html as markup
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from workbench.plots.grids import MAX_TICKS, safe, unique
from workbench.plots.style import DIVERGING, GREY, MINUS, SEQUENTIAL, colour, dressed, label

GAP = 0.06
"""Between two pictures, as a share of one."""
FLOOR = 1e-3
"""Received attention below this, in queries, is drawn as this."""


def tiles(
    parts: Sequence[tuple[str, np.ndarray]], top: float, title: str = "Attention of all heads", *,
    root: bool = False, minus: bool = True
) -> go.Figure:  # fmt: skip
    """Small attention maps [layer, head, query, key] of one model, or of two on one scale with A - B.

    `top`: value of the brightest colour; `root`: colour by the square root; `minus`: draw A - B.
    """
    shown = list(parts)
    if len(parts) == 2 and minus:
        shown.append((MINUS, parts[0][1] - parts[1][1]))
    figure = make_subplots(
        1, len(shown), subplot_titles=[markup.escape(name) for name, _ in shown] if len(shown) > 1 else None,
        horizontal_spacing=0.06,
    )  # fmt: skip
    for i, (name, found) in enumerate(shown):
        L, H = found.shape[:2]
        z, y, x = _montage(found)
        figure.add_heatmap(
            z=z, x=x, y=y, name=name, coloraxis="coloraxis2" if i == 2 else "coloraxis", hoverongaps=False,
            hovertemplate=f"layer and head: %{{y:.1f}}, %{{x:.1f}}<br>%{{z:.3f}}<extra>{markup.escape(name)}</extra>",
            row=1, col=i + 1,
        )  # fmt: skip
        every = max(1, -(-max(L, H) // MAX_TICKS))
        for update, count, says in (
            (figure.update_xaxes, H, "head"),
            (figure.update_yaxes, L, "layer" if not i else ""),
        ):
            named = list(range(0, count, every))
            update(title_text=says, tickvals=named, ticktext=[str(n) for n in named], showgrid=False, zeroline=False,
                   row=1, col=i + 1)  # fmt: skip
    L, H, rows, _ = max((f for _, f in parts), key=lambda f: f.shape[0]).shape
    under = f"each picture: queries downwards, keys to the right, in at most {rows} steps; brighter: more attention goes there"
    figure = dressed(figure, title, under, int(min(900, max(240, 760 / len(shown) * L / H))))
    figure.update_layout(coloraxis=_bar(SEQUENTIAL, 0.0, top, "attention", 1.01))
    if len(shown) == 3:
        limit = float(np.nanmax(np.abs(shown[2][1]))) or 1.0
        figure.update_layout(coloraxis2=_bar(DIVERGING, -limit, limit, MINUS, 1.13))
    return lifted(figure) if root else figure


def lifted(figure: go.Figure) -> go.Figure:
    """Colour by the square root so that small values show; the colour bar keeps the original numbers."""
    at = np.linspace(0.0, 1.0, 65)
    for name in [k for k in figure.layout if k.startswith("coloraxis")]:
        axis = figure.layout[name]
        both = axis.cmin < 0
        share = 0.5 + 0.5 * np.sign(at - 0.5) * np.sqrt(np.abs(2 * at - 1)) if both else np.sqrt(at)
        axis.colorscale = list(zip(at, sample_colorscale(DIVERGING if both else SEQUENTIAL, share), strict=True))
    return figure


def _montage(found: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All pictures as one map with blank gaps, layers upwards, and the places of its rows and columns in layers and heads."""
    L, H, rows, columns = found.shape
    room = np.full((L, H, rows + 1, columns + 1), np.nan, dtype=np.float32)
    room[:, :, :rows, :columns] = found
    z = room[:, :, ::-1].transpose(0, 2, 1, 3).reshape(L * (rows + 1), H * (columns + 1))
    return z, L - 1 - _places(L, rows)[::-1], _places(H, columns)


def _places(count: int, cells: int) -> np.ndarray:
    """Centres of the cells; picture n spans n - 1/2 to n + 1/2 and ends with the gap."""
    inside = (np.arange(cells) + 0.5) / cells * (1 - GAP) - 0.5
    return (np.arange(count)[:, None] + np.append(inside, 0.5 - GAP / 2)).ravel()


def _bar(scale: str, low: float, high: float, says: str, x: float) -> dict[str, object]:
    bar = {"title": {"text": says}, "thickness": 12, "x": x}
    return {"colorscale": scale, "cmin": low, "cmax": high, "colorbar": bar}


def received_figure(
    lines: Sequence[tuple[str, Sequence[str], np.ndarray, np.ndarray]], under: str, *, minus: bool = True
) -> go.Figure:
    """Attention received by each key, (series, key names, received, the same if spread evenly), on a logarithmic axis.

    Two models get a second panel, A - B, with its own axis.
    """
    both = minus and len(lines) == 2 and list(lines[0][1]) == list(lines[1][1])
    figure = make_subplots(2 if both else 1, 1, shared_xaxes=True, vertical_spacing=0.08)
    for (series, names, values, _), dash in zip(lines, ("solid", "dash"), strict=False):
        x = unique([safe(n) for n in names])
        _line(figure, 1, x, np.maximum(values, FLOOR), label(series), colour(series), dash)
    names, evenly = lines[0][1], lines[0][3]
    _line(figure, 1, unique([safe(n) for n in names]), evenly, "uniform attention", GREY, "dot")
    if both:
        x = unique([safe(n) for n in names])
        _line(figure, 2, x, lines[0][2] - lines[1][2], MINUS, colour(MINUS))
        figure.update_yaxes(title_text=MINUS, row=2, col=1)
    every = max(1, -(-len(names) // MAX_TICKS))
    figure.update_xaxes(tickvals=unique([safe(n) for n in names])[::every], type="category", tickangle=-90)
    figure.update_yaxes(title_text="queries per key", type="log", row=1, col=1)
    figure.update_xaxes(title_text="key token", row=2 if both else 1, col=1)
    caption = (
        f"in queries that attend to nothing else; higher: a token that many queries attend to; drawn from {FLOOR:g}"
    )
    return dressed(figure, "Received attention", f"{under}; {caption}", 440 if both else 300)


def _line(
    figure: go.Figure, row: int, x: Sequence[str], y: np.ndarray, name: str, paint: str, dash: str = "solid"
) -> None:
    figure.add_scatter(
        x=x, y=np.asarray(y, dtype=float), name=name, mode="lines", line={"color": paint, "dash": dash, "shape": "hvh"},
        row=row, col=1,
    )  # fmt: skip


def row(bars: Sequence[tuple[str, Sequence[str], np.ndarray]], under: str, *, minus: bool = True) -> go.Figure:
    """Attention of one query, (series, key names, weights); two models share a scale, with A - B below."""
    both = minus and len(bars) == 2 and list(bars[0][1]) == list(bars[1][1])
    figure = make_subplots(2 if both else 1, 1, shared_xaxes=True, vertical_spacing=0.08)
    for series, names, weights in bars:
        _bars(figure, 1, names, weights, label(series), colour(series))
    if both:
        _bars(figure, 2, bars[0][1], bars[0][2] - bars[1][2], MINUS, colour(MINUS))
        figure.update_yaxes(title_text=MINUS, row=2, col=1)
    names = unique([safe(n) for n in bars[0][1]])
    every = max(1, -(-len(names) // MAX_TICKS))
    figure.update_xaxes(tickvals=names[::every], type="category", tickangle=-90)
    figure.update_xaxes(title_text="key token", row=2 if both else 1, col=1)
    figure.update_yaxes(title_text="attention", rangemode="tozero", row=1, col=1)
    return dressed(figure, "Attention of one query", safe(under), 440 if both else 300)


def _bars(figure: go.Figure, at: int, names: Sequence[str], values: np.ndarray, name: str, paint: str) -> None:
    seen = np.isfinite(values)
    x = np.array(unique([safe(n) for n in names]), dtype=object)[seen]
    figure.add_bar(x=x, y=np.asarray(values, dtype=float)[seen], name=name, marker_color=paint, row=at, col=1)


def per_head(
    parts: Sequence[tuple[str, pd.DataFrame, Mapping[str, float]]], names: Mapping[str, str], under: str
) -> go.Figure:
    """A dot for each head over layers, one panel a statistic; (series, a row for each head, the same if spread evenly).

    Two models get a second row of panels, A - B by head.
    """
    both = len(parts) == 2
    figure = make_subplots(
        2 if both else 1, len(names), subplot_titles=list(names.values()), horizontal_spacing=0.06,
        vertical_spacing=0.14, shared_xaxes=True,
    )  # fmt: skip
    for column, name in enumerate(names, start=1):
        for i, (series, frame, evenly) in enumerate(parts):
            _dots(figure, 1, column, frame, frame[name], label(series), colour(series), (i - 0.5) * 0.16 if both else 0)
            if i == 0:
                figure.add_hline(y=evenly[name], line={"color": GREY, "dash": "dot", "width": 1}, row=1, col=column)
        if both:
            a, b = (frame.set_index(["layer", "head"])[name] for _, frame, _ in parts)
            minus = (a - b).dropna().reset_index()
            _dots(figure, 2, column, minus, minus[name], MINUS, colour(MINUS), 0)
            figure.add_hline(y=0, line={"color": GREY, "dash": "dot", "width": 1}, row=2, col=column)
        figure.update_xaxes(title_text="layer", dtick=max(1, len(set(parts[0][1]["layer"])) // 8), row=2 if both else 1,
                            col=column)  # fmt: skip
    figure.update_yaxes(rangemode="tozero", row=1)
    if both:
        figure.update_yaxes(title_text=MINUS, row=2, col=1)
    figure = dressed(figure, "Statistics per head", f"{under}; dotted: uniform attention", 420 if both else 260)
    figure.update_annotations(font_size=11)
    return figure


def _dots(
    figure: go.Figure, at: int, column: int, frame: pd.DataFrame, y: pd.Series, name: str, paint: str, shift: float
) -> None:
    figure.add_scatter(
        x=frame["layer"] + shift + (frame["head"] - frame["head"].mean()) * 0.3 / max(1, frame["head"].nunique()), y=y,
        mode="markers", marker={"color": paint, "size": 7, "opacity": 0.75}, name=name, showlegend=column == 1 and at == 1,
        legendgroup=name, text=[f"layer {n}, head {h}" for n, h in zip(frame["layer"], frame["head"], strict=True)],
        hovertemplate="%{text}<br>%{y:.4g}<extra></extra>", row=at, col=column,
    )  # fmt: skip
