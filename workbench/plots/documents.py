"""Figure of single documents: their distances from the mean."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from workbench.plots.grids import safe, unique
from workbench.plots.style import GREY, axis_title, dressed

ROW, LONGEST = 24, 60
"""Pixels of a document's row, and characters of its text there."""


def documents(rows: pd.DataFrame, mean: float, paint: str, title: str, under: str, axis: tuple[str, str]) -> go.Figure:
    """Draw a stem from the mean to each document's value. rows: document, value, prompt (null if unknown).

    `axis`: unit and reading direction. Custom data: the row number.
    """
    texts = [" ".join(str(text or "").split()) for text in rows["prompt"]]
    texts = [text if len(text) <= LONGEST else text[: LONGEST - 1] + "…" for text in texts]
    names = unique(
        [safe(f"{d}: {text}" if text else f"document {d}") for d, text in zip(rows["document"], texts, strict=True)]
    )
    values = rows["value"].to_numpy(dtype="float64")
    figure = go.Figure()
    figure.add_scatter(
        x=values, y=names, mode="markers", name="document", showlegend=False, marker={"color": paint, "size": 10},
        error_x={"array": mean - values, "arrayminus": 0 * values, "symmetric": False, "width": 0, "thickness": 2},
        customdata=[[i] for i in range(len(names))], hovertemplate="%{y}<br>%{x:.4g}<extra></extra>",
    )  # fmt: skip
    figure.add_vline(x=mean, line={"color": GREY, "dash": "dot"})
    figure.update_yaxes(
        type="category", categoryorder="array", categoryarray=names, range=[len(names) - 0.4, -0.6], tickfont_size=11
    )
    figure.update_xaxes(title_text=axis_title(*axis))
    return dressed(figure, title, under, ROW * len(names) + 90)
