"""Attention output and concentration statistics without the T x T pattern, by strips of queries or by fused calls.

| form | computation | used for |
|---|---|---|
| `strips` | one pass over strips of queries, float32 or float64 | the CPU and all other inputs |
| `fused` | three fused attention calls; the row maximum, if wanted, by strips | 16-bit types on a GPU with flash attention |

Both take memory O(T) and equal `attention_reference`. `attention_form` names the form of given inputs.

Strips: with scaled masked scores s_ij, m_i = max_j s_ij, e_ij = exp(s_ij - m_i) and Z_i = sum_j e_ij, A_ij = e_ij / Z_i and

    z_i = sum_j A_ij v_j                    received_j = sum_i A_ij        lse_i = m_i + ln Z_i
    H_i = ln Z_i - sum_j A_ij (s_ij - m_i)  row_max_i = 1 / Z_i            sink_i = A_i0

Both terms of H_i are >= 0, so the small entropy of a peaked row is exact for scores of any size. A strip holds complete rows, so
unlike in the online softmax (Milakov & Gimelshein 2018, arXiv 1805.02867) nothing is rescaled, and column sums need no second pass.

Fused calls return lse (FlashAttention, Dao et al. 2022, arXiv 2205.14135; private calls of PyTorch, as the public one does not):

    z, lse         one call;   sink_i = exp(s_i0 - lse_i)
    H_i            = lse_i - scale q_i . (sum_j A_ij k_j): one more call, with the keys as values
    received_j     = sum_i exp(s_ij - lse_i): exp of the log-sum-exp of the *transposed* attention, a third call. In reverse order it
                   is causal too, and -lse_i is in spare channels of the head, split into parts that 16-bit types can represent
    row_max_i      = exp(max_j s_ij - lse_i): no fused call returns a maximum, so the scores are computed again in strips

This H_i is a difference of two numbers as large as the scores, so it has their absolute error, unlike the strips' H_i. With a
column that is no key, rows are weighted by the share of the keys, and `with_null` completes the statistics.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.kernels.full_pattern_reference import (
    AttentionStatistics,
    Keys,
    Null,
    Queries,
    attention_reference,
    refuse_other,
    with_null,
)

__all__ = ["AttentionStatistics", "attention_form", "attention_reference", "attention_statistics"]

# (most rows, elements) of a strip of scores: near the L2 cache on a CPU, few large launches on other devices
_CPU_STRIP = 64, 2**18
_DEVICE_STRIP = 1024, 2**26
_MIN_ROWS = 64  # below this the matrix products lose more than the cache gains


@torch.no_grad()
def strip_statistics(
    q: Queries, k: Keys, v: Keys, *, scale: float | None = None, budget: int | None = None, null: Null = None
) -> tuple[Queries, AttentionStatistics]:
    """`attention_statistics` in strips, on any device and in any dtype.

    Sums run in float32 (float64 for float64 inputs), also under autocast. On a GPU the products follow
    `torch.set_float32_matmul_precision`. `budget`: elements in one of the two strips of scores, at least 64 rows of one head.
    """
    batch, length, heads, width = q.shape
    rows, n_batch, n_head = _sizes(q, budget)
    dtype = torch.promote_types(q.dtype, torch.float32)
    z = torch.empty_like(q, memory_format=torch.contiguous_format)
    received = torch.zeros(batch, heads, length, dtype=dtype, device=q.device)
    rowwise = torch.empty(4, batch, heads, length, dtype=dtype, device=q.device)
    # one allocation: small ones would be returned to the system, and page faults on new ones cost up to 3x
    strip, sequence = n_batch * n_head * rows * length, n_batch * n_head * length * width
    workspace = torch.empty(2 * strip + 3 * sequence, dtype=dtype, device=q.device)
    strips, copies = workspace[: 2 * strip].view(2, -1), workspace[2 * strip :].view(3, -1, length, width)
    # base-2 scores: exp2 is at least as fast as exp, and 4x faster if exp is not vectorised
    scale = (width**-0.5 if scale is None else scale) * math.log2(math.e)
    logits = None if null is None else (null.detach().to(dtype) * math.log2(math.e)).expand(batch, -1)

    with torch.autocast(q.device.type, enabled=False):
        for b in range(0, batch, n_batch):
            for h in range(0, heads, n_head):
                at = slice(b, b + n_batch), slice(h, h + n_head)
                out = z[at[0], :, at[1]].transpose(1, 2)
                n = out.shape[0] * out.shape[1]
                share = received[at].view(n, -1), rowwise[:, *at].view(4, n, -1)
                for x, copy in zip((q, k, v), copies, strict=True):
                    copy[:n].view(out.shape).copy_(heads_read(x[at[0]], at[1], heads).transpose(1, 2))
                column = None if logits is None else logits[at].reshape(n, 1, 1)
                _attend(copies[:, :n], scale, rows, strips, out, *share, column)
    top, total, first, dot = rowwise
    log_total = total.log2()
    statistics = AttentionStatistics(
        received=received,
        row_entropy=((log_total - dot / total) * math.log(2)).clamp_(min=0),
        row_max=1 / total,
        sink=first / total,
        lse=(top + log_total) * math.log(2),
    )
    return z, statistics if null is None else with_null(statistics, null.detach())


def _sizes(q: Tensor, budget: int | None = None) -> tuple[int, int, int]:
    """Return the rows of a strip, and the numbers of sequences and heads in it."""
    batch, length, heads, _ = q.shape
    most_rows, elements = _CPU_STRIP if q.device.type == "cpu" else _DEVICE_STRIP
    elements = elements if budget is None else budget
    # causal work wasted above the diagonal is rows / length
    rows = min(length, max(_MIN_ROWS, min(elements // length, most_rows, length // 16)))
    pairs = max(1, elements // (rows * length))  # of short sequences
    return rows, min(batch, max(1, pairs // heads)), min(heads, pairs)


def _attend(
    qkv: Float[Tensor, "three pair pos d_head"],
    scale: float,
    rows: int,
    strips: Float[Tensor, "two elements"],
    z: Float[Tensor, "batch head pos d_head"],
    received: Float[Tensor, "pair pos"],
    rowwise: Float[Tensor, "four pair pos"],
    null: Float[Tensor, "pair 1 1"] | None,
) -> None:
    """Fill z, received and (without the null column) rowwise: maximum, sum, first, entropy sum; base 2, unnormalised, by strips."""
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
        weight = (total if null is None else total + torch.exp2(null - top)).reciprocal()
        z[:, :, start:end] = torch.bmm(e, v[:, :end]).mul_(weight).view(*z.shape[:2], r, -1)
        received[:, :end] += torch.bmm(weight.mT, e).squeeze(1)
        for out, value in zip(rowwise, (top, total, e[:, :, :1], s.mul_(e).sum(-1, keepdim=True)), strict=True):
            out[:, start:end] = value.squeeze(-1)


@dataclass(frozen=True)
class Strip:
    """Scaled scores of some sequences, heads and queries with all keys up to the last query, until the next strip overwrites them."""

    sequences: slice
    heads: slice
    queries: slice
    scores: Float[Tensor, "pair query key"]  # pair: batch * head; masked ones are -inf


def score_strips(q: Queries, k: Keys, *, scale: float | None = None) -> Iterator[Strip]:
    """Yield every causal score once, a strip at a time, in float32 (float64 for float64 inputs)."""
    batch, length, heads, width = q.shape
    rows, n_batch, n_head = _sizes(q)
    dtype = torch.promote_types(q.dtype, torch.float32)
    strip = torch.empty(n_batch * n_head * rows * length, dtype=dtype, device=q.device)
    future = torch.full((rows, rows), -math.inf, dtype=dtype, device=q.device).triu_(1)
    for b, h in itertools.product(range(0, batch, n_batch), range(0, heads, n_head)):
        at = slice(b, min(b + n_batch, batch)), slice(h, min(h + n_head, heads))
        heads_of = (q[at[0], :, at[1]], heads_read(k[at[0]], at[1], heads))
        queries, keys = (x.transpose(1, 2).flatten(0, 1).to(dtype) for x in heads_of)
        for start in range(0, length, rows):
            end = min(start + rows, length)
            s = strip[: len(queries) * (end - start) * end].view(len(queries), end - start, end)
            with torch.autocast(q.device.type, enabled=False):
                alpha = width**-0.5 if scale is None else scale
                torch.baddbmm(s, queries[:, start:end], keys[:, :end].mT, beta=0, alpha=alpha, out=s)
            s[:, :, start:].add_(future[: end - start, : end - start])
            yield Strip(*at, slice(start, end), s)


def heads_read(x: Tensor, queries: slice, heads: int) -> Tensor:
    """Select the heads of x [batch, pos, kv_head, d_head] that a slice of the query heads reads."""
    if x.shape[2] == heads:
        return x[:, :, queries]
    return x[:, :, torch.arange(heads, device=x.device)[queries] * x.shape[2] // heads]


_CALLS = {"cpu": "_scaled_dot_product_flash_attention_for_cpu", "cuda": "_scaled_dot_product_flash_attention"}
_SPARE = 8  # flash attention on a GPU takes multiples of 8 channels
_MAX_WIDTH = 256  # channels of a head on a GPU
_PARTS = 3  # 16-bit parts of a float32 number
_UNIT = 64.0  # the parts are multiples of this, so that float16 reaches 4e6


def runs_fused(device: torch.device, dtype: torch.dtype, d_head: int) -> bool:
    """Return whether `fused_statistics` can run: PyTorch has the call, and on a GPU the hardware, type and width fit."""
    if not hasattr(torch.ops.aten, _CALLS.get(device.type, "no call")):
        return False
    if device.type == "cpu":
        return True
    return (
        torch.version.hip is None
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and dtype in (torch.bfloat16, torch.float16)
        and _padded(d_head) <= _MAX_WIDTH
    )


def _padded(d_head: int) -> int:
    return -(-(d_head + _PARTS) // _SPARE) * _SPARE


@torch.no_grad()
def fused_statistics(
    q: Queries, k: Keys, v: Keys, *, scale: float | None = None, row_max: bool = True, null: Null = None
) -> tuple[Queries, AttentionStatistics]:
    """`attention_statistics` in fused calls; raises `WorkbenchError` if `runs_fused` is false or the scale is not above 0."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if scale <= 0 or not runs_fused(q.device, q.dtype, q.shape[-1]):
        kind = f"scale {scale}, {q.dtype}, width {q.shape[-1]} on {q.device}"
        raise WorkbenchError(f"no fused call for {kind}; use strips")
    z, received, row_entropy, sink, lse = fused_but_maximum(q, k, v, scale=scale, null=null)
    top = None
    if row_max:
        top = torch.empty_like(lse)
        for strip in score_strips(q, k, scale=scale):
            rows = top[strip.sequences, strip.heads, strip.queries]
            rows.copy_(strip.scores.amax(-1).view(rows.shape))
        top = top.sub_(lse).exp_().clamp_(max=1)
    statistics = AttentionStatistics(received=received, row_entropy=row_entropy, row_max=top, sink=sink, lse=lse)
    return z, statistics if null is None else with_null(statistics, null)


def fused_but_maximum(
    q: Queries, k: Keys, v: Keys, *, scale: float, null: Null = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Make the three calls: returns output and received, and row entropy, sink and lse without the null column."""
    heads = q.shape[2]
    q, k, v = (x.repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2) for x in (q, k, v))
    z, lse = _call(q, k, v, scale)
    mean_key, _ = _call(q, k, k, scale)
    wide, first = q.to(lse.dtype), k[:, :, :1].to(lse.dtype)
    entropy = lse - scale * (wide * mean_key).sum(-1)
    sink = (scale * (wide * first).sum(-1) - lse).exp()
    with_column = lse
    if null is not None:
        with_column = torch.logaddexp(lse, null.to(lse)[:, None])
        z = z * (lse - with_column).exp().to(z.dtype)[..., None]
    # received: in reverse order every key is a query over the rows that see it, with -lse in spare channels
    width = q.shape[-1]
    columns, rows = (x.new_zeros(*x.shape[:-1], _padded(width)) for x in (k, q))
    columns[..., :width], rows[..., :width] = k.flip(2), q.flip(2)
    columns[..., width : width + _PARTS] = _UNIT
    rest = with_column.flip(-1) / (-scale * _UNIT)
    for channel in range(width, width + _PARTS):
        rows[..., channel] = rest
        rest = rest - rows[..., channel]
    received = _call(columns, rows, rows, scale)[1].flip(-1).exp()  # with values of another width the call is not fused
    return z.transpose(1, 2), received, entropy.clamp_(min=0), sink, lse


def _call(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return output and lse [batch, head, pos] of causal attention of [batch, head, pos, d_head] with as many key as query heads."""
    width = q.shape[-1]
    if missing := -width % _SPARE:
        q, k, v = (torch.nn.functional.pad(x, (0, missing)) for x in (q, k, v))
    call: Callable[..., tuple[Tensor, ...]] = getattr(torch.ops.aten, _CALLS[q.device.type])
    z, lse = call(q, k, v, is_causal=True, scale=scale)[:2]
    return z[..., :width], lse[..., : q.shape[2]]


def attention_form(device: torch.device, dtype: torch.dtype, d_head: int) -> str:
    """Return the form of `attention_statistics` for inputs of this kind at a scale above 0: `strips` or `fused`."""
    return "fused" if device.type == "cuda" and dtype.itemsize == 2 and runs_fused(device, dtype, d_head) else "strips"


@torch.no_grad()
def attention_statistics(
    q: Queries, k: Keys, v: Keys, *, scale: float | None = None, budget: int | None = None, row_max: bool = True,
    null: Null = None,
) -> tuple[Queries, AttentionStatistics]:  # fmt: skip
    """Compute causal attention output (dtype of q) and its statistics, without gradients.

    q and k are rotated. Query head h reads kv head h * kv_heads // heads. Statistics are float32 (float64 for float64 inputs), also
    under autocast. `scale`: factor on q . k, 1 / sqrt(d_head) by default. `budget`: elements in one strip of scores; if given, strips
    are used. `row_max`: fused calls need another pass for it. `null`: logits of one more column of the softmax, which is no key.
    """
    refuse_other(q, k, v, null)
    fused = attention_form(q.device, q.dtype, q.shape[-1]) == "fused"
    if fused and budget is None and (scale is None or scale > 0):  # fused calls mask before they scale
        return fused_statistics(q, k, v, scale=scale, row_max=row_max, null=null)
    return strip_statistics(q, k, v, scale=scale, budget=budget, null=null)
