"""The recipe as pure functions: learning rate of a step, checkpoint grid, optimiser.

Source: Zhou et al. (2024), Value Residual Learning: AdamW (0.9, 0.95), decay on matrices and the embedding only, linear
warm-up from 1e-7, cosine to a tenth of the peak. Factors on the rate of some parameters are controls, not part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch

from workbench.config import TrainConfig
from workbench.errors import UnknownName, WorkbenchError


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of a step: linear from 1e-7 to the peak in `warmup` steps, then a cosine to `lr_final` of it."""
    floor = config.lr * config.lr_final
    if step < config.warmup:
        return 1e-7 + (config.lr - 1e-7) * step / config.warmup
    if step >= config.steps:
        return floor
    done = (step - config.warmup) / max(config.steps - config.warmup, 1)
    return floor + (config.lr - floor) * (1 + math.cos(math.pi * done)) / 2


def checkpoint_steps(steps: int, per_doubling: int) -> list[int]:
    """Return step 0, the last step, and a grid between them that is even in the logarithm from step 8 on."""
    grid = {round(8 * 2 ** (i / per_doubling)) for i in range(64 * per_doubling) if 8 * 2 ** (i / per_doubling) < steps}
    return sorted({0, steps} | grid)


def rate_factors(names: Iterable[str], config: TrainConfig) -> dict[str, float]:
    """Return the factor on the learning rate of every parameter; 1 if no pattern of `lr_factors` matches.

    Raises `UnknownName` for a pattern without a match, `WorkbenchError` if two patterns match one parameter.
    """
    known = list(names)
    pattern_of: dict[str, str] = {}
    for pattern in config.lr_factors:
        fitting = [name for name in known if fnmatchcase(name, pattern)]
        if not fitting:
            raise UnknownName("pattern of parameters in lr_factors", pattern, known)
        if twice := next((name for name in fitting if name in pattern_of), None):
            raise WorkbenchError(f"lr_factors: {pattern_of[twice]!r} and {pattern!r} both fit {twice}; keep one")
        pattern_of |= dict.fromkeys(fitting, pattern)
    return {name: float(config.lr_factors[pattern_of[name]]) if name in pattern_of else 1.0 for name in known}


def optimiser(model: Any, config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW with decay on the parameters that `model.decays`: matrices, the embedding, and coefficients by option.

    Every pair of decay and factor on the learning rate is one group. The group stores the factor, and AdamW's decay, which
    is multiplied with the learning rate, grows with it.
    """
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups: dict[tuple[bool, float], list[torch.Tensor]] = {}
    for name, factor in rate_factors(named, config).items():
        groups.setdefault((bool(model.decays(name)), factor), []).append(named[name])
    settings = [
        {"params": parameters, "weight_decay": config.weight_decay if decays else 0.0, "factor": factor, "lr": config.lr * factor}
        for (decays, factor), parameters in groups.items()
    ]  # fmt: skip
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(settings, lr=config.lr, betas=betas, eps=config.eps, fused=True)
