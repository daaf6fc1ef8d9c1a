"""Differences of steps that some runs have not reached by their last step (right-censored steps)."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy import stats

from workbench.statistics.error_bars import Interval, over_seeds

PERMUTATIONS = 9_999  # at most; fewer where all can be counted


def compare_steps(method: pd.DataFrame, baseline: pd.DataFrame) -> Interval:
    """Return the mean difference of steps, method - baseline, over the seeds that both have.

    If every run has reached its step, this is the paired difference with Student's t interval. Otherwise a run that has not counts
    with its last step, so that the difference is one of restricted means. It has no interval then: runs that all count with one
    step have no spread, and an interval would show the other model's alone. Its p is that of an exact permutation test of the
    log-rank statistic, which uses only the order of steps and who has not reached one.

    Args:
        method: Columns `at` (step reached, or the last step) and `formed` (whether it was reached), indexed by seed.
        baseline: The same of the model that is compared with.

    Returns:
        The difference in steps.

    Reference:
        Mantel (1966), Evaluation of survival data and two new rank order statistics arising in its consideration.
    """
    shared = method.index.intersection(baseline.index)
    method, baseline = method.loc[shared], baseline.loc[shared]
    each = (method["at"] - baseline["at"]).to_numpy(dtype=float)
    if len(each) < 2 or (method["formed"].all() and baseline["formed"].all()):
        return over_seeds(each)
    scores = _log_rank_scores(pd.concat([method, baseline], ignore_index=True))
    mine, others = scores[: len(shared)], scores[len(shared) :]
    test = stats.permutation_test(
        (mine, others), lambda a, b, axis: a.sum(axis) - b.sum(axis), vectorized=True, n_resamples=PERMUTATIONS, rng=0
    )
    mean = float(each.mean())
    agree = mean * float(mine.sum() - others.sum()) < 0  # fewer events than expected: later
    return Interval(mean, math.nan, math.nan, len(each), float(test.pvalue) if agree else 1.0, tuple(each.tolist()))


def _log_rank_scores(runs: pd.DataFrame) -> np.ndarray:
    """Events minus expected events of each run; their sum over a group is the numerator of the log-rank statistic."""
    at, formed = runs["at"].to_numpy(dtype=float), runs["formed"].to_numpy(dtype=bool)
    times = np.unique(at[formed])
    hazards = np.array([(formed & (at == t)).sum() / (at >= t).sum() for t in times])
    return formed - (hazards * (times <= at[:, None])).sum(axis=1)
