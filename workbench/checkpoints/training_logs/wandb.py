"""W&B's own file of a run, `run-ID.wandb`, which its client writes with or without a network (extra `wandb`).

    :W&B, 3 bytes | blocks of 32 KiB: checksum (4 bytes), length (2), kind (1: all, 2: first part, 3: middle, 4: last), part of a record

A record `history` has the numbers of one call of `log`. A run's group is its setting, else its name.
Source: wandb, sdk/internal/datastore.py (up to version 0.21), and LevelDB's log format.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.checkpoints.training_logs.quantity_names import STEPS, plain_name
from workbench.checkpoints.training_logs.reading import LogNumbers, LogReader
from workbench.errors import BadData
from workbench.file_io import open_regular
from workbench.places import install

MAGIC, BLOCK, HEADER = b":W&B", 1 << 15, 7
ALL, FIRST, LAST = 1, 2, 4
FOLDER = re.compile(r"(?:offline-)?run-\d{8}_\d{6}-.+")


def _read(path: Path, numbers: LogNumbers) -> None:
    if path.suffix != ".wandb":  # the run's console output, summary and system logs
        return
    try:
        from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # generated at import
    except ImportError:
        raise BadData(f"{path} needs wandb: {install('wandb')}") from None
    names, run, parameters = dict[str, str](), ("", path.stem), dict[str, str]()
    for record in map(Record.FromString, _records(path)):
        names |= {plain_name(name): name for name in _row(record)}
        for config in (record.config, record.run.config):
            parameters |= {item.key or ".".join(item.nested_key): item.value_json for item in config.update}
        if record.WhichOneof("record_type") == "run":  # again, if the loop names its run later
            name = f"{record.run.display_name} {record.run.run_id}".strip()
            unnamed = name if record.run.display_name else f" {name}"  # of a run that was resumed without its name
            same = (key for key in numbers.runs if key[1].endswith(unnamed) or key[1] == record.run.run_id)
            run = next(same, (record.run.run_group or name, name))
    numbers.parameters[run] = {name: text for name, text in parameters.items() if not name.startswith("_")}
    step = next((names[name] for name in STEPS if name in names), "_step")
    if step == "_step":
        numbers.notes.append(f"{path.name}: the steps are W&B's `_step`, which counts calls of `log`")
    for record in map(Record.FromString, _records(path, numbers)):
        row = _row(record)
        at, epoch = row.pop(step, None), row.get(names.get("epoch", ""))
        if at is not None and epoch is not None:
            numbers.note_epoch(epoch, at, run)
        for name, value in row.items():
            if at is None:
                numbers.skipped["the row has no step"] += 1
            elif not name.startswith("_"):
                numbers.add(at, name, value, run=run)


def _row(record: Any) -> dict[str, float]:
    """Return the numbers of a record `history` by name, empty for other records."""
    items = record.history.item if record.WhichOneof("record_type") == "history" else ()
    values = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
    return {
        name: value for name, value in values.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _records(path: Path, numbers: LogNumbers | None = None) -> Iterator[bytes]:
    """Yield the records of a file; raises `BadData` for a damaged one. The last record may be cut off, which is counted."""
    with open_regular(path) as file:
        file.seek(len(MAGIC) + 3)
        offset, parts = HEADER, b""
        while True:
            if BLOCK - offset % BLOCK < HEADER:  # the rest of a block has no room for a header
                offset += BLOCK - offset % BLOCK
                file.seek(offset)
            head = file.read(HEADER)
            if not head:
                return
            checksum, length, kind = struct.unpack("<IHB", head.ljust(HEADER, b"\0"))
            data = file.read(length)
            if len(head) < HEADER or len(data) < length:
                if numbers:
                    numbers.skipped["the last record is cut off"] += 1
                return
            crc = zlib.crc32(data, zlib.crc32(head[6:7]))
            if checksum != crc:
                raise BadData(f"{path} is damaged at byte {offset}; copy it again")
            offset += HEADER + length
            parts = data if kind in (ALL, FIRST) else parts + data
            if kind in (ALL, LAST):
                yield parts


READER = LogReader(
    "W&B", lambda path, head: head.startswith(MAGIC) or any(FOLDER.fullmatch(p.name) for p in path.parents), _read,
    home=lambda path: next((p.parent for p in path.parents if FOLDER.fullmatch(p.name)), path),
)  # fmt: skip
