"""Figures of training: differences from a baseline, gradients, coefficients, pace."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.errors import WorkbenchError
from workbench.plots.records import checked, plot
from workbench.plots.style import SEQUENTIAL, dressed, label, ordered, outer_titles, subtitle, words


def relative(frame: pd.DataFrame, baseline: str = "transformer") -> pd.DataFrame:
    """Each run's numbers minus those of the baseline of the same seed, step and data; the baseline itself is left out."""
    axes = ["metric", "seed", "step", "data", "T", "site", "part", "layer", "head", "position", "variant", "control"]
    base = frame[frame["architecture"] == baseline].groupby(axes, dropna=False, as_index=False)["value"].mean()
    paired = frame[frame["architecture"] != baseline].merge(base, on=axes, suffixes=("", "_base"))
    if paired.empty:
        raise WorkbenchError(f"nothing to compare: no other run shares a seed with a {baseline}")
    return paired.assign(value=paired["value"] - paired["value_base"], se=np.nan)[frame.columns]


def gradient_map(frame: pd.DataFrame) -> go.Figure:
    """Gradient norm of each matrix and layer over training, logarithmic colour, one panel per architecture on one scale."""
    rows = checked(
        frame[
            (frame["metric"] == "gradient_norm")
            & frame["variant"].isna()
            & frame["part"].str.startswith("W_", na=False)
        ]
    )
    names = ordered(rows["architecture"])
    columns = min(len(names), 2)
    count = -(-len(names) // columns)
    figure = make_subplots(
        count, columns, subplot_titles=[label(n) for n in names], vertical_spacing=0.22 / count, horizontal_spacing=0.14
    )
    top, bottom = -np.inf, np.inf
    for i, name in enumerate(names):
        mine = rows[rows["architecture"] == name]
        where = mine["part"] + mine["layer"].map(lambda n: "" if pd.isna(n) else f" {n:.0f}")
        grid = (
            mine.assign(where=where)
            .pivot_table(index="where", columns="step", values="value", aggfunc="mean")
            .sort_index(ascending=False)
        )
        z = np.log10(
            grid.to_numpy(dtype="float32"), where=grid.to_numpy() > 0, out=np.full(grid.shape, np.nan, dtype="float32")
        )
        top, bottom = max(top, float(np.nanmax(z))), min(bottom, float(np.nanpercentile(z, 3)))
        hover = f"{label(name)}<br>%{{y}} at step %{{x}}: %{{customdata:.3g}}<extra></extra>"
        x, y = grid.columns.tolist(), grid.index.tolist()
        at = {"row": i // columns + 1, "col": i % columns + 1}
        figure.add_heatmap(
            z=z, x=x, y=y, customdata=grid, coloraxis="coloraxis", name=label(name), hovertemplate=hover, **at
        )
        figure.update_yaxes(tickfont_size=9, dtick=1, **at)
        figure.update_xaxes(title_text="training step", **at)
    outer_titles(figure, len(names), columns)
    ticks = list(range(int(np.floor(bottom)), int(np.ceil(top)) + 1))
    bar = {
        "title": {"text": "norm"},
        "tickvals": ticks,
        "ticktext": [f"10<sup>{t}</sup>" for t in ticks],
        "thickness": 14,
    }
    figure = dressed(
        figure,
        "Gradient norms",
        subtitle(rows, "mean over seeds; rows: matrix and layer; lighter: stronger pull"),
        430 * count,
    )
    return figure.update_layout(coloraxis={"colorscale": SEQUENTIAL, "cmin": bottom, "cmax": top, "colorbar": bar})


def coefficients(frame: pd.DataFrame) -> go.Figure:
    """Learned coefficients over training: a panel per layer, a line per coefficient (mean over seeds, band: their range)."""
    rows = checked(frame[frame["metric"] == "coefficient"])
    if rows["architecture"].nunique() > 1:
        raise WorkbenchError(
            f"coefficients of different architectures mean different things; keep one of {ordered(rows['architecture'])}"
        )
    layers = sorted(rows["layer"].dropna().unique())
    columns = min(len(layers), 2)
    count = -(-len(layers) // columns)
    titles = [f"after block {n:.0f}" for n in layers]
    figure = make_subplots(
        count, columns, subplot_titles=titles, shared_yaxes="all", vertical_spacing=0.3 / count, horizontal_spacing=0.06
    )
    parts = sorted(rows["part"].unique())
    shades = [f"hsl({int(210 + 300 * i / max(len(parts), 1)) % 360},60%,48%)" for i in range(len(parts))]
    for i, layer in enumerate(layers):
        for part, shade in zip(parts, shades, strict=True):
            curve = (
                rows[(rows["layer"] == layer) & (rows["part"] == part)]
                .groupby("step")["value"]
                .agg(["mean", "min", "max"])
            )
            if curve.empty:
                continue
            at = {"row": i // columns + 1, "col": i % columns + 1}
            bars = {
                "array": curve["max"] - curve["mean"],
                "arrayminus": curve["mean"] - curve["min"],
                "thickness": 0.6,
                "width": 0,
            }
            said = _source(part)
            figure.add_scatter(
                x=curve.index, y=curve["mean"], error_y=bars, name=said, line={"color": shade}, mode="lines",
                legendgroup=part, showlegend=not any(t.legendgroup == part for t in figure.data), **at,
            )  # fmt: skip
            figure.update_xaxes(title_text="training step", **at)
    figure.update_yaxes(title_text="weight", col=1)
    outer_titles(figure, len(layers), columns)
    title = f"Learned coefficients of {label(rows['architecture'].iloc[0])}"
    return dressed(figure, title, subtitle(rows, "whisker: range over seeds"), 250 * count)


def _source(part: str) -> str:
    """DenseFormer's `alpha_j` in words: what the weight multiplies."""
    index = part.removeprefix("alpha_")
    return (
        words(part) if not index.isdecimal() else "embedding" if index == "0" else f"output of block {int(index) - 1}"
    )


def pace(frame: pd.DataFrame) -> go.Figure:
    """Tokens per second of each run, the median over its steps, as bars with the range over seeds."""
    rows = frame[frame["metric"] == "tokens_per_second"]
    runs = rows.groupby("run", as_index=False).first()
    middle = runs["run"].map(rows.groupby("run")["value"].median())
    return plot(runs.assign(value=middle, step=pd.array([pd.NA] * len(runs), "Int64")), title="Training pace")
