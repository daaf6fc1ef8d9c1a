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


def fit_rotated(
    plain: tuple[Tensor, Tensor], mixed: tuple[Tensor, Tensor], *, starts: Tensor
) -> tuple[float, float, float] | None:
    """Numbers a and b of mixed queries or keys a * first + b * own, and what they leave; None where they are no such mixture.

    Pairs of rotated and projected heads [row, head, d_head]: of the first layer, which says by how much scores are scaled, and
    of the mixed one. `starts`: rows that no rotary encoding turns, which give the numbers; lengths of all rows check them.
    """
    (first_used, first), (used, own) = ([x.detach().double() for x in pair] for pair in (plain, mixed))
    if not first_used.shape == first.shape == used.shape == own.shape or not bool(starts.any()):
        return None
    (scale,), _ = fit(first_used[starts], [first[starts]])
    (a, b), _ = fit(used[starts], [scale * first[starts], scale * own[starts]])
    left = (scale * (a * first + b * own)).norm(dim=-1) - used.norm(dim=-1)
    residual = float(left.norm() / used.norm().clamp_min(1e-300))
    exact = residual < EXACT.get(mixed[0].dtype, 1e-2) and abs(a) > EXACT.get(mixed[0].dtype, 1e-2)
    return (a, b, residual) if exact else None
