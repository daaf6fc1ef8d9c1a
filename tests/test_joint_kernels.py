"""Attention over several key sets, or of several softmaxes: equal to the pattern written out, in bounded memory."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_inputs import NAMES, LargestTensor

from workbench.kernels.joint_and_null_softmax import STRIP, Softmax, joint_attention, joint_statistics

BATCH, HEADS, WIDTH = 2, 4, 6


def drawn(length, past=0, sets=1, kv_heads=2, values=WIDTH, seed=0, width=WIDTH):
    """Queries, key sets and their values in float64."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.double)

    keys = [random(BATCH, past + length, kv_heads, width) for _ in range(sets)]
    return random(BATCH, length, HEADS, width), keys, [random(BATCH, past + length, kv_heads, values) for _ in keys]


def written_out(q, keys):
    """Scores and pattern [batch, head, query, set, pos] of one softmax over all sets, one query at a time."""
    batch, length, heads, width = q.shape
    positions = keys[0].shape[1]
    scores = torch.full((batch, heads, length, len(keys), positions), -math.inf, dtype=torch.double)
    for s, k in enumerate(keys):
        for h in range(heads):
            for i in range(length):
                seen = positions - length + i + 1
                k_h = k[:, :seen, h * k.shape[2] // heads]
                scores[:, h, i, s, :seen] = (q[:, i, None, h] * k_h).sum(-1) / math.sqrt(width)
    return scores, scores.flatten(-2).softmax(-1).view_as(scores)


def summed(pattern, values):
    repeated = torch.stack([v.repeat_interleave(HEADS // v.shape[2], dim=2) for v in values], 1)
    return torch.einsum("bhqsk,bskhd->bqhd", pattern, repeated)


@pytest.mark.parametrize(
    ("length", "past", "sets", "kv_heads", "width"),
    [(7, 0, 3, 4, 3), (1, 5, 2, 1, 6), (3, 5, 1, 2, 3), (STRIP + 2, 0, 2, 2, 6), (STRIP + 1, 4, 1, 4, 6)],
)
def test_output_and_statistics_are_those_of_the_pattern_written_out(length, past, sets, kv_heads, width):
    q, keys, values = drawn(length, past, sets, kv_heads, width)
    scores, pattern = written_out(q, keys)
    expected = summed(pattern, values)
    torch.testing.assert_close(joint_attention([Softmax(1.0, q, keys)], values), expected, atol=1e-12, rtol=1e-10)
    found = joint_statistics([Softmax(1.0, q, keys)])
    keys = pattern.sum(-2)
    true = {
        "received": pattern.sum((2, 3)),
        "row_entropy": -torch.xlogy(keys, keys).sum(-1),
        "row_max": keys.amax(-1),
        "sink": pattern[..., 0].sum(-1),
        "lse": scores.flatten(-2).logsumexp(-1),
    }
    assert true.keys() == set(NAMES)
    for name, value in true.items():
        torch.testing.assert_close(
            getattr(found, name), value, atol=1e-12, rtol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_softmaxes_are_summed_with_their_weights_and_the_last_ones_lse_is_told():
    """0.25 of one pattern and -2 of another: whole and statistics, also where a strip ends."""
    q, keys, values = drawn(STRIP + 3)
    other, others, _ = drawn(STRIP + 3, seed=1)
    softmaxes = [Softmax(0.25, q, keys), Softmax(torch.tensor(2.0, dtype=torch.double), other, others)]
    (_, first), (scores, second) = written_out(q, keys), written_out(other, others)
    pattern = 0.25 * first + 2.0 * second
    torch.testing.assert_close(joint_attention(softmaxes, values), summed(pattern, values), atol=1e-12, rtol=1e-10)
    found = joint_statistics(softmaxes)
    torch.testing.assert_close(found.received, pattern.sum((2, 3)), atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(found.row_max, pattern.sum(-2).amax(-1), atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(found.lse, scores.flatten(-2).logsumexp(-1), atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_statistics_of_narrow_types_are_summed_in_float32(dtype):
    q, keys, _ = drawn(40)
    q, keys = q.to(dtype), [k.to(dtype) for k in keys]
    found = joint_statistics([Softmax(1.0, q, keys)])
    pattern = written_out(q.double(), [k.double() for k in keys])[1]
    assert found.received.dtype == found.lse.dtype == torch.float32
    torch.testing.assert_close(found.received.double(), pattern.sum((2, 3)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("sets", "past", "width"), [(2, 0, 4), (1, 100, 4), (1, 0, 2)])
def test_no_tensor_has_the_size_of_the_pattern(sets, past, width):
    """Key sets, a cached past, and values narrower than the keys: by fused calls, some queries at a time."""
    q, keys, values = drawn(500, past, sets, kv_heads=4, values=width, width=4)
    with LargestTensor() as largest:
        joint_attention([Softmax(1.0, q, keys)], values)
    assert 0 < largest.numel <= sets * (500 + past) * STRIP
    with LargestTensor() as largest:
        joint_statistics([Softmax(1.0, q, keys)])
    assert 0 < largest.numel <= 2 * BATCH * HEADS * sets * (500 + past) * STRIP  # at most two strips at once
