"""Figure of the learned depth weights of checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.models.architecture_names_and_colours import colour_of
from workbench.plots.heat_maps import safe
from workbench.plots.record_figures import whole_ticks
from workbench.plots.style import DIVERGING, MINUS, PANEL, SEQUENTIAL, at_least, colour_axis, dressed

LINES = 2  # numbers of a layer that are drawn as lines; more are a map
TEXTS = 12  # columns of a map with numbers in its cells
PLOT, CELL, BETWEEN = 150, 22, 74  # pixels: lines, a map's row, between two quantities
AXIS, LEGEND = 56, 110  # pixels below all, without a legend and with one
KEYS = ["quantity", "layer", "part"]


def depth_weights_figure(parts: Sequence[tuple[str, pd.DataFrame]]) -> go.Figure:
    """Draw a row for each quantity and a column for each model: lines over layers, a map of layer by part, or points without layers.

    Args:
        parts: Name and weights of each model: quantity, layer, part, value, and init (the value at random init, or NaN).
    """
    everything = pd.concat([frame for _, frame in parts])
    layered = everything.dropna(subset="layer")
    widths = layered.groupby("quantity")["part"].nunique()  # parts of a quantity that has layers
    count = everything.drop_duplicates(KEYS)["quantity"].value_counts()
    single = [q for q in count.index if count[q] == 1 and q not in widths.index]
    rows_of = {q: [q] for q in dict.fromkeys(everything["quantity"]) if q not in single} | (
        {"single numbers": single} if single else {}
    )
    counts = {q: layered.loc[layered["quantity"] == q, "layer"].nunique() for q in rows_of}
    heights = [max(PLOT, CELL * n) if widths.get(q, 0) > LINES else PLOT for q, n in counts.items()]
    height = sum(heights) + BETWEEN * (len(heights) - 1)
    figure = make_subplots(
        len(heights), len(parts), row_heights=heights, horizontal_spacing=0.1, vertical_spacing=BETWEEN / height,
        subplot_titles=[safe(f"{q}: {name}" if len(parts) > 1 else q) for q in rows_of for name, _ in parts],
    )  # fmt: skip
    names = [part for part in dict.fromkeys(layered["part"]) if part]
    for (row, quantity), (column, (model, frame)) in itertools.product(enumerate(rows_of, 1), enumerate(parts, 1)):
        rows, at = frame[frame["quantity"].isin(rows_of[quantity])], {"row": row, "col": column}
        if widths.get(quantity, 0) > LINES:
            cells = rows.pivot_table("value", "layer", "part", sort=False).sort_index()
            figure.add_heatmap(
                z=cells, x=[safe(name) for name in cells.columns], y=cells.index.astype("str"), name=safe(model),
                coloraxis=f"coloraxis{2 * row + (model == MINUS)}",
                texttemplate="%{z:.2g}" if len(cells.columns) <= TEXTS else None,
                hovertemplate="layer %{y}, %{x}: %{z:.3g}<extra></extra>", **at,
            )  # fmt: skip
            figure.update_yaxes(title_text="layer" if column == 1 else "", type="category", **at)
            continue
        if quantity in widths.index:
            rows = rows[rows["layer"].notna()]  # the query of the output is in the table
            figure.update_xaxes(title_text="layer", dtick=whole_ticks(rows["layer"]), **at)
        elif rows_of[quantity] != single:
            figure.update_xaxes(title_text="number", dtick=whole_ticks(range(len(rows))), **at)
        figure.update_yaxes(title_text="weight" if column == 1 else "", **at)
        for part, line in rows.groupby("part", sort=False) if quantity in widths.index else [("", rows)]:
            shade = colour_of((210 + 150 * (names.index(part) if part else 0)) / 360)
            unlayered = line["quantity"] if rows_of[quantity] == single else list(range(len(line)))
            x = line["layer"] if quantity in widths.index else unlayered
            for values, dash in ((line["value"], "solid"), (line["init"], "dot")):
                if values.notna().any():
                    legend = safe(f"{part}{', ' * bool(part)}at random init" if dash == "dot" else part)
                    mode = "lines" if dash == "dot" else "lines+markers" if quantity in widths.index else "markers"
                    figure.add_scatter(
                        x=x, y=values, name=legend, legendgroup=legend, mode=mode, line={"color": shade, "dash": dash},
                        showlegend=bool(legend) and not any(t.name == legend for t in figure.data),
                        hovertemplate="%{x}: %{y:.4g}<extra></extra>", **at,
                    )  # fmt: skip
        if column > 1 and model != MINUS:
            figure.update_yaxes(matches=next(figure.select_yaxes(row=row, col=1)).plotly_name.replace("axis", ""), **at)
    for scale in sorted({t.coloraxis for t in figure.data if t.type == "heatmap"}):
        maps = [t for t in figure.data if t.type == "heatmap" and t.coloraxis == scale]
        numbers = np.concatenate([np.ravel(t.z) for t in maps])
        low, high = float(np.nanmin(numbers)), float(np.nanmax(numbers))
        minus = maps[0].name == MINUS
        limit, both = max(abs(low), abs(high)) or 1.0, minus or low < 0
        bottom, top = figure.layout[f"yaxis{maps[0].yaxis[1:]}"].domain
        half = (top - bottom) / (2 if len(parts) == 3 else 1)  # the difference has a scale below that of the models
        bar = {"len": half, "y": top - half * minus, "yanchor": "top"}
        span = (-limit, limit) if both else (min(0.0, low), limit)
        figure.update_layout(
            {scale: colour_axis(DIVERGING if both else SEQUENTIAL, *span, MINUS if minus else "weight", **bar)}
        )
    below = LEGEND if any(t.type == "scatter" and t.showlegend for t in figure.data) else AXIS
    figure = dressed(figure, "Learned depth weights", " and ".join(name for name, _ in parts[:2]), height + below)
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": -64 / height, "yanchor": "top"}, margin_b=below)
    return at_least(figure, max(PANEL * len(parts), 360) if len(parts) > 1 else 360)
