"""Figures of named rows: heads over models, one head over training, its strongest token pairs, and single documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from workbench.plots.heat_maps import safe, unique
from workbench.plots.style import GREY, axis_title, colour, dressed, label, narrow, ordered, symbol

ROW, MIN_HEIGHT = 19, 220
DOCUMENT, LONGEST = 34, 48  # pixels of a document's row, and characters of its text there: a phone has room for them
WIDTH = 60
"""Characters of a subtitle's line in a column of half a page."""


def ranking_figure(
    rows: pd.DataFrame, title: str, under: str, axis: tuple[str, str], chosen: Sequence[bool] = ()
) -> go.Figure:
    """Draw a dot for each head, the first on top, with its standard error, its value at random init, and the baseline.

    rows: name, architecture, value, se, init, baseline, baseline_of. `chosen`: rows with a bold name. Custom data: the row number.
    """
    names = unique([safe(name) for name in rows["name"]])
    figure, y = go.Figure(), np.array(names, dtype=object)
    series = ordered(rows["architecture"])
    for architecture in series:
        mine = (rows["architecture"] == architecture).to_numpy()
        se = rows.loc[mine, "se"].astype("float64")
        figure.add_scatter(
            x=rows.loc[mine, "value"], y=y[mine], mode="markers", name=label(architecture),
            marker={"color": colour(architecture, series), "symbol": symbol(architecture, series), "size": 9},
            error_x={"array": se, "thickness": 1.2, "width": 3} if se.notna().any() else None,
            hovertemplate="%{y}: %{x:.3g}<extra></extra>", customdata=[[int(i)] for i in np.flatnonzero(mine)],
        )  # fmt: skip
    if rows["init"].notna().any():
        figure.add_scatter(
            x=rows["init"], y=y, mode="markers", name="at random init", hoverinfo="skip",
            marker={"color": GREY, "symbol": "circle-open", "size": 7},
        )  # fmt: skip
    for name in sorted(rows["baseline_of"].dropna().unique()):  # a line if all rows share it, else a mark on each row
        mine = (rows["baseline_of"] == name).to_numpy()
        x = rows.loc[mine, "baseline"].to_numpy(dtype="float64")
        one = mine.all() and float(np.ptp(x)) < 1e-9
        figure.add_scatter(
            x=x, y=y[mine], mode="lines" if one and len(x) > 1 else "markers", name=safe(name), hoverinfo="skip",
            line={"color": GREY, "dash": "dot", "width": 1.5},
            marker={"color": GREY, "symbol": "line-ns-open", "size": 14},
        )  # fmt: skip
    marked = [*chosen, *[False] * (len(names) - len(chosen))]
    ticks = [f"<b>{n}</b>" if bold else n for n, bold in zip(names, marked, strict=True)]
    _downwards(figure, names).update_yaxes(tickvals=names, ticktext=ticks)
    figure.update_xaxes(title_text=axis_title(*axis), zeroline=False)
    figure = dressed(figure, title, under, max(MIN_HEIGHT, ROW * len(names) + 60))
    return narrow(figure, WIDTH)


def history_figure(
    mine: pd.DataFrame, others: pd.DataFrame, baseline: pd.DataFrame, title: str, under: str, axis: tuple[str, str]
) -> go.Figure:
    """Plot one head (architecture, step, value, se) over training, with the other heads of its run and the controls in grey."""
    figure, architecture = go.Figure(), str(mine["architecture"].iloc[0])
    se = mine["se"].astype("float64")
    heads = list(others.sort_values(["layer", "head", "step"]).groupby(["layer", "head"]))
    for i, ((layer, head), rows) in enumerate(heads):
        figure.add_scatter(
            x=rows["step"], y=rows["value"], mode="lines" if len(rows) > 1 else "markers", name="other heads",
            legendgroup="others", showlegend=i == 0, line={"color": GREY, "width": 0.75}, marker={"color": GREY, "size": 5},
            hovertemplate=f"layer {layer}, head {head}, step %{{x}}: %{{y:.3g}}<extra></extra>",
        )  # fmt: skip
    for name, rows in baseline.groupby("control"):
        figure.add_scatter(
            x=rows["step"], y=rows["value"], mode="lines" if len(rows) > 1 else "markers", name=safe(name), hoverinfo="skip",
            line={"color": GREY, "dash": "dot", "width": 1.5}, marker={"color": GREY, "symbol": "line-ew-open", "size": 14},
        )  # fmt: skip
    figure.add_scatter(
        x=mine["step"], y=mine["value"], mode="lines+markers", name=label(architecture),
        line={"color": colour(architecture), "width": 3}, marker={"symbol": symbol(architecture), "size": 7},
        error_y={"array": se, "thickness": 1.2, "width": 3} if se.notna().any() else None,
        hovertemplate="step %{x}: %{y:.3g}<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title_text="training step")
    figure.update_yaxes(title_text=axis_title(*axis, width=30))
    return narrow(dressed(figure, title, under, MIN_HEIGHT), WIDTH)


def pairs_figure(rows: pd.DataFrame, paint: str, title: str, under: str) -> go.Figure:
    """Draw a stem for each token pair, as long as its attention weight. rows: key token, query token, distance, weight."""
    pairs = zip(rows["key token"], rows["query token"], strict=True)
    names = unique([f"{safe(key)} ← {safe(query)}" for key, query in pairs])
    weights = rows["weight"].to_numpy(dtype="float64")
    hover = "%{y}: %{x:.3f}<br>%{customdata} tokens back<extra></extra>"
    figure = _stems(weights, names, (0 * weights, weights), paint, "weight", rows["distance"], hover)
    figure.update_traces(cliponaxis=False)
    figure.update_yaxes(title_text="key ← query")
    end = 1.05 * max(1.0, float(weights.max()))
    figure.update_xaxes(title_text="attention of the query to the key", range=[0, end])
    return narrow(dressed(figure, title, under, max(MIN_HEIGHT, ROW * len(names) + 60)), WIDTH)


def documents(rows: pd.DataFrame, mean: float, paint: str, title: str, under: str, axis: tuple[str, str]) -> go.Figure:
    """Draw a stem from the mean to each document's value (document, value, prompt or null). Custom data: the row number."""
    texts = [" ".join(str(text or "").split()) for text in rows["prompt"]]
    texts = [text if len(text) <= LONGEST else text[: LONGEST - 1] + "…" for text in texts]
    names = unique([str(d) for d in rows["document"]])
    values, index = rows["value"].to_numpy(dtype="float64"), [[i] for i in range(len(names))]
    stems = (mean - values, 0 * values)
    figure = _stems(values, names, stems, paint, "document", index, "document %{y}<br>%{x:.3g}<extra></extra>")
    mark = {"color": GREY, "symbol": "line-ns-open", "size": 12}  # a line through all rows would cross their texts
    figure.add_scatter(x=[mean] * len(names), y=names, mode="markers", marker=mark, hoverinfo="skip", showlegend=False)
    figure.update_xaxes(title_text=axis_title(*axis)).update_yaxes(title_text="document")
    drawn = dressed(figure, title, under, DOCUMENT * len(names) + 90)
    for i, text in enumerate(texts):
        place = {"xref": "paper", "x": 0, "xanchor": "left", "y": i, "yanchor": "bottom", "yshift": 5}
        drawn.add_annotation(text=safe(text), showarrow=False, font_size=11, **place)
    return drawn


def _stems(
    values: np.ndarray,
    names: list[str],
    stems: tuple[np.ndarray, np.ndarray],
    paint: str,
    name: str,
    data: Any,
    hover: str,
) -> go.Figure:
    """Dots with stems to their right and left, one row each, the first on top."""
    stem = {"array": stems[0], "arrayminus": stems[1], "symmetric": False, "width": 0, "thickness": 2}
    figure = go.Figure()
    figure.add_scatter(
        x=values, y=names, mode="markers", name=name, showlegend=False, marker={"color": paint, "size": 10}, error_x=stem,
        customdata=data, hovertemplate=hover,
    )  # fmt: skip
    return _downwards(figure, names)


def _downwards(figure: go.Figure, names: list[str]) -> go.Figure:
    """Rows with these names, the first on top."""
    rows = {"type": "category", "categoryorder": "array", "categoryarray": names, "range": [len(names) - 0.4, -0.6]}
    return figure.update_yaxes(**rows, tickfont_size=11)
