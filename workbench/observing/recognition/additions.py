"""What a block adds to its stream: outputs of two of its parts, the attention's (or another mixer's) and the MLP's.

    out = keep * in + again * x_0 + a * attention + b * MLP

Mostly keep = a = b = 1 and again = 0. Some multiply what they add (Granite's residual multiplier), some the stream, and
bring back x_0, what the first block reads (modded-nanogpt). Nothing else is taken for an addition.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from workbench.observing.recognition.blocks import is_stream
from workbench.observing.recognition.least_squares import EXACT, fit
from workbench.observing.recognition.projections import run_index
from workbench.observing.recognition.structure import Addition, LayerStructure
from workbench.observing.recognition.executions import MATRIX, Execution, TracedTensor
from workbench.observing.recognition.trace import Trace

_FEW = 24  # rows that tell a sum of outputs from anything else
_LEAST = 1e-3  # of a stream that goes on, times its size
Output = tuple[Execution, TracedTensor]


def find_additions(
    trace: Trace, layer: LayerStructure, block: Execution, inside: list[Execution], first: Tensor
) -> None:
    """Set a layer's `attn_out`, `mlp_out` and `keeps`, where its parts' outputs show them; `first`: what the first block reads."""
    outputs = [
        (e, t) for e in sorted(inside, key=lambda e: (len(e.stack()), e.start)) for t in e.outputs
        if e.name != MATRIX and t.rows.shape == layer.rows["in"].shape and (len(t.shape) == 2 or is_stream(trace, t))
    ]  # fmt: skip
    time = layer.attention.times[-1] if layer.is_read else block.start
    sums = _Sums(layer, first)
    for found in (sums.plain, sums.scaled, sums.kept):
        for some in _candidates(outputs, time):
            if (factors := found([t.rows for _, t in some])) is not None:
                placed = sorted(zip(some, factors, strict=True), key=lambda each: _distance(each[0][0], time))
                places = [_addition(*output, inside, factor) for output, factor in placed]
                (_, attended), factor = placed[0]
                layer.rows["attn_out"] = attended.rows * factor if factor != 1 else attended.rows
                layer.attn_out, layer.mlp_out = (*places, None)[:2]
                layer.adds, layer.keeps = True, sums.keeps
                return


def _candidates(outputs: list[Output], time: int) -> Iterator[list[Output]]:
    """Pairs of outputs of parts that run apart, one of them after the attention; then single ones."""
    after = [output for output in outputs if output[0].end > time]
    for one, other in product(after, outputs):
        if other[0].start > one[0].end or other[0].end < one[0].start:
            yield [one, other]
    yield from ([one] for one in after)


class _Sums:
    """Whether outputs sum to what a block makes of its stream, in one of three ways; each gives the outputs' factors."""

    def __init__(self, layer: LayerStructure, first: Tensor) -> None:
        self.before, self.out, self.first = layer.rows["in"], layer.rows["out"], first
        self.target = self.out.double() - self.before.double()
        self.slack = torch.finfo(self.out.dtype).eps * 32 * float(self.out.double().abs().max())
        self.tolerance = EXACT.get(self.out.dtype, 1e-2)
        self.keeps = (1.0, 0.0)
        streams = [self.before] if torch.equal(self.before, first) else [self.before, first]
        self.basis = torch.linalg.qr(torch.stack([_few(s) for s in streams], dim=1)).Q
        self.few_added, self.few_out = _few(self.out) - _few(self.before), _few(self.out)
        self._known: dict[int, Tensor] = {}  # a few rows of outputs, by id

    def _few(self, part: Tensor) -> Tensor:
        if id(part) not in self._known:
            self._known[id(part)] = _few(part)
        return self._known[id(part)]

    def plain(self, parts: list[Tensor]) -> list[float] | None:
        """They are what is added."""
        if float((sum(self._few(part) for part in parts) - self.few_added).abs().max()) > self.slack:
            return None
        left = sum((part.double() for part in parts), -self.target)
        return [1.0] * len(parts) if float(left.abs().max()) <= self.slack else None

    def scaled(self, parts: list[Tensor]) -> list[float] | None:
        """They are, each times a number."""
        if not self._spans(torch.stack([self._few(part) for part in parts], dim=1), self.few_added):
            return None
        factors, _ = fit(self.target, parts)
        left = sum((c * part.double() for c, part in zip(factors, parts, strict=True)), -self.target)
        return factors if float(left.abs().max()) <= 4 * self.slack else None

    def kept(self, parts: list[Tensor]) -> list[float] | None:
        """They are, beside multiples of what the block and the first block read."""
        left = self.few_out - sum(self._few(part) for part in parts)
        if float((left - self.basis @ (self.basis.T @ left)).norm()) > self.tolerance * float(left.norm()):
            return None
        streams = [self.before, self.first][: self.basis.shape[1]]
        rest = self.out.double() - sum(part.double() for part in parts)
        (keep, *again), residual = fit(rest, streams)
        if residual > self.tolerance or abs(keep) * float(self.before.norm()) < _LEAST * float(self.out.norm()):
            return None  # what they are said to add would hold the stream itself
        self.keeps = (keep, again[0] if again else 0.0)
        return [1.0] * len(parts)

    def _spans(self, x: Tensor, y: Tensor) -> bool:
        """Whether y [n] is a sum of the columns of x [n, 1 or 2], times numbers that are not 0."""
        gram, dots = x.T @ x, x.T @ y
        if float(torch.linalg.det(gram)) <= 1e-8 * float(gram.diagonal().prod()):
            return False  # one tensor, or multiples of it
        factors = torch.linalg.solve(gram, dots)
        return float((x @ factors - y).norm()) <= self.tolerance * float(y.norm()) and bool((factors != 0).all())


def _few(x: Tensor) -> Tensor:
    return x[:_FEW].double().flatten()


def _addition(entry: Execution, seen: TracedTensor, among: list[Execution], factor: float) -> Addition:
    return Addition(entry.name, run_index(entry, among), seen.path, factor)


def _distance(entry: Execution, time: int) -> int:
    """How soon after an attention an execution begins; those that hold it first, those before it last."""
    return 0 if entry.holds(time) else entry.start - time if entry.start > time else 10**9
