"""Figures of measures against validation loss, which separate effects of architecture from training progress."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.style import axis_title, colour, dressed, label, ordered, pale, wrapped


def against_loss_figure(frame: pd.DataFrame) -> go.Figure:
    """Plot each checkpoint as a point, one panel per quantity; a line joins the checkpoints of a run.

    `frame`: columns run, architecture, seed, step, loss (nats), quantity, value, unit. Models that differ only in progress
    lie on one curve; the distance at equal loss is an effect of the architecture.
    """
    quantities = list(dict.fromkeys(frame["quantity"]))
    figure = make_subplots(1, len(quantities), subplot_titles=quantities, horizontal_spacing=0.27 / len(quantities))
    series = ordered(frame["architecture"])
    for i, quantity in enumerate(quantities):
        where = {"row": 1, "col": i + 1}
        mine = frame[frame["quantity"] == quantity].sort_values(["run", "step"])
        for architecture in ordered(mine["architecture"]):
            name, look = label(architecture), colour(architecture, series)
            figure.add_scatter(
                x=[None], y=[None], mode="markers", name=name, marker={"color": look, "size": 9}, legendgroup=name,
                showlegend=i == 0, hoverinfo="skip", **where,
            )  # fmt: skip
            for _, rows in mine[mine["architecture"] == architecture].groupby("run"):
                symbols = ["circle-open" if step == 0 else "circle" for step in rows["step"]]
                figure.add_scatter(
                    x=rows["loss"].astype(float), y=rows["value"].astype(float), mode="lines+markers", name=name,
                    line={"color": pale(architecture, 0.35, series), "width": 1},
                    marker={"color": look, "size": [6] * (len(rows) - 1) + [10], "symbol": symbols},
                    legendgroup=name, showlegend=False, customdata=rows[["seed", "step"]].astype(str),
                    hovertemplate=f"{name}, seed %{{customdata[0]}}, step %{{customdata[1]}}<br>loss %{{x:.3f}}: %{{y:.3g}}"
                    "<extra></extra>", **where,
                )  # fmt: skip
        figure.update_yaxes(title_text=axis_title(str(mine["unit"].iloc[0]), ""), **where)
        figure.update_xaxes(title_text="validation loss (nats), falling", autorange="reversed", **where)
    seeds = frame.groupby("architecture")["seed"].nunique()
    under = (
        f"{frame['run'].nunique()} runs, {seeds.min()}{f' to {seeds.max()}' if seeds.max() > seeds.min() else ''} seeds per model; "
        "each point a checkpoint, training goes to the right; open: random init, large: the last; "
        "points on one curve differ only in progress, a distance at equal loss is the architecture's"
    )
    return dressed(figure, "Concentration and similarity against the loss", wrapped(under, 125), 330)
