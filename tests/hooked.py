"""What tests of hooks share: which architectures, token ids, and the hook points that have hooks."""

from __future__ import annotations

import torch

WIDE = torch.float64
KV_HEADS = {"gqa": 2, "mqa": 1, "svformer+gqa": 1}
"""Of four heads, where the architecture itself says how many."""


def grouped(architecture):
    """Config with two key-value heads, or as many as the architecture says itself."""
    return {"n_key_value_heads": KV_HEADS.get(architecture, 2)}


def tokens(length, *, batch=2, seed=0):
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(seed))


def listening(model):
    return [name for name, point in model.hook_dict.items() if point._forward_hooks or point._backward_hooks]
