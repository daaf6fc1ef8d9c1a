"""When a model learns to copy, and when its sink forms: steps read off curves over training.

Copying after Olsson et al. (2022), induction heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from workbench.errors import WorkbenchError


def copying(frame: pd.DataFrame) -> pd.DataFrame:
    """The loss where copying works, of every training step; raises `WorkbenchError` where there is none."""
    rows = frame[(frame["metric"] == "copy_loss") & frame["variant"].isna()]
    if rows.empty:
        raise WorkbenchError("no copy_loss here; it is written while training on repeated tokens")
    return rows


SINK = 0.5  # of a head's attention


def sink_step(mass: pd.DataFrame) -> float:
    """The step at which the strongest head's sink mass passes one half, between checkpoints on a straight line; NaN where none does.

    mass: records of `sink_mass` of one run at many checkpoints. A head that comes and goes counts from its first passing on.
    """
    rows = _plain_mass(mass)
    if rows["step"].nunique() < 2:
        raise WorkbenchError("sink_mass at less than two checkpoints; measure it at steps = 'all'")
    curve = rows.groupby(["step", "layer", "head"])["value"].mean().groupby("step").max().sort_index().astype(float)
    steps, values = curve.index.to_numpy(dtype=float), curve.to_numpy()
    above = np.flatnonzero(values >= SINK)
    if not len(above):
        return float("nan")
    i = above[0]
    if i == 0:
        return float(steps[0])
    return float(np.interp(SINK, values[i - 1 : i + 1], steps[i - 1 : i + 1]))


def _plain_mass(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[(frame["metric"] == "sink_mass") & frame["control"].isna() & frame["variant"].isna()]


def sink_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """The step each run's sink forms at, in the columns of `formation_steps`; runs with one checkpoint are left out."""
    found = []
    for (architecture, run, seed), rows in _plain_mass(frame).groupby(["architecture", "run", "seed"], dropna=False):
        if rows["step"].nunique() < 2:
            continue
        step = sink_step(rows)
        formed = "not formed" if np.isnan(step) else f"step {step:.0f}"
        found.append({
            "architecture": architecture, "run": run, "seed": seed, "formation_step": None if np.isnan(step) else round(step),
            "last_step": int(rows["step"].max()), "formed": formed,
        })  # fmt: skip
    return _in_order(found)


def formation_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """The step each run learned to copy at: the first whose copy loss is below half of its value at step 0.

    Columns architecture, run, seed, formation_step (null where it has not formed), last_step, formed (the step in words);
    architectures by their middle seed, earliest first. Raises `WorkbenchError` where no copy loss is.
    """
    rows_of_runs = []
    for (architecture, run, seed), rows in copying(frame).groupby(["architecture", "run", "seed"], dropna=False):
        curve = rows.sort_values("step").set_index("step")["value"]
        below = curve[curve < curve.iloc[0] / 2]
        step = int(below.index[0]) if len(below) else None
        rows_of_runs.append({
            "architecture": architecture, "run": run, "seed": seed, "formation_step": step, "last_step": int(curve.index[-1]),
            "formed": "not formed" if step is None else f"step {step}",
        })  # fmt: skip
    return _in_order(rows_of_runs)


def _in_order(found: list[dict[str, Any]]) -> pd.DataFrame:
    """A row per run, architectures by their middle seed, earliest first."""
    columns = ["architecture", "run", "seed", "formation_step", "last_step", "formed"]
    table = pd.DataFrame(found, columns=columns).astype({"formation_step": "Int64", "seed": "Int64"})
    middle = table["formation_step"].astype("float64").fillna(np.inf).groupby(table["architecture"]).median()
    order = table["architecture"].map(middle)
    table = table.assign(order=order).sort_values(["order", "architecture", "seed"], ignore_index=True)
    return table.drop(columns="order")
