"""Reference for causal attention: output, T x T pattern and the pattern's statistics.

    A = softmax(scale q k^T + causal mask),   z = A v

or, with a null logit b_h per head, A_ij = e^{s_ij} / (sum_j e^{s_ij} + e^{b_h}): one more column of the softmax, which is no
key, gets a share of every row. Every fast kernel must equal this reference. Memory grows with the square of the length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from workbench.errors import WorkbenchError

Queries = Float[Tensor, "batch pos head d_head"]
Keys = Float[Tensor, "batch pos kv_head d_head"]  # and values; query head h reads kv head h * kv_heads // heads
Null = Float[Tensor, " head"] | None  # logits of a column that is no key


@dataclass(frozen=True, kw_only=True)
class AttentionStatistics:
    """Statistics of one causal attention pattern A; float32, or float64 where the inputs were float64.

    The share of a column that is no key is missing in the sums of A, and counts in entropy and `lse`.
    """

    received: Float[Tensor, "batch head pos"]  # sum_i A_ij: attention received by key j; sums to T over j
    row_entropy: Float[Tensor, "batch head pos"]  # -sum_j A_ij ln A_ij in nats, 0 .. ln(i + 1)
    row_max: Float[Tensor, "batch head pos"] | None  # max_j A_ij; None if not requested
    sink: Float[Tensor, "batch head pos"]  # A_i0
    lse: Float[Tensor, "batch head pos"]  # ln sum_j exp s_ij over the scaled masked scores, and the null's logit
    null: Float[Tensor, "batch head pos"] | None = None  # 1 - sum_j A_ij; None if every column is a key


def attention_reference(
    q: Queries, k: Keys, v: Keys, *, scale: float | None = None, null: Null = None
) -> tuple[Queries, Float[Tensor, "batch head pos pos"], AttentionStatistics]:
    """Compute output, pattern and statistics, the reference for `attention_statistics`."""
    refuse_other(q, k, v, null)
    dtype = torch.promote_types(q.dtype, torch.float32)
    length, heads, width = q.shape[1:]
    k, v = (x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q.to(dtype), k) * (width**-0.5 if scale is None else scale)
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(future, -math.inf)
    pattern = shares(scores, null)
    return torch.einsum("bhij,bjhd->bihd", pattern, v).to(q.dtype), pattern, statistics_of(scores, pattern, null)


def shares(scores: Float[Tensor, "batch head pos key"], null: Null = None) -> Float[Tensor, "batch head pos key"]:
    """Compute the softmax of rows of scores in float32 or better; the share of the null column is missing in their sums."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    if null is None:
        return scores.softmax(-1, dtype=wide)
    lse = torch.logaddexp(scores.to(wide).logsumexp(-1), null.to(wide)[:, None])
    return (scores - lse[..., None]).exp()


def statistics_of(
    scores: Float[Tensor, "batch head pos key"], pattern: Float[Tensor, "batch head pos key"], null: Null = None
) -> AttentionStatistics:
    """Compute the statistics of a pattern and the `lse` of its scores, in float32 or better and without gradient."""
    scores, pattern = (x.detach().to(torch.promote_types(x.dtype, torch.float32)) for x in (scores, pattern))
    entropy, lse, missing = torch.special.entr(pattern).sum(-1), scores.logsumexp(-1), None
    if null is not None:
        missing = (1 - pattern.sum(-1)).clamp_min(0)
        entropy, lse = entropy + torch.special.entr(missing), torch.logaddexp(lse, null.detach().to(lse)[:, None])
    return AttentionStatistics(
        received=pattern.sum(-2),
        row_entropy=entropy,
        row_max=pattern.amax(-1),
        sink=pattern[..., 0],
        lse=lse,
        null=missing,
    )


def with_null(statistics: AttentionStatistics, null: Float[Tensor, " head"]) -> AttentionStatistics:
    """Add a null column to statistics whose `received` includes it already.

    The keys' share of row i is s_i = sigmoid(lse_i - b), and H = s H' + entr(s) + entr(1 - s), all terms >= 0.
    """
    over = statistics.lse - null.detach().to(statistics.lse)[:, None]
    log_share, rest = F.logsigmoid(over), (-over).sigmoid()
    share = log_share.exp()
    return AttentionStatistics(
        received=statistics.received,
        row_entropy=share * (statistics.row_entropy - log_share) + torch.special.entr(rest),
        row_max=None if statistics.row_max is None else share * statistics.row_max,
        sink=share * statistics.sink,
        lse=statistics.lse - log_share,
        null=rest,
    )


def refuse_other(q: Tensor, k: Tensor, v: Tensor, null: Tensor | None = None) -> None:
    """Raise `WorkbenchError` for shapes and types of no causal self-attention, and for null logits that are not one per head."""
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise WorkbenchError(f"q must be [batch, pos, head, d_head] and k, v [batch, pos, kv_head, d_head]; {shapes}")
    if 0 in q.shape or 0 in k.shape or q.shape[2] % k.shape[2]:
        raise WorkbenchError(f"no axis may be empty and the heads of q must be a multiple of the kv heads; {shapes}")
    if not (q.is_floating_point() and q.dtype == k.dtype == v.dtype):
        raise WorkbenchError(f"q, k and v must share one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if null is not None and null.shape != q.shape[2:3]:
        raise WorkbenchError(f"null must be one logit for each of the {q.shape[2]} heads; got {tuple(null.shape)}")
