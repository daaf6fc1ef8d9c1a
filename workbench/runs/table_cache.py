"""Records and telemetry of many runs, in memory: each file is read once, and an answer is cut out of compact columns.

The command line, the views and the dashboard read runs through these two caches. A run whose stamp is the one it had before
is left as it is. Answers are shared between threads, so never written to.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from workbench.errors import BadCheckpoint
from workbench.runs.catalogue import Entry
from workbench.runs.packed_tables import ANSWERED, ByMetric, Packs, compact, filled
from workbench.runs.recent import Recent, bytes_of
from workbench.runs.records import (
    COLUMNS,
    NEEDED,
    TEXT,
    WHOLE,
    checked,
    newest,
    opened_table,
    record_files,
    records,
)
from workbench.runs.run import Run

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ANSWERS, MAX_NAMED = 100_000_000, 32  # bytes of answers that are kept; sets of names
FEW, TOGETHER = 20, 200  # runs that are packed into a file: at least, at most
Part = tuple[str, int, int]
"""A file's name, when it changed, its bytes."""


class TableCache(ABC):
    """Tables of runs by path and metric; `kind` names them in messages. Several threads may read at once.

    `folder`: the folder of runs under which tables of many runs are packed into few files; None keeps all in memory.
    """

    kind: str

    def __init__(self, folder: Path | None = None, budget: int = MAX_ANSWERS) -> None:
        self.runs: dict[str, tuple[object, ByMetric | str]] = {}
        self.loose: dict[str, Entry] = {}
        """Runs in memory that may be packed."""
        self.packs = Packs(folder, self.kind)
        self.answers = Recent[Any, tuple[pd.DataFrame, dict[str, str]]](budget, lambda answer: bytes_of(answer[0]))
        self.named = Recent[Any, set[str]](MAX_NAMED, lambda _: 1)
        """Names of the metrics of runs that were asked for together."""
        self.lock = threading.Lock()

    @abstractmethod
    def _read(self, path: Path) -> ByMetric:
        """A run's tables; raises `BadCheckpoint` or `OSError` naming what is wrong."""

    def unread(self, entries: Iterable[Entry]) -> int:
        """How many of the runs have not been read as they are now."""
        return sum(not self._held(e) and not self.packs.holds(e) for e in entries)

    def metrics(self, entries: Iterable[Entry]) -> set[str]:
        """Names of the metrics (or quantities) of runs; those whose files are damaged count as empty."""
        found = list(entries)

        def names() -> set[str]:
            self._gather(found)
            return {name for entry in found for name in self._names(entry)}

        with self.lock:
            return set(self.named.get(_key(found), names))

    def rows(
        self, entries: Sequence[Entry], metrics: Sequence[str] | None = None
    ) -> tuple[pd.DataFrame, dict[str, str]]:
        """Rows of runs (all, or of some metrics), `architecture` being the series; and what is wrong with the others.

        Provenance is a category: of a million rows each holds a number.
        """
        key = _key(entries), None if metrics is None else tuple(metrics)
        with self.lock:
            return self.answers.get(key, lambda: self._answer(entries, metrics))

    def _answer(self, entries: Sequence[Entry], metrics: Sequence[str] | None) -> tuple[pd.DataFrame, dict[str, str]]:
        self._gather(entries)
        tables, lengths, problems = [], [], dict[str, str]()
        for entry in entries:
            run = self.runs[entry.path][1] if self._held(entry) else None
            if isinstance(run, str):
                problems[entry.name], run = run, {}
            try:
                parts = self.packs.tables(entry, metrics) if run is None else _of(run, metrics)
            except BadCheckpoint:  # a packed file that is gone or damaged: each run has its own
                return self._answer(entries, metrics)
            tables += parts
            lengths.append(sum(map(len, parts)))
        if not sum(lengths):
            return records([]), problems
        named = {
            k: _repeated([str(getattr(e, v)) for e in entries], lengths)
            for k, v in zip(ANSWERED, ("name", "series"), strict=True)
        }
        return _frame(_joined(tables), named), problems

    def _held(self, entry: Entry) -> bool:
        return self.runs.get(entry.path, (None,))[0] == entry.stamp

    def _names(self, entry: Entry) -> Iterable[str]:
        if self._held(entry):
            run = self.runs[entry.path][1]
            return () if isinstance(run, str) else run
        return self.packs.metrics(entry) or ()

    def _gather(self, entries: Sequence[Entry]) -> None:
        """Read the runs that were not read as they are now; many of them are written down together, for the next server."""
        for entry in entries:
            if self._held(entry) or self.packs.holds(entry):
                continue
            try:
                tables: ByMetric | str = self._read(Path(entry.path))
            except (BadCheckpoint, OSError) as error:
                tables = f"{self.kind}: {error}"
            self.runs[entry.path] = entry.stamp, tables
            self.loose.pop(entry.path, None)
            if not isinstance(tables, str) and self.packs.may_hold(entry):
                self.loose[entry.path] = entry
            if len(self.loose) >= TOGETHER:
                self._pack()
        if len(self.loose) >= FEW:
            self._pack()

    def _pack(self) -> None:
        runs = [(e, tables) for e in self.loose.values() if not isinstance(tables := self.runs[e.path][1], str)]
        if self.packs.add(runs):
            for entry, _ in runs:
                self._forget(entry)
        self.loose.clear()

    def _forget(self, entry: Entry) -> None:
        del self.runs[entry.path]


def _key(entries: Iterable[Entry]) -> tuple[Any, ...]:
    """Runs as they are now."""
    return tuple((e.path, e.series, e.stamp) for e in entries)


def _of(run: ByMetric, metrics: Sequence[str] | None) -> list[pa.Table]:
    return [t for name, tables in run.items() if metrics is None or name in metrics for t in tables]


def _repeated(names: Sequence[str], lengths: Sequence[int]) -> Any:
    """Each name so many times."""
    return pd.array(list(names), dtype="str").take(np.repeat(np.arange(len(names)), lengths))


def _frame(table: pa.Table, named: dict[str, Any]) -> pd.DataFrame:
    """All columns of records: texts (`provenance`, which is long, as a category), nullable whole numbers, floats; absent ones are null."""
    import pyarrow as pa

    many, arrays = len(table), dict[str, Any]()
    for name in COLUMNS:
        column = table[name].combine_chunks() if name in table.column_names else None
        if name in named:
            arrays[name] = named[name]
        elif name in TEXT:
            codes = np.full(many, -1) if column is None else column.indices.fill_null(-1).to_numpy()
            texts = [] if column is None else column.dictionary.to_pylist()
            if name == "provenance":
                arrays[name] = pd.Categorical.from_codes(codes, pd.Index(texts, dtype="str"))
            else:  # what is mapped and joined: of a category that would make another one
                arrays[name] = pd.array(texts, dtype="str").take(codes, allow_fill=True)
        elif name in WHOLE:
            mask = np.ones(many, bool) if column is None else column.is_null().to_numpy(zero_copy_only=False)
            values = np.zeros(many, "int64") if column is None else column.fill_null(0).cast(pa.int64()).to_numpy()
            arrays[name] = pd.arrays.IntegerArray(values, mask)
        else:
            arrays[name] = (
                np.full(many, np.nan) if column is None else column.cast(pa.float64()).to_numpy(zero_copy_only=False)
            )
    return pd.DataFrame(arrays)


class RecordCache(TableCache):
    """Records of runs as `run_records` shows them."""

    kind = "records"

    def _read(self, path: Path) -> ByMetric:
        files = record_files(path)
        return _by_metric(newest(_together(files))) if files else {}


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

    def __init__(self, folder: Path | None = None, budget: int = MAX_ANSWERS) -> None:
        super().__init__(folder, budget)
        self.parts: dict[Path, _Parts] = {}

    def _forget(self, entry: Entry) -> None:
        super()._forget(entry)
        self.parts.pop(Path(entry.path), None)

    def _read(self, path: Path) -> ByMetric:
        now = _parts_of(path)
        try:
            return self._of_parts(path, now)
        except BadCheckpoint:
            if _parts_of(path) == now:
                raise
            return self._read(path)  # its training ended at this moment, and made one part of all

    def _of_parts(self, path: Path, now: list[Part]) -> ByMetric:
        known = self.parts.pop(path, _Parts())
        if len(now) <= len(known.settled) or now[: len(known.settled)] != known.settled:  # begun anew
            known = _Parts()
        later = now[len(known.settled) :]
        if not later:
            return {}
        folder, grown = path / "telemetry", [part[0] for part in later[:-1]]
        kept = [known.before]
        if grown and later[0] == known.last:
            kept, grown = [*kept, known.tail], grown[1:]
        kept += [_by_metric(_together([folder / name for name in grown]))] if grown else []
        before = _merged(kept) if len(kept) > 1 else known.before
        tail = known.tail if later[-1] == known.last else _by_metric(_together([folder / later[-1][0]]))
        self.parts[path] = _Parts(now[:-1], before, now[-1], tail)
        return {name: [*before.get(name, ()), *tail.get(name, ())] for name in (before | tail)}


def _parts_of(path: Path) -> list[Part]:
    parts = []
    for _, file in Run(path).telemetry_parts():
        with contextlib.suppress(OSError):  # replaced or taken away at this moment
            stat = file.stat()
            parts.append((file.name, stat.st_mtime_ns, stat.st_size))
    return parts


def _together(files: Sequence[Path]) -> pa.Table:
    """The rows of some tables; they are looked through together, which takes a third of the time that each by itself does.

    Raises `BadCheckpoint` naming a file that cannot be read or is no table of records.
    """
    import pyarrow as pa

    tables = [_part(file) for file in files]
    try:
        found = pa.concat_tables(tables, promote_options="permissive")
        return compact(checked(found.unify_dictionaries(), files[0].parent, NEEDED))
    except (BadCheckpoint, pa.ArrowException):  # one of them has columns of other types, or is none of ours
        return _joined([compact(checked(t, file, NEEDED)) for t, file in zip(tables, files, strict=True)])


def _part(file: Path) -> pa.Table:
    """The columns of a part that say something, texts as numbers into a list of texts."""
    with opened_table(file, [c for c in TEXT if c not in ANSWERED]) as opened:
        if missing := set(NEEDED) - set(opened.schema_arrow.names):
            raise BadCheckpoint(f"{file} is no table of records: it has no {' and no '.join(sorted(missing))}")
        return opened.read(columns=filled(opened, NEEDED), use_threads=False)


def _by_metric(table: pa.Table) -> ByMetric:
    import pyarrow.compute as pc

    if not len(table):
        return {}
    names = table["metric"].cast("string")
    return {name: [table.filter(pc.equal(names, name))] for name in names.unique().to_pylist() if name is not None}


def _merged(parts: Sequence[ByMetric]) -> ByMetric:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: [_joined([t for part in parts for t in part.get(name, ())])] for name in names}


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    import pyarrow as pa

    return pa.concat_tables(tables, promote_options="permissive").unify_dictionaries().combine_chunks()
