"""Least-squares fits in float64: a tensor as a sum of other tensors, as a norm of another, or as a sum of earlier streams.

A residual is the share of the target's norm that a fit does not explain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

EXACT = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest residual that rounding explains, by the type of the numbers."""
SLACK = {torch.float64: 1e-9, torch.float32: 1e-4} | {t: EXACT[t] for t in (torch.bfloat16, torch.float16)}
"""Largest share of head outputs that no addition or gate between the attention and W_O explains, by their type."""
_NORM_STEPS = 40  # of alternating least squares; two to five are enough unless the norm's epsilon matters
_MIN_ROWS = 4
_NARROWED = 1e-6  # residual of a norm that computes in float32 inside a float64 model, as Llama's in transformers
_FEW = 48  # rows that distinguish a sum of streams from any other tensor
_DEPTH_HEADS = (1, 2, 4, 8, 16)


def fit(target: Tensor, sources: Sequence[Tensor]) -> tuple[list[float], float]:
    """Fit one coefficient per source, all tensors of one shape; returns the coefficients and the residual."""
    y = target.detach().double().flatten()
    size = float(y.norm())
    if not sources or not size:
        return [0.0] * len(sources), 0.0 if not size else 1.0
    x = torch.stack([s.detach().double().flatten() for s in sources], dim=1)
    solution = torch.linalg.lstsq(x.cpu(), y.cpu()[:, None], driver="gelsd").solution[:, 0]
    return solution.tolist(), float((x.cpu() @ solution - y.cpu()).norm()) / size


def weights_by_token(target: Tensor, sources: Sequence[Tensor]) -> tuple[Tensor, float]:
    """Fit weights [..., source] for each vector of a target [..., d]; returns the weights and the residual of all vectors."""
    x, y = torch.stack([s.detach().double() for s in sources], dim=-1), target.detach().double()
    gram, dots = x.mT @ x, (x.mT @ y[..., None])[..., 0]
    ridge = 1e-13 * gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] + 1e-300  # a zero vector has weight 0
    weights = torch.linalg.solve(gram + ridge * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device), dots)
    size = float(y.norm())
    return weights, float(((x @ weights[..., None])[..., 0] - y).norm()) / size if size else 0.0


def fit_rotated(
    plain: tuple[Tensor, Tensor], mixed: tuple[Tensor, Tensor], *, starts: Tensor
) -> tuple[float, float, float] | None:
    """Fit mixed queries or keys as a * first + b * own before their rotation; returns (a, b, residual), or None without a fit.

    Both arguments are pairs (rotated, projected) of heads [row, head, d_head]. The plain pair is the first layer's and gives the
    scale of the scores. `starts` marks the rows that no rotary encoding rotates. They give a and b, which the vector lengths of
    all rows then check.
    """
    (first_used, first), (used, own) = ([x.detach().double() for x in pair] for pair in (plain, mixed))
    if not first_used.shape == first.shape == used.shape == own.shape or not bool(starts.any()):
        return None
    (scale,), _ = fit(first_used[starts], [first[starts]])
    (a, b), _ = fit(used[starts], [scale * first[starts], scale * own[starts]])
    left = (scale * (a * first + b * own)).norm(dim=-1) - used.norm(dim=-1)
    residual = float(left.norm() / used.norm().clamp_min(1e-300))
    exact = residual < EXACT.get(mixed[0].dtype, 1e-2) and abs(a) > EXACT.get(mixed[0].dtype, 1e-2)
    return (a, b, residual) if exact else None


@dataclass(frozen=True)
class FrozenNorm:
    """A norm gain * (x - mean x) / divisor + shift. With the divisors of one run held fixed it is linear in its input."""

    centred: bool
    gain: Tensor  # float64 [d_model]
    shift: Tensor | None  # float64 [d_model]; None where it adds nothing
    is_narrowed: bool = False  # whether a norm of a float64 model computes in float32

    def read(self, x: Tensor) -> Tensor:
        """Return the tensor that is divided, [..., d_model]."""
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def divisor(self, x: Tensor, u: Tensor) -> Tensor:
        """Return the divisors [..., 1] of a run with input x and output u [..., d_model]."""
        part, made = self.read(x) * self.gain.to(x), u if self.shift is None else u - self.shift.to(u)
        return part.square().sum(-1, keepdim=True) / (made * part).sum(-1, keepdim=True)


def fit_norm(x: Tensor, u: Tensor) -> FrozenNorm | None:
    """Fit u as a norm of x, both [row, d_model]; returns the simplest norm that fits, or None.

    Alternating least squares, so that root-mean-square and layer norms of any library fit, with or without weights, and so do
    a multiple and the identity.
    """
    if x.shape != u.shape or len(x) < _MIN_ROWS or not float(u.norm()):
        return None
    exact = EXACT.get(u.dtype, 1e-2)
    x, u = x.double(), u.double()
    for centred in (False, True):
        part = x - x.mean(-1, keepdim=True) if centred else x
        size = part.square().mean(-1, keepdim=True).sqrt()
        for shifted in (False, True):
            for divisor in (torch.ones_like(size), size):
                fitted, left = _fit_gain(part, u, divisor.clamp_min(1e-300), shifted)
                if fitted is not None and left < max(exact, _NARROWED):
                    return FrozenNorm(centred, *fitted, is_narrowed=left >= exact)
    return None


def _fit_gain(
    x: Tensor, u: Tensor, divisor: Tensor, shifted: bool
) -> tuple[tuple[Tensor, Tensor | None] | None, float]:
    """Fit gain and shift [d_model] in u = gain * x / divisor + shift from starting divisors [row, 1]; also returns the residual."""
    size, before, fitted = float(u.norm()), float("inf"), None
    for _ in range(_NORM_STEPS):
        part = x / divisor
        shift, rest = torch.zeros_like(u[0]), part - part.mean(0) if shifted else part
        gain = (rest * u).sum(0) / rest.square().sum(0).clamp_min(1e-300)
        if shifted:
            shift = u.mean(0) - gain * part.mean(0)
        left = float((gain * part + shift - u).norm()) / size
        if not left < 0.9 * before:
            break
        before, fitted = left, (gain, shift if shifted else None)
        scaled = x * gain
        divisor = scaled.square().sum(-1, keepdim=True) / ((u - shift) * scaled).sum(-1, keepdim=True)
    return fitted, before


@dataclass(frozen=True)
class StreamSum:
    """Weights of the input of a block, an MLP or the final norm: the latest stream (plain), or a sum of earlier ones.

    Constant weights belong to the first stream and the stream after every block (DenseFormer, arXiv 2402.02622). Weights by
    token belong to the first stream and every output of an attention or MLP (Attention Residuals, arXiv 2603.15031, with several
    heads arXiv 2607.27230). `weights` then holds their means.
    """

    weights: tuple[float, ...]
    residual: float = 0.0
    exact: bool = True
    is_plain: bool = True
    by_token: Tensor | None = field(default=None, compare=False)  # [row, head, source]

    @property
    def spread(self) -> tuple[float, ...]:
        """Standard deviations of weights over tokens; empty for constants."""
        return () if self.by_token is None else tuple(self.by_token.flatten(0, 1).std(0, correction=0).tolist())


def depth_weights(rows: Tensor, outputs: Sequence[Tensor]) -> tuple[Tensor, float]:
    """Fit weights [..., head, source] of outputs [..., d_model] by token; returns the weights and the residual.

    A head is a chunk of the stream with separate weights, and the fewest heads that fit are taken. A chunk of n numbers has at
    most n / 2 sources, so that none fits by chance. Without a fit the residual is 1.
    """
    for heads in _DEPTH_HEADS:
        if rows.shape[-1] % heads or 2 * len(outputs) > rows.shape[-1] // heads:
            break
        chunks = [x.unflatten(-1, (heads, -1)) for x in (rows, *outputs)]
        weights, left = weights_by_token(chunks[0], chunks[1:])
        if left <= EXACT.get(rows.dtype, 1e-2):
            return weights, left
    return rows.new_zeros(*rows.shape[:-1], 1, len(outputs)), 1.0


def stream_sum(rows: Tensor, streams: Sequence[Tensor], outputs: Sequence[Tensor]) -> StreamSum:
    """Fit rows [row, d_model] to all streams so far, the first and the one after each block, or to all outputs so far by token."""
    last, tolerance = streams[-1], EXACT.get(rows.dtype, 1e-2)
    if float((rows - last).abs().max()) <= tolerance * float(last.abs().max()):
        return StreamSum((*[0.0] * (len(streams) - 1), 1.0))
    few = slice(max(_FEW, 2 * len(streams)))
    weights, residual = fit(rows[few], [s[few] for s in streams])
    if residual > tolerance and outputs:
        by_token, left = depth_weights(rows, outputs)
        if left <= tolerance:
            return StreamSum(tuple(by_token.mean((0, 1)).tolist()), left, is_plain=False, by_token=by_token)
    return StreamSum(tuple(weights), residual, residual <= tolerance, is_plain=False)


def stream_sums(
    reads: Sequence[Tensor], made: Sequence[Tensor], outputs: Sequence[Sequence[Tensor]] = ()
) -> list[StreamSum]:
    """Fit the inputs of every block and the final norm, from the streams after the blocks and the outputs of their parts."""
    sums = [StreamSum((1.0,))]
    for i, rows in enumerate(reads[1:], 1):
        known = [reads[0], *(x for some in outputs[:i] for x in some)] if outputs else []
        sums.append(stream_sum(rows, [reads[0], *made[:i]], known))
    return sums
