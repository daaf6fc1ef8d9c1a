"""Figures of token maps: points in a plane by token, position or document, and how well tokens separate by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.heat_maps import safe, unique
from workbench.plots.record_figures import whole_ticks
from workbench.plots.style import GREY, PANEL, SEQUENTIAL, at_least, colour, colour_axis, dressed, label, symbol

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#c18a00", "#0497fc")
MARKS = ("circle", "square", "diamond", "triangle-up", "cross", "x")
NAMED, MOST = 12, 600  # tokens with a colour and a mark, largest width of one panel
FAINT = "rgba(128,128,128,0.35)"


def token_map_figure(
    panels: Sequence[tuple[str, pd.DataFrame]], by: str, title: str, under: str, axes: tuple[str, str]
) -> go.Figure:
    """Draw points in a plane, a panel for each model.

    Args:
        panels: Name and points of each model: x, y, token (text), document, position.
        by: "token" colours the `NAMED` most frequent tokens, "position" and "document" use a colour scale.
        title: Title.
        under: Subtitle.
        axes: Titles of the axes.
    """
    figure = make_subplots(
        1, len(panels), subplot_titles=[safe(n) for n, _ in panels] if len(panels) > 1 else None, horizontal_spacing=0.1
    )
    named = list(panels[0][1]["token"].value_counts(sort=True).index[:NAMED])
    words = dict(zip(named, unique([safe(f"“{token}”") for token in named]), strict=True))
    hover = "%{customdata[0]}<br>document %{customdata[1]}, position %{customdata[2]}<extra></extra>"
    for i, (_, points) in enumerate(panels, 1):
        parts: list[tuple[str, pd.DataFrame, dict[str, object]]] = []
        if by == "token":
            rest = points[~points["token"].isin(named)]
            parts.append(("other tokens", rest, {"color": FAINT, "size": 4}))
            for n, token in enumerate(named):
                mark = MARKS[(n + n // len(COLOURS)) % len(MARKS)]
                look = {"color": COLOURS[n % len(COLOURS)], "symbol": mark, "size": 7}
                parts.append((words[token], points[points["token"] == token], look))
        else:
            parts.append((by, points, {
                "color": points[by].to_numpy(), "coloraxis": "coloraxis", "size": 6, "line": {"color": GREY, "width": 0.8},
            }))  # fmt: skip
        for name, rows, marker in parts:
            figure.add_scatter(
                x=rows["x"], y=rows["y"], mode="markers", name=name, legendgroup=name, showlegend=by == "token" and i == 1,
                marker=marker, hovertemplate=hover, row=1, col=i,
                customdata=[[safe(t), d, p] for t, d, p in rows[["token", "document", "position"]].itertuples(index=False)],
            )  # fmt: skip
        across = next(figure.select_xaxes(row=1, col=i)).plotly_name.replace("axis", "")
        figure.update_yaxes(
            scaleanchor=across, constrain="domain", title_text=axes[1] if i == 1 else "", zeroline=False, row=1, col=i
        )
    figure.update_xaxes(title_text=axes[0], zeroline=False, constrain="domain")
    if len(panels) > 1:  # in one plane, so that the scale of the two can be compared
        for update, letter in ((figure.update_xaxes, "x"), (figure.update_yaxes, "y")):
            values = np.concatenate([points[letter].to_numpy(dtype=float) for _, points in panels])
            around = 0.05 * float(np.ptp(values)) or 1.0
            update(range=[float(values.min()) - around, float(values.max()) + around])
    if by != "token":
        top = max(float(points[by].max()) for _, points in panels)
        figure.update_layout(coloraxis=colour_axis(SEQUENTIAL, 0, max(top, 1), by))
    drawn = dressed(figure, title, under, 460)
    if len(panels) > 1:
        return at_least(drawn, PANEL * len(panels))
    return drawn.update_layout(meta={"most": MOST})  # a wider one has its legend far from its square


def separation_figure(table: pd.DataFrame, title: str, under: str) -> go.Figure:
    """Plot how well tokens separate by layer, a panel for each measure, a line for each model, its chance level dotted.

    table: architecture, measure, layer, value, chance.
    """
    measures, series = list(dict.fromkeys(table["measure"])), list(dict.fromkeys(table["architecture"]))
    figure = make_subplots(1, len(measures), subplot_titles=measures, horizontal_spacing=0.09)
    for i, measure in enumerate(measures, 1):
        for name in series:
            rows = table[(table["measure"] == measure) & (table["architecture"] == name)].sort_values("layer")
            look = colour(name, series)
            figure.add_scatter(
                x=rows["layer"], y=rows["value"], mode="lines+markers", name=label(name), legendgroup=name, showlegend=i == 1,
                line={"color": look}, marker={"symbol": symbol(name, series), "size": 7}, row=1, col=i,
                hovertemplate="layer %{x}: %{y:.3f}<extra></extra>",
            )  # fmt: skip
            figure.add_scatter(
                x=rows["layer"], y=rows["chance"], mode="lines", hoverinfo="skip", showlegend=i == 1,
                name=f"{label(name)}, chance" if len(series) > 1 else "chance", legendgroup=f"{name}, chance",
                line={"color": look if len(series) > 1 else GREY, "dash": "dot", "width": 1.5}, row=1, col=i,
            )  # fmt: skip
    figure.update_xaxes(title_text="layer", dtick=whole_ticks(table["layer"]))
    figure.update_yaxes(title_text="", range=[min(-0.05, float(np.nanmin(table[["value", "chance"]])) - 0.05), 1.05])
    return at_least(dressed(figure, title, under, 300), 3 * 250)
