"""One tidy table of records, and the store that keeps it: Parquet per (weights, data), read through DuckDB.

A record says what was measured, on which axes, in which unit, with which error, from which weights, data and code.
Columns that do not apply are null; step 0 is random init; se and n count documents.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock

from workbench.errors import BadCheckpoint
from workbench.files import replacing

TEXT = ("run", "architecture", "metric", "data", "site", "part", "variant", "control", "unit", "provenance")
WHOLE = ("seed", "step", "T", "layer", "source", "head", "position", "index", "n")
COLUMNS = (
    "run", "architecture", "seed", "step", "metric", "data", "T", "site", "part", "layer", "source", "head", "position",
    "index", "variant", "control", "value", "se", "n", "unit", "provenance",
)  # fmt: skip
SAMPLE_COLUMNS = (
    "run",
    "architecture",
    "seed",
    "step",
    "metric",
    "data",
    "site",
    "layer",
    "head",
    "variant",
    "document",
    "value",
    "provenance",
)
"""One value per document, for resampling; kept where a record has no position axis."""


def records(rows: Iterable[dict[str, Any]], columns: Sequence[str] = COLUMNS) -> pd.DataFrame:
    """A table with exactly the record columns, typed: text, nullable whole numbers, floats."""
    frame = pd.DataFrame(list(rows), columns=list(columns))
    for name in columns:
        kind = "str" if name in TEXT else "Int64" if name in (*WHOLE, "document") else "float64"
        frame[name] = frame[name].astype(kind)
    return frame


def write_parquet(frame: pd.DataFrame, path: Path) -> None:
    """Write a table atomically; text columns are dictionary-encoded, so repeated provenance is cheap."""
    with replacing(path) as part:
        frame.to_parquet(part, index=False)


def read_parquet(
    pattern: str | Path | Sequence[Path], columns: Sequence[str] = COLUMNS, where: str = ""
) -> pd.DataFrame:
    """Rows of all files of a glob or list, through DuckDB (`where`: a condition with `?`-free literals of ours only).

    Unreadable files are reported by `BadCheckpoint` with their name.
    """
    import duckdb

    paths = [str(p) for p in pattern] if isinstance(pattern, list | tuple) else sorted(_glob(Path(str(pattern))))
    if not paths:
        return records([], columns)
    with duckdb.connect() as db:
        try:
            source = db.read_parquet(paths, union_by_name=True)
            frame = (source.filter(where) if where else source).df()
        except duckdb.Error as error:
            raise BadCheckpoint(f"cannot read {_culprit(paths)}: {str(error).splitlines()[0]}") from error
    return (
        records(frame.to_dict("records"), columns) if list(frame.columns) != list(columns) else _typed(frame, columns)
    )


def _glob(pattern: Path) -> list[str]:
    return [str(p) for p in Path(pattern.anchor or ".").glob(str(pattern.relative_to(pattern.anchor)))]


def _typed(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    for name in columns:
        kind = "str" if name in TEXT else "Int64" if name in (*WHOLE, "document") else "float64"
        frame[name] = frame[name].astype(kind)
    return frame


def _culprit(paths: Sequence[str]) -> str:
    import pyarrow.parquet as pq

    for path in paths:
        try:
            pq.ParquetFile(path)
        except Exception:  # noqa: BLE001 - any failure to open is what we look for
            return path
    return paths[0]


def provenance(**facts: Any) -> str:
    """Where a number comes from, as compact JSON with sorted keys."""
    return json.dumps(facts, sort_keys=True, separators=(",", ":"))


class Store:
    """Measured records in a folder, content-addressed by weights, data, metric and options.

    One pair of files per (weights, data): `<weights>-<data>.parquet` and `.samples.parquet`. A lock file serialises writers.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, weights: str, data: str, kind: str = "") -> Path:
        return self.folder / f"{weights}-{data}{kind}.parquet"

    def get(self, weights: str, data: str, keys: Sequence[str]) -> dict[str, pd.DataFrame]:
        """Stored rows of each measurement key that is there."""
        path = self._path(weights, data)
        if not path.exists():
            return {}
        frame = read_parquet([path])
        found = frame["provenance"].map(lambda text: json.loads(text)["key"])
        return {key: rows for key, rows in frame.groupby(found, sort=False) if key in keys}

    def put(self, weights: str, data: str, frame: pd.DataFrame, samples: pd.DataFrame) -> None:
        """Add rows; rows of the same measurement key are replaced."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / ".lock", timeout=60):
            for kind, new, columns in (("", frame, COLUMNS), (".samples", samples, SAMPLE_COLUMNS)):
                path = self._path(weights, data, kind)
                old = read_parquet([path], columns) if path.exists() else records([], columns)
                old = old[~old["provenance"].isin(set(new["provenance"]))]
                write_parquet(pd.concat([old, new], ignore_index=True) if len(old) else new, path)


def load_records(folders: Iterable[Path], where: str = "") -> pd.DataFrame:
    """All records kept under the given runs' folders."""
    files = [
        p for folder in folders for p in sorted((folder / "records").glob("*.parquet")) if ".samples" not in p.name
    ]
    return read_parquet(files, COLUMNS, where) if files else records([])
