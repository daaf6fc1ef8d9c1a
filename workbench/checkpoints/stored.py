"""Tensors where they lie in files: known by name, type and shape, read once and only when asked for.

A tensor's bytes are read straight into its own memory, so opening a checkpoint takes the memory of its weights and a
file that its owner overwrites later does not change a model that was opened before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from workbench.checkpoints.identify import GGUF
from workbench.errors import BadCheckpoint

CHUNK = 1 << 20  # bytes read at a time: small beside a model, large beside a system call
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Stored:
    """One tensor of a checkpoint: in a file from byte `offset` on, or (from files of before 2020) `held` in memory."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0
    stride: tuple[int, ...] | None = None  # None: rows one after another
    lies_as: tuple[int, ...] | None = (
        None  # sizes of the axes that `stride` steps along, where they are more than the tensor's
    )
    held: torch.Tensor | None = None

    @property
    def place(self) -> object:
        """Equal for tensors that are the same bytes in the same order."""
        if self.held is not None:
            return self.held.data_ptr(), self.shape, self.held.stride()
        return self.path, self.offset, self.shape, self.stride, self.lies_as, self.dtype

    @property
    def span(self) -> int:
        """Elements from the first to the last one."""
        if self.stride is None or 0 in self.shape:
            return math.prod(self.shape)
        return 1 + sum((n - 1) * s for n, s in zip(self.lies_as or self.shape, self.stride, strict=True))

    def half_rotated(self, heads: int) -> Stored:
        """The same projection [heads * d_head, d_model] with the even rows of each head before the odd ones."""
        rows, width = self.shape
        if self.held is not None:
            halves = self.held.view(heads, -1, 2, width).transpose(1, 2)
            return replace(self, held=halves.reshape(rows, width))
        along, across = self.stride or (width, 1)
        pairs = rows // heads // 2
        strides = (2 * pairs * along, along, 2 * along, across)
        return replace(self, stride=strides, lies_as=(heads, 2, pairs, width))

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor [shape], of its own or another type; raises `BadCheckpoint` for NaN, Inf and lost bytes."""
        if self.held is not None:
            self._refuse_unbounded(name, self.held.flatten())
            return self.held.to(dtype or self.dtype)
        flat = torch.empty(self.span, dtype=dtype or self.dtype)
        begin = 0
        for chunk in self._chunks(name, flat if flat.dtype == self.dtype else None):
            self._refuse_unbounded(name, chunk)
            if flat.dtype != self.dtype:
                flat[begin : begin + len(chunk)].copy_(chunk)
            begin += len(chunk)
        if self.stride is None:
            return flat.view(self.shape)
        return flat.as_strided(self.lies_as or self.shape, self.stride).contiguous().view(self.shape)

    def check(self, name: str) -> None:
        """Read the tensor and forget it; raises as `read` does."""
        for chunk in self._chunks(name) if self.held is None else [self.held.flatten()]:
            self._refuse_unbounded(name, chunk)

    def _chunks(self, name: str, into: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
        """The elements in pieces, each in its place in `into`, or else all in one buffer."""
        size = torch.empty(0, dtype=self.dtype).element_size()
        step = CHUNK // size
        buffer = torch.empty(min(self.span, step), dtype=self.dtype) if into is None else None
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset)
                for begin in range(0, self.span, step):
                    n = min(step, self.span - begin)
                    chunk = into[begin : begin + n] if into is not None else buffer[:n]  # type: ignore[index]
                    if not _filled(file, memoryview(chunk.view(torch.uint8).numpy())):
                        raise BadCheckpoint(f"{self.path} ends inside {name}: it is cut off; copy it again")
                    yield chunk
        except OSError as error:
            raise BadCheckpoint(f"{self.path} cannot be read: {error}") from error

    def _refuse_unbounded(self, name: str, values: torch.Tensor) -> None:
        if not values.is_floating_point() or not len(values):
            return
        wide = values.to(torch.float32) if values.element_size() < 2 else values
        low, high = wide.aminmax()  # NaN comes through both
        if not (low.isfinite() and high.isfinite()):
            what = "NaN" if wide.isnan().any() else "Inf"
            raise BadCheckpoint(
                f"{self.path}: {name} holds {what}: the training diverged or the file is damaged; choose an earlier step"
            )


def _filled(file: Any, space: memoryview) -> bool:
    """Read until a space is full; False where the file ends before."""
    while len(space):
        if not (n := file.readinto(space)):
            return False
        space = space[n:]
    return True


def refuse_other_kinds(path: Path) -> None:
    """Raise `BadCheckpoint` for files that are sound but hold no weights as they are read here, by their first bytes."""
    try:
        with path.open("rb") as file:
            begin = file.read(40)
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}") from error
    if begin.startswith(b"GGUF"):
        raise BadCheckpoint(f"{path} is {GGUF}")
    if begin.startswith(b"version https://git-lfs"):
        raise BadCheckpoint(
            f"{path} is a pointer of Git LFS, not the file it stands for: fetch that with `git lfs pull`"
        )


def safetensors_table(path: Path) -> dict[str, Stored]:
    """Names and places of the tensors of one safetensors file; raises `BadCheckpoint`."""
    if not path.is_file():
        raise BadCheckpoint(f"{path} is missing")
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
        if entry["dtype"] not in _DTYPES:
            raise BadCheckpoint(f"{path}: {name} is {entry['dtype']}; read are {', '.join(_DTYPES)}")
        begin = 8 + length + entry["data_offsets"][0]
        table[name] = Stored(path, _DTYPES[entry["dtype"]], tuple(entry["shape"]), begin)
    return table
