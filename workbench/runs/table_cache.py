"""Cache of many runs' records and telemetry, shared between threads: each file is read once into compact columns."""

from __future__ import annotations

import contextlib
import json
import threading
import uuid
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from workbench.errors import BadCheckpoint
from workbench.runs.catalogue import Entry
from workbench.runs.records import (
    COLUMNS,
    NEEDED,
    TEXT,
    WHOLE,
    concatenated,
    encoded,
    newest,
    read_tables,
    record_files,
    records,
)
from workbench.runs.run import Run
from workbench.runs.sqlite_index import Index, IndexRow

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ANSWERS = 100_000_000  # bytes
BATCH = 100  # runs that are held in memory before they are moved to the index
ANSWERED = {"run": "name", "architecture": "series"}
"""Columns that an answer fills in, and the attribute of the entry that each one holds."""

ByMetric = dict[str, list[Any]]  # arrow tables of each metric
File = tuple[str, int, int]  # A file's name, modification time and size


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Cache of values by key: evicts least recently used entries until their total `size` is within `budget`, never the newest."""

    def __init__(self, budget: int, size: Callable[[V], int]) -> None:
        self.budget, self.size, self.all = budget, size, 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the cached value of a key, or cache the result of `make`."""
        if key not in self._entries:
            value = make()
            self._entries[key] = value, self.size(value)
            self.all += self._entries[key][1]
            while len(self) > 1 and self.all > self.budget:
                self.all -= self._entries.popitem(last=False)[1][1]
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()
        self.all = 0


def bytes_of(frame: pd.DataFrame) -> int:
    """Return the memory of a table's columns in bytes."""
    return int(frame.memory_usage(index=False).sum())


class Indexed(NamedTuple):
    """A run in the index: its state and batch, and first row and number of rows per metric."""

    state: str
    batch: str
    places: dict[str, tuple[int, int]]


class TableCache(ABC):
    """Tables of runs by path and metric; the index of `folder` stores them (None: all stay in memory). Answers are read-only."""

    kind: str

    def __init__(self, folder: Path | None = None, budget: int = MAX_ANSWERS) -> None:
        self.folder, self.index = folder, None if folder is None else Index(folder)
        self.runs: dict[str, tuple[object, ByMetric | str]] = {}
        """Stamp and tables of the runs in memory, or why they could not be read."""
        self.answers = Recent[Any, tuple[pd.DataFrame, dict[str, str]]](budget, lambda answer: bytes_of(answer[0]))
        self.files: dict[Path, dict[File, ByMetric]] = {}
        """Tables of each telemetry file of runs that are being written."""
        self.lock = threading.Lock()
        self.indexed = {part.run: Indexed(part.state, *json.loads(part.value)) for part in self._parts(("",))}
        """The runs in the index."""

    @abstractmethod
    def _read(self, path: Path) -> ByMetric:
        """A run's tables; raises `BadCheckpoint` or `OSError` naming the fault."""

    def unread(self, entries: Iterable[Entry]) -> int:
        """Return how many of the runs have not been read since they last changed."""
        return sum(not self._in_memory(e) and not self._in_index(e) for e in entries)

    def metrics(self, entries: Iterable[Entry]) -> set[str]:
        """Return the names of the metrics (or quantities) of runs; those whose files are damaged count as empty."""
        runs, names = list(entries), set[str]()
        with self.lock:
            self._gather(runs)
            for entry in runs:
                tables = self.runs[entry.path][1] if self._in_memory(entry) else self.indexed[self._name(entry)].places
                names |= set() if isinstance(tables, str) else tables.keys()
        return names

    def rows(
        self, entries: Sequence[Entry], metrics: Sequence[str] | None = None
    ) -> tuple[pd.DataFrame, dict[str, str]]:
        """Return rows of runs (all, or of some metrics), `architecture` being the series; and why other runs have none."""
        key = tuple((e.path, e.series, e.stamp) for e in entries), None if metrics is None else tuple(metrics)
        with self.lock:
            return self.answers.get(key, lambda: self._answer(entries, metrics))

    def _answer(self, entries: Sequence[Entry], metrics: Sequence[str] | None) -> tuple[pd.DataFrame, dict[str, str]]:
        import pyarrow as pa

        self._gather(entries)
        indexed = {name: self.indexed[name] for name in (self._name(e) for e in entries if not self._in_memory(e))}
        names = {m for run in indexed.values() for m in run.places if metrics is None or m in metrics}
        parts = self._parts(names, {run.batch for run in indexed.values()})
        batches = {(part.metric, part.run): pa.ipc.open_stream(part.value).read_all() for part in parts}
        wanted = {
            name: [(m, run.batch, place) for m, place in run.places.items() if m in names]
            for name, run in indexed.items()
        }
        lost = [name for name, places in wanted.items() if any((m, b) not in batches for m, b, _ in places)]
        for name in lost:
            del self.indexed[name]
        if lost:  # a row of the index is gone or damaged: the files are read instead
            return self._answer(entries, metrics)
        stored = {name: [batches[m, b].slice(*place) for m, b, place in places] for name, places in wanted.items()}
        tables, lengths, problems = list[Any](), [], dict[str, str]()
        for entry in entries:
            run = self.runs[entry.path][1] if self._in_memory(entry) else {}
            if isinstance(run, str):
                problems[entry.name], run = run, {}
            own = stored.get(self._name(entry)) or [
                t for name, group in run.items() if metrics is None or name in metrics for t in group
            ]
            tables += own
            lengths.append(sum(map(len, own)))
        if not sum(lengths):
            return records([]), problems
        answered = {column: [str(getattr(e, attribute)) for e in entries] for column, attribute in ANSWERED.items()}
        return _frame(concatenated(tables), answered, lengths), problems

    def _in_memory(self, entry: Entry) -> bool:
        return self.runs.get(entry.path, (None,))[0] == entry.stamp

    def _in_index(self, entry: Entry) -> bool:
        return (run := self.indexed.get(self._name(entry))) is not None and run.state == _state(entry)

    def _name(self, entry: Entry) -> str:
        return entry.path.removeprefix(f"{self.folder}/")

    def _gather(self, entries: Sequence[Entry]) -> None:
        """Read runs that changed, and move those to the index that no process writes."""
        fresh = list[Entry]()
        for entry in entries:
            if self._in_memory(entry) or self._in_index(entry):
                continue
            try:
                tables: ByMetric | str = self._read(Path(entry.path))
            except (BadCheckpoint, OSError) as error:
                tables = f"{self.kind}: {error}"
            self.runs[entry.path] = entry.stamp, tables
            inside = self.folder is not None and self.folder in Path(entry.path).parents
            if inside and entry.settled and not entry.being_written and not isinstance(tables, str):
                fresh.append(entry)
            if len(fresh) >= BATCH:
                self._move(fresh)
        self._move(fresh)

    def _move(self, entries: list[Entry]) -> None:
        """Move tables from memory to the index as one batch of compressed Arrow tables, and empty the list."""
        import pyarrow as pa

        runs = {self._name(e): tables for e in entries if not isinstance(tables := self.runs[e.path][1], str)}
        metrics = sorted({metric for tables in runs.values() for metric in tables})
        lengths = {metric: [sum(map(len, tables.get(metric, ()))) for tables in runs.values()] for metric in metrics}
        batch, indexed = uuid.uuid4().hex, dict[str, Indexed]()
        for i, (entry, name) in enumerate(zip(entries, runs, strict=True)):
            places = {m: (sum(n[:i]), n[i]) for m, n in lengths.items() if n[i]}
            indexed[name] = Indexed(_state(entry), batch, places)
        parts = [IndexRow(self.kind, "", name, s.state, json.dumps(s[1:]).encode()) for name, s in indexed.items()]
        for metric in metrics:
            table = concatenated([t for tables in runs.values() for t in tables.get(metric, ())])
            file = pa.BufferOutputStream()
            columns = {n: table[n].cast("string") if n in TEXT else table[n] for n in table.column_names}
            table = encoded(pa.table(columns))  # without the texts of other metrics
            with pa.ipc.new_stream(file, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
                stream.write_table(table)
            parts.append(IndexRow(self.kind, metric, batch, "", bytes(file.getvalue())))
        if indexed and self.index and self.index.write(self.kind, list(indexed), parts):
            self.indexed |= indexed
            for entry in entries:
                del self.runs[entry.path]
                self.files.pop(Path(entry.path), None)
        entries.clear()

    def _parts(self, metrics: Collection[str], runs: Collection[str] | None = None) -> Iterable[IndexRow]:
        return self.index.read(self.kind, metrics, runs) if self.index and metrics else ()


def _state(entry: Entry) -> str:
    return " ".join(map(str, entry.stamp))


def _frame(table: pa.Table, names: dict[str, list[str]], lengths: Sequence[int]) -> pd.DataFrame:
    """Return all columns of records; each of `names` is written in as often as `lengths` says."""
    import pyarrow as pa

    count, arrays = len(table), dict[str, Any]()
    for name in COLUMNS:
        column = table[name].combine_chunks() if name in table.column_names else None
        if name in names:
            arrays[name] = pd.array(names[name], dtype="str").take(np.repeat(np.arange(len(lengths)), lengths))
        elif name in TEXT:
            codes = np.full(count, -1) if column is None else column.indices.fill_null(-1).to_numpy()
            texts = [] if column is None else column.dictionary.to_pylist()
            if name == "provenance":
                arrays[name] = pd.Categorical.from_codes(codes, pd.Index(texts, dtype="str"))
            else:  # mapped and joined later, which makes another copy of a categorical column
                arrays[name] = pd.array(texts, dtype="str").take(codes, allow_fill=True)
        elif name in WHOLE:
            mask = np.ones(count, bool) if column is None else column.is_null().to_numpy(zero_copy_only=False)
            values = np.zeros(count, "int64") if column is None else column.fill_null(0).cast(pa.int64()).to_numpy()
            arrays[name] = pd.arrays.IntegerArray(values, mask)
        else:
            arrays[name] = np.full(count, np.nan) if column is None else column.to_numpy(zero_copy_only=False)
    return pd.DataFrame(arrays)


class RecordCache(TableCache):
    """Records of runs as `run_records` shows them."""

    kind = "records"

    def _read(self, path: Path) -> ByMetric:
        return _by_metric(newest(read_tables(record_files(path), NEEDED, (*ANSWERED,))))


class TelemetryCache(TableCache):
    """Telemetry of runs; of a run that is being written only new files are read."""

    kind = "telemetry"

    def _read(self, path: Path) -> ByMetric:
        files, known = _files_of(path), self.files.pop(path, {})
        try:
            folder, answered = path / "telemetry", (*ANSWERED,)
            tables = {f: known.get(f) or _by_metric(read_tables([folder / f[0]], NEEDED, answered)) for f in files}
        except BadCheckpoint:
            if _files_of(path) == files:
                raise
            return self._read(path)  # the training ended at this moment and merged its files
        self.files[path] = tables
        metrics = dict.fromkeys(name for table in tables.values() for name in table)
        return {name: [t for table in tables.values() for t in table.get(name, ())] for name in metrics}


def _files_of(path: Path) -> list[File]:
    parts = []
    for _, file in Run(path).telemetry_parts():
        with contextlib.suppress(OSError):  # replaced or taken away at this moment
            stat = file.stat()
            parts.append((file.name, stat.st_mtime_ns, stat.st_size))
    return parts


def _by_metric(table: pa.Table) -> ByMetric:
    import pyarrow.compute as pc

    if not len(table):
        return {}
    names = table["metric"].cast("string")
    return {name: [table.filter(pc.equal(names, name))] for name in names.unique().to_pylist() if name is not None}
