"""Least squares in float64 of tensors on tensors, and what of a residual is rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EXACT = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Residuals below this are rounding."""


def fit(target: Tensor, sources: Sequence[Tensor]) -> tuple[list[float], float]:
    """Least-squares coefficients of `sources` for `target`, all of one shape, and the relative residual; float64."""
    y = target.detach().double().flatten()
    size = float(y.norm())
    if not sources or not size:
        return [0.0] * len(sources), 0.0 if not size else 1.0
    x = torch.stack([s.detach().double().flatten() for s in sources], dim=1)
    solution = torch.linalg.lstsq(x.cpu(), y.cpu()[:, None], driver="gelsd").solution[:, 0]
    return solution.tolist(), float((x.cpu() @ solution - y.cpu()).norm()) / size


def weights_by_token(target: Tensor, sources: Sequence[Tensor]) -> tuple[Tensor, float]:
    """Weights [..., source] of sources for a target [..., d], for each of its vectors by itself, and what they leave; float64."""
    x, y = torch.stack([s.detach().double() for s in sources], dim=-1), target.detach().double()
    gram, dots = x.mT @ x, (x.mT @ y[..., None])[..., 0]
    ridge = 1e-13 * gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] + 1e-300  # a vector of zeros has no weight
    weights = torch.linalg.solve(gram + ridge * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device), dots)
    size = float(y.norm())
    return weights, float(((x @ weights[..., None])[..., 0] - y).norm()) / size if size else 0.0
