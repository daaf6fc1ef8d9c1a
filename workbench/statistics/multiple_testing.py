"""Correction of p-values for the number of tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def holm(p: Sequence[float]) -> list[float]:
    """Return Holm-adjusted p-values, in input order. scipy corrects the false discovery rate only.

    Rejecting at adjusted p <= 0.05 bounds the family-wise error rate at 5 % under any dependence.

    Reference:
        Holm (1979), A simple sequentially rejective multiple test procedure.
    """
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1, np.maximum.accumulate(np.arange(len(p), 0, -1) * np.asarray(p)[order]))
    return [float(x) for x in adjusted]
