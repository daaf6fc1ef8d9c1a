"""Confidence intervals of means over seeds and over documents, and of paired differences.

Seeds are few, so their mean gets Student's t interval. Documents are many, so theirs is bootstrapped from 16 on. A difference whose
interval contains 0 is unresolved. `LEVEL` is the confidence level of every interval and test of the project.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from workbench.errors import BadData

LEVEL = 0.95
"""Confidence level. Read through the functions below, so that changing it here changes intervals, tests and sentences alike."""
RESAMPLES = 2000
FEW_DOCUMENTS = 16  # fewer get Student's t interval, as seeds do: bootstrapped ones of 2 cover 51 %, of 5 88 %
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


def t_quantile(degrees: float, error: float | None = None) -> float:
    """Return the two-sided quantile of Student's t distribution at an error level, by default 1 - `LEVEL`."""
    from scipy import special  # loads slowly, and one model's figures need no intervals over seeds

    return -float(special.stdtrit(degrees, (significance() if error is None else error) / 2))


@dataclass(frozen=True)
class Interval:
    """A mean over n documents or seeds with its confidence interval and the p-value of a two-sided test against 0.

    The test is Student's t test over seeds and a sign permutation test over paired documents. `each` holds one number per seed, and
    `seeds` their names where they are known.
    """

    value: float
    low: float
    high: float
    n: int
    p: float = math.nan
    each: tuple[float, ...] = field(default=(), repr=False)
    seeds: tuple[str, ...] = field(default=(), repr=False)

    @property
    def sign(self) -> int:
        """-1 or 1 if the interval excludes 0, else 0 (also for NaN bounds)."""
        return -1 if self.high < 0 else 1 if self.low > 0 else 0

    @property
    def censored(self) -> bool:
        """True for a difference of restricted means (`compare_steps`): it has no interval, and a log-rank test decides."""
        return math.isnan(self.low) and math.isfinite(self.p) and len(self.each) > 1

    def widened(self, factor: float) -> Interval:
        """Return the interval with the error level divided by `factor`, as `holm_factors` gives it.

        Only Student's intervals over seeds can be widened, of the numbers themselves or of the logarithm of 1 minus a saved share. The
        bounds of any other interval become NaN.
        """
        x = np.asarray(self.each)
        if len(x) > 1 and math.isfinite(self.low):
            for to, back in ((np.asarray, np.asarray), (lambda v: -np.log1p(-v), lambda v: -np.expm1(-np.asarray(v)))):
                with np.errstate(invalid="ignore", divide="ignore"):
                    mean, error = float(to(x).mean()), float(to(x).std(ddof=1)) / math.sqrt(len(x))
                plain, wide = (error * t_quantile(len(x) - 1, significance() / f) for f in (1.0, factor))
                if np.allclose(back([mean - plain, mean + plain]), [self.low, self.high], rtol=1e-9, atol=1e-12):
                    low, high = (float(bound) for bound in back([mean - wide, mean + wide]))
                    return replace(self, low=low, high=high)
        return replace(self, low=math.nan, high=math.nan)

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:+.4g} (n = {self.n}, {'censored' if self.censored else 'no interval'})"
        return f"{self.value:+.4g} [{self.low:+.4g}, {self.high:+.4g}]"


def over_documents(values: Sequence[float] | np.ndarray, seed: int = 0) -> Interval:
    """Return the mean with its BCa bootstrap interval over documents, or Student's t interval over fewer than `FEW_DOCUMENTS`.

    The bounds are NaN for a NaN value and for one document.
    """
    x = np.asarray(values, dtype=float)
    if len(x) < FEW_DOCUMENTS or not np.isfinite(x).all() or np.ptp(x) == 0:
        return replace(over_seeds(x), p=math.nan, each=())
    from scipy import stats  # loads slowly, and few need it

    rng = np.random.default_rng(seed)
    bounds = stats.bootstrap((x,), np.mean, confidence_level=LEVEL, n_resamples=RESAMPLES, rng=rng).confidence_interval
    return Interval(float(x.mean()), float(bounds.low), float(bounds.high), len(x))


def over_seeds(values: Sequence[float] | np.ndarray | pd.Series) -> Interval:
    """Return the mean with Student's t interval over runs; NaN bounds for fewer than two runs or a NaN value."""
    x = np.asarray(values, dtype=float)
    mean = float(x.mean()) if len(x) else math.nan
    if len(x) < 2 or not np.isfinite(x).all():
        return Interval(mean, math.nan, math.nan, len(x))
    error, degrees, each = float(x.std(ddof=1)) / math.sqrt(len(x)), len(x) - 1, tuple(x.tolist())
    seeds = tuple(map(str, values.index)) if isinstance(values, pd.Series) and values.index.name == "seed" else ()
    if not error:
        return Interval(mean, mean, mean, len(x), float(mean == 0), each, seeds)
    from scipy import special

    half = float(special.stdtrit(degrees, (1 + LEVEL) / 2)) * error  # `ttest_1samp` warns if all seeds are nearly equal
    p = 2 * float(special.stdtr(degrees, -abs(mean) / error))
    return Interval(mean, mean - half, mean + half, len(x), p, each, seeds)


def paired_seeds(method: pd.Series, baseline: pd.Series) -> Interval:
    """Return the mean of method - baseline over shared seeds; both series are indexed by seed.

    Differences that agree in twelve digits of the series have no spread over seeds: the rest is rounding.
    """
    shared = method.index.intersection(baseline.index)
    one, other = (each.loc[shared].astype(float) for each in (method, baseline))
    change = one - other
    rounding = 1e-12 * max(one.abs().max(), other.abs().max())
    if change.max(skipna=False) - change.min(skipna=False) <= rounding:
        change[:] = change.mean() if abs(change.mean()) > rounding else 0.0
    return over_seeds(change.rename_axis("seed"))


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
    from scipy import stats

    rng = np.random.default_rng(seed)
    test = stats.permutation_test((change,), np.mean, permutation_type="samples", n_resamples=RESAMPLES, rng=rng)
    return Interval(mean.value, mean.low, mean.high, mean.n, float(test.pvalue))


def seed_band(frame: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return mean, minimum, maximum and number of seeds with a value by group; several rows of one seed are averaged first."""
    each = frame.groupby([*by, "seed"], dropna=False)["value"].mean().groupby(level=list(by), dropna=False)
    return each.agg(mean="mean", min="min", max="max", size="count").reset_index()


def group_intervals(table: pd.DataFrame, by: Sequence[str], values: Sequence[str]) -> pd.DataFrame:
    """Return the mean of columns by group, with the half-width of Student's t interval over seeds.

    Rows of one seed are averaged first, because runs of one seed share their initial weights and batches. Rows without a value
    do not count.

    Args:
        table: Rows of runs with the columns `seed`, `by` and `values`.
        by: Columns that define the groups; a missing entry is a group.
        values: Columns of numbers.

    Returns:
        A row for each group in order of appearance: `by`, `runs` (rows of the group), and by value its mean, `± 95 %` (the level
        of `LEVEL`; NaN for one seed) and `seeds` (number of seeds with a value).
    """
    rows = []
    for name, part in table.groupby(list(by), dropna=False, sort=False, observed=True):
        row = dict(zip(by, name, strict=True)) | {"runs": len(part)}
        for value in values:
            mean = over_seeds(part.dropna(subset=[value]).groupby("seed", sort=False)[value].mean())
            half = (mean.high - mean.low) / 2
            row |= {value: mean.value, f"{value} ± {confidence()}": half, f"{value}, seeds": mean.n}
        rows.append(row)
    means = [column for value in values for column in (value, f"{value} ± {confidence()}", f"{value}, seeds")]
    return pd.DataFrame(rows, columns=[*by, "runs", *means])
