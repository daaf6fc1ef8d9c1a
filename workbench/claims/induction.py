"""Do value paths speed up induction?"""

from __future__ import annotations

import pandas as pd

from workbench.claims.evidence import Evidence
from workbench.claims.registry import SCALED, claim
from workbench.claims.verdict import InsufficientEvidence, Verdict, judged
from workbench.claims.verdict_wording import listed, model_name, seeds_note
from workbench.statistics.censored import censored, censoring_rule, compare_steps, step_unit
from workbench.statistics.copying_and_sink_steps import formation_steps
from workbench.statistics.intervals import Interval

PATHS, CONTROL = ("svformer", "resformer", "resformer_constant"), "residual_k"
SAME_SCALE = (SCALED, "first_layer_shuffled")
"""Controls with ResFormer's scale of own values, and nothing of this sequence's first layer."""


@claim(
    supports="on random tokens repeated once, the copy loss falls below half of its start earlier with value paths than in vanilla, at "
    "every learning rate; it also falls earlier than with halved values alone, with the first layer's values of another sequence and with "
    "a key residual; the key residual is not ahead of vanilla",
    refutes="a value path is later than vanilla at some rate, or the key residual earlier",
    scale="2 to 4 layers, minutes on a CPU, three seeds",
    published="none known; measured by this project for 2 and 4 layers at three rates: SVFormer before ResFormer before vanilla before "
    "the key residual, with disjoint seeds",
    source="this project, after Olsson et al. 2022", shows={"metric": "copy_loss"},
)  # fmt: skip
def value_paths_speed_up_induction(evidence: Evidence) -> Verdict:
    """Models whose later layers read the first layer's values learn to copy earlier; a residual on the keys does not help."""
    races = evidence.of_task("repeated").comparable("transformer", PATHS, ignoring=("lr",), control=CONTROL)
    intervals, beyond = dict[str, Interval](), dict[str, Interval]()
    parts, doubt = [], []
    for rate, race in races.by_setting("lr", "transformer", PATHS):
        steps = copying_steps(race)
        for model in (m for m in (*PATHS, CONTROL, *SAME_SCALE) if m in steps):
            intervals[f"{model} at rate {rate:g}"] = ahead = compare_steps(steps[model], steps["transformer"])
            if model == CONTROL:
                doubt += [rate] * (ahead.value < 0)
            elif model in PATHS:
                for other in (m for m in (CONTROL, *SAME_SCALE) if m in steps):
                    beyond[f"{model} - {other} at rate {rate:g}"] = compare_steps(steps[model], steps[other])
            parts.append(f"{model_name(model)} {ahead}{seeds_note(ahead)} at rate {rate:g}")
    keys, scaled = ({n: i for n, i in intervals.items() if n.startswith(control)} for control in (CONTROL, SAME_SCALE))
    missing = [model_name(name) for name in (CONTROL, *SAME_SCALE) if not any(n.startswith(name) for n in intervals)]
    untrained = f"; controls that were not trained: {listed(missing)}" if missing else ""
    every = [*intervals.values(), *beyond.values()]
    sentence = (
        f"Step of learning to copy minus the Transformer's: {'; '.join(parts)}{untrained}.{censoring_rule(every)}"
    )
    paths = {name: i for name, i in intervals.items() if name not in keys | scaled}
    signs = [-1] * (len(paths) + len(beyond)) + [1] * len(keys)
    units = {name: step_unit([i]) for name, i in {**intervals, **beyond}.items()}
    return judged(
        paths, signs, sentence, "steps", units, also=beyond, against=keys, shown=scaled, doubt=doubt or untrained
    )  # fmt: skip


def copying_steps(race: Evidence) -> dict[str, pd.DataFrame]:
    """Return the step of learning to copy by model, indexed by seed (see `censored`)."""
    copying = race.telemetry("copy_loss")
    if copying.empty:
        raise InsufficientEvidence("The copy loss of these runs was not written down.")
    steps = formation_steps(copying)
    table = censored(steps["formation_step"], steps["last_step"])
    steps = steps.assign(at=table["at"], formed=table["formed"]).merge(race.runs[["run", "model"]], on="run")
    return {str(m): rows.groupby("seed").agg({"at": "mean", "formed": "all"}) for m, rows in steps.groupby("model")}
