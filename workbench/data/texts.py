"""Texts in tables: the rows of JSON Lines and Parquet files and of `datasets`, one document each.

A dataset is named `datasets:NAME`, `datasets:NAME@CONFIG` or with its split, `datasets:NAME:validation` (else `train`).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import BadData, suggest

COLUMNS = ("text", "content")
TABLES = (".jsonl", ".parquet")
NAME = re.compile(r"datasets:(?P<name>[^@:]+)(?:@(?P<config>[^:]+))?(?::(?P<split>.+))?")


def is_dataset(name: object) -> bool:
    """Return whether a path or text is the name of a dataset."""
    return str(name).startswith("datasets:")


def rows_of_file(path: Path, data: bytes) -> list[str]:
    """Return the texts of a .jsonl or .parquet file; raises `BadData` with the line or the columns that do not fit."""
    texts = list(_json_lines(path, data) if path.suffix == ".jsonl" else _parquet(path, data))
    if not any(text.strip() for text in texts):
        raise BadData(f"{path} holds no text; leave it out")
    return [text for text in texts if text.strip()]


def _json_lines(path: Path, data: bytes) -> Iterator[str]:
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise BadData(f"{path}, line {number}, is no JSON: {error}") from error
        if isinstance(row, dict):
            row = row[_column([k for k, v in row.items() if isinstance(v, str)], list(row), f"{path}, line {number}")]
        if not isinstance(row, str):
            raise BadData(f"{path}, line {number}, is a {type(row).__name__}; give objects with a text, or texts")
        yield _whole(row, f"{path}, line {number}")


def _parquet(path: Path, data: bytes) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
            schema = file.schema_arrow
            texts = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
            column = _column(texts, schema.names, str(path))
            for batch in file.iter_batches(columns=[column]):
                yield from (_whole(text, str(path)) for text in batch.column(0).to_pylist() if text is not None)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise BadData(f"{path} is damaged or no Parquet file: {error}") from error


def dataset_rows(name: str, most_bytes: int) -> tuple[str, list[str]]:
    """Return (domain, texts) of a dataset by name; raises `BadData` if it is unavailable or larger than `most_bytes`."""
    match = NAME.fullmatch(name)
    if match is None:
        raise BadData(f"{name!r} names no dataset; write datasets:NAME, datasets:NAME@CONFIG or datasets:NAME:SPLIT")
    import datasets

    try:
        table: Any = datasets.load_dataset(match["name"], match["config"], split=match["split"] or "train")
    except Exception as error:  # whatever network, cache and other people's files come to
        reason = next(iter(str(error).splitlines()), "")
        raise BadData(f"the dataset {match['name']!r} cannot be loaded: {type(error).__name__}: {reason}") from error
    strings = [k for k, f in table.features.items() if getattr(f, "dtype", None) in ("string", "large_string")]
    column, texts, size = _column(strings, table.column_names, name), [], 0
    for text in table[column]:
        size += len((text or "").encode("utf-8", "surrogatepass"))
        if size > most_bytes:
            raise BadData(f"{name} has more than {most_bytes} bytes of text; take a part, such as :train[:1%]")
        if text and text.strip():
            texts.append(_whole(text, name))
    return Path(match["name"]).name, texts


def _column(texts: Sequence[str], names: Iterable[str], where: str) -> str:
    """Return the text column: `text`, `content`, or the only one with text."""
    columns = [c for c in COLUMNS if c in texts] or list(texts)
    if not columns or (len(columns) > 1 and columns[0] not in COLUMNS):
        raise BadData(f"{where}: which column is the text? Call it {COLUMNS[0]!r}; {suggest(COLUMNS[0], list(names))}")
    return columns[0]


def _whole(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadData(f"{where} holds half a character; give valid Unicode text") from error
    return text.replace("\r\n", "\n")


def joined(texts: Iterable[str]) -> bytes:
    """Return the bytes of texts, for hashing."""
    return b"".join(itertools.chain.from_iterable((text.encode(), b"\0") for text in texts))
