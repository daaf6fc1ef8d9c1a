"""The index of a folder of runs: one SQLite file that a server reads in place of thousands of small files.

A row holds a run's catalogue entry, a run's place in a batch, or one metric of a batch of runs as a compressed Arrow table. `state`
identifies the run's files at the time of reading; the checksum covers the row, since SQLite checks no contents. A damaged file is built
again. The index of a shipped or read-only folder is in the user's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from workbench.environment import mirrors_folder
from workbench.file_io import digest
from workbench.places import SHIPPED

INDEX = ".index.sqlite"
LAYOUT = (
    "CREATE TABLE part (kind TEXT, metric TEXT, run TEXT, state TEXT, checksum BLOB, value BLOB,"
    " PRIMARY KEY (kind, metric, run))"
)
UNUSED_BATCHES = (
    "kind = :kind AND metric > '' AND run NOT IN (SELECT json_extract(CAST(value AS TEXT), '$[0]') FROM part"
    " WHERE kind = :kind AND metric = '' AND json_valid(CAST(value AS TEXT)))"
)
REMOVED_RUNS = "kind <> :kind AND metric = '' AND run NOT IN (SELECT run FROM part WHERE kind = :kind)"
MAX_VALUE = 1 << 29  # bytes
PATIENCE = 5.0  # seconds to wait for another process that writes


class IndexRow(NamedTuple):
    """One row; `metric` is empty in rows of runs, and `run` is the batch in rows of metrics."""

    kind: str
    metric: str
    run: str
    state: str
    value: bytes

    @property
    def checksum(self) -> bytes:
        """Checksum of the row."""
        names = json.dumps(self[:4]).encode()
        return hashlib.blake2b(len(names).to_bytes(8) + names + self.value, digest_size=16).digest()


class Index:
    """The stored values of a folder's runs; runs are named by their paths within the folder."""

    def __init__(self, folder: Path) -> None:
        shared = SHIPPED in (folder, *folder.parents) or not os.access(folder, os.W_OK)
        try:
            self.path = mirrors_folder().parent / "indexes" / digest(str(folder)) if shared else folder / INDEX
        except RuntimeError:  # this user has no home
            self.path = Path(os.devnull) / INDEX
        self._files = self.path, self.path.with_name(f"{self.path.name}-journal")

    def read(self, kind: str, metrics: Collection[str], runs: Collection[str] | None = None) -> Iterator[IndexRow]:
        """Yield the rows of some metrics and runs (None: all), except damaged ones."""
        if not self.path.is_file():
            return
        asked = "kind = ? AND metric IN (SELECT value FROM json_each(?))"
        names = [] if runs is None else [json.dumps(list(runs))]
        asked += " AND run IN (SELECT value FROM json_each(?))" if names else ""
        with contextlib.suppress(sqlite3.Error, UnicodeError), self._opened("ro") as database:
            columns = "kind, metric, run, state, value, checksum"
            values = (kind, json.dumps(list(metrics)), *names)
            for *row, checksum in database.execute(f"SELECT {columns} FROM part WHERE {asked}", values):
                result = IndexRow(*row)
                if all(map(isinstance, result, (str, str, str, str, bytes))) and result.checksum == checksum:
                    yield result

    def write(self, kind: str, runs: Collection[str] | None, rows: Sequence[IndexRow]) -> bool:
        """Replace all rows of a kind for some runs (None: all, and drop runs without a row); False if it cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._replace(kind, runs, rows)
            except sqlite3.OperationalError:  # locked, full or read-only
                return False
            except sqlite3.DatabaseError:  # damaged, or of another layout
                for file in self._files:
                    file.unlink(missing_ok=True)
                self._replace(kind, runs, rows)
        except (OSError, sqlite3.Error, UnicodeError):
            return False
        return True

    def _replace(self, kind: str, runs: Collection[str] | None, rows: Sequence[IndexRow]) -> None:
        values = [(*row[:4], row.checksum, row.value) for row in rows]
        with self._opened("rwc") as database, database:
            if runs is None:
                database.execute("DELETE FROM part WHERE kind = ?", (kind,))
            else:
                database.executemany("DELETE FROM part WHERE kind = ? AND run = ?", ((kind, run) for run in runs))
            database.execute(f"DELETE FROM part WHERE {UNUSED_BATCHES}", {"kind": kind})
            database.executemany("INSERT INTO part VALUES (?, ?, ?, ?, ?, ?)", values)
            if runs is None:
                database.execute(f"DELETE FROM part WHERE {REMOVED_RUNS}", {"kind": kind})

    @contextlib.contextmanager
    def _opened(self, mode: str) -> Iterator[sqlite3.Connection]:
        """Open the database; raises `sqlite3.DatabaseError` if it is not one that this version wrote."""
        if any(file.exists() and not file.is_file() for file in self._files):
            raise sqlite3.OperationalError(f"{self.path} is not a regular file")
        with contextlib.closing(sqlite3.connect(f"{self.path.as_uri()}?mode={mode}", PATIENCE, uri=True)) as database:
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE)
            database.execute("PRAGMA synchronous = OFF")  # after a power cut the checksums fail, and it is built again
            layout = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"
            if mode == "rwc" and not database.execute(layout).fetchall():
                database.execute(LAYOUT)
            if database.execute(layout).fetchall() != [(LAYOUT,)]:
                raise sqlite3.DatabaseError(f"{self.path} has another layout")
            yield database
