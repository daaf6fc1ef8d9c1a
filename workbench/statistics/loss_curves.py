"""Loss curves of two runs compared: at equal loss, at equal step, and where one overtakes the other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

WINDOW = 100  # steps of the moving average, and those a crossing must last (Zhou et al. 2024)


def step_at_loss(curve: pd.Series, loss: float) -> float:
    """First step at which a loss curve (indexed by step) has come down to `loss`, linear between its points; else NaN."""
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
    """A quantity measured at checkpoints (indexed by step), read where the run's loss first came down to `loss`.

    Linear in the step between the two neighbouring checkpoints; NaN where the loss is not reached between checkpoints.
    """
    step, known = step_at_loss(curve, loss), values.sort_index()
    steps = known.index.to_numpy(dtype=float)
    if math.isnan(step) or not len(steps) or not steps[0] <= step <= steps[-1]:
        return math.nan
    return float(np.interp(step, steps, known.to_numpy(dtype=float)))


def common_loss(curves: Sequence[pd.Series]) -> float:
    """The lowest loss that every run has reached."""
    return max(float(curve.min()) for curve in curves)


def relative_loss(method: pd.Series, baseline: pd.Series, window: int = WINDOW) -> pd.Series:
    """Moving average of method - baseline at equal step, over whole windows only, labelled by each window's last step."""
    change = (method - baseline).dropna().sort_index()
    return change.rolling(window).mean().dropna()


def critical_point(relative: pd.Series, hold: int = WINDOW) -> int | None:
    """First step after the minimum at which the relative loss is 0 or above and stays so for `hold` points; else None."""
    after = relative.loc[relative.idxmin() :] if len(relative) else relative
    above = (after.to_numpy() >= 0).astype(int)
    if len(above) < hold:
        return None
    lasting = np.flatnonzero(np.convolve(above, np.ones(hold, dtype=int), mode="valid") == hold)
    return int(after.index[lasting[0]]) if len(lasting) else None


def cumulative_rate(rates: pd.Series, step: float) -> float:
    """Sum of the learning rates of all steps up to `step`, linear between those written down (indexed by step); NaN without any.

    Where runs of different schedules cross is compared on this axis (Zhou et al. 2024, the critical point of SVFormer).
    """
    known = rates.dropna().sort_index()
    if not len(known) or math.isnan(step) or step < known.index[0]:
        return math.nan
    steps = np.arange(int(known.index[0]), int(step) + 1)
    return float(np.interp(steps, known.index.to_numpy(dtype=float), known.to_numpy(dtype=float)).sum())
