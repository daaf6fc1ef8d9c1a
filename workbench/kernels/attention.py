"""Attention output and concentration statistics in one pass over strips of queries, without the T x T pattern.

With scaled masked scores s_ij, m_i = max_j s_ij, e_ij = exp(s_ij - m_i) and Z_i = sum_j e_ij the pattern is
A_ij = e_ij / Z_i and

    z_i = sum_j A_ij v_j                    received_j = sum_i A_ij        lse_i = m_i + ln Z_i
    H_i = ln Z_i - sum_j A_ij (s_ij - m_i)  row_max_i = 1 / Z_i            sink_i = A_i0

Both terms of H_i are >= 0, so a peaked row keeps its small entropy exactly however large its scores are.

A strip holds whole rows (all keys up to its last query), so unlike the online softmax (Milakov & Gimelshein 2018,
arXiv 1805.02867; FlashAttention, Dao et al. 2022, arXiv 2205.14135) nothing is rescaled and the column sums need no
second pass. Memory beside the output is two strips and one copy of a few heads: O(T). The sink is the share of
attention on the first position (Gu et al. 2024, arXiv 2410.10781).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from workbench.errors import WorkbenchError

# (most rows, elements) of a strip of scores. CPU: near the second-level cache. Elsewhere: few, large launches.
_CPU_STRIP = 64, 2**18
_DEVICE_STRIP = 1024, 2**26
_FEWEST_ROWS = 64  # below this the matrix products lose more than the cache gains


@dataclass(frozen=True, kw_only=True)
class AttentionStatistics:
    """Statistics of one causal attention pattern A; float32, or float64 where the inputs were float64."""

    received: Float[Tensor, "batch head pos"]  # sum_i A_ij: attention received by key j; sums to T over j
    row_entropy: Float[Tensor, "batch head pos"]  # -sum_j A_ij ln A_ij in nats, 0 .. ln(i + 1)
    row_max: Float[Tensor, "batch head pos"]  # max_j A_ij
    sink: Float[Tensor, "batch head pos"]  # A_i0
    lse: Float[Tensor, "batch head pos"]  # ln sum_j exp s_ij over the scaled masked scores


@torch.no_grad()
def attention_statistics(
    q: Float[Tensor, "batch pos head d_head"],
    k: Float[Tensor, "batch pos kv_head d_head"],
    v: Float[Tensor, "batch pos kv_head d_head"],
    *,
    scale: float | None = None,
    budget: int | None = None,
) -> tuple[Float[Tensor, "batch pos head d_head"], AttentionStatistics]:
    """Causal attention output (dtype of q) and its statistics; a measurement, so nothing returned carries a gradient.

    Query head h reads kv head h * kv_heads // heads. Sums run in float32 (float64 for float64 inputs), also under
    autocast; on a GPU the products follow `torch.set_float32_matmul_precision`.

    Args:
        q: queries after rotary embedding.
        k: keys after rotary embedding.
        v: values, already mixed where the architecture mixes them.
        scale: factor on q . k; 1 / sqrt(d_head) unless given.
        budget: elements in one strip of scores (two strips are held); a strip never has fewer than 64 rows of one head.
    """
    _check(q, k, v)
    batch, length, heads, width = q.shape
    most_rows, elements = _CPU_STRIP if q.device.type == "cpu" else _DEVICE_STRIP
    elements = elements if budget is None else budget
    # causal work wasted above the diagonal is rows / length
    rows = min(length, max(_FEWEST_ROWS, min(elements // length, most_rows, length // 16)))
    # (sequence, head) pairs of short sequences share a strip
    pairs = max(1, elements // (rows * length))
    n_head, n_batch = min(heads, pairs), min(batch, max(1, pairs // heads))

    dtype = torch.promote_types(q.dtype, torch.float32)
    z = torch.empty_like(q, memory_format=torch.contiguous_format)
    received = torch.zeros(batch, heads, length, dtype=dtype, device=q.device)
    rowwise = torch.empty(4, batch, heads, length, dtype=dtype, device=q.device)
    # one allocation: the allocator hands many small ones back to the system, and faulting them in again costs up to 3x
    strip, sequence = n_batch * n_head * rows * length, n_batch * n_head * length * width
    workspace = torch.empty(2 * strip + 3 * sequence, dtype=dtype, device=q.device)
    strips, copies = workspace[: 2 * strip].view(2, -1), workspace[2 * strip :].view(3, -1, length, width)
    # base-2 scores: exp2 is never slower than exp, and 4x faster where exp leaves the vectorised path
    scale = (width**-0.5 if scale is None else scale) * math.log2(math.e)

    with torch.autocast(q.device.type, enabled=False):
        for b in range(0, batch, n_batch):
            for h in range(0, heads, n_head):
                at = slice(b, b + n_batch), slice(h, h + n_head)
                out = z[at[0], :, at[1]].transpose(1, 2)
                n = out.shape[0] * out.shape[1]
                for x, copy in zip((q, k, v), copies, strict=True):
                    copy[:n].view(out.shape).copy_(_of_heads(x[at[0]], at[1], heads).transpose(1, 2))
                _attend(
                    copies[:, :n], scale, rows, strips, out, received[at].view(n, -1), rowwise[:, *at].view(4, n, -1)
                )
    top, total, first, dot = rowwise
    log_total = total.log2()
    return z, AttentionStatistics(
        received=received,
        row_entropy=((log_total - dot / total) * math.log(2)).clamp_(min=0),
        row_max=1 / total,
        sink=first / total,
        lse=(top + log_total) * math.log(2),
    )


def _attend(
    qkv: Float[Tensor, "three pair pos d_head"],
    scale: float,
    rows: int,
    strips: Float[Tensor, "two elements"],
    z: Float[Tensor, "batch head pos d_head"],
    received: Float[Tensor, "pair pos"],
    rowwise: Float[Tensor, "four pair pos"],
) -> None:
    """Fill z, received and rowwise (of each row: maximum, sum, first, entropy sum; base 2, unnormalised) by strips."""
    q, k, v = qkv
    n, length, _ = q.shape
    # finite, so that a masked entry is exactly 0 in e * s as well as in e
    future = torch.full((rows, rows), torch.finfo(q.dtype).min / 2, dtype=q.dtype, device=q.device).triu_(1)
    for start in range(0, length, rows):
        end = min(start + rows, length)
        r = end - start
        s, e = (strip[: n * r * end].view(n, r, end) for strip in strips)
        torch.baddbmm(s, q[:, start:end], k[:, :end].mT, beta=0, alpha=scale, out=s)
        s[:, :, start:].add_(future[:r, :r])
        top = s.amax(-1, keepdim=True)
        torch.exp2(s.sub_(top), out=e)
        total = e.sum(-1, keepdim=True)
        weight = total.reciprocal()
        z[:, :, start:end] = torch.bmm(e, v[:, :end]).mul_(weight).view(*z.shape[:2], r, -1)
        received[:, :end] += torch.bmm(weight.mT, e).squeeze(1)
        for out, value in zip(rowwise, (top, total, e[:, :, :1], s.mul_(e).sum(-1, keepdim=True)), strict=True):
            out[:, start:end] = value.squeeze(-1)


def _of_heads(x: Tensor, chosen: slice, heads: int) -> Tensor:
    """The heads of x [batch, pos, kv_head, d_head] that the chosen of all query heads read."""
    if x.shape[2] == heads:
        return x[:, :, chosen]
    return x[:, :, torch.arange(heads, device=x.device)[chosen] * x.shape[2] // heads]


def attention_reference(
    q: Float[Tensor, "batch pos head d_head"],
    k: Float[Tensor, "batch pos kv_head d_head"],
    v: Float[Tensor, "batch pos kv_head d_head"],
    *,
    scale: float | None = None,
) -> tuple[Float[Tensor, "batch pos head d_head"], Float[Tensor, "batch head pos pos"], AttentionStatistics]:
    """The slow truth `attention_statistics` must equal: output, the whole pattern, statistics."""
    _check(q, k, v)
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


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse shapes and types that are not one causal self-attention."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise WorkbenchError(
            f"q must be [batch, pos, head, d_head] and k, v [batch, pos, kv_head, d_head]; got {shapes}"
        )
    if 0 in q.shape or 0 in k.shape or q.shape[2] % k.shape[2]:
        raise WorkbenchError(
            f"no axis may be empty and the heads of q must be a multiple of the kv heads; got {shapes}"
        )
    if not (q.is_floating_point() and q.dtype == k.dtype == v.dtype):
        raise WorkbenchError(f"q, k and v must share one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
