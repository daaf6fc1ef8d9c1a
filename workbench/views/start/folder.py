"""What is in the folder of runs, as a table."""

from __future__ import annotations

import pandas as pd

from workbench.models.registry import label
from workbench.runs.catalogue import Entry
from workbench.views.source import Source


def table(source: Source) -> pd.DataFrame:
    """A row for each run of the folder."""
    return pd.DataFrame(
        [
            {"run": e.name, "model": label(e.series), "seed": e.seed, "state": _state(e),
             "trained to step": e.last if e.shipped else e.steps[-1] if e.steps else None, "checkpoints": len(e.steps),
             "measures": len(e.measured), "experiment": e.title}
            for e in source.catalogue().entries
        ],
        columns=["run", "model", "seed", "state", "trained to step", "checkpoints", "measures", "experiment"],
    ).astype({"trained to step": "Int64"})  # fmt: skip


def _state(entry: Entry) -> str:
    if entry.being_written:
        return "being written now"
    if entry.kind == "recorded":
        return "recorded"
    if entry.shipped:
        return "shipped, read-only"
    return "finished" if entry.finished else f"stopped before step {entry.last}"
