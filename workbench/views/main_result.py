"""The main result of the Start page: the best replicated comparison with the Transformer, in one sentence and two figures.

A fixed rule chooses the experiment: copying before loss, then most paired seeds, then most runs. Among several learning rates it
takes the rate with the lowest final loss of the Transformer. Losses after training at three rates or more are compared at each model's
best rate, as claims are. All models of the experiment are compared with the Transformer, with Holm's correction for their number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd

from workbench import plots
from workbench.claims.final_loss_conditions import TESTED, tokens_per_parameter
from workbench.claims.verdict import InsufficientEvidence, Verdict, interval_table, judge_differences, with_adjusted
from workbench.claims.verdict_wording import RATES
from workbench.errors import WorkbenchError
from workbench.file_io import digest
from workbench.models.architecture_names_and_colours import architecture_label
from workbench.plots.training_and_gradient_figures import curves
from workbench.runs.catalogue import Entry
from workbench.runs.run import Run
from workbench.statistics.censored import censored, compare_steps
from workbench.statistics.copying_and_sink_steps import formation_steps
from workbench.statistics.intervals import MIN_SEEDS, Interval, confidence, significance
from workbench.views import training
from workbench.views.page_links import Link
from workbench.views.registered_views import Drawing, view
from workbench.views.source import Source
from workbench.views.training import VANILLA, mean_of_domains

PARTS = {"finding": "Main result", "model": "One model", "here": "Runs", "verdicts": "Verdicts", "demo": "Demo"}
NAMED = 2  # models that the headline names
HALF_PAGE = 58  # characters


def check_part(link: Link, part: str) -> None:
    """Raise `WorkbenchError` if the link shows another part of the page."""
    if link.choice("show", PARTS, part, "part of the page") != part:
        raise WorkbenchError(f"drawn with show={part}")


@dataclass(frozen=True)
class Outcome:
    """The quantity by which runs are compared, and the words for a smaller and a larger number."""

    quantity: str
    verb: str
    unit: str
    less: str
    more: str
    title: str
    note: str = ""


COPYING = Outcome(
    "copy_loss", "copies", "steps", "earlier", "later", "Copying step minus the Transformer's",
    "Copying step: first step with a copy loss below half of its start.",
)  # fmt: skip
LOSS = Outcome(
    "validation_loss", "ends", "nats", "lower in validation loss", "higher in validation loss",
    "Final validation loss minus the Transformer's",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One experiment's comparison with the Transformer: intervals over paired seeds and corrected verdicts, by series."""

    outcome: Outcome
    group: str
    title: str
    rates: dict[str, float]
    """Learning rate of each experiment that differs in nothing else, this one included."""
    best: str
    """The experiment of `rates` with the lowest final loss of the Transformer."""
    intervals: dict[str, Interval]
    """As wide as Holm's correction demands."""
    plain: dict[str, Interval]
    """The same without correction."""
    never: dict[str, str]
    """Runs of a series that never reached the step, as `2 of 3`, by series."""
    verdicts: dict[str, Verdict]
    budget: float = math.nan
    """Fewest training tokens per parameter of its runs, where losses are compared; NaN if unknown."""
    runs: tuple[Entry, ...] = ()
    """The compared runs."""
    tuning: str = ""
    """How each model's learning rate was chosen, where they have rates of their own."""

    @property
    def seeds(self) -> tuple[int, int]:
        """Least and most paired seeds behind an interval."""
        counts = [i.n for i in self.intervals.values()]
        return min(counts), max(counts)


def finding(source: Source, link: Link) -> Finding:
    """Return the comparison of the link's experiment, or of the experiment that the rule chooses.

    Raises `WorkbenchError` if no finished Transformer shares a seed with a finished run of another model.
    """
    experiments: dict[str, list[Entry]] = {}
    asked = link.text("set")
    asked_runs = source.catalogue().groups.get(asked or "", ())  # a shipped experiment is compared if asked for
    shipped = bool(asked_runs) and all(e.shipped for e in asked_runs)
    for entry in (e for e in source.catalogue().entries if e.shipped) if shipped else source.listed():
        if entry.finished and not entry.imported and not entry.numbers_only:
            experiments.setdefault(entry.group, []).append(entry)
    experiments = {name: runs for name, runs in experiments.items() if _paired(runs)}
    if not experiments or asked not in (None, *experiments):
        raise WorkbenchError("no comparison: train a Transformer and another model to the end with the same --seed")

    def rank(group: str) -> tuple[Any, ...]:
        runs, paired = experiments[group], _paired(experiments[group])
        return paired >= MIN_SEEDS, runs[0].kind == "repeated", paired, len(runs), group

    key = ("finding", asked, *((e.path, e.series, e.stamp) for runs in experiments.values() for e in runs))
    group = asked or max(experiments, key=rank)
    result: Finding = source.keep(key, lambda: _compared(source, experiments, group, by_rule=asked is None))
    return result


def _paired(runs: Sequence[Entry]) -> int:
    """The most seeds that the Transformer shares with another series."""
    seeds: dict[str, set[int]] = {}
    for entry in runs:
        seeds.setdefault(entry.series, set()).add(entry.seed)
    base = seeds.pop(VANILLA, set())
    return max((len(base & others) for others in seeds.values()), default=0)


def _compared(source: Source, experiments: dict[str, list[Entry]], group: str, *, by_rule: bool) -> Finding:
    outcome = COPYING if experiments[group][0].kind == "repeated" else LOSS

    def setting(runs: Sequence[Entry]) -> tuple[float, str]:
        """The learning rate of an experiment, and a digest of everything else."""
        run = Run.open(runs[0].path)
        recipe = {k: v for k, v in asdict(run.train).items() if k != "lr"}
        return run.train.lr, digest(run.info["model"], recipe, run.info["data"], run.precision)

    shape = group.rpartition("-")[0]  # kind, layers and width
    settings = {name: setting(runs) for name, runs in experiments.items() if name.rpartition("-")[0] == shape}
    rates = {name: lr for name, (lr, rest) in settings.items() if rest == settings[group][1]}
    bases = {name: [e for e in experiments[name] if e.series == VANILLA] for name in rates}
    finals = {name: _final(source, of, outcome.quantity).groupby("seed")["value"].mean() for name, of in bases.items()}
    shared = set.intersection(*({*of.index} for of in finals.values()))  # of all rates
    losses = {name: float(of[of.index.isin(shared)].mean() if shared else of.mean()) for name, of in finals.items()}
    losses = {name: loss if math.isfinite(loss) else math.inf for name, loss in losses.items()}
    best = min(losses, key=lambda name: (losses[name], name))
    selected = best if by_rule else group
    runs, tuning = experiments[selected], ""
    if outcome is COPYING:  # per seed: `at`, and `formed`, which is False for a run that never copied
        rows = formation_steps(source.telemetry(runs, [outcome.quantity]))
        rows = rows.assign(**censored(rows["formation_step"], rows["last_step"]))
    else:
        if len(rates) >= RATES:
            runs, tuning = _at_best_rates([e for name in rates for e in experiments[name]]) or (runs, "")
        rows = _final(source, runs, outcome.quantity).rename(columns={"value": "at"}).assign(formed=True)
    by_model = rows.groupby("architecture")
    outcomes = {str(n): part.groupby("seed").agg({"at": "mean", "formed": "all"}) for n, part in by_model}
    base = outcomes.get(VANILLA, pd.DataFrame(columns=["at", "formed"]))
    others = plots.ordered(name for name in outcomes if name != VANILLA)
    intervals = {name: compare_steps(outcomes[name], base) for name in others}
    intervals = {name: interval for name, interval in intervals.items() if interval.n}
    if not intervals:
        raise WorkbenchError(f"{outcome.quantity.replace('_', ' ')} was not logged to the end of these runs")
    never = {n: f"{int((~o['formed']).sum())} of {len(o)}" for n, o in outcomes.items() if not o["formed"].all()}
    title, verdicts = experiments[selected][0].title, judge_differences(intervals)
    plain, intervals = intervals, {name: i.widened(verdicts[name].factor) for name, i in intervals.items()}
    budget = math.nan
    if outcome is LOSS:
        from workbench.claims.collect_evidence import run_facts  # imports torch

        budget = tokens_per_parameter(pd.DataFrame([run_facts(Run.open(e.path)) for e in runs]))
    return Finding(
        outcome, selected, title, rates, best, intervals, plain, never, verdicts, budget, tuple(runs), tuning
    )


def _at_best_rates(runs: Sequence[Entry]) -> tuple[list[Entry], str] | None:
    """Return the runs at each model's best learning rate and how it was chosen, by the rule of claims; None if they cannot be compared."""
    from workbench.claims.collect_evidence import stored  # imports torch
    from workbench.claims.loss import at_best_rates

    evidence, _ = stored(runs)
    try:
        group, tuning = at_best_rates(evidence, VANILLA, also=[name for name in evidence.models if name != VANILLA])
    except InsufficientEvidence:
        return None
    if tuning.rates < RATES:
        return None
    rates = group.runs.groupby("model")["lr"].first()
    each = ", ".join(f"{architecture_label(name)} {rates[name]:g}" for name in plots.ordered(rates.index))
    return [e for e in runs if e.name in set(group.runs["run"])], f"{str(tuning).capitalize()}: {each}."


def _final(source: Source, runs: Sequence[Entry], quantity: str) -> pd.DataFrame:
    """One row per run, mean over domains, of the runs that reached the last logged step."""
    rows = source.telemetry(runs, [quantity])
    rows = mean_of_domains(rows[rows["variant"].isna() & rows["control"].isna()])
    return rows[rows["step"] == rows["step"].max()]


def logged_rows(source: Source, runs: Sequence[Entry], metrics: Sequence[str]) -> pd.DataFrame:
    """Return the last logged row of every run and metric, with this origin as provenance."""
    rows = source.telemetry(runs, metrics)
    rows = rows[rows["step"] == rows.groupby(["run", "metric"], observed=True)["step"].transform("max")]
    return rows.assign(provenance=[json.dumps({"metric": m, "weights": "logged by training"}) for m in rows["metric"]])


def headline(result: Finding) -> str:
    """The main result in one sentence."""
    outcome, many, (_, seeds) = result.outcome, len(result.intervals), result.seeds
    if seeds < MIN_SEEDS:
        have = f"{seeds} seed{'s' if seeds > 1 else ''}"
        return f"Unresolved: {have} per model, and a verdict needs {MIN_SEEDS}."
    decided = [name for name, verdict in result.verdicts.items() if verdict.status != "unresolved"]
    if not decided:
        less = outcome.less.partition(" ")[0]
        who, either = "neither model" if many == 2 else f"none of {many} models", f"clearly {less} or {outcome.more}"
        if many == 1:
            who, either = architecture_label(next(iter(result.intervals))), f"neither clearly {less} nor {outcome.more}"
        return f"Unresolved over {seeds} seeds: {who} {outcome.verb} {either} than the Transformer."
    first, others = decided[0], decided[1:NAMED]
    parts = [f"{architecture_label(first)} {outcome.verb} {_amount(result, first)} than the Transformer"]
    parts += [f"{architecture_label(name)} {_amount(result, name, after=result.intervals[first])}" for name in others]
    rest = [f"{len(decided) - NAMED} more decided"] if len(decided) > NAMED else []
    rest += [f"{many - len(decided)} unresolved"] if many > len(decided) else []
    sentence = f"{', '.join(parts)}{'; ' if rest else ''}{', '.join(rest)}."
    never = f" Never: {_never(result)}." if result.never else ""
    return sentence[0].upper() + sentence[1:] + never


def _never(result: Finding) -> str:
    return ", ".join(f"{architecture_label(name)} {count} runs" for name, count in result.never.items())


def _amount(result: Finding, name: str, after: Interval | None = None) -> str:
    """`31 [13, 48] steps earlier`; after an interval of the same sign the numbers alone."""
    interval, outcome = result.intervals[name], result.outcome
    low, high = sorted((abs(interval.low), abs(interval.high)))
    digits = ".3g" if low < 10 else ".0f"
    numbers = f"{abs(interval.value):{digits}}"
    numbers += f" [{low:{digits}}, {high:{digits}}]" if math.isfinite(interval.low) else ""
    if after is None or (after.value < 0) != (interval.value < 0):
        numbers += f" {outcome.unit} {_direction(interval, outcome)}"
    return numbers


def _direction(interval: Interval, outcome: Outcome) -> str:
    return outcome.less if interval.value < 0 else outcome.more


def method(result: Finding) -> str:
    """How the comparison was made, in sentences."""
    few, most = result.seeds
    seeds, models = f"{few}" if few == most else f"{few} to {most}", len(result.intervals)
    means = f"Means over {seeds} paired seeds with {confidence()} intervals."
    if models > 1:
        means = f"Means over {seeds} paired seeds; their intervals are as wide as Holm's correction over {models} models demands."
    single = "1 seed: each number is one pair of runs and has no interval."
    sentences = [means if most > 1 else single, result.outcome.note]
    if result.never:
        sentences.append(
            f"Never below it: {_never(result)}. They count with their last step in the means; the verdict is a log-rank "
            "permutation test, without an interval."
        )
    if result.tuning:
        sentences.append(result.tuning)
    elif len(result.rates) > 1:
        rate, best = result.rates[result.group], result.rates[result.best]
        lowest = f"the lowest final loss of the Transformer among {len(result.rates)} rates"
        other = f"Learning rate {rate:g}, chosen here; {best:g} has {lowest}."
        sentences.append(f"Learning rate {rate:g}, with {lowest}." if rate == best else other)
    if math.isfinite(result.budget):
        early = "; differences are of early training, and the verdict on lower loss judges the longest training"
        early = early if result.budget < TESTED else ""
        sentences.append(f"These runs end at {result.budget:.3g} training tokens per parameter{early}.")
    return " ".join(filter(None, sentences))


@view("start")
def finding_curves(source: Source, link: Link) -> Drawing:
    """Loss of every model of the main result's experiment over training."""
    check_part(link, "finding")
    result = finding(source, link)
    if result.outcome is COPYING:
        drawing = training.copy_loss(source, Link("training", {"set": result.group}))
        return replace(drawing, figure=plots.narrow(drawing.figure, HALF_PAGE), sentence="")
    rows = source.telemetry(result.runs, [result.outcome.quantity])
    rows = mean_of_domains(rows[rows["variant"].isna() & rows["control"].isna()])
    rows = rows[rows["step"] > 0] if rows["step"].nunique() > 2 else rows  # beside random init no difference is seen
    return Drawing(plots.narrow(curves([rows], title="Validation loss"), HALF_PAGE), rows)


@view("start")
def finding_differences(source: Source, link: Link) -> Drawing:
    """Difference of every model from the Transformer, with confidence intervals over seeds."""
    check_part(link, "finding")
    result = finding(source, link)
    names = {n: architecture_label(n) for n in result.intervals}
    names |= {n: f"{names[n]}, {result.never[n]} never" for n in names if n in result.never}
    verdicts = [
        "unresolved" if verdict.status == "unresolved" else _direction(result.intervals[name], result.outcome)
        for name, verdict in result.verdicts.items()
    ]
    table = interval_table({names[n]: i for n, i in result.plain.items()}, result.outcome.unit)
    levels = [1 - significance() / verdict.factor for verdict in result.verdicts.values()]
    table = with_adjusted(table, [*result.intervals.values()]).assign(verdict=verdicts, level=levels)
    under = f"{result.title}; left of 0: {result.outcome.less}"
    many = f"{len(table)} models" if len(table) > 1 else ""
    drawn = plots.narrow(plots.intervals(table, result.outcome.title, under, adjusted=many), HALF_PAGE)
    return Drawing(drawn, table, method(result))
