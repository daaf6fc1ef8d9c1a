"""Tables of runs that never were, with known answers: what verdicts are tested on."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd

from workbench.claims import CLAIMS, RUN_COLUMNS, Evidence
from workbench.claims.evidence import ByMetric
from workbench.runs.records import records

FACTS = {
    "data": "d", "T": 128, "batch": 8, "steps": 300, "n_layers": 4, "d_model": 64, "n_heads": 4, "d_mlp": 176, "d_vocab": 1024,
    "warmup": 100, "lr_final": 0.1, "weight_decay": 0.1, "lr": 4e-3, "tokens": 8_000_000, "parameters": 4e5, "bos": False, "task": "text",
    "options": "{}", "study": "",
}  # fmt: skip
LAST = 300
ABOVE_THE_END = {0: 3.0, 100: 1.0, 200: 0.06, LAST: 0.0}  # of a loss, by step: flat enough at the end to be compared
WIGGLE = (0.0, 0.001, -0.001, 0.0005, -0.0005)


def run(model, seed=0, **facts):
    """One run's facts; its name holds what tells it apart."""
    kept = {**FACTS, **facts}
    name = "-".join([model, *(str(facts[k]) for k in sorted(facts) if k != "options"), f"s{seed}"])
    return {"run": name, "model": model, "architecture": model.partition("[")[0], "seed": seed, **kept}


def runs(*models, seeds=3, **facts):
    """Facts of each model with each seed."""
    return [run(model, seed, **facts) for model in models for seed in range(seeds)]


def row(of, metric, value, **axes):
    """One record of a run."""
    return {
        "run": of["run"], "architecture": of["model"], "seed": of["seed"], "step": LAST, "metric": metric, "value": value, "se": 0.001,
        "n": 64, "data": "validation", "T": of["T"], **axes,
    }  # fmt: skip


def evidence(facts, rows=(), telemetry=(), samples=()):
    """Evidence of planted rows."""
    table = pd.DataFrame(facts, columns=list(RUN_COLUMNS))
    return Evidence(
        table,
        *map(ByMetric.of_rows, (records(rows), records(telemetry), *([pd.DataFrame(samples)] if samples else []))),
    )


def losses(facts, value, domains=("a", "b", "c")):
    """A falling validation loss of each run that ends at `value(run)`, with a little of the seed's own luck."""
    found = []
    for of in facts:
        end = value(of) + WIGGLE[of["seed"]]
        for step, above in ABOVE_THE_END.items():
            found += [row(of, "validation_loss", end + above, step=step, data=f"validation/{d}") for d in domains]
    return found


def with_losses(levels, seeds=3, **facts):
    """Evidence of final losses alone: {model: loss}; a list gives each seed's."""
    made = runs(*levels, seeds=seeds, **facts)
    level = {m: x if isinstance(x, list) else [x] * seeds for m, x in levels.items()}
    return made, losses(made, lambda of: level[of["model"]][of["seed"]])


def per_layer(facts, metric, value, layers=range(4), **axes):
    """A record per layer: `value(run, layer)`."""
    return [row(of, metric, value(of, n) + 0.1 * WIGGLE[of["seed"]], layer=n, **axes) for of in facts for n in layers]


def sinks(facts, strongest):
    """Sink mass of two heads in each layer and the rate that goes with it; `strongest(run)` is head 0's mass in layer 2."""
    found = []
    for of in facts:
        for layer in range(4):
            top = strongest(of) if layer == 2 else 0.03
            found += [
                row(of, "sink_mass", top + 0.1 * WIGGLE[of["seed"]], layer=layer, head=0),
                row(of, "sink_mass", 0.03, layer=layer, head=1),
                row(of, "sink_mass", 0.04, layer=layer, head=0, control="uniform_causal"),
                row(of, "sink_rate", 0.5 if top > 0.3 else 0.0, layer=layer),
            ]
    return found


def options(**given):
    """Options as the runs table holds them."""
    return json.dumps(given)


def coefficients(facts, value, layers=range(1, 8)):
    """Trained first-layer coefficients at the last step."""
    return [
        row(of, "coefficient", value(n) + WIGGLE[of["seed"]], layer=n, part="lambda_v1") for of in facts for n in layers
    ]


def training(facts, curve, steps=LAST):
    """Training loss of every step: `curve(run, steps)` is an array."""
    found = []
    for of in facts:
        values = curve(of, np.arange(steps)) + WIGGLE[of["seed"]]
        found += [row(of, "train_loss", float(v), step=i) for i, v in enumerate(values)]
    return found


def formed(facts, sink, copied):
    """Sink mass of one head that jumps at `sink(run)`, and the copy loss that falls at `copied(run)`."""
    rows, told = [], []
    for of in facts:
        mass, loss = sink(of), copied(of)
        for step in range(0, LAST + 1, 10):
            rows.append(row(of, "sink_mass", 0.9 if step >= mass else 0.1, layer=1, head=0, step=step))
            told.append(row(of, "copy_loss", 1.0 if step >= loss else 4.0, step=step))
    return rows, told


NOISY = [2.70, 2.76, 2.73]


def judged(name, facts, rows=(), telemetry=(), samples=()):
    verdict = CLAIMS[name].judge(evidence(facts, rows, telemetry, samples))
    if "unit" in verdict.table and "comparison" in verdict.table:
        assert verdict.table.loc[verdict.table["comparison"].notna(), "unit"].all(), (
            "every compared number has its unit"
        )
    return verdict


def from_losses(name, levels, rows=(), **facts):
    made, told = with_losses(levels, **facts)
    return judged(name, made, rows, told)


def with_sinks(models=("transformer", "resformer"), seeds=5, strongest=0.5, **facts):
    made = runs(*models, seeds=seeds, **facts)
    return made, sinks(made, lambda of: strongest if of["model"] == "transformer" else 0.1)
