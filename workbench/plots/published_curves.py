"""Figures of our runs with published numbers: loss differences over tokens per parameter, and learned coefficients by layer."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.errors import WorkbenchError
from workbench.models.architecture_names_and_colours import colour_of
from workbench.plots.style import GREY, PANEL, at_least, colour, dressed, label, ordered, pale, words, wrapped

TICKS = [digit * 10.0**power for power in range(-4, 5) for digit in (1, 2, 5)]
DASHES = ("dash", "dot", "longdash")


def budget_figure(frame: pd.DataFrame, published: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Plot losses minus the baseline's over training tokens per parameter, with published curves faintly behind.

    Args:
        frame: Columns run, architecture, seed, tokens_per_parameter, value (nats).
        published: Columns tokens_per_parameter, value and source, by model; empty tables are left out.
    """
    if frame.empty:
        raise WorkbenchError("no run shares a seed with a Transformer of known size and tokens per step")
    figure, series = go.Figure(), ordered(frame["architecture"])
    sources = []
    for (model, rows), dash in zip(published.items(), DASHES, strict=False):
        if len(rows):
            name = f"{label(model)}, {rows['source'].iloc[0]}"
            sources.append(str(rows["source"].iloc[0]))
            figure.add_scatter(
                x=rows["tokens_per_parameter"], y=rows["value"], mode="lines", name=name, line={"color": GREY, "width": 1.5, "dash": dash},
                hovertemplate=f"{name}<br>%{{x:.3g}} tokens per parameter: %{{y:+.3f}} nats<extra></extra>",
            )  # fmt: skip
    for model in series:
        rows = frame[frame["architecture"] == model]
        for _, run in rows.groupby("run"):
            figure.add_scatter(
                x=run["tokens_per_parameter"], y=run["value"], mode="lines", line={"color": pale(model, 0.35, series), "width": 1},
                legendgroup=model, showlegend=False, hoverinfo="skip",
            )  # fmt: skip
        curve = rows.pivot_table(index="tokens_per_parameter", columns="run", values="value").dropna().mean(axis=1)
        figure.add_scatter(
            x=curve.index, y=curve, mode="lines", name=label(model), line={"color": colour(model, series), "width": 2.5}, legendgroup=model,
            hovertemplate=f"{label(model)}<br>%{{x:.3g}} tokens per parameter: %{{y:+.3f}} nats<extra></extra>",
        )  # fmt: skip
    figure.add_hline(y=0, line={"color": GREY, "width": 1})
    figure.update_xaxes(
        type="log", title_text="training tokens per parameter", tickvals=TICKS, ticktext=[f"{tick:g}" for tick in TICKS]
    )
    figure.update_yaxes(title_text="nats, below 0: lower loss")
    seeds = frame.groupby("architecture")["seed"].nunique()
    count = f"{seeds.min()} to {seeds.max()}" if seeds.min() < seeds.max() else str(seeds.max())
    under = f"thick: mean over {count} seeds, thin: each seed" if seeds.max() > 1 else "one seed"
    under += (
        f"; grey: published ({', '.join(dict.fromkeys(sources))}), one run each, in its own setting" if sources else ""
    )
    return dressed(figure, "Validation loss minus the Transformer's", wrapped(under, 125), 330)


def coefficients_by_layer(frame: pd.DataFrame, published: pd.DataFrame) -> go.Figure:
    """Plot the last learned coefficients by layer beside published ones, which multiply other tensors.

    Args:
        frame: Coefficients of one architecture, as records.
        published: Columns layer, stream, embedding and source.
    """
    rows = frame[(frame["metric"] == "coefficient") & frame["value"].notna()]
    rows = rows[rows["step"] == rows["step"].max()]
    parts = sorted(rows["part"].dropna().unique())
    parts = parts if len(parts) <= len(DASHES) else parts[:1]  # of DenseFormer's many the embedding's
    source = str(published["source"].iloc[0])
    of = label(str(frame["architecture"].iloc[0]))
    titles = [f"{of}: weights by layer", f"{source}: weights by layer"]
    figure = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.12)
    for i, part in enumerate(parts):
        by_layer = rows[rows["part"] == part].groupby("layer")["value"].agg(["mean", "min", "max"])
        name = "embedding" if part == "alpha_0" else words(part)
        up, down = by_layer["max"] - by_layer["mean"], by_layer["mean"] - by_layer["min"]
        bars = {"array": up, "arrayminus": down, "thickness": 0.8}
        figure.add_scatter(
            x=by_layer.index.astype(int), y=by_layer["mean"], error_y=bars, name=name, mode="lines+markers", row=1, col=1,
            line={"color": colour_of((210 + 150 * i) / 360)},
        )  # fmt: skip
    for name, dash in (("stream", "solid"), ("embedding", "dash")):
        figure.add_scatter(
            x=published["layer"], y=published[name], name=f"published: {name}", mode="lines+markers", row=1, col=2,
            line={"color": GREY, "dash": dash},
        )  # fmt: skip
    figure.update_xaxes(title_text="layer", dtick=1)
    figure.update_yaxes(title_text="weight", col=1)
    seeds = f"mean and range over {n} seeds" if (n := rows["run"].nunique()) > 1 else "one seed"
    under = (
        f"{of}: last logged step, {rows['step'].max():.0f}, {seeds}; {source}: one published training, whose weights multiply the residual "
        "stream and the embedding in a block's input"
    )
    return at_least(dressed(figure, "Learned coefficients beside published ones", wrapped(under, 125), 300), 2 * PANEL)
