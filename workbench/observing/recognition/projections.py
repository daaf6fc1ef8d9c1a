"""Which module of a block output its queries, keys and values: a slice of some output, found by comparing numbers.

Values are compared column by column, queries and keys head by head by their norms, which no rotation changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from workbench.observing.interception.call_sites import CallSite
from workbench.observing.interception.positions import Axes
from workbench.observing.interception.tensor_layouts import TensorPath
from workbench.observing.recognition.executions import Execution

_NARROW = (torch.float16, torch.bfloat16)
_MAX_TABLE = 2**26  # entries of a table of all columns against all columns


@dataclass(frozen=True)
class TensorLocation:
    """One input or output tensor of a module: its name, which of its runs in the block (or in all), where in the structure."""

    module: str
    run: int
    path: TensorPath
    axes: Axes = field(kw_only=True)
    site: CallSite | None = field(default=None, kw_only=True)  # where a product that is no module is called
    parameter: str = field(default="", kw_only=True)  # in which vectors are looked up, where that is no module


@dataclass(frozen=True)
class Projection(TensorLocation):
    """Columns of an output [batch, pos, width] that hold heads of `d_head` numbers."""

    columns: slice | tuple[int, ...]
    heads: int

    def heads_in(self, rows: Tensor) -> Tensor:
        """The heads [any, head, d_head] in rows [any, width]."""
        chosen = rows[:, self.columns if isinstance(self.columns, slice) else list(self.columns)]
        return chosen.unflatten(1, (self.heads, -1))

    def with_heads(self, rows: Tensor, heads: Tensor) -> Tensor:
        """A copy of the rows in which the heads stand instead."""
        rows = rows.clone()
        rows[:, self.columns if isinstance(self.columns, slice) else list(self.columns)] = heads.flatten(1)
        return rows


def _as_slice(columns: Tensor) -> slice | tuple[int, ...]:
    first, n = int(columns[0]), len(columns)
    straight = torch.equal(columns.cpu(), torch.arange(first, first + n))
    return slice(first, first + n) if straight else tuple(columns.tolist())


def matching_columns(output: Tensor, target: Tensor) -> slice | tuple[int, ...] | None:
    """Columns of `output` [row, width] that equal those of `target` [row, columns] up to a factor each; None if not all."""
    if output.shape[1] < target.shape[1]:
        return None
    tolerance = 1e-4 if output.dtype in _NARROW or target.dtype in _NARROW else 1e-9
    a, b = (torch.nn.functional.normalize(x.double(), dim=0) for x in (output, target))
    first = int((a.T @ b[:, 0]).abs().argmax())
    straight = a[:, first : first + b.shape[1]]
    if straight.shape == b.shape and bool(((straight * b).sum(0).abs() > 1 - tolerance).all()):
        return slice(first, first + b.shape[1])
    if a.shape[1] * b.shape[1] > _MAX_TABLE or a.shape[1] == b.shape[1] == 1:
        return None
    best = (a.T @ b).abs().max(0)
    if not bool((best.values > 1 - tolerance).all()) or len(best.indices.unique()) < len(best.indices):
        return None
    return _as_slice(best.indices)


def matching_head_columns(output: Tensor, target: Tensor, starts: Tensor) -> slice | tuple[int, ...] | None:
    """Columns of `output` [row, width] that are heads [row, head, d_head] up to one factor and a rotation; None if not all.

    Where norms leave a choice (normed heads), the rows of `starts` decide, which stand at position 0 and are not turned.
    """
    width = target.shape[-1]
    if output.shape[1] % width or output.shape[1] < target.shape[1] * width:
        return None
    tolerance = 2e-2 if output.dtype in _NARROW or target.dtype in _NARROW else 1e-4
    parts, heads = output.double().unflatten(1, (-1, width)), target.double()
    a, b = (x.norm(dim=-1) for x in (parts, heads))
    a, b = (x / x.mean(0).clamp_min(1e-30) for x in (a, b))
    fits = (a[:, :, None] - b[:, None]).abs().amax(0) < tolerance
    if bool((fits.sum(0) > 1).any()):
        x, y = (torch.nn.functional.normalize(z[starts], dim=-1) for z in (parts, heads))
        fits &= (x[:, :, None] - y[:, None]).abs().amax((0, 3)) < tolerance * width**0.5
    best = fits.to(torch.uint8).max(0)
    if not bool(best.values.all()) or len(best.indices.unique()) < len(best.indices):
        return None
    return _as_slice((best.indices[:, None] * width + torch.arange(width, device=output.device)).flatten())


def run_index(entry: Execution, among: Iterable[Execution]) -> int:
    """How often its module had run before, among these."""
    return sum(other.name == entry.name and other.start < entry.start for other in among)


def find_projection(executions: list[Execution], target: Tensor, *, starts: Tensor | None = None) -> Projection | None:
    """The outermost output among the executions that holds the heads [row, head, d_head]; `starts` where they are turned."""
    return next((place for place, _, _ in projections_of(executions, target, starts=starts)), None)


def projections_of(
    executions: list[Execution], target: Tensor, *, starts: Tensor | None = None
) -> Iterator[tuple[Projection, Execution, Tensor]]:
    """Every output that holds the heads, the outermost first: its place, its execution and its columns [row, width] there."""
    for entry in sorted(executions, key=lambda e: (len(e.stack()), e.start)):
        for seen in entry.outputs:
            columns = (
                matching_head_columns(seen.rows, target, starts)
                if starts is not None
                else matching_columns(seen.rows, target.flatten(1))
            )
            if columns is not None:
                run = run_index(entry, executions)
                place = Projection(entry.name, run, seen.path, columns, target.shape[1], axes=seen.axes)
                yield place, entry, place.heads_in(seen.rows).flatten(1)


def same_projection(known: Projection, executions: list[Execution], name: str) -> Projection | None:
    """The same projection in the module of another name, where that runs among the executions and is as wide."""
    last = known.columns.stop if isinstance(known.columns, slice) else max(known.columns) + 1
    same = [e for e in executions if e.name == name]
    if len(same) <= known.run:
        return None
    seen = next((s for s in same[known.run].outputs if s.path == known.path), None)
    if seen is None or seen.rows.shape[1] < last:
        return None
    return replace(known, module=name, axes=seen.axes)
