"""Do value paths speed up induction?"""

from __future__ import annotations

import pandas as pd

from workbench.claims.base import Evidence, Status, Undecided, Verdict, claim, few, joined, name_of, status_of, table_of
from workbench.findings import formation_steps
from workbench.statistics import Interval, paired_seeds

PATHS = ("svformer", "resformer", "resformer_constant")


@claim(
    supports="on random tokens repeated once the copy loss falls below half of its start earlier with value paths than in "
    "vanilla, at every "
    "learning rate, and not earlier with a key residual",
    refutes="the order is lost at some rate or size",
    scale="2 to 4 layers, minutes on a CPU, three seeds",
    published="none known; measured by this project for 2 and 4 layers at three rates: SVFormer before ResFormer before "
    "vanilla before the key "
    "residual, with disjoint seeds",
    source="this project, after Olsson et al. 2022", shows={"metric": "copy_loss"},
)  # fmt: skip
def value_paths_speed_up_induction(evidence: Evidence) -> Verdict:
    """Models whose later layers read the first layer's values learn to copy earlier; a residual on the keys does not help."""
    races = evidence.on("repeated")
    races.comparable("transformer", PATHS)  # says what is missing
    found: dict[str, Interval] = {}
    statuses: list[Status] = []
    told = []
    for rate, runs in races.runs.groupby("lr"):
        try:
            race = races.of(runs).comparable("transformer", PATHS)
        except Undecided:
            continue
        steps = _steps(race)
        base = steps["transformer"]
        for model in (m for m in (*PATHS, "residual_k") if m in steps):
            found[f"{model} at rate {rate:g}"] = ahead = paired_seeds(steps[model], base)
            control = model == "residual_k"
            statuses.append(
                ("refuted" if status_of(ahead, -1) == "supported" else "supported") if control else status_of(ahead, -1)
            )
            told.append(f"{name_of(model)} {ahead}{few(ahead)} at rate {rate:g}")
    return Verdict(
        joined(statuses),
        f"Step of learning to copy minus the Transformer's: {'; '.join(told)}.",
        table_of(found, "steps"),
    )


def _steps(race: Evidence) -> dict[str, pd.Series]:
    """Formation step of each seed by model; a run that has not formed counts with its last step, which favours it."""
    copying = race.telemetry[race.telemetry["metric"] == "copy_loss"]
    if copying.empty:
        raise Undecided("not_checkable", "The copy loss of these runs was not written down.")
    steps = formation_steps(copying)
    steps = steps.assign(at=steps["formation_step"].fillna(steps["last_step"]).astype(float))
    steps = steps.merge(race.runs[["run", "model"]], on="run")
    return {str(m): rows.groupby("seed")["at"].mean() for m, rows in steps.groupby("model")}
