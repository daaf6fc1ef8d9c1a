"""Conditions for a test of final losses: training tokens, a flat end of the loss curve, and warm-up.

In early training the loss measures how fast a model starts. In `data/evidence` a value residual leads by 0.3 nats at 0.9 training
tokens per parameter, and most of that lead comes from the Transformer's short warm-up (`docs/evidence.md`).
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from workbench.claims.evidence import Evidence

TESTED = 10.0  # training tokens per parameter, below which a claim on the final loss is not tested
NAMED = 20.0  # below, the verdict names its budget
FALL = 0.02  # nats that the validation loss may still fall over the last tenth of the steps
WARM_UP = 100  # steps


def tokens_per_parameter(runs: pd.DataFrame) -> float:
    """Return the smallest number of training tokens per parameter among runs; NaN for no runs and if one is unknown."""
    return float((runs["tokens"] / runs["parameters"]).min(skipna=False))


def unmet(evidence: Evidence, runs: pd.DataFrame) -> str:
    """Return which condition of a comparison of final losses the runs do not meet; empty if they meet all.

    A run without a validation curve is not checked for a flat end.
    """
    budget, warm_up = tokens_per_parameter(runs), float(runs["warmup"].min(skipna=False))
    if unknown := [
        n for n, x in (("training tokens per parameter", budget), ("warm-up steps", warm_up)) if math.isnan(x)
    ]:
        return f"unknown {' and '.join(unknown)}; `workbench import --config` states what is known of a log"
    if budget < TESTED:
        return f"{budget:.1f} training tokens per parameter, {TESTED:.0f} are needed{_cost(evidence, runs)}"
    if warm_up < WARM_UP:
        return f"{warm_up:.0f} warm-up steps, {WARM_UP} are needed"
    falls = pd.Series({run: _last_fall(curve) for run, curve in evidence.of_runs(runs).curves().items()}, dtype=float)
    by_model = falls.groupby(
        runs.set_index("run")["model"]
    ).median()  # one rate of a sweep that is too high says nothing
    if len(by_model) and by_model.max() >= FALL:
        return f"the loss still falls by {by_model.max():.2g} nats over the last tenth of the steps, less than {FALL} is needed"
    return ""


def named(runs: pd.DataFrame) -> str:
    """Return the limit that a decided claim on the final loss states about its budget; empty from `NAMED` on."""
    budget = tokens_per_parameter(runs)
    return f"at {budget:.1f} tokens per parameter" if budget < NAMED else ""


def _cost(evidence: Evidence, runs: pd.DataFrame) -> str:
    """Tokens and hours that the same runs need up to `TESTED` and `NAMED`; empty for runs that did not record their speed."""
    pace = evidence.of_runs(runs).telemetry("tokens_per_second").groupby("run")["value"].median()
    if len(pace) < len(runs):
        return ""
    least, best = (f"{k * runs['parameters'].max() / 1e6:.2g}" for k in (TESTED, NAMED))
    hours = float((TESTED * runs.set_index("run")["parameters"] / pace).sum()) / 3600
    return (
        f" ({least} million tokens for each of {len(runs)} runs, about {hours:.2g} hours of one core at their speed; {best} million "
        f"and {NAMED / TESTED:.0f} times as long for a verdict without that limit)"
    )


def _last_fall(curve: pd.Series) -> float:
    """Fall of a validation curve over the last tenth of its steps."""
    last = curve.index[-1]
    return float(np.interp(0.9 * last, curve.index, curve) - curve.iloc[-1])
