"""Tensors in files: known by name, type and shape, read on demand.

Bytes are read into memory, not mapped: a file that is overwritten later does not change an open model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from workbench.errors import BadCheckpoint

CHUNK = 1 << 20  # bytes read at a time: small beside a model, large beside a system call


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
