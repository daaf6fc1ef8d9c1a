"""Tidy table of records, and its store: one Parquet file per (weights, data).

Columns that do not apply are null; step 0 is random init; `se` and `n` count documents. Readers get the newest version of every metric
of a run (`newest`), as its provenance states it, and `one_sample` then selects one of several sets of documents.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from filelock import FileLock

from workbench.console import ROWS
from workbench.errors import BadCheckpoint, WorkbenchError
from workbench.file_io import table_bytes, write_table

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

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
"""One value per document, for resampling; stored for records without a position axis."""
KNOWN, NEEDED = {*COLUMNS, *SAMPLE_COLUMNS}, ("metric", "value")
OWN_DATA = r"(train|validation)(/|$)"
"""Names of a run's own data; other data are named by their file and a content hash."""
_VERSION = re.compile(r'"version":(\d+)')


class Records(pd.DataFrame):
    """A table of records that is shown without empty columns and provenance, and with constant columns in one line above."""

    @property
    def _constructor(self) -> type[Records]:
        return Records

    def _shown(self) -> tuple[str, pd.DataFrame] | None:
        """Return the constant columns as one line, and the other columns; None for a table without values of records."""
        if not {"value"} <= set(self.columns) <= KNOWN or self.empty:
            return None
        shown = pd.DataFrame(self).drop(columns="provenance", errors="ignore").dropna(axis=1, how="all")
        same = [n for n in shown if n not in ("value", "se") and shown[n].notna().all() and shown[n].nunique() == 1]
        same = same if len(shown) > 1 else []
        rest = shown.drop(columns=same)
        line = ", ".join(f"{name} {shown[name].iloc[0]}" for name in same)
        return line, rest.astype(object).where(rest.notna(), "")

    def __repr__(self) -> str:
        if (parts := self._shown()) is None:
            return super().__repr__()
        table = parts[1].to_string(max_rows=ROWS, float_format=lambda number: f"{number:.5g}")
        return "\n".join(filter(None, (parts[0], table)))

    def _repr_html_(self) -> str:
        if (parts := self._shown()) is None:
            return str(pd.DataFrame(self)._repr_html_())  # type: ignore[operator]
        table = parts[1].to_html(index=False, border=0, max_rows=ROWS, float_format=lambda number: f"{number:.5g}")
        return f"<p>{escape(parts[0])}</p>{table}"


def records(rows: Iterable[dict[str, Any]], columns: Sequence[str] = COLUMNS) -> pd.DataFrame:
    """Return a table with exactly the record columns: text, nullable whole numbers, floats."""
    rows = list(rows)  # an array for each column takes half of the time of a table whose types are changed
    return pd.DataFrame({name: pd.array([row.get(name) for row in rows], dtype=kind) for name, kind in _types(columns)})


def _types(columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for name in columns:
        yield name, "str" if name in TEXT else "Int64" if name in WHOLE else "float64"


def typed(frame: pd.DataFrame, columns: Sequence[str] = COLUMNS) -> pd.DataFrame:
    """Return the table with exactly these columns in their documented types; absent columns are null."""
    absent = [None] * len(frame)
    arrays = {  # arrays take a third of the time of `DataFrame.astype`
        name: frame[name].array.astype(kind, copy=False) if name in frame else pd.array(absent, dtype=kind)
        for name, kind in _types(columns)
    }
    return pd.DataFrame(arrays, index=frame.index)


def write_parquet(frame: pd.DataFrame, path: Path) -> None:
    """Write a table atomically; text columns are dictionary-encoded, so repeated provenance is cheap."""
    import pyarrow as pa

    write_table(pa.Table.from_pandas(frame, preserve_index=False), path)


def read_parquet(paths: Iterable[Path], columns: Sequence[str] = COLUMNS, needed: Sequence[str] = ()) -> pd.DataFrame:
    """Return the typed rows of all files; `BadCheckpoint` names a file that cannot be read or lacks a `needed` column."""
    return typed(read_tables(list(paths), needed).to_pandas(), columns)


def read_tables(files: Sequence[Path], needed: Sequence[str] = (), without: Sequence[str] = ()) -> pa.Table:
    """Read the rows of some files, texts dictionary-encoded; empty columns and those named in `without` are left out."""
    import pyarrow as pa

    tables = []
    for path in files:
        with opened_table(path, [c for c in TEXT if c not in without]) as file:
            if missing := set(needed) - set(file.schema_arrow.names):
                raise BadCheckpoint(f"{path} is no table of records: it has no {' and no '.join(sorted(missing))}")
            names = dict.fromkeys(needed)
            for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
                for column in map(group.column, range(group.num_columns)):
                    nulls = None if column.statistics is None else column.statistics.null_count
                    if nulls is None or nulls < group.num_rows:
                        names[column.path_in_schema] = None
            tables.append(file.read(columns=[name for name in names if name not in without], use_threads=False))
    try:  # checking all files together takes a third of the time
        return encoded(checked_records(concatenated(tables), files[0].parent, needed)) if files else pa.table({})
    except (BadCheckpoint, pa.ArrowException):  # a file is damaged or has columns of other types
        checked = [checked_records(table, path, needed) for table, path in zip(tables, files, strict=True)]
        return concatenated([encoded(table) for table in checked])


def encoded(table: pa.Table) -> pa.Table:
    """Return a table without its empty columns, texts dictionary-encoded, whole numbers in 32 bits where they fit."""
    import pyarrow as pa

    for i, name in reversed(list(enumerate(table.column_names))):
        if table[name].null_count == len(table):
            table = table.remove_column(i)
        elif name in TEXT:
            table = table.set_column(i, name, table[name].dictionary_encode())
        elif name in WHOLE:
            with contextlib.suppress(pa.ArrowInvalid):
                table = table.set_column(i, name, table[name].cast(pa.int32()))
    return table.combine_chunks()


def concatenated(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of all tables, columns that one of them lacks being null."""
    import pyarrow as pa

    return pa.concat_tables(tables, promote_options="permissive").unify_dictionaries().combine_chunks()


@contextmanager
def opened_table(path: Path, numbered: Sequence[str] = ()) -> Iterator[pq.ParquetFile]:
    """Open a table's file, columns `numbered` as dictionaries; raises `BadCheckpoint` if a checksum fails or it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    how: dict[str, Any] = {"page_checksum_verification": True, "pre_buffer": False}
    try:
        content = pa.BufferReader(table_bytes(path))  # half the time of reading these small files by path
        try:
            file = pq.ParquetFile(content, read_dictionary=list(numbered), **how)
        except KeyError:  # a table without one of them
            file = pq.ParquetFile(content, **how)
        yield file
    except (OSError, KeyError, UnicodeDecodeError, pa.ArrowException) as error:  # a name of a column need not be text
        raise BadCheckpoint(f"cannot read {path}: {error}") from error


def checked_records(table: Any, path: Path, needed: Sequence[str] = ()) -> Any:
    """Return the record columns of an Arrow table in their documented types; raises `BadCheckpoint` naming the file."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if missing := set(needed) - set(table.column_names):
        raise BadCheckpoint(f"{path} is no table of records: it has no {' and no '.join(sorted(missing))}")
    columns, name = {}, ""
    try:
        for name in dict.fromkeys(c for c in table.column_names if c in KNOWN):
            column, kind = table[name], table[name].type
            if name in TEXT:
                text = kind.value_type if pa.types.is_dictionary(kind) else kind
                columns[name] = column if text in (pa.string(), pa.large_string()) else column.cast(pa.string())
                continue
            if name in WHOLE and pa.types.is_floating(kind):  # how tables without whole numbers leave gaps
                column = pc.if_else(pc.is_nan(column), None, column)
            columns[name] = column.cast(pa.int64() if name in WHOLE else pa.float64())
        table = pa.table(columns)
        table.validate(full=True)  # raises for text that is not Unicode
    except (KeyError, pa.ArrowException) as error:
        raise BadCheckpoint(f"{path} is no table of records: column {name}: {error}") from error
    return table


def facts(provenance: Any) -> dict[str, Any]:
    """Return the facts of a provenance; empty if another program wrote it."""
    try:
        values = json.loads(provenance)
    except (TypeError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def left_out(provenance: str) -> str:
    """Return one line on padding and documents in rows; empty if every row is one document without padding."""
    known = facts(provenance)
    if "left_out" not in known:
        return ""
    padding = f"{100 * known['left_out']:.3g} % of positions left out (padding)" if known["left_out"] else "no padding"
    return f"{padding}; {known['documents']} documents, each measured by itself; a row is the mean over its documents, and n counts rows"


def provenance(**facts: Any) -> str:
    """Return the provenance of a number as compact JSON with sorted keys."""
    return json.dumps(facts, sort_keys=True, separators=(",", ":"))


def _versions(provenances: pd.Series) -> np.ndarray:
    """Return the metric's version of every row; 0 if its provenance has none."""
    codes, texts = pd.factorize(provenances)
    matches = [_VERSION.search(text) for text in texts]
    return np.array([*(int(m[1]) if m else 0 for m in matches), 0], dtype=float)[codes]


def _measures(frame: pd.DataFrame) -> pd.Series:
    """Return the metric of every row, with a mark if it was measured at found positions."""
    at_found = frame["variant"].astype("str").str.endswith("found")
    return frame["metric"].astype("str") + np.where(at_found, " found", "")


def newest(table: pa.Table) -> pa.Table:
    """Return the rows of every metric's newest version, from all rows of one run."""
    if not {"metric", "provenance"} <= set(table.column_names):
        return table
    if len(set(_versions(table["provenance"].unique().to_pandas()))) < 2:  # of 1,000 runs nearly all
        return table
    frame = table.select(["metric", "provenance"]).to_pandas()
    frame["version"] = _versions(frame["provenance"])
    shown = frame["version"] == frame.groupby("metric", dropna=False)["version"].transform("max")
    return table if shown.all() else table.filter(shown.to_numpy())


def run_records(folder: Path) -> pa.Table:
    """Return a run's records, in the newest version of every metric."""
    return newest(read_tables(record_files(folder), NEEDED))


def load_records(folders: Iterable[Path]) -> pd.DataFrame:
    """Return the records of runs by their folders, see `run_records`; `run` is the folder's name, also after it was renamed."""
    tables = {folder: run_records(folder) for folder in folders}
    if not tables:
        return records([])
    frame = typed(concatenated([*tables.values()]).to_pandas())
    names = [folder.name for folder, table in tables.items() for _ in range(len(table))]
    return frame.assign(run=pd.array(names, dtype="str"))


def one_sample(frame: pd.DataFrame) -> pd.DataFrame:
    """Select one set of documents for each run and metric: own data first, then the latest step, most steps, most documents.

    A run that was measured on 32 and on 64 documents has records of both, which must not be averaged.
    """
    samples = {text: str(facts(text).get("data", "")) for text in frame["provenance"].dropna().unique()}
    each = frame[["run", "metric", "provenance"]].drop_duplicates()
    each = each.assign(sample=[samples.get(text, "") for text in each["provenance"]]).drop(columns="provenance")
    if not each.drop_duplicates().duplicated(["run", "metric"]).any():  # of nearly all runs
        return frame
    own = frame["data"].astype("str").str.match(OWN_DATA) if "data" in frame else False
    keyed = frame.assign(sample=[samples.get(text, "") for text in frame["provenance"]], own=own)
    groups = keyed.groupby(["run", "metric", "sample"], as_index=False, dropna=False)
    sets = groups.agg(own=("own", "max"), last=("step", "max"), steps=("step", "nunique"), n=("n", "max"))
    best = sets.sort_values(["own", "last", "steps", "n", "sample"]).drop_duplicates(["run", "metric"], keep="last")
    if len(best) == len(sets):
        return frame
    selected = keyed.reset_index(names="row").merge(best[["run", "metric", "sample"]], on=["run", "metric", "sample"])
    return frame.loc[selected["row"]].reset_index(drop=True)


SHIPPED_RECORDS = "all.parquet"


class Store:
    """Measured records in a folder: `<weights>-<data>.parquet` and `.samples.parquet`, replaced atomically, under a writer's lock.

    Runs that ship have the records of all their steps in `all.parquet`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, weights: str, data: str, kind: str = "") -> Path:
        return self.folder / f"{weights}-{data}{kind}.parquet"

    def get(self, weights: str, data: str, keys: Sequence[str]) -> dict[str, pd.DataFrame]:
        """Return the stored rows of every measurement key that exists, also of those that ship with a run."""
        stored: dict[str, pd.DataFrame] = {}
        for path in (self.folder / SHIPPED_RECORDS, self._path(weights, data)):
            if not path.exists():
                continue
            table = read_tables([path], ["provenance"])
            texts = table["provenance"].to_pandas()
            key_of = {text: key for text in texts.unique() if (key := facts(text).get("key")) in keys}
            found = texts.map(key_of)
            frame = typed(table.filter(found.notna().to_numpy()).to_pandas())
            stored |= {str(key): rows for key, rows in frame.groupby(found.dropna().to_numpy(), sort=False)}
        return stored

    def put(self, weights: str, data: str, frame: pd.DataFrame, samples: pd.DataFrame) -> None:
        """Replace rows of the same metrics and positions in this or an older version; raises `WorkbenchError` if the folder refuses.

        Records of other weights at the same steps are removed: these steps were trained or saved anew.
        """
        steps = set(frame["step"].dropna())
        versions = pd.Series(_versions(frame["provenance"])).groupby(_measures(frame).to_numpy()).max()
        try:
            with FileLock(self.folder / ".lock", timeout=60):  # which makes the folder
                # records last: a measurement counts as done when its records exist, so its samples must exist before
                for kind, new, columns in ((".samples", samples, SAMPLE_COLUMNS), ("", frame, COLUMNS)):
                    path = self._path(weights, data, kind)
                    if path.exists():
                        old = read_parquet([path], columns)
                        newest_versions = _measures(old).map(versions).astype(float)  # NaN for others
                        old = old[~(_versions(old["provenance"]) <= newest_versions)]
                    else:
                        old = new.iloc[:0]
                    if len(old) + len(new):
                        write_parquet(pd.concat([old, new], ignore_index=True) if len(old) else new, path)
                for path in self.folder.glob("*-*.parquet"):
                    if not path.name.startswith(f"{weights}-"):
                        _remove_steps(path, steps)
        except OSError as error:  # read-only, or another writer for a minute
            raise WorkbenchError(f"cannot keep records in {self.folder}: {error.strerror or error}") from error


def _remove_steps(path: Path, steps: set[int]) -> None:
    """Remove the rows of some steps from a file, and a file without other rows; one that cannot be read stays."""
    with contextlib.suppress(BadCheckpoint):
        with opened_table(path) as file:
            if "step" not in file.schema_arrow.names or steps.isdisjoint(
                file.read(columns=["step"])["step"].to_pylist()
            ):
                return
        rows = read_parquet([path], SAMPLE_COLUMNS if path.name.endswith(".samples.parquet") else COLUMNS)
        if len(rows := rows[~rows["step"].isin(steps).fillna(False)]):
            write_parquet(rows, path)
        else:
            path.unlink()


def metrics_of(folder: Path) -> tuple[str, ...]:
    """Return the names of a run's measured metrics; files that cannot be read count as empty."""
    names: set[str] = set()
    for path in record_files(folder):
        with contextlib.suppress(BadCheckpoint), opened_table(path) as file:
            names |= set(file.read(columns=["metric"])["metric"].unique().to_pylist())
    return tuple(sorted(str(name) for name in names if name is not None))


def record_files(folder: Path) -> list[Path]:
    """Return the record files of a run."""
    return [p for p in sorted((folder / "records").glob("*.parquet")) if not p.name.endswith(".samples.parquet")]
