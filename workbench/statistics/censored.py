"""Steps that some runs do not reach before training ends (right-censored steps): medians, counts and differences."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain, combinations

import numpy as np
import pandas as pd

from workbench.statistics.intervals import Interval, over_seeds

ENUMERATED, DRAWN = 200_000, 9_999
"""Relabellings: all up to the first number (10 against 10 runs have 184,756), else so many random ones."""


def censored(reached: pd.Series, last: pd.Series) -> pd.DataFrame:
    """Return a table of steps: `at` (the step `reached`, or the `last` one if that is NaN) and `formed` (whether it was reached)."""
    reached = reached.astype(float)
    return pd.DataFrame({"at": reached.fillna(last.astype(float)), "formed": reached.notna()})


def median_step(steps: pd.DataFrame) -> float:
    """Return the median step; infinite if half of the runs or more did not reach it."""
    return float(steps["at"].where(steps["formed"], math.inf).median())


def formed_in(steps: pd.DataFrame) -> str:
    """Return in how many runs the step was reached, `3 of 5`."""
    return f"{steps['formed'].sum()} of {len(steps)}"


def median_in_words(steps: pd.DataFrame) -> str:
    """Return the median step in words, or the reason for its absence: too few runs reached it."""
    median = median_step(steps)
    few = "no median" if steps["formed"].any() else "none"
    return f"{median:.0f}" if math.isfinite(median) else f"{few} by step {steps['at'].max():.0f}"


def step_unit(differences: Iterable[Interval]) -> str:
    """Return the unit of differences of `compare_steps`: with a censored one among them they are restricted means."""
    return "restricted mean steps" if any(one.censored for one in differences) else "steps"


def censoring_rule(differences: Iterable[Interval]) -> str:
    """Return how the censored ones among some differences are judged, in words; empty without any."""
    rule = (
        " Censored: some run did not reach its step and counts with its last one, so the number is a difference of restricted mean "
        "steps. It has no interval; a log-rank test decides."
    )
    return rule if step_unit(differences) != "steps" else ""


def compare_steps(method: pd.DataFrame, baseline: pd.DataFrame) -> Interval:
    """Return the mean difference of steps, method - baseline, of `censored` tables, over shared seeds.

    If every run reached its step, this is the paired difference with Student's t interval. Otherwise it is the difference of
    restricted means: the mean number of steps without the event, up to the last step. It then has no interval, since that would show
    the spread of one model alone. Its p-value comes from a permutation test of the log-rank statistic (Mantel 1966), of which
    `scipy.stats.logrank` has only the asymptotic form. The test is exact up to `ENUMERATED` relabellings of the runs, 10 seeds. With
    more seeds it draws `DRAWN` random ones.
    """
    shared = method.index.intersection(baseline.index)
    method, baseline = method.loc[shared], baseline.loc[shared]
    steps = (method["at"] - baseline["at"]).astype(float).rename_axis("seed")
    if len(steps) < 2 or (method["formed"].all() and baseline["formed"].all()):
        return over_seeds(steps)
    scores, n = log_rank_scores(pd.concat([method, baseline], ignore_index=True)), len(shared)
    relabelled, own = math.comb(2 * n, n), float(scores[:n].sum())
    if relabelled <= ENUMERATED:
        groups = np.fromiter(chain.from_iterable(combinations(scores, n)), float, relabelled * n).reshape(-1, n)
        sums, actual = groups.sum(axis=1), 0
    else:
        sums, actual = np.random.default_rng(0).permuted(np.tile(scores, (DRAWN, 1)), axis=1)[:, :n].sum(axis=1), 1
    tails = [int((side * sums <= side * own + 1e-9).sum()) + actual for side in (-1, 1)]
    mean, names = float(steps.mean()), tuple(map(str, steps.index))
    p = min(1.0, 2 * min(tails) / (len(sums) + actual)) if mean * own < 0 else 1.0  # fewer events than expected: later
    return Interval(mean, math.nan, math.nan, len(steps), p, tuple(steps.tolist()), names)


def log_rank_scores(runs: pd.DataFrame) -> np.ndarray:
    """Return events minus expected events by run; their sum over a group is the numerator of the log-rank statistic."""
    at, formed = runs["at"].to_numpy(dtype=float), runs["formed"].to_numpy(dtype=bool)
    times = np.unique(at[formed])
    hazards = np.array([(formed & (at == t)).sum() / (at >= t).sum() for t in times])
    return formed - (hazards * (times <= at[:, None])).sum(axis=1)
