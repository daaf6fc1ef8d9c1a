"""Tables with a column for the step and one for each quantity: CSV, JSON lines and Parquet.

W&B exports a run's history, or a chart with a column `RUN - QUANTITY` for each run. TensorBoard's page exports a scalar as
`Wall time,Step,Value`, and the file's name has the quantity. A table may hold many runs.
Source: files that W&B and TensorBoard write.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workbench.checkpoints.training_logs.fields import RUNS, SETTINGS, STEPS, plain_name, quantity
from workbench.checkpoints.training_logs.reading import LogNumbers, LogReader
from workbench.errors import BadData

ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet")
CHART = re.compile(r"(?P<run>.+) - (?P<name>.+?)(?P<range>__MIN|__MAX)?")  # W&B
SCALAR = re.compile(r".*-tag-(?P<name>.+)")  # TensorBoard
BATCH = 65_536  # rows of a Parquet file that are held at once


def read_table(path: Path, numbers: LogNumbers) -> None:
    """Add the numbers of a table; raises `BadData` for a table without a column of steps."""
    numbers.chronological = False
    rows = {".parquet": _parquet_rows, ".jsonl": _json_rows}.get(path.suffix.lower(), _csv_rows)(path)
    columns: dict[str, tuple[str, str, float] | None] = {}
    step = ""
    for row in rows:
        if not step or step not in row:
            plain = {plain_name(name): name for name in reversed(list(row))}
            step = next((plain[name] for name in STEPS if name in plain), "")
            if not step:
                if path.suffix == ".jsonl":  # a line of settings
                    numbers.skipped["the row has no step"] += 1
                    continue
                raise BadData(
                    f"{path} has no column of steps; name one of its columns {', '.join(map(repr, plain.values()))} 'step'"
                )
            if plain_name(step) == "_step":
                numbers.notes.append(f"{path.name}: the steps are W&B's `_step`, which counts calls of `log`")
        if (at := _number(row[step])) is None:
            numbers.skipped["the row has no step"] += 1
            continue
        labels = {plain_name(name): str(value) for name, value in row.items() if value not in (None, "")}
        if (epoch := _number(labels.get("epoch"))) is not None:
            numbers.note_epoch(epoch, at)
        setting = "/".join(labels[name] for name in map(plain_name, row) if name in SETTINGS and name in labels)
        run = next((labels[name] for name in RUNS if name in labels), "")
        for name, value in row.items():
            if name not in columns:
                columns[name] = _column(path, name, step, numbers)
            if (column := columns[name]) and (number := _number(value)) is not None:
                of, theirs, factor = column
                numbers.add(at, theirs, number, run=(setting, of or run), factor=factor)


def _column(path: Path, name: str, step: str, numbers: LogNumbers) -> tuple[str, str, float] | None:
    """Return the run and the quantity of a column; None for a column that is left out, which is noted."""
    plain = plain_name(name)
    if name == step or plain in (*RUNS, *SETTINGS):
        return None
    if chart := CHART.fullmatch(name):
        return None if chart["range"] else (chart["run"], chart["name"], 1.0)
    if plain == "value" and (scalar := SCALAR.fullmatch(path.stem)):
        return "", scalar["name"], 1.0
    if why := quantity(name)[2]:
        numbers.notes.append(f"{path.name}: left out a column: {why}")
        return None
    return "", name, 1.0


def _number(value: Any) -> float | None:
    """Return a cell's number; None for an empty cell and for text."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _csv_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        head = file.readline(1 << 16)
        file.seek(0)
        delimiter = max(",;\t", key=head.count)
        for row in csv.DictReader(file, delimiter=delimiter):
            row.pop(None, None)  # cells beyond the header
            yield row


def _json_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            row = json.loads(line) if line.strip() else {}
            if isinstance(row, dict) and row:
                yield row


def _parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH):
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise BadData(f"{path} cannot be read: {error}") from error


READER = LogReader("table", lambda path, head: path.suffix.lower() in ENDINGS, read_table)
