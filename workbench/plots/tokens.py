"""Figures of one prompt: attention maps and next-token probabilities."""

from __future__ import annotations

import html as markup
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.errors import WorkbenchError
from workbench.plots.grids import safe
from workbench.plots.style import BARS, MINUS, SEQUENTIAL, at_least, colour, dressed

MAP = 330  # pixels that a map beside another needs


def token_ticks(tokens: Sequence[str]) -> list[str]:
    """`index:token`, unique and safe inside a figure."""
    return [f"{i}:{safe(t if len(t) <= 12 else t[:11] + '…')}" for i, t in enumerate(tokens)]


def _map(pattern: Any, tokens: Sequence[str]) -> go.Heatmap:
    z = np.array(pattern, dtype="float32")
    if z.ndim != 2 or z.shape != (len(tokens), len(tokens)):
        raise WorkbenchError(f"a pattern of shape {z.shape} does not fit {len(tokens)} tokens")
    z[np.triu_indices(len(z), 1)] = np.nan
    ticks = token_ticks(tokens)
    hover = "query %{y}<br>key %{x}<br>weight %{z:.3f}<extra></extra>"
    return go.Heatmap(z=z, x=ticks, y=ticks, coloraxis="coloraxis", hovertemplate=hover, hoverongaps=False)


def attention_map_figure(pattern: Any, tokens: Sequence[str], title: str = "Attention", under: str = "") -> go.Figure:
    """Draw attention [query, key] of one head on a scale from 0 to 1: queries downwards, keys to the right, the future
    blank."""
    return attention_pair([(title, pattern, tokens)], title, under)


def attention_pair(
    maps: Sequence[tuple[str, Any, Sequence[str]]], title: str = "Attention", under: str = ""
) -> go.Figure:
    """Draw attention maps (name, pattern, tokens) side by side on one scale from 0 to 1."""
    figure = make_subplots(
        1, len(maps), subplot_titles=[m[0] for m in maps] if len(maps) > 1 else None, horizontal_spacing=0.12
    )
    for i, (name, pattern, tokens) in enumerate(maps):
        trace = _map(pattern, tokens)
        trace.name = name
        figure.add_trace(trace, 1, i + 1)
        every = max(1, -(-len(tokens) // 26))
        ticks = {"tickvals": trace.x[::every], "tickfont": {"size": 10}, "type": "category", "showgrid": False}
        figure.update_xaxes(title_text="key token", tickangle=-90, **ticks, row=1, col=i + 1)
        across = {"scaleanchor": f"x{i + 1}" if i else "x", "constrain": "domain"}
        figure.update_xaxes(constrain="domain", row=1, col=i + 1)
        figure.update_yaxes(
            title_text="query token" if i == 0 else "", autorange="reversed", **ticks, **across, row=1, col=i + 1
        )
    figure = dressed(figure, title, under, 430)
    bar = {"title": {"text": "attention"}, "thickness": 14}
    figure.update_layout(coloraxis={"colorscale": SEQUENTIAL, "cmin": 0, "cmax": 1, "colorbar": bar})
    return at_least(figure, MAP * len(maps)) if len(maps) > 1 else figure


def next_tokens_figure(found: Sequence[tuple[str, str, Sequence[str], Sequence[float]]]) -> go.Figure:
    """Draw the most probable next tokens of (name, architecture, tokens, probabilities) side by side.

    An entry named `A − B` holds differences and gets a scale around 0.
    """
    alike = all(list(f[2]) == list(found[0][2]) for f in found)
    largest = max(max(f[3]) for f in found if f[0] != MINUS)
    figure = make_subplots(
        1, len(found), subplot_titles=[markup.escape(f[0]) for f in found], horizontal_spacing=0.06 if alike else 0.2
    )
    for i, (name, architecture, tokens, chances) in enumerate(found):
        ticks = [f"{safe(t)}  " for t in tokens]
        figure.add_bar(
            x=list(chances), y=list(range(len(ticks))), orientation="h", marker_color=colour(architecture),
            name=markup.escape(name), showlegend=False,
            text=[f"{c:+.1%}" if name == MINUS else f"{c:.1%}" for c in chances], textposition="outside",
            cliponaxis=False, row=1, col=i + 1,
        )  # fmt: skip
        figure.update_yaxes(
            tickvals=list(range(len(ticks))), ticktext=ticks, autorange="reversed", showticklabels=not (alike and i),
            row=1, col=i + 1,
        )  # fmt: skip
        if name == MINUS:
            reach = 1.5 * max(max(map(abs, chances)), 1e-3)
            figure.update_xaxes(title_text=f"probability, {MINUS}", range=[-reach, reach], row=1, col=i + 1)
        else:
            figure.update_xaxes(title_text="probability", range=[0, 1.15 * largest], row=1, col=i + 1)
    under = "the most probable tokens after the last one; higher: more certain"
    return at_least(dressed(figure, "Next token", under, 280), BARS * len(found) if len(found) > 1 else 0)
