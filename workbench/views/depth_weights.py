"""Learned depth weights of one checkpoint on the Depth page, as `workbench coefficients` prints them."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench import plots
from workbench.checkpoints.coefficients import read_coefficients
from workbench.errors import BadCheckpoint, WorkbenchError
from workbench.plots.grids import safe
from workbench.plots.records import whole_ticks
from workbench.plots.style import DIVERGING, PANEL, SEQUENTIAL, at_least, colour_axis, dressed
from workbench.runs.run import Run
from workbench.storage.remote import is_url
from workbench.views.base import Drawing, view
from workbench.views.link import Link
from workbench.views.source import RunAtStep, Source

LINES = 2  # numbers of a layer that are drawn as lines; more are a map
TEXTS = 12  # columns of a map with numbers in its cells
PLOT, CELL, BETWEEN, BELOW = 150, 22, 74, 110  # pixels: lines, a map's row, between two quantities, below all
KEYS = ["quantity", "layer", "part"]
INTO = {
    "value": "in values",
    "query": "in queries",
    "key": "in keys",
    "output": "in attention outputs",
    "stream": "in block inputs",
}
"""Quantities of an observed module, by the tensor that is mixed."""


@view("depth", "coefficients")
def depth_weights(source: Source, link: Link) -> Drawing:
    """Learned depth weights by layer: of model A at its step, of A and B, or of the checkpoint at `path=`; dotted: at random init."""
    path = link.text("path")
    if not path and not link.on("weights"):
        raise WorkbenchError("drawn with weights=1, or with the path of a checkpoint: path=")
    if path:
        if is_url(path):
            raise WorkbenchError(f"a page fetches nothing. In a terminal: workbench coefficients {path}")
        frame, words = _of_files(Path.home() / path[2:] if path.startswith("~/") else Path(path))
        parts, sentences = [(Path(path).name, frame.assign(model=path, step=None))], [words]
    else:
        parts, sentences = [], []
        for subject in source.subjects(link):
            frame, words = _of_model(source, subject)
            parts.append((subject.title, frame.assign(model=subject.title, step=subject.step)))
            sentences.append(f"{subject.tag}: {words}" if subject.tag else words)
    if len(parts) == 2:
        both = parts[0][1].merge(parts[1][1], on=KEYS, suffixes=("", "_b"))
        both = both.assign(value=both["value"] - both["value_b"], init=math.nan, model=plots.MINUS, step=None)
        parts += [(plots.MINUS, both[parts[0][1].columns])] if len(both) else []
    table = pd.concat([frame for _, frame in parts], ignore_index=True)
    return Drawing(_figure(parts), table, " ".join(sentences))


def _of_files(path: Path) -> tuple[pd.DataFrame, str]:
    result = read_coefficients(path)
    words = f"{len(result.frame)} numbers of {result.layout}, {result.bytes_read:,} bytes read."
    if "depth query, norm" in set(result.frame["quantity"]):
        words += " Depth queries: a norm of 0 gives equal weights to all outputs."
    return result.frame.assign(init=math.nan), " ".join([words, *result.notes])


def _of_model(source: Source, subject: RunAtStep) -> tuple[pd.DataFrame, str]:
    """The depth weights of a run's step with those at step 0; of an observed module without known names, its fitted coefficients."""
    run = Run.open(subject.entry.path)
    try:
        frame, words = _of_files(run.step_folder(subject.step))
    except BadCheckpoint as reason:
        if not run.observed:
            raise WorkbenchError(f"{subject.title} has no learned depth weights: {reason}") from reason
        paths = source.model(subject).value_paths()
        paths = paths[paths["into"].isin(INTO) & paths["coefficient"].notna()]
        if not ((paths["source"] != "own") | ((paths["coefficient"] - 1).abs() > 1e-6)).any():
            raise WorkbenchError(f"{subject.title} mixes no layers, so it has no depth weights") from reason
        part = [
            (f"layer {s}" if isinstance(s, int) else str(s)) + ("" if pd.isna(h) else f", head {h}")
            for s, h in zip(paths["source"], paths["head"], strict=True)
        ]
        frame = pd.DataFrame({
            "quantity": paths["into"].map(INTO), "layer": paths["layer"], "part": part, "value": paths["coefficient"],
            "tensor": "", "init": math.nan,
        })  # fmt: skip
        return frame, "Fitted to the activations of the observed module, whose files have no known names."
    if subject.step and 0 in subject.entry.steps:
        first = _of_files(run.step_folder(0))[0]
        frame = frame.drop(columns="init").merge(
            first[[*KEYS, "value"]].rename(columns={"value": "init"}), on=KEYS, how="left"
        )
    return frame, words


def _figure(parts: list[tuple[str, pd.DataFrame]]) -> go.Figure:
    """Draw a row for each quantity and a column for each model: lines over layers, a map of layer by part, or points without layers."""
    everything = pd.concat([frame for _, frame in parts])
    layered = everything.dropna(subset="layer")
    widths = layered.groupby("quantity")["part"].nunique()  # parts of a quantity that has layers
    count = everything.drop_duplicates(KEYS)["quantity"].value_counts()
    single = [q for q in count.index if count[q] == 1 and q not in widths.index]
    rows_of = {q: [q] for q in dict.fromkeys(everything["quantity"]) if q not in single} | (
        {"single numbers": single} if single else {}
    )
    heights = [
        max(PLOT, CELL * layered.loc[layered["quantity"] == q, "layer"].nunique()) if widths.get(q, 0) > LINES else PLOT
        for q in rows_of
    ]
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
                coloraxis=f"coloraxis{2 * row + (model == plots.MINUS)}",
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
            shade = f"hsl({(210 + 150 * names.index(part)) % 360 if part else 210},60%,48%)"
            x = (
                line["layer"]
                if quantity in widths.index
                else line["quantity"]
                if rows_of[quantity] == single
                else list(range(len(line)))
            )
            for values, dash in ((line["value"], "solid"), (line["init"], "dot")):
                if values.notna().any():
                    legend = safe(f"{part}{', ' * bool(part)}at random init" if dash == "dot" else part)
                    mode = "lines" if dash == "dot" else "lines+markers" if quantity in widths.index else "markers"
                    figure.add_scatter(
                        x=x, y=values, name=legend, legendgroup=legend, mode=mode, line={"color": shade, "dash": dash},
                        showlegend=bool(legend) and not any(t.name == legend for t in figure.data),
                        hovertemplate="%{x}: %{y:.4g}<extra></extra>", **at,
                    )  # fmt: skip
        if column > 1 and model != plots.MINUS:
            figure.update_yaxes(matches=next(figure.select_yaxes(row=row, col=1)).plotly_name.replace("axis", ""), **at)
    for scale in sorted({t.coloraxis for t in figure.data if t.type == "heatmap"}):
        maps = [t for t in figure.data if t.type == "heatmap" and t.coloraxis == scale]
        numbers = np.concatenate([np.ravel(t.z) for t in maps])
        low, high = float(np.nanmin(numbers)), float(np.nanmax(numbers))
        minus = maps[0].name == plots.MINUS
        limit, both = max(abs(low), abs(high)) or 1.0, minus or low < 0
        bottom, top = figure.layout[f"yaxis{maps[0].yaxis[1:]}"].domain
        half = (top - bottom) / (2 if len(parts) == 3 else 1)  # the difference has a scale below that of the models
        bar = {"len": half, "y": top - half * minus, "yanchor": "top"}
        span = (-limit, limit) if both else (min(0.0, low), limit)
        figure.update_layout(
            {scale: colour_axis(DIVERGING if both else SEQUENTIAL, *span, plots.MINUS if minus else "weight", **bar)}
        )
    figure = dressed(figure, "Learned depth weights", " and ".join(name for name, _ in parts[:2]), height + BELOW)
    figure.update_layout(legend={"orientation": "h", "x": 0, "y": -64 / height, "yanchor": "top"}, margin_b=BELOW)
    return at_least(figure, max(PANEL * len(parts), 360) if len(parts) > 1 else 360)
