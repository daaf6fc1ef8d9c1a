"""Vectors that are looked up by token id: the embedding that the stream starts with, and tables of values.

The embedding is told by its numbers, never by the order of lookups: what the first block reads is its vectors, up to a norm, a
scale and added position vectors. Tables of values are all other lookups by the same ids: an embedding of its own, one part of
a wide table, an indexed parameter, or a narrow table behind a projection (low rank).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.observing.interception.matrix_calls import MatrixCall
from workbench.observing.interception.tensor_layouts import TensorPath
from workbench.observing.recognition.executions import LOOKUP, MATRIX, Execution, TracedTensor
from workbench.observing.recognition.structure import Table
from workbench.observing.recognition.trace import Trace, is_matrix

Embedding = tuple[Execution, TensorPath]
_EXPLAINED = 0.05
"""Share of a stream's variance that its embedding explains at least: ten times what chance gives with 192 rows or more."""


def find_embedding(trace: Trace, block: Execution, stream: Tensor) -> Embedding | None:
    """The lookup by token id before the blocks that explains most of the stream [row, d_model]; one alone needs to explain nothing."""
    modules = [
        (e, s) for e in trace.executions for s in e.outputs
        if e.reads_tokens and e.start < block.start and len(s.shape) > 1 and is_matrix(trace, e)
    ]  # fmt: skip
    inside = [e for e, _ in modules]
    bare = [
        (e, s) for e in trace.lookups for s in e.outputs
        if e.reads_tokens and e.kind and e.start < block.start and not any(m.holds(e.start) for m in inside)
    ]  # fmt: skip
    tables = [*modules, *bare]
    wide = [t for t in tables if t[1].rows.shape[1] == stream.shape[1]] or tables
    if len(wide) > 1:
        shares = [_explained(s.rows, stream, trace.rows % trace.length) for _, s in wide]
        wide = [t for t, share in zip(wide, shares, strict=True) if share == max(shares) > _EXPLAINED]
    return next(((e, s.path) for e, s in wide), None)


def _explained(vectors: Tensor, stream: Tensor, positions: Tensor) -> float:
    """Share of the variance of a stream that vectors explain: column by column where they are as wide, else by any matrix.

    Rows are divided by their lengths, as norms do, and the mean of each position is taken away where positions repeat.
    """
    x, y = (z.double() / z.double().norm(dim=1, keepdim=True).clamp_min(1e-300) for z in (vectors, stream))
    counts = positions.bincount()
    repeated = counts[positions] > 1
    if int(repeated.sum()) < len(positions) // 2:
        positions, repeated = torch.zeros_like(positions), torch.ones_like(repeated)
    x, y, positions = x[repeated], y[repeated], positions[repeated]
    x, y = (z - _means(z, positions)[positions] for z in (x, y))
    size = float(y.square().sum())
    if not size:
        return 0.0
    if x.shape[1] == y.shape[1]:
        return float(((x * y).sum(0).square() / x.square().sum(0).clamp_min(1e-300)).sum()) / size
    free = len(x) - x.shape[1] - len(counts.nonzero())
    if free <= 0:
        return 0.0
    left = y - x @ torch.linalg.lstsq(x.cpu(), y.cpu(), driver="gelsd").solution.to(x)
    return 1 - float(left.square().sum()) / size * len(x) / free


def _means(x: Tensor, groups: Tensor) -> Tensor:
    """Means [group, width] of rows by group, zero for groups without rows."""
    counts = groups.bincount()
    sums = x.new_zeros(len(counts), x.shape[1]).index_add(0, groups, x)
    return sums / counts.clamp_min(1)[:, None]


class ValueTables:
    """Tables by token id other than the embedding, cut into parts of the width that is asked for."""

    def __init__(self, trace: Trace, embed: Embedding | None) -> None:
        self.looked_up: dict[
            str, tuple[Execution, TracedTensor, Tensor, Any]
        ] = {}  # lookup, vectors, rows, what is done to them
        self.trace = trace
        self._cut: dict[int, dict[str, Table]] = {}
        for run, entry in enumerate(trace.lookups):
            name = entry.parent.name if entry.parent and entry.kind == f"{entry.parent.name}.weight" else entry.kind
            is_embedding = embed is not None and (
                entry is embed[0] or embed[0].holds(entry.start) or name == _name(embed[0])
            )
            if entry.reads_tokens and name and not is_embedding:
                for seen in entry.outputs:
                    if name in self.looked_up and not _same(self.looked_up[name][2], seen.rows):
                        name = f"{name}, lookup {run}"  # another part of one parameter
                    self.looked_up.setdefault(name, (entry, seen, seen.rows, None))
                    for projected, rows, through in _projected(trace, entry, name, seen.rows):
                        self.looked_up.setdefault(projected, (entry, seen, rows, through))

    def of(self, width: int) -> dict[str, Table]:
        """Tables whose rows are so wide, by name; parts of wider ones are named by their columns."""
        if width not in self._cut:
            self._cut[width] = {
                name if rows.shape[1] == width else f"{name}[{start}:{start + width}]": Table(
                    entry.kind, lookup_index(self.trace, entry), rows[:, start : start + width], slice(start, start + width),
                    seen.axes, through,
                )
                for name, (entry, seen, rows, through) in self.looked_up.items() if rows.shape[1] % width == 0
                for start in range(0, rows.shape[1], width)
            }  # fmt: skip
        return self._cut[width]


def lookup_index(trace: Trace, entry: Execution) -> int:
    """How often vectors had been looked up in the same parameter before."""
    return sum(e.kind == entry.kind and e.start < entry.start for e in trace.lookups)


def _name(entry: Execution) -> str:
    return entry.kind if entry.name == LOOKUP else entry.name


def _projected(
    trace: Trace, lookup: Execution, name: str, rows: Tensor
) -> Iterator[tuple[str, Tensor, Callable[[Tensor], Any]]]:
    """Name, rows and function of each part that reads nothing but looked-up vectors, or what another such part made of them."""
    known: list[tuple[Tensor, tuple[Callable[[Tensor], Any], ...]]] = [(rows, ())]
    for entry in trace.executions:
        if entry.start < lookup.end or len(entry.inputs) != 1 or len(entry.outputs) != 1 or entry.outputs[0].path:
            continue
        of = next((k for k in known if _same(k[0], entry.inputs[0].rows)), None)
        made = entry.outputs[0].rows
        if of is None or any(_same(made, k[0]) for k in known):
            continue
        step: Callable[[Tensor], Any]
        if entry.name == MATRIX:
            if entry.call is None:
                continue
            step, label = partial(_run, entry.call), f"{name} @ {_parameter_of(trace, entry.call)}"
        else:
            step, label = trace.module.get_submodule(entry.name).forward, entry.name
        known.append((made, (*of[1], step)))
        yield label, made, partial(_through, known[-1][1])


def _parameter_of(trace: Trace, call: MatrixCall) -> str:
    """Name of the parameter that a product multiplies with."""
    tensors = [x if x._base is None else x._base for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)]
    return next((name for name, p in trace.module.named_parameters() if any(p is x for x in tensors)), "a matrix")


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def _run(call: MatrixCall, x: Tensor) -> Any:
    return call.run(x)


def _through(steps: tuple[Callable[[Tensor], Any], ...], x: Tensor) -> Any:
    for step in steps:
        x = step(x)
    return x
