"""Learned depth weights of one checkpoint on the Depth page, as `workbench coefficients` prints them."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from workbench import plots
from workbench.errors import BadCheckpoint, WorkbenchError
from workbench.plots.depth_weights import KEYS, depth_weights_figure
from workbench.runs.run import Run
from workbench.storage.remote import is_url
from workbench.views.page_links import Link
from workbench.views.registered_views import Drawing, view
from workbench.views.source import RunAtStep, Source

INTO = {
    "value": "in values", "query": "in queries", "key": "in keys", "output": "in attention outputs", "stream": "in block inputs",
}  # fmt: skip
"""Quantities of an observed module, by the tensor that is mixed."""


@view("depth", "coefficients")
def checkpoint_coefficients(source: Source, link: Link) -> Drawing:
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
            frame, words = read_model(source, subject)
            parts.append((subject.title, frame.assign(model=subject.title, step=subject.step)))
            sentences.append(f"{subject.tag}: {words}" if subject.tag else words)
    if len(parts) == 2:
        both = parts[0][1].merge(parts[1][1], on=KEYS, suffixes=("", "_b"))
        both = both.assign(value=both["value"] - both["value_b"], init=math.nan, model=plots.MINUS, step=None)
        parts += [(plots.MINUS, both[parts[0][1].columns])] if len(both) else []
    table = pd.concat([frame for _, frame in parts], ignore_index=True)
    return Drawing(depth_weights_figure(parts), table, " ".join(sentences))


def _of_files(path: Path) -> tuple[pd.DataFrame, str]:
    from workbench.checkpoints.coefficients import read_coefficients  # imports torch

    result = read_coefficients(path)
    words = f"{len(result.frame)} numbers of {result.layout}, {result.bytes_read:,} bytes read."
    if "depth query, norm" in set(result.frame["quantity"]):
        words += " Depth queries: a norm of 0 gives equal weights to all outputs."
    return result.frame.assign(init=math.nan), " ".join([words, *result.notes])


def read_model(source: Source, subject: RunAtStep) -> tuple[pd.DataFrame, str]:
    """Read the depth weights of a model at its step, and those at step 0 as `init`.

    An observed module whose files have no known names has the coefficients that are fitted to its activations.

    Returns:
        A row for each number (quantity, layer, part, value, tensor, init), and its origin in words.

    Raises:
        WorkbenchError: The model has no learned depth weights.
    """
    run = Run.open(subject.entry.path)
    try:
        frame, words = _of_files(run.step_folder(subject.step))
    except BadCheckpoint as reason:
        if not run.observed:
            short = str(reason).partition("; it has ")[0]  # the names of all its weights fill a page
            raise WorkbenchError(f"{subject.title} has no learned depth weights: {short}") from reason
        paths = source.model(subject).value_paths()
        paths = paths[paths["into"].isin(INTO) & paths["coefficient"].notna()]
        if not ((paths["source"] != "own") | ((paths["coefficient"] - 1).abs() > 1e-6)).any():
            raise WorkbenchError(f"{subject.title} mixes no layers, so it has no depth weights") from reason
        names = (f"layer {s}" if isinstance(s, int) else str(s) for s in paths["source"])
        part = [n + ("" if pd.isna(h) else f", head {h}") for n, h in zip(names, paths["head"], strict=True)]
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
