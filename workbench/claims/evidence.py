"""The tables that verdicts follow from, and how runs are chosen, paired and brought to equal loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from workbench.claims.by_metric import ByMetric
from workbench.claims.verdict import InsufficientEvidence
from workbench.claims.wording import listed
from workbench.runs.records import SAMPLE_COLUMNS, records
from workbench.statistics.intervals import MIN_SEEDS, Interval, over_seeds, paired_seeds, t_quantile
from workbench.statistics.loss_curves import at_equal_loss, common_loss

GROUPS = 8  # of documents, whose spread is the error of an accumulated number
RECIPE = (
    "data", "T", "batch", "steps", "n_layers", "d_model", "n_heads", "d_mlp", "d_vocab", "warmup", "lr_final",
    "weight_decay", "optimiser",
)  # fmt: skip
SETTING = (*RECIPE, "lr")
"""What runs must have in common before they are compared."""
TELEMETRY = ("validation_loss", "train_loss", "copy_loss", "coefficient", "tokens_per_second")
"""Of what training wrote down."""
RUN_COLUMNS = (
    "run",
    "model",
    "architecture",
    "seed",
    *SETTING,
    "tokens",
    "parameters",
    "bos",
    "task",
    "options",
    "study",
)


@dataclass(frozen=True)
class Evidence:
    """Tables of some runs: facts of each run, records, what training wrote down, and one value per document.

    `runs` has `RUN_COLUMNS`; its `model` is the architecture with the options that are not its defaults, and stands for the
    architecture in the other tables. Those are shared with the evidence this one was narrowed from: `records`, `telemetry` and
    `samples` are the rows of its own runs. Every method returns rows or a narrower evidence; none reads a file.
    """

    runs: pd.DataFrame
    kept: ByMetric = field(default_factory=lambda: ByMetric.of_rows(records([])))
    told: ByMetric = field(default_factory=lambda: ByMetric.of_rows(records([])))
    documents: ByMetric = field(default_factory=lambda: ByMetric.of_rows(records([], SAMPLE_COLUMNS)))
    compared: list[pd.DataFrame] = field(default_factory=list, repr=False)
    """Runs that `comparable` has chosen so far, for the verdict to name."""
    settings: list[pd.DataFrame] = field(default_factory=list, repr=False)
    """Runs of every setting that the first `comparable` could choose from, best first."""
    within: frozenset[str] = frozenset()
    """Runs of the one setting that is judged, where there are several."""

    @property
    def models(self) -> list[str]:
        """Names of the models, in the order of the runs."""
        return list(dict.fromkeys(self.runs["model"]))

    def records(self, metric: str) -> pd.DataFrame:
        """What is measured of a metric, on all its axes."""
        return self.kept.of(self._names, metric)

    def telemetry(self, metric: str) -> pd.DataFrame:
        """What training wrote down of a metric, on all its axes."""
        return self.told.of(self._names, metric)

    def samples(self, metric: str) -> pd.DataFrame:
        """One value per document of a metric."""
        return self.documents.of(self._names, metric)

    def everything(self) -> pd.DataFrame:
        """What is measured of all metrics, on all their axes."""
        return self.kept.of_all(self._names)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.runs["run"])

    def of_runs(self, runs: pd.DataFrame) -> Evidence:
        """The evidence of these runs alone."""
        return replace(self, runs=runs)

    def of_models(self, models: Iterable[str]) -> Evidence:
        """The evidence of these models alone."""
        return self.of_runs(self.runs[self.runs["model"].isin(list(models))])

    def of_task(self, task: str) -> Evidence:
        """The evidence of runs trained on `text` or on `repeated` tokens."""
        return self.of_runs(self.runs[self.runs["task"] == task])

    def measured_on_all(self, metrics: Iterable[str], models: Sequence[str] = ()) -> tuple[Evidence, str]:
        """Leave out shipped studies that did not measure each of the metrics on all of their runs; and say which, in words.

        Args:
            metrics: Names of metrics. The loss is exempt, which training writes for every run.
            models: Architectures of whose runs they are needed; all unless given.

        Note:
            A metric is not missed on a task that no run has it of, or on sequences shorter than any it was measured on.
        """
        runs = self.runs[self.runs["study"].fillna("") != ""]
        runs = runs[runs["architecture"].isin(models)] if models else runs
        lacking, told = set[str](), []
        for metric in (name for name in metrics if name != "loss"):
            has = runs["run"].isin(self.kept.runs_with.get(metric, ()))
            able = (runs["T"] >= runs.loc[has, "T"].min()) & runs["task"].isin(runs.loc[has, "task"])
            for study, each in has[able].groupby(runs["study"]):
                if not each.all() and study not in lacking:
                    lacking.add(str(study))
                    told += [f"{study} ({metric} on {each.sum()} of {len(each)} runs)"] if each.any() else []
        left_out = f" Left out, since measured in part: {', '.join(told)}." if told else ""
        return self.of_runs(self.runs[~self.runs["study"].isin(lacking)]) if lacking else self, left_out

    def measured(self) -> Evidence:
        """The evidence of runs whose activations are measured: all but the races on repeated tokens."""
        return self.of_runs(self.runs[self.runs["task"] != "repeated"])

    def first_of(self, choices: Sequence[str]) -> str:
        """The first of several interchangeable models that is here."""
        return next(name for name in choices if name in self.models)

    def comparable(
        self, *wanted: str | Sequence[str], ignoring: Sequence[str] = (), control: str | None = None
    ) -> Evidence:
        """Runs of the one setting that has every wanted model (each a name, or several that will do) with most seeds.

        `ignoring`: what may differ (`lr` in a sweep). Among equals one that has the claim's `control` comes first, then the larger
        wanted models, the longer training, the lower loss of the first model; `Claim.judge` puts the claim to all of them. Raises
        `InsufficientEvidence` naming what is missing, or what differs where models exist but never under equal conditions.
        """
        groups = [(name,) if isinstance(name, str) else tuple(name) for name in wanted]
        absent = [" or ".join(g) for g in groups if not set(g) & set(self.models)]
        if absent:
            architectures = list(dict.fromkeys(self.runs["architecture"]))
            here = f"here are {listed(architectures)}" if architectures else "here are no runs that can be used"
            raise InsufficientEvidence(f"Needs runs of {listed(absent)}; {here}.")
        candidates: list[tuple[tuple[float, ...], pd.DataFrame]] = []
        for _, rows in self.runs.groupby([c for c in SETTING if c not in ignoring], dropna=False):
            seeds = [rows[rows["model"].isin(g)].groupby("model")["seed"].nunique().max() for g in groups]
            if all(s > 0 for s in seeds) and (not self.within or self.within & set(rows["run"])):
                compared = rows[rows["model"].isin([name for g in groups for name in g])]
                size, steps = compared["parameters"].fillna(0).max(), rows["steps"].fillna(0).max()
                loss = self._final(rows[rows["model"].isin(groups[0])])
                controlled = control in set(rows["model"])
                candidates.append(((float(min(seeds)), float(controlled), float(size), float(steps), -loss), rows))
        if not candidates:
            chosen = self.runs[self.runs["model"].isin([name for g in groups for name in g])]
            differ = [c for c in SETTING if c not in ignoring and chosen[c].nunique(dropna=False) > 1]
            raise InsufficientEvidence(
                f"{listed([' or '.join(g) for g in groups])} are here, but never under equal conditions: they differ in "
                f"{listed(differ)}. Train them with equal data, length, size and recipe."
            )
        best_first = [rows for _, rows in sorted(candidates, key=lambda pair: pair[0], reverse=True)]
        if not self.settings:
            self.settings.extend(best_first)
        chosen = best_first[0]
        self.compared.append(chosen[chosen["model"].isin([name for g in groups for name in g])])
        return self.of_runs(chosen)

    def _final(self, runs: pd.DataFrame) -> float:
        """Mean final validation loss of some runs, infinite where none is known."""
        rows = self.written("validation_loss")
        last = at_last_step(rows[rows["run"].isin(set(runs["run"]))])["value"]
        return float(last.mean()) if len(last) and np.isfinite(last.astype(float)).all() else math.inf

    def written(self, metric: str) -> pd.DataFrame:
        """What training wrote down of a metric, its plain variant."""
        rows = self.telemetry(metric)
        return rows[rows["variant"].isna()]

    def rows(self, metric: str, *, step: str = "last", control: str | None = None, **axes: Any) -> pd.DataFrame:
        """Records of a metric at each run's `last` step, at step 0 (`first`), or at `all`, on the given axes.

        An axis that is not given must be null where it is `variant`; other axes may vary. Raises `InsufficientEvidence` where there is
        none.
        """
        rows = self.records(metric)
        for axis, value in {"control": control, "variant": None, **axes}.items():
            if value is not Ellipsis:
                rows = rows[rows[axis].isna() if value is None else rows[axis] == value]
        if step == "first":
            rows = rows[rows["step"] == 0]
        elif step == "last":
            last = rows.groupby("run")["step"].transform("max")
            rows = rows[rows["step"].isna() | ((rows["step"] == last) & (last > 0))]
        if rows.empty:
            when = {"first": " at random init", "last": " of trained models"}.get(step, "")
            raise InsufficientEvidence(f"{metric}{when} is not measured for {listed(self.models)}.")
        return rows

    def by_seed(self, rows: pd.DataFrame, model: str) -> pd.Series:
        """Mean of a model's rows for each seed."""
        return self.of_model(rows, model).groupby("seed")["value"].mean().astype(float)

    def of_model(self, rows: pd.DataFrame, model: str) -> pd.DataFrame:
        """Rows of one model; raises `InsufficientEvidence` where one of its numbers is NaN or infinite."""
        return sound(rows[rows["run"].isin(self.runs.loc[self.runs["model"] == model, "run"])])

    def known(self, rows: pd.DataFrame, model: str) -> pd.DataFrame:
        """Rows of one model; raises `InsufficientEvidence` where it has none."""
        known = self.of_model(rows, model)
        if known.empty:
            metric = rows["metric"].iloc[0] if "metric" in rows and len(rows) else "the loss"
            raise InsufficientEvidence(f"{metric} is not measured for {model}: it was left out, or the model has none.")
        return known

    def difference(self, rows: pd.DataFrame, model: str, baseline: str = "transformer") -> Interval:
        """Mean over seeds of model - baseline, paired by seed; raises `InsufficientEvidence` where a model has no such number."""
        return paired_seeds(*(self.by_seed(self.known(rows, name), name) for name in (model, baseline)))

    def differences(self, rows: pd.DataFrame, model: str, baselines: Iterable[str]) -> dict[str, Interval]:
        """`difference` from each of those baselines that are here, by name, but for those with which the model shares no seed.

        Raises `InsufficientEvidence` where it shares none with any.
        """
        found = {name: self.difference(rows, model, name) for name in baselines if name in self.models}
        paired = {name: interval for name, interval in found.items() if interval.n}
        if found and not paired:
            raise InsufficientEvidence(f"No seed of {model} is one of {listed(list(found))}.")
        return paired

    def losses(self) -> pd.DataFrame:
        """Final validation loss of each run and domain; from training, else from the measured loss.

        Columns run, model, seed, data, value; NaN for a run whose training wrote less than others of as many steps did, since its
        last loss is not of their step. Raises `InsufficientEvidence` where no run has one.
        """
        written = self.written("validation_loss")
        measured = self.records("loss")
        measured = measured[measured["control"].isna() & ~measured["run"].isin(set(written["run"]))]
        rows = pd.concat([written, measured], ignore_index=True)
        rows = at_last_step(rows)
        if rows.empty:
            raise InsufficientEvidence(f"No validation loss of {listed(self.models)} is known.")
        rows = rows[["run", "seed", "data", "step", "value"]].merge(
            self.runs[["run", "model", "lr", "tokens", "steps"]], on="run"
        )
        early = rows["run"].isin(set(written["run"])) & (rows["step"] < rows.groupby("steps")["step"].transform("max"))
        return rows.drop(columns=["step", "steps"]).assign(value=rows["value"].astype(float).mask(early))

    def curves(self) -> dict[str, pd.Series]:
        """Validation loss over the steps of each run, domains averaged."""
        runs = self.written("validation_loss").groupby("run")
        series = {run: rows.groupby("step")["value"].mean().sort_index() for run, rows in runs}
        return {str(run): curve.set_axis(curve.index.astype(int)).astype(float) for run, curve in series.items()}

    def beyond_init(self, last: pd.DataFrame, first: pd.DataFrame, model: str) -> Interval:
        """How much more a quantity changed from random init to the trained model than the Transformer's, paired by seed."""
        return paired_seeds(*(self.by_seed(last, m) - self.by_seed(first, m) for m in (model, "transformer")))

    def at_equal_loss(self, rows: pd.DataFrame, model: str, baseline: str = "transformer") -> Interval:
        """Difference of a quantity between checkpoints of equal validation loss, paired by seed.

        `rows`: the quantity at all measured checkpoints; per seed the loss is the lowest both have reached. n counts seeds in
        which both have checkpoints around it; a seed whose loss is reached before the second checkpoint counts for nothing.
        """
        curves, pairs = self.curves(), {}
        for seed, mine in self.runs.groupby("seed"):
            first = mine.groupby("model")["run"].first()
            runs = [str(first.get(name)) for name in (model, baseline)]
            if not set(runs) <= curves.keys():
                continue
            loss = common_loss([curves[run] for run in runs])
            values = [self._at(rows, run, curves[run], loss) for run in runs]
            if all(map(math.isfinite, values)):
                pairs[seed] = values
        frame = pd.DataFrame.from_dict(pairs, orient="index", columns=["model", "baseline"])
        return paired_seeds(frame["model"], frame["baseline"])

    def at_common_loss(self, rows: pd.DataFrame) -> pd.DataFrame:
        """A quantity by run, seed and layer where each run had the lowest loss that all runs of its seed have reached.

        `rows`: the quantity at all measured checkpoints. Runs without a loss or without checkpoints around it are left out.
        """
        curves, matched = self.curves(), []
        for seed, mine in self.runs.groupby("seed"):
            runs = [run for run in mine["run"] if run in curves]
            loss = common_loss([curves[run] for run in runs]) if runs else math.nan
            here = rows[rows["run"].isin(runs)]
            for (run, layer), part in here.groupby(["run", "layer"]):
                value = self._at(part, str(run), curves[str(run)], loss)
                matched.append({"run": run, "seed": seed, "layer": layer, "value": value})
        return pd.DataFrame(matched, columns=["run", "seed", "layer", "value"]).dropna()

    @staticmethod
    def _at(rows: pd.DataFrame, run: str, curve: pd.Series, loss: float) -> float:
        series = rows[rows["run"] == run].groupby("step")["value"].mean()
        trained = series[series.index > 0]  # between random init and the first checkpoint nothing is linear
        return at_equal_loss(trained.set_axis(trained.index.astype(int)).astype(float), curve, loss)


def sound(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows themselves; raises `InsufficientEvidence` where a number is NaN or infinite."""
    broken = sorted(set(rows.loc[~np.isfinite(rows["value"].astype(float)), "run"]))
    if broken:
        why = "is not a number in {}: broken weights, or too few documents."
        if "metric" not in rows:
            why = "is unknown for {}: its training broke, or what it wrote ends before that of others of its length."
        metric = rows["metric"].iloc[0] if "metric" in rows else "The last loss"
        raise InsufficientEvidence(f"{metric} {why.format(listed(broken))}")
    return rows


def at_last_step(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of each run's last step, and those without a step."""
    return rows[rows["step"].isna() | (rows["step"] == rows.groupby("run")["step"].transform("max"))]


def deep_layers(rows: pd.DataFrame, n_layers: int) -> pd.DataFrame:
    """Rows of the later half of the layers."""
    return rows[rows["layer"] >= math.ceil(n_layers / 2)]


def model_mean(rows: pd.DataFrame) -> Interval:
    """Mean of one model's rows: over seeds where there are three, else with the errors over documents, which decide nothing.

    n then counts documents. Rows are averaged with independent errors.
    """
    seeds = sound(rows).groupby("seed", dropna=False)["value"].mean().astype(float)
    if len(seeds) >= MIN_SEEDS:
        return over_seeds(seeds)
    value, errors = float(rows["value"].mean()), rows["se"].astype(float)
    half = (
        t_quantile(GROUPS - 1) * math.sqrt(float((errors**2).sum())) / len(rows) if errors.notna().all() else math.nan
    )
    n = int(rows["n"].min()) if rows["n"].notna().any() else len(seeds)
    return Interval(value, value - half, value + half, n)
