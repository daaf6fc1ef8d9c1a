"""Correction of p-values for the number of tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def holm(p: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Return Holm-adjusted p-values (Holm 1979), in input order. scipy corrects the false discovery rate only.

    Rejecting at adjusted p <= 0.05 bounds the family-wise error rate at 5 % under any dependence.

    Args:
        p: The p-values.
        weights: Share of the error rate that each test has, in proportion; default equal shares. They must not depend on `p`.
    """
    order, ratios, remaining = _steps(p, weights)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1, np.maximum.accumulate(remaining * ratios))
    return [float(x) for x in adjusted]


def holm_factors(p: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Return the number that Holm's procedure multiplies each p-value by, in input order; arguments as of `holm`.

    An interval with the error level divided by this factor excludes 0 exactly where the adjusted p-value rejects.
    """
    order, ratios, remaining = _steps(p, weights)
    values, steps = np.asarray(p, dtype=float)[order], remaining / _shares(p, weights)[order]
    adjusted, factors = np.maximum.accumulate(remaining * ratios), np.empty(len(p))
    factors[order] = np.divide(adjusted, values, out=steps, where=values > 0)
    return [float(x) for x in factors]


def _shares(p: Sequence[float], weights: Sequence[float] | None) -> np.ndarray:
    return np.ones(len(p)) if weights is None else np.asarray(weights, dtype=float)


def _steps(p: Sequence[float], weights: Sequence[float] | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Order of the tests, each p-value over its weight, and the sum of the weights from there on."""
    shares = _shares(p, weights)
    ratios = np.asarray(p, dtype=float) / shares
    order = np.argsort(ratios, kind="stable")
    return order, ratios[order], np.cumsum(shares[order][::-1])[::-1]
