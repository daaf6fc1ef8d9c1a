"""How a claim is registered: `@claim` on a pure function from the evidence of some runs to a verdict.

Evidence is four tables; a verdict is a status, one sentence with the numbers that decide, and their table. What the runs
at hand cannot say is a verdict too: `not_checkable` names the runs that are missing, `gated` the condition that is not met.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pandas as pd

from workbench.names import LABELS
from workbench.results import SAMPLE_COLUMNS, records
from workbench.statistics import Interval, at_equal_loss, common_loss, over_seeds, paired_seeds

Status = Literal["supported", "refuted", "unresolved", "gated", "not_checkable"]
STATUSES: dict[Status, str] = {
    "supported": "supported", "refuted": "refuted", "unresolved": "unresolved", "gated": "not tested: a condition is not met",
    "not_checkable": "not checkable with these runs",
}  # fmt: skip
LEAST_SEEDS = 3
RATES = 3  # learning rates of each model, before a comparison of losses counts as tuned
Z = 1.96  # of a normal interval over many documents
RECIPE = (
    "data", "T", "batch", "steps", "n_layers", "d_model", "n_heads", "d_mlp", "d_vocab", "warmup", "lr_final",
    "weight_decay", "optimiser",
)  # fmt: skip
SETTING = (*RECIPE, "lr")
"""What runs must have in common before they are compared."""
WORDS = {
    "n_layers": "{:.0f} layers", "d_model": "width {:.0f}", "parameters": "{:,.0f} parameters", "T": "{:.0f} tokens",
    "batch": "batch {:.0f}", "steps": "{:.0f} steps", "lr": "rate {:g}",
}  # fmt: skip
RUN_COLUMNS = ("run", "model", "architecture", "seed", *SETTING, "tokens", "parameters", "bos", "task", "options")
RESFORMERS = ("resformer", "resformer_constant", "resformer_learnable", "resformer_learnable_plus", "resformer_sparse")


@dataclass(frozen=True)
class Verdict:
    """What runs say of a claim; `table` holds the numbers behind the sentence, `runs` names those that were compared.

    `scope` limits a status: losses at one learning rate say nothing of others.
    """

    status: Status
    sentence: str
    table: pd.DataFrame = field(default_factory=pd.DataFrame)
    runs: tuple[str, ...] = ()
    setting: str = ""
    scope: str = ""

    @property
    def said(self) -> str:
        """The status in words, with its limits."""
        return f"{STATUSES[self.status]} {self.scope}".strip()


class Undecided(Exception):
    """Raised inside a verdict function where the evidence cannot decide; it becomes the verdict it carries."""

    def __init__(self, status: Status, sentence: str, table: pd.DataFrame | None = None) -> None:
        super().__init__(sentence)
        self.verdict = Verdict(status, sentence, pd.DataFrame() if table is None else table)


@dataclass(frozen=True)
class Evidence:
    """Tables of some runs: facts of each run, records, what training wrote down, and one value per document.

    `runs` has `RUN_COLUMNS`; its `model` is the architecture with the options that are not its defaults, and stands for the
    architecture in the other tables. Every method returns rows or a narrower evidence; none reads a file.
    """

    runs: pd.DataFrame
    records: pd.DataFrame = field(default_factory=lambda: records([]))
    telemetry: pd.DataFrame = field(default_factory=lambda: records([]))
    samples: pd.DataFrame = field(default_factory=lambda: records([], SAMPLE_COLUMNS))
    compared: list[pd.DataFrame] = field(default_factory=list, repr=False)
    """Runs that `comparable` has chosen so far, for the verdict to name."""

    @property
    def models(self) -> list[str]:
        """Names of the models, in the order of the runs."""
        return list(dict.fromkeys(self.runs["model"]))

    def of(self, runs: pd.DataFrame) -> Evidence:
        """The evidence of these runs alone."""
        kept = set(runs["run"])
        records, telemetry, samples = (t[t["run"].isin(kept)] for t in (self.records, self.telemetry, self.samples))
        return replace(self, runs=runs, records=records, telemetry=telemetry, samples=samples)

    def only(self, models: Iterable[str]) -> Evidence:
        """The evidence of these models alone."""
        return self.of(self.runs[self.runs["model"].isin(list(models))])

    def on(self, task: str) -> Evidence:
        """The evidence of runs trained on `text` or on `repeated` tokens."""
        return self.of(self.runs[self.runs["task"] == task])

    def measured(self) -> Evidence:
        """The evidence of runs whose activations are measured: all but the races on repeated tokens."""
        return self.of(self.runs[self.runs["task"] != "repeated"])

    def named(self, choices: Sequence[str]) -> str:
        """The first of several interchangeable models that is here."""
        return next(name for name in choices if name in self.models)

    def comparable(self, *wanted: str | Sequence[str], ignoring: Sequence[str] = ()) -> Evidence:
        """Runs of the one setting that has every wanted model (each a name, or several that will do) with most seeds.

        `ignoring`: what may differ (`lr` in a sweep). Among equals the larger model wins, then the longer training, then the
        lower loss of the first model. Raises `Undecided` naming what is missing, or what differs where models exist but
        never under equal conditions.
        """
        groups = [(name,) if isinstance(name, str) else tuple(name) for name in wanted]
        absent = [" or ".join(g) for g in groups if not set(g) & set(self.models)]
        if absent:
            raise Undecided("not_checkable", f"Needs runs of {_and(absent)}; {here(self)}.")
        found: list[tuple[tuple[float, ...], pd.DataFrame]] = []
        for _, rows in self.runs.groupby([c for c in SETTING if c not in ignoring], dropna=False):
            seeds = [rows[rows["model"].isin(g)].groupby("model")["seed"].nunique().max() for g in groups]
            if all(s > 0 for s in seeds):
                size, steps = rows["parameters"].fillna(0).max(), rows["steps"].fillna(0).max()
                loss = self._final(rows[rows["model"].isin(groups[0])])
                found.append(((float(min(seeds)), float(size), float(steps), -loss), rows))
        if not found:
            chosen = self.runs[self.runs["model"].isin([name for g in groups for name in g])]
            differ = [c for c in SETTING if c not in ignoring and chosen[c].nunique(dropna=False) > 1]
            raise Undecided(
                "not_checkable",
                f"{_and([' or '.join(g) for g in groups])} are here, but never under equal conditions: they differ in "
                f"{_and(differ)}. Train them with equal data, length, size and recipe.",
            )
        chosen = max(found, key=lambda pair: pair[0])[1]
        self.compared.append(chosen[chosen["model"].isin([name for g in groups for name in g])])
        return self.of(chosen)

    def _final(self, runs: pd.DataFrame) -> float:
        """Mean final validation loss of some runs, infinite where none is known."""
        told = self.telemetry[
            (self.telemetry["metric"] == "validation_loss") & self.telemetry["run"].isin(set(runs["run"]))
        ]
        last = told[told["step"] == told.groupby("run")["step"].transform("max")]["value"]
        return float(last.mean()) if len(last) and np.isfinite(last.astype(float)).all() else math.inf

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def rows(self, metric: str, *, step: str = "last", control: str | None = None, **axes: Any) -> pd.DataFrame:
        """Records of a metric at each run's `last` step, at step 0 (`first`), or at `all`, on the given axes.

        An axis that is not given must be null where it is `variant`; other axes may vary. Raises `Undecided` where there is
        none, or where a number is NaN or infinite.
        """
        rows = self.records[self.records["metric"] == metric]
        rows = rows[rows["control"].isna()] if control is None else rows[rows["control"] == control]
        axes.setdefault("variant", None)
        for axis, value in axes.items():
            if value is not Ellipsis:
                rows = rows[rows[axis].isna() if value is None else rows[axis] == value]
        if step == "first":
            rows = rows[rows["step"] == 0]
        elif step == "last":
            last = rows.groupby("run")["step"].transform("max")
            rows = rows[rows["step"].isna() | ((rows["step"] == last) & (last > 0))]
        if rows.empty:
            when = {"first": " at random init", "last": " of trained models"}.get(step, "")
            raise Undecided("not_checkable", f"{metric}{when} is not measured for {_and(self.models)}.")
        broken = rows[~np.isfinite(rows["value"].astype(float))]
        if len(broken):
            raise Undecided(
                "not_checkable",
                f"{metric} is not a number in {_and(sorted(set(broken['run'])))}: broken weights, or too few documents.",
            )
        return rows

    def by_seed(self, rows: pd.DataFrame, model: str) -> pd.Series:
        """Mean of a model's rows for each seed."""
        return self.model_of(rows, model).groupby("seed")["value"].mean().astype(float)

    def model_of(self, rows: pd.DataFrame, model: str) -> pd.DataFrame:
        """Rows of one model."""
        return rows[rows["run"].isin(self.runs.loc[self.runs["model"] == model, "run"])]

    def known_of(self, rows: pd.DataFrame, model: str) -> pd.DataFrame:
        """Rows of one model; raises `Undecided` where it has none."""
        if (found := self.model_of(rows, model)).empty:
            metric = rows["metric"].iloc[0] if "metric" in rows and len(rows) else "the loss"
            raise Undecided(
                "not_checkable", f"{metric} is not measured for {model}: it was left out, or the model has none."
            )
        return found

    def difference(self, rows: pd.DataFrame, model: str, baseline: str) -> Interval:
        """Mean over seeds of model - baseline, paired by seed; raises `Undecided` where a model has no such number."""
        for name in (model, baseline):
            self.known_of(rows, name)
        return paired_seeds(*(self.by_seed(rows, name) for name in (model, baseline)))

    def losses(self) -> pd.DataFrame:
        """Final validation loss of each run and domain; from training, else from the measured loss.

        Columns run, model, seed, data, value. Raises `Undecided` where no run has one.
        """
        told = self.telemetry[(self.telemetry["metric"] == "validation_loss") & self.telemetry["variant"].isna()]
        measured = self.records[(self.records["metric"] == "loss") & self.records["control"].isna()]
        rows = pd.concat([told, measured[~measured["run"].isin(set(told["run"]))]], ignore_index=True)
        rows = rows[rows["step"].isna() | (rows["step"] == rows.groupby("run")["step"].transform("max"))]
        if rows.empty:
            raise Undecided("not_checkable", f"No validation loss of {_and(self.models)} is known.")
        if broken := sorted(set(rows.loc[~np.isfinite(rows["value"].astype(float)), "run"])):
            raise Undecided("not_checkable", f"The loss of {_and(broken)} is not a number: the training broke.")
        return rows[["run", "seed", "data", "value"]].merge(self.runs[["run", "model", "lr", "tokens"]], on="run")

    def curves(self) -> dict[str, pd.Series]:
        """Validation loss over the steps of each run, domains averaged."""
        told = self.telemetry[(self.telemetry["metric"] == "validation_loss") & self.telemetry["variant"].isna()]
        series = {run: rows.groupby("step")["value"].mean().sort_index() for run, rows in told.groupby("run")}
        return {str(run): curve.set_axis(curve.index.astype(int)).astype(float) for run, curve in series.items()}

    def at_equal_loss(self, rows: pd.DataFrame, model: str, baseline: str) -> Interval:
        """Difference of a quantity between checkpoints of equal validation loss, paired by seed.

        `rows`: the quantity at all measured checkpoints; per seed the loss is the lowest both have reached. n counts seeds in
        which both have checkpoints around it; a seed whose loss is reached before the second checkpoint counts for nothing.
        """
        curves, found = self.curves(), {}
        for seed in sorted(set(self.runs["seed"].dropna())):
            runs = [self._run(name, seed) for name in (model, baseline)]
            if any(run not in curves for run in runs):
                continue
            loss = common_loss([curves[run] for run in runs if run])
            values = [self._at(rows, run, curves[run], loss) for run in runs if run]
            if all(map(math.isfinite, values)):
                found[seed] = values
        frame = pd.DataFrame.from_dict(found, orient="index", columns=["model", "baseline"])
        return paired_seeds(frame["model"], frame["baseline"])

    def at_common_loss(self, rows: pd.DataFrame) -> pd.DataFrame:
        """A quantity by run, seed and layer where each run had the lowest loss that all runs of its seed have reached.

        `rows`: the quantity at all measured checkpoints. Runs without a loss or without checkpoints around it are left out.
        """
        curves, found = self.curves(), []
        for seed, mine in self.runs.groupby("seed"):
            runs = [run for run in mine["run"] if run in curves]
            loss = common_loss([curves[run] for run in runs]) if runs else math.nan
            here = rows[rows["run"].isin(runs)]
            for (run, layer), part in here.groupby(["run", "layer"]):
                value = self._at(part, str(run), curves[str(run)], loss)
                found.append({"run": run, "seed": seed, "layer": layer, "value": value})
        return pd.DataFrame(found, columns=["run", "seed", "layer", "value"]).dropna()

    @staticmethod
    def _at(rows: pd.DataFrame, run: str, curve: pd.Series, loss: float) -> float:
        series = rows[rows["run"] == run].groupby("step")["value"].mean()
        trained = series[series.index > 0]  # between random init and the first checkpoint nothing is linear
        return at_equal_loss(trained.set_axis(trained.index.astype(int)).astype(float), curve, loss)

    def _run(self, model: str, seed: Any) -> str | None:
        rows = self.runs[(self.runs["model"] == model) & (self.runs["seed"] == seed)]
        return str(rows["run"].iloc[0]) if len(rows) else None


# ---- verdicts from intervals -----------------------------------------------------------------------------------------


def status_of(found: Interval, expected: int, least: int = LEAST_SEEDS) -> Status:
    """Supported where the interval has the expected sign, refuted where the other; unresolved below `least` seeds."""
    if found.n < least or not found.sign:
        return "unresolved"
    return "supported" if found.sign == expected else "refuted"


def joined(statuses: Iterable[Status]) -> Status:
    """Refuted if any is, supported if all are, else unresolved."""
    found = set(statuses)
    return "refuted" if "refuted" in found else "supported" if found == {"supported"} else "unresolved"


def few(found: Interval, least: int = LEAST_SEEDS) -> str:
    """A remark where seeds are too few to decide."""
    return f" ({found.n} of the {least} seeds needed)" if found.n < least else ""


def table_of(
    found: Mapping[Any, Interval], unit: str = "", others: Mapping[Any, str] = MappingProxyType({})
) -> pd.DataFrame:
    """Named intervals as a table; `others`: units of those that have another one."""
    rows = [
        {"comparison": name, "value": i.value, "low": i.low, "high": i.high, "n": i.n, "unit": others.get(name, unit)}
        for name, i in found.items()
    ]
    return pd.DataFrame(rows)


def name_of(model: str) -> str:
    """A model's name as people read it, options kept."""
    base, bracket, options = model.partition("[")
    return f"{LABELS.get(base, base).removesuffix(' (control)')}{bracket}{options}"


def setting_of(runs: pd.DataFrame) -> str:
    """What the compared runs have in common, in words; a range where they differ. Empty for no runs."""
    seeds = runs.groupby("model")["seed"].nunique()
    least, most = (int(seeds.min()), int(seeds.max())) if len(seeds) else (0, 0)
    many = f"{least} seed{'s' * (least > 1)}" if least == most else f"{least} to {most} seeds"
    told = [f"{many} of {len(seeds)} model{'s' * (len(seeds) > 1)}"] if len(seeds) else []
    for column, form in WORDS.items():
        found = sorted(runs[column].dropna().unique())
        if found:
            low, high = form.format(found[0]), form.format(found[-1])
            told.append(low if low == high else f"{low} to {high}")
    return ", ".join(told)


def scope_of(runs: pd.DataFrame) -> str:
    """How far a comparison of losses reaches: a model's best rate is known only where several were tried with each."""
    rates = int(runs.groupby("model")["lr"].nunique().min()) if len(runs) else RATES
    return "" if rates >= RATES else "at this one learning rate" if rates == 1 else f"at {rates} learning rates"


def here(evidence: Evidence) -> str:
    """Which models there are, in words."""
    return f"here are {_and(evidence.models)}" if evidence.models else "here are no runs that can be used"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "nothing"


def deep_of(rows: pd.DataFrame, n_layers: int) -> pd.DataFrame:
    """Rows of the later half of the layers."""
    return rows[rows["layer"] >= math.ceil(n_layers / 2)]


def within(rows: pd.DataFrame) -> Interval:
    """Mean of one model's rows: over seeds where there are three, else with the errors over documents.

    Within one model documents decide, not seeds; n then counts documents. Rows are averaged with independent errors.
    """
    seeds = rows.groupby("seed", dropna=False)["value"].mean().astype(float)
    if len(seeds) >= LEAST_SEEDS:
        return over_seeds(seeds)
    value, errors = float(rows["value"].mean()), rows["se"].astype(float)
    half = Z * math.sqrt(float((errors**2).sum())) / len(rows) if errors.notna().all() else math.nan
    n = int(rows["n"].min()) if rows["n"].notna().any() else len(seeds)
    return Interval(value, value - half, value + half, n)


# ---- the registry ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """A claim under test. `metrics` are measured for the runs of `models` (empty: all) at `steps`; `shows` is the figure."""

    function: Callable[[Evidence], Verdict]
    supports: str
    refutes: str
    scale: str
    published: str
    source: str
    metrics: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    steps: str = "last"
    shows: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    @property
    def question(self) -> str:
        """The group it belongs to: its module's name."""
        return self.function.__module__.rpartition(".")[-1]

    @property
    def text(self) -> str:
        """The claim in full: the function's docstring."""
        return " ".join((inspect.getdoc(self.function) or "").split())

    def judge(self, evidence: Evidence) -> Verdict:
        """The verdict of this evidence; what is missing is said, not raised."""
        compared: list[pd.DataFrame] = []
        try:
            verdict = self.function(replace(evidence, compared=compared))
        except Undecided as reason:
            verdict = reason.verdict
        runs = pd.concat(compared).drop_duplicates("run") if compared else evidence.runs.head(0)
        of_losses = "loss" in self.metrics or self.shows.get("metric") == "copy_loss"
        decided = of_losses and verdict.status in ("supported", "refuted")
        scope = scope_of(runs) if decided else ""
        return replace(verdict, runs=tuple(runs["run"]), setting=setting_of(runs), scope=scope)


CLAIMS: dict[str, Claim] = {}


def claim(
    *,
    supports: str,
    refutes: str,
    scale: str,
    published: str,
    source: str,
    metrics: tuple[str, ...] = (),
    models: tuple[str, ...] = (),
    steps: str = "last",
    shows: Mapping[str, Any] | None = None,
) -> Callable[[Callable[[Evidence], Verdict]], Callable[[Evidence], Verdict]]:
    """Register a verdict function under its own name; its docstring is the claim's full text. A taken name raises."""

    def register(function: Callable[[Evidence], Verdict]) -> Callable[[Evidence], Verdict]:
        made = Claim(function, supports, refutes, scale, published, source, metrics, models, steps, shows or {})
        if made.name in CLAIMS:
            raise ValueError(f"claim {made.name!r} is registered already")
        CLAIMS[made.name] = made
        return function

    return register
