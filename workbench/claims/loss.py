"""Do value residuals lower the loss, and what does that save or cost?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from workbench.claims.evidence import Evidence, best_rates
from workbench.claims.final_loss_conditions import TESTED, tokens_per_parameter
from workbench.claims.published_numbers import beside_published
from workbench.claims.registry import PAPER, RESFORMERS, SCALED, claim
from workbench.claims.verdict import InsufficientEvidence, Verdict, judged
from workbench.claims.verdict_wording import RATES, intervals_text, listed, model_name, seeds_note, share
from workbench.statistics.intervals import MIN_SEEDS, Interval, over_seeds, paired_documents
from workbench.statistics.loss_curves import step_at_loss
from workbench.statistics.parameter_and_token_savings import saved_share, savings_intervals

MAJORITY = 0.5  # the share of them in which the loss must be lower
RELATIVES = ("neutreno", "denseformer")
SLOWER = 0.05  # of the step time, before it counts as slower
UNSTEADY = 1.5  # ratio of a model's step times over its seeds, above which they measure the machine's load
MARKS = (1, 2.5, 5, 10, 20, 40)  # training tokens per parameter
EQUAL = 1.05  # ratio of tokens per parameter up to which sizes count as trained alike
LARGER = 0.02  # share of more parameters, from which on a lower loss may be theirs


@claim(
    supports="the mean difference of validation loss over seeds is below 0 beyond its interval, in most domains. The same holds for the "
    "difference from the control that halves its own values and adds nothing of the first layer's",
    refutes="it is above 0, or its sign flips once the baseline has its own best learning rate",
    scale="any size, three seeds, 10 training tokens per parameter; the effect is about 0.03 nats, 1 %",
    published="-0.0272, -0.0323 and -0.0269 nats at 82M, 180M and 468M, better in 7 of 7 domains, one seed (the paper's table); by others: "
    "-0.0151 bits per byte after 1,000 steps (parameter-golf); one of 18 modifications of 20 that stay within noise, z = 0.81 "
    "(arXiv 2605.20798)",
    source=PAPER, metrics=("loss",), steps="last", shows={"metric": "loss_difference"}, final_loss=True,
)  # fmt: skip
def lower_loss(evidence: Evidence) -> Verdict:
    """At equal size and data a value residual ends at a lower validation loss than the vanilla Transformer."""
    pair, tuning = at_best_rates(evidence.of_task("text"), "transformer", RESFORMERS, also=(SCALED,))
    model, losses = pair.first_of(RESFORMERS), pair.losses()
    scaled, told = beside_scaled(pair, losses, model)
    whole = pair.difference(losses, model)
    domains = {str(d): pair.difference(rows, model) for d, rows in losses.groupby("data")}
    better = sum(i.value < 0 for i in domains.values())
    documents, shared = pair.samples("loss"), ""
    final = documents[documents["variant"].isna() & (documents["step"] == documents["step"].max())]
    sides = [pair.of_model(final, name) for name in (model, "transformer")]
    mine, base = (rows[rows["seed"].isin({*sides[0]["seed"]} & {*sides[1]["seed"]})] for rows in sides)
    if len(mine) and len(base) and set(mine["document"]) & set(base["document"]):
        change = paired_documents(mine, base)
        shared = f"; over {change.n} shared documents of these seeds {change}"
    saved, reached = _reached(pair, model)
    both = pair.of_models([model, "transformer"])  # other models of the setting may have more parameters
    reached += _course(both, model) + beside_published(model, tokens_per_parameter(both.runs))
    sentence = (
        f"{model_name(model)} - Transformer: {whole} nats over {whole.n} seed{'s' * (whole.n != 1)}{seeds_note(whole)}"
        f", lower in {better} of "
        f"{len(domains)} domains{shared}{reached}{told}; {tuning}."
    )  # fmt: skip
    return judged(
        {"all domains": whole}, -1, sentence, "nats", dict.fromkeys(saved, "share"), also=scaled, shown={**domains, **saved},
        doubt=better <= MAJORITY * len(domains) or not scaled or tuning.edges,
    )  # fmt: skip


def beside_scaled(
    pair: Evidence, rows: pd.DataFrame, model: str, unit: str = "nats"
) -> tuple[dict[str, Interval], str]:
    """Return the difference from the control with halved values, by name and in words."""
    if SCALED not in pair.models:
        return {}, f"; the control, {model_name(SCALED)}, was not trained on these seeds"
    name, minus = f"minus {model_name(SCALED)}", pair.difference(rows, model, SCALED)
    return {name: minus}, f"; {name} {minus} {unit}"


@dataclass(frozen=True)
class Tuning:
    """How learning rates were chosen.

    `rates` is the number of rates, and `seeds` made the choice. `edges` are models whose best rate is an extreme of the grid, `untuned`
    models that are left out, since they have too few rates or seeds.
    """

    rates: int
    seeds: tuple[object, ...] = ()
    edges: tuple[str, ...] = ()
    untuned: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.rates:
            return "learning rates unknown"
        if self.rates < RATES:
            return "one learning rate, tuned for neither"
        many = len(self.seeds) > 1
        chosen = f"seed{'s' * many} {listed(list(map(str, self.seeds)))}, which {'are' if many else 'is'} not reported"
        on = f", chosen on {chosen}" if self.seeds else ""
        edge = f"; the best rate of {listed(self.edges)} is the smallest or the largest tried" if self.edges else ""
        absent = f"; left out, for too few rates or seeds: {listed(self.untuned)}" if self.untuned else ""
        return f"each at its best of {self.rates} learning rates{on}{edge}{absent}"


def at_best_rates(text: Evidence, *wanted: str | Sequence[str], also: Sequence[str] = ()) -> tuple[Evidence, Tuning]:
    """Return every model's runs at its best learning rate, and how the rates were chosen.

    The best rate has the lowest mean loss, among rates that all models share. If some seeds have all rates of all models, and three others
    have the best ones, the first seeds choose and the others are compared; one or two seeds that choose are never compared. With fewer than
    `RATES` shared rates, runs of equal rates or of rates chosen in another sweep are compared. The first name of each tuple that has runs
    is used; `also` are further models.
    """
    sweep = replace(text, settings=[], compared=[]).comparable(*wanted, ignoring=("lr",))
    names = [sweep.first_of((w,) if isinstance(w, str) else w) for w in wanted]
    rates = sweep.runs.dropna(subset="lr").groupby("model")["lr"].agg(set)
    shared = set.intersection(*(rates.get(name, set()) for name in names))
    untuned = list[str]()  # further models with so few of the rates that they would leave the others untuned
    for name in (name for name in dict.fromkeys(also) if name in sweep.models and name not in names):
        if len(both := shared & rates.get(name, set())) < min(RATES, len(shared)):
            untuned.append(model_name(name))
        else:
            names, shared = [*names, name], both
    if len(shared) < RATES:
        pair = text.comparable(*wanted, control=also[0] if also else None)
        if "rates" not in pair.runs:
            return pair, Tuning(len(shared))
        first = pair.runs.iloc[0]
        extreme = pair.runs.loc[pair.runs["edge"] & pair.runs["model"].isin(names), "model"].unique()
        return pair, Tuning(int(first["rates"]), (first["chosen_on"],), tuple(map(model_name, extreme)))
    sweep = text.comparable(*wanted, ignoring=("lr",))
    losses, runs = sweep.losses(), sweep.runs
    tried = losses[losses["lr"].isin(shared) & losses["model"].isin(names)]
    every = tried.groupby("seed")[["model", "lr"]].apply(lambda rows: len(rows.drop_duplicates()))
    choosing = every.index[every == len(names) * len(shared)]
    best = best_rates(tried[tried["seed"].isin(choosing)])
    reported = runs[(runs["lr"] == runs["model"].map(best)) & ~runs["seed"].isin(choosing)]
    enough = reported.groupby("model")["seed"].nunique().reindex(names, fill_value=0) >= MIN_SEEDS
    lacking = [name for name in also if not enough.get(name, True)]
    if lacking and enough.drop(lacking).all() and len(choosing) < MIN_SEEDS:  # these have the choosing seed alone
        text.compared.pop()
        pair, tuning = at_best_rates(text, *wanted, also=[name for name in also if name not in lacking])
        return pair, replace(tuning, untuned=(*tuning.untuned, *map(model_name, lacking)))
    apart = enough.all()
    if 0 < len(choosing) < MIN_SEEDS and not apart and best.keys() >= set(names):
        absent = listed([f"{model_name(name)} at {best[name]:g}" for name in enough.index[~enough]])
        on = listed([f"seed {int(seed)}" for seed in choosing])
        raise InsufficientEvidence(
            f"The best learning rate of each model was chosen on {on}, which a comparison may not count. "
            f"Train {absent} on {MIN_SEEDS} other seeds."
        )
    best = best if apart else best_rates(tried)
    if missing := [name for name in names if name not in best]:
        raise InsufficientEvidence(f"The last loss of {listed(missing)} is unknown at every rate.")
    ends = (min(shared), max(shared))
    edges = tuple(model_name(name) for name in names if best[name] in ends)
    compared = reported if apart else runs[runs["lr"] == runs["model"].map(best)]
    beside = compared[compared["model"].isin(names) & compared["model"].isin(also)]
    text.compared[-1:] = [r[r["run"].isin(compared["run"])].assign(rates=len(shared)) for r in text.compared[-1:]]
    text.compared.append(beside.assign(beside=True))
    seeds = tuple(map(int, choosing)) if apart else ()
    return sweep.of_runs(compared), Tuning(len(shared), seeds, edges, tuple(untuned))


def ends_lower(evidence: Evidence, model: str, *rivals: str | Sequence[str]) -> Verdict:
    """Judge whether every form of an architecture ends at a lower loss than all rivals, paired by seed."""
    text = evidence.of_task("text")
    forms = [name for name in text.models if name.partition("[")[0] == model] or [model]
    others = [name for rival in rivals for name in ((rival,) if isinstance(rival, str) else rival)]
    group, tuning = at_best_rates(text, forms, *rivals, also=[*forms, *others])
    losses = group.losses()
    parts = {
        f"{model_name(form)} - {model_name(name)}": i
        for form in forms if form in group.models for name, i in group.differences(losses, form, others).items()
    }  # fmt: skip
    few, size = seeds_note(next(iter(parts.values()))), group.runs.groupby("model")["parameters"].mean()
    more = {
        f"{model_name(form)} has {size[form] / size[name] - 1:.0%} more parameters than {model_name(name)}": None
        for form in forms
        for name in others
        if {form, name} <= set(size.index) and size[form] > (1 + LARGER) * size[name]
    }
    told = f"; {listed(list(more))}" if more else ""
    sentence = f"Loss of {intervals_text(parts)} nats{few}; {tuning}{told}."
    return judged(parts, -1, sentence, "nats", doubt=more or tuning.edges)


def steps_saved(pair: Evidence, model: str, baseline: str = "transformer") -> Interval:
    """Return the share of steps saved until the loss that both models reach, over seeds; negative if more steps are needed."""
    ratios = []
    for mine, base in pair.paired_curves(model, baseline).values():
        loss = max(float(mine.iloc[-1]), float(base.iloc[-1]))
        ratios.append(step_at_loss(mine, loss) / (step_at_loss(base, loss) or math.nan))
    return saved_share(ratios)


def _reached(pair: Evidence, model: str, baseline: str = "transformer") -> tuple[dict[str, Interval], str]:
    """Steps saved, as intervals and in words; none inside decaying schedules."""
    saved = steps_saved(pair, model, baseline)
    if (pair.runs["lr_final"] != 1.0).any() or math.isnan(saved.value):
        return {}, ""
    words = f"; the loss that both come down to is reached {share(saved)} of {model_name(baseline)}'s steps earlier"
    return {"share of steps saved" if baseline == "transformer" else f"{baseline}, share of steps saved": saved}, words


def _course(pair: Evidence, model: str) -> str:
    """Mean difference of the losses during long trainings, by training tokens per parameter."""
    if not (budget := tokens_per_parameter(pair.runs)) >= TESTED:
        return ""
    gaps = [(mine - base).dropna() for mine, base in pair.paired_curves(model, "transformer").values()]
    if not gaps:
        return ""
    gap = pd.concat(gaps, axis=1).mean(axis=1)
    gap.index = gap.index / gap.index[-1] * budget
    marks = [mark for mark in MARKS if gap.index[gap.index > 0][0] <= mark < budget]
    values = ", ".join(f"{np.interp(mark, gap.index, gap):+.3f} at {mark:g}" for mark in marks)
    return f"; mean difference during training {values} tokens per parameter" if marks else ""


@dataclass
class Points:
    """Last losses of both models and of the control at every size of a group of runs, each at its best learning rate."""

    losses: list[pd.DataFrame] = field(default_factory=list)
    tunings: list[Tuning] = field(default_factory=list)
    compared: list[pd.DataFrame] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, text: Evidence, runs: pd.DataFrame, size: str, by: Sequence[str]) -> Points:
        """Collect the points; `by` are the settings that tell sizes apart. The size is the Transformer's."""
        points = cls()
        for _, rows in runs[runs[size].notna()].groupby([*by], dropna=False):
            one = replace(text, runs=rows, sweeps=text.runs, settings=[], compared=[])
            try:
                pair, tuning = at_best_rates(one, "transformer", RESFORMERS, also=(SCALED,))
                losses = pair.losses().groupby(["model", "seed"], as_index=False)[["value"]].mean(skipna=False)
            except InsufficientEvidence as reason:
                points.left_out.append(f" Left out: {rows[size].median():,.0f} {size}. {reason}")
                continue
            at = pair.runs.loc[pair.runs["model"] == "transformer", size].iloc[0]
            points.losses.append(losses.rename(columns={"value": "loss"}).assign(size=at))
            points.tunings.append(tuning)
            points.compared += one.compared
        return points


def _saving(text: Evidence, size: str, points: Points) -> Verdict:
    """Judge the share of parameters or tokens that is saved at equal loss, by every form of the curve."""
    text.compared.extend(points.compared)
    losses = pd.concat(points.losses)
    by_model = dict(list(losses.groupby("model")))
    model = next(name for name in RESFORMERS if name in by_model)
    tuning = Tuning(
        min(t.rates for t in points.tunings),
        tuple(dict.fromkeys(str(seed) for t in points.tunings for seed in t.seeds)),
        tuple(dict.fromkeys(edge for t in points.tunings for edge in t.edges)),
    )
    against = {
        base: {form: i for form, i in savings_intervals(by_model[model], by_model[base]).items() if not math.isnan(i.value)}
        for base in ("transformer", SCALED) if base in by_model
    }  # fmt: skip
    if not against["transformer"]:
        raise InsufficientEvidence(f"The losses do not fall with the number of {size}, so no curve can be read.")
    shown, scaled = against["transformer"], against.get(SCALED, {})
    parts, halved = ("; ".join(f"{name} {share(i)}" for name, i in each.items()) for each in (shown, scaled))
    beside = f"of those of {model_name(SCALED)}: {halved}" if scaled else f"{model_name(SCALED)} has no such curve"
    sizes = losses["size"]
    sentence = (
        f"At the Transformer's last loss {model_name(model)} saves this share of the Transformer's {size}, by form of the curve: {parts}; "
        f"{beside}; {tuning}; {sizes.nunique()} trainings of {sizes.min():,.0f} to {sizes.max():,.0f} {size}. The forms differ on the "
        f"same numbers, and at this size the method is shown, not the published figure.{''.join(points.left_out)}"
    )
    also = {f"{name}, against {model_name(SCALED)}": i for name, i in scaled.items()}
    return judged(shown, 1, sentence, "share", also=also, doubt=not scaled or tuning.edges)


@claim(
    supports="the horizontal gap between the two curves of loss over parameters is above 0 with its interval over seeds, in "
    "every form of the curve",
    refutes="the gap is below 0 in some form; an interval around 0 leaves it open",
    scale="below 82M only as a demonstration of the method; the published share cannot be checked small",
    published="10.4 % (paper, third version), 13.3 % (fourth, reported by others), 16.1 % (fifth). Our own reading of the printed table "
    "gives 11.1 to 13.0 %, depending on the form of the curve",
    source=PAPER, metrics=("loss",), shows={"metric": "validation_loss"}, final_loss=True,
)  # fmt: skip
def fewer_parameters(evidence: Evidence) -> Verdict:
    """A value residual reaches the vanilla Transformer's loss with fewer parameters."""
    sizes, text = ("n_layers", "d_model", "n_heads", "d_mlp"), evidence.of_task("text")
    ignoring = (*sizes, "steps", "warmup", "lr")
    runs = replace(text, compared=[]).comparable("transformer", RESFORMERS, ignoring=ignoring).runs
    budget = (runs["tokens"] / runs["parameters"]).sort_values()
    alike = (budget > budget.shift() * EQUAL).cumsum().reindex(runs.index)
    groups = [rows for key in (alike, runs["steps"]) for _, rows in runs.groupby(-key)]  # longer trainings first
    points = max((Points.of(text, rows, "parameters", sizes) for rows in groups), key=lambda each: len(each.losses))
    if len(points.losses) > 1:
        return _saving(text, "parameters", points)
    text.comparable("transformer", RESFORMERS)  # names the runs that are here
    raise InsufficientEvidence(
        "Needs both models at two sizes or more, on equal data and recipe, trained for as many tokens or as many tokens per parameter; "
        "one size is here."
    )


@claim(
    supports="the horizontal gap between the two curves of loss over training tokens is above 0 with its interval over seeds, in "
    "every form of the curve",
    refutes="the gap is below 0 in some form; an interval around 0 leaves it open",
    scale="small models suffice if each length is a separate run with a separate schedule, or the learning rate is constant",
    published="13.6 % (paper, third version), 15.4 % (fourth, reported by others), 20.3 % (fifth)",
    source=PAPER, metrics=("loss",), shows={"metric": "validation_loss"}, final_loss=True,
)  # fmt: skip
def fewer_tokens(evidence: Evidence) -> Verdict:
    """A value residual reaches the vanilla Transformer's loss after fewer training tokens."""
    text = evidence.of_task("text")
    runs = replace(text, compared=[]).comparable("transformer", RESFORMERS, ignoring=("steps", "warmup", "lr")).runs
    points = Points.of(text, runs, "tokens", ["steps"])
    if len(points.losses) > 1:
        return _saving(text, "tokens", points)
    pair = text.comparable("transformer", RESFORMERS)
    model = pair.first_of(RESFORMERS)
    if (pair.runs["lr_final"] != 1.0).any():
        raise InsufficientEvidence(
            "Needs runs of several lengths, or a constant learning rate: points inside one decaying schedule are not the "
            "final losses of shorter trainings."
        )
    saved = steps_saved(pair, model)
    loss = pair.difference(pair.losses(), model)
    earlier = f"{share(saved)} earlier at a constant learning rate{seeds_note(saved)}"
    sentence = f"{model_name(model)} reaches the loss that both come down to {earlier}; its last loss minus the Transformer's is {loss}."
    return judged({"share of tokens saved": saved}, 1, sentence, "share", {"loss": "nats"}, shown={"loss": loss})


@claim(
    supports="no parameter more in the fixed forms, equal bytes of cache, a step time within 5 %",
    refutes="any of the three is exceeded beyond its interval",
    scale="any; measured, not asserted",
    published="stated in words only (paper)",
    source=PAPER, metrics=("cache_bytes",), models=("transformer", *RESFORMERS), shows={"metric": "tokens_per_second"},
)  # fmt: skip
def same_cost(evidence: Evidence) -> Verdict:
    """A value residual costs the same memory and compute as the vanilla Transformer."""
    pair = evidence.measured().comparable("transformer", RESFORMERS, also=("device",))
    model = pair.first_of(RESFORMERS)
    cache = pair.rows("cache_bytes")
    ratio = float(pair.known(cache, model)["value"].mean() / pair.known(cache, "transformer")["value"].mean())
    size = pair.runs.groupby("model")["parameters"].mean()
    added = float(size[model] - size["transformer"])
    pace = pair.written("tokens_per_second")
    step_time = (1 / pace.groupby("run")["value"].median().astype(float)).rename("value").reset_index()
    step_time = step_time.merge(pair.runs[["run", "seed"]], on="run")
    mine, base = (pair.by_seed(step_time, name) for name in (model, "transformer"))
    slower = over_seeds((mine / base)[base.index] - 1)
    spare, spread = over_seeds(SLOWER - ((mine / base)[base.index] - 1)), max(s.max() / s.min() for s in (mine, base))
    equal = ratio == 1 and added <= (2 * pair.runs["n_layers"].max() if "learnable" in model else 0)
    cached = "equal bytes of cache" if ratio == 1 else f"{ratio:.3f} times the Transformer's cache"
    costs = f"{model_name(model)}: {added:+.0f} parameters, {cached}"
    if spread > UNSTEADY:
        scope = f"step times of one model differ by a factor of {spread:.2g} between seeds, so the machine was not idle"
        sentence = f"{costs}. The cost in time is not stated: {scope}."
        if equal or spare.n < MIN_SEEDS:
            raise InsufficientEvidence(sentence, "gated", scope=scope)
        return Verdict("refuted", sentence, p=0.0)
    sentence = (
        f"{costs}, a step's time changes by {slower.value:+.1%} [{slower.low:+.1%}, {slower.high:+.1%}] over {slower.n} "
        f"seed{'s' * (slower.n != 1)}{seeds_note(slower)}, by the telemetry of training (allowed: {SLOWER:.0%})."
    )
    shown = {"change of the step time": slower}
    return judged({"left of the 5 % allowed": spare}, 1, sentence, "share", shown=shown, wrong=not equal)


@claim(
    supports="the order of validation losses is ResFormer below NeuTRENO and below DenseFormer, beyond the intervals",
    refutes="either ends lower than ResFormer",
    scale="8 layers, three seeds; DenseFormer's dilation and period must be stated",
    published="ranked first at 82M (paper's figure and text). Numbers reported by others conflict with this: NeuTRENO about -1.2 % and "
    "DenseFormer about -1.6 % against the baseline would put DenseFormer ahead",
    source=PAPER, metrics=("loss",), shows={"metric": "validation_loss"}, final_loss=True,
)  # fmt: skip
def ahead_of_relatives(evidence: Evidence) -> Verdict:
    """A value residual ends at a lower loss than NeuTRENO and than DenseFormer."""
    group, tuning = at_best_rates(evidence.of_task("text"), RESFORMERS, RELATIVES, also=RELATIVES)
    model = group.first_of(RESFORMERS)
    intervals = group.differences(group.losses(), model, RELATIVES)
    parts, shares = [], dict[str, Interval]()
    for name, i in intervals.items():
        saved, reached = _reached(group, model, name)
        parts.append(f"minus {model_name(name)} {i} nats{seeds_note(i)}{reached}")
        shares |= saved
    missing = [f"{model_name(name)} is missing" for name in RELATIVES if name not in intervals]
    depth = group.fact("n_layers")
    sentence = f"Loss of {model_name(model)} {'; '.join(parts + missing)}; {tuning}; at {depth} layers (published at 8 and more)."
    doubt = missing or tuning.edges
    return judged(intervals, -1, sentence, "nats", dict.fromkeys(shares, "share"), shown=shares, doubt=doubt)
