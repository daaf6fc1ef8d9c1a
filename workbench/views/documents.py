"""From a number to its cause: the documents that pull a measured mean most, in one run at one step, as prompts."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from workbench import prompts
from workbench.errors import WorkbenchError
from workbench.runs.catalogue import Entry
from workbench.runs.records import SAMPLE_COLUMNS, facts, one_sample, read_parquet
from workbench.runs.run import Run
from workbench.views.link import Link
from workbench.views.measures import Measure, placed, varied
from workbench.views.source import LETTERS, Source, Subject

MOST = 10  # documents that are shown
OPENING = 48  # tokens of a document after which its excerpt ends, more or less


@dataclass(frozen=True)
class Cell:
    """A number of one run at one step: of a layer and a head, of a layer's mean, or of the whole model where both are None."""

    entry: Entry
    step: int
    layers: list[int]
    """Layers with a number for each document."""
    heads: list[int]
    layer: int | None
    head: int | None
    values: pd.Series
    """One value for each document, by its number in the data."""
    T: int
    """Tokens of each."""
    provenance: str
    unit: str


def cell(source: Source, link: Link, measure: Measure, entry: Entry, step: int | None) -> Cell:
    """The link's cell of a measure (its `layer` and `head`; without them the last layer, and all heads) and the values behind it.

    Raises `WorkbenchError` where values of single documents are not stored, and for a layer or head that has none.
    """
    shown = measure.rows[(measure.rows["run"] == entry.name) & measure.rows["control"].isna()]
    shown = one_sample(shown if step is None else shown[shown["step"] == step])
    rows = source.keep(("documents", entry.path, entry.stamp), lambda: _samples(entry))
    rows = varied(placed(rows[rows["metric"] == measure.metric], measure.site), measure.variant)
    rows = rows[rows["provenance"].isin(set(shown["provenance"].astype("str")))]
    if rows.empty or rows["document"].isna().all():
        name, plain = measure.metric.replace("_", " "), Path(entry.path).name
        again = (
            ""
            if entry.shipped
            else f"; measured again they are kept: workbench measure {shlex.quote(entry.path)} -m {measure.metric}"
        )
        raise WorkbenchError(f"of {name} in {plain} no values of single documents are stored{again}")
    layers, layer = _chosen(rows, "layer", link.whole("layer"), last=True)
    rows = rows if layer is None else rows[rows["layer"] == layer]
    heads, head = _chosen(rows, "head", link.whole("head"), last=False)
    rows = rows if head is None else rows[rows["head"] == head]
    unit = str(shown["unit"].dropna().iloc[0]) if shown["unit"].notna().any() else ""
    return Cell(
        entry, int(rows["step"].iloc[0]), layers, heads, layer, head, rows.groupby("document")["value"].mean(),
        int(shown["T"].dropna().iloc[0]), str(rows["provenance"].iloc[0]), unit,
    )  # fmt: skip


def _samples(entry: Entry) -> pd.DataFrame:
    return read_parquet(sorted(Path(entry.path).glob("records/*.samples.parquet")), SAMPLE_COLUMNS)


def _chosen(rows: pd.DataFrame, axis: str, asked: int | None, *, last: bool) -> tuple[list[int], int | None]:
    """What there is on an axis, and what is chosen of it."""
    there = sorted(int(n) for n in rows[axis].dropna().unique())
    if asked is not None and asked not in there:
        if there:
            raise WorkbenchError(f"{axis} {asked} has no values of single documents; choose from {there}")
        asked = None
    return there, asked if asked is not None else there[-1] if there and last else None


def pulling(source: Source, found: Cell) -> pd.DataFrame:
    """The documents furthest from the mean, the furthest first: document, value, pull (what it adds to the mean), prompt."""
    values = found.values
    pull = (values - values.mean()) / len(values)
    top = pull.abs().sort_values(ascending=False, kind="stable").head(MOST).index
    texts = source.keep(
        ("texts of documents", found.entry.path, found.entry.stamp, found.provenance),
        lambda: _texts(source, found, [int(n) for n in values.index]),
    )
    rows = [
        {"document": int(n), "value": float(values[n]), "pull": float(pull[n]), "prompt": texts.get(int(n))}
        for n in top
    ]
    return pd.DataFrame(rows).assign(
        run=found.entry.name, step=found.step, layer=found.layer, head=found.head, unit=found.unit
    )


def _texts(source: Source, found: Cell, documents: list[int]) -> dict[int, str]:
    """How each document begins, as a prompt; none where the measured text is not the run's own, which the sample's sum tells."""
    entry, run = found.entry, Run.open(found.entry.path)
    if entry.imported:
        return {}
    try:
        sample = run.data.sample(len(documents), found.T)
    except WorkbenchError:  # its text is not here
        return {}
    if sample.hash != facts(found.provenance).get("data"):
        return {}
    rows = dict(zip(map(int, sample.documents), sample.ids.tolist(), strict=True))
    if not entry.steps:  # shipped without weights: what can be read is its text
        reads = run.tokenizer
        return {} if reads is None else {n: str(reads.decode(ids[:OPENING])) for n, ids in rows.items()}
    step, letters = found.step if found.step in entry.steps else entry.steps[-1], LETTERS.get(entry.kind, 0)
    model = source.model(Subject(entry, step))
    return {
        n: prompts.excerpt(model, ids, min(OPENING, len(ids) - 1), 0, letters=letters).text for n, ids in rows.items()
    }
