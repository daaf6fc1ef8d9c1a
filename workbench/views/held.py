"""Records of many runs, held in memory as compact columns: each file is read once, and an answer is cut out of them."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from workbench.catalogue import Entry
from workbench.errors import BadCheckpoint
from workbench.results import NEEDED, TEXT, WHOLE, checked, record_files, records, typed

if TYPE_CHECKING:
    import pyarrow as pa

OURS = ("run", "architecture")  # columns that the answer fills in
ANSWERS = 200_000_000
"""Bytes of answers that are kept."""


class Held:
    """Records of runs by path and metric; several threads may ask at once.

    A run whose stamp is the one it had before is not looked at again. Answers are shared, so never written to.
    """

    def __init__(self, budget: int = ANSWERS) -> None:
        self.runs: dict[str, tuple[object, dict[str, pa.Table] | str]] = {}
        self.answers: OrderedDict[Any, tuple[pd.DataFrame, dict[str, str]]] = OrderedDict()
        self.budget, self.lock = budget, threading.Lock()

    def unread(self, entries: Sequence[Entry]) -> int:
        """How many of the runs have not been read as they are now."""
        return sum(e.path not in self.runs or self.runs[e.path][0] != e.stamp for e in entries)

    def rows(
        self, entries: Sequence[Entry], metrics: Sequence[str] | None = None
    ) -> tuple[pd.DataFrame, dict[str, str]]:
        """Records of runs (all, or of some metrics), `architecture` being the series; and what is wrong with the others."""
        key = tuple((e.path, e.series, e.stamp) for e in entries), None if metrics is None else tuple(metrics)
        with self.lock:
            if key not in self.answers:
                self.answers[key] = self._answer(entries, metrics)
                self._forget()
            self.answers.move_to_end(key)
            return self.answers[key]

    def _answer(self, entries: Sequence[Entry], metrics: Sequence[str] | None) -> tuple[pd.DataFrame, dict[str, str]]:
        tables, lengths, problems = [], [], dict[str, str]()
        for entry in entries:
            found = self._run(entry)
            if isinstance(found, str):
                problems[entry.name], found = found, {}
            parts = [t for name, t in found.items() if metrics is None or name in metrics]
            tables += parts
            lengths.append(sum(map(len, parts)))
        if not sum(lengths):
            return records([]), problems
        frame = typed(_joined(tables).to_pandas())
        series, names = (np.repeat([getattr(e, k) for e in entries], lengths) for k in ("series", "name"))
        return frame.assign(architecture=series, run=names).astype(dict.fromkeys(OURS, "str")), problems

    def _run(self, entry: Entry) -> dict[str, pa.Table] | str:
        known = self.runs.get(entry.path)
        if known is None or known[0] != entry.stamp:
            known = self.runs[entry.path] = (entry.stamp, _read(entry.path))
        return known[1]

    def _forget(self) -> None:
        """Let the answers go that were asked for longest ago, but not the last."""
        sizes = {key: int(frame.memory_usage(index=False).sum()) for key, (frame, _) in self.answers.items()}
        while len(self.answers) > 1 and sum(sizes[key] for key in self.answers) > self.budget:
            self.answers.popitem(last=False)


def _read(path: str) -> dict[str, pa.Table] | str:
    """A run's records by metric, without the columns that say nothing; or what is wrong with them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    for file in record_files(Path(path)):
        try:
            with pq.ParquetFile(file) as opened:
                tables.append(checked(opened.read(), file, NEEDED))
        except BadCheckpoint as error:
            return f"records: {error}"
        except (OSError, KeyError, pa.ArrowException) as error:
            return f"records: cannot read {file}: {error}"
    if not tables:
        return {}
    whole = _joined(tables)
    names = whole["metric"].cast("string")
    return {name: _compact(whole, names, name) for name in names.unique().to_pylist() if name is not None}


def _compact(whole: pa.Table, names: Any, name: str) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = whole.filter(pc.equal(names, name))
    kept = [c for c in rows.column_names if c not in OURS and rows[c].null_count < len(rows)]
    rows = rows.select(kept)
    for i, column in enumerate(kept):
        if column in WHOLE:
            with contextlib.suppress(pa.ArrowInvalid):  # a number too large for it stays as it is
                rows = rows.set_column(i, column, rows[column].cast(pa.int32()))
        elif column in TEXT:
            rows = rows.set_column(i, column, rows[column].cast("string").dictionary_encode())
    return rows.combine_chunks()


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    import pyarrow as pa

    return pa.concat_tables(tables, promote_options="permissive").unify_dictionaries().combine_chunks()
