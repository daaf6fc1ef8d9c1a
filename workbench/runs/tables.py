"""Tables in common formats: pandas and Arrow in memory; Parquet, Arrow, CSV, JSON, LaTeX and Markdown on disk."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.console import json_text
from workbench.errors import BadData, refuse_unknown
from workbench.file_io import read_text, replacing, write_text
from workbench.runs.records import TEXT, read_parquet, typed, write_parquet


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
    """Write a table as .parquet, .arrow (Feather), .csv, .json, .tex or .md; raises `UnknownName` for other endings."""
    refuse_ending(out)
    WRITERS[out.suffix](as_frame(frame), out)


def refuse_ending(path: Path | None) -> None:
    """Raise `UnknownName` for an ending that `write_table_as` does not write."""
    if path is not None:
        refuse_unknown("file ending", path.suffix, WRITERS)


def read_records(path: Path) -> pd.DataFrame:
    """Read records from a file that `write_table_as` wrote; raises `BadData` for other files."""
    if not path.exists():
        raise BadData(f"{path} does not exist")
    refuse_ending(path)
    if path.suffix in TEXTS:
        raise BadData(
            f"{path} is a table for a paper with rounded numbers, no records: read .parquet, .arrow, .csv or .json"
        )
    if path.suffix == ".parquet":
        return read_parquet([path])
    import pyarrow as pa
    import pyarrow.feather

    try:
        if path.suffix == ".arrow":
            return as_records(pa.feather.read_table(path, memory_map=False))
        if path.suffix == ".json":
            return as_records(pd.DataFrame(json.loads(read_text(path))))
        names = pd.read_csv(path, nrows=0).columns  # texts such as 007 and NA stay as they are
        missing = {name: [""] if name in TEXT else ["", "NA", "NaN", "nan", "null"] for name in names}
        texts = dict.fromkeys(TEXT, "str")
        return as_records(pd.read_csv(path, dtype=texts, keep_default_na=False, na_values=missing))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise BadData(f"{path} cannot be read: {error}") from error


def write_feather(frame: pd.DataFrame, out: Path) -> None:
    """Write a table as an Arrow file."""
    import pyarrow as pa
    import pyarrow.feather

    with replacing(out) as part:
        pa.feather.write_feather(pa.Table.from_pandas(frame, preserve_index=False), str(part))


def latex_table(frame: pd.DataFrame) -> str:
    """Return a table as a LaTeX `tabular` with the rules of booktabs; needs `\\usepackage{booktabs}`.

    Args:
        frame: Any table. Its index, columns without values and the columns `provenance` and `each` (a value per seed) are left out.

    Returns:
        Text with right-aligned numbers of equal decimals in a column, and all other cells escaped. A column `x ± 95 %` is written
        behind its mean `x`. Columns that are equal in all rows are in the caption of a `table` around the `tabular`.
    """
    numeric, (names, *rows) = _written(frame)
    exact = {str(c): len(rows) > 1 and frame[c].astype("str").nunique(dropna=False) == 1 for c in frame}
    equal = [exact[name] and len(set(column)) == 1 for name, column in zip(names, zip(*rows, strict=True), strict=True)]
    equal = [False] * len(names) if all(equal) else equal
    parts = zip(names, rows[0] if rows else names, equal, strict=True)
    about = ", ".join(f"{name}: {cell}" for name, cell, same in parts if same and cell)
    columns, shown = "", [i for i, same in enumerate(equal) if not same]
    for i in shown:
        wide = max(len(row[i]) for row in rows) > WIDE
        columns += "r" if numeric[i] else "p{40mm}" if wide else "l"
    head, *body = [" & ".join(_escaped(row[i]) for i in shown) + r" \\" for row in (names, *rows)]
    begin = rf"\begin{{tabular}}{{{columns}}}"
    lines = [begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
    if about:
        caption = rf"\caption{{Equal in all rows: {_escaped(about)}.}}"
        lines = [r"\begin{table}", r"\centering", caption, *lines, r"\end{table}"]
    return "\n".join(lines) + "\n"


def markdown_table(frame: pd.DataFrame) -> str:
    """Return a table as GitHub Markdown, with numbers as in `latex_table`."""
    numeric, rows = _written(frame)
    rows = [[MARKED.sub(r"\\\g<0>", cell) for cell in row] for row in rows]
    rows.insert(1, ["---:" if is_number else "---" for is_number in numeric])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _written(frame: pd.DataFrame) -> tuple[list[bool], list[list[str]]]:
    """Return which columns hold numbers, and the header and rows as text, without columns that have no value."""
    frame = frame.drop(columns=["provenance", "each"], errors="ignore").dropna(axis=1, how="all")
    frame = frame.set_axis([str(c) for c in frame.columns], axis=1)
    halves = {mean: c for c in map(str, frame.columns) if (mean := c.partition(" ± ")[0]) != c and mean in frame}
    numeric, columns = [], []
    for name in frame.columns.drop([*halves.values()]):
        kind = frame[name].dtype
        values = (frame[name].astype("float64") if pd.api.types.is_float_dtype(kind) else frame[name]).tolist()
        numeric.append(pd.api.types.is_numeric_dtype(kind) and not pd.api.types.is_bool_dtype(kind))
        if name in halves:
            half = frame[halves[name]].astype("float64").tolist()
            decimals = max((1 - math.floor(math.log10(h)) for h in half if 0 < h < math.inf), default=3)
            cells = []
            for mean, h in zip(values, half, strict=True):  # `0.12 ± 0.03`; the mean alone without an interval
                text = f"{mean:.{max(0, decimals)}f}" + (f" ± {h:.{max(0, decimals)}f}" if math.isfinite(h) else "")
                cells.append(text.replace("-", "−") if math.isfinite(mean) else _cell(mean))
            columns.append([halves[name], *cells])
            continue
        even = _decimals([x for x in values if x]) if pd.api.types.is_float_dtype(kind) else None
        columns.append([name, *(f"{x:.{even}f}" if even is not None and x == x else _cell(x) for x in values)])
    return numeric, [list(row) for row in zip(*columns, strict=True)] or [[]]


def _decimals(values: list[float]) -> int | None:
    """Return the decimals that show four significant digits of the largest and two of the smallest number; None if that is too many."""
    sizes = [math.floor(math.log10(abs(x))) for x in values if math.isfinite(x)]
    if not sizes or len(sizes) < sum(x == x for x in values) or max(sizes) - min(sizes) > SPAN or max(sizes) > 6:
        return None
    decimals = max(0, 3 - max(sizes), 1 - min(sizes))
    while decimals and all(round(x, decimals) == round(x, decimals - 1) for x in values if x == x):
        decimals -= 1
    return decimals


def _cell(value: Any) -> str:
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return ""
    if isinstance(value, float) and math.isfinite(value):
        text = f"{value:.4g}"
        return f"{value:.0f}" if "e+" in text and abs(value) < 1e7 else text
    return " ".join(str(value).split())


WIDE, SPAN = 40, 4  # characters of a column that wraps, powers of ten in a column of equal decimals
MARKED = re.compile(r"[\\|*<`]|(?<![^\W_])_|_(?![^\W_])")
"""What Markdown does not print as it stands; an underscore inside a word is printed."""
LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "−": "$-$", "±": r"$\pm$",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "[": "{[}",  # \\ before [ would read an option
    **{c: rf"\{c}" for c in "&%$#_{}"},
}  # fmt: skip


def _escaped(text: str) -> str:
    number = re.fullmatch(r"(-?)([\d.]+)(?:e([+-]\d+))?", text)
    if number and (number[1] or number[3]):
        return f"${number[1]}{number[2]}" + (rf"\times 10^{{{int(number[3])}}}$" if number[3] else "$")
    return "".join(LATEX.get(c, c) for c in text)


TEXTS = {".tex": latex_table, ".md": markdown_table}
WRITERS: dict[str, Callable[[pd.DataFrame, Path], None]] = {
    ".parquet": write_parquet,
    ".arrow": write_feather,
    ".csv": lambda frame, out: write_text(out, frame.to_csv(index=False)),
    ".json": lambda frame, out: write_text(out, json_text(frame)),
    ".tex": lambda frame, out: write_text(out, latex_table(frame)),
    ".md": lambda frame, out: write_text(out, markdown_table(frame)),
}
