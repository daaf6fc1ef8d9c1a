"""Tables with a column for the step and one for each quantity: CSV, JSON lines and Parquet.

W&B exports a run's history, or a chart with a column `RUN - QUANTITY` for each run. TensorBoard's page exports a scalar as
`Wall time,Step,Value`, and the file's name has the quantity. A table may hold many runs.
Source: files that W&B and TensorBoard write.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from workbench.checkpoints.training_logs.quantity_names import (
    FLAGS,
    RUNS,
    SETTINGS,
    SPLITS,
    STEPS,
    SUMMARIES,
    SUMMARY,
    SUMMARY_REASON,
    plain_name,
    quantity,
)
from workbench.checkpoints.training_logs.reading import (
    CUT_OFF,
    EVALUATIONS,
    HEAD,
    WIDE,
    LogNumbers,
    LogReader,
    encoding_of,
    of_evaluation,
)
from workbench.errors import BadData
from workbench.file_io import open_regular

KINDS = {".csv": "csv", ".tsv": "csv", ".jsonl": "lines", ".parquet": "parquet"}
CHART = re.compile(r"(?P<run>.+) - (?P<name>.+?)(?P<range>__MIN|__MAX)?")  # W&B
MEAN = "Group: "  # how W&B begins a column that is a mean over runs
SCALAR = re.compile(r"(?P<run>.+)-tag-(?P<name>.+)")  # TensorBoard
DECIMAL_COMMA = re.compile(r"\s*-?\d+,\d+\s*")
THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+")
DOTTED = re.compile(r"\s*\d{1,3}(\.\d{3})+\s*")  # one, or one thousand
BATCH = 65_536  # rows of a Parquet file that are held at once


def read_table(path: Path, numbers: LogNumbers) -> None:
    """Add the numbers of a table; raises `BadData` for a table without a column of steps."""
    numbers.chronological, numbers.evaluation = False, of_evaluation(path)
    numbers.by_quantity = SCALAR.fullmatch(path.stem) is not None
    with open_regular(path) as file:
        kind = _kind(path, file.read(HEAD))
    rows = {"parquet": _parquet_rows, "lines": _json_rows}.get(kind, _csv_rows)
    columns: dict[str, tuple[str, str] | None] = {}
    plain: dict[str, str] = {}
    for row in islice(rows(path, LogNumbers(path)), None if kind == "lines" else 1):  # lines differ in their names
        for name in row:
            plain.setdefault(plain_name(name), name)
    step = next((plain[name] for name in STEPS if name in plain), "")
    if not step and plain and kind != "lines":
        names = ", ".join(map(repr, plain.values()))
        raise BadData(f"{path} has no column of steps; name one of its columns {names} 'step'")
    if plain_name(step) in ("iteration", "iter") and any(name.startswith("micro") for name in plain):
        raise BadData(f"{path}: {step} counts micro-batches; add a column step of optimiser steps")
    if plain_name(step) == "_step" or (
        step == "Step" and any(map(CHART.fullmatch, plain.values()))
    ):  # an exported chart
        numbers.notes.append(f"{path.name}: the steps are W&B's `_step`, which counts calls of `log`")
    starts = dict[tuple[str, str], _Starts]()
    for row in rows(path, numbers):
        cell = row.get(step)
        if isinstance(cell, str) and THOUSANDS.fullmatch(cell.strip()):
            cell = cell.replace(",", "")
        elif isinstance(cell, str) and DOTTED.fullmatch(cell):
            raise BadData(f"{path}: step {cell.strip()} can be read in two ways; write steps without a point")
        elif cell is not None and cell == step and list(row.values()) != list(row):
            raise BadData(f"{path} has a second header with other columns; make it two files")
        if (at := _number(cell)) is None:
            numbers.skipped["the row has no step"] += 1
            continue
        labels = {plain_name(name): str(value) for name, value in row.items() if value not in (None, "")}
        setting = "/".join(labels[name] for name in map(plain_name, row) if name in SETTINGS and name in labels)
        identity = [labels[name] for name in RUNS if name in labels][:1]
        run = " ".join(dict.fromkeys([*identity, *(text for name, text in labels.items() if name == "seed")]))
        if "seed" in labels:
            numbers.parameters[setting, run] = {"seed": labels["seed"]}
        if (epoch := _number(labels.get("epoch"))) is not None:
            numbers.note_epoch(epoch, at, (setting, run))
        own = {name: text for name, text in labels.items() if name != plain_name(step) and _is_setting(name)}
        starts.setdefault((setting, run), _Starts(path, at, at, own)).next_row(at, own)
        flags = [word for name, word in FLAGS.items() if labels.get(name, "").lower() in ("true", "1", "1.0")]
        evaluations = [cell for cell in labels.values() if cell.lower() in EVALUATIONS]
        split = next(iter([labels[name] for name in SPLITS if labels.get(name)] + flags + evaluations), "")
        if labels.keys() & SUMMARIES:
            numbers.ended.add((setting, run))
        for name, value in row.items():
            if name not in columns:
                columns[name] = _column(path, name, step, numbers)
            column = columns[name]
            if column is None or value is None or value == "":
                continue
            of, theirs = column
            number = _number(value)
            if number is None:
                numbers.skipped[f"a cell of {name} is no number"] += 1
            elif SUMMARY in labels and plain_name(theirs) == "train_loss":
                numbers.skipped[SUMMARY_REASON] += 1
            else:
                theirs = f"{split}/{theirs}" if split and plain_name(theirs) in ("loss", "ppl") else theirs
                numbers.add(at, theirs, number, run=(setting, of or run))
    for each in starts.values():
        each.refuse()


def _is_setting(name: str) -> bool:
    """Return whether a column is no measured quantity: its cells may differ between runs."""
    return name not in (*RUNS, *SPLITS, *FLAGS, "epoch") and (quantity(name)[0] or "learning_rate") == "learning_rate"


@dataclass
class _Starts:
    """Columns that are constant in each part of a table that begins at the first step, and differ between the parts."""

    path: Path
    first: float
    step: float
    labels: Mapping[str, str]  # of the row before
    between: set[str] | None = None  # columns that differ at every start
    rising: bool = False
    within: set[str] = field(default_factory=set)  # columns that differ elsewhere

    def next_row(self, step: float, labels: Mapping[str, str]) -> None:
        """Compare a row with the row before."""
        differ = {name for name in labels.keys() | self.labels.keys() if labels.get(name) != self.labels.get(name)}
        if step < self.step and step <= self.first and self.rising:
            self.between = differ if self.between is None else self.between & differ
        else:
            self.within |= differ
        self.rising = step > self.step
        self.step, self.labels = step, labels

    def refuse(self) -> None:
        """Raise `BadData` if a column separates the parts, so that they are no seeds of one setting."""
        if names := sorted((self.between or set()) - self.within):
            raise BadData(
                f"{self.path}: the steps begin again where {' and '.join(names)} changes; name this column 'setting', 'run' or 'seed', "
                "or leave out its rows or the column"
            )


def _column(path: Path, name: str, step: str, numbers: LogNumbers) -> tuple[str, str] | None:
    """Return the run and the quantity of a column; None for a column that is left out, which is noted."""
    plain = plain_name(name)
    if name == step or plain in (*RUNS, *SETTINGS, *SPLITS, "epoch"):
        return None
    chart = CHART.fullmatch(name)
    if chart and chart["run"].lower() in (*EVALUATIONS, "train", "training"):
        name = f"{chart['run']}/{chart['name']}"  # the loss of a split, not of a run
    elif chart:
        if name.startswith(MEAN) and not chart["range"]:
            numbers.notes.append(f"{path.name}: left out a column: {name} is a mean over runs")
        return None if chart["range"] or name.startswith(MEAN) else (chart["run"], chart["name"])
    if plain == "value" and (scalar := SCALAR.fullmatch(path.stem)):
        return "", scalar["name"]
    if why := quantity(name)[2]:
        numbers.notes.append(f"{path.name}: left out a column: {why}")
        return None
    return "", name


def _number(value: Any) -> float | None:
    """Return a cell's number; None for an empty cell and for text."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _csv_rows(path: Path, numbers: LogNumbers) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding=encoding_of(path), errors="replace", newline="") as file:
        head = file.readline(1 << 16)
        file.seek(0)
        delimiter = max(",;\t", key=head.count)
        reader = csv.DictReader(_whole_lines(file, numbers), delimiter=delimiter)
        names = list(reader.fieldnames or ())
        reader.fieldnames = [f"{name} ({i + 1})" if name in names[:i] else name for i, name in enumerate(names)]
        for row in reader:
            if any(row.pop(None, ())):
                raise BadData(
                    f"{path}, line {reader.line_num}, has more cells than the header; quote numbers that have commas"
                )
            if delimiter == ";" and any(DECIMAL_COMMA.fullmatch(cell) for cell in row.values() if cell):
                raise BadData(f"{path} has decimal commas; save it with decimal points")
            yield row


def _whole_lines(lines: Iterable[str], numbers: LogNumbers) -> Iterator[str]:
    """Yield the lines without a last one that may be cut off."""
    length = 0
    for line in lines:
        if len(line) < length and not line.endswith(("\n", "\r", '"')):
            numbers.skipped[CUT_OFF] += 1
            return
        length = len(line.rstrip("\r\n"))
        yield line


def _json_rows(path: Path, numbers: LogNumbers) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding=encoding_of(path), errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line) if line.strip() else {}
            except ValueError:
                numbers.skipped["the line is no JSON"] += 1
                continue
            if isinstance(row, dict) and row:
                yield row


def _parquet_rows(path: Path, numbers: LogNumbers) -> Iterator[Mapping[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH):
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise BadData(f"{path} cannot be read: {error}") from error


def _kind(path: Path, head: bytes) -> str:
    """Return the kind of table by its name or its first line; an empty string for other files."""
    if path.suffix.lower() in KINDS:
        return KINDS[path.suffix.lower()]
    line = head.decode("utf-16" if head[:2] in WIDE else "utf-8-sig", errors="replace").partition("\n")[0]
    if line.startswith("{"):
        try:
            return "lines" if isinstance(json.loads(line), dict) and path.suffix.lower() != ".json" else ""
        except ValueError:
            return ""
    cells = [plain_name(cell) for cell in re.split("[,;\t]", line)]
    is_table = len(cells) > 1 and any(name in cells for name in STEPS) and any(quantity(c)[0] for c in cells)
    return "csv" if is_table else ""


READER = LogReader(
    "table", lambda path, head: bool(_kind(path, head)), read_table,
    home=lambda path: path.with_name(scalar["run"]) if (scalar := SCALAR.fullmatch(path.stem)) else path,
)  # fmt: skip
