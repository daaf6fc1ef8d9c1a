"""Confidence intervals of means over seeds and over documents, and of paired differences.

Seeds are few, so their mean gets Student's t interval. Documents are many, so theirs is bootstrapped. A difference whose interval
contains 0 is unresolved. `LEVEL` is the confidence level of every interval and test of the project.
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
"""Confidence level. Read through the functions below, so that changing it here changes intervals, tests and sentences alike."""
RESAMPLES = 2000
MIN_SEEDS = 3  # fewer seeds decide nothing


def significance() -> float:
    """Return the significance level of every test, 1 - `LEVEL`."""
    return 1 - LEVEL


def percent(probability: float) -> str:
    """Return a probability in words, `95 %`."""
    return f"{100 * probability:.3g} %"


def confidence() -> str:
    """Return the confidence level in words, `95 %`."""
    return percent(LEVEL)


def t_quantile(degrees: float) -> float:
    """Return the two-sided quantile of Student's t distribution at the confidence level."""
    return float(stats.t.ppf((1 + LEVEL) / 2, degrees))


@dataclass(frozen=True)
class Interval:
    """A mean over n documents or seeds with its confidence interval and the p-value of a two-sided test against 0.

    The test is Student's t test over seeds and a sign permutation test over paired documents. `each` holds one number per seed.
    """

    value: float
    low: float
    high: float
    n: int
    p: float = math.nan
    each: tuple[float, ...] = field(default=(), repr=False)

    @property
    def sign(self) -> int:
        """-1 or 1 if the interval excludes 0, else 0 (also for NaN bounds)."""
        return -1 if self.high < 0 else 1 if self.low > 0 else 0

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:+.4g} (n = {self.n}: no interval)"
        return f"{self.value:+.4g} [{self.low:+.4g}, {self.high:+.4g}]"


def over_documents(values: Sequence[float] | np.ndarray, seed: int = 0) -> Interval:
    """Return the mean with its bias-corrected and accelerated bootstrap interval over documents.

    The bounds are NaN for fewer than two documents, and if any value is NaN: a mean over the rest would hide a broken model.
    """
    x = np.asarray(values, dtype=float)
    mean = float(x.mean()) if len(x) else math.nan
    if len(x) < 2 or not np.isfinite(x).all():
        return Interval(mean, math.nan, math.nan, len(x))
    if np.ptp(x) == 0:
        return Interval(mean, mean, mean, len(x))
    rng = np.random.default_rng(seed)
    bounds = stats.bootstrap((x,), np.mean, confidence_level=LEVEL, n_resamples=RESAMPLES, rng=rng).confidence_interval
    return Interval(mean, float(bounds.low), float(bounds.high), len(x))


def over_seeds(values: Sequence[float] | np.ndarray | pd.Series) -> Interval:
    """Return the mean with Student's t interval over runs; NaN bounds for fewer than two runs or a NaN value."""
    x = np.asarray(values, dtype=float)
    mean = float(x.mean()) if len(x) else math.nan
    if len(x) < 2 or not np.isfinite(x).all():
        return Interval(mean, math.nan, math.nan, len(x))
    error, degrees, each = float(x.std(ddof=1)) / math.sqrt(len(x)), len(x) - 1, tuple(x.tolist())
    if not error:
        return Interval(mean, mean, mean, len(x), float(mean == 0), each)
    low, high = stats.t.interval(LEVEL, degrees, mean, error)  # `ttest_1samp` warns if all seeds are nearly equal
    return Interval(mean, float(low), float(high), len(x), 2 * float(stats.t.sf(abs(mean) / error, degrees)), each)


def paired_seeds(method: pd.Series, baseline: pd.Series) -> Interval:
    """Return the mean of method - baseline over shared seeds; both series are indexed by seed."""
    shared = method.index.intersection(baseline.index)
    return over_seeds((method.loc[shared] - baseline.loc[shared]).to_numpy(dtype=float))


def paired_documents(method: pd.DataFrame, baseline: pd.DataFrame, seed: int = 0) -> Interval:
    """Return the mean of method - baseline over shared documents, with the p-value of a sign permutation test.

    Both tables have columns `document` and `value`; several runs of one document are averaged first. Raises `BadData` if the tables
    share no document.
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
    """Return mean, minimum, maximum and number of seeds by group; several rows of one seed are averaged first."""
    each = frame.groupby([*by, "seed"], dropna=False)["value"].mean().reset_index()
    return each.groupby(list(by), dropna=False)["value"].agg(["mean", "min", "max", "size"]).reset_index()
