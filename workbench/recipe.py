"""The recipe as pure functions: learning rate of a step, checkpoint grid, optimiser.

Source: Zhou et al. (2024), Value Residual Learning: AdamW (0.9, 0.95), decay on matrices and the embedding only, linear
warm-up from 1e-7, cosine to a tenth of the peak.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from workbench.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Rate of a step: linear from 1e-7 to the peak in `warmup` steps, then a cosine to `lr_final` of it."""
    floor = config.lr * config.lr_final
    if step < config.warmup:
        return 1e-7 + (config.lr - 1e-7) * step / config.warmup
    if step >= config.steps:
        return floor
    done = (step - config.warmup) / max(config.steps - config.warmup, 1)
    return floor + (config.lr - floor) * (1 + math.cos(math.pi * done)) / 2


def checkpoint_steps(steps: int, per_doubling: int) -> list[int]:
    """Step 0, the last, and between them a grid that is even in the logarithm from step 8 on."""
    grid = {round(8 * 2 ** (i / per_doubling)) for i in range(64 * per_doubling) if 8 * 2 ** (i / per_doubling) < steps}
    return sorted({0, steps} | grid)


def optimiser(model: Any, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with decay on what `model.decays`: matrices and the embedding, coefficients only where an option says so."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    decayed, kept = [p for n, p in named if model.decays(n)], [p for n, p in named if not model.decays(n)]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=betas, eps=config.eps, fused=True)
