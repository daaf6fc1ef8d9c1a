"""Training of a study's runs, and the comparison of every model with the study's baseline over paired seeds."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.claims.verdict import judge_differences
from workbench.config import PRESETS, ModelConfig, TrainConfig
from workbench.errors import BadData, WorkbenchError
from workbench.jobs.running import Job, StatusFile, Workers, run_jobs
from workbench.places import SHIPPED
from workbench.runs.records import load_records, one_sample, write_parquet
from workbench.runs.run import CORPORA, RUN_FILE, Run, is_study, shared_text
from workbench.statistics.censored import censored, compare_steps, formed_in, step_unit
from workbench.statistics.copying_and_sink_steps import formation_steps, sink_step
from workbench.statistics.intervals import MIN_SEEDS, Interval, over_seeds, paired_seeds
from workbench.storage.path_or_url import unpacked
from workbench.studies.study_file import OUTCOMES, Cell, Study, find_study, read_study, value_text

QUICK_SEEDS = 2
QUICK_RECIPE = {
    "steps": 4, "batch": 2, "warmup": 1, "log_every": 2, "validate_every": 2, "validation_sequences": 4, "save_every": 4,
    "checkpoints": 1, "bf16": False,
}  # fmt: skip
QUICK_LENGTH, QUICK_BYTES, QUICK_VOCABULARY = 64, 1_000_000, 512  # sink rates need 64 tokens


@dataclass(frozen=True)
class StudyRun:
    """One run of a study: a cell with a seed."""

    study: Study
    cell: Cell
    seed: int
    runs: str
    quick: bool
    device: str | None
    data: Mapping[str, Any] = field(default_factory=dict)  # the description of prepared data

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return f"{'quick-' if self.quick else ''}{self.study.name}-{self.cell.folder}-s{self.seed}"


def plan(study: Study, runs: Path, *, quick: bool = False, device: str | None = None) -> list[StudyRun]:
    """Return all runs of a study, ordered by seed, so that an interrupted study has compared all cells on some seeds."""
    seeds = study.seeds[:QUICK_SEEDS] if quick else study.seeds
    cells = _at_best_rates(study, runs) if study.rates_from and not quick else study.cells
    return [StudyRun(study, cell, seed, str(runs), quick, device) for seed in seeds for cell in cells]


def _at_best_rates(study: Study, runs: Path) -> list[Cell]:
    """Cells of a study at each model's best learning rate in the finished study of other seeds that `rates_from` names."""
    other = read_study(find_study(str(study.rates_from)))
    if shared := sorted(set(other.seeds) & set(study.seeds)):
        why = f"which has the same seeds {shared}; give others"
        raise WorkbenchError(f"{study.name} takes its rates from {other.name}, {why}")
    tried = plan(other, runs)
    places = [runs / run.name for run in tried]
    if not any(path.exists() for path in places) and is_study(shipped := SHIPPED / "evidence" / other.name):
        runs = unpacked(shipped)  # nothing is trained again that ships
        tried = plan(other, runs)
        places = [runs / run.name for run in tried]
    if absent := [path for path in places if not (path / RUN_FILE).exists() or not Run.open(path).finished]:
        raise WorkbenchError(
            f"{study.name} takes its rates from {other.name}, of which {len(absent)} of {len(tried)} runs are not finished; "
            f"train them first: workbench study {other.name}"
        )
    losses = outcomes(other, tried, {}).assign(rate=[Run.open(path).train.lr for path in places])
    axes = [axis for axis in study.axes if axis in other.axes]  # as sizes, each with rates of its own
    cells = losses.groupby(["model", *axes, "rate"])
    if pooled := [axis for axis in other.axes if axis not in axes and (cells[axis].nunique() > 1).any()]:
        why = f"at several values of {pooled[0]}, an axis that {study.name} lacks; add the axis, also with one value"
        raise WorkbenchError(f"{study.name} takes its rates from {other.name}, which tried each rate {why}")
    means = cells["validation_loss"].mean(skipna=False).dropna()
    best = {tuple(key): float(rate) for *key, rate in means.groupby(["model", *axes]).idxmin()}
    keys = [(cell.model, *(value_text(cell.point[axis]) for axis in axes)) for cell in study.cells]
    if untried := [" ".join(key) for key in keys if key not in best]:
        cure = f"whose rate {study.name} takes from it; add it there"
        raise WorkbenchError(f"{other.name} has not tried {untried[0]}, {cure}")
    recipes = [{**cell.settings["recipe"], "lr": best[key]} for cell, key in zip(study.cells, keys, strict=True)]
    settings = [{**cell.settings, "recipe": recipe} for cell, recipe in zip(study.cells, recipes, strict=True)]
    return [dataclasses.replace(cell, settings=each) for cell, each in zip(study.cells, settings, strict=True)]


def sizes(run: StudyRun) -> tuple[ModelConfig, TrainConfig]:
    """Return the model and the recipe of a run; small ones for a quick run."""
    preset, settings = PRESETS[run.study.preset], run.cell.settings
    vocabulary = {"d_vocab": run.data["d_vocab"]} if "d_vocab" in run.data else {}
    shape = preset.model.replace(**(vocabulary | dict(settings["model"])))
    train = preset.train.replace(**settings["recipe"])
    if run.quick:
        shape = shape.replace(d_model=8 * shape.n_heads, d_mlp=16)
        train = train.replace(**QUICK_RECIPE, T=min(train.T, QUICK_LENGTH))
    return shape, train


def prepare_data(run: StudyRun) -> dict[str, Any]:
    """Return the description of a run's data, with its vocabulary `d_vocab`; texts are tokenised and stored beside the runs."""
    from workbench.checkpoints.hub import offline
    from workbench.data.data_sources import BackcopyData, RepeatedData, prepare

    written = dict(run.cell.settings["data"])
    kind = written.pop("kind", "text")
    if kind != "text":
        data: Any = (RepeatedData if kind == "repeated" else BackcopyData)(**written)
    else:
        vocabulary = written.get("vocabulary") or PRESETS[run.study.preset].vocabulary
        vocabulary = min(vocabulary, QUICK_VOCABULARY) if run.quick else vocabulary
        most = QUICK_BYTES if run.quick else None
        settings = {"vocabulary": vocabulary, "bos": written.get("bos"), "max_bytes": most}
        runs = Path(run.runs)
        if texts := written.get("texts"):
            try:
                with offline():  # a study file may be another's
                    data = prepare(texts=texts, root=runs / CORPORA, **settings)
            except BadData as error:
                if not any(str(text).startswith("datasets:") for text in texts):
                    raise
                cure = "a study reads data sets from this machine's cache: fetch it once with datasets.load_dataset"
                raise BadData(f"{error}; {cure}") from error
        else:
            data = shared_text(runs, **settings)
    return data.describe() | {"d_vocab": data.d_vocab}


def work(run: StudyRun) -> str:
    """Train one run (or resume it), measure the metrics of the study, and return its name."""
    import torch

    from workbench.data.data_sources import open_data
    from workbench.measurement.measuring import measure, refuse_short
    from workbench.training.loop import train

    torch.set_num_threads(1)
    runs = Path(run.runs)
    model, recipe = sizes(run)
    metrics = run.study.measure.get("metrics", ())
    refuse_short(recipe.T, metrics)  # before an hour of training, not after it
    data = open_data(dict(run.data), runs / CORPORA)
    trained = train(
        run.cell.architecture, data, name=run.name, runs=runs, model=model, train=recipe, seed=run.seed, device=run.device,
        **run.cell.settings["options"],
    )  # fmt: skip
    if metrics:
        n = 4 if run.quick else run.study.measure.get("n", 64)
        measure(trained, metrics, steps=run.study.measure.get("steps", "ends"), n=n, device=run.device)
    return run.name


def run_study(
    study: Study, runs: Path, *, quick: bool = False, workers: Workers = None, device: str | None = None,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Train the missing runs of a study and return one row per run; see `outcomes`.

    Failures are in column `failed` and do not stop the other runs. `quick` trains tiny models for a few steps; `progress` is called with
    the status after each run.
    """
    runs.mkdir(parents=True, exist_ok=True)
    planned = plan(study, runs, quick=quick, device=device)
    jobs, ready, prepared = list[Job](), list[Job](), dict[str, dict[str, Any] | WorkbenchError]()
    before = list[str]()  # a run that cannot be opened fails below, by itself
    for run in planned:
        cost = 0.0  # for the estimate of the remaining time
        with contextlib.suppress(WorkbenchError):
            model, recipe = sizes(run)
            cost = float(recipe.steps * recipe.batch * recipe.T * model.n_layers)
        jobs.append(Job(run.name, work, (run,), cost))
        with contextlib.suppress(WorkbenchError):
            if (runs / run.name / RUN_FILE).exists() and Run.open(runs / run.name).finished:
                before.append(run.name)
    status = StatusFile(runs / f".study-{study.name}.json", jobs, progress, before)
    for run, job in zip(planned, jobs, strict=True):
        if (key := repr(run.cell.settings["data"])) not in prepared:
            try:
                prepared[key] = prepare_data(run)
            except WorkbenchError as error:
                prepared[key] = error
        if isinstance(data := prepared[key], WorkbenchError):
            status.done(run.name, data)
        else:
            ready.append(dataclasses.replace(job, arguments=(dataclasses.replace(run, data=data),)))
    run_jobs(ready, workers, lambda job, error: status.done(job.name, error), folders=[runs])
    status.finish()
    return outcomes(study, planned, status.failures)


def outcomes(study: Study, planned: Sequence[StudyRun], failures: Mapping[str, str]) -> pd.DataFrame:
    """Return one row per run with its outcomes; steps are NaN if they are not reached.

    Columns are model, grid axes as text, architecture, seed, run, step, validation_loss (nats, mean of the domains), formation_step and
    failed, with sink_step if that is the study's outcome.
    """
    rows = []
    for run in planned:
        row = {
            "model": run.cell.model, **{axis: value_text(value) for axis, value in run.cell.point.items()},
            "architecture": run.cell.architecture, "seed": run.seed, "run": run.name,
            "step": math.nan, "validation_loss": math.nan, "formation_step": math.nan,
        }  # fmt: skip
        if run.name not in failures:
            trained = Run.open(Path(run.runs) / run.name)
            written = trained.telemetry("metric in ('validation_loss', 'copy_loss')")
            losses = written[written["metric"] == "validation_loss"]
            last = losses[losses["step"] == losses["step"].max()]
            row |= {"step": float(last["step"].max()), "validation_loss": float(last["value"].mean())}
            if (written["metric"] == "copy_loss").any():
                row["formation_step"] = float(formation_steps(written)["formation_step"].astype("float64").iloc[0])
            if study.outcome == "sink_step":
                row["sink_step"] = sink_step(one_sample(load_records([trained.path])))
        rows.append(row | {"failed": failures.get(run.name, "")})
    return pd.DataFrame(rows)


def summary(study: Study, frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per cell: the outcome over seeds, and the paired difference from the baseline with its verdict.

    If a run does not reach its step, mean and largest are NaN. Steps are compared by `compare_steps`, and `unit` is that of the difference.
    Verdicts are Holm-corrected over the table. If the study has a `tuned` axis, one more row per model takes its best value of that axis,
    selected by the mean.
    """
    rest = [axis for axis in study.axes if axis != study.tuned]
    groups = frame.groupby(["model", *study.axes], sort=False)
    rows = [_compared(study, frame, study.axes, group) for _, group in groups]
    if study.tuned is not None:
        parts = []  # a model's runs at its best value: the mean over seeds, or without a value that all reach the restricted mean
        for _, group in frame.groupby(["model", *rest], sort=False):
            orders = group[[study.outcome]].assign(restricted=group[study.outcome].fillna(group["step"]))
            means = orders.groupby(group[study.tuned], sort=False).mean(skipna=False).fillna(math.inf)
            means = means.sort_values([study.outcome, "restricted"], kind="stable")
            parts.append(group[group[study.tuned] == means.index[0]])
        best = pd.concat(parts)
        tuned = best.assign(**{study.tuned: "best"})
        values = [cell.point[study.tuned] for cell in study.cells]
        tried = list(map(value_text, sorted(values) if all(isinstance(v, int | float) for v in values) else values))
        for _, real in best.groupby(["model", *rest], sort=False):
            value = real[study.tuned].iloc[0]
            edge = ", at the edge" if value in (tried[0], tried[-1]) else ""  # a better value may lie outside
            row, change = _compared(study, tuned, rest, tuned.loc[real.index])
            rows.append((row | {study.tuned: f"best ({value}{edge})"}, change))
    words = dict(zip(("supported", "refuted"), OUTCOMES[study.outcome], strict=True))
    tested = {i: change for i, (row, change) in enumerate(rows) if not row["verdict"]}
    for i, verdict in judge_differences(tested).items():
        row, change = rows[i]
        few = f": {change.n} of the {MIN_SEEDS} seeds needed" if change.n < MIN_SEEDS else ""
        row["verdict"] = f"{words.get(verdict.status, verdict.status)}{few or row['formed']}"
    return pd.DataFrame([row for row, _ in rows]).drop(columns="formed")


def _compared(
    study: Study, frame: pd.DataFrame, axes: Sequence[str], group: pd.DataFrame
) -> tuple[dict[str, Any], Interval]:
    """A row of `summary` and its difference; the verdict is empty if `judge_differences` decides it."""
    first = group.iloc[0]
    baseline = next(cell.baseline for cell in study.cells if cell.model == first["model"])
    peers = frame[(frame[["model", *axes]] == [baseline, *first[[*axes]]]).all(axis=1)]
    values, base = (rows.set_index("seed")[study.outcome] for rows in (group, peers))
    known, failed, in_nats = values.dropna(), int((group["failed"] != "").sum()), study.outcome == "validation_loss"
    change, formed, verdict = over_seeds([]), "", ""
    if first["model"] == baseline:
        verdict = "baseline"
    elif in_nats:
        change = paired_seeds(values, base)
    else:
        trained = (rows[rows["failed"] == ""].set_index("seed") for rows in (group, peers))
        steps = [censored(rows[study.outcome], rows["step"]) for rows in trained]
        change = compare_steps(*steps)
        if not all(each["formed"].all() for each in steps):
            formed = f": formed in {' against '.join(map(formed_in, steps))} runs"
    for rows, of in ((group, ""), (peers, f" of {baseline}")):
        if (broken := int((rows["failed"] != "").sum())) and not verdict:
            verdict = f"unresolved: {broken} of {len(rows)} runs{of} failed"
    whole = in_nats or len(known) + failed == len(values)
    row = {
        "model": first["model"], **{axis: first[axis] for axis in study.axes}, "outcome": study.outcome, "n": len(known),
        "mean": known.mean() if whole else math.nan, "least": known.min(), "largest": known.max() if whole else math.nan,
        "difference": change.value, "low": change.low, "high": change.high, "unit": "nats" if in_nats else step_unit([change]),
        "verdict": verdict, "failed": failed, "formed": formed,
    }  # fmt: skip
    return row, change


def keep(study: Study, frame: pd.DataFrame, runs: Path, out: Path) -> list[Path]:
    """Write `NAME.parquet` (cells), `NAME-runs.parquet` and, if the study measures, `NAME-records.parquet` (quick runs: `quick-NAME`)."""
    tables = {"": summary(study, frame), "-runs": frame}
    if study.measure.get("metrics"):
        tables["-records"] = one_sample(load_records([runs / n for n in frame[frame["failed"] == ""]["run"]]))
    name = f"{'quick-' if frame['run'].str.startswith('quick-').all() else ''}{study.name}"
    for part, table in tables.items():
        write_parquet(table, out / f"{name}{part}.parquet")
    return [out / f"{name}{part}.parquet" for part in tables]
