"""Pooled pictures and exact windows of a causal attention pattern, without the T x T pattern.

Buckets are runs of neighbouring positions of nearly equal length: with T positions and B buckets, bucket b holds positions
floor(b T / B) to floor((b + 1) T / B) - 1. Sequences shorter than B have one bucket per position. All functions run in strips
of queries, with memory O(T) in addition to the result.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.kernels.reference import Keys, Queries, refuse_other
from workbench.kernels.strips import Strip, heads_read, score_strips

BUCKETS = 64
Rows = Float[Tensor, "batch head pos"]  # a number for each row of the pattern


def bucket_edges(length: int, buckets: int) -> list[int]:
    """Return the first position of every bucket, then the length: min(buckets, length) + 1 increasing numbers from 0."""
    if buckets < 1 or length < 1:
        raise WorkbenchError(f"{buckets} buckets of {length} positions: each must be at least 1")
    count = min(buckets, length)
    return [b * length // count for b in range(count + 1)]


@torch.no_grad()
def pooled_attention(
    q: Queries, k: Keys, lse: Rows | None = None, *, scale: float | None = None,
    buckets: int | tuple[int, int] = BUCKETS,
) -> Float[Tensor, "batch head query_bucket key_bucket"]:  # fmt: skip
    """Compute the mean over a bucket's queries of the attention to all keys of a bucket; rows sum to 1.

    The result is a mass. For the mean weight divide by the number of keys in a bucket. Future buckets are exactly 0. Float32, or
    float64 for float64 inputs.

    Args:
        q: Queries after rotary embedding.
        k: Keys after rotary embedding; query head h reads kv head h * kv_heads // heads.
        lse: Log-sum-exp of rows whose softmax has a column that is no key; they sum to less than 1.
        scale: Factor on q . k; 1 / sqrt(d_head) by default.
        buckets: Number of buckets, of both or of (queries, keys); `bucket_edges` returns their positions.
    """
    picture, rows, key_bucket = _empty(q, k, buckets)
    for strip in score_strips(q, k, scale=scale):
        weight = _exponentiate(strip, lse)
        for inside, cells in _tiles(strip, rows, picture):
            sent = weight[:, inside].mT @ strip.scores[:, inside]
            cells.index_add_(1, key_bucket[: strip.queries.stop], sent.squeeze(1))
    return picture.div_(torch.tensor(rows, device=q.device).diff()[:, None])


@torch.no_grad()
def pooled_maximum(
    q: Queries, k: Keys, lse: Rows | None = None, *, scale: float | None = None,
    buckets: int | tuple[int, int] = BUCKETS,
) -> Float[Tensor, "batch head query_bucket key_bucket"]:  # fmt: skip
    """Compute the largest attention weight of a bucket's queries on a bucket's keys, which shows single strong weights.

    Arguments as in `pooled_attention`. Future buckets are exactly 0.
    """
    picture, rows, key_bucket = _empty(q, k, buckets)
    for strip in score_strips(q, k, scale=scale):
        weight = _exponentiate(strip, lse)
        pattern = strip.scores.mul_(weight)
        for inside, cells in _tiles(strip, rows, picture):
            where = key_bucket[: strip.queries.stop].expand(len(cells), -1)
            cells.scatter_reduce_(1, where, pattern[:, inside].amax(1), "amax")
    return picture


@torch.no_grad()
def attention_window(
    q: Queries,
    k: Keys,
    lse: Rows,
    queries: slice,
    keys: slice,
    *,
    scale: float | None = None,
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


def _empty(q: Tensor, k: Tensor, buckets: int | tuple[int, int]) -> tuple[Tensor, list[int], Tensor]:
    """Return an empty picture, the first positions of its query buckets, and the bucket of every key."""
    refuse_other(q, k, k)
    batch, length, heads, _ = q.shape
    rows, columns = (bucket_edges(length, c) for c in ((buckets, buckets) if isinstance(buckets, int) else buckets))
    key_bucket = torch.arange(len(columns) - 1).repeat_interleave(torch.tensor(columns).diff()).to(q.device)
    dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.zeros(batch, heads, len(rows) - 1, len(columns) - 1, dtype=dtype, device=q.device), rows, key_bucket


def _exponentiate(strip: Strip, lse: Tensor | None) -> Tensor:
    """Replace scores by exp(s - row maximum, or lse); returns the factors [pair, query, 1] that turn rows into attention."""
    if lse is not None:
        rows = lse[strip.sequences, strip.heads, strip.queries].reshape(len(strip.scores), -1, 1)
        strip.scores.sub_(rows).exp_()
        return torch.ones_like(rows)
    strip.scores.sub_(strip.scores.amax(-1, keepdim=True)).exp_()
    return strip.scores.sum(-1, keepdim=True).reciprocal_()


def _tiles(strip: Strip, rows: list[int], picture: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the queries of a strip in one bucket, and that bucket's row of the picture [pair, key_bucket]."""
    start, end = strip.queries.start, strip.queries.stop
    bucket = bisect_right(rows, start) - 1
    while rows[bucket] < end:
        inside = slice(max(rows[bucket] - start, 0), min(rows[bucket + 1], end) - start)
        # a strip has all heads of several sequences, or some of one: a view either way
        yield inside, picture[strip.sequences, strip.heads, bucket].view(-1, picture.shape[-1])
        bucket += 1
