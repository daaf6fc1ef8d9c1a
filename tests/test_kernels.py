"""Streamed attention statistics equal the plain reference, in O(T) memory, at any shape, type, scale and strip."""

from __future__ import annotations

import math

import pytest
import torch
from jaxtyping import TypeCheckError
from kernel_inputs import NAMES, LargestTensor, close, draw, truth

from workbench.errors import WorkbenchError
from workbench.kernels import attention_reference, attention_statistics

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "batch", "width"),
    [
        (1, 1, 1, 1, 64), (7, 4, 2, 1, 64), (63, 1, 1, 3, 20),
        (65, 4, 2, 3, 4),
    ],
)  # fmt: skip
def test_equals_the_reference(length, heads, kv_heads, batch, width):
    """At one position, and at and around the ends of a strip, with every grouping of heads."""
    q, k, v = draw(length, heads, kv_heads, width, batch)
    close(attention_statistics(q, k, v), truth(q, k, v))
    q, k, v = (x.double() for x in (q, k, v))
    found = attention_statistics(q, k, v)
    assert found[1].row_entropy.dtype == found[0].dtype == torch.float64
    close(found, truth(q, k, v), atol=1e-12, rtol=1e-12)


def test_reference_by_hand():
    """Two positions, scores ln 3 and 0: the second row attends 3/4 and 1/4."""
    q = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1)
    k = torch.tensor([math.log(3), 0.0]).view(1, 2, 1, 1)
    v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
    entropy = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    expected = {
        "received": [1.75, 0.25],
        "row_entropy": [0, entropy],
        "row_max": [1, 0.75],
        "sink": [1, 0.75],
        "lse": [0, math.log(4)],
    }
    reference, streamed = attention_reference(q, k, v), attention_statistics(q, k, v)
    torch.testing.assert_close(reference[1][0, 0], torch.tensor([[1, 0], [0.75, 0.25]]))
    for z, statistics in (reference[::2], streamed):
        assert z.flatten().tolist() == pytest.approx([4, 5])
        assert {name: getattr(statistics, name).flatten().tolist() for name in NAMES} == {
            name: pytest.approx(values, abs=1e-6) for name, values in expected.items()
        }


@pytest.mark.parametrize("gain", [8.0, 20.0])
def test_large_scores(gain):
    q, k, v = draw(300, width=64, gain=gain)
    found = attention_statistics(q, k, v)
    true = truth(q, k, v)
    assert true[1].lse.max() > 25
    assert found[1].row_entropy.min() >= 0
    # the scores themselves are known to 1e-7 of their size, here up to 100
    close(found, true, atol=1e-5 * gain / 4, rtol=1e-5)
    torch.testing.assert_close(found[1].row_entropy.double(), true[1].row_entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1].received.sum(-1), torch.full((1, 2), 300.0), atol=0, rtol=1e-5)


def test_scores_far_from_zero():
    """A common offset of +-1000 in a row changes its lse and nothing else."""
    q, k, v = draw(130, width=8, dtype=torch.float64)
    _, plain = attention_statistics(q, k, v)
    for offset in (1000.0, -1000.0):
        shifted = [torch.cat([x, torch.full_like(x[..., :1], c)], -1) for x, c in ((q, offset), (k, 1.0), (v, 0.0))]
        _, statistics = attention_statistics(*shifted, scale=8**-0.5)
        for name in NAMES:
            expected = plain.lse + offset * 8**-0.5 if name == "lse" else getattr(plain, name)
            torch.testing.assert_close(getattr(statistics, name), expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_eager(dtype):
    q, k, v = draw(257, heads=4, kv_heads=2, width=32, dtype=dtype)
    z, mine = attention_statistics(q, k, v)
    assert z.dtype == dtype
    assert mine.row_entropy.dtype == torch.float32
    true_z, true = truth(q, k, v)
    repeated = k.repeat_interleave(2, dim=2)
    scores = (q.transpose(1, 2) @ repeated.permute(0, 2, 3, 1)) * 32**-0.5
    pattern = (
        scores.masked_fill(torch.ones(257, 257).triu(1).bool(), -math.inf).softmax(-1, dtype=torch.float32).to(dtype)
    )
    eager_z = (pattern @ v.repeat_interleave(2, dim=2).transpose(1, 2)).transpose(1, 2)
    eager = {
        "received": pattern.float().sum(-2),
        "row_entropy": torch.special.entr(pattern.float()).sum(-1),
        "row_max": pattern.float().amax(-1),
        "sink": pattern[..., 0].float(),
    }
    for name, values in eager.items():
        worst = (values - getattr(true, name)).abs().max()
        assert (getattr(mine, name) - getattr(true, name)).abs().max() <= worst
    assert (z - true_z).abs().max() <= (eager_z - true_z).abs().max()


@pytest.mark.parametrize("budget", [1, 2**14, 2**16, 2**17, 2**30])
def test_strips_do_not_matter(budget):
    q, k, v = draw(200, heads=6, kv_heads=3, batch=3)
    close(attention_statistics(q, k, v, budget=budget), attention_statistics(q, k, v), atol=1e-6, rtol=1e-6)


def test_inputs_may_be_strided_and_are_not_touched():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw(90, heads=4, batch=2))
    wide = torch.stack([q, k, v], -1)
    copies = wide.clone()
    close(attention_statistics(*wide.unbind(-1)), attention_statistics(q, k, v), atol=1e-6, rtol=1e-6)
    assert torch.equal(wide, copies)
    single = draw(5, heads=1)
    kept = [x.clone() for x in single]
    attention_statistics(*single)
    assert all(map(torch.equal, single, kept))


@pytest.mark.parametrize("scale", [0.7, 0.0, -0.7])
def test_scale_may_be_given(scale):
    q, k, v = draw(40)
    close(attention_statistics(q, k, v, scale=scale), truth(q, k, v, scale=scale))


def test_carries_no_gradient_and_ignores_autocast():
    q, k, v = (x.requires_grad_() for x in draw(80))
    plain = attention_statistics(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close(attention_statistics(q, k, v), plain, atol=0, rtol=0)
    assert not plain[0].requires_grad
    assert not any(getattr(plain[1], name).requires_grad for name in NAMES)


@pytest.mark.parametrize(
    "shapes",
    [
        [(1, 4, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8)],
        [(1, 4, 3, 8), (1, 4, 2, 8), (1, 4, 2, 8)],
        [(1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 1, 8)],
        [(1, 0, 2, 8)] * 3,
        [(4, 2, 8)] * 3,
    ],
)
@pytest.mark.parametrize("function", [attention_statistics, attention_reference])
def test_other_shapes_are_refused(shapes, function):
    # where the annotations are checked too, they refuse first
    with pytest.raises((WorkbenchError, TypeCheckError), match=r"got q \(|Type-check error"):
        function(*(torch.zeros(shape) for shape in shapes))


def test_mixed_types_are_refused():
    q, k, v = draw(4)
    with pytest.raises(WorkbenchError, match="share one floating dtype"):
        attention_statistics(q, k.double(), v)


def test_no_tensor_has_the_size_of_the_pattern():
    q, k, v = draw(4096, heads=2, width=8)
    with LargestTensor() as largest:
        attention_statistics(q, k, v)
    assert 0 < largest.numel < 4096**2 / 8
    with LargestTensor() as largest:
        attention_reference(*(x[:, :256] for x in (q, k, v)))
    assert largest.numel >= 256**2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_equals_the_reference(dtype):
    q, k, v = draw(1500, heads=4, kv_heads=2, width=64, batch=2, dtype=dtype, device="cuda")
    z, statistics = attention_statistics(q, k, v)
    true_z, true = truth(q, k, v)
    close((z, statistics), (true_z.to(dtype), true), atol=2e-2 if dtype == torch.bfloat16 else 1e-4, rtol=1e-4)
