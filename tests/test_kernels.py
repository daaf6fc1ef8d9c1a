"""Streamed attention statistics equal the plain reference, in O(T) memory, at any shape, type, scale and strip."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.errors import WorkbenchError
from workbench.kernels import (
    AttentionStatistics,
    attention,  # the module, to see which form it takes
    attention_form,
    attention_reference,
    attention_statistics,
    attention_window,
    bucket_edges,
    pooled_attention,
    pooled_maximum,
)
from workbench.kernels.fused import fused_statistics, runs_fused
from workbench.kernels.strips import strip_statistics

NAMES = [field.name for field in fields(AttentionStatistics)]


@pytest.fixture(autouse=True)
def fresh_memory_is_nan():
    """Whatever the kernel does not write shows as NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


def draw(length, heads=2, kv_heads=None, width=16, batch=1, gain=1.0, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(length + 1000 * heads + width)
    shapes = [(batch, length, h, width) for h in (heads, kv_heads or heads, kv_heads or heads)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.to(device, dtype) for x in (q * gain, k, v)]


def close(found, true, atol=1e-5, rtol=1e-5):
    (z, mine), (true_z, theirs) = found, true
    pairs = [(z, true_z), *((getattr(mine, name), getattr(theirs, name)) for name in NAMES)]
    for name, (a, b) in zip(["z", *NAMES], pairs, strict=True):
        torch.testing.assert_close(
            a.double(), b.double(), atol=atol, rtol=rtol, msg=lambda m, name=name: f"{name}: {m}"
        )


def truth(q, k, v, **options):
    z, _, statistics = attention_reference(q.double(), k.double(), v.double(), **options)
    return z, statistics


@pytest.mark.parametrize("length", [1, 2, 7, 63, 64, 65, 257])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(("batch", "width"), [(1, 64), (3, 4), (3, 20)])
def test_equals_the_reference(length, heads, kv_heads, batch, width):
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


def test_uniform_attention_is_known_exactly():
    length = 200
    _, k, v = draw(length)
    z, statistics = attention_statistics(torch.zeros_like(k), k, v)
    count = torch.arange(1, length + 1, dtype=torch.float64)
    received = count.reciprocal().flip(0).cumsum(0).flip(0)
    means = v.double().cumsum(1) / count.view(1, -1, 1, 1)
    expected = dict(zip(NAMES, (received, count.log(), 1 / count, 1 / count, count.log()), strict=True))
    for name in NAMES:
        torch.testing.assert_close(getattr(statistics, name)[0, 1].double(), expected[name], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(z.double(), means, atol=1e-6, rtol=1e-6)


def test_one_hot_attention_has_no_entropy():
    length = 70
    x = 100 * torch.eye(length).view(1, length, 1, length)
    z, statistics = attention_statistics(x, x, x)
    assert torch.equal(z, x)
    assert torch.equal(statistics.row_entropy, torch.zeros(1, 1, length))
    assert torch.equal(statistics.received, torch.ones(1, 1, length))
    assert torch.equal(statistics.row_max, torch.ones(1, 1, length))
    assert torch.equal(statistics.sink[0, 0], torch.eye(length)[0])


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


def test_later_tokens_change_no_earlier_row():
    q, k, v = draw(150, heads=3)
    _, before = attention_statistics(q, k, v)
    for x in (q, k, v):
        x[:, 100:] = 9.0
    _, after = attention_statistics(q, k, v)
    for name in set(NAMES) - {"received"}:  # keys receive from later queries: that one may change
        torch.testing.assert_close(getattr(after, name)[..., :100], getattr(before, name)[..., :100])
    assert not torch.allclose(after.received[..., :100], before.received[..., :100])


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


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor an operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


def test_no_tensor_has_the_size_of_the_pattern():
    q, k, v = draw(4096, heads=2, width=8)
    with LargestTensor() as largest:
        attention_statistics(q, k, v)
    assert 0 < largest.numel < 4096**2 / 8
    with LargestTensor() as largest:
        attention_reference(*(x[:, :256] for x in (q, k, v)))
    assert largest.numel >= 256**2


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_peak_memory_is_linear_in_length():
    """Peak over the inputs at T 8192 at most 4.6 times that at 2048, in a fresh process for each call (quadratic: 16)."""
    calls = ["attention_statistics(q, k, v)", "pooled_attention(q, k)"]
    if runs_fused(torch.device("cpu"), torch.float32, 64):
        calls.append("fused_statistics(q, k, v)")
    child = f"""
import os
import torch
from pathlib import Path
from workbench.kernels import attention_statistics, pooled_attention
from workbench.kernels.fused import fused_statistics
torch.set_num_threads(1)
kib = lambda key: next(int(x.split()[1]) for x in Path("/proc/self/status").open() if x.startswith(key))
for call in {calls}:
    if os.fork():  # imports once, peaks apart
        assert os.wait()[1] == 0
        continue
    run = eval(f"lambda q, k, v: {{call}}")
    qkv = [torch.randn(1, 8192, 2, 64) for _ in range(3)]
    run(*(x[:, :16] for x in qkv))
    before = kib("VmRSS")
    for length in (2048, 8192):
        run(*(x[:, :length] for x in qkv))
        print(kib("VmHWM") - before)
    break
"""
    result = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
    peaks = list(map(int, result.stdout.split()))
    for call, short, long in zip(calls, peaks[::2], peaks[1::2], strict=True):
        assert short > 0, call
        assert long <= 4.6 * short, call
        assert long < 2 * 8192 * 8192 * 4 / 1024 / 8, call  # and an eighth of the two patterns


# ---- stock fused calls -----------------------------------------------------------------------------------------------


needs_fused = pytest.mark.skipif(
    not runs_fused(torch.device("cpu"), torch.float32, 64),
    reason="this PyTorch has no fused attention on the CPU that returns the log-sum-exp (a private call)",
)


@needs_fused
@pytest.mark.parametrize("length", [1, 2, 63, 65, 257])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "batch"), [(1, 1, 64, 1), (4, 2, 20, 3), (4, 1, 4, 2)])
def test_fused_calls_equal_the_reference(length, heads, kv_heads, width, batch):
    q, k, v = draw(length, heads, kv_heads, width, batch)
    close(fused_statistics(q, k, v), truth(q, k, v))
    close(fused_statistics(q, k, v, scale=0.7), truth(q, k, v, scale=0.7))
    q, k, v = (x.double() for x in (q, k, v))
    close(fused_statistics(q, k, v), truth(q, k, v), atol=1e-11, rtol=1e-11)


@needs_fused
def test_fused_calls_leave_out_the_maximum_where_nobody_wants_it():
    q, k, v = draw(65)
    whole, part = fused_statistics(q, k, v)[1], fused_statistics(q, k, v, row_max=False)[1]
    assert part.row_max is None
    assert all(torch.equal(getattr(whole, n), getattr(part, n)) for n in NAMES if n != "row_max")


@needs_fused
def test_fused_calls_with_large_scores():
    q, k, v = draw(300, width=64, gain=8.0)
    found, true = fused_statistics(q, k, v), truth(q, k, v)
    assert true[1].lse.max() > 25
    assert found[1].row_entropy.min() >= 0
    assert found[1].row_max.max() <= 1
    close(found, true, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found[1].received.sum(-1), torch.full((1, 2), 300.0), atol=0, rtol=1e-5)


@needs_fused
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_calls_in_half_precision_keep_three_digits(dtype):
    q, k, v = draw(257, heads=4, kv_heads=2, width=32, dtype=dtype)
    z, mine = fused_statistics(q, k, v)
    true_z, true = truth(q, k, v)
    assert z.dtype == dtype
    assert (z - true_z).abs().max() < 0.02
    # only the entropy reads a rounded output; the others come of the log-sum-exp, which is float32
    for name, limit in {"received": 5e-4, "row_entropy": 8e-3, "row_max": 1e-4, "sink": 1e-4, "lse": 1e-4}.items():
        exact = getattr(true, name)
        error = ((getattr(mine, name) - exact).abs() / exact.abs().clamp(min=1)).max()
        assert error < limit, name


@needs_fused
def test_fused_calls_form_no_pattern():
    q, k, v = draw(4096, heads=2, width=8)
    with LargestTensor() as largest:
        fused_statistics(q, k, v)
    assert 0 < largest.numel < 4096**2 / 8


def test_fused_calls_refuse_what_they_cannot_do():
    q, k, v = draw(4)
    with pytest.raises(WorkbenchError, match="scale -1"):
        fused_statistics(q, k, v, scale=-1.0)
    with pytest.raises(WorkbenchError, match=r"on meta; use strips"):
        fused_statistics(*(x.to("meta") for x in (q, k, v)))


def test_the_form_follows_device_and_type(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert {attention_form(cpu, d, 64) for d in (torch.float32, torch.float64, torch.bfloat16)} == {"strips"}
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert attention_form(gpu, torch.bfloat16, 64) == attention_form(gpu, torch.float16, 248) == "fused"
    assert attention_form(gpu, torch.float32, 64) == attention_form(gpu, torch.bfloat16, 256) == "strips"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert attention_form(gpu, torch.bfloat16, 64) == "strips"


@needs_fused
def test_the_form_that_is_named_is_the_one_that_runs(monkeypatch):
    q, k, v = draw(30)
    calls = []
    monkeypatch.setattr(
        attention, "fused_statistics", lambda *x, **o: calls.append("fused") or fused_statistics(*x, **o)
    )
    monkeypatch.setattr(
        attention, "strip_statistics", lambda *x, **o: calls.append("strips") or strip_statistics(*x, **o)
    )
    attention_statistics(q, k, v)
    monkeypatch.setattr(attention, "attention_form", lambda device, dtype, d_head: "fused")
    close(attention_statistics(q, k, v), truth(q, k, v))
    attention_statistics(q, k, v, scale=-1.0)  # fused calls mask before they scale
    assert attention_statistics(q, k, v, row_max=False)[1].row_max is None
    assert calls == ["strips", "fused", "strips", "fused"]


@needs_fused
@pytest.mark.parametrize("names", [["row_entropy"], NAMES])
def test_a_models_statistics_are_the_same_from_fused_calls(tiny, monkeypatch, names):
    model, ids = tiny("resformer", config={"n_key_value_heads": 2}), torch.arange(40)[None]
    points = [f"blocks.1.attn.hook_{name}" for name in names]
    _, strips = model.run_with_cache(ids, names_filter=points)
    monkeypatch.setattr(attention, "attention_form", lambda device, dtype, d_head: "fused")
    _, fused = model.run_with_cache(ids, names_filter=points)
    for point in points:
        torch.testing.assert_close(fused[point], strips[point], atol=1e-5, rtol=1e-5)


# ---- pictures of the pattern -----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("length", [1, 2, 63, 65, 300, 1025])
@pytest.mark.parametrize(("heads", "kv_heads", "batch"), [(1, 1, 1), (4, 2, 3)])
@pytest.mark.parametrize("buckets", [64, (5, 7), (1, 16)])
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


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_equals_the_reference(dtype):
    q, k, v = draw(1500, heads=4, kv_heads=2, width=64, batch=2, dtype=dtype, device="cuda")
    z, statistics = attention_statistics(q, k, v)
    true_z, true = truth(q, k, v)
    close((z, statistics), (true_z.to(dtype), true), atol=2e-2 if dtype == torch.bfloat16 else 1e-4, rtol=1e-4)
