"""What a block adds to its stream: outputs of two of its parts, the attention's (or another mixer's) and the MLP's.

    made = keep * in + again * x_0 + a * attention + b * MLP

Mostly keep = a = b = 1 and again = 0. Some multiply what they add (Granite's residual multiplier), some the stream, and
bring back x_0, what the first block reads (modded-nanogpt). What a block returns is that, or a weighted sum in which that and
what stood after earlier blocks take part (DenseFormer), or for each token of all earlier outputs (Attention Residuals). Some
blocks of the last kind leave what they read behind, keep = again = 0 (Inkling 2). Nothing else is taken for an addition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product

import torch
from torch import Tensor, nn

from workbench.observing.recognition.blocks import is_stream
from workbench.observing.recognition.executions import MATRIX, Execution, TracedTensor
from workbench.observing.recognition.frozen_norm import fit_norm
from workbench.observing.recognition.least_squares import EXACT, fit, weights_by_token
from workbench.observing.recognition.projections import run_index
from workbench.observing.recognition.stream_sums import depth_weights
from workbench.observing.recognition.structure import Addition, LayerStructure
from workbench.observing.recognition.trace import Trace

_FEW = 24  # rows that tell a sum of outputs from anything else
_SAME = 1e-2  # lengths of normed outputs, which differ by a norm's epsilon
_LEAST = 1e-3  # of a stream that goes on, times its size
Output = tuple[Execution, TracedTensor]


class Before:
    """What stood before a block: after each earlier one, the first stream first, and every output so far, the first stream too."""

    def __init__(self, first: Tensor) -> None:
        self.stood, self.outputs = [first], [first]
        self.is_whole = True  # whether all outputs are known

    def follow(self, layer: LayerStructure) -> None:
        """Take in a layer whose additions were looked for."""
        self.stood.append(layer.rows["made"])
        self.outputs += [layer.rows[name] for name in ("attn_out", "mlp_out") if name in layer.rows]
        self.is_whole &= layer.adds


def find_additions(
    trace: Trace, layer: LayerStructure, block: Execution, inside: list[Execution], before: Before
) -> None:
    """Set a layer's `attn_out`, `mlp_out` and `keeps`, where its parts' outputs show them, and the rows of what stands after it."""
    layer.rows["made"] = layer.rows["out"]
    made = [
        (e, t) for e in sorted(inside, key=lambda e: (len(e.stack()), e.start)) for t in e.outputs
        if t.rows.shape == layer.rows["in"].shape and (len(t.shape) == 2 or is_stream(trace, t))
    ]  # fmt: skip
    outputs = [(e, t) for e, t in made if e.name != MATRIX]
    every = [(e, t) for e, t in made if e.name != MATRIX or not _is_all_of(e.parent, t)]
    for some in [outputs, *([every] if layer.is_read and len(every) > len(outputs) else [])]:
        if layer.adds_norms or _find_sum(trace, layer, block, inside, before, some):
            return
    norms = (e for e, t in outputs if torch.equal(t.rows, layer.rows["out"]))
    layer.is_normed = any(_is_norm(trace.module.get_submodule(e.name)) for e in norms)


def _is_all_of(parent: Execution | None, product: TracedTensor) -> bool:
    """Whether a product is the whole output of the module that calls it."""
    return parent is not None and any(
        torch.equal(t.rows, product.rows) for t in parent.outputs if t.rows.shape == product.rows.shape
    )


def _find_sum(
    trace: Trace,
    layer: LayerStructure,
    block: Execution,
    inside: list[Execution],
    before: Before,
    outputs: list[Output],
) -> bool:
    """Set what a layer adds, where one or two of these outputs show it; whether they do."""
    time = layer.attention.times[-1] if layer.is_read else block.start
    sums = _Sums(layer, before)
    reader = next((t for e in inside if e.name != MATRIX for t in e.inputs if is_stream(trace, t)), None)
    adds_to_it = reader is not None and torch.equal(
        reader.rows, layer.rows["in"]
    )  # else it may scale what it reads first
    several = (sums.averaged, sums.kept) if adds_to_it else (sums.kept, sums.averaged)
    apart = [(e, t) for e, t in outputs if not any(torch.equal(x.rows, layer.rows["in"]) for x in e.inputs)]
    for found in (sums.plain, sums.scaled, *several, sums.alone, sums.normed, sums.weighed):
        for some in _candidates(apart if found == sums.alone else outputs, time):
            if (factors := found([t.rows for _, t in some])) is not None:
                if found == sums.normed:  # what is added passes as no output of a part
                    layer.adds_norms = True
                    return False
                placed = sorted(zip(some, factors, strict=True), key=lambda each: _distance(each[0][0], time))
                for name, ((entry, seen), factor) in zip(("attn_out", "mlp_out"), placed, strict=False):
                    layer.rows[name] = seen.rows * factor if factor != 1 else seen.rows
                    setattr(layer, name, _addition(entry, seen, inside, factor))
                if found in (sums.averaged, sums.weighed):
                    layer.rows["made"] = sum((t.rows for _, t in some), layer.rows["in"])
                layer.adds, layer.keeps = True, sums.keeps
                _find_middle(trace, layer, placed, inside)
                return True
    return False


def _is_norm(module: nn.Module) -> bool:
    """Whether a module has no weights but vectors, one at least."""
    weights = [p.ndim for p in module.parameters()]
    return bool(weights) and max(weights) == 1


def _find_middle(
    trace: Trace, layer: LayerStructure, placed: Sequence[tuple[Output, float]], inside: list[Execution]
) -> None:
    """Set the rows of what the MLP reads, before any norm: the stream after the attention, where a part reads it or a norm of it.

    Else the first stream that a part reads after the attention. Parts that add the attention's output read it and the block's
    input, and a parallel MLP reads a norm of that input: neither is a sum of earlier outputs.
    """
    (attention, _), *others = (output for output, _ in placed)
    if not others or others[0][0].end < attention.end:
        return
    before, added = layer.rows["in"], layer.rows["attn_out"]
    reads = [
        t.rows for e in inside if attention.end < e.start < others[0][0].end and e.name != MATRIX
        for t in e.inputs if is_stream(trace, t) and t.rows.shape == before.shape
    ]  # fmt: skip
    if any(_is_norm_of(rows, before + added) for rows in reads):
        layer.rows["mid"] = before + added
        return
    rest = [rows for rows in reads if not torch.equal(rows, added) and not _is_norm_of(rows, before)]
    if rest:
        layer.rows["mid"] = rest[0]


def _is_norm_of(rows: Tensor, stream: Tensor) -> bool:
    """Whether rows are the stream itself or a norm of it."""
    slack = EXACT.get(rows.dtype, 1e-2) * float(stream.abs().max())
    return float((rows - stream).abs().max()) <= slack or fit_norm(stream, rows) is not None


def _candidates(outputs: list[Output], time: int) -> Iterator[list[Output]]:
    """Pairs of outputs of parts that run apart, one of them after the attention; then single ones."""
    after = [output for output in outputs if output[0].end > time]
    for one, other in product(after, outputs):
        if other[0].start > one[0].end or other[0].end < one[0].start:
            yield [one, other]
    yield from ([one] for one in after)


class _Sums:
    """Whether outputs sum to what a block makes of its stream, in one of seven ways; each gives the outputs' factors."""

    def __init__(self, layer: LayerStructure, before: Before) -> None:
        self.before, self.out, self.first = layer.rows["in"], layer.rows["out"], before.stood[0]
        self.target = self.out.double() - self.before.double()
        self.slack = torch.finfo(self.out.dtype).eps * 32 * float(self.out.double().abs().max())
        self.tolerance = EXACT.get(self.out.dtype, 1e-2)
        self.keeps = 1.0, 0.0
        streams = [self.before] if torch.equal(self.before, self.first) else [self.before, self.first]
        self.basis = torch.linalg.qr(torch.stack([_few(s) for s in streams], dim=1)).Q
        self.stood = torch.linalg.qr(torch.stack([_few(s) for s in before.stood], dim=1)).Q
        self.outputs = before.outputs if before.is_whole else []
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

    def averaged(self, parts: list[Tensor]) -> list[float] | None:
        """They and what the block reads are what a sum of what stood before takes as one more term."""
        added = self._few_sum(parts)
        left, made = (self._beside_stood(x) for x in (self.few_out, added + _few(self.before)))
        size, whole = float(made.square().sum()), float(self.few_out.norm())
        factor = float((left * made).sum()) / size if size else 0.0
        exact = float((left - factor * made).norm()) <= self.tolerance * whole
        goes_on = (
            float((self.few_out - factor * added).norm()) > _LEAST * whole
        )  # else it is in what they are said to add
        return [1.0] * len(parts) if exact and goes_on and abs(factor) * size**0.5 > _LEAST * whole else None

    def alone(self, parts: list[Tensor]) -> list[float] | None:
        """Two that do not read the stream itself are all that the block returns."""
        if len(parts) < 2 or float((self._few_sum(parts) - self.few_out).abs().max()) > self.slack:
            return None
        self.keeps = 0.0, 0.0
        return [1.0] * len(parts)

    def normed(self, parts: list[Tensor]) -> list[float] | None:
        """Root-mean-square norms of them are added, by a function without gains."""
        target, few = self.few_added.view(-1, self.out.shape[1]), [self._few(p).view(-1, p.shape[1]) for p in parts]
        if weights_by_token(target[:2], [x[:2] for x in few])[1] > self.tolerance:
            return None
        weights, left = weights_by_token(target, few)
        if left > self.tolerance:
            return None
        sizes = torch.stack([x.norm(dim=1) for x in few], dim=-1) * weights
        mean = sizes.mean(0)
        return mean.tolist() if bool((sizes.std(0) <= _SAME * mean.abs()).all()) else None

    def weighed(self, parts: list[Tensor]) -> list[float] | None:
        """They are taken by each token with weights of its own, beside all earlier outputs, as what the block reads is made."""
        if not self.outputs or not self.reads_outputs:
            return None
        few = [x[:_FEW] for x in (self.out, *self.outputs, *parts)]
        weights, left = depth_weights(few[0], few[1:])
        taken = weights.abs().mean((0, 1))
        old, new = taken[: len(self.outputs)], taken[len(self.outputs) :]
        found = left <= self.tolerance and bool((new > _LEAST).all()) and bool((old > _LEAST).any())
        return [1.0] * len(parts) if found else None

    @cached_property
    def reads_outputs(self) -> bool:
        """Whether what the block reads is made of earlier outputs, and not another stream (Reformer)."""
        return depth_weights(self.before[:_FEW], [x[:_FEW] for x in self.outputs])[1] <= self.tolerance

    def _few_sum(self, parts: list[Tensor]) -> Tensor:
        return torch.stack([self._few(part) for part in parts]).sum(0)

    def _beside_stood(self, x: Tensor) -> Tensor:
        return x - self.stood @ (self.stood.T @ x)

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
    return Addition(entry.name, run_index(entry, among), seen.path, factor, axes=seen.axes)


def _distance(entry: Execution, time: int) -> int:
    """How soon after an attention an execution begins; those that hold it first, those before it last."""
    return 0 if entry.holds(time) else entry.start - time if entry.start > time else 10**9
