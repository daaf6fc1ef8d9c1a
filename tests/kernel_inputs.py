"""What tests of kernels share: inputs, the reference, comparisons, fresh memory filled with NaN, the largest tensor made."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.kernels import AttentionStatistics, attention_reference

NAMES = [field.name for field in fields(AttentionStatistics) if field.name != "null"]  # which not every attention has


def draw(length, heads=2, kv_heads=None, width=16, batch=1, gain=1.0, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(length + 1000 * heads + width)
    shapes = [(batch, length, h, width) for h in (heads, kv_heads or heads, kv_heads or heads)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.to(device, dtype) for x in (q * gain, k, v)]


def close(found, true, atol=1e-5, rtol=1e-5):
    (z, mine), (true_z, theirs) = found, true
    assert (mine.null is None) == (theirs.null is None)
    names = NAMES if mine.null is None else [*NAMES, "null"]
    pairs = [(z, true_z), *((getattr(mine, name), getattr(theirs, name)) for name in names)]
    for name, (a, b) in zip(["z", *names], pairs, strict=True):
        torch.testing.assert_close(
            a.double(), b.double(), atol=atol, rtol=rtol, msg=lambda m, name=name: f"{name}: {m}"
        )


def truth(q, k, v, **options):
    z, _, statistics = attention_reference(q.double(), k.double(), v.double(), **options)
    return z, statistics


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor an operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result
