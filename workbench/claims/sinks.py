"""Which of sinks, drained values and hidden peaks change, and do they change together?"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from workbench.claims.evidence import SETTING, Evidence
from workbench.claims.induction import copying_steps
from workbench.claims.registry import PAPER, claim
from workbench.claims.verdict import InsufficientEvidence, Verdict, interval_table, judged
from workbench.claims.verdict_wording import intervals_text, listed, model_name
from workbench.errors import WorkbenchError
from workbench.statistics.censored import censored, censoring_rule, compare_steps, formed_in, median_in_words, step_unit
from workbench.statistics.copying_and_sink_steps import SINK, sink_step
from workbench.statistics.intervals import Interval, over_seeds, paired_seeds
from workbench.statistics.sink_thresholds import SINK_MASS, sink_kind

SINK_RATE = 0.05  # of a layer's heads: below, single documents pass by chance
SINK_SEEDS = 5  # one seed reproduced a published picture here and two did not
WRITING = ("no-op", "broadcast", "mixed")  # what a sink may do, of `sink_kind`
AT_ZERO = "held_start"  # the start token's value
EVEN, UNEVEN = "held_start[others_norm=1.0,start_norm=1.0]", "held_start[others_norm=1.0,start_norm=free]"
# all values of one norm, or all others'
METHODS = ("resformer", "svformer", "resformer_constant", "resformer_learnable", "resformer_sparse")


def need_sinks(evidence: Evidence) -> str:
    """Return the Transformer's sinks in words; raises `InsufficientEvidence` (gated) without sinks or with too few seeds.

    Concentration is no criterion, since local and content heads concentrate without a sink.
    """
    heads = strongest_mass(evidence, "transformer")
    masses = evidence.records("sink_mass")
    even = masses[masses["control"] == "uniform_causal"]
    uniform = f", uniform attention would give {even['value'].iloc[0]:.1%}" if len(even) else ""
    sunk = heads > SINK_MASS
    with contextlib.suppress(InsufficientEvidence):  # sequences under 64 tokens: the mass alone decides
        rate = evidence.of_model(evidence.rows("sink_rate"), "transformer")
        sunk &= rate.groupby(["seed", "layer"])["value"].mean().groupby("seed").max() > SINK_RATE
    formed = int(sunk.sum())
    if formed <= len(heads) / 2:
        raise InsufficientEvidence(
            "No sink formed in the vanilla model. Over seeds its strongest head gives the first token at most "
            f"{heads.max():.1%} of its attention{uniform}. A sink here means more than {SINK_MASS:.0%} in most seeds. "
            "So nothing can vanish.", "gated",
        )  # fmt: skip
    if len(heads) < SINK_SEEDS:
        why = f"The Transformer formed sinks in {formed} of {len(heads)} seeds. {SINK_SEEDS} seeds are needed: single seeds mislead here."
        raise InsufficientEvidence(why, "gated")
    return (
        f"vanilla has sinks in {formed} of {len(heads)} seeds (strongest head {heads.median():.0%}, median over seeds)"
    )


def strongest_mass(evidence: Evidence, model: str) -> pd.Series:
    """Return the sink mass of a model's strongest head at the last step, by seed."""
    mass = evidence.known(evidence.rows("sink_mass"), model)
    return mass.groupby(["seed", "layer", "head"])["value"].mean().groupby("seed").max()


def head_kinds(evidence: Evidence, model: str, step: str = "last") -> pd.DataFrame:
    """Return what each head's sink does (`sink_kind` of means over documents), with run, seed, layer and head.

    Raises `InsufficientEvidence` if `sink_output` is not measured.
    """
    rows = evidence.of_model(evidence.rows("sink_output", step=step, variant=...), model)
    if rows.empty:
        raise InsufficientEvidence(f"sink_output is not measured for {model_name(model)}.")
    rows, axes = rows.assign(variant=rows["variant"].fillna("ratio")), ["run", "seed", "layer", "head"]
    wide = rows.pivot_table(index=axes, columns="variant", values="value")
    if "ratio" not in wide:
        raise InsufficientEvidence(f"sink_output lacks its ratio for {model_name(model)}.")
    kinds = [sink_kind(*map(float, one)) for one in wide[["mass", "ratio", "spread"]].to_numpy()]
    return wide.reset_index()[axes].assign(kind=kinds)


def _kinds(evidence: Evidence, models: Sequence[str]) -> tuple[str, pd.DataFrame]:
    """Mean number of heads by kind of sink, in words and as a table; empty if not measured."""
    parts, tables = [], []
    for model in models:
        try:
            kinds = head_kinds(evidence, model)
        except InsufficientEvidence:
            continue
        heads, seeds = kinds.groupby(["layer", "head"]).ngroups, kinds["seed"].nunique()
        by_seed = kinds.groupby(["seed", "kind"]).size().unstack(fill_value=0)
        counts = {kind: by_seed[kind] if kind in by_seed else by_seed.iloc[:, 0] * 0 for kind in WRITING}
        intervals = {f"{model_name(model)}, {k} heads": over_seeds(c) for k, c in counts.items()}
        tables.append(interval_table(intervals, "heads"))
        writing = ", ".join(f"{c.mean():.3g} {k}" for k, c in counts.items() if c.any()) or "none"
        parts.append(f"{model_name(model)} {writing} of {heads} heads (mean of {seeds} seed{'s' * (seeds > 1)})")
    if not parts:
        return "", pd.DataFrame()
    return f" Sinks by their output: {'; '.join(parts)}.", pd.concat(tables, ignore_index=True)


def gated(
    evidence: Evidence, measured: Callable[[], Mapping[str, Interval]], unit: str
) -> tuple[str, Mapping[str, Interval]]:
    """Return the sinks in words and a claim's numbers; without sinks the numbers go into the gated verdict."""
    try:
        return need_sinks(evidence), measured()
    except InsufficientEvidence as reason:
        if reason.verdict.status != "gated":
            raise
        try:
            intervals = measured()
        except InsufficientEvidence:  # not measured either: the condition comes first
            raise reason from None
        sentence = f"{reason} The numbers all the same ({unit}), which decide nothing: {intervals_text(intervals)}."
        raise InsufficientEvidence(sentence, "gated", interval_table(intervals, unit)) from None


def logarithms(evidence: Evidence, metric: str, model: str, *, step: str = "last", **axes: Any) -> pd.DataFrame:
    """Return natural logarithms of a ratio's records for the Transformer and a model, in all layers after the first.

    The layers are fixed and the sign is preserved. A layer selected on the same runs, or the distance of single runs from 0, would favour
    the model with the wider spread.
    """
    rows = evidence.of_models(["transformer", model]).rows(metric, step=step, **axes)  # of other models it may be 0
    return rows[rows["layer"] > 0].assign(value=lambda r: np.log(r["value"].astype(float)))


@claim(
    supports="over the layers after the first, attention to the first token is lower than vanilla's; its state's norm relative to "
    "others' is lower than vanilla's; its value's norm relative to others' is higher than vanilla's",
    refutes="they dissociate: one of the three moves the other way",
    scale="a vanilla model that has sinks, five seeds; another measure for each of the three",
    published="468M, read off figures: first-token importance 0.4 to 0.5 against at most 0.07 (ResFormer); value norm 0.2 to 0.5 "
    "against 0.7 to 1.3; hidden norm 2,500 to 3,000 against about 300; others find that changed norms can remove peaks and leave sinks; "
    "exact cross-layer attention removes concentration yet keeps drains (paper)",
    source=PAPER, steps="ends", metrics=("sink_mass", "sink_rate", "value_drain", "hidden_peak", "token_importance", "sink_output"),
    shows={"metric": "value_drain", "site": "own_v"},
)  # fmt: skip
def sinks_drains_and_peaks_vanish_together(evidence: Evidence) -> Verdict:
    """Attention sinks, drained values and hidden peaks of the first token vanish together in value-residual models."""
    pair = evidence.measured().comparable("transformer", METHODS)
    model = pair.first_of(METHODS)
    site = "own_v" if model != "svformer" else "v"

    def measured() -> dict[str, Interval]:
        return {
            "attention to the first token": pair.difference(pair.rows("sink_mass").query("layer > 0"), model),
            "its state over others'": pair.difference(logarithms(pair, "hidden_peak", model, site="stream"), model),
            "its value over others'": pair.difference(logarithms(pair, "value_drain", model, site=site), model),
        }

    kinds, heads = _kinds(pair, ("transformer", model))
    try:
        formed, intervals = gated(pair, measured, "share, then natural logarithms")
    except InsufficientEvidence as reason:  # the outputs of sinks decide nothing, but are measured
        table = pd.concat([t for t in (reason.verdict.table, heads) if len(t)] or [heads], ignore_index=True)
        raise InsufficientEvidence(f"{reason}{kinds}", reason.verdict.status, table) from None
    values = "own values" if site == "own_v" else "its shared values, flat over layers by construction"
    sentence = (
        f"{formed}; {model_name(model)} - Transformer: {intervals_text(intervals)} (a share, then natural logarithms; "
        f"{values}).{kinds}"
    )
    units = {"attention to the first token": "share"}
    verdict = judged(intervals, (-1, -1, 1), sentence, "logarithm of a ratio", units, min_seeds=SINK_SEEDS)
    return replace(verdict, table=pd.concat([t for t in (verdict.table, heads) if len(t)], ignore_index=True))


@claim(
    supports="with a start token value-residual models keep their sinks; without one they lose them: an interaction",
    refutes="they lose more of them with a start token than without",
    scale="a vanilla model that has sinks, both arms, five seeds",
    published="none: a hypothesis of this project (the first layer's value of a start token near 0 could serve every layer)",
    source="this project", metrics=("sink_mass", "sink_rate"), shows={"metric": "sink_mass"},
)  # fmt: skip
def start_token_decides_the_sinks(evidence: Evidence) -> Verdict:
    """A trained start token decides whether value-residual models lose their sinks."""
    runs = evidence.measured().runs
    both = [rows for _, rows in runs.groupby("task") if rows["bos"].nunique() == 2]  # another task is no other arm
    if not both:
        raise InsufficientEvidence("Needs both arms of one task: runs with a start token (--bos each) and without.")
    arms = {bool(bos): evidence.of_runs(rows) for bos, rows in max(both, key=len).groupby("bos")}
    methods = [m for m in METHODS if all(m in arm.models for arm in arms.values())]
    changes, settings = {}, list[pd.DataFrame]()
    for bos, arm in arms.items():
        pair = arm.comparable("transformer", methods[:1] or METHODS)
        need_sinks(pair)
        model = pair.first_of(methods or METHODS)
        strongest = _strongest(pair)
        changes[bos] = pair.by_seed(strongest, model) - pair.by_seed(strongest, "transformer")
        settings.append(pair.runs[[c for c in SETTING if c != "data"]].drop_duplicates())
    differ = [c for c in settings[0] if len(pd.concat([each[c] for each in settings]).unique()) > 1]
    if differ or not methods:
        what = f"differ in {listed(list(map(str, differ)))}" if differ else "have no value-residual model in common"
        raise InsufficientEvidence(f"The runs with and without a start token {what}: train both arms equally.")
    interaction = paired_seeds(changes[True], changes[False])
    sentence = (
        f"Change of the strongest head's sink mass by the value residual: {changes[True].mean():+.3f} with a start token, "
        f"{changes[False].mean():+.3f} without; interaction {interaction}."
    )
    return judged({"interaction": interaction}, 1, sentence, "share", min_seeds=SINK_SEEDS)


@claim(
    supports="on a task that leaves a head idle, SVFormer's strongest head gives the start token half of its attention at a later "
    "step than vanilla's; the same holds counted from the step at which each has learned to copy; at the end of training it gives half",
    refutes="it does so earlier",
    scale="two layers of one head on Bigram-Backcopy, five seeds, checkpoints all along; no sink before the end would be prevention",
    published="none known; the task and its sinks: Guo et al. 2024",
    source="this project, after Guo et al. 2024", metrics=("sink_mass",), steps="series", shows={"metric": "sink_mass"},
)  # fmt: skip
def sharing_values_delays_the_sink(evidence: Evidence) -> Verdict:
    """A decoder whose layers share the first one's values forms its attention sink later than the vanilla decoder, but forms it."""
    pair = evidence.of_task("backcopy").comparable("transformer", "svformer")
    measured = set(pair.rows("sink_mass", step="all")["run"])
    others = pair.runs.loc[pair.runs["run"].isin(measured), "model"]
    evidence.compared.append(pair.of_models(others).runs.assign(beside="shown"))
    steps = {name: _sink_steps(pair, name) for name in dict.fromkeys(["transformer", "svformer", *others])}
    _need_one_half(steps["transformer"], "delay")
    copied = copying_steps(pair)
    later = {model_name(n): compare_steps(s, steps["transformer"]) for n, s in steps.items() if n != "transformer"}
    two = [(steps[name], copied[name]) for name in ("svformer", "transformer")]
    after = compare_steps(*(s.assign(at=s["at"] - c["at"], formed=s["formed"] & c["formed"]) for s, c in two))
    first = later.pop(model_name("svformer"))
    told = [f"{model_name(n)} {_onsets_in_words(s)}" for n, s in steps.items()]
    chances = [f", p = {one.p:.2g}" if math.isfinite(one.p) else "" for one in (first, after)]
    few = f" {first.n} seeds: a verdict needs {SINK_SEEDS}, and this p decides nothing." if first.n < SINK_SEEDS else ""
    intervals, also = {"SVFormer - Transformer": first}, {"from learning to copy": after}
    units = {name: step_unit([i]) for name, i in {**intervals, **also, **later}.items()}
    sentence = (
        f"Step at which the strongest head's sink mass passes one half, median: {'; '.join(told)}. SVFormer minus Transformer, "
        f"difference of {step_unit([first, after])}: {first}{chances[0]}; counted from the step of learning to copy: {after}{chances[1]}."
        f"{few}{censoring_rule([first, after, *later.values()])}"
    )
    return judged(
        intervals, 1, sentence, "steps", units, also=also, shown=later,
        doubt=steps["svformer"]["formed"].mean() <= 1 / 2, min_seeds=SINK_SEEDS,
    )  # fmt: skip


def _strongest(pair: Evidence) -> pd.DataFrame:
    """Sink mass of the strongest head at the last step, by run."""
    rows = pair.rows("sink_mass")
    heads = rows.groupby(["run", "seed", "layer", "head"], as_index=False)["value"].mean()
    return heads.loc[heads.groupby("run")["value"].idxmax()].assign(metric="sink_mass")


def _need_one_half(steps: pd.DataFrame, what: str) -> None:
    """Raise `InsufficientEvidence` (gated) if the Transformer forms no sink."""
    if steps["formed"].mean() <= 1 / 2:
        why = f"Vanilla's strongest head passes one half in {formed_in(steps)} seeds: nothing to {what}."
        raise InsufficientEvidence(why, "gated")


def _sink_steps(pair: Evidence, model: str) -> pd.DataFrame:
    """Step at which the sink mass passes one half, by seed (see `censored`)."""
    rows = pair.known(pair.rows("sink_mass", step="all"), model)
    try:
        steps = pd.Series({seed: sink_step(mass) for seed, mass in rows.groupby("seed")}, dtype=float)
    except WorkbenchError as error:
        raise InsufficientEvidence(f"{model_name(model)}: {error}.") from None
    last = strongest_mass(pair, model).reindex(steps.index)
    return censored(steps, pd.Series(float(pair.runs["steps"].max()), steps.index)).assign(lost=last < SINK)


def _onsets_in_words(steps: pd.DataFrame, more: str = "") -> str:
    """Return the median onset of `_sink_steps`, the seeds that passed one half, and those below it again at the end."""
    lost = int((steps["formed"] & steps["lost"]).sum())
    gone = f", {lost} below it again at the end" if lost else ""
    return f"{median_in_words(steps)} (passed in {formed_in(steps)} seeds{gone}{more})"


@claim(
    supports="on a task that leaves a head idle, gated attention's strongest head gives the start token less attention at the end "
    "than vanilla's, beyond the interval over seeds. It reaches half in at most half of the seeds",
    refutes="it gives it more",
    scale="two layers of one head on Bigram-Backcopy, five seeds, a vanilla model whose sink forms",
    published="share of attention that the first token gets: 0.467 without and 0.048 with the gate (paper)",
    source="Qiu et al. 2025, Gated Attention for Large Language Models", metrics=("sink_mass",), steps="series",
    shows={"metric": "sink_mass"},
)  # fmt: skip
def a_gate_prevents_the_sink(evidence: Evidence) -> Verdict:
    """A head whose output a gate can close needs no sink: gated attention forms none where the vanilla decoder does."""
    pair = evidence.of_task("backcopy").comparable("transformer", "gated_attention")
    steps = {name: _sink_steps(pair, name) for name in ("transformer", "gated_attention")}
    _need_one_half(steps["transformer"], "prevent")
    less = pair.difference(_strongest(pair), "gated_attention")
    told = "; ".join(f"{model_name(n)} {_onsets_in_words(s)}" for n, s in steps.items())
    sentence = (
        f"Step at which the strongest head's sink mass passes one half, median: {told}. Sink mass of the strongest head at the end, "
        f"gated minus Transformer: {less}."
    )
    doubt = steps["gated_attention"]["formed"].mean() > 1 / 2
    return judged({"strongest head": less}, -1, sentence, "share", doubt=doubt, min_seeds=SINK_SEEDS)


@claim(
    supports="with all values held at one norm from the first step, the strongest head gives the start token less attention at the end "
    "than with only the start's norm free. With the start's value at zero it gives half at an earlier step than vanilla's",
    refutes="it gives it more, or half of it later",
    scale="two layers of one head on Bigram-Backcopy, five seeds, a vanilla model whose sink forms; all arms",
    published="sink and drain grow together (Guo et al. 2024: sinks, drained values); which of them waits for the other is not separated",
    source="this project, after Guo et al. 2024", metrics=("sink_mass", "value_drain"), steps="series", shows={"metric": "sink_mass"},
)  # fmt: skip
def the_sink_waits_for_the_drain(evidence: Evidence) -> Verdict:
    """A head attends to the start token because its value is near zero. With a value as large as all others the token gets less
    attention, and with a value of zero it gets attention sooner.
    """
    arms = ("transformer", AT_ZERO, EVEN, UNEVEN)
    pair = evidence.of_task("backcopy").comparable(*arms)
    steps = {name: _sink_steps(pair, name) for name in arms}
    _need_one_half(steps["transformer"], "bring forward")
    less, sooner = pair.difference(_strongest(pair), EVEN, UNEVEN), compare_steps(steps[AT_ZERO], steps["transformer"])
    copied = {n: f", copying learned by {median_in_words(s)}" for n, s in copying_steps(pair).items() if n in steps}
    told = "; ".join(f"{model_name(n)} {_onsets_in_words(s, copied[n])}" for n, s in steps.items())
    ratios = ""
    with contextlib.suppress(InsufficientEvidence):  # norms of the start's value relative to others
        rows = pair.rows("value_drain", site="own_v")
        ends = [pair.known(rows, name).groupby(["run", "layer"])["value"].mean() for name in (EVEN, UNEVEN)]
        spans = [" to ".join(dict.fromkeys((f"{drain.min():.3g}", f"{drain.max():.3g}"))) for drain in ends]
        ratios = f". Over runs and layers the start's value ends at {spans[0]} of the others' norm, and at {spans[1]} if its norm is free"
    sentence = (
        f"Sink onset (step), median: {told}. Sink mass of the strongest head at the end, all values of one norm minus all "
        f"but the start's: {less}{ratios}. With the start's value at zero minus the Transformer, difference of {step_unit([sooner])}: "
        f"{sooner}.{censoring_rule([sooner])}"
    )
    intervals, units = {"one norm, mass": less, "at zero, steps": sooner}, {"at zero, steps": step_unit([sooner])}
    return judged(intervals, -1, sentence, "share", units, min_seeds=SINK_SEEDS)
