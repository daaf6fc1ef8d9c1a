"""Records and telemetry of many runs, in memory: each file is read once, and an answer is cut out of compact columns.

The command line, the views and the dashboard read runs through these two caches. A run whose stamp is the one it had before
is left as it is. Answers are shared between threads, so never written to.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from workbench.errors import BadCheckpoint
from workbench.files import read_bytes
from workbench.runs.catalogue import Entry
from workbench.runs.records import MAX_TABLE, NEEDED, TEXT, WHOLE, checked, damage, records, run_records, typed
from workbench.runs.run import Run

if TYPE_CHECKING:
    import pyarrow as pa

ANSWERED = ("run", "architecture")  # columns that the answer fills in
MAX_ANSWERS = 200_000_000  # bytes of answers that are kept

ByMetric = dict[str, list[Any]]
"""Arrow tables of each metric."""
Part = tuple[str, int, int]
"""A file's name, when it changed, its bytes."""


class TableCache(ABC):
    """Tables of runs by path and metric; `kind` names them in messages. Several threads may read at once."""

    kind: str

    def __init__(self, budget: int = MAX_ANSWERS) -> None:
        self.runs: dict[str, tuple[object, ByMetric | str]] = {}
        self.answers: OrderedDict[Any, tuple[pd.DataFrame, dict[str, str]]] = OrderedDict()
        self.budget, self.lock = budget, threading.Lock()

    @abstractmethod
    def _read(self, path: Path) -> ByMetric:
        """A run's tables; raises `BadCheckpoint` or `OSError` naming what is wrong."""

    def unread(self, entries: Iterable[Entry]) -> int:
        """How many of the runs have not been read as they are now."""
        return sum(e.path not in self.runs or self.runs[e.path][0] != e.stamp for e in entries)

    def metrics(self, entries: Iterable[Entry]) -> set[str]:
        """Names of the metrics (or quantities) of runs; those whose files are damaged count as empty."""
        with self.lock:
            return {name for entry in entries if not isinstance(run := self._run(entry), str) for name in run}

    def rows(
        self, entries: Sequence[Entry], metrics: Sequence[str] | None = None
    ) -> tuple[pd.DataFrame, dict[str, str]]:
        """Rows of runs (all, or of some metrics), `architecture` being the series; and what is wrong with the others."""
        key = tuple((e.path, e.series, e.stamp) for e in entries), None if metrics is None else tuple(metrics)
        with self.lock:
            if key not in self.answers:
                self.answers[key] = self._answer(entries, metrics)
                self._shrink()
            self.answers.move_to_end(key)
            return self.answers[key]

    def _answer(self, entries: Sequence[Entry], metrics: Sequence[str] | None) -> tuple[pd.DataFrame, dict[str, str]]:
        tables, lengths, problems = [], [], dict[str, str]()
        for entry in entries:
            run = self._run(entry)
            if isinstance(run, str):
                problems[entry.name], run = run, {}
            parts = [t for name, of_metric in run.items() if metrics is None or name in metrics for t in of_metric]
            tables += parts
            lengths.append(sum(map(len, parts)))
        if not sum(lengths):
            return records([]), problems
        frame = typed(_joined(tables).to_pandas())
        series, names = (np.repeat([getattr(e, k) for e in entries], lengths) for k in ("series", "name"))
        return frame.assign(architecture=series, run=names).astype(dict.fromkeys(ANSWERED, "str")), problems

    def _run(self, entry: Entry) -> ByMetric | str:
        stamp, tables = self.runs.get(entry.path, (None, ""))
        if stamp != entry.stamp:
            try:
                tables = self._read(Path(entry.path))
            except (BadCheckpoint, OSError) as error:
                tables = f"{self.kind}: {error}"
            self.runs[entry.path] = entry.stamp, tables
        return tables

    def _shrink(self) -> None:
        """Drop the answers that were used longest ago, but not the last."""
        sizes = {key: int(frame.memory_usage(index=False).sum()) for key, (frame, _) in self.answers.items()}
        while len(self.answers) > 1 and sum(sizes[key] for key in self.answers) > self.budget:
            self.answers.popitem(last=False)


class RecordCache(TableCache):
    """Records of runs as `run_records` shows them."""

    kind = "records"

    def _read(self, path: Path) -> ByMetric:
        return {name: [_compact(rows)] for name, rows in _by_metric(run_records(path)).items()}


@dataclass
class _Parts:
    """What was read of a run's telemetry: all parts but the last, and the last, which a recorder replaces as it grows."""

    settled: list[Part] = field(default_factory=list)
    before: ByMetric = field(default_factory=dict)
    last: Part | None = None
    tail: ByMetric = field(default_factory=dict)


class TelemetryCache(TableCache):
    """Telemetry of runs; of one that is being written only the parts that are new are read."""

    kind = "telemetry"

    def __init__(self, budget: int = MAX_ANSWERS) -> None:
        super().__init__(budget)
        self.parts: dict[Path, _Parts] = {}

    def _read(self, path: Path) -> ByMetric:
        now, known = _parts_of(path), self.parts.pop(path, _Parts())
        if len(now) <= len(known.settled) or now[: len(known.settled)] != known.settled:  # begun anew
            known = _Parts()
        folder, later = path / "telemetry", now[len(known.settled) :]
        new = [known.tail if part == known.last else _telemetry(folder / part[0]) for part in later]
        if not new:
            return {}
        before = _merged([known.before, *new[:-1]]) if len(new) > 1 else known.before
        self.parts[path] = _Parts(now[:-1], before, now[-1], new[-1])
        return {name: [*before.get(name, ()), *new[-1].get(name, ())] for name in (before | new[-1])}


def _parts_of(path: Path) -> list[Part]:
    parts = []
    for _, file in Run(path).telemetry_parts():
        with contextlib.suppress(OSError):  # replaced or taken away at this moment
            stat = file.stat()
            parts.append((file.name, stat.st_mtime_ns, stat.st_size))
    return parts


def _telemetry(file: Path) -> ByMetric:
    """A part of telemetry; its texts are read as numbers into a list of texts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        content = pa.BufferReader(read_bytes(file, MAX_TABLE))  # half the time of reading these small files by path
        try:
            opened = pq.ParquetFile(content, read_dictionary=list(TEXT), page_checksum_verification=True)
        except KeyError:  # a table without one of them
            opened = pq.ParquetFile(content, page_checksum_verification=True)
        table = checked(opened.read(use_threads=False), file, NEEDED)
    except damage() as error:
        raise BadCheckpoint(f"cannot read {file}: {error}") from error
    return {name: [rows] for name, rows in _by_metric(_compact(table)).items()}


def _by_metric(table: pa.Table) -> dict[str, pa.Table]:
    import pyarrow.compute as pc

    if not len(table):
        return {}
    names = table["metric"].cast("string")
    return {name: table.filter(pc.equal(names, name)) for name in names.unique().to_pylist() if name is not None}


def _compact(rows: pa.Table) -> pa.Table:
    """Without the columns that say nothing; whole numbers in half the bytes, texts as numbers into a list of texts."""
    import pyarrow as pa

    kept = [c for c in rows.column_names if c not in ANSWERED and rows[c].null_count < len(rows)]
    rows = rows.select(kept)
    for i, column in enumerate(kept):
        if column in WHOLE:
            with contextlib.suppress(pa.ArrowInvalid):  # a number too large for it stays as it is
                rows = rows.set_column(i, column, rows[column].cast(pa.int32()))
        elif column in TEXT and not pa.types.is_dictionary(rows[column].type):
            rows = rows.set_column(i, column, rows[column].cast("string").dictionary_encode())
    return rows.combine_chunks()


def _merged(parts: Sequence[ByMetric]) -> ByMetric:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: [_joined([t for part in parts for t in part.get(name, ())])] for name in names}


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    import pyarrow as pa

    return pa.concat_tables(tables, promote_options="permissive").unify_dictionaries().combine_chunks()
