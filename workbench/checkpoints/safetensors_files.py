"""Tensors of safetensors files, by name and type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from workbench.checkpoints.file_signatures import refuse_other_kinds
from workbench.checkpoints.stored_tensors import Stored
from workbench.errors import BadCheckpoint

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def safetensors_table(path: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file by name; raises `BadCheckpoint`."""
    refuse_other_kinds(path)
    try:
        with safe_open(path, framework="pt"):  # checks header, sizes and gaps
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} is damaged or no safetensors file: {error}") from error
    table = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise BadCheckpoint(f"{path}: {name} is {entry['dtype']}; read are {', '.join(DTYPES)}")
        begin = 8 + length + entry["data_offsets"][0]
        table[name] = Stored(path, DTYPES[entry["dtype"]], tuple(entry["shape"]), begin)
    return table
