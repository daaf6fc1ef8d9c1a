"""Intervals of means over documents and over seeds, and of paired differences.

Documents are many and resampled (bootstrap, sign permutation); seeds are few, so their mean gets Student's t interval. A
difference whose interval contains 0 is unresolved. The tests themselves are scipy's; what is here pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from scipy import stats

from workbench.errors import BadData

LEVEL = 0.95
RESAMPLES = 2000
MIN_SEEDS = 3  # below, a difference over seeds decides nothing


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval over n documents or seeds; `p` is its two-sided test's against 0 where there is one.

    Over seeds that is Student's t test, over paired documents the sign permutation. `each`: the seeds' own numbers.
    """

    value: float
    low: float
    high: float
    n: int
    p: float = math.nan
    each: tuple[float, ...] = field(default=(), repr=False)

    @property
    def sign(self) -> int:
        """-1 or 1 where the interval leaves 0 out, else 0: unresolved (as is anything that is not a number)."""
        return -1 if self.high < 0 else 1 if self.low > 0 else 0

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:+.4g} (n = {self.n}: no interval)"
        return f"{self.value:+.4g} [{self.low:+.4g}, {self.high:+.4g}]"


def over_documents(values: Sequence[float] | np.ndarray, seed: int = 0) -> Interval:
    """Mean with the bootstrap interval (bias-corrected and accelerated) over documents; NaN bounds below two of them.

    One value that is not a number makes the whole interval so: a mean over the rest would hide a broken model.
    """
    x = np.asarray(values, dtype=float)
    mean = float(x.mean()) if len(x) else math.nan
    if len(x) < 2 or not np.isfinite(x).all():
        return Interval(mean, math.nan, math.nan, len(x))
    if np.ptp(x) == 0:
        return Interval(mean, mean, mean, len(x))
    draw = np.random.default_rng(seed)
    drawn = stats.bootstrap((x,), np.mean, confidence_level=LEVEL, n_resamples=RESAMPLES, rng=draw)
    return Interval(mean, float(drawn.confidence_interval.low), float(drawn.confidence_interval.high), len(x))


def over_seeds(values: Sequence[float] | np.ndarray | pd.Series) -> Interval:
    """Mean with Student's t interval over runs; NaN bounds below two of them.

    Three seeds that agree in sign prove little (chance does so once in four times); the t interval asks for more.
    """
    x = np.asarray(values, dtype=float)
    mean = float(x.mean()) if len(x) else math.nan
    if len(x) < 2 or not np.isfinite(x).all():
        return Interval(mean, math.nan, math.nan, len(x))
    error = float(x.std(ddof=1)) / math.sqrt(len(x))
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(x) - 1)) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, len(x) - 1)) if error else float(mean == 0)
    return Interval(mean, mean - half, mean + half, len(x), p, tuple(x.tolist()))


def holm(p: Sequence[float]) -> list[float]:
    """Each p corrected for all of them, in their order: the k-th least of n times n - k + 1, never below a lesser one's (Holm 1979).

    Deciding where the corrected one is at most 5 % decides falsely, once or more, with 5 % at most, however they depend.
    """
    order = sorted(range(len(p)), key=lambda i: p[i])
    least, found = 0.0, [0.0] * len(p)
    for k, i in enumerate(order):
        least = found[i] = max(least, min(1.0, (len(p) - k) * p[i]))
    return found


def paired_seeds(method: pd.Series, baseline: pd.Series) -> Interval:
    """Difference method - baseline over the seeds that both have; both series are indexed by seed."""
    shared = method.index.intersection(baseline.index)
    return over_seeds((method.loc[shared] - baseline.loc[shared]).to_numpy(dtype=float))


def paired_documents(method: pd.DataFrame, baseline: pd.DataFrame, seed: int = 0) -> Interval:
    """Difference method - baseline over documents that both have read, with a sign permutation test.

    Tables with columns `document` and `value`; further runs of one document are averaged first. Raises `BadData` where no
    document is in both.
    """
    a, b = (frame.groupby("document")["value"].mean() for frame in (method, baseline))
    shared = a.index.intersection(b.index)
    if shared.empty:
        raise BadData("no document was read by both; measure them on the same data")
    change = (a.loc[shared] - b.loc[shared]).to_numpy(dtype=float)
    mean = over_documents(change, seed)
    if math.isnan(mean.low) or not change.any():
        return mean
    rng = np.random.default_rng(seed)
    test = stats.permutation_test((change,), np.mean, permutation_type="samples", n_resamples=RESAMPLES, rng=rng)
    return Interval(mean.value, mean.low, mean.high, mean.n, float(test.pvalue))


def seed_band(frame: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Mean, least, largest value and number of seeds of every group; runs of one seed are averaged first."""
    each = frame.groupby([*by, "seed"], dropna=False)["value"].mean().reset_index()
    return each.groupby(list(by), dropna=False)["value"].agg(["mean", "min", "max", "size"]).reset_index()
