"""Figures as alt texts, tables, and HTML pages for pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from workbench.plots.grids import safe
from workbench.plots.records import plot
from workbench.plots.style import LINE, narrow, plain, titled, wrapped

LETTERS = 125  # of a line of a subtitle in a figure of full width
CONFIG = {"showSendToCloud": False, "displaylogo": False, "responsive": True}


def alt_text(shown: go.Figure | pd.DataFrame) -> str:
    """Describe a figure in words: title, subtitle, the ends of each curve, the extremes of each map, named texts."""
    if isinstance(shown, pd.DataFrame):
        shown = plot(shown)
    taken = (shown.layout.meta or {}).get("title")  # by a page that sets the words itself
    title = go.layout.Title(taken) if taken else shown.layout.title
    words = [plain(title.text), plain(title.subtitle.text)]
    for trace in shown.data:
        if trace.type == "heatmap":
            z = np.asarray(trace.z, dtype=float)
            if np.isfinite(z).any():
                words.append(f"{plain(trace.name) or 'map'}: {np.nanmin(z):.3g} to {np.nanmax(z):.3g}")
        elif trace.type == "scatter" and trace.mode == "text" and trace.name:
            words.append(f"{plain(trace.name)}: {', '.join(plain(text) for text in trace.text)}")
        elif trace.type == "scatter" and trace.fill == "toself":
            continue  # an area around or between numbers that others say
        elif trace.x is not None and len(trace.x) and trace.x[0] is not None and trace.hoverinfo != "skip":
            words.append(f"{plain(trace.name)}: {_ends(trace)}")
    return "; ".join(s for s in words if s)[:1500]


def _ends(trace: Any) -> str:
    y, x = list(trace.y), list(trace.x)
    if trace.type == "bar" and trace.orientation != "h":
        return ", ".join(f"{plain(a)} {b:.3g}" for a, b in zip(x, y, strict=True))
    if trace.type == "bar":
        return ", ".join(f"{plain(b)} {a:.3g}" for a, b in zip(x[:5], y[:5], strict=True))
    if isinstance(y[0], str):  # named rows
        return ", ".join(f"{plain(b)} {a:.3g}" for a, b in zip(x[:12], y[:12], strict=True))
    ends = [
        f"{float(v):.3g} at {plain(at) if isinstance(at, str) else f'{float(at):g}'}"
        for v, at in ((y[0], x[0]), (y[-1], x[-1]))
    ]
    return f"from {ends[0]} to {ends[1]}" if len(y) > 1 else ends[0]


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the numbers of a figure: non-empty columns without provenance, sorted by the axes."""
    kept = frame.drop(columns=[c for c in ("provenance",) if c in frame]).dropna(axis=1, how="all")
    axes = [c for c in ("metric", "architecture", "seed", "step", "layer", "head", "position") if c in kept]
    return kept.sort_values(axes, kind="stable").reset_index(drop=True)


def paper(figure: go.Figure, background: str = "white", caption: str = "", letters: int = LETTERS) -> go.Figure:
    """Return a figure for a picture: dark text on a background (CSS colour), and `caption` under the subtitle.

    `letters`: characters of a line of the subtitle; fewer than `LETTERS` also move the legend under the figure.
    """
    drawn = titled(figure).update_layout(font_color="#222", title_subtitle_font_color="#444", paper_bgcolor=background)
    if letters < LETTERS:
        drawn = narrow(drawn, letters)
    if caption:
        before = str(drawn.layout.title.subtitle.text or "")
        under = "<br>".join(filter(None, (before, wrapped(safe(caption), letters))))
        room = LINE * (under.count("<br>") - before.count("<br>"))
        margin, height = drawn.layout.margin.t + room, drawn.layout.height + room
        drawn.update_layout(title_subtitle_text=under, height=height, margin_t=margin)
    return drawn


def paper_page(drawn: go.Figure) -> str:
    """Return an HTML page of a figure for taking its picture, without buttons."""
    return drawn.to_html(
        include_plotlyjs=True, full_html=True, config=CONFIG | {"displayModeBar": False}, auto_play=False
    )
