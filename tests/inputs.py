"""What tests feed to models of any architecture."""

from __future__ import annotations

import torch

from workbench.config import ModelConfig

WIDE = torch.float64
SMALL = ModelConfig(n_layers=4, d_model=96, n_heads=4, d_mlp=256, d_vocab=1024, n_ctx=2048)


def tokens(model, length, *, batch=2, seed=0):
    """Random ids [batch, length] of a model's vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.d_vocab, (batch, length), generator=generator)
