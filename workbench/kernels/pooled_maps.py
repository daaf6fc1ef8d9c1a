"""Pooled pictures and exact windows of a causal attention pattern, without the T x T pattern.

Buckets are runs of neighbouring positions of nearly equal length: with T positions and B buckets, bucket b holds positions
floor(b T / B) to floor((b + 1) T / B) - 1. Sequences shorter than B have one bucket per position. All functions run in strips
of queries, with memory O(T) in addition to the result.
"""

from __future__ import annotations

from bisect import bisect_right

import torch
from jaxtyping import Float
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.kernels.attention_and_its_statistics import heads_read, score_strips
from workbench.kernels.full_pattern_reference import Keys, Queries, refuse_other

BUCKETS = 64
Rows = Float[Tensor, "batch head pos"]  # a number for each row of the pattern


def bucket_edges(length: int, buckets: int) -> list[int]:
    """Return the first position of every bucket, then the length: min(buckets, length) + 1 increasing numbers from 0."""
    if buckets < 1 or length < 1:
        raise WorkbenchError(f"{buckets} buckets of {length} positions: each must be at least 1")
    count = min(buckets, length)
    return [b * length // count for b in range(count + 1)]


def pooled_attention(
    q: Queries, k: Keys, lse: Rows | None = None, *, scale: float | None = None,
    buckets: int | tuple[int, int] = BUCKETS,
) -> Float[Tensor, "batch head query_bucket key_bucket"]:  # fmt: skip
    """Compute the mean over a bucket's queries of the attention to all keys of a bucket; rows sum to 1.

    The result is a mass. For the mean weight divide by the number of keys in a bucket. Future buckets are exactly 0. Float32, or
    float64 for float64 inputs. `lse`: log-sum-exp of rows whose softmax has a column that is no key, which sum to less than 1.
    `buckets`: of both axes, or of (queries, keys); `bucket_edges` returns their positions.
    """
    return _pooled(q, k, lse, scale, buckets, largest=False)


def pooled_maximum(
    q: Queries, k: Keys, lse: Rows | None = None, *, scale: float | None = None,
    buckets: int | tuple[int, int] = BUCKETS,
) -> Float[Tensor, "batch head query_bucket key_bucket"]:  # fmt: skip
    """Compute the largest attention weight of a bucket's queries on a bucket's keys, which shows single strong weights.

    Arguments as in `pooled_attention`. Future buckets are exactly 0.
    """
    return _pooled(q, k, lse, scale, buckets, largest=True)


@torch.no_grad()
def _pooled(
    q: Tensor, k: Tensor, lse: Tensor | None, scale: float | None, buckets: int | tuple[int, int], *, largest: bool
) -> Tensor:
    refuse_other(q, k, k)
    batch, length, heads, _ = q.shape
    rows, columns = (bucket_edges(length, c) for c in ((buckets, buckets) if isinstance(buckets, int) else buckets))
    key_bucket = torch.arange(len(columns) - 1).repeat_interleave(torch.tensor(columns).diff()).to(q.device)
    shape = batch, heads, len(rows) - 1, len(columns) - 1
    picture = torch.zeros(shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    for strip in score_strips(q, k, scale=scale):
        if lse is None:
            strip.scores.sub_(strip.scores.amax(-1, keepdim=True)).exp_()
            weight = strip.scores.sum(-1, keepdim=True).reciprocal_()  # [pair, query, 1]: turns rows into attention
        else:
            row_lse = lse[strip.sequences, strip.heads, strip.queries].reshape(len(strip.scores), -1, 1)
            strip.scores.sub_(row_lse).exp_()
            weight = torch.ones_like(row_lse)
        start, end = strip.queries.start, strip.queries.stop
        buckets_of_keys, bucket = key_bucket[:end], bisect_right(rows, start) - 1
        if largest:
            strip.scores.mul_(weight)
        while rows[bucket] < end:
            inside = slice(max(rows[bucket] - start, 0), min(rows[bucket + 1], end) - start)
            # a strip has all heads of several sequences, or some of one: a view either way
            cells = picture[strip.sequences, strip.heads, bucket].view(-1, picture.shape[-1])
            if largest:
                most = strip.scores[:, inside].amax(1)
                cells.scatter_reduce_(1, buckets_of_keys.expand(len(cells), -1), most, "amax")
            else:
                sent = weight[:, inside].mT @ strip.scores[:, inside]
                cells.index_add_(1, buckets_of_keys, sent.squeeze(1))
            bucket += 1
    return picture if largest else picture.div_(torch.tensor(rows, device=q.device).diff()[:, None])


@torch.no_grad()
def attention_window(
    q: Queries, k: Keys, lse: Rows, queries: slice, keys: slice, *, scale: float | None = None
) -> Float[Tensor, "batch head query key"]:
    """Compute exact pattern entries A_ij = exp(s_ij - lse_i) of a window of queries and keys; future keys are 0.

    Memory and time grow with the window alone. `lse` comes from `attention_statistics` with the same q, k and scale. Slices may
    have steps. Raises `WorkbenchError` for an empty window.
    """
    refuse_other(q, k, k)
    length, heads, width = q.shape[1:]
    places = torch.arange(length, device=q.device)
    rows, columns = (places[range(length)[wanted]] for wanted in (queries, keys))
    if not len(rows) or not len(columns):
        raise WorkbenchError(f"a window of {queries} and {keys} has nothing in it; there are {length} positions")
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys_of_heads = heads_read(k[:, columns], slice(None), heads)
    with torch.autocast(q.device.type, enabled=False):
        scores = torch.einsum("bihd,bjhd->bhij", q[:, rows].to(dtype), keys_of_heads.to(dtype))
    scores.mul_(width**-0.5 if scale is None else scale).sub_(lse[..., rows, None])
    return scores.exp_().masked_fill_(columns > rows[:, None], 0)
