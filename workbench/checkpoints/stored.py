"""Tensors in files: known by name, type and shape, read on demand.

Bytes are read into memory, not mapped: a file that is overwritten later does not change an open model.
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
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Stored:
    """One tensor of a checkpoint: in a file from byte `offset` on, or `held` in memory (after merging an adapter)."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0
    stride: tuple[int, ...] | None = None  # None: rows one after another
    # sizes of the axes that `stride` steps along, where they are more than the tensor's
    lies_as: tuple[int, ...] | None = None
    held: torch.Tensor | None = None

    @property
    def place(self) -> object:
        """A key that is equal for tensors of the same bytes in the same order."""
        if self.held is not None:
            return self.held.data_ptr(), self.shape, self.held.stride()
        return self.path, self.offset, self.shape, self.stride, self.lies_as, self.dtype

    @property
    def span(self) -> int:
        """Number of elements from the first to the last one in the file."""
        if self.stride is None or 0 in self.shape:
            return math.prod(self.shape)
        return 1 + sum((n - 1) * s for n, s in zip(self.lies_as or self.shape, self.stride, strict=True))

    def half_rotated(self, heads: int) -> Stored:
        """Return the projection [heads * d_head, d_model] with each head's even rows before its odd rows."""
        rows, width = self.shape
        if self.held is not None:
            halves = self.held.view(heads, -1, 2, width).transpose(1, 2)
            return replace(self, held=halves.reshape(rows, width))
        along, across = self.stride or (width, 1)
        pairs = rows // heads // 2
        strides = (2 * pairs * along, along, 2 * along, across)
        return replace(self, stride=strides, lies_as=(heads, 2, pairs, width))

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read the tensor, in its own or another type; raises `BadCheckpoint` for NaN, Inf and missing bytes."""
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
        """Check the tensor without keeping it; raises as `read` does."""
        for chunk in self._chunks(name) if self.held is None else [self.held.flatten()]:
            self._refuse_unbounded(name, chunk)

    def _chunks(self, name: str, into: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
        """Yield the elements in pieces, read into `into` or into one buffer."""
        size = torch.empty(0, dtype=self.dtype).element_size()
        step = CHUNK // size
        buffer = torch.empty(min(self.span, step), dtype=self.dtype) if into is None else None
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset)
                for begin in range(0, self.span, step):
                    n = min(step, self.span - begin)
                    chunk = into[begin : begin + n] if into is not None else buffer[:n]  # type: ignore[index]
                    space = memoryview(chunk.view(torch.uint8).numpy())
                    while len(space):
                        if not (count := file.readinto(space)):
                            raise BadCheckpoint(f"{self.path} ends inside {name}: it is cut off; copy it again")
                        space = space[count:]
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


HEAD = 256  # bytes that tell the kind of a file
SAVE = "save the weights with safetensors or torch.save"
KINDS = (  # first bytes of intact files of other kinds, and what to do
    ((b"GGUF",), GGUF),
    ((b"lmgg", b"fmgg", b"tjgg"), "a GGML file (llama.cpp, whisper.cpp), which is not read: open the model it was converted from"),
    ((b"version https://git-lfs",), "a pointer of Git LFS, not the file it stands for: fetch that with `git lfs pull`"),
    ((b"ONNX",), "an ONNX model, which is not read: open the checkpoint it was exported from"),
    (
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P",),
        "a file of PyTorch before 1.6, which is not read: torch.save(torch.load(path, weights_only=True), OUT) converts it",
    ),
    (
        (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
        "a Python pickle, which could run code: save the weights alone where it was made, torch.save(module.state_dict(), OUT)",
    ),
    ((b"\x89HDF",), f"an HDF5 file (Keras), which is not read: {SAVE}"),
    ((b"\x93NUMPY",), f"a NumPy array, not a checkpoint: {SAVE}"),
    ((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"7z\xbc\xaf", b"\x28\xb5\x2f\xfd"), "a compressed file: unpack it, then open what is in it"),
    ((b"<!DOCTYPE", b"<!doctype", b"<html"), "a web page, not the file it links to: download that file again"),
)  # fmt: skip


def first_bytes(path: Path) -> bytes:
    """Return the first bytes of a regular file; raises `BadCheckpoint` if it is missing or cannot be read."""
    if not path.is_file():
        raise BadCheckpoint(f"{path} is missing")
    try:
        with path.open("rb") as file:
            return file.read(HEAD)
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}") from error


def refuse_other_kinds(path: Path) -> None:
    """Raise `BadCheckpoint` for intact files of other kinds, which their first bytes tell."""
    begin = b"ONNX" if path.suffix == ".onnx" else first_bytes(path)
    if kind := next((kind for signatures, kind in KINDS if begin.startswith(signatures)), None):
        raise BadCheckpoint(f"{path} is {kind}")
    # no signature: a version and a producer
    if begin.startswith(b"\x08") and (b"pytorch" in begin or b"onnx" in begin):
        raise BadCheckpoint(f"{path} is an ONNX model, which is not read: open the checkpoint it was exported from")
    if begin[8:10] == b'{"' and path.suffix != ".safetensors":
        raise BadCheckpoint(f"{path} is a safetensors file under another name: call it {path.stem}.safetensors")
    if begin.startswith(b"PK") and path.suffix == ".safetensors":
        raise BadCheckpoint(
            f"{path} is a ZIP archive, as torch.save writes, no safetensors file: call it {path.stem}.pt"
        )


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
