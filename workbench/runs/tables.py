"""Tables in common formats: pandas and Arrow in memory, Parquet, Arrow, CSV and JSON on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.errors import BadData, UnknownName
from workbench.files import replacing, write_text
from workbench.runs.records import read_parquet, typed, write_parquet


def as_frame(table: Any) -> pd.DataFrame:
    """Return a pandas table for a pandas or Arrow table (pyarrow, polars, DuckDB); raises `BadData` for anything else."""
    if isinstance(table, pd.DataFrame):
        return table
    if hasattr(table, "__arrow_c_stream__"):
        return pd.DataFrame.from_arrow(table)  # type: ignore[attr-defined]  # the stubs lag behind pandas 3
    raise BadData(f"a {type(table).__name__} is no table: give pandas', or one that speaks Arrow")


def as_records(table: Any) -> pd.DataFrame:
    """Return a table with the columns of records in their documented types."""
    frame = as_frame(table)
    if missing := {"metric", "value"} - set(frame.columns):
        raise BadData(f"no table of records: it has no {' and no '.join(sorted(missing))}")
    try:
        return typed(frame)
    except (TypeError, ValueError) as error:
        raise BadData(f"no table of records: {error}") from error


def write_table_as(frame: Any, out: Path) -> None:
    """Write a table as .parquet, .arrow (Feather), .csv or .json; raises `UnknownName` for other endings."""
    refuse_ending(out)
    WRITERS[out.suffix](as_frame(frame), out)


def refuse_ending(path: Path | None) -> None:
    """Raise `UnknownName` for an ending that `write_table_as` does not write."""
    if path is not None and path.suffix not in WRITERS:
        raise UnknownName("file ending", path.suffix, WRITERS)


def read_records(path: Path) -> pd.DataFrame:
    """Read records from a file that `write_table_as` wrote; raises `BadData` for other files."""
    if not path.exists():
        raise BadData(f"{path} does not exist")
    refuse_ending(path)
    if path.suffix == ".parquet":
        return read_parquet([path])
    import pyarrow as pa
    import pyarrow.feather

    try:
        if path.suffix == ".arrow":
            return as_records(pa.feather.read_table(path, memory_map=False))
        return as_records(pd.read_csv(path) if path.suffix == ".csv" else pd.read_json(path, orient="records"))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise BadData(f"{path} cannot be read: {error}") from error


def write_feather(frame: pd.DataFrame, out: Path) -> None:
    """Write a table as an Arrow file."""
    import pyarrow as pa
    import pyarrow.feather

    with replacing(out) as part:
        pa.feather.write_feather(pa.Table.from_pandas(frame, preserve_index=False), str(part))


WRITERS: dict[str, Callable[[pd.DataFrame, Path], None]] = {
    ".parquet": write_parquet,
    ".arrow": write_feather,
    ".csv": lambda frame, out: write_text(out, frame.to_csv(index=False)),
    ".json": lambda frame, out: write_text(out, frame.to_json(orient="records", double_precision=15)),
}
