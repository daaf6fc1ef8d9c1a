"""Which tensor of a block is its own values: what its matrices make of the stream, before anything is mixed in.

Any output may equal the values that attention reads, that of a mixing module as well. Own are the products of a matrix alone,
and outputs that hold nothing but such products: with a bias, added up (low-rank adapters), or each head scaled (norms).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workbench.observing.recognition.executions import MATRIX, Execution
from workbench.observing.recognition.least_squares import EXACT, fit, weights_by_token
from workbench.observing.recognition.projections import (
    Projection,
    matching_columns,
    projections_of,
    run_index,
    same_projection,
)

_STEPS = 30  # of alternating least squares: a norm's factors are found in two
_FEW = 8  # rows that tell most sums from anything else
_PACKING = 8  # weights that one stored number may hold


@dataclass(frozen=True)
class OwnValues:
    """Where a layer's own values pass, and the matrix behind them: in which module, which of its products, which columns."""

    place: Projection
    owner: str
    index: int
    columns: slice | tuple[int, ...]


def find_own_values(module: nn.Module, executions: list[Execution], target: Tensor) -> OwnValues | None:
    """Where values [row, head, d_head] are a block's own; None where they hold more than its matrices make."""
    matrices = _matrices(module, executions)
    flat = target.flatten(1)
    for (owner, index), entry in matrices.items():
        if (columns := matching_columns(_rows(entry), flat)) is not None:
            return OwnValues(_place(entry, columns, target.shape[1], executions), owner, index, columns)
    for place, entry, rows in projections_of(executions, target):
        for (owner, index), columns in _made_of(entry, rows, place, matrices):
            return OwnValues(place, owner, index, columns)
    for (owner, index), entry in matrices.items():  # times a number of each token and head (V-scale, gates)
        for columns in _scaled_columns(_rows(entry), target):
            return OwnValues(_place(entry, columns, target.shape[1], executions), owner, index, columns)
    return None


def product_rows(module: nn.Module, executions: list[Execution], known: OwnValues, heads: int) -> Tensor:
    """Rows [row, head, d_head] of the product behind own values, before any norm."""
    rows = _rows(_matrices(module, executions)[known.owner, known.index])
    return rows[:, known.columns if isinstance(known.columns, slice) else list(known.columns)].unflatten(1, (heads, -1))


def same_own_values(
    module: nn.Module, executions: list[Execution], known: OwnValues, renamed: Callable[[str], str]
) -> Projection | None:
    """Where the own values of another block pass, whose attention reads a mixture; `renamed`: names of that block's parts."""
    matrices = _matrices(module, executions)
    place = same_projection(known.place, executions, renamed(known.place.module))
    if place is not None and place.module != MATRIX:
        entry = [e for e in executions if e.name == place.module][place.run]
        rows = next(seen.rows for seen in entry.outputs if seen.path == place.path)
        if any(True for _ in _made_of(entry, place.heads_in(rows).flatten(1), place, matrices)):
            return place
    matrix = matrices.get((renamed(known.owner), known.index))
    last = known.columns.stop if isinstance(known.columns, slice) else max(known.columns) + 1
    if matrix is None or _rows(matrix).shape[1] < last:
        return None
    return _place(matrix, known.columns, known.place.heads, executions)


def _matrices(module: nn.Module, executions: Iterable[Execution]) -> dict[tuple[str, int], Execution]:
    """Products with a matrix by the module that calls them and how many it called before; of a kernel its whole module."""
    executions = [e for e in executions if e.outputs]
    parents = {id(e.parent) for e in executions}
    counts: Counter[str] = Counter()
    found = {}
    for entry in executions:
        if entry.name == MATRIX or (id(entry) not in parents and _is_kernel(module.get_submodule(entry.name), entry)):
            owner = entry.parent.name if entry.name == MATRIX and entry.parent else entry.name
            found[owner, counts[owner]] = entry
            counts[owner] += 1
    return found


def _is_kernel(module: nn.Module, entry: Execution) -> bool:
    """Whether a module whose product was not seen (quantised, a convolution) holds as many weights as a matrix would."""
    if len(entry.inputs) != 1:
        return False
    size = entry.inputs[0].rows.shape[1] * _rows(entry).shape[1]
    stored = [x for x in (*module.parameters(), *module.buffers()) if x.ndim > 1]
    return max((x.numel() for x in stored), default=0) * _PACKING >= size > 0


def _rows(entry: Execution) -> Tensor:
    return entry.outputs[0].rows


def _place(entry: Execution, columns: slice | tuple[int, ...], heads: int, executions: list[Execution]) -> Projection:
    """A product's place: its module's output, where that is all the module makes."""
    owner = entry.parent
    if entry.name == MATRIX and owner is not None and any(e is owner for e in executions):
        for seen in owner.outputs:
            if torch.equal(seen.rows, _rows(entry)):
                run = run_index(owner, executions)
                return Projection(owner.name, run, seen.path, columns, heads, axes=seen.axes)
    (seen, *_), run = entry.outputs, run_index(entry, executions)
    return Projection(entry.name, run, seen.path, columns, heads, axes=seen.axes)


def _made_of(
    entry: Execution, flat: Tensor, place: Projection, matrices: dict[tuple[str, int], Execution]
) -> Iterable[tuple[tuple[str, int], slice | tuple[int, ...]]]:
    """The matrix, by its key and columns, of which an output's columns [row, width] hold nothing but the products."""
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
    """Columns of rows [row, width] that are heads [row, head, d_head] but for a factor of each row and head and one of each column."""
    n = heads.flatten(1).shape[1]
    for first in range(0, rows.shape[1] - n + 1, heads.shape[2]):
        columns = slice(first, first + n)
        some = rows[:, columns].reshape(heads.shape)
        if _may_be_scaled(some, heads) and _scaled(some, heads) < EXACT.get(heads.dtype, 1e-2):
            yield columns


def _may_be_scaled(heads: Tensor, target: Tensor) -> bool:
    """Whether two rows alone would have it so: what one is of the other has one factor for each head but for the columns'."""
    (a, b), (x, y) = ([z[i].double() for i in (len(z) // 2, -1)] for z in (heads, target))
    left, right = x * b, y * a  # factor of one row times those of the columns, of the other: equal but for a number
    factor = (left * right).sum(-1, keepdim=True) / right.square().sum(-1, keepdim=True).clamp_min(1e-300)
    return float((left - factor * right).norm()) <= 0.1 * float(left.norm())


def _scaled(heads: Tensor, target: Tensor) -> float:
    """What is left of heads [row, head, d_head] but one factor for each row and head and one for each column; relative."""
    if heads.shape[2] < 2:
        return math.inf  # any number is a multiple of any other
    x, y = heads.double(), target.double()
    gains, scale = torch.ones_like(x[:1]), x[..., :1]
    for _ in range(_STEPS):
        part = x * gains
        scale = (part * y).sum(-1, keepdim=True) / part.square().sum(-1, keepdim=True).clamp_min(1e-300)
        part = x * scale
        gains = (part * y).sum(0, keepdim=True) / part.square().sum(0, keepdim=True).clamp_min(1e-300)
    size = float(y.norm())
    return float((x * scale * gains - y).norm()) / size if size else math.inf


def own_beside_tables(
    module: nn.Module, executions: list[Execution], target: Tensor, looked_up: Iterable[Tensor]
) -> OwnValues | None:
    """Where a block's own values are, if its values [row, head, d_head] are a sum of one of its products and a table's vectors.

    Each has one coefficient, or one for each token and head. A table that explains them alone leaves nothing to own values.
    """
    tolerance, n = EXACT.get(target.dtype, 1e-2), target.flatten(1).shape[1]
    tables = [rows.view(target.shape) for rows in looked_up]
    if any(weights_by_token(target[:_FEW], [table[:_FEW]])[1] < tolerance for table in tables):
        return None
    for (owner, index), entry in _matrices(module, executions).items():
        rows = _rows(entry)
        for start in range(0, rows.shape[1] - n + 1, target.shape[2]):
            columns = slice(start, start + n)
            own = rows[:, columns].view(target.shape)
            for table in tables:
                for explains in (fit, weights_by_token):
                    every = [[x[some] for x in (target, own, table)] for some in (slice(_FEW), slice(None))]
                    if all(explains(x, parts)[1] < tolerance for x, *parts in every):
                        return OwnValues(_place(entry, columns, target.shape[1], executions), owner, index, columns)
    return None
