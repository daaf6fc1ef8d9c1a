"""Correction of p-values for the number of tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def holm(p: Sequence[float]) -> list[float]:
    """Return Holm-adjusted p-values (Holm 1979), in input order. scipy corrects the false discovery rate only.

    Rejecting at adjusted p <= 0.05 bounds the family-wise error rate at 5 % under any dependence.
    """
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1, np.maximum.accumulate(np.arange(len(p), 0, -1) * np.asarray(p)[order]))
    return [float(x) for x in adjusted]


def holm_factors(p: Sequence[float]) -> list[float]:
    """Return the number that Holm's procedure multiplies each p-value by, in input order: at least 1, at most their count.

    An interval with the error level divided by this factor excludes 0 exactly where the adjusted p-value rejects.
    """
    order, values = np.argsort(p, kind="stable"), np.sort(np.asarray(p, dtype=float), kind="stable")
    steps = np.arange(len(p), 0, -1, dtype=float)
    adjusted, factors = np.maximum.accumulate(steps * values), np.empty(len(p))
    factors[order] = np.divide(adjusted, values, out=steps.copy(), where=values > 0)
    return [float(x) for x in factors]
