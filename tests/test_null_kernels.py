"""A softmax with one more column that is no key: streamed, fused and pooled equal the pattern written out, gradients too."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_inputs import LargestTensor, close, draw

from workbench.errors import WorkbenchError
from workbench.kernels import (
    attention_reference,
    attention_statistics,
    attention_window,
    pooled_attention,
    pooled_maximum,
)
from workbench.kernels.attention_and_its_statistics import fused_statistics, runs_fused
from workbench.kernels.joint_and_null_softmax import (
    STRIP,
    Softmax,
    attend_with_a_key,
    joint_attention,
    joint_statistics,
)

LOGITS = torch.tensor([0.3, -2.0, 9.0, -30.0], dtype=torch.float64)
FORMS = [attention_statistics, fused_statistics]
needs_call = pytest.mark.skipif(
    not runs_fused(torch.device("cpu"), torch.float32, 8),
    reason="this PyTorch has no fused attention that tells the lse",
)


def test_one_more_column_by_hand():
    """Scores ln 3 and 0 and a logit of ln 4: the rows are 3, 4 of 7 and 3, 1, 4 of 8."""
    q = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1)
    k = torch.tensor([math.log(3), 0.0]).view(1, 2, 1, 1)
    v, logit = torch.tensor([8.0, 16.0]).view(1, 2, 1, 1), torch.tensor([math.log(4)])
    first, second = (1 / 5, 4 / 5), (3 / 8, 1 / 8, 4 / 8)  # the first query has score 0 with its own key
    for z, found in (attention_reference(q, k, v, null=logit)[::2], attention_statistics(q, k, v, null=logit)):
        assert z.flatten().tolist() == pytest.approx([8 / 5, 8 * 3 / 8 + 16 / 8])
        assert found.null.flatten().tolist() == pytest.approx([4 / 5, 1 / 2])
        assert found.received.flatten().tolist() == pytest.approx([1 / 5 + 3 / 8, 1 / 8])
        assert found.lse.flatten().tolist() == pytest.approx([math.log(5), math.log(8)])
        entropy = [-sum(p * math.log(p) for p in row) for row in (first, second)]
        assert found.row_entropy.flatten().tolist() == pytest.approx(entropy)


@needs_call
@pytest.mark.usefixtures("fresh_memory_is_nan")
@pytest.mark.parametrize("length", [1, 65, 257])
def test_every_form_equals_the_reference(length):
    q, k, v = draw(length, heads=4, kv_heads=2, width=20, batch=2, gain=3.0, dtype=torch.float64)
    z, pattern, true = attention_reference(q, k, v, null=LOGITS)
    softmaxes = [Softmax(1.0, q, [k], LOGITS)]
    found = [form(q, k, v, null=LOGITS) for form in FORMS]
    found.append((joint_attention(softmaxes, [v]), joint_statistics(softmaxes)))
    if length > STRIP:  # one sum of two halves takes the plain strips
        halves = [Softmax(0.5, q, [k], LOGITS)] * 2
        found.append((joint_attention(halves, [v]), joint_statistics(halves)))
    for one in found:
        close(one, (z, true), atol=1e-11, rtol=1e-9)
    torch.testing.assert_close(pattern.sum(-1) + true.null, torch.ones_like(true.null))
    picture = pooled_attention(q, k, true.lse, buckets=(length, length))
    torch.testing.assert_close(picture, pattern, atol=1e-12, rtol=1e-9)
    largest = pooled_maximum(q, k, true.lse, buckets=1)[..., 0, 0]
    torch.testing.assert_close(largest, pattern.amax((-1, -2)), atol=1e-12, rtol=1e-9)
    window = attention_window(q, k, true.lse, slice(0, 3), slice(0, 9))
    torch.testing.assert_close(window, pattern[:, :, :3, :9], atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("logit", [-200.0, 200.0])
def test_a_column_that_gets_nothing_or_everything(logit):
    q, k, v = draw(70, heads=2)
    z, found = attention_statistics(q, k, v, null=torch.full((2,), logit))
    if logit < 0:
        close((z, found), (z, attention_reference(q, k, v, null=torch.full((2,), logit))[2]))
        torch.testing.assert_close(z, attention_statistics(q, k, v)[0])
        assert found.null.max() == 0
    else:
        assert z.abs().max() == found.received.max() == found.row_entropy.max() == 0
        assert found.null.min() == 1


@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize("length", [1, 3, STRIP + 2])
def test_queries_after_a_past_have_the_column_too(length, past):
    q, k, v = draw(length + past, heads=4, kv_heads=2, width=8, batch=2, dtype=torch.float64)
    whole = attention_reference(q, k, v, null=LOGITS)[0][:, past:]
    found = joint_attention([Softmax(1.0, q[:, past:], [k], LOGITS)], [v])
    torch.testing.assert_close(found, whole, atol=1e-12, rtol=1e-10)
    statistics = joint_statistics([Softmax(1.0, q[:, past:], [k], LOGITS)])
    torch.testing.assert_close(statistics.null, attention_reference(q, k, v, null=LOGITS)[2].null[..., past:])


def gradients(attend, dtype=torch.float64):
    """Of one number made of the output, with respect to queries, keys, values and logits."""
    inputs = [x.to(dtype).requires_grad_() for x in (*draw(70, 4, 2, 20, 2, dtype=torch.float64), LOGITS)]
    z = attend(*inputs)
    weights = torch.randn(z.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    return torch.autograd.grad((z * weights).sum(), inputs)


def as_a_key(q, k, v, logits):
    """What is taken where no call tells the log-sum-exp, and in compiled graphs."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attend_with_a_key(q, k, v, logits, None, True).transpose(1, 2)


def streamed(q, k, v, logits):
    return joint_attention([Softmax(1.0, q, [k], logits)], [v])


@pytest.mark.parametrize("attend", [streamed, as_a_key])
def test_gradients_are_those_of_the_pattern_written_out(attend):
    true = gradients(lambda q, k, v, logits: attention_reference(q, k, v, null=logits)[0])
    for mine, theirs in zip(gradients(attend), true, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-9)
        assert mine.abs().max() > 1e-3
    for mine, theirs in zip(gradients(attend, torch.bfloat16), true, strict=True):
        assert (mine.double() - theirs).abs().max() < 0.05 * theirs.abs().max()


def test_a_column_makes_no_pattern():
    q, k, v = draw(4096, heads=2, width=8)
    logits = torch.zeros(2)
    for attend in (streamed, as_a_key, lambda *x: attention_statistics(*x[:3], null=x[3])):
        with LargestTensor() as largest:
            attend(q, k, v, logits)
        assert 0 < largest.numel < 4096**2 / 8


def test_logits_that_are_not_one_for_each_head_are_refused():
    q, k, v = draw(4, heads=4, kv_heads=2)
    with pytest.raises(WorkbenchError, match=r"one logit for each of the 4 heads; got \(2,\)"):
        attention_statistics(q, k, v, null=torch.zeros(2))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_column_on_a_gpu(dtype):
    slack = 3e-2 if dtype == torch.bfloat16 else 1e-4
    true = gradients(lambda q, k, v, logits: attention_reference(q, k, v, null=logits)[0])
    mine = gradients(lambda *x: streamed(*(y.cuda() for y in x)).cpu(), dtype)
    for found, theirs in zip(mine, true, strict=True):
        assert (found.double() - theirs).abs().max() < slack * theirs.abs().max()
    q, k, v = draw(300, heads=4, kv_heads=2, width=32, dtype=dtype, device="cuda")
    found = attention_statistics(q, k, v, null=LOGITS.to("cuda", dtype))[1].null.cpu().double()
    exact = attention_reference(*(x.cpu().double() for x in (q, k, v)), null=LOGITS.to(dtype).double())[2].null
    torch.testing.assert_close(found, exact, atol=slack, rtol=slack)
