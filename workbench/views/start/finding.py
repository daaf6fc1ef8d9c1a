"""The first sentence of the Start page: what the best replicated comparison with the Transformer says.

Nothing is chosen for its effect. The experiment is the first of: learning to copy, then loss; of each the one with most paired
seeds, then with most runs. Of several learning rates it is the one at which the Transformer's own final loss of that kind is least.
All models of the experiment are compared, and the verdicts corrected for their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from workbench import plots
from workbench.claims.verdict import Verdict, interval_table, judge_differences
from workbench.errors import WorkbenchError
from workbench.files import digest
from workbench.models.registry import label
from workbench.runs.catalogue import Entry
from workbench.runs.run import Run
from workbench.statistics.censored import censored, compare_steps
from workbench.statistics.formation import formation_steps
from workbench.statistics.intervals import MIN_SEEDS, Interval, confidence, paired_seeds
from workbench.views import training
from workbench.views.base import Drawing, view
from workbench.views.link import Link
from workbench.views.source import Source
from workbench.views.start.parts import check_part
from workbench.views.training import VANILLA, mean_of_domains

NAMED, WHOLE = 2, 10  # models that the sentence names; numbers from here on it tells in whole ones
HALF_PAGE = 58  # characters


@dataclass(frozen=True)
class Outcome:
    """What runs are compared by: a quantity that training wrote down, and how a smaller or larger number is said."""

    quantity: str
    verb: str
    unit: str
    less: str
    more: str
    title: str
    note: str = ""


COPYING = Outcome(
    "copy_loss", "copies", "steps", "earlier", "later", "Step of learning to copy, minus the Transformer's",
    "The step is the first at which the loss where copying works is below half of its start. If a run never "
    "reaches it, means are restricted to the training and compared by a log-rank test.",
)  # fmt: skip
LOSS = Outcome(
    "validation_loss", "ends", "nats", "lower in validation loss", "higher in validation loss",
    "Final validation loss, minus the Transformer's",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One experiment's comparison with the Transformer, by series: intervals over paired seeds, and verdicts on all together."""

    outcome: Outcome
    group: str
    title: str
    rates: dict[str, float]
    """Experiments that differ from this one in the learning rate alone, itself included, each with its rate."""
    best: str
    """That of `rates` at which the Transformer's own loss ends lowest."""
    intervals: dict[str, Interval]
    verdicts: dict[str, Verdict]

    @property
    def seeds(self) -> tuple[int, int]:
        """Least and most paired seeds behind an interval."""
        counts = [i.n for i in self.intervals.values()]
        return min(counts), max(counts)


def finding(source: Source, link: Link) -> Finding:
    """What the chosen experiment says, or where none is chosen the one that the rule gives.

    Raises `WorkbenchError` where no finished runs of a Transformer and of another model share a seed.
    """
    experiments = _experiments(source)
    asked = link.text("set")
    if asked is not None:
        found = [group for group in experiments if group == asked]
    else:
        found = sorted(experiments, key=lambda group: _standing(experiments[group]), reverse=True)[:1]
    if not found:
        raise WorkbenchError(
            "one sentence takes a Transformer and another model here, both finished, from one seed: train both with the same --seed"
        )
    key = ("finding", asked, *((e.path, e.series, e.stamp) for runs in experiments.values() for e in runs))
    return source.keep(key, lambda: _compared(source, experiments, found[0], by_rule=asked is None))


def _experiments(source: Source) -> dict[str, list[Entry]]:
    """Finished runs of every experiment with a Transformer and another model of one seed."""
    groups: dict[str, list[Entry]] = {}
    for entry in source.catalogue().entries:
        if entry.finished and not entry.imported:
            groups.setdefault(entry.group, []).append(entry)
    return {name: runs for name, runs in groups.items() if _paired(runs)}


def _paired(runs: Sequence[Entry]) -> int:
    """The most seeds that the Transformer and another series have in common."""
    seeds: dict[str, set[int]] = {}
    for entry in runs:
        seeds.setdefault(entry.series, set()).add(entry.seed)
    base = seeds.pop(VANILLA, set())
    return max((len(base & others) for others in seeds.values()), default=0)


def _standing(runs: Sequence[Entry]) -> tuple[bool, bool, int, int, str]:
    """The larger, the sooner an experiment is told."""
    paired = _paired(runs)
    return paired >= MIN_SEEDS, runs[0].kind == "repeated", paired, len(runs), runs[0].group


def _compared(source: Source, experiments: dict[str, list[Entry]], group: str, *, by_rule: bool) -> Finding:
    outcome = COPYING if experiments[group][0].kind == "repeated" else LOSS
    rates = _rates(experiments, group)
    ends = {name: _ending(source, experiments[name], outcome) for name in rates}
    best = min(ends, key=lambda name: (ends[name], name))
    chosen = best if by_rule else group
    numbers = _numbers(source, experiments[chosen], outcome)
    base, compare = numbers.pop(VANILLA), compare_steps if outcome is COPYING else paired_seeds
    intervals = {name: compare(numbers[name], base) for name in plots.ordered(numbers)}
    intervals = {name: interval for name, interval in intervals.items() if interval.n}
    if not intervals:
        raise WorkbenchError(f"{outcome.quantity.replace('_', ' ')} was not written down to the end of these runs")
    verdicts = judge_differences(intervals)
    return Finding(outcome, chosen, experiments[chosen][0].title, rates, best, intervals, verdicts)


def _rates(experiments: dict[str, list[Entry]], group: str) -> dict[str, float]:
    """The experiments that differ from one in the learning rate alone, each with its rate."""

    def said(name: str) -> tuple[float, str]:
        run = Run.open(experiments[name][0].path)
        recipe = {k: v for k, v in asdict(run.train).items() if k != "lr"}
        return run.train.lr, digest(run.info["model"], recipe, run.info["data"])

    shape = group.rpartition("-")[0]  # kind, layers and width
    alike = {name: said(name) for name in experiments if name.rpartition("-")[0] == shape}
    return {name: lr for name, (lr, setting) in alike.items() if setting == alike[group][1]}


def _ending(source: Source, runs: Sequence[Entry], outcome: Outcome) -> float:
    """The Transformer's mean final loss."""
    found = _at_the_end(source, [e for e in runs if e.series == VANILLA], outcome.quantity)
    return float(found["value"].mean()) if len(found) else float("inf")


def _at_the_end(source: Source, runs: Sequence[Entry], quantity: str) -> pd.DataFrame:
    """One row for each run, domains averaged, of those that wrote to the last step that any of them wrote."""
    rows = source.telemetry(runs, [quantity])
    rows = mean_of_domains(rows[rows["variant"].isna() & rows["control"].isna()])
    return rows[rows["step"] == rows["step"].max()]


def _numbers(source: Source, runs: Sequence[Entry], outcome: Outcome) -> dict[str, Any]:
    """Return the outcome of each seed by series: final losses, or censored steps."""
    if outcome is COPYING:
        steps = formation_steps(source.telemetry(runs, [outcome.quantity])).groupby(["architecture", "seed"])
        each = steps[["formation_step", "last_step"]].agg(lambda x: x.astype(float).mean(skipna=False))
        return {
            str(name): censored(rows["formation_step"], rows["last_step"])
            for name, rows in each.reset_index("architecture").groupby("architecture")
        }
    losses = _at_the_end(source, runs, outcome.quantity)
    return {str(name): rows.groupby("seed")["value"].mean() for name, rows in losses.groupby("architecture")}


# ---- in words ----------------------------------------------------------------------------------------------------------


def headline(found: Finding) -> str:
    """The finding in one sentence, for people who have read nothing yet."""
    outcome, many, (_, seeds) = found.outcome, len(found.intervals), found.seeds
    if seeds < MIN_SEEDS:
        have = f"{seeds} seed{'s' if seeds > 1 else ''}"
        return f"Unresolved: {have} of each model cannot tell them apart; a verdict takes {MIN_SEEDS}."
    decided = [name for name, verdict in found.verdicts.items() if verdict.status != "unresolved"]
    if not decided:
        who = f"none of {many} models" if many > 1 else f"{label(next(iter(found.intervals)))} not clearly"
        clearly = "clearly " if many > 1 else ""
        return f"Unresolved over {seeds} seeds: {who} {outcome.verb} {clearly}{outcome.less} or {outcome.more} than the Transformer."
    first, others = decided[0], decided[1:NAMED]
    said = [f"{label(first)} {outcome.verb} {_amount(found.intervals[first], outcome)} than the Transformer"]
    said += [
        f"{label(name)} {_amount(found.intervals[name], outcome, after=found.intervals[first])}" for name in others
    ]
    rest = [f"{len(decided) - NAMED} more decided"] if len(decided) > NAMED else []
    rest += [f"{many - len(decided)} unresolved"] if many > len(decided) else []
    whole = f"{', '.join(said)}{'; ' if rest else ''}{', '.join(rest)}."
    return whole[0].upper() + whole[1:]


def _amount(interval: Interval, outcome: Outcome, after: Interval | None = None) -> str:
    """`31 [13, 48] steps earlier`; after one of the same sign the numbers alone."""
    if math.isnan(interval.low):  # steps that some runs never reach: a difference of restricted means
        numbers = f"{abs(interval.value):.0f}"
    else:
        low, high = sorted((abs(interval.low), abs(interval.high)))
        digits = ".0f" if low >= WHOLE else ".3g"
        numbers = f"{abs(interval.value):{digits}} [{low:{digits}}, {high:{digits}}]"
    if after is not None and (after.value < 0) == (interval.value < 0):
        return numbers
    return f"{numbers} {outcome.unit} {_direction(interval, outcome)}"


def _direction(interval: Interval, outcome: Outcome) -> str:
    return outcome.less if interval.value < 0 else outcome.more


def _how(found: Finding) -> str:
    """What the numbers are, and by which rule they were chosen."""
    few, most = found.seeds
    seeds = f"{few}" if few == most else f"{few} to {most}"
    many = len(found.intervals)
    holm = f"; the verdicts are corrected (Holm) for all {many} models" if many > 1 else ""
    said = [
        f"Means over {seeds} paired seeds with {confidence()} intervals{holm}."
        if most > 1
        else "Each number is one pair of runs and has no interval.",
        found.outcome.note,
    ]
    if len(found.rates) > 1:
        rate, best = found.rates[found.group], found.rates[found.best]
        own = f"at which the Transformer's own final loss is lowest, of {len(found.rates)} here"
        said.append(
            f"Learning rate {rate:g}, {own}."
            if rate == best
            else f"Learning rate {rate:g}, chosen here; {best:g} is the one {own}."
        )
    return " ".join(filter(None, said))


def _kept(source: Source, link: Link, name: str, draw: Callable[[Finding], Drawing]) -> Drawing:
    """A drawing of the finding, made once for the runs as they are."""
    check_part(link, "finding")
    found = finding(source, link)
    stamps = ((e.path, e.series, e.stamp) for e in source.group(Link("start", {"set": found.group})))
    drawing: Drawing = source.keep((name, link.text("set"), *stamps), lambda: draw(found))
    return replace(drawing, figure=go.Figure(drawing.figure))  # the kept one is shared


@view("start")
def finding_curves(source: Source, link: Link) -> Drawing:
    """What the finding is read off: the loss of every model of the experiment over training."""

    def draw(found: Finding) -> Drawing:
        curves = training.copy_loss if found.outcome is COPYING else training.loss
        drawing = curves(source, Link("training", {"set": found.group}))
        return replace(drawing, figure=plots.narrow(drawing.figure, HALF_PAGE), sentence="")

    return _kept(source, link, "finding curves", draw)


@view("start")
def finding_differences(source: Source, link: Link) -> Drawing:
    """What every model of the experiment does earlier, later, better or worse than the Transformer, with intervals over seeds."""

    def draw(found: Finding) -> Drawing:
        table = interval_table({label(name): i for name, i in found.intervals.items()}, found.outcome.unit)
        statuses = zip(found.intervals.values(), found.verdicts.values(), strict=True)
        said = ["unresolved" if v.status == "unresolved" else _direction(i, found.outcome) for i, v in statuses]
        under = f"{found.title}; left of 0: {found.outcome.less}"
        figure = plots.intervals(table.assign(verdict=said), found.outcome.title, under)
        return Drawing(plots.narrow(figure, HALF_PAGE), table.assign(verdict=said), _how(found))

    return _kept(source, link, "finding differences", draw)
