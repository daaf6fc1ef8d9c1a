"""Telemetry that grows while somebody writes it: parts that were read before are not read again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from workbench.catalogue import Entry
from workbench.errors import BadCheckpoint
from workbench.results import NEEDED, TEXT, checked, records, typed
from workbench.runs import Run

if TYPE_CHECKING:
    import pyarrow as pa

Stamp = tuple[str, int, int]  # a part's name, when it changed, its bytes


@dataclass
class _Held:
    """What was read of a run: all parts but the last as one table, and the last, which a recorder replaces as it grows."""

    settled: list[Stamp] = field(default_factory=list)
    before: pa.Table | None = None
    last: Stamp | None = None
    tail: pa.Table | None = None

    @property
    def stamps(self) -> tuple[Stamp, ...]:
        return (*self.settled, *([self.last] if self.last else ()))


class Growing:
    """Telemetry of runs by path, held as compact tables; several threads may ask at once."""

    def __init__(self) -> None:
        self.held: dict[str, _Held] = {}
        self.seen: dict[str, object] = {}
        self.lock = threading.Lock()

    def rows(
        self, entries: Sequence[Entry], metrics: Sequence[str] | None = None
    ) -> tuple[pd.DataFrame, dict[str, str]]:
        """What runs wrote down (all, or some quantities), `architecture` being the series; and what is wrong with the others.

        A run whose stamp is the one it had before is not looked at again.
        """
        import pyarrow.compute as pc

        tables, lengths, problems = [], [], dict[str, str]()
        for entry in entries:
            try:
                parts = self._tables(entry)
            except (BadCheckpoint, OSError) as error:
                problems[entry.name] = f"telemetry: {error}"
                parts = []
            if metrics is not None:
                wanted = _strings(metrics)
                parts = [t.filter(pc.is_in(t["metric"].cast("string"), value_set=wanted)) for t in parts]
            tables += parts
            lengths.append(sum(map(len, parts)))
        if not sum(lengths):
            return records([]), problems
        frame = typed(_joined(tables).to_pandas())
        series, names = (np.repeat([getattr(e, k) for e in entries], lengths) for k in ("series", "name"))
        return frame.assign(architecture=series, run=names).astype({"architecture": "str", "run": "str"}), problems

    def unread(self, entries: Sequence[Entry]) -> int:
        """How many of the runs have not been read as they are now."""
        return sum(self.seen.get(e.path) != e.stamp for e in entries)

    def names(self, entries: Sequence[Entry]) -> set[str]:
        """The quantities that runs wrote down; damaged parts count as empty."""
        found: set[str] = set()
        for entry in entries:
            with contextlib.suppress(BadCheckpoint, OSError):
                for table in self._tables(entry):
                    found |= set(table["metric"].unique().to_pylist())
        return {name for name in found if name is not None}

    def _tables(self, entry: Entry) -> list[pa.Table]:
        with self.lock:
            if entry.path not in self.held or self.seen.get(entry.path) != entry.stamp:
                self._read(entry.path)
                self.seen[entry.path] = entry.stamp
            held = self.held[entry.path]
        return [t for t in (held.before, held.tail) if t is not None]

    def _read(self, path: str) -> None:
        held, parts = self.held.setdefault(path, _Held()), []
        for _, file in Run(Path(path)).telemetry_parts():
            try:
                told = file.stat()
            except OSError:  # replaced or taken away at this moment
                continue
            parts.append((file.name, told.st_mtime_ns, told.st_size))
        if tuple(parts) == held.stamps:
            return
        folder = Path(path) / "telemetry"
        if parts[: len(held.settled)] != held.settled:  # begun anew
            held = _Held()
        if not parts:
            self.held[path] = _Held()
            return
        more = parts[len(held.settled) : -1]
        tables = [held.tail if stamp == held.last else _table(folder / stamp[0]) for stamp in more]
        whole = [t for t in (held.before, *tables) if t is not None]
        before = _joined(whole) if whole else None
        self.held[path] = _Held(parts[:-1], before, parts[-1], _table(folder / parts[-1][0]))


def _strings(names: Sequence[str]) -> Any:
    import pyarrow as pa

    return pa.array(list(names), pa.string())


def _joined(tables: list[Any]) -> Any:
    import pyarrow as pa

    return pa.concat_tables(tables, promote_options="permissive").unify_dictionaries().combine_chunks()


def _table(file: Path) -> pa.Table:
    """A part without the columns that say nothing; its texts as numbers into a list of texts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        held = pa.BufferReader(file.read_bytes())  # half the time of reading these small files by their paths
        try:
            opened = pq.ParquetFile(held, read_dictionary=list(TEXT))
        except KeyError:  # a table without one of them
            opened = pq.ParquetFile(held)
        table = checked(opened.read(use_threads=False), file, NEEDED)
        kept = [c for c in table.column_names if c == "metric" or table[c].null_count < len(table)]
        return pa.table({c: table[c].dictionary_encode() if c in TEXT else table[c] for c in kept})
    except (OSError, pa.ArrowException) as error:
        raise BadCheckpoint(f"cannot read {file}: {error}") from error
