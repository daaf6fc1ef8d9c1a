"""Figures of training: curves of runs and their differences, gradients, coefficients, pace."""

from __future__ import annotations

import html as markup
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.errors import WorkbenchError
from workbench.models.architecture_names_and_colours import LUMINANCES, colour_of
from workbench.plots.comparisons_and_animations import AXES, subtracted
from workbench.plots.record_figures import MAX_WHOLE, checked, fewer_seeds, plot
from workbench.plots.style import (
    DIVERGING,
    MINUS,
    SEQUENTIAL,
    at_least,
    colour_axis,
    dressed,
    label,
    ordered,
    outer_titles,
    subtitle,
    words,
)
from workbench.runs.records import typed

RATIO = "A ÷ B"  # the difference of two logarithms
# of a curve, of a map over steps, cells of a figure that carry their number
MAX_POINTS, MAX_COLUMNS, MAX_PRINTED = 600, 160, 90


def thinned(frame: pd.DataFrame, most: int = MAX_POINTS) -> tuple[pd.DataFrame, int]:
    """Average neighbouring steps of a frame with more than `most`; return it and the number of steps per point."""
    steps = np.sort(frame["step"].dropna().unique().astype("int64"))
    if len(steps) <= most:
        return frame, 1
    width = -(-int(steps[-1] - steps[0] + 1) // most)
    axes = varying(frame, ["step", *(c for c in frame.columns if c not in ("value", "se", "step"))])
    binned = frame.assign(step=(frame["step"] // width * width).astype("Int64"))
    means = binned.groupby(axes, dropna=False, as_index=False, sort=False)[["value", "se"]].mean()
    same = {c: frame[c].iloc[[0] * len(means)].set_axis(means.index) for c in frame.columns if c not in means}
    return means.assign(**same)[frame.columns], width


def varying(frame: pd.DataFrame, columns: Sequence[str]) -> list[str]:
    """Return the first column and all that vary; grouping by constant columns only costs time."""
    return [columns[0], *(c for c in columns[1:] if frame[c].nunique(dropna=False) > 1)]


def curve_difference(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Return curves of A - B at the steps both recorded, a run for each common seed; the standard error assumes independent means."""
    rows, others = (f[f["control"].isna()].reset_index(drop=True) for f in (a, b))
    paired = not {*rows["seed"].dropna()}.isdisjoint(others["seed"].dropna())
    keys = ["step", *AXES, *(["seed"] if paired else [])]
    means = others.groupby(keys, dropna=False, as_index=False)[["value", "se"]].mean()
    minus = subtracted(rows, means, keys, "below 0: lower in A")
    return minus.assign(run=f"{MINUS}, seed " + minus["seed"].astype("str")) if paired else minus


def curves(
    parts: Sequence[pd.DataFrame], *, title: str, smooth: int = 1, log_x: bool = False, spread: str = "range"
) -> go.Figure:
    """Plot curves over training of the parts; those of A - B get another panel."""
    full = [p for p in parts if len(p)]
    made, widths = zip(*(thinned(p) for p in full), strict=True) if full else ((), ())
    if not made:
        raise WorkbenchError("nothing to draw: these runs have not written it down")
    rows = pd.concat(made, ignore_index=True)
    figure = plot(rows, form="steps", smooth=smooth, log_x=log_x, title=title, spread=spread)
    if log_x:
        figure.update_xaxes(dtick="D2")
    if max(widths) > 1:
        under = figure.layout.title.subtitle.text
        figure.update_layout(
            title_subtitle_text=f"{under}; each point the mean of all records within {max(widths)} steps"
        )
    return figure


def on_tokens(figure: go.Figure, log_x: bool = False) -> go.Figure:
    """Label the x axis, hover texts and caption of curves whose x values are tokens."""
    under = figure.layout.title.subtitle.text or ""
    of_tokens = re.compile(r"\b(over|within)( |<br>)(\d+)( |<br>)steps")  # also where the line is broken
    told = of_tokens.sub(lambda m: f"{m[1]}{m[2]}{int(m[3]):,}{m[4]}tokens", under)
    figure.update_layout(title_subtitle_text=told)
    for axis in figure.select_xaxes():
        if axis.title.text:
            axis.title.text = "tokens read in training" + (" (log scale, 0 not shown)" if log_x else "")
    for trace in figure.data:
        if trace.hovertemplate:
            trace.hovertemplate = trace.hovertemplate.replace("<br>step %", "<br>tokens %")
    return figure


def relative_to_baseline(frame: pd.DataFrame, baseline: str = "transformer") -> pd.DataFrame:
    """Subtract the baseline run of equal seed, step and data from each other run."""
    axes = ["seed", "metric", "step", "data", "T", "site", "part", "layer", "head", "position", "variant", "control"]
    axes = varying(frame, axes)
    base = frame[frame["architecture"] == baseline].groupby(axes, dropna=False, as_index=False)["value"].mean()
    paired = frame[frame["architecture"] != baseline].merge(base, on=axes, suffixes=("", "_base"))
    if paired.empty:
        raise WorkbenchError(f"nothing to compare: no other run shares a seed with a {baseline}")
    return paired.assign(value=paired["value"] - paired["value_base"], se=np.nan)[frame.columns]


def matrices(frame: pd.DataFrame) -> pd.DataFrame:
    """Return gradient norms of weight matrices (after clipping if only those exist); raises `WorkbenchError` for none."""
    return checked(frame[_of_matrices(frame)].assign(variant=None))


def matrices_at(frame: pd.DataFrame, step: float | None = None) -> pd.DataFrame:
    """Return gradient norms of weight matrices at one step (see `at_step`)."""
    norms = frame[_of_matrices(frame)]
    return matrices(at_step(norms, step) if len(norms) else norms)


def means_of_matrices(frame: pd.DataFrame) -> pd.DataFrame:
    """Return gradient norms of weight matrices, averaged over the runs of each architecture, at all steps."""
    norms = frame[_of_matrices(frame)]
    keys = ["architecture", "part", "layer", "step"]
    means = norms.groupby(keys, dropna=False, as_index=False, observed=True)["value"].mean()
    return checked(typed(means.assign(metric="gradient_norm", unit=norms["unit"].iloc[0] if len(norms) else None)))


def steps_of_matrices(frame: pd.DataFrame) -> list[int]:
    """Return the steps with recorded gradients of weight matrices."""
    return sorted(int(s) for s in frame.loc[_of_matrices(frame), "step"].dropna().unique())


def _of_matrices(frame: pd.DataFrame) -> pd.Series:
    plain = frame["variant"].isna() | (frame["variant"] == "clipped")
    parts = [part for part in frame["part"].dropna().unique() if str(part).startswith("W_")]
    return (frame["metric"] == "gradient_norm") & plain & frame["part"].isin(parts)


def clipped(frame: pd.DataFrame) -> bool:
    """Return whether the frame has gradients recorded after clipping."""
    return bool(((frame["metric"] == "gradient_norm") & (frame["variant"] == "clipped")).any())


def at_step(rows: pd.DataFrame, step: float | None) -> pd.DataFrame:
    """Return rows of the last recorded step at or before `step`; None is the last step."""
    steps = np.sort(rows["step"].dropna().unique())
    before = steps[steps <= step] if step is not None else steps
    return rows[rows["step"] == (before[-1] if len(before) else steps[0])]


def gradient_layers(parts: Sequence[tuple[str, pd.DataFrame]], *, compare: bool = False) -> go.Figure:
    """Draw gradient norms by matrix and layer at one step, one map per (name, rows), and A / B if asked to `compare`."""
    rows = [(name, part[part["layer"].notna()]) for name, part in parts]
    rows = [(name, part) for name, part in rows if len(part)]
    if not rows:
        raise WorkbenchError("no gradient of a layer's matrix was written down here")
    names = _in_order({str(p) for _, part in rows for p in part["part"]})
    tables = {name: part.pivot_table(index="layer", columns="part", values="value") for name, part in rows}
    grids = [(name, _log10(table.reindex(columns=names))) for name, table in tables.items()]
    norms = pd.concat([part for _, part in rows])
    steps = sorted({int(part["step"].max()) for _, part in rows})
    blank = "blank: no such matrix" if any(grid.isna().any(axis=None) for _, grid in grids) else ""
    under = subtitle(norms, f"training step {' and '.join(map(str, steps))}", *_reading(norms), blank)
    most = max(len(grid) for _, grid in grids)
    figure = _maps(grids, "layer %{y}, %{x}", compare=compare, height=34 * max(3, most), least=300)
    figure.update_xaxes(type="category", tickangle=-60, tickfont_size=11)
    figure.update_yaxes(dtick=1 if most <= MAX_WHOLE else None)
    figure.update_yaxes(title_text="layer", col=1)
    figure = _scaled(dressed(figure, "Gradient norms, layer by layer", under, figure.layout.height))
    return figure.update_coloraxes(colorbar_title_side="right")  # the bar is low


def gradient_map(frame: pd.DataFrame) -> go.Figure:
    """Draw gradient norms by matrix and layer over training, one panel per architecture, on one logarithmic colour scale."""
    rows = means_of_matrices(frame)
    parts = [(label(name), rows[rows["architecture"] == name]) for name in ordered(rows["architecture"])]
    return gradient_maps(parts, told=matrices(frame))


def gradient_maps(
    parts: Sequence[tuple[str, pd.DataFrame]], *, compare: bool = False, told: pd.DataFrame | None = None
) -> go.Figure:
    """Draw gradient norms over training, one map per (name, rows), and A / B; `told` has the data and seeds of the subtitle."""
    thin = [(name, *thinned(rows, MAX_COLUMNS)) for name, rows in parts]
    numbers = [rows["layer"].map(lambda n: "" if pd.isna(n) else f" {n:.0f}") for _, rows, _ in thin]
    of_layer = zip(thin, numbers, strict=True)
    thin = [(name, rows.assign(row=rows["part"].astype(str) + layer), n) for (name, rows, n), layer in of_layer]
    norms, width = pd.concat([rows for _, rows, _ in thin]), max(width for _, _, width in thin)
    order = list[str]()  # from below, the same for all: a matrix that a model lacks is left blank
    for part in reversed(_in_order({str(p) for p in norms["part"]})):
        order += [" " * len(order)] if order else []  # a blank row between matrices
        order += list(norms[norms["part"] == part].sort_values("layer")["row"].unique())
    tables = [(name, rows.pivot_table(index="row", columns="step", values="value")) for name, rows, _ in thin]
    grids = [(name, _log10(table).reindex(order)) for name, table in tables]
    caption = f"each column the mean of all records within {width} steps" if width > 1 else ""
    told = norms if told is None else told
    under = subtitle(told, "each matrix: the first layer below", *_reading(told), caption)
    height = max(180, min(9 * max(len(grid) for _, grid in grids), 560))
    figure = _maps(grids, "%{y} at step %{x}", compare=compare, height=height, across="training step")
    for trace, axis in zip(figure.data, figure.select_yaxes(), strict=False):
        ticks: dict[str, list[str]] = {}  # one for each matrix, in the middle of its layers
        for row in trace.y:
            ticks.setdefault(row.partition(" ")[0], []).append(row)
        ticks.pop("", None)
        middle = [rows[len(rows) // 2] for rows in ticks.values()]
        axis.update(type="category", tickfont_size=11, tickvals=middle, ticktext=list(ticks))
    return _scaled(dressed(figure, "Gradient norms over training", under, figure.layout.height))


def _reading(rows: pd.DataFrame) -> list[str]:
    seeds = ["mean over seeds"] * (rows["seed"].nunique() > 1)
    return [*seeds, *fewer_seeds([("step", rows)], rows), "lighter: larger norm"]


def _maps(
    grids: list[tuple[str, pd.DataFrame]], place: str, *, compare: bool, height: int, across: str = "", least: int = 235
) -> go.Figure:
    """Draw panels of logarithms, at most three in a row; `height` and `least` width in pixels per panel, `across` the x title."""
    shown = list(grids)
    if compare and len(grids) == 2:
        (_, a), (_, b) = grids
        both = [n for n in a.index if n in b.index]
        shown.append((RATIO, a.sub(b).reindex(both, columns=a.columns.intersection(b.columns))))
    columns = min(len(shown), 3)
    count = -(-len(shown) // columns)
    # labels at the left and below serve all panels where these have the same rows, and the same columns
    same_rows = len({tuple(grid.index) for _, grid in shown}) == 1
    same_columns = len({tuple(grid.columns) for _, grid in shown}) == 1
    gap = 40 if same_columns else 96
    printed = sum(grid.size for _, grid in shown) <= MAX_PRINTED
    figure = make_subplots(
        count, columns, subplot_titles=[name for name, _ in shown], horizontal_spacing=(0.06 if same_rows else 0.14) / columns + 0.02,
        vertical_spacing=gap / (count * (height + gap)),
    )  # fmt: skip
    figure.update_layout(height=count * (height + gap) + 60)
    for i, (name, grid) in enumerate(shown):
        z = grid.to_numpy(dtype="float32")
        axes = (grid.columns, grid.index)
        x, y = ([int(n) if a.dtype.kind in "fi" else markup.escape(str(n)) for n in a] for a in axes)
        ratio, at, lowest = name == RATIO, {"row": i // columns + 1, "col": i % columns + 1}, i + columns >= len(shown)
        caption = "A is %{customdata:.2f} times B" if ratio else "%{customdata:.3g}"
        figure.add_heatmap(
            z=z, x=x, y=y, customdata=10**z, coloraxis="coloraxis2" if ratio else "coloraxis", name=name,
            text=[[_brief(v) for v in row] for row in 10.0**z] if printed else None,
            texttemplate="%{text}" if printed else None, textfont_size=11, hoverongaps=False,
            hovertemplate=f"{name}<br>{place}: {caption}<extra></extra>", **at,
        )  # fmt: skip
        figure.update_yaxes(showticklabels=not same_rows or i % columns == 0, showgrid=False, **at)
        figure.update_xaxes(showticklabels=not same_columns or lowest, title_text=across if lowest else "", **at)
    return at_least(figure, least * columns) if columns > 1 else figure


def _brief(value: float) -> str:
    if not np.isfinite(value):
        return ""
    return f"{value:.2g}" if value >= 1e-3 else f"{value:.1e}".replace("e-0", "e−").replace("e-", "e−")


def _log10(grid: pd.DataFrame) -> pd.DataFrame:
    return grid.where(grid > 0).astype("float64").apply(np.log10)


def _in_order(parts: set[str]) -> list[str]:
    """Matrices as a block reads them: attention, then the MLP, then others by name."""
    known = ["W_Q", "W_K", "W_V", "W_O", "W_gate", "W_up", "W_in", "W_down", "W_out"]
    return [p for p in known if p in parts] + sorted(parts - set(known))


def _scaled(figure: go.Figure) -> go.Figure:
    """One logarithmic colour scale for all norms, and a diverging one for their ratio."""
    norms, ratios = (
        np.concatenate([np.zeros(0), *(np.asarray(t.z).ravel() for t in figure.data if t.coloraxis == axis)])
        for axis in ("coloraxis", "coloraxis2")
    )
    norms, ratios = norms[np.isfinite(norms)], ratios[np.isfinite(ratios)]
    if not len(norms):
        raise WorkbenchError("all gradients are zero here")
    bottom, top = float(np.percentile(norms, 3)), float(norms.max())
    ticks = _ticks(bottom, top, clipped=norms.min() < bottom)
    figure.update_layout(coloraxis=colour_axis(SEQUENTIAL, bottom, top, "norm", **ticks))
    if len(ratios):
        limit = float(np.percentile(np.abs(ratios), 98)) or 1.0
        ticks = _ticks(-limit, limit, "×", clipped=np.abs(ratios).max() > limit)
        figure.update_layout(coloraxis2=colour_axis(DIVERGING, -limit, limit, RATIO, x=1.12, **ticks))
    return figure


def _ticks(low: float, high: float, sign: str = "", *, clipped: bool = False) -> dict[str, Any]:
    """Ticks between two logarithms; only powers of ten over a wide range. `clipped`: values beyond the ends have their colour."""
    powers = range(int(np.floor(low)), int(np.ceil(high)) + 1)
    fine = (1, 1.25, 1.6, 2, 2.5, 3.2, 4, 5, 6.3, 8)
    steps = fine if high - low < 0.8 else (1, 2, 5) if high - low < 3 else (1,)
    marks = [m * 10.0**p for p in powers for m in steps if low <= np.log10(m * 10.0**p) <= high]
    words = [f"{sign}{m:g}" for m in marks]
    if clipped and words:
        ends = {0: (low, "≤ "), len(marks) - 1: (high, "≥ ")} if sign else {0: (low, "≤ ")}
        for i, (end, mark) in ends.items():
            marks[i], words[i] = 10**end, f"{mark}{sign}{_brief(10**end)}"
    return {"tickvals": [float(np.log10(m)) for m in marks], "ticktext": words}


def coefficients_figure(frame: pd.DataFrame) -> go.Figure:
    """Plot learned coefficients over training: one panel per layer, one line per coefficient (mean and range over seeds)."""
    rows = checked(frame[frame["metric"] == "coefficient"])
    if rows["architecture"].nunique() > 1:
        models = ordered(rows["architecture"])
        raise WorkbenchError(f"coefficients of different architectures mean different things; keep one of {models}")
    layers = sorted(rows["layer"].dropna().unique())
    columns = min(len(layers), 2)
    count = -(-len(layers) // columns)
    after = rows["part"].str.startswith(
        "alpha_"
    )  # averages of outputs after a block; all others are of the layer itself
    place = (
        "after block {:.0f}" if after.all() else "layer {:.0f}, averages after it" if after.any() else "layer {:.0f}"
    )
    titles = [place.format(n) for n in layers]
    figure = make_subplots(
        count, columns, subplot_titles=titles, shared_yaxes="all", vertical_spacing=0.3 / count, horizontal_spacing=0.06
    )
    parts = sorted(rows["part"].unique())
    shades = [colour_of((210 + 300 * i / len(parts)) / 360, LUMINANCES[i % 2]) for i in range(len(parts))]
    for i, layer in enumerate(layers):
        for part, shade in zip(parts, shades, strict=True):
            mine = rows[(rows["layer"] == layer) & (rows["part"] == part)]
            curve = mine.groupby("step")["value"].agg(["mean", "min", "max"])
            if curve.empty:
                continue
            at = {"row": i // columns + 1, "col": i % columns + 1}
            ends = {"array": curve["max"] - curve["mean"], "arrayminus": curve["mean"] - curve["min"]}
            index, name = part.removeprefix("alpha_"), words(part)
            if index.isdecimal():  # DenseFormer's weight of an earlier output
                name = "embedding" if index == "0" else f"output of block {int(index) - 1}"
            figure.add_scatter(
                x=curve.index, y=curve["mean"], error_y={**ends, "thickness": 0.6, "width": 0}, name=name,
                line={"color": shade}, mode="lines", legendgroup=part, showlegend=not any(t.legendgroup == part for t in figure.data), **at,
            )  # fmt: skip
            figure.update_xaxes(title_text="training step", **at)
    figure.update_yaxes(title_text="coefficient", col=1)  # a weight, a logit, a norm
    outer_titles(figure, len(layers), columns)
    title = f"Learned coefficients of {label(rows['architecture'].iloc[0])}"
    under = subtitle(rows, "whisker: range over seeds", *fewer_seeds([("step", rows)], rows))
    return dressed(figure, title, under, 250 * count)


def pace_figure(frame: pd.DataFrame) -> go.Figure:
    """Draw each run's median tokens per second as bars with the range over seeds."""
    rows = frame[frame["metric"] == "tokens_per_second"]
    runs = rows.groupby("run", as_index=False).first()
    middle = runs["run"].map(rows.groupby("run")["value"].median())
    return plot(runs.assign(value=middle, step=pd.array([pd.NA] * len(runs), "Int64")), title="Throughput")
