"""Comparison of two loss curves: at equal loss, at equal step, and where they cross."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

WINDOW = 100  # steps of the moving average, and those a crossing must last (Zhou et al. 2024)


def step_at_loss(curve: pd.Series, loss: float) -> float:
    """Return the first step at which a loss curve (indexed by step) reaches `loss`, interpolated linearly; else NaN."""
    steps, values = curve.index.to_numpy(dtype=float), curve.to_numpy(dtype=float)
    reached = np.flatnonzero(values <= loss)
    if not len(reached):
        return math.nan
    i = int(reached[0])
    if i == 0:
        return float(steps[0])
    share = (values[i - 1] - loss) / (values[i - 1] - values[i])
    return float(steps[i - 1] + share * (steps[i] - steps[i - 1]))


def at_equal_loss(values: pd.Series, curve: pd.Series, loss: float) -> float:
    """Return a quantity of checkpoints (by step) where the loss first reaches `loss`, interpolated; NaN outside of them."""
    step, known = step_at_loss(curve, loss), values.sort_index()
    steps = known.index.to_numpy(dtype=float)
    if math.isnan(step) or not len(steps) or not steps[0] <= step <= steps[-1]:
        return math.nan
    return float(np.interp(step, steps, known.to_numpy(dtype=float)))


def common_loss(curves: Sequence[pd.Series]) -> float:
    """Return the lowest loss that every run reached."""
    return max(float(curve.min()) for curve in curves)


def relative_loss(method: pd.Series, baseline: pd.Series, window: int = WINDOW) -> pd.Series:
    """Return the moving average of method - baseline at equal steps, indexed by the last step of every full window."""
    change = (method - baseline).dropna().sort_index()
    return change.rolling(window).mean().dropna()


def critical_point(relative: pd.Series, hold: int = WINDOW) -> int | None:
    """Return the first step after the minimum from which the relative loss is at least 0 for `hold` points; else None."""
    after = relative.loc[relative.idxmin() :] if len(relative) else relative
    above = (after.to_numpy() >= 0).astype(int)
    if len(above) < hold:
        return None
    lasting = np.flatnonzero(np.convolve(above, np.ones(hold, dtype=int), mode="valid") == hold)
    return int(after.index[lasting[0]]) if len(lasting) else None


def cumulative_rate(rates: pd.Series, step: float) -> float:
    """Return the sum of the learning rates up to `step`, the axis on which crossings are compared (Zhou et al. 2024)."""
    known = rates.dropna().sort_index()
    if not len(known) or math.isnan(step) or step < known.index[0]:
        return math.nan
    steps = np.arange(int(known.index[0]), int(step) + 1)
    return float(np.interp(steps, known.index.to_numpy(dtype=float), known.to_numpy(dtype=float)).sum())
