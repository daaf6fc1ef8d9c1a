"""What W_O reads: the heads' outputs, a gated or normed share of them, or a combination of several attentions.

    difference    u_m = z_0m - lambda z_1m, of two attentions or two halves of one's heads, or a norm of each head of it
    gates         u_m = g_0m z_0m + g_1m z_1m, with weights for each token and head

Source: Ye et al. (2024), Differential Transformer, arXiv 2410.05258, equations 1 to 3.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from workbench.observing.recognition.executions import Execution, TracedTensor
from workbench.observing.recognition.frozen_norm import fit_norm
from workbench.observing.recognition.least_squares import EXACT, weights_by_token
from workbench.observing.recognition.projections import TensorLocation, run_index
from workbench.observing.recognition.structure import (
    CONSTANT,
    GATED,
    NORMED,
    BareOutput,
    Combination,
    LayerStructure,
)
from workbench.observing.recognition.trace import Trace, is_matrix
from workbench.observing.recognition.value_paths import explained

SHARE = "W_O reads a share of pattern x values, by head and position (a gate)"
GATE = "W_O reads more than pattern x values: each number times a positive one (a gate)"
NORM = "W_O reads a norm of pattern x values"
CHANGED = "W_O reads more than pattern x values: something changes the heads' outputs (a gate, a norm)"
_STEPS = 40  # of alternating least squares


def find_output(trace: Trace, layer: LayerStructure, inside: list[Execution], first: Tensor, block: Execution) -> None:
    """Set a layer's `z`, the input of W_O: of the matrix after its attentions that reads their heads, and what stands between.

    Inside the module that attends it may also read what no fit explains (a gate, a norm), but nothing from before it. `first`:
    the first layer's values.
    """
    attention = layer.attention
    before = [t.rows for e in inside if e.start < attention.times[-1] for t in e.inputs]
    for entry in inside:
        if entry.start < attention.times[-1] or not (entry.call or is_matrix(trace, entry)):
            continue
        for read in (t for t in entry.inputs if len(t.shape) > 2):
            heads, combined = _heads_in(read.rows, layer, first)
            within = attention.within.start > block.start and attention.within.holds(entry.start)
            unknown = heads is None and within and read.rows.shape == attention.z.flatten(1).shape
            if unknown and not any(torch.equal(read.rows, x) for x in before if x.shape == read.rows.shape):
                heads = read.rows.unflatten(1, attention.z.shape[1:])
            if heads is not None:
                layer.combination = combined
                _set_output(trace, layer, entry, read, heads, inside)
                _compare(layer, first)
                return


def find_output_of_addition(trace: Trace, layer: LayerStructure, inside: list[Execution], first: Tensor) -> None:
    """Set `z` of a layer without one: the input of the matrix that makes what the attention adds, whatever gates stand before it."""
    attention, added = layer.attention, layer.attn_out
    if added is None or layer.z is not None:
        return
    entry = [e for e in inside if e.name == added.module][added.run]
    before = [t.rows for e in inside if e.start < attention.times[-1] for t in e.inputs]
    if entry.start < attention.times[-1] or not (entry.call or is_matrix(trace, entry)) or len(entry.inputs) != 1:
        return
    read = entry.inputs[0]
    new = not any(x.shape == read.rows.shape and torch.equal(x, read.rows) for x in before)
    if new and read.rows.shape == attention.z.flatten(1).shape:
        _set_output(trace, layer, entry, read, read.rows.unflatten(1, attention.z.shape[1:]), inside)
        _compare(layer, first)


def _set_output(
    trace: Trace, layer: LayerStructure, entry: Execution, read: TracedTensor, heads: Tensor, inside: list[Execution]
) -> None:
    layer.rows["z"] = heads
    layer.z = TensorLocation(entry.name, run_index(entry, inside), read.path, axes=read.axes)
    layer.w_o = None if entry.call is None else BareOutput(entry.call, read.axes.pos == 2, len(read.shape) == 4)


def _heads_in(rows: Tensor, layer: LayerStructure, first: Tensor) -> tuple[Tensor | None, Combination | None]:
    """Rows [row, width] as the heads [row, head, d_head] that they hold, and of what they are a combination; None for others."""
    attention = layer.attention
    if rows.shape == attention.z.flatten(1).shape:
        heads = rows.unflatten(1, attention.z.shape[1:])
        if explained(heads, attention.z, attention.v, first) or _is_gated(heads, attention.z):
            return heads, None
    for names, sources in _groupings(layer):
        if sources[0].flatten(1).shape == rows.shape:
            heads = rows.unflatten(1, sources[0].shape[1:])
            if (found := combination(heads, names, sources)) is not None:
                return heads, found
    return None, None


def _is_gated(heads: Tensor, z: Tensor) -> bool:
    """Whether heads [row, head, d_head] are the attention's, each number times a positive one and each column times any."""
    product = heads.double() * z.double()
    slack = EXACT.get(z.dtype, 1e-2) * product.abs().mean()
    return bool((product * product.sum(0).sign() >= -slack).all()) and bool(product.any())


def _groupings(layer: LayerStructure) -> Iterator[tuple[tuple[str, ...], list[Tensor]]]:
    """Ways in which a layer's attentions can be combined: names, and heads' outputs [row, head, width] as they go together.

    Attentions with one another, or the two halves of their heads; the values may be cut in two, one half for each call.
    """
    calls = [part.attention.z for part in layer.parts]
    if len({z.shape for z in calls}) > 1:
        return
    n = len(calls)
    for groups in (g for g in range(n, 1, -1) if n % g == 0):
        each = n // groups
        names = tuple("+".join(f"attn.{i}" for i in range(k * each, (k + 1) * each)) for k in range(groups))
        yield names, [torch.cat(calls[k * each : (k + 1) * each], dim=-1) for k in range(groups)]
    if n > 1 and calls[0].shape[1] % 2 == 0:
        whole, half = torch.cat(calls, dim=-1), calls[0].shape[1] // 2
        yield (f"heads 0:{half}", f"heads {half}:{2 * half}"), [whole[:, :half], whole[:, half:]]


def combination(heads: Tensor, names: tuple[str, ...], sources: list[Tensor]) -> Combination | None:
    """What heads [row, head, width] are of sources of that shape: weights for each row and head, the same or not; None for nothing.

    Behind a norm of each head the weights are known but for a factor of each row, and the gain is found with them.
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
    sure = _told_apart(sources)
    least, most = (getattr(_moments(weights.abs(), sure)[0], name)() for name in ("min", "max"))
    if left >= tolerance or least <= 1e-3 * most:
        return None  # of one of them alone
    for kind, found in ((CONSTANT, weights), (NORMED, weights / weights[..., :1])):
        mean, spread = _moments(found, sure)
        if bool((spread <= 1e3 * tolerance * mean.abs().amax().clamp_min(1e-3)).all()):
            return Combination(names, mean, spread, left, kind)
    return Combination(names, *_moments(weights, sure), left, GATED)


def _told_apart(sources: list[Tensor]) -> Tensor:
    """How well sources are told from one another in each row and head, 0 where one is a sum of others (at a first position)."""
    x = torch.nn.functional.normalize(torch.stack(sources, dim=-2).double(), dim=-1)
    return torch.linalg.eigvalsh(x @ x.mT)[..., 0].clamp_min(0)


def _moments(weights: Tensor, sure: Tensor) -> tuple[Tensor, Tensor]:
    """Means and standard deviations [head, source] over rows of weights [row, head, source], as far as each is sure."""
    share = (sure / sure.sum(0).clamp_min(1e-300))[..., None]
    mean = (share * weights).sum(0)
    return mean, (share * (weights - mean).square()).sum(0).sqrt()


def _compare(layer: LayerStructure, first: Tensor) -> None:
    """Note where W_O reads something else than pattern times values; a sink that takes its share there is one of the rows'.

    A sink s among the scores leaves a head's output times sigmoid(lse - s).
    """
    heads, attention = layer.rows["z"].double(), layer.attention
    if layer.combination is not None:
        layer.changed = f"W_O reads {layer.combination.words}"
        return
    if explained(layer.rows["z"], attention.z, attention.v, first):
        return
    z, slack = attention.z.double(), 10 * EXACT.get(attention.z.dtype, 1e-2)
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
