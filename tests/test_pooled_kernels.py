"""Pictures of an attention pattern: pooled overviews and exact windows, without the pattern."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from kernel_inputs import LargestTensor, draw

from workbench.errors import WorkbenchError
from workbench.kernels import (
    attention_reference,
    attention_statistics,
    attention_window,
    bucket_edges,
    pooled_attention,
    pooled_maximum,
)

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


def test_buckets_are_even_and_never_empty():
    assert bucket_edges(10, 4) == [0, 2, 5, 7, 10]
    assert bucket_edges(3, 64) == [0, 1, 2, 3]
    assert bucket_edges(8, 1) == [0, 8]
    for count, length in ((0, 5), (4, 0)):
        with pytest.raises(WorkbenchError, match="at least 1"):
            bucket_edges(length, count)


def test_pooled_attention_by_hand():
    """Uniform causal attention of four positions, rows 1; 1/2 1/2; 1/3 ...; 1/4 ..., in two buckets."""
    _, k, _ = draw(4, heads=1)
    mean = pooled_attention(torch.zeros_like(k), k, buckets=2)
    assert mean.flatten().tolist() == pytest.approx([1, 0, (2 / 3 + 2 / 4) / 2, (1 / 3 + 2 / 4) / 2])
    largest = pooled_maximum(torch.zeros_like(k), k, buckets=2)
    assert largest.flatten().tolist() == pytest.approx([1, 0, 1 / 3, 1 / 3])
    rows = pooled_attention(torch.zeros_like(k), k, buckets=(4, 1))
    assert rows.flatten().tolist() == pytest.approx([1] * 4)
    whole = pooled_attention(torch.zeros_like(k), k)  # fewer positions than buckets: the pattern itself
    torch.testing.assert_close(whole[0, 0], torch.ones(4, 4).tril() / torch.arange(1, 5)[:, None])


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "batch", "buckets"),
    [
        (2, 1, 1, 1, (5, 7)), (65, 4, 2, 3, (5, 7)), (300, 4, 2, 3, (5, 7)), (1025, 1, 1, 1, (1, 16)),
    ],
)  # fmt: skip
def test_pooled_attention_equals_the_pooled_pattern(length, heads, kv_heads, batch, buckets):
    q, k, v = draw(length, heads, kv_heads, batch=batch, gain=2.0)
    _, pattern, _ = attention_reference(q.double(), k.double(), v.double())
    rows, columns = (bucket_edges(length, b) for b in ((buckets, buckets) if isinstance(buckets, int) else buckets))
    tiles = [[pattern[:, :, a:b, c:d] for c, d in pairwise(columns)] for a, b in pairwise(rows)]
    mean = torch.stack([torch.stack([x.sum(-1).mean(-1) for x in row], -1) for row in tiles], -2)
    largest = torch.stack([torch.stack([x.amax((-1, -2)) for x in row], -1) for row in tiles], -2)
    found = pooled_attention(q, k, buckets=buckets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), mean, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]))
    torch.testing.assert_close(pooled_maximum(q, k, buckets=buckets).double(), largest, atol=1e-6, rtol=1e-5)
    scaled = pooled_attention(q.double(), k.double(), scale=q.shape[-1] ** -0.5, buckets=buckets)
    torch.testing.assert_close(scaled, mean, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("queries", "keys"), [(slice(0, 9), slice(0, 9)), (slice(-30, None), slice(40, 50))])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_window_is_part_of_the_pattern(queries, keys, kv_heads):
    q, k, v = draw(120, 4, kv_heads, batch=2)
    _, pattern, _ = attention_reference(q.double(), k.double(), v.double())
    lse = attention_statistics(q, k, v)[1].lse
    found = attention_window(q, k, lse, queries, keys)
    torch.testing.assert_close(found.double(), pattern[:, :, queries, keys], atol=1e-6, rtol=1e-5)
    steps = attention_window(q, k, lse, slice(3, None, 7), slice(None, None, 5))
    torch.testing.assert_close(steps.double(), pattern[:, :, 3::7, ::5], atol=1e-6, rtol=1e-5)
    assert (steps[:, :, 0, 1:] == 0).all(), "keys after the query"
    with pytest.raises(WorkbenchError, match="nothing in it; there are 120 positions"):
        attention_window(q, k, lse, queries, slice(120, None))


@pytest.mark.parametrize("picture", [pooled_attention, pooled_maximum, attention_window])
def test_pictures_of_no_one_attention_are_refused(picture):
    """Three query heads on two of keys; no head at all."""
    for heads in ((3, 2), (0, 0)):
        q, k = (torch.zeros(1, 4, h, 8) for h in heads)
        more = [torch.zeros(1, heads[0], 4), slice(0, 2), slice(0, 2)] if picture is attention_window else []
        with pytest.raises(WorkbenchError, match=r"got q \("):
            picture(q, k, *more)


def test_pictures_form_no_pattern():
    q, k, v = draw(4096, heads=2, width=8)
    lse = attention_statistics(q, k, v)[1].lse
    for picture in (pooled_attention, pooled_maximum):
        with LargestTensor() as largest:
            picture(q, k)
        assert 0 < largest.numel < 4096**2 / 8
    with LargestTensor() as largest:
        attention_window(q, k, lse, slice(4000, None), slice(0, 64))
    assert largest.numel <= 4096 * 2 * 8, "no more than the inputs and the window"
