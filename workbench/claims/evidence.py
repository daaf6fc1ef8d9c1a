"""Evidence: the tables that claims are judged from, and how runs are selected, paired and compared at equal loss."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from workbench.claims.verdict import InsufficientEvidence
from workbench.claims.verdict_wording import RATES, listed, model_name
from workbench.runs.records import SAMPLE_COLUMNS, facts, records
from workbench.runs.table_cache import Recent, bytes_of
from workbench.statistics.intervals import MIN_SEEDS, Interval, over_seeds, paired_seeds, t_quantile
from workbench.statistics.loss_curves import at_equal_loss, common_loss

GROUPS = 8  # of documents, whose spread is the error of an accumulated number
RECIPE = (
    "data", "T", "batch", "steps", "n_layers", "d_model", "n_heads", "query_group", "d_mlp", "d_vocab", "rms_norm_eps",
    "rope_theta", "init_std", "warmup", "lr_final", "weight_decay", "optimiser", "validation_sequences", "precision",
)  # fmt: skip
SETTING = (*RECIPE, "lr")  # settings that must be equal in runs that are compared
TELEMETRY = ("validation_loss", "train_loss", "copy_loss", "coefficient", "tokens_per_second")
"""Metrics in the telemetry of training."""
RUN_COLUMNS = (
    "run", "model", "architecture", "seed", *SETTING, "tokens", "parameters", "bos", "task", "options", "study", "device",
)  # fmt: skip
MAX_BYTES = 50_000_000  # of rows that `ByMetric` keeps in memory, the last ones in any case


Fetch = Callable[[Collection[str], str], pd.DataFrame]  # called with names of runs and a metric


class ByMetric:
    """A table of many runs that is too large for memory: `fetch` returns the rows of some runs and one metric on demand."""

    def __init__(self, fetch: Fetch, runs_with: Mapping[str, Collection[str]], none: pd.DataFrame) -> None:
        self.fetch, self.runs_with, self.none = fetch, runs_with, none
        self.metrics = frozenset(runs_with)
        self._recent = Recent[tuple[frozenset[str], str], pd.DataFrame](MAX_BYTES, bytes_of)

    @classmethod
    def of_rows(cls, rows: pd.DataFrame) -> ByMetric:
        """Return a lazy table of rows in memory."""
        places = {str(metric): np.sort(at) for metric, at in rows.groupby("metric").indices.items()}

        def fetch(runs: Collection[str], metric: str) -> pd.DataFrame:
            part = rows.iloc[places[metric]]
            return part[part["run"].isin(runs)]

        return cls(fetch, {m: set(rows["run"].iloc[at]) for m, at in places.items()}, rows.head(0))

    def of(self, runs: frozenset[str], metric: str) -> pd.DataFrame:
        """Return the rows of a metric of some runs."""
        if metric not in self.metrics or not runs:
            return self.none
        return self._recent.get((runs, metric), lambda: self.fetch(runs, metric))

    def of_all(self, runs: frozenset[str]) -> pd.DataFrame:
        """Return the rows of all metrics of some runs."""
        tables = [self.of(runs, metric) for metric in sorted(self.metrics)]
        return pd.concat(tables or [self.none]).sort_index(kind="stable")

    def dtypes(self, runs: frozenset[str], metrics: Collection[str]) -> list[str]:
        """Return the data types that these metrics were measured in, from their provenance."""
        texts = {text for metric in metrics for text in self.of(runs, metric)["provenance"].dropna().unique()}
        return sorted({str(dtype) for text in texts if (dtype := facts(text).get("dtype"))})


@dataclass(frozen=True)
class Evidence:
    """Tables of runs: run facts, measured records, telemetry and values per document.

    `runs` has the columns `RUN_COLUMNS`. Its `model` is the architecture with all options that differ from their defaults, and is called
    `architecture` in the other tables. Every method returns rows or the evidence of fewer runs; none reads a file.
    """

    runs: pd.DataFrame
    kept: ByMetric = field(default_factory=lambda: ByMetric.of_rows(records([])))
    told: ByMetric = field(default_factory=lambda: ByMetric.of_rows(records([])))
    documents: ByMetric = field(default_factory=lambda: ByMetric.of_rows(records([], SAMPLE_COLUMNS)))
    compared: list[pd.DataFrame] = field(default_factory=list, repr=False)
    """Runs that `comparable` has chosen so far, for the verdict to name; `beside`: True for controls, "shown" for what is only drawn."""
    settings: list[pd.DataFrame] = field(default_factory=list, repr=False)
    """Runs of every setting that the first `comparable` could choose from, best first."""
    within: frozenset[str] = frozenset()  # runs of the one setting that is judged, where there are several
    sweeps: pd.DataFrame | None = (
        None  # runs that may have chosen learning rates, also without a metric; default `runs`
    )
    tuned_of: dict[Any, pd.DataFrame] = field(default_factory=dict, repr=False)
    """Runs at tuned learning rates by the names of runs and sweeps; evidence of fewer runs shares it."""

    @property
    def models(self) -> list[str]:
        """Names of the models, in the order of the runs."""
        return list(dict.fromkeys(self.runs["model"]))

    def records(self, metric: str) -> pd.DataFrame:
        """Return the records of a metric on all axes."""
        return self.kept.of(self._names, metric)

    def telemetry(self, metric: str) -> pd.DataFrame:
        """Return the telemetry of a metric on all axes."""
        return self.told.of(self._names, metric)

    def samples(self, metric: str) -> pd.DataFrame:
        """Return one value per document of a metric."""
        return self.documents.of(self._names, metric)

    def everything(self) -> pd.DataFrame:
        """Return the records of all metrics."""
        return self.kept.of_all(self._names)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.runs["run"])

    def fact(self, column: str) -> int:
        """Return the largest value of a setting over the runs; raises `InsufficientEvidence` (not tested) if one is unknown."""
        values = self.runs[column]
        if values.isna().any():
            words = {"n_layers": "number of layers", "T": "sequence length"}.get(column, column)
            what = f"unknown {words}; `workbench import --config {column}=N` states it of a training log"
            raise InsufficientEvidence(f"Needs the {words} of every run.", "gated", scope=what)
        return int(values.max())

    def of_runs(self, runs: pd.DataFrame) -> Evidence:
        """Return the evidence of some runs."""
        return replace(self, runs=runs)

    def by_setting(self, setting: str, *wanted: str | Sequence[str]) -> Iterator[tuple[float, Evidence]]:
        """Yield each value of a setting, and the comparable runs that have it; values that lack a wanted model are left out."""
        for value, runs in self.runs.groupby(setting):
            with contextlib.suppress(InsufficientEvidence):
                yield float(str(value)), self.of_runs(runs).comparable(*wanted)

    def of_models(self, models: Iterable[str]) -> Evidence:
        """Return the evidence of some models."""
        return self.of_runs(self.runs[self.runs["model"].isin(list(models))])

    def of_task(self, task: str) -> Evidence:
        """Return the evidence of runs trained on one task, such as `text` or `repeated` tokens."""
        return self.of_runs(self.runs[self.runs["task"] == task])

    def measured_on_all(self, metrics: Iterable[str], models: Sequence[str] = ()) -> tuple[Evidence, str]:
        """Leave out shipped studies that did not measure the metrics on all of their runs.

        A metric is not missing on a task that no run has it for, or on sequences shorter than any it was measured on. The loss, which
        training writes for every run, and the bytes of the cache, which depend on no weights, are exempt. Returns the evidence, and a
        sentence that names the omitted studies.
        """
        runs = self.runs[self.runs["study"].fillna("") != ""]
        if runs.empty:
            return self, ""
        runs = runs[runs["architecture"].isin(models)] if models else runs
        lacking, parts = set[str](), list[str]()
        for metric in (name for name in metrics if name not in ("loss", "cache_bytes")):
            has = runs["run"].isin(self.kept.runs_with.get(metric, ()))
            able = (runs["T"] >= runs.loc[has, "T"].min()) & runs["task"].isin(runs.loc[has, "task"])
            for study, each in has[able].groupby(runs["study"]):
                if not each.all() and study not in lacking:
                    lacking.add(str(study))
                    parts += [f"{study} ({metric} on {each.sum()} of {len(each)} runs)"] if each.any() else []
        left_out = (
            f" Studies left out because only some of their runs have a measure: {', '.join(parts)}." if parts else ""
        )
        kept = self.runs[~self.runs["study"].isin(lacking)]
        return replace(self, runs=kept, sweeps=self.runs) if lacking else self, left_out

    def measured(self) -> Evidence:
        """Return the evidence of runs with measured activations: all except those on repeated tokens."""
        return self.of_runs(self.runs[self.runs["task"] != "repeated"])

    def first_of(self, choices: Sequence[str]) -> str:
        """Return the first of several interchangeable models that has runs."""
        return next(name for name in choices if name in self.models)

    def comparable(
        self, *wanted: str | Sequence[str], ignoring: Sequence[str] = (), also: Sequence[str] = (), control: str | None = None
    ) -> Evidence:  # fmt: skip
        """Return the runs of the setting with most seeds that has every wanted model; `Claim.judge` judges all such settings.

        Runs of one setting have equal data, length, size and recipe. Their learning rates are equal, or each is the best of its model
        in a sweep of other seeds. Seeds that chose a rate are not counted where `MIN_SEEDS` others have it alone. One name of each
        tuple is enough; `ignoring` are settings that may differ, `also` more columns that must be equal. Among equal
        numbers of seeds, settings with the control come first, then larger models, longer trainings, and a lower loss of the first
        model. Raises `InsufficientEvidence` for a missing model, and for models that were never trained under equal conditions.
        """
        groups = [(name,) if isinstance(name, str) else tuple(name) for name in wanted]
        names = [name for group in groups for name in group]
        absent = [" or ".join(map(model_name, g)) for g in groups if not set(g) & set(self.models)]
        if absent:
            architectures = [model_name(name) for name in dict.fromkeys(self.runs["architecture"])]
            here = f"here {'is' if len(architectures) == 1 else 'are'} {listed(architectures)}"
            here = here if architectures else "here are no runs that can be used"
            raise InsufficientEvidence(f"Needs runs of {listed(absent)}; {here}.")
        equal = [c for c in (*SETTING, *also) if c not in ignoring]
        parts = [rows for _, rows in self.runs.groupby(equal, dropna=False)]
        if "lr" in equal and len(self._tuned):
            by = [*(c for c in equal if c != "lr"), "chosen_on"]
            tuned = {frozenset(rows["run"]): rows for _, rows in self._tuned.groupby(by, dropna=False)}
            parts = [rows for rows in parts if not any(at_best.issuperset(rows["run"]) for at_best in tuned)]
            whole = [*tuned, *(frozenset(rows["run"]) for rows in parts)]  # no runs are judged as part of others, too
            parts += [rows for at_best, rows in tuned.items() if not any(at_best < other for other in whole)]
        parts = [self._reported(rows, groups) for rows in parts] if "lr" in equal else parts
        candidates: list[tuple[int, pd.DataFrame]] = []
        for rows in parts:
            pairs = {(model, seed) for model, seed in zip(rows["model"], rows["seed"], strict=True) if pd.notna(seed)}
            seeds = Counter(model for model, _ in pairs)
            fewest = min(max(seeds[name] for name in group) for group in groups)
            if fewest > 0 and (not self.within or not self.within.isdisjoint(rows["run"])):
                candidates.append((fewest, rows))
        if not candidates:
            runs_of = self.runs[self.runs["model"].isin(names)]
            differ = [c for c in equal if runs_of[c].nunique(dropna=False) > 1]
            apart = f"never under equal conditions: they differ in {listed(differ)}"
            apart = "not together in the setting that is compared" if self.within else apart
            raise InsufficientEvidence(
                f"{listed([' or '.join(map(model_name, g)) for g in groups])} are here, but {apart}. "
                "Train them with equal data, length, size and recipe."
            )

        def order(candidate: tuple[int, pd.DataFrame]) -> tuple[float, ...]:
            fewest, rows = candidate
            size = rows.loc[rows["model"].isin(names), "parameters"].fillna(0).max()
            base, written = set(rows.loc[rows["model"].isin(groups[0]), "run"]), self.written("validation_loss")
            last = at_last_step(written[written["run"].isin(base)])["value"].astype(float)
            loss = float(last.mean()) if len(last) and np.isfinite(last).all() else math.inf
            chosen, controlled = frozenset(rows["run"]) == self.within, control in set(rows["model"])
            return tuple(map(float, (chosen, fewest, controlled, size, rows["steps"].fillna(0).max(), -loss)))

        if len(candidates) > 1:
            candidates.sort(key=order, reverse=True)
        best_first = [rows for _, rows in candidates]
        if not self.settings:
            self.settings.extend(best_first)
        first = best_first[0]
        rows = first[first["model"].isin([*names, control])]
        self.compared.append(rows.assign(beside=~rows["model"].isin(names)))
        return self.of_runs(first)

    def _reported(self, rows: pd.DataFrame, groups: Sequence[Sequence[str]]) -> pd.DataFrame:
        """Return the rows without seeds that chose a learning rate, where enough others were trained at that rate alone."""
        every = self.runs if self.sweeps is None else self.sweeps
        cells = every.groupby([*(c for c in SETTING if c != "lr"), "model", "seed"], dropna=False)["lr"]
        others = rows[~rows["run"].isin(every.loc[cells.transform("nunique") >= RATES, "run"])]
        seeds = others.groupby("model")["seed"].nunique()
        enough = all(any(seeds.get(name, 0) >= MIN_SEEDS for name in group) for group in groups)
        return others if enough else rows

    @property
    def _tuned(self) -> pd.DataFrame:
        """Runs at the best learning rate of their model in a sweep of other seeds, and facts of the sweep.

        The sweep has their length, or another length if theirs has none.
        """
        key = self._names, None if self.sweeps is None else frozenset(self.sweeps["run"])
        if key not in self.tuned_of:
            self.tuned_of[key] = self.find_tuned()
        return self.tuned_of[key]

    def find_tuned(self) -> pd.DataFrame:
        """Compute the same without the memory of earlier answers."""
        length, tuned = ["steps", "warmup"], list[pd.DataFrame]()
        every = (self.runs if self.sweeps is None else self.sweeps).dropna(subset=["lr", *length])
        for _, alike in every.groupby([c for c in SETTING if c not in ("lr", *length)], dropna=False):
            many = alike.groupby([*length, "model", "seed"])["lr"].transform("nunique") >= RATES
            sweeps = dict(list(alike[many].groupby(length)))
            for at, sweep in sweeps.items():
                if len(shared := set.intersection(*sweep.groupby("model")["lr"].agg(set))) < RATES:
                    continue
                sweep = sweep[sweep["lr"].isin(shared)]
                sweep = sweep[sweep.groupby(["model", "seed"])["lr"].transform("nunique") == len(shared)]
                reported = alike[~many & ~alike["seed"].isin(sweep["seed"]) & alike["run"].isin(self.runs["run"])]
                lengths = pd.MultiIndex.from_frame(reported[length])
                reported = reported[(lengths == at) | ~lengths.isin(list(sweeps))]
                with contextlib.suppress(InsufficientEvidence):  # no losses, so no best rates
                    best = best_rates(self.of_runs(sweep).losses())
                    at_best = reported[reported["lr"] == reported["model"].map(best)]
                    on = listed([str(seed) for seed in sorted(sweep["seed"].unique())])
                    edge = at_best["lr"].isin([min(shared), max(shared)])
                    tuned.append(at_best.assign(rates=len(shared), chosen_on=on, edge=edge))
        return pd.concat(tuned).drop_duplicates(["run", "chosen_on"]) if tuned else self.runs.head(0)

    def written(self, metric: str) -> pd.DataFrame:
        """Return the telemetry of a metric without variants."""
        rows = self.telemetry(metric)
        return rows[rows["variant"].isna()]

    def rows(self, metric: str, *, step: str = "last", control: str | None = None, **axes: Any) -> pd.DataFrame:
        """Return records of a metric at each run's `last` step, at step 0 (`first`), or at `all` steps.

        `variant` must be null unless it is given; other axes may vary unless they are given. Raises `InsufficientEvidence` if no row is
        left.
        """
        rows = self.records(metric)
        for axis, value in {"control": control, "variant": None, **axes}.items():
            if value is not Ellipsis:
                rows = rows[rows[axis].isna() if value is None else rows[axis] == value]
        if step == "first":
            rows = rows[rows["step"] == 0]
        elif step == "last":
            last = rows.groupby("run")["step"].transform("max")
            length = rows["run"].map(
                self.runs.drop_duplicates("run").set_index("run")["steps"]
            )  # runs that were measured at an earlier step do not count
            latest = last.groupby(length, dropna=False).transform("max")
            rows = rows[rows["step"].isna() | ((rows["step"] == last) & (last == latest) & (last > 0))]
        if rows.empty:
            when = {"first": " at random init", "last": " of trained models"}.get(step, "")
            raise InsufficientEvidence(f"{metric}{when} is not measured for {listed(self.models)}.")
        return rows

    def by_seed(self, rows: pd.DataFrame, model: str) -> pd.Series:
        """Return the mean of a model's rows for each seed."""
        return self.of_model(rows, model).groupby("seed")["value"].mean().astype(float)

    def of_model(self, rows: pd.DataFrame, model: str) -> pd.DataFrame:
        """Return the rows of one model; raises `InsufficientEvidence` for a NaN or infinite value."""
        return sound(rows[rows["run"].isin(self.runs.loc[self.runs["model"] == model, "run"])])

    def known(self, rows: pd.DataFrame, model: str) -> pd.DataFrame:
        """Return the rows of one model; raises `InsufficientEvidence` if it has none."""
        known = self.of_model(rows, model)
        if known.empty:
            metric = rows["metric"].iloc[0] if "metric" in rows and len(rows) else "the loss"
            raise InsufficientEvidence(f"{metric} is not measured for {model}: it was left out, or the model has none.")
        return known

    def difference(self, rows: pd.DataFrame, model: str, baseline: str = "transformer") -> Interval:
        """Return the mean of model - baseline, paired by seed; raises `InsufficientEvidence` if one has no value."""
        both = [self.known(rows, name) for name in (model, baseline)]
        refuse_other_documents(both)
        return paired_seeds(*(each.groupby("seed")["value"].mean().astype(float) for each in both))

    def differences(self, rows: pd.DataFrame, model: str, baselines: Iterable[str]) -> dict[str, Interval]:
        """Return the `difference` from each baseline that shares a seed with the model, by name.

        Raises `InsufficientEvidence` if the model shares no seed with any of them.
        """
        differences = {name: self.difference(rows, model, name) for name in baselines if name in self.models}
        paired = {name: interval for name, interval in differences.items() if interval.n}
        if differences and not paired:
            raise InsufficientEvidence(f"No seed of {model} is one of {listed(list(differences))}.")
        return paired

    def losses(self) -> pd.DataFrame:
        """Return the final validation loss by run and domain, from training or else from the measured loss.

        Columns are run, model, seed, data, lr, tokens and value. The value is NaN if the run's losses end before those of other runs
        with as many steps. Raises `InsufficientEvidence` if no run has a loss.
        """
        written = self.written("validation_loss")
        measured = self.records("loss")
        measured = measured[measured["control"].isna() & ~measured["run"].isin(set(written["run"]))]
        rows = at_last_step(pd.concat([written, measured], ignore_index=True))
        if rows.empty:
            raise InsufficientEvidence(f"No validation loss of {listed(self.models)} is known.")
        facts_of = self.runs[["run", "model", "lr", "tokens", "steps"]]
        rows = rows[["run", "seed", "data", "step", "value"]].merge(facts_of, on="run")
        early = (rows["step"] < rows.groupby("steps")["step"].transform("max")).fillna(False).astype(bool)
        return rows.drop(columns=["step", "steps"]).assign(value=rows["value"].astype(float).mask(early))

    def curves(self) -> dict[str, pd.Series]:
        """Return the validation loss by run and step, averaged over domains."""
        means = self.written("validation_loss").groupby(["run", "step"])["value"].mean().astype(float)
        steps = means.index.get_level_values("step").astype(int)
        by_step = means.set_axis(pd.Index(steps, name="step"))
        return {str(run): by_step.iloc[at] for run, at in means.groupby("run").indices.items()}

    def paired_curves(self, model: str, baseline: str) -> dict[Any, tuple[pd.Series, pd.Series]]:
        """Return the loss curves of a model and its baseline by seed; `name` is the run. Seeds without both are left out."""
        curves, pairs = self.curves(), {}
        for seed, runs in self.runs.groupby("seed"):
            first = runs.groupby("model")["run"].first()
            if {first.get(model), first.get(baseline)} <= curves.keys():
                pairs[seed] = curves[first[model]].rename(first[model]), curves[first[baseline]].rename(first[baseline])
        return pairs

    def beyond_init(self, last: pd.DataFrame, first: pd.DataFrame, model: str) -> Interval:
        """Return how much more a quantity changed during training than in the Transformer, paired by seed."""
        return paired_seeds(*(self.by_seed(last, m) - self.by_seed(first, m) for m in (model, "transformer")))

    def at_equal_loss(self, rows: pd.DataFrame, model: str, baseline: str = "transformer") -> Interval:
        """Return the difference of a quantity, given at all checkpoints, at the lowest loss that both runs of a seed reached.

        A seed counts only if both runs have checkpoints before and after that loss.
        """
        pairs = {}
        for seed, curves in self.paired_curves(model, baseline).items():
            loss = common_loss(curves)
            values = [self._at(rows, str(curve.name), curve, loss) for curve in curves]
            if all(map(math.isfinite, values)):
                pairs[seed] = values
        frame = pd.DataFrame.from_dict(pairs, orient="index", columns=["model", "baseline"])
        return paired_seeds(frame["model"], frame["baseline"])

    def at_common_loss(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Return a quantity, given at all checkpoints, by run, seed and layer at the lowest loss that all runs of a seed reached.

        Runs without a loss, or without checkpoints before and after it, are left out.
        """
        curves, matched, layers = self.curves(), [], defaultdict[str, list[tuple[Any, pd.Series]]](list)
        means = rows[rows["step"] > 0].groupby(["run", "layer", "step"])["value"].mean().reset_index()  # see `_at`
        for (run, layer), part in means.groupby(["run", "layer"]):
            layers[str(run)].append((layer, part.set_index("step")["value"]))
        for seed, mine in self.runs.groupby("seed"):
            runs = sorted(run for run in mine["run"] if run in curves)
            loss = common_loss([curves[run] for run in runs]) if runs else math.nan
            for run in runs:
                for layer, series in layers[run]:
                    value = at_equal_loss(series, curves[run], loss)
                    matched.append({"run": run, "seed": seed, "layer": layer, "value": value})
        return pd.DataFrame(matched, columns=["run", "seed", "layer", "value"]).dropna()

    @staticmethod
    def _at(rows: pd.DataFrame, run: str, curve: pd.Series, loss: float) -> float:
        series = rows[rows["run"] == run].groupby("step")["value"].mean()
        trained = series[series.index > 0]  # between random init and the first checkpoint nothing is linear
        return at_equal_loss(trained.set_axis(trained.index.astype(int)).astype(float), curve, loss)


def sound(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows unchanged; raises `InsufficientEvidence` for a NaN or infinite value."""
    finite = np.isfinite(rows["value"].to_numpy(dtype=float, na_value=math.nan))
    if not finite.all():
        broken = sorted(set(rows.loc[~finite, "run"]))
        why = "is not a number in {}: broken weights, or too few documents."
        if "metric" not in rows:
            why = "is unknown for {}: its training broke, or what it wrote ends before that of others of its length."
        metric = rows["metric"].iloc[0] if "metric" in rows else "The last loss"
        raise InsufficientEvidence(f"{metric} {why.format(listed(broken))}")
    return rows


def refuse_other_documents(sides: Sequence[pd.DataFrame]) -> None:
    """Raise `InsufficientEvidence` if the records of a metric are of other documents on one side than on the other."""
    known = [side["provenance"].dropna().unique() for side in sides if "provenance" in side]
    samples = [{str(facts(text).get("data", "")) for text in texts} for texts in known]
    if all(samples) and any(each != samples[0] for each in samples):
        names = [side["architecture"].iloc[0] for side in sides]
        raise InsufficientEvidence(
            f"{sides[0]['metric'].iloc[0]} is measured on other documents for {listed(names)}; measure them on the same."
        )


def loss_curve(rows: pd.DataFrame) -> pd.Series:
    """Return the validation loss of one run by step, averaged over domains."""
    curve = rows.groupby("step")["value"].mean().sort_index()
    return curve.set_axis(curve.index.astype(int)).astype(float)


def at_last_step(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows at every run's last step, and rows without a step."""
    return rows[rows["step"].isna() | (rows["step"] == rows.groupby("run")["step"].transform("max"))]


def best_rates(losses: pd.DataFrame) -> dict[str, float]:
    """Return the learning rate with the lowest mean loss, by model; a rate with an unknown loss never wins."""
    means = losses.groupby(["model", "lr"])["value"].agg(lambda x: x.mean(skipna=False))
    return {str(model): float(rate) for model, rate in means[np.isfinite(means)].groupby("model").idxmin()}


def deep_layers(rows: pd.DataFrame, n_layers: int) -> pd.DataFrame:
    """Return the rows of the later half of the layers."""
    return rows[rows["layer"] >= math.ceil(n_layers / 2)]


def model_mean(rows: pd.DataFrame) -> Interval:
    """Return the mean of one model's rows with its interval.

    The interval is over seeds if there are three or more. Otherwise it is over documents (n counts these), and decides nothing.
    """
    seeds = sound(rows).groupby("seed", dropna=False)["value"].mean().astype(float)
    if len(seeds) >= MIN_SEEDS:
        return over_seeds(seeds)
    value, errors = float(rows["value"].mean()), rows["se"].astype(float)
    error = math.sqrt(float((errors**2).sum())) / len(rows) if errors.notna().all() else math.nan
    half = t_quantile(GROUPS - 1) * error
    n = int(rows["n"].min()) if rows["n"].notna().any() else len(seeds)
    return Interval(value, value - half, value + half, n)
