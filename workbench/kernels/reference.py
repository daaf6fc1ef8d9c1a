"""The slow truth about one causal attention: its output, its whole T x T pattern and the pattern's statistics.

    A = softmax(scale q k^T + causal mask),   z = A v

Every fast form here must equal it. Memory grows with the square of the length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from workbench.errors import WorkbenchError

Queries = Float[Tensor, "batch pos head d_head"]
Keys = Float[Tensor, "batch pos kv_head d_head"]  # and values; query head h reads kv head h * kv_heads // heads


@dataclass(frozen=True, kw_only=True)
class AttentionStatistics:
    """Statistics of one causal attention pattern A; float32, or float64 where the inputs were float64."""

    received: Float[Tensor, "batch head pos"]  # sum_i A_ij: attention received by key j; sums to T over j
    row_entropy: Float[Tensor, "batch head pos"]  # -sum_j A_ij ln A_ij in nats, 0 .. ln(i + 1)
    row_max: Float[Tensor, "batch head pos"] | None  # max_j A_ij; None where it was left out, as it costs another pass
    sink: Float[Tensor, "batch head pos"]  # A_i0
    lse: Float[Tensor, "batch head pos"]  # ln sum_j exp s_ij over the scaled masked scores


def attention_reference(
    q: Queries, k: Keys, v: Keys, *, scale: float | None = None
) -> tuple[Queries, Float[Tensor, "batch head pos pos"], AttentionStatistics]:
    """The slow truth `attention_statistics` must equal: output, the whole pattern, statistics."""
    refuse_other(q, k, v)
    dtype = torch.promote_types(q.dtype, torch.float32)
    length, heads, width = q.shape[1:]
    k, v = (x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q.to(dtype), k) * (width**-0.5 if scale is None else scale)
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(future, -math.inf)
    pattern = scores.softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", pattern, v).to(q.dtype), pattern, statistics_of(scores, pattern)


def statistics_of(
    scores: Float[Tensor, "batch head pos pos"], pattern: Float[Tensor, "batch head pos pos"]
) -> AttentionStatistics:
    """The statistics of a pattern that is at hand, and `lse` of its scores; float32 or better, no gradient."""
    scores, pattern = (x.detach().to(torch.promote_types(x.dtype, torch.float32)) for x in (scores, pattern))
    return AttentionStatistics(
        received=pattern.sum(-2),
        row_entropy=torch.special.entr(pattern).sum(-1),
        row_max=pattern.amax(-1),
        sink=pattern[..., 0],
        lse=scores.logsumexp(-1),
    )


def refuse_other(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse shapes and types that are not one causal self-attention."""
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise WorkbenchError(f"q must be [batch, pos, head, d_head] and k, v [batch, pos, kv_head, d_head]; {shapes}")
    if 0 in q.shape or 0 in k.shape or q.shape[2] % k.shape[2]:
        raise WorkbenchError(f"no axis may be empty and the heads of q must be a multiple of the kv heads; {shapes}")
    if not (q.is_floating_point() and q.dtype == k.dtype == v.dtype):
        raise WorkbenchError(f"q, k and v must share one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
