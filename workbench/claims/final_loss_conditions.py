"""Conditions that runs must meet before a claim on their final loss is tested: budget, warm-up, a flat end."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from workbench.claims.evidence import Evidence

TESTED, NAMED = 10.0, 20.0  # tokens per parameter: a claim on the final loss is tested from, and names its budget up to
FALL = 0.02  # nats that the validation loss may still fall over the last tenth of the steps, the median over a model's runs
WARM_UP = 100  # steps


def tokens_per_parameter(runs: pd.DataFrame) -> float:
    """Return the smallest number of training tokens per parameter among runs; NaN for no runs and if one is unknown."""
    return float((runs["tokens"] / runs["parameters"]).min(skipna=False))


def unmet_condition(evidence: Evidence, runs: pd.DataFrame) -> str:
    """Return which condition of a test of final losses the runs do not meet; empty if they meet all.

    In early training the loss measures how fast a model starts. In `data/evidence` a value residual leads by 0.3 nats at 0.9 training
    tokens per parameter, and most of that lead comes from the Transformer's short warm-up (`docs/evidence.md`). A run without a
    validation curve is not checked for a flat end.
    """
    budget, warm_up = tokens_per_parameter(runs), float(runs["warmup"].min(skipna=False))
    known = {"training tokens per parameter": budget, "warm-up steps": warm_up}
    if unknown := [name for name, value in known.items() if math.isnan(value)]:
        return f"unknown {' and '.join(unknown)}; `workbench import --config` states what is known of a log"
    if budget < TESTED:
        pace, cost = evidence.of_runs(runs).telemetry("tokens_per_second").groupby("run")["value"].median(), ""
        cores = runs["device"].dropna().isin(["cpu", "unknown"]).all()
        if len(pace) == len(runs) and cores:  # all runs recorded their speed
            tokens = TESTED * runs.set_index("run")["parameters"]
            hours = float((tokens / pace).sum()) / 3600
            cost = f": {len(runs)} runs of {tokens.max() / 1e6:.2g} million tokens, about {hours:.2g} hours of one core"
        return f"{budget:.1f} training tokens per parameter, but {TESTED:.0f} are needed{cost}"
    if warm_up < WARM_UP:
        return f"there are {warm_up:.0f} warm-up steps, {WARM_UP} are needed"
    curves, model = evidence.of_runs(runs).curves(), runs.set_index("run")["model"]
    falls = {run: float(np.interp(0.9 * c.index[-1], c.index, c) - c.iloc[-1]) for run, c in curves.items()}
    by_model = pd.Series(falls, dtype=float).groupby(model).median()  # one too high rate of a sweep says nothing
    if len(by_model) and by_model.max() >= FALL:
        fall = f"{by_model.max():#.3g}"
        fall = fall if float(fall) > FALL else f"{by_model.max():.6f}"  # a number that rounds to the limit
        still = f"over the last tenth of the steps the loss still falls by {fall} nats, the median over runs; less than {FALL} is needed"
        return f"training has not converged ({still})"
    return ""
