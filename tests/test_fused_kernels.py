"""Attention statistics from stock fused calls equal the reference; which form is taken where."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import NAMES, LargestTensor, close, draw, truth
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.errors import WorkbenchError
from workbench.kernels import attention_and_its_statistics as module  # to see which form it takes
from workbench.kernels import attention_form, attention_statistics
from workbench.kernels.attention_and_its_statistics import fused_statistics, runs_fused, strip_statistics

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


needs_fused = pytest.mark.skipif(
    not runs_fused(torch.device("cpu"), torch.float32, 64),
    reason="this PyTorch has no fused attention on the CPU that returns the log-sum-exp (a private call)",
)


@needs_fused
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "width", "batch"),
    [(1, 4, 2, 20, 3), (2, 1, 1, 64, 1), (63, 4, 1, 4, 2), (65, 4, 2, 20, 3), (65, 1, 1, 64, 1), (257, 4, 2, 20, 3)],
)
def test_fused_calls_equal_the_reference(length, heads, kv_heads, width, batch):
    q, k, v = draw(length, heads, kv_heads, width, batch)
    close(fused_statistics(q, k, v), truth(q, k, v))
    close(fused_statistics(q, k, v, scale=0.7), truth(q, k, v, scale=0.7))
    q, k, v = (x.double() for x in (q, k, v))
    close(fused_statistics(q, k, v), truth(q, k, v), atol=1e-11, rtol=1e-11)


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


class Widths(TorchDispatchMode):
    """Channels of the queries, keys and values of every fused call."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "flash_attention" in str(func):
            self.seen.append([x.shape[-1] for x in args[:3]])
        return func(*args, **(kwargs or {}))


@needs_fused
@pytest.mark.parametrize(("width", "padded", "spare"), [(3, 8, 8), (5, 8, 8), (6, 8, 16), (8, 8, 16), (20, 24, 24)])
def test_calls_have_widths_that_gpus_take_and_three_channels_to_spare_for_what_is_received(width, padded, spare):
    q, k, v = draw(5, width=width)
    with Widths() as widths:
        found = fused_statistics(q, k, v)
    assert widths.seen == [[padded] * 3, [padded] * 3, [spare] * 3]
    close(found, truth(q, k, v))


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
    monkeypatch.setattr(module, "fused_statistics", lambda *x, **o: calls.append("fused") or fused_statistics(*x, **o))
    monkeypatch.setattr(module, "strip_statistics", lambda *x, **o: calls.append("strips") or strip_statistics(*x, **o))
    attention_statistics(q, k, v)
    monkeypatch.setattr(module, "attention_form", lambda device, dtype, d_head: "fused")
    close(attention_statistics(q, k, v), truth(q, k, v))
    for scale in (-1.0, 0.0):  # fused calls mask before they scale
        close(attention_statistics(q, k, v, scale=scale), truth(q, k, v, scale=scale))
    assert attention_statistics(q, k, v, row_max=False)[1].row_max is None
    assert calls == ["strips", "fused", "strips", "strips", "fused"]


@needs_fused
@pytest.mark.parametrize("names", [["row_entropy"], NAMES])
def test_a_models_statistics_are_the_same_from_fused_calls(tiny, monkeypatch, names):
    model, ids = tiny("resformer", config={"n_key_value_heads": 2}), torch.arange(40)[None]
    points = [f"blocks.1.attn.hook_{name}" for name in names]
    _, strips = model.run_with_cache(ids, names_filter=points)
    monkeypatch.setattr(module, "attention_form", lambda device, dtype, d_head: "fused")
    _, fused = model.run_with_cache(ids, names_filter=points)
    for point in points:
        torch.testing.assert_close(fused[point], strips[point], atol=1e-5, rtol=1e-5)
