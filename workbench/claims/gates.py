"""Do gates, scales and norms around attention change the loss, sinks, gradients or outliers?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from workbench.claims.evidence import Evidence
from workbench.claims.loss import Tuning, at_best_rates
from workbench.claims.registry import claim
from workbench.claims.sinks import SINK_SEEDS, gated, logarithms, strongest_mass
from workbench.claims.verdict import InsufficientEvidence, Verdict, judged
from workbench.claims.verdict_wording import intervals_text, model_name, seeds_note
from workbench.statistics.intervals import Interval, over_seeds, paired_seeds
from workbench.statistics.sink_thresholds import SINK_MASS

GRADIENT_SINKS = "Chen et al. 2026, Attention Sinks Induce Gradient Sinks, arXiv 2603.17771"
SINKS = ("sink_mass", "sink_rate")
OUTLIERS = "ln of the largest over the median entry, minus vanilla's"
NORMS = ("sandwich_norm", "post_norm", "dyt")
Measured = Callable[[Evidence, str], Mapping[str, Interval]]


@claim(
    supports="exclusive attention ends lower than vanilla at every length, and its lead is larger at the longest than at the shortest",
    refutes="it ends higher at a length",
    scale="two lengths of equal tokens a step; published from 0.7B on",
    published="2.7B: 1.36 points of a mean over tasks, losses not read off; with a gate, ten seeds of a speed run: 3.28316 to 3.27865 "
    "(modded-nanogpt 264); nanochat: better per step, not per second",
    source="Exclusive Self Attention, arXiv 2603.09078 (2026)", metrics=("loss",), shows={"metric": "validation_loss"}, final_loss=True,
)  # fmt: skip
def exclusive_heads_lower_the_loss(evidence: Evidence) -> Verdict:
    """Heads that may not write their own token's value end at a lower loss, the more the longer the text."""
    model = "exclusive_attention"
    text = evidence.of_task("text")
    alike = replace(text, compared=[]).comparable("transformer", model, ignoring=("T", "batch", "lr"))
    leads, tunings, left_out = dict[float, pd.Series](), dict[str, Tuning](), ""
    for length, runs in alike.runs.groupby("T"):
        try:
            pair, tuning = at_best_rates(text.of_runs(runs), "transformer", model)
            losses = pair.losses()
            both = [pair.by_seed(pair.known(losses, name), name) for name in (model, "transformer")]
        except InsufficientEvidence as reason:
            left_out += f" Left out: {float(str(length)):.0f} tokens. {reason}"
            continue
        if len(lead := (both[0] - both[1]).dropna()):  # of the seeds that both have
            leads[float(str(length))], tunings[str(tuning)] = lead, tuning
    if not leads:
        raise InsufficientEvidence(f"Needs transformer and {model} trained under equal conditions.{left_out}")
    first, last = min(leads), max(leads)
    parts = {f"{length:.0f} tokens": over_seeds(lead) for length, lead in leads.items()}
    longer = {"longest - shortest": paired_seeds(leads[last], leads[first])} if last > first else {}
    note = "" if longer else "; whether it grows with length needs runs of several"
    few = seeds_note(next(iter(parts.values())))
    numbers = intervals_text({**parts, **longer})
    sentence = f"Loss of {model_name(model)} minus the Transformer's: {numbers} nats{few}{note}; {'; '.join(tunings)}.{left_out}"
    doubt = not longer or any(tuning.edges for tuning in tunings.values())
    return judged(parts, -1, sentence, "nats", also=longer, doubt=doubt)


def _beside_sinks(
    evidence: Evidence, models: Sequence[str], measured: Measured, what: str, *, also: Measured | None = None, keep:
    bool = False,
) -> Verdict:  # fmt: skip
    """Judge numbers per model, all expected below 0, if the Transformer has sinks (`keep`: and if the models have them too).

    The numbers `also` must be above 0 before the claim is supported.
    """
    pair = evidence.measured().comparable("transformer", models)
    here = [model for model in models if model in pair.models]

    def below() -> dict[str, Interval]:
        return {f"{model_name(m)}, {name}": i for m in here for name, i in measured(pair, m).items()}

    formed, found = gated(pair, lambda: {**below(), **(also(pair, "transformer") if also else {})}, what)
    parts, losses = {name: found[name] for name in below()}, pair.losses()
    above = {name: i for name, i in found.items() if name not in parts}
    base, shown, told = strongest_mass(pair, "transformer"), dict[str, Interval](), []
    units, gone = dict[str, str](), False
    for model in here:
        mass, name = strongest_mass(pair, model), model_name(model)
        sunk = int((mass > SINK_MASS).sum())
        gone |= sunk <= len(mass) / 2
        told.append(f"{name} has them in {sunk} of {len(mass)}")
        shown |= {
            f"{name}, strongest head's sink mass": paired_seeds(mass, base),
            f"{name}, loss": pair.difference(losses, model),
        }
        units |= {f"{name}, strongest head's sink mass": "share", f"{name}, loss": "nats"}
    width = f"MLPs of {pair.runs['d_mlp'].max():.0f} neurons"
    sentence = f"{formed}, {', '.join(told)}; {what}: {intervals_text(found)}; minus vanilla's: {intervals_text(shown)}; {width}."
    signs = [-1] * len(parts) + [1] * len(above)
    return judged(
        parts, signs, sentence, "logarithm of a ratio", units, also=above, shown=shown, doubt=keep and gone, min_seeds=SINK_SEEDS
    )  # fmt: skip


def _outliers(pair: Evidence, model: str) -> Mapping[str, Interval]:
    return {"largest entry": pair.difference(logarithms(pair, "massive_activations", model, site="stream"), model)}


@claim(
    supports="where vanilla has sinks, the largest entry of the stream over the median one is lower with a gate on the values, over the "
    "layers after the first",
    refutes="it is higher",
    scale="a vanilla model that has sinks, five seeds; small models form small outliers",
    published="OPT 125M: kurtosis 2177 to 35, perplexity 15.95 to 15.49, loss by 8-bit rounding 27.8 to 0.93; BERT: kurtosis 2987 to 85, "
    "perplexity equal; a trained sink token ends at kurtosis 22, lower still (paper)",
    source="Value-State Gated Attention, arXiv 2510.09017 (2025)", metrics=(*SINKS, "massive_activations"),
    shows={"metric": "massive_activations", "site": "stream"},
)  # fmt: skip
def a_value_gate_removes_outliers(evidence: Evidence) -> Verdict:
    """A gate that closes a token's value from the value itself makes massive entries of the stream needless."""
    return _beside_sinks(evidence, ("value_gate",), _outliers, OUTLIERS)


@claim(
    supports="where vanilla has sinks, training raises the gradient that gathers at its first position; scaled values, which let less "
    "gradient through, leave sinks in most seeds; they lower that gradient and the first state's norm relative to the others'",
    refutes="either is higher",
    scale="a vanilla model that has sinks, five seeds; the ratio depends on the number of documents, equal here",
    published="median ratio 14.8 to 7.3 at 0.1B and 9.0 to 6.3 at 0.3B; the sinks remain and the norms of the first token fall; "
    "perplexity 22.84 and 22.83; Lambada and one retrieval worse (paper)",
    source=GRADIENT_SINKS, metrics=(*SINKS, "gradient_sink", "hidden_peak"), models=("transformer", "value_scale"), steps="ends",
    shows={"metric": "gradient_sink"},
)  # fmt: skip
def sinks_gather_gradients_that_spikes_answer(evidence: Evidence) -> Verdict:
    """Attention sinks gather gradient at the first token, and its massive state is the answer: less gradient, a smaller state."""

    def answer(pair: Evidence, model: str) -> Mapping[str, Interval]:
        return {
            "gradient at the first position": pair.difference(logarithms(pair, "gradient_sink", model), model),
            "its state over others'": pair.difference(logarithms(pair, "hidden_peak", model, site="stream"), model),
        }

    def learned(pair: Evidence, model: str) -> Mapping[str, Interval]:
        ends = (logarithms(pair, "gradient_sink", "transformer", step=step) for step in ("last", "first"))
        seeds = (pair.by_seed(rows, "transformer") for rows in ends)
        return {"vanilla's gradient, trained - init": paired_seeds(*seeds)}

    what = "logarithms of ratios, minus vanilla's"
    return _beside_sinks(evidence, ("value_scale",), answer, what, also=learned, keep=True)


@claim(
    supports="where vanilla has sinks, every other placement of the norms that is here (sandwich, output norm with normed queries and "
    "keys, DyT) keeps them in most seeds. The largest entry of the stream over the median one is lower",
    refutes="it is higher with one of them",
    scale="a vanilla model that has sinks, five seeds",
    published="spike and share of heads with a sink, 7B: 3818 and 46.0 % (base), 520 and 44.7 (sandwich), 92 and 42.0 (output norm), "
    "153 and 61.0 (DyT) (arXiv 2603.05498). Against it: trained models have no sinks without the output of the first layer's MLP at the "
    "first token (arXiv 2510.06477)",
    source="arXiv 2603.05498 (2026)", metrics=(*SINKS, "massive_activations"), shows={"metric": "massive_activations", "site": "stream"},
)  # fmt: skip
def norms_remove_spikes_and_leave_sinks(evidence: Evidence) -> Verdict:
    """Massive activations depend on the placement of the norms, attention sinks do not: norms can remove spikes and leave sinks."""
    return _beside_sinks(evidence, NORMS, _outliers, OUTLIERS, keep=True)
