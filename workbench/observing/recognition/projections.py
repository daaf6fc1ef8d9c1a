"""Projections: the module outputs that hold a block's queries, keys and values, found by comparing numbers.

Queries and keys are compared by the norms of their heads, which no rotation changes, values column by column. A layer's own
values are a product of the stream with a matrix, before values of other layers are mixed in. A bias, other products (low-rank
adapters) and a scale per head (norms) may be applied to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from workbench.observing.recognition.decoder_structure import Projection
from workbench.observing.recognition.least_squares import EXACT, fit, weights_by_token
from workbench.observing.recognition.module_runs import MATRIX, Execution

_NARROW = (torch.float16, torch.bfloat16)
_MAX_TABLE = 2**26  # entries in a comparison of all columns with all columns
_STEPS = 30  # of alternating least squares; a norm's factors take two
_FEW = 8  # rows that reject most fits
_PACKING = 8  # weights that one stored number may hold
Columns = slice | tuple[int, ...]
Matrices = dict[tuple[str, int], Execution]
"""Products with a matrix, by the module that calls them and the number of its earlier products."""


def _as_slice(columns: Tensor) -> Columns:
    first, n = int(columns[0]), len(columns)
    straight = torch.equal(columns.cpu(), torch.arange(first, first + n))
    return slice(first, first + n) if straight else tuple(columns.tolist())


def _last(columns: Columns) -> int:
    return columns.stop if isinstance(columns, slice) else max(columns) + 1


def matching_columns(output: Tensor, target: Tensor) -> Columns | None:
    """Find columns of `output` [row, width] that are multiples of the columns of `target` [row, columns]; None if one is missing."""
    if output.shape[1] < target.shape[1]:
        return None
    tolerance = 1e-4 if output.dtype in _NARROW or target.dtype in _NARROW else 1e-9
    a, b = (nn.functional.normalize(x.double(), dim=0) for x in (output, target))
    of_first = (a.T @ b[:, 0]).abs().max(0)
    if float(of_first.values) <= 1 - tolerance:  # cheap: nearly all outputs hold no column of the target
        return None
    first = int(of_first.indices)
    straight = a[:, first : first + b.shape[1]]
    if straight.shape == b.shape and bool(((straight * b).sum(0).abs() > 1 - tolerance).all()):
        return slice(first, first + b.shape[1])
    if a.shape[1] * b.shape[1] > _MAX_TABLE or a.shape[1] == b.shape[1] == 1:
        return None
    best = (a.T @ b).abs().max(0)
    if not bool((best.values > 1 - tolerance).all()) or len(best.indices.unique()) < len(best.indices):
        return None
    return _as_slice(best.indices)


def matching_head_columns(output: Tensor, target: Tensor, starts: Tensor) -> Columns | None:
    """Find columns of `output` [row, width] that are heads [row, head, d_head] up to one factor and a rotation.

    If heads have equal norms, the rows of `starts` decide, which are at position 0 and not rotated. Returns None if a head is
    missing.
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
        x, y = (nn.functional.normalize(z[starts], dim=-1) for z in (parts, heads))
        fits &= (x[:, :, None] - y[:, None]).abs().amax((0, 3)) < tolerance * width**0.5
    best = fits.to(torch.uint8).max(0)
    if not bool(best.values.all()) or len(best.indices.unique()) < len(best.indices):
        return None
    return _as_slice((best.indices[:, None] * width + torch.arange(width, device=output.device)).flatten())


def find_projection(executions: list[Execution], target: Tensor, *, starts: Tensor | None = None) -> Projection | None:
    """Find the outermost output that holds the heads [row, head, d_head]; `starts` for rotated heads."""
    return next((place for place, _, _ in _projections(executions, target, starts)), None)


def _projections(
    executions: list[Execution], target: Tensor, starts: Tensor | None = None
) -> Iterator[tuple[Projection, Execution, Tensor]]:
    """Yield every output that holds the heads, the outermost first: its place, its execution, and its columns [row, width]."""
    for entry in sorted(executions, key=lambda e: (len(e.stack()), e.start)):
        for seen in entry.outputs:
            columns = (
                matching_columns(seen.rows, target.flatten(1))
                if starts is None
                else matching_head_columns(seen.rows, target, starts)
            )
            if columns is not None:
                place = Projection.of(entry, seen, executions, columns=columns, heads=target.shape[1])
                yield place, entry, place.heads_in(seen.rows).flatten(1)


def same_projection(known: Projection, executions: list[Execution], name: str) -> Projection | None:
    """Return the same projection in the module of another name, if that runs among the executions and is as wide."""
    same = [e for e in executions if e.name == name]
    if len(same) <= known.run:
        return None
    seen = next((s for s in same[known.run].outputs if s.path == known.path), None)
    if seen is None or seen.rows.shape[1] < _last(known.columns):
        return None
    return replace(known, module=name, axes=seen.axes)


@dataclass(frozen=True)
class OwnValues:
    """Place of a layer's own values, and the matrix behind them: its module, the number of its product there, the columns."""

    place: Projection
    owner: str
    index: int
    columns: Columns


def find_own_values(module: nn.Module, executions: list[Execution], target: Tensor) -> OwnValues | None:
    """Find a block's own values if they are the values [row, head, d_head]; None if these hold more than its matrices make."""
    matrices, heads = _matrices(module, executions), target.shape[1]
    for (owner, index), entry in matrices.items():
        if (columns := matching_columns(_rows(entry), target.flatten(1))) is not None:
            return OwnValues(_place(entry, columns, heads, executions), owner, index, columns)
    for place, entry, rows in _projections(executions, target):
        for (owner, index), columns in _made_of(entry, rows, place, matrices):
            return OwnValues(place, owner, index, columns)
    for (owner, index), entry in matrices.items():  # times a number of each token and head (V-scale, gates)
        for columns in _scaled_columns(_rows(entry), target):
            return OwnValues(_place(entry, columns, heads, executions), owner, index, columns)
    return None


def product_rows(module: nn.Module, executions: list[Execution], known: OwnValues, heads: int) -> Tensor:
    """Return rows [row, head, d_head] of the product behind own values, before any norm."""
    rows = _rows(_matrices(module, executions)[known.owner, known.index])
    return rows[:, known.columns if isinstance(known.columns, slice) else list(known.columns)].unflatten(1, (heads, -1))


def same_own_values(
    module: nn.Module, executions: list[Execution], known: OwnValues, renamed: Callable[[str], str]
) -> Projection | None:
    """Find the own values of another block, whose attention reads a mixture; `renamed` maps module names to that block's."""
    matrices = _matrices(module, executions)
    place = same_projection(known.place, executions, renamed(known.place.module))
    if place is not None and place.module != MATRIX:
        entry = [e for e in executions if e.name == place.module][place.run]
        rows = next(seen.rows for seen in entry.outputs if seen.path == place.path)
        if any(True for _ in _made_of(entry, place.heads_in(rows).flatten(1), place, matrices)):
            return place
    matrix = matrices.get((renamed(known.owner), known.index))
    if matrix is None or _rows(matrix).shape[1] < _last(known.columns):
        return None
    return _place(matrix, known.columns, known.place.heads, executions)


def own_beside_tables(
    module: nn.Module, executions: list[Execution], target: Tensor, looked_up: Iterable[Tensor]
) -> Projection | None:
    """Find a block's own values if its values [row, head, d_head] are a sum of one of its products and a table's vectors.

    Both have one coefficient, or one for each token and head. If a table explains the values alone, the result is None.
    """
    tolerance, n = EXACT.get(target.dtype, 1e-2), target.flatten(1).shape[1]
    tables = [rows.view(target.shape) for rows in looked_up]
    if any(weights_by_token(target[:_FEW], [table[:_FEW]])[1] < tolerance for table in tables):
        return None
    for entry in _matrices(module, executions).values():
        rows = _rows(entry)
        for start in range(0, rows.shape[1] - n + 1, target.shape[2]):
            columns = slice(start, start + n)
            own = rows[:, columns].view(target.shape)
            for table in tables:
                for explains in (fit, weights_by_token):
                    every = [[x[some] for x in (target, own, table)] for some in (slice(_FEW), slice(None))]
                    if all(explains(x, parts)[1] < tolerance for x, *parts in every):
                        return _place(entry, columns, target.shape[1], executions)
    return None


def _matrices(module: nn.Module, executions: Iterable[Execution]) -> Matrices:
    """List products with a matrix; a module whose product is not seen (quantised, a convolution) counts if it stores as many weights."""
    executions = [e for e in executions if e.outputs]
    parents = {id(e.parent) for e in executions}
    counts: Counter[str] = Counter()
    matrices = {}
    for entry in executions:
        if entry.name != MATRIX:
            if id(entry) in parents or len(entry.inputs) != 1:
                continue
            part = module.get_submodule(entry.name)
            stored = [x.numel() for x in (*part.parameters(), *part.buffers()) if x.ndim > 1]
            size = entry.inputs[0].rows.shape[1] * _rows(entry).shape[1]
            if not max(stored, default=0) * _PACKING >= size > 0:
                continue
        owner = entry.parent.name if entry.name == MATRIX and entry.parent else entry.name
        matrices[owner, counts[owner]] = entry
        counts[owner] += 1
    return matrices


def _rows(entry: Execution) -> Tensor:
    return entry.outputs[0].rows


def _place(entry: Execution, columns: Columns, heads: int, executions: list[Execution]) -> Projection:
    """Return a product's place: its module's output, if the module makes nothing else."""
    owner = entry.parent
    if entry.name == MATRIX and owner is not None and any(e is owner for e in executions):
        for seen in owner.outputs:
            if torch.equal(seen.rows, _rows(entry)):
                return Projection.of(owner, seen, executions, columns=columns, heads=heads)
    return Projection.of(entry, entry.outputs[0], executions, columns=columns, heads=heads)


def _made_of(
    entry: Execution, flat: Tensor, place: Projection, matrices: Matrices
) -> Iterable[tuple[tuple[str, int], Columns]]:
    """Yield the matrix, by key and columns, whose products are all that an output's columns [row, width] hold."""
    tolerance = EXACT.get(flat.dtype, 1e-2)
    before = {key: e for key, e in matrices.items() if e.end < entry.end}
    for key, matrix in before.items():
        rows = _rows(matrix)
        if (columns := matching_columns(rows - rows.mean(0), flat - flat.mean(0))) is not None:
            yield key, columns
        yield from ((key, columns) for columns in _scaled_columns(rows, flat.unflatten(1, (place.heads, -1))))
    inside = {key: e for key, e in before.items() if entry.holds(e.start)}
    for seen in entry.outputs:
        alike = {key: _rows(e) for key, e in inside.items() if _rows(e).shape == seen.rows.shape}
        if seen.path == place.path and len(alike) > 1 and fit(seen.rows, list(alike.values()))[1] < tolerance:
            yield next(iter(alike)), place.columns


def _scaled_columns(rows: Tensor, heads: Tensor) -> Iterable[slice]:
    """Yield columns of rows [row, width] that equal heads [row, head, d_head] up to factors per row and head and per column."""
    n = heads.flatten(1).shape[1]
    if heads.shape[2] < 2:  # any number is a multiple of any other
        return
    y = heads.double()
    size = float(y.norm())
    for first in range(0, rows.shape[1] - n + 1, heads.shape[2]):
        columns = slice(first, first + n)
        x = rows[:, columns].reshape(heads.shape).double()
        # of two rows, products of one with the other's target must agree up to a factor of each head
        i, j = len(x) // 2, -1
        left, right = y[i] * x[j], y[j] * x[i]
        factor = (left * right).sum(-1, keepdim=True) / right.square().sum(-1, keepdim=True).clamp_min(1e-300)
        if not size or not float((left - factor * right).norm()) <= 0.1 * float(left.norm()):
            continue
        gains, scale = torch.ones_like(x[:1]), x[..., :1]
        for _ in range(_STEPS):
            part = x * gains
            scale = (part * y).sum(-1, keepdim=True) / part.square().sum(-1, keepdim=True).clamp_min(1e-300)
            part = x * scale
            gains = (part * y).sum(0, keepdim=True) / part.square().sum(0, keepdim=True).clamp_min(1e-300)
        if float((x * scale * gains - y).norm()) / size < EXACT.get(heads.dtype, 1e-2):
            yield columns
