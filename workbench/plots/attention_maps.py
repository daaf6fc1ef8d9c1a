"""Figures of one prompt: attention of all heads or of one, received attention, one query's row, numbers per head, next tokens."""

from __future__ import annotations

import html as markup
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from workbench.errors import WorkbenchError
from workbench.plots.heat_maps import counted_spaces, every, safe, unique
from workbench.plots.style import (
    BARS,
    DIVERGING,
    GREY,
    MINUS,
    SEQUENTIAL,
    at_least,
    colour,
    colour_axis,
    dressed,
    label,
)

MAP = 330  # pixels that a map beside another needs
GAP = 0.06
"""Between two pictures, as a share of one."""
FLOOR = 1e-3
"""Received attention below this, in queries, is drawn as this."""


def tiles(
    parts: Sequence[tuple[str, np.ndarray]], top: float, title: str = "Attention of all heads", *,
    root: bool = False, minus: bool = True
) -> go.Figure:  # fmt: skip
    """Small attention maps [layer, head, query, key] of one model, or of two with A - B (`minus`).

    `top` is the value of the brightest colour; `root`: colour by the square root.
    """
    shown = list(parts)
    if len(parts) == 2 and minus:
        shown.append((MINUS, parts[0][1] - parts[1][1]))
    figure = make_subplots(
        1, len(shown), subplot_titles=[markup.escape(name) for name, _ in shown] if len(shown) > 1 else None,
        horizontal_spacing=0.06,
    )  # fmt: skip
    for i, (name, maps) in enumerate(shown):
        L, H, rows, columns = maps.shape
        room = np.full((L, H, rows + 1, columns + 1), np.nan, dtype=np.float32)  # with gaps, layers upwards
        room[:, :, :rows, :columns] = maps
        figure.add_heatmap(
            z=room[:, :, ::-1].transpose(0, 2, 1, 3).reshape(L * (rows + 1), H * (columns + 1)), x=_places(H, columns),
            y=L - 1 - _places(L, rows)[::-1], name=name, coloraxis="coloraxis2" if i == 2 else "coloraxis", hoverongaps=False,
            hovertemplate=f"layer and head: %{{y:.1f}}, %{{x:.1f}}<br>%{{z:.3f}}<extra>{markup.escape(name)}</extra>",
            row=1, col=i + 1,
        )  # fmt: skip
        for update, count, axis in (
            (figure.update_xaxes, H, "head"), (figure.update_yaxes, L, "layer" if not i else ""),
        ):  # fmt: skip
            ticks = list(range(0, count, every(max(L, H))))
            update(title_text=axis, tickvals=ticks, ticktext=[str(n) for n in ticks], showgrid=False, zeroline=False,
                   row=1, col=i + 1)  # fmt: skip
    L, H, rows, _ = max((f for _, f in parts), key=lambda f: f.shape[0]).shape
    under = f"each picture: queries downwards, keys to the right, in at most {rows} steps; brighter: more attention goes there"
    figure = dressed(figure, title, under, int(min(900, max(240, 760 / len(shown) * L / H))))
    figure.update_layout(coloraxis=colour_axis(SEQUENTIAL, 0.0, top, "attention"))
    if len(shown) == 3:
        limit = float(np.nanmax(np.abs(shown[2][1]))) or 1.0
        figure.update_layout(coloraxis2=colour_axis(DIVERGING, -limit, limit, MINUS, x=1.13))
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


def _places(count: int, cells: int) -> np.ndarray:
    """Centres of the cells; picture n spans n - 1/2 to n + 1/2 and ends with the gap."""
    inside = (np.arange(cells) + 0.5) / cells * (1 - GAP) - 0.5
    return (np.arange(count)[:, None] + np.append(inside, 0.5 - GAP / 2)).ravel()


def received_figure(
    lines: Sequence[tuple[str, Sequence[str], np.ndarray, np.ndarray]], under: str, *, minus: bool = True
) -> go.Figure:
    """Attention received by each key, (series, key names, received, the same if spread evenly), on a logarithmic axis."""

    def draw(figure: go.Figure, row: int, x: Sequence[str], y: np.ndarray, name: str, paint: str, i: int) -> None:
        line = {"color": paint, "dash": ("solid", "dash", "dot")[i], "shape": "hvh"}
        y = np.asarray(np.maximum(y, FLOOR) if name != MINUS and i < 2 else y, dtype=float)
        figure.add_scatter(x=x, y=y, name=name, mode="lines", line=line, row=row, col=1)

    even = [("uniform attention", GREY, lines[0][3])]
    figure = _over_keys([line[:3] for line in lines], draw, minus, even)
    figure.update_yaxes(title_text="queries per key", type="log", row=1, col=1)
    caption = (
        f"in queries that attend to nothing else; higher: a token that many queries attend to; drawn from {FLOOR:g}"
    )
    return dressed(figure, "Received attention", f"{under}; {caption}", 440 if "yaxis2" in figure.layout else 300)


def row(bars: Sequence[tuple[str, Sequence[str], np.ndarray]], under: str, *, minus: bool = True) -> go.Figure:
    """Attention of one query, (series, key names, weights); two models share a scale, with A - B below."""

    def draw(figure: go.Figure, row: int, x: Sequence[str], y: np.ndarray, name: str, paint: str, _: int) -> None:
        seen = np.isfinite(y)
        bar_y = np.asarray(y, dtype=float)[seen]
        figure.add_bar(x=np.array(x, dtype=object)[seen], y=bar_y, name=name, marker_color=paint, row=row, col=1)

    figure = _over_keys(bars, draw, minus)
    figure.update_yaxes(title_text="attention", rangemode="tozero", row=1, col=1)
    return dressed(figure, "Attention of one query", safe(under), 440 if "yaxis2" in figure.layout else 300)


def _over_keys(
    parts: Sequence[tuple[str, Sequence[str], np.ndarray]], draw: Callable[..., None], minus: bool,
    even: Sequence[tuple[str, str, np.ndarray]] = (),
) -> go.Figure:  # fmt: skip
    """Draw numbers by key, and A - B in a second panel if two models have the same keys."""
    both = minus and len(parts) == 2 and list(parts[0][1]) == list(parts[1][1])
    figure = make_subplots(2 if both else 1, 1, shared_xaxes=True, vertical_spacing=0.08)
    for i, (series, names, values) in enumerate(parts):
        draw(figure, 1, unique([safe(n) for n in names]), values, label(series), colour(series), i)
    keys = unique([safe(n) for n in parts[0][1]])
    for name, paint, values in even:
        draw(figure, 1, keys, values, name, paint, 2)
    if both:
        draw(figure, 2, keys, parts[0][2] - parts[1][2], MINUS, colour(MINUS), 0)
        figure.update_yaxes(title_text=MINUS, row=2, col=1)
    figure.update_xaxes(tickvals=keys[:: every(len(keys))], type="category", tickangle=-90)
    figure.update_xaxes(title_text="key token", row=2 if both else 1, col=1)
    return figure


def per_head(
    parts: Sequence[tuple[str, pd.DataFrame, Mapping[str, float]]], names: Mapping[str, str], under: str
) -> go.Figure:
    """A dot for each head over layers, one panel a statistic; (series, a row for each head, the same if spread evenly)."""
    both = len(parts) == 2
    figure = make_subplots(
        2 if both else 1, len(names), subplot_titles=list(names.values()), horizontal_spacing=0.06,
        vertical_spacing=0.14, shared_xaxes=True,
    )  # fmt: skip
    for column, name in enumerate(names, start=1):
        for i, (series, frame, evenly) in enumerate(parts):
            _dots(figure, 1, column, frame, frame[name], label(series), colour(series), (i - 0.5) * 0.16 if both else 0)
            if i == 0 or evenly[name] != parts[0][2][name]:  # other windows, or another number of tokens
                shade = colour(series) if i else GREY
                figure.add_hline(y=evenly[name], line={"color": shade, "dash": "dot", "width": 1}, row=1, col=column)
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
        mode="markers", marker={"color": paint, "size": 7}, name=name, showlegend=column == 1 and at == 1,
        legendgroup=name, text=[f"layer {n}, head {h}" for n, h in zip(frame["layer"], frame["head"], strict=True)],
        hovertemplate="%{text}<br>%{y:.3g}<extra></extra>", row=at, col=column,
    )  # fmt: skip


def attention_map_figure(pattern: Any, tokens: Sequence[str], title: str = "Attention", under: str = "") -> go.Figure:
    """Draw attention [query, key] of one head on a scale from 0 to 1: queries downwards, keys to the right, the future blank."""
    return attention_pair([(title, pattern, tokens)], title, under)


def attention_pair(
    maps: Sequence[tuple[str, Any, Sequence[str]]], title: str = "Attention", under: str = ""
) -> go.Figure:
    """Draw attention maps (name, pattern, tokens) side by side on one scale from 0 to 1."""
    titles = [m[0] for m in maps] if len(maps) > 1 else None
    figure = make_subplots(1, len(maps), subplot_titles=titles, horizontal_spacing=0.12)
    for i, (name, pattern, tokens) in enumerate(maps):
        z = np.array(pattern, dtype="float32")
        if z.ndim != 2 or z.shape != (len(tokens), len(tokens)):
            raise WorkbenchError(f"a pattern of shape {z.shape} does not fit {len(tokens)} tokens")
        z[np.triu_indices(len(z), 1)] = np.nan
        spelt = [counted_spaces(t) for t in tokens]
        names = [f"{i}:{safe(t if len(t) <= 12 else t[:11] + '…')}" for i, t in enumerate(spelt)]
        hover = "query %{y}<br>key %{x}<br>weight %{z:.3f}<extra></extra>"
        figure.add_heatmap(z=z, x=names, y=names, coloraxis="coloraxis", hovertemplate=hover, hoverongaps=False, name=name,
                           row=1, col=i + 1)  # fmt: skip
        shown = names[:: every(len(names))]
        ticks = {"tickvals": shown, "tickfont": {"size": 11}, "type": "category", "showgrid": False}
        figure.update_xaxes(title_text="key token", tickangle=-90, constrain="domain", **ticks, row=1, col=i + 1)
        across = {"scaleanchor": f"x{i + 1}" if i else "x", "constrain": "domain"}
        query = "query token" if i == 0 else ""
        figure.update_yaxes(title_text=query, autorange="reversed", **ticks, **across, row=1, col=i + 1)
    bar = {"title": {"text": "attention"}, "thickness": 14}
    scale = {"colorscale": SEQUENTIAL, "cmin": 0, "cmax": 1, "colorbar": bar}
    figure = dressed(figure, title, under, 430).update_layout(coloraxis=scale)
    return at_least(figure, MAP * len(maps)) if len(maps) > 1 else figure


def percentage(share: float, difference: bool = False) -> str:
    """Return a probability in percent, or a difference of two in points, with one decimal; 0 only for an exact 0."""
    points = 100 * share
    if abs(points) >= 0.05 or np.isnan(points):
        text = f"{points:+.1f}" if difference else f"{points:.1f}%"
    elif difference:
        text = "<0.1" if share > 0 else ">-0.1" if share else "0"
    else:
        text = "<0.1%"
    return text.replace("-", "−")


def next_tokens_figure(parts: Sequence[tuple[str, str, Sequence[str], Sequence[float]]]) -> go.Figure:
    """Draw the most probable next tokens of (name, architecture, tokens, probabilities) side by side; A - B has its scale."""
    alike = all(list(f[2]) == list(parts[0][2]) for f in parts)
    largest = max(max(f[3]) for f in parts if f[0] != MINUS)
    figure = make_subplots(
        1, len(parts), subplot_titles=[markup.escape(f[0]) for f in parts], horizontal_spacing=0.06 if alike else 0.2
    )
    for i, (name, architecture, tokens, chances) in enumerate(parts):
        ticks = [f"{safe(t)}  " for t in tokens]
        points = [100 * c for c in chances]  # a difference of probabilities is in percentage points
        figure.add_bar(
            x=points if name == MINUS else list(chances), y=list(range(len(ticks))), orientation="h", marker_color=colour(architecture),
            name=markup.escape(name), showlegend=False,
            text=[percentage(c, name == MINUS) for c in chances], textposition="outside", cliponaxis=False, row=1, col=i + 1,
        )  # fmt: skip
        figure.update_yaxes(
            tickvals=list(range(len(ticks))), ticktext=ticks, autorange="reversed", showticklabels=not (alike and i),
            showgrid=False, zeroline=False, row=1, col=i + 1,
        )  # fmt: skip
        if name == MINUS:
            reach = 1.5 * max(max(map(abs, points)), 0.1)
            figure.update_xaxes(title_text=f"probability, {MINUS} (points)", range=[-reach, reach], row=1, col=i + 1)
        else:
            figure.update_xaxes(title_text="probability", tickformat=".0%", range=[0, 1.15 * largest], row=1, col=i + 1)
    under = "the most probable tokens after the last one; higher: more certain"
    return at_least(dressed(figure, "Next token", under, 280), BARS * len(parts) if len(parts) > 1 else 0)
