"""Which tensor, source, layers and weight does the residual need?"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd

from workbench.claims.evidence import Evidence, at_last_step
from workbench.claims.loss import Tuning, at_best_rates, beside_scaled, ends_lower
from workbench.claims.registry import PAPER, RESFORMERS, SCALED, claim
from workbench.claims.verdict import InsufficientEvidence, Verdict, judged
from workbench.claims.verdict_wording import intervals_text, listed, model_name, seeds_note
from workbench.statistics.intervals import Interval, over_seeds

CONTROLS = ("residual_q", "residual_k", "residual_attention", "residual_hidden")
BEST_LAMBDA = 2.0  # the best weight, as published
WEIGHTS = 4  # of lambda, before a sweep says anything of its optimum


@claim(
    supports="the value residual ends lower than vanilla, and than residuals of queries, keys, attention and hidden state. It also ends "
    "lower than the control that halves its own values and adds nothing of the first layer's",
    refutes="any of the four ends lower than the value residual",
    scale="8 layers, three seeds",
    published="82M, average validation loss: vanilla 2.739, values 2.712, queries 2.742, keys 2.746, attention 2.757, hidden state "
    "2.781 (reported by others). The paper's third version shows the curves of values, keys and queries only",
    source=PAPER, metrics=("loss",), shows={"metric": "validation_loss"}, final_loss=True,
)  # fmt: skip
def value_path_is_the_place(evidence: Evidence) -> Verdict:
    """The value path is where the residual helps: the same shortcut on queries, keys, attention or the hidden state does not."""
    text = evidence.of_task("text")
    group, tuning = at_best_rates(text, "transformer", RESFORMERS, CONTROLS, also=(*CONTROLS, SCALED))
    model, losses = group.first_of(RESFORMERS), group.losses()
    intervals = group.differences(losses, model, ("transformer", *CONTROLS))
    scaled, told = beside_scaled(group, losses, model)
    missing = [model_name(name) for name in CONTROLS if name not in group.models]
    from_each = intervals_text({model_name(name): i for name, i in intervals.items()})
    untrained = f"; not trained: {', '.join(missing)}" if missing else ""
    few = seeds_note(intervals["transformer"])
    sentence = f"Loss of {model_name(model)} minus the loss of: {from_each} nats{few}{untrained}{told}; {tuning}."
    return judged(intervals, -1, sentence, "nats", also=scaled, doubt=missing or not scaled or tuning.edges)


def _with_options(evidence: Evidence, option: str) -> pd.DataFrame:
    """Models of fixed value residuals with the value of one option."""
    runs = evidence.runs[evidence.runs["architecture"].isin(("resformer", "resformer_constant", "resformer_sparse"))]
    rows = runs.drop_duplicates("model")
    chosen = rows["options"].map(lambda text: json.loads(text).get(option))
    return rows.assign(chosen=chosen)[["model", "architecture", "chosen", "options"]].dropna(subset="chosen")


def _differs(models: pd.DataFrame, *options: str) -> pd.Series:
    """Return for each model whether an option other than these differs from its default."""
    other = [not set(re.findall(r"(\w+)=", name)) <= set(options) for name in models["model"]]
    return pd.Series(other, models.index, dtype=bool)


@claim(
    supports="values of layer 1 beat values of layers 2, 3 and later as the source",
    refutes="a later source ends lower",
    scale="8 layers, three seeds",
    published="stated with the first version's figure (paper); with layer 1's skip cut, layer 2 starts to help (reported by others)",
    source=PAPER, metrics=("loss",), shows={"metric": "validation_loss"}, final_loss=True,
)  # fmt: skip
def first_layer_is_the_source(evidence: Evidence) -> Verdict:
    """The first layer's values are the right source; a later layer's values help less."""
    text = evidence.of_task("text")

    def sources(runs: Evidence) -> pd.DataFrame:
        fixed = _with_options(runs, "source_layer").query("architecture == 'resformer'")
        fixed = fixed[~_differs(fixed, "source_layer", "layers")]
        layers = fixed["options"].map(lambda options: tuple(json.loads(options).get("layers", ())))
        return fixed.assign(layers=layers)

    every = sources(text)
    later, first = (every.loc[at, "model"].tolist() for at in (every["chosen"] > 0, every["chosen"] == 0))
    if not later:
        raise InsufficientEvidence(
            "Needs a value residual from another source: train resformer with --option source_layer=1 and 2."
        )
    group, tuning = at_best_rates(text, "resformer", tuple(later), also=[*later, *first])
    losses, paths, into = group.losses(), dict[str, str](), dict[str, tuple[int, ...]]()
    for name, source, layers in sources(group)[["model", "chosen", "layers"]].to_numpy():
        into[name], to = layers, f" into layers {listed(list(map(str, layers)))}" if layers else ""
        paths[name] = f"source layer {source:.0f}{to}"
    here = [name for name in later if name in paths]
    parts = {paths[name]: group.difference(losses, "resformer", name) for name in here}
    matched = {
        f"{paths[one]} - {paths[name]}": group.difference(losses, one, name)
        for one in first for name in here if one in paths and one != "resformer" and into[one] == into[name]
    }  # fmt: skip
    note = seeds_note(next(iter(parts.values())))
    equal = f"; with equal layers, {intervals_text(matched)} nats" if matched else ""
    lengths = {len(into[name]) for name in ("resformer", *here) if name in into}
    more = " The paths also differ in their number of layers." if len(lengths) > 1 and not matched else ""
    first_path, others = paths.get("resformer", "source layer 0"), intervals_text(parts, ", ")
    sentence = f"Loss with {first_path} minus that with {others} nats{note}{equal}; {tuning}.{more}"
    return judged({**parts, **matched}, -1, sentence, "nats", doubt=tuning.edges)


@claim(
    supports="residuals in the last layers alone beat those in all, and in the early ones; trained coefficients grow with depth",
    refutes="trained coefficients fall with depth, or residuals in the early layers, or in all of them, end lower",
    scale="8 layers or more",
    published="layers 6 to 8 of 8 at weight 5: 2.687 against 2.712 in all; best single layer 7 (reported by others)",
    source=PAPER, metrics=("loss",), shows={"metric": "coefficient"}, final_loss=True,
)  # fmt: skip
def late_layers_profit(evidence: Evidence) -> Verdict:
    """Late layers profit most from the first layer's values."""
    text = evidence.of_task("text")
    intervals, groups, tunings, left_out = dict[str, Interval](), list[Evidence](), dict[str, Tuning](), ""
    if placements := _placements(text):  # of one setting
        late, others = (tuple(dict.fromkeys(names)) for names in list(zip(*placements, strict=True))[1:])
        one = replace(text, compared=[]).comparable(late, others, ignoring=("lr",))
        text = replace(text, within=frozenset(one.runs["run"]))
    for name, better, worse in placements:
        name = f"{name} ({model_name(better)})" if name in intervals else name  # of another weight
        try:
            group, tuning = at_best_rates(text, better, worse)
            intervals[name] = group.difference(group.losses(), better, worse)
        except InsufficientEvidence as reason:  # often not trained in the setting that is judged
            left_out += f" Left out: {name}. {reason}"
            continue
        groups.append(group)
        tunings[str(tuning)] = tuning
    for model in (m for m in text.models if m.startswith("resformer_learnable")):
        try:  # runs of one setting, of that above where it has any
            own = next((group for group in groups if model in group.models), text).comparable(model)
        except InsufficientEvidence:
            continue  # not trained in the setting that is judged
        rows = own.of_model(own.written("coefficient"), model)
        rows = at_last_step(rows[(rows["part"] == "lambda_v1") & rows["layer"].notna()])
        seeds = [seed for _, seed in rows.groupby("seed") if seed["layer"].nunique() > 1]
        if slopes := [float(np.polyfit(r["layer"].astype(float), r["value"].astype(float), 1)[0]) for r in seeds]:
            intervals[f"growth per layer of {model}'s coefficients"] = over_seeds(slopes)
    if not intervals:
        raise InsufficientEvidence("Needs trained coefficients (resformer_learnable) or residuals in late against early layers "
            "(resformer_sparse, and with --option layers=[1,2])."
        )  # fmt: skip
    depth = text.fact("n_layers")
    note = "" if depth >= 8 else f" At {depth} layers late and early are hardly apart."
    units = {name: "weight per layer" for name in intervals if name.startswith("growth")}
    signs = [1 if name in units else -1 for name in intervals]
    sentence = f"{'; '.join([intervals_text(intervals, notes=True), *tunings])}.{note}{left_out}"
    edges = any(tuning.edges for tuning in tunings.values())
    doubt = edges or not any(name.startswith("late - early") for name in intervals)
    return judged(intervals, signs, sentence, "nats", units, doubt=doubt)


def _placements(text: Evidence) -> list[tuple[str, str, str]]:
    """Comparisons (name, late model, other model) of residuals in late layers with early layers and with all layers."""
    chosen = _with_options(text, "layers")
    chosen = chosen[chosen["chosen"].map(lambda layers: isinstance(layers, list) and len(layers) > 1)]
    if chosen.empty:
        return []
    rest = chosen["options"].map(lambda o: json.dumps({k: v for k, v in json.loads(o).items() if k != "layers"}))
    comparisons: list[tuple[str, str, str]] = []
    for _, group in chosen.groupby(rest):
        named = {str(name): layers for name, layers in zip(group["model"], group["chosen"], strict=True)}
        late = max(named, key=lambda name: (min(named[name]), max(named[name])))
        early = [name for name, layers in named.items() if max(layers) < min(named[late])]
        all_layers = [name for name, layers in named.items() if set(layers) > set(named[late])]
        comparisons += [("late - early layers' loss", late, name) for name in early[:1]]
        comparisons += [("late - all layers' loss", late, name) for name in all_layers[:1]]
    if "resformer" in text.models and not any(name.startswith("late - all") for name, *_ in comparisons):
        comparisons.append(("late - all layers' loss", late, "resformer"))
    return comparisons


@claim(
    supports="every weight of the first layer's values from 0.2 to 5 beats vanilla, the best near 2",
    refutes="some weight ends above vanilla, or an end of the grid below the weight nearest to 2",
    scale="8 layers, three seeds for each weight",
    published="weights 0.2, 0.5, 0.8, 1, 2 and 5 all below vanilla, best 2; NeuTRENO 0.2, 0.4, 0.6, 0.8, best 0.4 (paper)",
    source=PAPER, metrics=("loss",), shows={"metric": "validation_loss"}, final_loss=True,
)  # fmt: skip
def robust_to_its_weight(evidence: Evidence) -> Verdict:
    """The value residual helps for every weight of the first layer's values, with its best near 2."""
    text = evidence.of_task("text")
    fixed = _with_options(text, "lambda_v1")
    own = fixed["options"].map(lambda t: json.loads(t).get("lambda_own"))
    other = (fixed["architecture"] == "resformer_sparse") | _differs(fixed, "lambda_v1", "lambda_own")
    sweep = fixed[(own == 1.0) & ~other].drop_duplicates("chosen")
    if len(sweep) < WEIGHTS:
        raise InsufficientEvidence(
            f"Needs {WEIGHTS} weights or more at lambda_own=1, here {len(sweep)}: train resformer_constant with --option "
            f"lambda_v1=0.5 and so on."
        )
    group, tuning = at_best_rates(text, "transformer", *sweep["model"])
    losses = group.losses()
    by_weight = sweep.sort_values("chosen")[["model", "chosen"]].to_numpy().tolist()
    nearest = min(range(len(by_weight)), key=lambda i: abs(math.log(by_weight[i][1] / BEST_LAMBDA)))
    intervals = {f"lambda {weight:g}": group.difference(losses, name) for name, weight in by_weight}
    near, *ends = (by_weight[i] for i in (nearest, 0, -1))
    others = [(f"lambda {near[1]:g} - lambda {weight:g}", name) for name, weight in ends if name != near[0]]
    apart = {words: group.difference(losses, near[0], name) for words, name in others}
    note = seeds_note(intervals[f"lambda {near[1]:g}"])
    sentence = (
        f"Loss minus the Transformer's: {intervals_text(intervals)} nats; the weight nearest to {BEST_LAMBDA:g} minus the ends "
        f"of the grid: {intervals_text(apart)}{note}; {tuning}."
    )
    return judged({**intervals, **apart}, -1, sentence, "nats", doubt=len(apart) < len(ends) or tuning.edges)


@claim(
    supports="SATFormer, which gates its share of the first layer's values by token, ends lower than every fixed or learned constant "
    "share that is here",
    refutes="a constant share ends lower",
    scale="any size; retrieval, its largest published gain, is not measured here",
    published="below ResFormer from 130M to 1.3B, 1.5 points of retrieval, 1.75 to 1.82 times the throughput of hyper-connections and of "
    "MUDD (its own paper only)",
    source="SATFormer, arXiv 2605.03953 (2026)", metrics=("loss",), shows={"metric": "validation_loss"}, final_loss=True,
)  # fmt: skip
def reuse_by_token_beats_constant_reuse(evidence: Evidence) -> Verdict:
    """The share of the first layer's values that a layer reuses is better decided token by token."""
    return ends_lower(evidence, "satformer", RESFORMERS)
