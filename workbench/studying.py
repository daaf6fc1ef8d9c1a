"""The runs of a study: trained in parallel, resumed, and compared over paired seeds with the baseline their file names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.config import PRESETS, ModelConfig, TrainConfig
from workbench.errors import WorkbenchError
from workbench.findings import formation_steps
from workbench.jobs import Status, run_jobs, shared_text
from workbench.results import load_records, write_parquet
from workbench.runs import CORPORA, Run
from workbench.statistics import Interval, over_seeds, paired_seeds
from workbench.studies import OUTCOMES, Cell, Study, label

LEAST_SEEDS = 3
QUICK_SEEDS = 2
QUICK_RECIPE = {
    "steps": 4, "batch": 2, "warmup": 1, "log_every": 2, "validate_every": 2, "validation_sequences": 4, "save_every": 4,
    "checkpoints": 1, "bf16": False,
}  # fmt: skip
QUICK_LENGTH, QUICK_BYTES, QUICK_VOCABULARY = 64, 1_000_000, 512  # sink rates need 64 tokens


@dataclass(frozen=True)
class Job:
    """One run of a study."""

    study: Study
    cell: Cell
    seed: int
    runs: str
    quick: bool
    device: str | None
    data: Mapping[str, Any] = field(default_factory=dict)  # the description of prepared data

    @property
    def name(self) -> str:
        """The run's folder."""
        return f"{'quick-' if self.quick else ''}{self.study.name}-{self.cell.folder}-s{self.seed}"


# ---- the runs --------------------------------------------------------------------------------------------------------


def plan(study: Study, runs: Path, *, quick: bool = False, device: str | None = None) -> list[Job]:
    """All runs of a study, seed by seed, so that an interrupted one has compared all cells with some seeds."""
    seeds = study.seeds[:QUICK_SEEDS] if quick else study.seeds
    return [Job(study, cell, seed, str(runs), quick, device) for seed in seeds for cell in study.cells]


def sizes(job: Job) -> tuple[ModelConfig, TrainConfig]:
    """The model and recipe of a run, small ones where it only has to be quick."""
    preset, settings = PRESETS[job.study.preset], job.cell.settings
    model, recipe = dict(settings["model"]), dict(settings["recipe"])
    vocabulary = {"d_vocab": job.data["d_vocab"]} if "d_vocab" in job.data else {}
    shape = preset.model.replace(**(vocabulary | model))
    train = preset.train.replace(**recipe)
    if job.quick:
        shape = shape.replace(d_model=8 * shape.n_heads, d_mlp=16)
        train = train.replace(**QUICK_RECIPE, T=min(train.T, QUICK_LENGTH))
    return shape, train


def prepare_data(job: Job) -> dict[str, Any]:
    """The description of a run's data and its vocabulary `d_vocab`; text is tokenised and kept beside the runs."""
    from workbench.data import BackcopyData, RepeatedData, prepare

    told = dict(job.cell.settings["data"])
    kind = told.pop("kind", "text")
    if kind != "text":
        data: Any = (RepeatedData if kind == "repeated" else BackcopyData)(**told)
    else:
        vocabulary = told.get("vocabulary") or min(PRESETS[job.study.preset].model.d_vocab, 4096)
        settings = {
            "vocabulary": min(vocabulary, QUICK_VOCABULARY) if job.quick else vocabulary,
            "bos": told.get("bos"),
        }
        runs = Path(job.runs)
        if texts := told.get("texts"):
            data = prepare(texts=texts, root=runs / CORPORA, **settings)
        else:
            data = shared_text(runs, max_bytes=QUICK_BYTES if job.quick else None, **settings)
    return data.describe() | {"d_vocab": data.d_vocab}


def work(job: Job) -> str:
    """Train one run, or go on with it, and measure what the study asks for; returns the run's name."""
    import torch

    from workbench.data import open_data
    from workbench.measuring import measure
    from workbench.training import train

    torch.set_num_threads(1)
    runs = Path(job.runs)
    model, recipe = sizes(job)
    data = open_data(dict(job.data), runs / CORPORA)
    run = train(
        job.cell.architecture, data, name=job.name, runs=runs, model=model, train=recipe, seed=job.seed, device=job.device,
        **job.cell.settings["options"],
    )  # fmt: skip
    if metrics := job.study.measure.get("metrics"):
        n = 4 if job.quick else job.study.measure.get("n", 64)
        measure(run, metrics, steps=job.study.measure.get("steps", "ends"), n=n, device=job.device)
    return job.name


def run_study(
    study: Study,
    runs: Path,
    *,
    quick: bool = False,
    processes: int | None = None,
    device: str | None = None,
    told: Callable[[dict[str, Any]], None] | None = None,
) -> pd.DataFrame:
    """Train what is not there yet, in processes of one thread each, and return one row per run; see `outcomes`.

    What fails is in column `failed`, the rest goes on. Ctrl-C stops after the step at hand; the same call goes on from there.
    """
    runs.mkdir(parents=True, exist_ok=True)
    jobs = plan(study, runs, quick=quick, device=device)
    status = Status(runs / f".study-{study.name}.json", {job.name: _cost(job) for job in jobs}, told)
    ready = list(_with_data(jobs, status))
    run_jobs(work, ready, processes, lambda job, error: status.done(job.name, error))
    status.finish()
    return outcomes(study, jobs, status.failures)


def _cost(job: Job) -> float:
    """Tokens times layers: enough to say how long it takes yet. A broken recipe costs nothing."""
    try:
        model, recipe = sizes(job)
    except WorkbenchError:
        return 0.0
    return float(recipe.steps * recipe.batch * recipe.T * model.n_layers)


def _with_data(jobs: Sequence[Job], status: Status) -> Iterator[Job]:
    """The jobs with the descriptions of their data; those whose data cannot be had are noted as failed."""
    prepared: dict[str, dict[str, Any] | WorkbenchError] = {}
    for job in jobs:
        key = repr(job.cell.settings["data"])
        if key not in prepared:
            try:
                prepared[key] = prepare_data(job)
            except WorkbenchError as error:
                prepared[key] = error
        data = prepared[key]
        if isinstance(data, WorkbenchError):
            status.done(job.name, data)
        else:
            yield dataclasses.replace(job, data=data)


# ---- what they say ---------------------------------------------------------------------------------------------------


def outcomes(study: Study, jobs: Sequence[Job], failures: Mapping[str, str]) -> pd.DataFrame:
    """One row per run: model, grid axes as text, seed, run, step, validation loss in nats (mean of the domains),
    formation step where the data can be copied, and `failed`."""
    rows = []
    for job in jobs:
        axes = {axis: label(value) for axis, value in job.cell.point.items()}
        row = {
            "model": job.cell.model,
            **axes,
            "architecture": job.cell.architecture,
            "seed": job.seed,
            "run": job.name,
        }
        found = {"step": math.nan, "validation_loss": math.nan, "formation_step": math.nan}
        if job.name not in failures:
            found |= _outcome(Run.open(Path(job.runs) / job.name))
        rows.append(row | found | {"failed": failures.get(job.name, "")})
    return pd.DataFrame(rows)


def _outcome(run: Run) -> dict[str, float]:
    told = run.telemetry("metric in ('validation_loss', 'copy_loss')")
    losses = told[told["metric"] == "validation_loss"]
    last = losses[losses["step"] == losses["step"].max()]
    found = {"step": float(last["step"].max()), "validation_loss": float(last["value"].mean())}
    if (told["metric"] == "copy_loss").any():
        formed = formation_steps(told)["formation_step"].iloc[0]
        found["formation_step"] = math.nan if pd.isna(formed) else float(formed)
    return found


def summary(study: Study, frame: pd.DataFrame) -> pd.DataFrame:
    """One row per cell: the outcome over seeds, the difference to the baseline paired by seed, and what that says.

    `mean`, `least`, `largest` over the `n` seeds that have an outcome; `difference` with its 95 % interval `low`, `high` over
    seeds; `verdict` is `unresolved` where that interval contains 0 or there are fewer than three pairs. With `tuned`, a row
    `best` per model takes each model's best value of that axis, chosen by the mean.
    """
    rest = [axis for axis in study.axes if axis != study.tuned]
    rows = [
        _compared(study, frame, [*study.axes], group) for _, group in frame.groupby(["model", *study.axes], sort=False)
    ]
    if study.tuned is not None:
        best = pd.concat([_best(study, group) for _, group in frame.groupby(["model", *rest], sort=False)])
        chosen = best.assign(**{study.tuned: "best"})
        for (_, group), (_, real) in zip(
            chosen.groupby(["model", *rest], sort=False), best.groupby(["model", *rest], sort=False), strict=True
        ):
            rows.append(_compared(study, chosen, rest, group) | {study.tuned: _found_best(study, real)})
    return pd.DataFrame(rows)


def _best(study: Study, group: pd.DataFrame) -> pd.DataFrame:
    """A model's runs at its best value of the tuned axis; a value at which some seed has no outcome is not the best."""
    means = group.groupby(study.tuned, sort=False)[study.outcome].apply(
        lambda x: math.inf if x.isna().any() else x.mean()
    )
    return group[group[study.tuned] == means.idxmin()]


def _found_best(study: Study, runs: pd.DataFrame) -> str:
    """The best value in words; at the edge of its axis a better one may lie outside."""
    assert study.tuned is not None
    tried = list(dict.fromkeys(label(cell.point[study.tuned]) for cell in study.cells))
    found = runs[study.tuned].iloc[0]
    return f"best ({found}{', at the edge' if found in (tried[0], tried[-1]) else ''})"


def _compared(study: Study, frame: pd.DataFrame, axes: Sequence[str], group: pd.DataFrame) -> dict[str, Any]:
    first, values = group.iloc[0], group.set_index("seed")[study.outcome]
    baseline = next(cell.baseline for cell in study.cells if cell.model == first["model"])
    peers = frame[frame["model"] == baseline]
    for axis in axes:
        peers = peers[peers[axis] == first[axis]]
    known = values.dropna()
    is_baseline = first["model"] == baseline
    base = peers.set_index("seed")[study.outcome]
    change = paired_seeds(values, base) if not is_baseline else over_seeds([])
    failed = int((group["failed"] != "").sum())
    return {
        "model": first["model"], **{axis: first[axis] for axis in study.axes}, "outcome": study.outcome, "n": len(known),
        "mean": known.mean(), "least": known.min(), "largest": known.max(),
        "difference": change.value, "low": change.low, "high": change.high,
        "verdict": "baseline" if is_baseline else _verdict(study, change, values, base, failed), "failed": failed,
    }  # fmt: skip


def _verdict(study: Study, change: Interval, values: pd.Series, base: pd.Series, failed: int) -> str:
    if failed:
        return f"unresolved: {failed} of {len(values)} runs failed"
    for whose, steps in (("", values), ("the baseline ", base)):
        if study.outcome == "formation_step" and steps.isna().any():
            return f"unresolved: {whose}not formed in {int(steps.isna().sum())} of {len(steps)} runs"
    if change.n < LEAST_SEEDS:
        return f"unresolved: {change.n} of the {LEAST_SEEDS} seeds needed"
    below, above = OUTCOMES[study.outcome]
    return {-1: below, 0: "unresolved", 1: above}[change.sign]


def keep(study: Study, frame: pd.DataFrame, runs: Path, out: Path) -> list[Path]:
    """Write `NAME.parquet` (cells), `NAME-runs.parquet` (runs) and, where the study measures, `NAME-records.parquet`."""
    tables = {study.name: summary(study, frame), f"{study.name}-runs": frame}
    if study.measure.get("metrics"):
        tables[f"{study.name}-records"] = load_records([runs / name for name in frame[frame["failed"] == ""]["run"]])
    for name, table in tables.items():
        write_parquet(table, out / f"{name}.parquet")
    return [out / f"{name}.parquet" for name in tables]
