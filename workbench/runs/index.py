"""The index of a folder of runs: one SQLite file that a server reads in place of thousands of small files.

    runs/.index.sqlite

A row holds one value of one run: its catalogue entry, or its records or telemetry of one metric as a compressed Arrow table.
`state` names the version of the run's files from which the value was made, and `checksum` covers the whole row, since SQLite
checks no contents. A file that is damaged or has another layout is deleted and built again. The index of a folder that is
shipped or cannot be written lies in the user's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from workbench.files import digest
from workbench.places import SHIPPED
from workbench.storage.sync import cache

INDEX = ".index.sqlite"
LAYOUT = (
    "CREATE TABLE part (kind TEXT, metric TEXT, run TEXT, state TEXT, checksum BLOB, value BLOB,"
    " PRIMARY KEY (kind, metric, run))"
)
BATCHES = "SELECT json_extract(CAST(value AS TEXT), '$[0]') FROM part WHERE kind = ? AND metric = ''"
"""The batches that runs of a kind refer to."""
MAX_VALUE = 1 << 29  # bytes
PATIENCE = 5.0  # seconds to wait for another process that writes


class Part(NamedTuple):
    """One value of a run; the metric of a catalogue entry is empty."""

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
        self.path = cache().parent / "indexes" / digest(str(folder)) if shared else folder / INDEX
        self._files = self.path, self.path.with_name(f"{self.path.name}-journal")

    def read(self, kind: str, metrics: Collection[str], runs: Collection[str] | None = None) -> Iterator[Part]:
        """Yield the parts of some metrics and runs (None: all); damaged rows are left out."""
        if not self.path.is_file():
            return
        asked = "kind = ? AND metric IN (SELECT value FROM json_each(?))"
        names = [] if runs is None else [json.dumps(list(runs))]
        asked += " AND run IN (SELECT value FROM json_each(?))" if names else ""
        with contextlib.suppress(sqlite3.Error, UnicodeError), self._opened("ro") as database:
            columns = "kind, metric, run, state, value, checksum"
            for *row, checksum in database.execute(
                f"SELECT {columns} FROM part WHERE {asked}", (kind, json.dumps(list(metrics)), *names)
            ):
                part = Part(*row)
                if all(map(isinstance, part, (str, str, str, str, bytes))) and part.checksum == checksum:
                    yield part

    def write(self, kind: str, runs: Collection[str] | None, parts: Iterable[Part]) -> bool:
        """Replace all parts of a kind of some runs (None: of all runs); returns False if the file cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._replace(kind, runs, parts := list(parts))
            except sqlite3.OperationalError:  # locked, full or read-only
                return False
            except sqlite3.DatabaseError:  # damaged, or of another layout
                for file in self._files:
                    file.unlink(missing_ok=True)
                self._replace(kind, runs, parts)
        except (OSError, sqlite3.Error, UnicodeError):
            return False
        return True

    def _replace(self, kind: str, runs: Collection[str] | None, parts: Iterable[Part]) -> None:
        which, names = (
            ("", ()) if runs is None else (" AND run IN (SELECT value FROM json_each(?))", (json.dumps(list(runs)),))
        )
        with self._opened("rwc") as database, database:
            database.execute(f"DELETE FROM part WHERE kind = ?{which}", (kind, *names))
            rows = ((p.kind, p.metric, p.run, p.state, p.checksum, p.value) for p in parts)
            database.execute(
                f"DELETE FROM part WHERE kind = ? AND metric > '' AND run NOT IN ({BATCHES})", (kind, kind)
            )
            database.executemany("INSERT INTO part VALUES (?, ?, ?, ?, ?, ?)", rows)

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
