"""Published figures, shipped as small tables with their sources (`data/published/`), and our runs on the same axes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import pandas as pd

from workbench.places import SHIPPED


@cache
def published(table: str) -> pd.DataFrame:
    """Return a table of `data/published/` by its name."""
    return pd.read_csv(SHIPPED / "published" / f"{table}.csv")


def published_differences(model: str) -> pd.DataFrame:
    """Return the published loss of a model minus its baseline: step, tokens_per_parameter, value (nats), source; may be empty."""
    rows = published("loss_differences")
    rows = rows[(rows["model"] == model) & (rows["step"] > 0)]
    return rows.assign(tokens_per_parameter=rows["step"] * rows["tokens_per_step"] / rows["parameters"])


def differences_by_budget(
    runs: pd.DataFrame, curves: Mapping[str, pd.Series], baseline: str = "transformer"
) -> pd.DataFrame:
    """Return loss differences from the baseline of the same seed, over training tokens per parameter.

    Args:
        runs: Columns run, model, seed, tokens (of the whole training), steps and parameters; runs with an unknown one are left out.
        curves: Validation loss by run and step.
        baseline: Model that is subtracted.

    Returns:
        Columns run, architecture, seed, step, tokens_per_parameter and value (nats); no row for step 0.
    """
    rows = []
    for _, alike in runs.dropna(subset=["tokens", "parameters"]).groupby("seed"):
        base = next((curves[run] for run in alike.loc[alike["model"] == baseline, "run"] if run in curves), None)
        for run in alike[alike["model"] != baseline].to_dict("records") if base is not None else ():
            if run["run"] in curves:
                change = (curves[run["run"]] - base).dropna()
                change = change[change.index > 0]
                axis = change.index.to_numpy(dtype=float) * run["tokens"] / run["steps"] / run["parameters"]
                facts = {"run": run["run"], "architecture": run["model"], "seed": run["seed"]}
                course = {"step": change.index, "tokens_per_parameter": axis, "value": change.to_numpy()}
                rows.append(pd.DataFrame(course).assign(**facts))
    columns = ["run", "architecture", "seed", "step", "tokens_per_parameter", "value"]
    return pd.concat(rows, ignore_index=True)[columns] if rows else pd.DataFrame(columns=columns)


def with_published(rows: pd.DataFrame, curves: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Append published curves by architecture to rows of `differences_by_budget`, as run `published` with their source."""
    behind = [curve.assign(architecture=name, run="published") for name, curve in curves.items()]
    return pd.concat([rows, *behind], ignore_index=True)[[*rows, "source"]]


def beside_published(model: str, budget: float) -> str:
    """Return a clause on the published difference at a number of tokens per parameter and at its end; empty without one."""
    rows = published_differences(model)
    if rows.empty or not np.isfinite(budget):
        return ""
    axis, values = rows["tokens_per_parameter"].to_numpy(), rows["value"].to_numpy()
    size, end = rows["parameters"].iloc[0] / 1e6, axis[-1]
    here = f"{np.interp(budget, axis, values):+.3f} at {budget:.3g}, where these runs end, and "
    here = here if axis[0] <= budget < end else ""
    after = f"; these runs end at {budget:.3g}" if not here else ""
    return (
        f"; published ({rows['source'].iloc[0]}, {size:.0f}M parameters, one run each): {values[0]:+.3f} at {axis[0]:.2g} tokens per "
        f"parameter, {here}{values[-1]:+.3f} at the end, {end:.3g}{after}"
    )
