"""What numbers over documents and over seeds say: intervals, paired differences, equal loss, efficiency, critical points.

Documents are many and resampled (bootstrap, sign permutation); seeds are few, so their mean gets Student's t interval. A
difference whose interval contains 0 is unresolved. The tests themselves are scipy's; what is here pairs and matches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import optimize, stats

from workbench.errors import BadData

LEVEL = 0.95
RESAMPLES = 2000
WINDOW = 100  # steps of the moving average, and those a crossing must last (Zhou et al. 2024)
TAIL = 1000  # points behind the published extrapolation of a crossing
LEAST_SIZES = 4  # points that a curve of three parameters needs before its fit says anything


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval over n documents or seeds; `p` is the permutation test's where there is one."""

    value: float
    low: float
    high: float
    n: int
    p: float = math.nan

    @property
    def sign(self) -> int:
        """-1 or 1 where the interval leaves 0 out, else 0: unresolved (as is anything that is not a number)."""
        return -1 if self.high < 0 else 1 if self.low > 0 else 0

    def within(self, bound: float) -> bool:
        """Whether the whole interval lies within -bound..bound."""
        return -bound <= self.low and self.high <= bound

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
    found = stats.bootstrap((x,), np.mean, confidence_level=LEVEL, n_resamples=RESAMPLES, rng=draw)
    return Interval(mean, float(found.confidence_interval.low), float(found.confidence_interval.high), len(x))


def over_seeds(values: Sequence[float] | np.ndarray | pd.Series) -> Interval:
    """Mean with Student's t interval over runs; NaN bounds below two of them.

    Three seeds that agree in sign prove little (chance does so once in four times); the t interval asks for more.
    """
    x = np.asarray(values, dtype=float)
    mean = float(x.mean()) if len(x) else math.nan
    if len(x) < 2 or not np.isfinite(x).all():
        return Interval(mean, math.nan, math.nan, len(x))
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x)))
    return Interval(mean, mean - half, mean + half, len(x))


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
    found = over_documents(change, seed)
    if math.isnan(found.low) or not change.any():
        return found
    rng = np.random.default_rng(seed)
    test = stats.permutation_test((change,), np.mean, permutation_type="samples", n_resamples=RESAMPLES, rng=rng)
    return Interval(found.value, found.low, found.high, found.n, float(test.pvalue))


def seed_band(frame: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Mean, least, largest value and number of seeds of every group; runs of one seed are averaged first."""
    each = frame.groupby([*by, "seed"], dropna=False)["value"].mean().reset_index()
    return each.groupby(list(by), dropna=False)["value"].agg(["mean", "min", "max", "size"]).reset_index()


# ---- equal loss ------------------------------------------------------------------------------------------------------


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


# ---- relative loss and the critical point ----------------------------------------------------------------------------


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


def extrapolated_critical_point(relative: pd.Series, tail: int = TAIL) -> float:
    """Step at which a line through the last `tail` points reaches 0; NaN where it does not rise. A guess, not a finding."""
    last = relative.iloc[-tail:]
    if len(last) < 2:
        return math.nan
    slope, height = np.polyfit(last.index.to_numpy(dtype=float), last.to_numpy(), 1)
    step = -height / slope if slope > 0 else math.nan
    return float(step) if step >= last.index[-1] else math.nan


def cumulative_rate(rates: pd.Series, step: float) -> float:
    """Sum of the learning rates of all steps before `step`, from rates noted at some of them (indexed by step)."""
    known = rates.sort_index()
    return float(np.interp(np.arange(step), known.index.to_numpy(dtype=float), known.to_numpy(dtype=float)).sum())


# ---- efficiency at equal loss ----------------------------------------------------------------------------------------


def savings(method: pd.Series, baseline: pd.Series) -> dict[str, float]:
    """Share of parameters (or tokens) saved at the loss of the baseline's largest size, by several forms of the curve.

    Both series hold the loss by size. With N' where the method's curve has that loss: 1 - N'/N. Forms: `neighbours` (straight
    in ln loss and ln N between the two sizes around it), `logarithm` (straight in loss and ln N there), `power` (one line in
    ln loss and ln N through all), `offset` (E + a N^-b, from four sizes on). NaN where a form cannot say. The forms differ by
    points of per cent on the same numbers, so they stand side by side.
    """
    method, baseline = method.sort_index(), baseline.sort_index()
    shared = method.index.intersection(baseline.index)
    if len(shared) < 2:
        return dict.fromkeys(FORMS, math.nan)
    size, target = float(shared[-1]), float(baseline.loc[shared[-1]])
    sizes, losses = method.index.to_numpy(dtype=float), method.to_numpy(dtype=float)
    return {name: 1 - form(sizes, losses, target) / size for name, form in FORMS.items()}


def _around(losses: np.ndarray, target: float) -> slice:
    """The two neighbouring sizes between which the target lies; the last two where it lies beyond."""
    below = np.flatnonzero(losses <= target)
    i = int(below[0]) if len(below) else len(losses) - 1
    return slice(max(i - 1, 0), max(i - 1, 0) + 2)


def _line(x: np.ndarray, y: np.ndarray, target: float) -> float:
    """exp of the x at which the least-squares line reaches the target."""
    slope, height = np.polyfit(x, y, 1)
    return float(np.exp((target - height) / slope)) if slope < 0 else math.nan


def _neighbours(sizes: np.ndarray, losses: np.ndarray, target: float) -> float:
    near = _around(losses, target)
    return _line(np.log(sizes[near]), np.log(losses[near]), math.log(target))


def _logarithm(sizes: np.ndarray, losses: np.ndarray, target: float) -> float:
    near = _around(losses, target)
    return _line(np.log(sizes[near]), losses[near], target)


def _power(sizes: np.ndarray, losses: np.ndarray, target: float) -> float:
    return _line(np.log(sizes), np.log(losses), math.log(target))


def _offset(sizes: np.ndarray, losses: np.ndarray, target: float) -> float:
    if len(sizes) < LEAST_SIZES:
        return math.nan
    unit = sizes / sizes[0]

    def rest(exponent: float) -> tuple[float, np.ndarray]:
        design = np.stack([np.ones_like(unit), unit**-exponent], axis=1)
        best = np.linalg.lstsq(design, losses, rcond=None)[0]
        return float(((design @ best - losses) ** 2).sum()), best

    exponent = float(optimize.minimize_scalar(lambda b: rest(b)[0], bounds=(1e-3, 3), method="bounded").x)
    floor, scale = rest(exponent)[1]
    ratio = (target - floor) / scale if scale else math.nan
    return float(sizes[0] * ratio ** (-1 / exponent)) if ratio > 0 else math.nan


FORMS: Mapping[str, Callable[[np.ndarray, np.ndarray, float], float]] = {
    "neighbours": _neighbours,
    "logarithm": _logarithm,
    "power": _power,
    "offset": _offset,
}


def savings_intervals(
    method: pd.DataFrame, baseline: pd.DataFrame, *, resamples: int = 500, seed: int = 0
) -> dict[str, Interval]:
    """Savings by every form, with intervals from drawing the runs of each size anew (columns `size`, `loss`).

    A size with a single run is drawn as it is, so its seed's luck is not in the interval: n is the least number of runs.
    """
    rng = np.random.default_rng(seed)
    plain = savings(method.groupby("size")["loss"].mean(), baseline.groupby("size")["loss"].mean())
    least = int(min(frame.groupby("size").size().min() for frame in (method, baseline)))
    groups = [
        {size: rows.to_numpy(dtype=float) for size, rows in frame.groupby("size")["loss"]}
        for frame in (method, baseline)
    ]
    drawn: dict[str, list[float]] = {name: [] for name in FORMS}
    for _ in range(resamples if least > 1 else 0):
        means = [pd.Series({k: rng.choice(v, len(v)).mean() for k, v in group.items()}) for group in groups]
        for name, value in savings(*means).items():
            drawn[name].append(value)
    return {name: _percentiles(plain[name], drawn[name], least) for name in FORMS}


def _percentiles(value: float, drawn: Sequence[float], n: int) -> Interval:
    known = np.asarray(drawn, dtype=float)
    if math.isnan(value) or not len(known) or np.isnan(known).mean() > 1 - LEVEL:
        return Interval(value, math.nan, math.nan, n)
    low, high = np.nanpercentile(known, [100 * (1 - LEVEL) / 2, 100 * (1 + LEVEL) / 2])
    return Interval(value, float(low), float(high), n)
