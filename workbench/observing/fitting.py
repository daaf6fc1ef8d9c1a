"""Least squares in float64: how much of a tensor is a weighted sum of others."""

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
    found = torch.linalg.lstsq(x.cpu(), y.cpu()[:, None], driver="gelsd").solution[:, 0]
    return found.tolist(), float((x.cpu() @ found - y.cpu()).norm()) / size


def explained(heads: Tensor, z: Tensor, v: Tensor, first: Tensor) -> bool:
    """Whether head outputs [row, head, d_head] are the attention's, plus at most a sum of its and the first layer's values."""
    tolerance = EXACT.get(heads.dtype, 1e-2)
    added = heads.double() - z.double()
    if float(added.norm()) <= 10 * tolerance * float(heads.double().norm()):
        return True
    if v.shape != first.shape or v.shape[2] != z.shape[2]:
        return False
    return fit(added, [x.repeat_interleave(z.shape[1] // v.shape[1], dim=1) for x in (v, first)])[1] < 10 * tolerance
