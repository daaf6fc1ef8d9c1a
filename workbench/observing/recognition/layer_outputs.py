"""Outputs of a layer: W_O's input, and the outputs that the block adds to its stream.

W_O reads the heads' outputs, a gated or normed share of them, or a combination of several attentions:

    difference    u_m = z_0m - lambda z_1m, of two attentions or two halves of one's heads, or a norm of it per head
    gates         u_m = g_0m z_0m + g_1m z_1m, with weights for each token and head

A block adds outputs of two of its parts, the attention's (or another mixer's) and the MLP's, to its input:

    out = keep * in + again * x_0 + a * attention + b * MLP,    x_0 the first block's input

Mostly keep = a = b = 1 and again = 0. Some models scale the outputs (Granite) or the stream, or add x_0 again (modded-nanogpt).
A block may also return a weighted sum of this and earlier streams (DenseFormer), or of all earlier outputs by token (Attention
Residuals). Some of the latter leave their input out, keep = again = 0 (Inkling 2).

Source of the difference: Ye et al. (2024), Differential Transformer, arXiv 2410.05258, equations 1 to 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from workbench.observing.recognition.decoder_structure import (
    CONSTANT,
    GATED,
    NORMED,
    Addition,
    BareOutput,
    Combination,
    LayerStructure,
    TensorLocation,
)
from workbench.observing.recognition.find_blocks import is_stream
from workbench.observing.recognition.least_squares import EXACT, SLACK, depth_weights, fit, fit_norm, weights_by_token
from workbench.observing.recognition.module_runs import MATRIX, Execution, TracedTensor
from workbench.observing.recognition.traced_run import Trace, is_matrix

SHARE = "W_O reads a share of pattern x values, by head and position (a gate)"
GATE = "W_O reads more than pattern x values: each number times a positive one (a gate)"
NORM = "W_O reads a norm of pattern x values"
CHANGED = "W_O reads more than pattern x values: something changes the heads' outputs (a gate, a norm)"
_STEPS = 40  # of alternating least squares
_FEW = 24  # rows that distinguish a sum of outputs from any other tensor
_SAME = 1e-2  # spread of the lengths of normed outputs, which comes from a norm's epsilon
_LEAST = 1e-3  # least share of the stream that a term must have
Output = tuple[Execution, TracedTensor]


def find_output(trace: Trace, layer: LayerStructure, inside: list[Execution], first: Tensor, block: Execution) -> None:
    """Set a layer's `z`, the input of the matrix after its attentions that reads their heads, and W_O.

    Inside the module that attends, z may also be heads changed in an unknown way, but no tensor from before the attention.
    `first`: the first layer's values.
    """
    attention = layer.attention
    before = [t.rows for e in inside if e.start < attention.times[-1] for t in e.inputs]
    for entry in inside:
        if entry.start < attention.times[-1] or not (entry.call or is_matrix(trace, entry)):
            continue
        within = attention.within.start > block.start and attention.within.holds(entry.start)
        for read in (t for t in entry.inputs if len(t.shape) > 2):
            heads, as_one = None, read.rows.shape == attention.z.flatten(1).shape
            if as_one:
                one = read.rows.unflatten(1, attention.z.shape[1:])
                if explained(one, attention.z, attention.v, first) or _is_gated(one, attention.z):
                    heads = one
            for names, sources in _groupings(layer) if heads is None else ():
                if sources[0].flatten(1).shape == read.rows.shape:
                    several = read.rows.unflatten(1, sources[0].shape[1:])
                    if (combination := fit_combination(several, names, sources)) is not None:
                        heads, layer.combination = several, combination
                        break
            unknown = heads is None and within and as_one
            if unknown and not any(torch.equal(read.rows, x) for x in before if x.shape == read.rows.shape):
                heads = one
            if heads is not None:
                layer.rows["z"] = heads
                layer.z = TensorLocation.of(entry, read, inside)
                if entry.call is not None:
                    layer.w_o = BareOutput(entry.call, read.axes.pos == 2, len(read.shape) == 4)
                _describe_change(layer, first)
                return


def _describe_change(layer: LayerStructure, first: Tensor) -> None:
    """Describe how z differs from pattern times values; a sink s among the scores scales a head's output by sigmoid(lse - s)."""
    attention, heads = layer.attention, layer.rows["z"]
    if layer.combination is not None:
        layer.changed = f"W_O reads {layer.combination.words}"
        return
    if explained(heads, attention.z, attention.v, first):
        return
    heads, z, slack = heads.double(), attention.z.double(), SLACK.get(attention.z.dtype, 1e-2)
    share = (heads * z).sum(-1) / z.square().sum(-1).clamp_min(1e-300)
    if float((heads - share[..., None] * z).norm()) > slack * float(heads.norm()):
        normed = any(fit_norm(z.flatten(*axes), heads.flatten(*axes)) for axes in ((1, 2), (0, 1)))
        layer.changed = NORM if normed else GATE if _is_gated(heads, z) else CHANGED
        return
    layer.changed = SHARE
    if attention.lse is not None:
        lse, sharpest = attention.lse.double(), (share - 0.5).abs().argmin(0, keepdim=True)
        sink = (lse - share.logit(1e-12)).gather(0, sharpest)
        if bool(((lse - sink).sigmoid() - share).abs().max() < slack):
            layer.changed = "a sink takes its share of every row after the attention, through the log-sum-exp"
            for one in (attention, *(part.attention for part in layer.parts)):
                one.exact, one.is_distribution, one.note = False, False, layer.changed


def explained(heads: Tensor, z: Tensor, v: Tensor, first: Tensor) -> bool:
    """Return whether head outputs [row, head, d_head] are the attention's, plus at most a sum of its and the first layer's values."""
    if heads.shape != z.shape:
        return False
    added, most = heads.double() - z.double(), SLACK.get(heads.dtype, 1e-2) * float(heads.double().norm())
    size = float(added.norm())
    if size <= most:
        return True
    if v.shape != first.shape or v.shape[2] != z.shape[2]:
        return False
    return fit(added, [x.repeat_interleave(z.shape[1] // v.shape[1], dim=1) for x in (v, first)])[1] * size < most


def _is_gated(heads: Tensor, z: Tensor) -> bool:
    """Return whether heads [row, head, d_head] are the attention's, each number times a positive one and each column times any."""
    product = heads.double() * z.double()
    slack = EXACT.get(z.dtype, 1e-2) * product.abs().mean()
    return bool((product * product.sum(0).sign() >= -slack).all()) and bool(product.any())


def _groupings(layer: LayerStructure) -> Iterator[tuple[tuple[str, ...], list[Tensor]]]:
    """Yield how a layer's attentions, or the halves of their heads, may be combined: names and head outputs [row, head, width]."""
    calls = [part.attention.z for part in layer.parts]
    if len({z.shape for z in calls}) > 1:
        return
    n = len(calls)
    for groups in (g for g in range(n, 1, -1) if n % g == 0):
        each = n // groups
        names = tuple("+".join(f"attn.{i}" for i in range(k * each, (k + 1) * each)) for k in range(groups))
        yield names, [torch.cat(calls[k * each : (k + 1) * each], dim=-1) for k in range(groups)]
    if n > 1 and calls[0].shape[1] % 2 == 0:
        joined, half = torch.cat(calls, dim=-1), calls[0].shape[1] // 2
        yield (f"heads 0:{half}", f"heads {half}:{2 * half}"), [joined[:, :half], joined[:, half:]]


def fit_combination(heads: Tensor, names: tuple[str, ...], sources: list[Tensor]) -> Combination | None:
    """Fit heads [row, head, width] as a combination of sources of that shape, with weights for each row and head.

    Behind a norm per head the weights are known up to a factor per row, and the gain is fitted too. Returns None if
    there is no fit, or if one source alone is enough.
    """
    tolerance = EXACT.get(heads.dtype, 1e-2)
    if 2 * len(sources) > heads.shape[-1]:
        return None
    gain, left, before = torch.ones_like(heads[:1, :1], dtype=torch.double), 1.0, 2.0
    for _ in range(_STEPS):
        weights, left = weights_by_token(heads.double() / gain, sources)
        if not left < 0.9 * before:
            break
        before = left
        made = torch.stack([w[..., None] * s.double() for w, s in zip(weights.unbind(-1), sources, strict=True)]).sum(0)
        gain = (made * heads).sum((0, 1), keepdim=True) / made.square().sum((0, 1), keepdim=True).clamp_min(1e-300)
        gain = torch.where(gain.abs() < 1e-12, torch.ones_like(gain), gain)
    # rows count as far as their sources differ: at a first position one may be a sum of the others
    x = torch.nn.functional.normalize(torch.stack(sources, dim=-2).double(), dim=-1)
    sure = torch.linalg.eigvalsh(x @ x.mT)[..., 0].clamp_min(0)
    share = (sure / sure.sum(0).clamp_min(1e-300))[..., None]

    def moments(w: Tensor) -> tuple[Tensor, Tensor]:
        """Means and standard deviations [head, source] over rows."""
        mean = (share * w).sum(0)
        return mean, (share * (w - mean).square()).sum(0).sqrt()

    sizes = moments(weights.abs())[0]
    if left >= tolerance or sizes.min() <= 1e-3 * sizes.max():
        return None
    for kind, w in ((CONSTANT, weights), (NORMED, weights / weights[..., :1])):
        mean, spread = moments(w)
        if bool((spread <= 1e3 * tolerance * mean.abs().amax().clamp_min(1e-3)).all()):
            return Combination(names, mean, spread, left, kind)
    return Combination(names, *moments(weights), left, GATED)


class EarlierStreams:
    """The first stream and the streams after each earlier block, and the first stream and every output so far."""

    def __init__(self, first: Tensor) -> None:
        self.streams, self.outputs = [first], [first]
        self.is_complete = True  # whether all outputs are known

    def follow(self, layer: LayerStructure) -> None:
        """Append a layer after its additions were searched for."""
        self.streams.append(layer.rows["made"])
        self.outputs += [layer.rows[name] for name in ("attn_out", "mlp_out") if name in layer.rows]
        self.is_complete &= layer.adds


def find_additions(
    trace: Trace, layer: LayerStructure, block: Execution, inside: list[Execution], before: EarlierStreams
) -> None:
    """Set a layer's `attn_out`, `mlp_out` and `keeps` if outputs of its parts explain its output, and the stream after it."""
    layer.rows["made"] = layer.rows["out"]
    made = [
        (e, t) for e in sorted(inside, key=lambda e: (len(e.stack()), e.start)) for t in e.outputs
        if t.rows.shape == layer.rows["in"].shape and (len(t.shape) == 2 or is_stream(trace, t))
    ]  # fmt: skip
    outputs = [(e, t) for e, t in made if e.name != MATRIX]
    # bare products too, unless they are the output of the module that calls them
    every = [
        (e, t) for e, t in made
        if e.name != MATRIX or e.parent is None
        or not any(x.rows.shape == t.rows.shape and torch.equal(x.rows, t.rows) for x in e.parent.outputs)
    ]  # fmt: skip
    for some in [outputs, *([every] if layer.is_read and len(every) > len(outputs) else [])]:
        if layer.adds_norms or _find_sum(trace, layer, block, inside, before, some):
            return
    for entry, tensor in outputs:
        if torch.equal(tensor.rows, layer.rows["out"]):
            weights = [p.ndim for p in trace.module.get_submodule(entry.name).parameters()]
            layer.is_normed |= bool(weights) and max(weights) == 1  # a norm: no weights but vectors


def _find_sum(
    trace: Trace, layer: LayerStructure, block: Execution, inside: list[Execution], before: EarlierStreams,
    outputs: list[Output],
) -> bool:  # fmt: skip
    """Set the outputs that a layer adds if one or two explain its own output; returns whether they do."""
    time = layer.attention.times[-1] if layer.is_read else block.start
    sums = _Sums(layer, before)
    reader = next((t for e in inside if e.name != MATRIX for t in e.inputs if is_stream(trace, t)), None)
    # else it may scale its input first
    reads_stream = reader is not None and torch.equal(reader.rows, layer.rows["in"])
    several = (sums.averaged, sums.rescaled) if reads_stream else (sums.rescaled, sums.averaged)
    for explains in (sums.plain, sums.scaled, *several, sums.alone, sums.normed, sums.weighted):
        terms = outputs
        if explains == sums.alone:
            terms = [(e, t) for e, t in outputs if not any(torch.equal(x.rows, layer.rows["in"]) for x in e.inputs)]
        after = [term for term in terms if term[0].end > time]
        pairs = [
            [one, other] for one, other in product(after, terms)
            if other[0].start > one[0].end or other[0].end < one[0].start
        ]  # fmt: skip
        for some in (*pairs, *([one] for one in after)):
            if (factors := explains([t.rows for _, t in some])) is None:
                continue
            if explains == sums.normed:  # the norms that are added are no outputs of a part
                layer.adds_norms = True
                return False
            # first the part that holds the attention, then parts after it, then parts before it
            placed = sorted(
                zip(some, factors, strict=True),
                key=lambda each: 0 if each[0][0].holds(time) else s - time if (s := each[0][0].start) > time else 10**9,
            )
            for name, ((entry, seen), factor) in zip(("attn_out", "mlp_out"), placed, strict=False):
                layer.rows[name] = seen.rows * factor if factor != 1 else seen.rows
                setattr(layer, name, Addition.of(entry, seen, inside, factor=factor))
            if explains in (sums.averaged, sums.weighted):
                layer.rows["made"] = sum((t.rows for _, t in some), layer.rows["in"])
            layer.adds, layer.keeps = True, sums.keeps
            _find_middle(trace, layer, [output for output, _ in placed], inside)
            return True
    return False


def _find_middle(trace: Trace, layer: LayerStructure, placed: Sequence[Output], inside: list[Execution]) -> None:
    """Set the rows of the MLP's input before any norm: the stream after the attention, if a part reads it or a norm of it.

    Else the first stream that a part reads after the attention. Parts that add the attention's output read it and the block's
    input, and a parallel MLP reads a norm of that input: neither is a sum of earlier outputs.
    """
    (attention, _), *others = placed
    if not others or others[0][0].end < attention.end:
        return
    before, added = layer.rows["in"], layer.rows["attn_out"]

    def is_norm_of(rows: Tensor, stream: Tensor) -> bool:
        return is_rounded(rows - stream, [rows, before, added]) or fit_norm(stream, rows) is not None

    reads = [
        t.rows for e in inside if attention.end < e.start < others[0][0].end and e.name != MATRIX
        for t in e.inputs if is_stream(trace, t) and t.rows.shape == before.shape
    ]  # fmt: skip
    if any(is_norm_of(rows, before + added) for rows in reads):
        layer.rows["mid"] = before + added
    elif rest := [rows for rows in reads if not torch.equal(rows, added) and not is_norm_of(rows, before)]:
        layer.rows["mid"] = rest[0]


def is_rounded(left: Tensor, terms: Sequence[Tensor], steps: int = 8) -> bool:
    """Return whether a rest is the rounding of a sum of terms in the first one's type, element by element.

    An element of thousands (a massive activation) excuses no rest in the others.
    """
    size = sum(term.double().abs() for term in terms)
    return bool((left.double().abs() <= steps * torch.finfo(terms[0].dtype).eps * size).all())


class _Sums:
    """Seven ways in which outputs may explain a block's output; each returns the outputs' factors, or None."""

    def __init__(self, layer: LayerStructure, before: EarlierStreams) -> None:
        self.before, self.out, self.first = layer.rows["in"], layer.rows["out"], before.streams[0]
        self.target = self.out.double() - self.before.double()
        self.tolerance = EXACT.get(self.out.dtype, 1e-2)
        self.keeps = 1.0, 0.0
        self._few_of: dict[int, Tensor] = {}  # by id of the tensor
        streams = [self.before] if torch.equal(self.before, self.first) else [self.before, self.first]
        self.basis = torch.linalg.qr(torch.stack([self._few(s) for s in streams], dim=1)).Q
        self.earlier = [self._few(s) for s in before.streams]
        self.streams = torch.linalg.qr(torch.stack(self.earlier, dim=1)).Q
        # an element weighs in a fit as far as its rounding lets it tell sums apart
        self.shares = 1 / (self.out.double().abs() + self.before.double().abs()).clamp_min(1e-30)
        self.outputs = before.outputs if before.is_complete else []
        self.few_added, self.few_out = self._few(self.out) - self._few(self.before), self._few(self.out)

    def _few(self, part: Tensor) -> Tensor:
        """Return a few rows in one vector."""
        if id(part) not in self._few_of:
            self._few_of[id(part)] = part[:_FEW].double().flatten()
        return self._few_of[id(part)]

    def plain(self, parts: list[Tensor]) -> list[float] | None:
        """out = in + parts."""
        for few in (_FEW, len(self.out)):
            terms = [x[:few] for x in (self.out, self.before, *parts)]
            if not is_rounded(sum((x.double() for x in terms[2:]), -self.target[:few]), terms):
                return None
        return [1.0] * len(parts)

    def scaled(self, parts: list[Tensor]) -> list[float] | None:
        """out = in + each part times a number."""
        share = self._few(self.shares)
        few, added = share[:, None] * torch.stack([self._few(part) for part in parts], dim=1), share * self.few_added
        gram, dots = few.T @ few, few.T @ added
        if float(torch.linalg.det(gram)) <= 1e-8 * float(gram.diagonal().prod()):
            return None  # one tensor, or multiples of it
        factors = torch.linalg.solve(gram, dots)
        left = few @ factors - added
        if not float(left.norm()) <= 4 * self.tolerance * float(added.norm()) or not bool((factors != 0).all()):
            return None
        numbers, _ = fit(self.shares * self.target, [self.shares * part.double() for part in parts])
        left = sum((c * part.double() for c, part in zip(numbers, parts, strict=True)), -self.target)
        terms = [self.out, self.before, *(c * part for c, part in zip(numbers, parts, strict=True))]
        return numbers if is_rounded(left, terms) else None

    def rescaled(self, parts: list[Tensor]) -> list[float] | None:
        """out = keep * in + again * x_0 + parts."""
        left = self.few_out - sum(self._few(part) for part in parts)
        if float((left - self.basis @ (self.basis.T @ left)).norm()) > self.tolerance * float(left.norm()):
            return None
        streams = [self.before, self.first][: self.basis.shape[1]]
        rest = self.out.double() - sum(part.double() for part in parts)
        (keep, *again), residual = fit(rest, streams)
        if residual > self.tolerance or abs(keep) * float(self.before.norm()) < _LEAST * float(self.out.norm()):
            return None  # a part would hold the stream itself
        kept = [c * x.double() for c, x in zip((keep, *again), streams, strict=True)]
        if not is_rounded(rest - sum(kept), [self.out, *kept, *parts]):
            return None
        self.keeps = (keep, again[0] if again else 0.0)
        return [1.0] * len(parts)

    def averaged(self, parts: list[Tensor]) -> list[float] | None:
        """out = a weighted sum of the earlier streams and of in + parts."""
        added = torch.stack([self._few(part) for part in parts]).sum(0)
        left, made = (x - self.streams @ (self.streams.T @ x) for x in (self.few_out, added + self._few(self.before)))
        size, total = float(made.square().sum()), float(self.few_out.norm())
        factor = float((left * made).sum()) / size if size else 0.0
        exact = float((left - factor * made).norm()) <= self.tolerance * total
        keeps_stream = float((self.few_out - factor * added).norm()) > _LEAST * total  # else a part holds the stream
        if not exact or not keeps_stream or abs(factor) * size**0.5 <= _LEAST * total:
            return None
        share, new = self._few(self.shares), [self._few(self.before), *map(self._few, parts)]
        (*old, last), _ = fit(share * self.few_out, [share * x for x in (*self.earlier, sum(new))])
        terms = [*(c * x for c, x in zip(old, self.earlier, strict=True)), *(last * x for x in new)]
        return (
            [1.0] * len(parts) if is_rounded(self.few_out - sum(terms), [self.out[:_FEW].flatten(), *terms]) else None
        )

    def alone(self, parts: list[Tensor]) -> list[float] | None:
        """out = two parts that do not read the stream itself."""
        few = [x[:_FEW] for x in (self.out, *parts)]
        if len(parts) < 2 or not is_rounded(sum((x.double() for x in few[1:]), -few[0].double()), few):
            return None
        self.keeps = 0.0, 0.0
        return [1.0] * len(parts)

    def normed(self, parts: list[Tensor]) -> list[float] | None:
        """out = in + root-mean-square norms of the parts, by a function without gains."""
        target, few = self.few_added.view(-1, self.out.shape[1]), [self._few(p).view(-1, p.shape[1]) for p in parts]
        if weights_by_token(target[:2], [x[:2] for x in few])[1] > self.tolerance:
            return None
        weights, left = weights_by_token(target, few)
        if left > self.tolerance:
            return None
        sizes = torch.stack([x.norm(dim=1) for x in few], dim=-1) * weights
        mean = sizes.mean(0)
        return mean.tolist() if bool((sizes.std(0) <= _SAME * mean.abs()).all()) else None

    def weighted(self, parts: list[Tensor]) -> list[float] | None:
        """out = all earlier outputs and the parts, weighted by token, if the block's input is such a sum too."""
        if not self.outputs or not self.reads_outputs:
            return None
        few = [x[:_FEW] for x in (self.out, *self.outputs, *parts)]
        weights, left = depth_weights(few[0], few[1:])
        taken = weights.abs().mean((0, 1))
        old, new = taken[: len(self.outputs)], taken[len(self.outputs) :]
        explained = left <= self.tolerance and bool((new > _LEAST).all()) and bool((old > _LEAST).any())
        return [1.0] * len(parts) if explained else None

    @cached_property
    def reads_outputs(self) -> bool:
        """True if the block's input is a sum of earlier outputs, and not another stream (Reformer)."""
        return depth_weights(self.before[:_FEW], [x[:_FEW] for x in self.outputs])[1] <= self.tolerance
