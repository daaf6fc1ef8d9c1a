"""What tests of TransformerLens' tools share: which architectures, sizes, ids, a comparison."""

from __future__ import annotations

import torch

from workbench.models import ARCHITECTURES
from workbench.models.shortcut import Shortcut

WIDE = torch.float64
CHANGES_STREAM = ("stream_sources", "skip", "connections")
AVERAGED = [
    name
    for name, entry in ARCHITECTURES.items()
    if any(getattr(s, method) is not getattr(Shortcut, method) for s in entry.shortcuts for method in CHANGES_STREAM)
]
AVERAGED += ["denseformer+cut_skip"]
SMALL = {"d_model": 16, "n_heads": 2, "d_mlp": 20, "d_vocab": 11}


def small(architecture):
    """Sizes and options for sweeps of many runs."""
    return {"config": SMALL} | ({"query_group": 2} if architecture == "svformer+gqa" else {})


def tokens(length=6, *, batch=2, seed=0, vocabulary=61):
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(found, expected, tight=1e-10):
    torch.testing.assert_close(found, expected, atol=tight, rtol=0)
