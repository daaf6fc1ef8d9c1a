"""One tidy table of records, and the store that keeps it: Parquet per (weights, data), filtered by DuckDB.

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

from workbench.errors import BadCheckpoint, WorkbenchError
from workbench.files import replacing

TEXT = ("run", "architecture", "metric", "data", "site", "part", "variant", "control", "unit", "provenance")
WHOLE = ("seed", "step", "T", "layer", "source", "head", "position", "index", "n", "document")
COLUMNS = (
    "run", "architecture", "seed", "step", "metric", "data", "T", "site", "part", "layer", "source", "head", "position",
    "index", "variant", "control", "value", "se", "n", "unit", "provenance",
)  # fmt: skip
SAMPLE_COLUMNS = (
    "run", "architecture", "seed", "step", "metric", "data", "site", "layer", "head", "variant", "document", "value",
    "provenance",
)  # fmt: skip
"""One value per document, for resampling; kept where a record has no position axis."""
KNOWN, NEEDED = {*COLUMNS, *SAMPLE_COLUMNS}, ("metric", "value")


def records(rows: Iterable[dict[str, Any]], columns: Sequence[str] = COLUMNS) -> pd.DataFrame:
    """A table with exactly the record columns, typed: text, nullable whole numbers, floats."""
    return typed(pd.DataFrame(list(rows), columns=list(columns)), columns)


def typed(frame: pd.DataFrame, columns: Sequence[str] = COLUMNS) -> pd.DataFrame:
    """The same table with exactly these columns, each of its documented type; absent ones are null."""
    kinds = {name: "str" if name in TEXT else "Int64" if name in WHOLE else "float64" for name in columns}
    return frame.reindex(columns=list(columns)).astype(kinds)


def write_parquet(frame: pd.DataFrame, path: Path) -> None:
    """Write a table atomically; text columns are dictionary-encoded, so repeated provenance is cheap."""
    with replacing(path) as part:
        frame.to_parquet(part, index=False)


def read_parquet(paths: Sequence[Path], columns: Sequence[str] = COLUMNS, where: str = "") -> pd.DataFrame:
    """Rows of all the files; `where` is a condition in DuckDB's SQL. `BadCheckpoint` names a file that cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    for path in paths:
        try:
            with pq.ParquetFile(path) as file:  # opened once, so a file that is replaced meanwhile stays the one it was
                tables.append(checked(file.read(), path))
        except (OSError, pa.ArrowException) as error:
            raise BadCheckpoint(f"cannot read {path}: {error}") from error
    if not tables:
        return records([], columns)
    table = pa.concat_tables(tables, promote_options="permissive")
    return typed(_filtered(table, where) if where else table.to_pandas(), columns)


def checked(table: Any, path: Path, needed: Sequence[str] = ()) -> Any:
    """The columns of a file that are ours, each of its documented type; others are left out.

    table: Arrow. `needed`: columns without which nothing can be said. Raises `BadCheckpoint` naming the file, and the column
    where it is one.
    """
    import pyarrow as pa

    if missing := set(needed) - set(table.column_names):
        raise BadCheckpoint(f"{path} is no table of records: it has no {' and no '.join(sorted(missing))}")
    found, name = {}, ""
    try:
        for name in dict.fromkeys(c for c in table.column_names if c in KNOWN):
            found[name] = _of_our_type(table[name], name)
        whole = pa.table(found)
        whole.validate(full=True)  # text that is none
    except (KeyError, pa.ArrowException) as error:
        raise BadCheckpoint(f"{path} is no table of records: column {name}: {error}") from error
    return whole


def _of_our_type(column: Any, name: str) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if name in TEXT:
        held = kind.value_type if pa.types.is_dictionary(kind) else kind
        return column if pa.types.is_string(held) or pa.types.is_large_string(held) else column.cast(pa.string())
    if name in WHOLE and pa.types.is_floating(kind):  # how tables without whole numbers leave gaps
        column = pc.if_else(pc.is_nan(column), None, column)
    wanted = pa.int64() if name in WHOLE else pa.float64()
    return column if kind == wanted else column.cast(wanted)


def facts(provenance: Any) -> dict[str, Any]:
    """What a provenance says; nothing where it is not ours."""
    try:
        found = json.loads(provenance)
    except (TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _filtered(table: Any, where: str) -> pd.DataFrame:
    import duckdb

    with duckdb.connect() as db:
        return db.from_arrow(table).filter(where).df()


def provenance(**facts: Any) -> str:
    """Where a number comes from, as compact JSON with sorted keys."""
    return json.dumps(facts, sort_keys=True, separators=(",", ":"))


def _keys(frame: pd.DataFrame) -> pd.Series:
    """The measurement key of every row."""
    return frame["provenance"].map({text: json.loads(text)["key"] for text in frame["provenance"].unique()})


def one_sample(frame: pd.DataFrame) -> pd.DataFrame:
    """Of each run and measure the records taken on one sample: the latest step's, then most steps, then most documents.

    A run that was measured on 32 and on 64 documents has records of both, which must not be averaged.
    """
    known = {text: facts(text) for text in frame["provenance"].dropna().unique()}
    told = {text: f"{fact.get('data', '')} {fact.get('metric', '')}" for text, fact in known.items()}
    keyed = frame.assign(sample=[told.get(text, "") for text in frame["provenance"]])
    found = keyed.groupby(["run", "metric", "sample"], as_index=False, dropna=False).agg(
        last=("step", "max"), steps=("step", "nunique"), n=("n", "max")
    )
    best = found.sort_values(["last", "steps", "n", "sample"]).drop_duplicates(["run", "metric"], keep="last")
    if len(best) == len(found):
        return frame
    kept = keyed.reset_index(names="row").merge(best[["run", "metric", "sample"]], on=["run", "metric", "sample"])
    return frame.loc[kept["row"]].reset_index(drop=True)


class Store:
    """Measured records in a folder, content-addressed by weights, data, metric and options.

    One pair of files per (weights, data): `<weights>-<data>.parquet` and `.samples.parquet`. A lock file serialises writers;
    readers need none, since files are replaced as a whole.
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
        return {str(key): rows for key, rows in frame.groupby(_keys(frame), sort=False) if key in keys}

    def put(self, weights: str, data: str, frame: pd.DataFrame, samples: pd.DataFrame) -> None:
        """Add rows; rows of the same measurement key are replaced. `WorkbenchError` where the folder cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / ".lock", timeout=60):
                # the records last: a measurement counts as done once they stand, so its samples must stand before
                for kind, new, columns in ((".samples", samples, SAMPLE_COLUMNS), ("", frame, COLUMNS)):
                    path = self._path(weights, data, kind)
                    old = read_parquet([path], columns) if path.exists() else records([], columns)
                    old = old[~_keys(old).isin(set(_keys(frame)))]
                    if len(old) + len(new):
                        write_parquet(pd.concat([old, new], ignore_index=True) if len(old) else new, path)
        except OSError as error:  # read-only, or another writer for a minute
            raise WorkbenchError(f"cannot keep records in {self.folder}: {error.strerror or error}") from error


def load_records(folders: Iterable[Path], where: str = "") -> pd.DataFrame:
    """All records kept under the given runs' folders."""
    return read_parquet([path for folder in folders for path in record_files(folder)], where=where)


def metrics_of(folders: Iterable[Path]) -> tuple[str, ...]:
    """Names of the metrics that the given runs have records of; files that cannot be read count as empty."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found: set[str] = set()
    for folder in folders:
        for path in record_files(folder):
            try:
                found |= set(pq.read_table(path, columns=["metric"])["metric"].unique().to_pylist())
            except (OSError, KeyError, pa.ArrowException):
                continue
    return tuple(sorted(str(name) for name in found if name is not None))


def record_files(folder: Path) -> list[Path]:
    """The tables of records under a run's folder."""
    return [p for p in sorted((folder / "records").glob("*.parquet")) if not p.name.endswith(".samples.parquet")]
