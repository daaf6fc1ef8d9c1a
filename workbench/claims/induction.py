"""Do value paths speed up induction?"""

from __future__ import annotations

import pandas as pd

from workbench.claims.evidence import Evidence
from workbench.claims.registry import claim
from workbench.claims.verdict import InsufficientEvidence, Verdict, judged
from workbench.claims.wording import model_name, seeds_note
from workbench.statistics.error_bars import Interval, paired_seeds
from workbench.statistics.formation import formation_steps

PATHS, CONTROL = ("svformer", "resformer", "resformer_constant"), "residual_k"


@claim(
    supports="on random tokens repeated once the copy loss falls below half of its start earlier with value paths than in vanilla, at "
    "every learning rate, and earlier than with a key residual, which is not ahead of vanilla",
    refutes="a value path is later than vanilla at some rate, or the key residual earlier",
    scale="2 to 4 layers, minutes on a CPU, three seeds",
    published="none known; measured by this project for 2 and 4 layers at three rates: SVFormer before ResFormer before vanilla before "
    "the key residual, with disjoint seeds",
    source="this project, after Olsson et al. 2022", shows={"metric": "copy_loss"},
)  # fmt: skip
def value_paths_speed_up_induction(evidence: Evidence) -> Verdict:
    """Models whose later layers read the first layer's values learn to copy earlier; a residual on the keys does not help."""
    races = evidence.of_task("repeated")
    races = races.comparable("transformer", PATHS, ignoring=("lr",), control=CONTROL)
    intervals, keys = dict[str, Interval](), dict[str, Interval]()
    parts, doubt = [], []
    for rate, runs in races.runs.groupby("lr"):
        try:
            race = races.of_runs(runs).comparable("transformer", PATHS)
        except InsufficientEvidence:
            continue
        steps = copying_steps(race)
        for model in (m for m in (*PATHS, CONTROL) if m in steps):
            intervals[f"{model} at rate {rate:g}"] = ahead = paired_seeds(steps[model], steps["transformer"])
            if model == CONTROL:
                doubt += [rate] * (ahead.value < 0)
            elif CONTROL in steps:
                keys[f"{model} - {CONTROL} at rate {rate:g}"] = paired_seeds(steps[model], steps[CONTROL])
            parts.append(f"{model_name(model)} {ahead}{seeds_note(ahead)} at rate {rate:g}")
    control = {name: i for name, i in intervals.items() if name.startswith(CONTROL)}
    untrained = "" if control else f"; the control, a {model_name(CONTROL)}, was not trained"
    sentence = f"Step of learning to copy minus the Transformer's: {'; '.join(parts)}{untrained}."
    paths = {name: i for name, i in intervals.items() if name not in control}
    signs = [-1] * (len(paths) + len(keys)) + [1] * len(control)
    return judged(paths, signs, sentence, "steps", also=keys, against=control, doubt=doubt or untrained)


def copying_steps(race: Evidence) -> dict[str, pd.Series]:
    """Formation step of each seed by model; a run that has not formed counts with its last step, which favours it."""
    copying = race.telemetry("copy_loss")
    if copying.empty:
        raise InsufficientEvidence("The copy loss of these runs was not written down.")
    steps = formation_steps(copying)
    steps = steps.assign(at=steps["formation_step"].fillna(steps["last_step"]).astype(float))
    steps = steps.merge(race.runs[["run", "model"]], on="run")
    return {str(m): rows.groupby("seed")["at"].mean() for m, rows in steps.groupby("model")}
