"""Steps at which a model learns to copy (Olsson et al. 2022, Induction heads) and at which its attention sink forms."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd

from workbench.errors import WorkbenchError

SINK = 0.5  # share of a head's attention
RUN = ["architecture", "run", "seed"]


def copying(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the copy loss at every training step; raises `WorkbenchError` without any."""
    rows = frame[(frame["metric"] == "copy_loss") & frame["variant"].isna()]
    if rows.empty:
        raise WorkbenchError("no copy_loss here; it is written while training on repeated tokens")
    return rows


def sink_step(mass: pd.DataFrame) -> float:
    """Return the step at which the strongest head's sink mass passes one half, interpolated between checkpoints; else NaN."""
    rows = _plain_mass(mass)
    if rows["step"].nunique() < 2:
        raise WorkbenchError("sink_mass at less than two checkpoints; measure it at steps = 'all'")
    curve = rows.groupby(["step", "layer", "head"])["value"].mean().groupby("step").max().sort_index().astype(float)
    steps, values = curve.index.to_numpy(dtype=float), curve.to_numpy()
    above = np.flatnonzero(values >= SINK)
    if not len(above):
        return math.nan
    i = above[0]
    if i == 0:
        return float(steps[0])
    return float(np.interp(SINK, values[i - 1 : i + 1], steps[i - 1 : i + 1]))


def _plain_mass(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[(frame["metric"] == "sink_mass") & frame["control"].isna() & frame["variant"].isna()]


def sink_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the sink onset of every run with two checkpoints or more, in the columns of `formation_steps`."""
    runs = _plain_mass(frame).groupby(RUN, dropna=False)
    several = ((run, rows) for run, rows in runs if rows["step"].nunique() > 1)
    return _in_order((run, sink_step(rows), rows["step"].max()) for run, rows in several)


def formation_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the step at which each run learned to copy: the first with a copy loss below half of its first value.

    Columns are architecture, run, seed, formation_step (null if not reached), last_step and formed (in words), by median step.
    """
    steps = []
    for run, rows in copying(frame).groupby(RUN, dropna=False):
        curve = rows.sort_values("step").set_index("step")["value"]
        below = curve[curve < curve.bfill().iloc[0] / 2]  # a batch without copied tokens has no copy loss
        steps.append((run, float(below.index[0]) if len(below) else math.nan, curve.index[-1]))
    return _in_order(steps)


def _in_order(steps: Iterable[tuple[tuple[object, ...], float, int]]) -> pd.DataFrame:
    """One row per run, from its names, its step (NaN: not reached) and its last step."""
    rows = [
        (*run, None, int(last), "not formed") if math.isnan(at) else (*run, round(at), int(last), f"step {at:.0f}")
        for run, at, last in steps
    ]
    table = pd.DataFrame(rows, columns=[*RUN, "formation_step", "last_step", "formed"])
    table = table.astype({"formation_step": "Int64", "seed": "Int64"})
    medians = table["formation_step"].astype("float64").fillna(math.inf).groupby(table["architecture"]).median()
    order = table["architecture"].map(medians)
    table = table.assign(order=order).sort_values(["order", "architecture", "seed"], ignore_index=True)
    return table.drop(columns="order")
