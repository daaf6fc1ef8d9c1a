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
