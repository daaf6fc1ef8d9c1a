"""What do gates, scales and norms around attention change: the loss, sinks, gradients, outliers?"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from workbench.claims.evidence import Evidence
from workbench.claims.registry import claim
from workbench.claims.sinks import SINK_SEEDS, at_top, from_one, gated, strongest_mass
from workbench.claims.verdict import InsufficientEvidence, Verdict, judged
from workbench.claims.wording import model_name, numbers, seeds_note
from workbench.statistics.error_bars import Interval, over_seeds, paired_seeds
from workbench.statistics.sinks import SINK_MASS

GRADIENT_SINKS = "Chen et al. 2026, Attention Sinks Induce Gradient Sinks, arXiv 2603.17771"
SINKS = ("sink_mass", "sink_rate", "loss")
Measured = Callable[[Evidence, str], Mapping[str, Interval]]


@claim(
    supports="exclusive attention ends lower than vanilla at every length, and its lead is larger at the longest than at the shortest",
    refutes="it ends higher at a length",
    scale="two lengths of equal tokens a step; published from .7B on",
    published="2.7B: 1.36 points of a mean over tasks, losses not read off; with a gate, ten seeds of a speed run: 3.28316 to 3.27865 "
    "(modded-nanogpt 264); nanochat: better per step, not per second",
    source="Exclusive Self Attention, arXiv 2603.09078 (2026)", metrics=("loss",), shows={"metric": "validation_loss"},
)  # fmt: skip
def exclusive_heads_lower_the_loss(evidence: Evidence) -> Verdict:
    """Heads that may not write their own token's value end at a lower loss, the more the longer the text."""
    model = "exclusive_attention"
    text = evidence.of_task("text").comparable("transformer", model, ignoring=("T", "batch"))
    leads: dict[float, pd.Series] = {}
    for length, runs in text.runs.groupby("T"):
        try:
            pair = text.of_runs(runs).comparable("transformer", model)
        except InsufficientEvidence:  # one of them has another length
            continue
        losses = pair.losses()
        both = [pair.by_seed(pair.known(losses, name), name) for name in (model, "transformer")]
        leads[float(str(length))] = both[0] - both[1]
    if not leads:
        raise InsufficientEvidence(f"Needs transformer and {model} trained under equal conditions.")
    first, last = min(leads), max(leads)
    parts = {f"{length:.0f} tokens": over_seeds(lead) for length, lead in leads.items()}
    longer = {"longest - shortest": paired_seeds(leads[last], leads[first])} if last > first else {}
    note = "" if longer else "; whether it grows with length needs runs of several"
    few = seeds_note(next(iter(parts.values())))
    sentence = f"Loss of {model_name(model)} minus the Transformer's: {numbers({**parts, **longer})} nats{few}{note}."
    return judged(parts, -1, sentence, "nats", also=longer, doubt=not longer)


def _beside_sinks(
    evidence: Evidence, model: str, measured: Measured, what: str, *, also: Measured | None = None, keeps: bool = False
) -> Verdict:
    """Verdict on numbers that all should be below 0 where vanilla has sinks; with `keeps` only where this model has them too.

    `also`: what must be above 0 before anything is supported.
    """
    pair = evidence.measured().comparable("transformer", model)
    formed, found = gated(pair, lambda: {**measured(pair, model), **(also(pair, model) if also else {})}, what)
    below = {name: found[name] for name in measured(pair, model)}
    above = {name: i for name, i in found.items() if name not in below}
    kept, losses = strongest_mass(pair, model), pair.losses()
    sunk = int((kept > SINK_MASS).sum())
    shown = {
        "strongest head's sink mass": paired_seeds(kept, strongest_mass(pair, "transformer")),
        "loss": pair.difference(losses, model),
    }
    units = {"strongest head's sink mass": "share", "loss": "nats"}
    told = f"{model_name(model)} has them in {sunk} of {len(kept)}"
    sentence = f"{formed}, {told}; {what}: {numbers(found)}; {model_name(model)} - Transformer: {numbers(shown)}."
    signs = [-1] * len(below) + [1] * len(above)
    return judged(
        below, signs, sentence, "logarithm of a ratio", units, also=above, shown=shown,
        doubt=keeps and sunk <= len(kept) / 2, min_seeds=SINK_SEEDS,
    )  # fmt: skip


def _logarithms(pair: Evidence, metric: str, *, step: str = "last", **axes: str) -> pd.DataFrame:
    """Records of a metric that is a ratio, as natural logarithms."""
    rows = pair.rows(metric, step=step, **axes)
    return rows.assign(value=np.log(rows["value"].astype(float)))


@claim(
    supports="where vanilla has sinks, the largest entry of the stream over the median one is lower with a gate on the values, in the "
    "layer where both together have most",
    refutes="it is higher",
    scale="a vanilla model that has sinks, five seeds; small models form small outliers",
    published="OPT 125M: kurtosis 2177 to 35, perplexity 15.95 to 15.49, loss by 8-bit rounding 27.8 to .93; BERT: kurtosis 2987 to 85, "
    "perplexity equal; a trained sink token ends at kurtosis 22, lower still (paper)",
    source="Value-State Gated Attention, arXiv 2510.09017 (2025)", metrics=(*SINKS, "massive_activations"),
    shows={"metric": "massive_activations", "site": "stream"},
)  # fmt: skip
def a_value_gate_removes_outliers(evidence: Evidence) -> Verdict:
    """A gate that closes a token's value from the value itself makes massive entries of the stream needless."""

    def outliers(pair: Evidence, model: str) -> Mapping[str, Interval]:
        return {"largest entry": at_top(pair, _logarithms(pair, "massive_activations", site="stream"), model)}

    return _beside_sinks(evidence, "value_gate", outliers, "ln of the largest over the median entry, minus vanilla's")


@claim(
    supports="where vanilla has sinks, training raises the gradient that gathers at its first position; scaled values, which let less "
    "gradient through, leave sinks in most seeds and lower that gradient and the distance of the first state's norm from the others'",
    refutes="either is higher",
    scale="a vanilla model that has sinks, five seeds; the ratio depends on the number of documents, equal here",
    published="median ratio 14.8 to 7.3 at .1B and 9.0 to 6.3 at .3B, sinks kept, norms of the first token fallen, perplexity 22.84 and "
    "22.83; Lambada and one retrieval worse (paper)",
    source=GRADIENT_SINKS, metrics=(*SINKS, "gradient_sink", "hidden_peak"), models=("transformer", "value_scale"), steps="ends",
    shows={"metric": "gradient_sink"},
)  # fmt: skip
def sinks_gather_gradients_that_spikes_answer(evidence: Evidence) -> Verdict:
    """Attention sinks gather gradient at the first token, and its massive state is the answer: less gradient, a smaller state."""

    def answer(pair: Evidence, model: str) -> Mapping[str, Interval]:
        return {
            "gradient at the first position": at_top(pair, _logarithms(pair, "gradient_sink"), model),
            "its state's distance from 1": from_one(pair, "hidden_peak", model, site="stream"),
        }

    def learned(pair: Evidence, model: str) -> Mapping[str, Interval]:
        ends = (_logarithms(pair, "gradient_sink", step=step) for step in ("last", "first"))
        return {
            "vanilla's gradient, trained - init": paired_seeds(*(pair.by_seed(rows, "transformer") for rows in ends))
        }

    what = "logarithms of ratios, minus vanilla's"
    return _beside_sinks(evidence, "value_scale", answer, what, also=learned, keeps=True)
