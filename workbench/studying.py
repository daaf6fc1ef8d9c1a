"""A study: one readable TOML file that names architectures x settings x seeds; its runs, and what they say together.

    question = "Does the value residual win at every learning rate?"
    preset = "tiny"                      # the model and recipe that [model] and [recipe] change
    seeds = [0, 1, 2]
    outcome = "formation_step"           # or validation_loss
    baseline = "transformer"             # whom the others are compared with at equal [grid]; a model may name its own
    data = { kind = "repeated" }         # text (texts, vocabulary, bos), repeated (vocabulary, shortest), backcopy
    recipe = { steps = 150 }
    grid.recipe.lr = [2e-3, 4e-3]        # crossed with every model

    [[models]]
    architecture = "transformer"
    [[models]]
    architecture = "resformer"
    vary.options.lambda_v1 = [0.5, 2]    # one model each; also model, recipe, data

Under `grid` and `vary`, a name that is no section is an axis of named points: `[[grid.size]]` with `name` and sections.
`tuned = "lr"` names the grid axis of which every model may take its best value, for the second comparison. `[measure]` takes
`metrics`, `steps` and `n`. Unknown keys are refused; runs are resumed, and a finished one is not trained again.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.config import PRESETS, ModelConfig, TrainConfig
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.findings import formation_steps
from workbench.jobs import Status, run_jobs, shared_text
from workbench.results import load_records, write_parquet
from workbench.runs import CORPORA, Run
from workbench.statistics import Interval, over_seeds, paired_seeds

KEYS = (
    "question", "preset", "seeds", "outcome", "baseline", "tuned", "data", "model", "recipe", "grid", "models", "measure",
)  # fmt: skip
SECTIONS = ("options", "model", "recipe", "data")
MODEL_KEYS = ("architecture", "name", "baseline", "vary", *SECTIONS)
DATA_KEYS = {
    "text": ("kind", "texts", "vocabulary", "bos"),
    "repeated": ("kind", "vocabulary", "shortest"),
    "backcopy": ("kind", "vocabulary", "triggers"),
}
MEASURE_KEYS = ("metrics", "steps", "n")
OUTCOMES = {"validation_loss": ("lower", "higher"), "formation_step": ("earlier", "later")}  # below, above the baseline
LEAST_SEEDS = 3
QUICK_SEEDS = 2
QUICK_RECIPE = {
    "steps": 4, "batch": 2, "warmup": 1, "log_every": 2, "validate_every": 2, "validation_sequences": 4, "save_every": 4,
    "checkpoints": 1, "bf16": False,
}  # fmt: skip
QUICK_LENGTH, QUICK_BYTES, QUICK_VOCABULARY = 32, 1_000_000, 512


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One set of settings, trained with every seed. `model` is what it is called, `point` where on the grid it stands."""

    model: str
    baseline: str
    point: Mapping[str, Any] = field(default_factory=dict)
    architecture: str
    settings: Mapping[str, Mapping[str, Any]]  # by section

    @property
    def name(self) -> str:
        """Model and grid point in words."""
        return " ".join([self.model, *(f"{axis}={_label(value)}" for axis, value in self.point.items())])


@dataclass(frozen=True, kw_only=True)
class Study:
    """What a study file says."""

    name: str
    question: str
    preset: str
    seeds: tuple[int, ...]
    outcome: str
    tuned: str | None
    cells: tuple[Cell, ...]
    measure: Mapping[str, Any]

    @property
    def axes(self) -> list[str]:
        """Axes of the grid."""
        return list(self.cells[0].point)


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
        plain = re.sub(r"[^\w.=+-]+", "-", self.cell.name).strip("-")
        return f"{'quick-' if self.quick else ''}{self.study.name}-{plain}-s{self.seed}"


# ---- the file --------------------------------------------------------------------------------------------------------


def read_study(path: str | Path) -> Study:
    """The study of a file; raises `UnknownName` for keys and names, `BadData` for a file that cannot be read."""
    file = Path(path)
    try:
        told = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadData(f"{file}: {error.strerror or error}; give a study's .toml file") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadData(f"{file} is no TOML: {error}") from error
    _known("study", told, KEYS)
    if missing := [key for key in ("question", "baseline", "models") if key not in told]:
        raise BadData(f"{file} lacks {', '.join(missing)}")
    seeds, outcome, preset = (
        told.get("seeds", [0, 1, 2]),
        told.get("outcome", "validation_loss"),
        told.get("preset", "tiny"),
    )
    whole = isinstance(seeds, list) and seeds and all(type(s) is int and s >= 0 for s in seeds)
    if not whole or len(set(seeds)) < len(seeds):
        raise BadData(f"seeds={seeds!r}: give different whole numbers of at least 0")
    if outcome not in OUTCOMES:
        raise UnknownName("outcome", outcome, OUTCOMES)
    if preset not in PRESETS:
        raise UnknownName("preset", preset, PRESETS)
    common = {s: _table(f"{s} of the study", told.get(s, {})) for s in ("model", "recipe", "data")}
    cells = tuple(_cells(told, common, file))
    measure = _table("measure", told.get("measure", {}))
    _known("measure", measure, MEASURE_KEYS)
    study = Study(
        name=file.stem, question=str(told["question"]), preset=preset, seeds=tuple(seeds), outcome=outcome,
        tuned=told.get("tuned"), cells=cells, measure=measure,
    )  # fmt: skip
    _refuse(study)
    return study


def _beside(file: Path, text: str) -> str:
    """A text's path as seen from the study file; names of data sets stay."""
    return text if text.startswith("datasets:") else str((file.parent / text).resolve())


def _merged(layers: Sequence[Mapping[str, Any]], section: str, file: Path) -> dict[str, Any]:
    """A section of all layers, later ones over earlier; data of another kind leaves nothing of the earlier."""
    found: dict[str, Any] = {}
    for layer in layers:
        told = layer.get(section, {})
        found = dict(told) if section == "data" and "kind" in told else found | told
    if section == "data" and "texts" in found:
        found["texts"] = [_beside(file, text) for text in _list("texts", found["texts"])]
    return found


def _cells(told: Mapping[str, Any], common: Mapping[str, Mapping[str, Any]], file: Path) -> Iterator[Cell]:
    grid = _axes("grid", told.get("grid", {}))
    entries = told["models"]
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise BadData("models: give at least one [[models]] table with an architecture")
    for entry in entries:
        _known("model", entry, MODEL_KEYS)
        if "architecture" not in entry:
            raise BadData(f"[[models]] {entry}: lacks its architecture")
        own = {s: _table(f"{s} of {entry['architecture']}", entry.get(s, {})) for s in SECTIONS}
        for chosen in _points(_axes("vary", entry.get("vary", {}))):
            labels = [f"{axis}={_label(value)}" for axis, (value, _) in chosen.items()]
            name = " ".join([entry.get("name", entry["architecture"]), *labels])
            for point in _points(grid):
                layers = [common, own, *(s for _, s in chosen.values()), *(s for _, s in point.values())]
                settings = {s: _merged(layers, s, file) for s in SECTIONS}
                where = {axis: value for axis, (value, _) in point.items()}
                yield Cell(
                    model=name,
                    baseline=entry.get("baseline", told["baseline"]),
                    point=where,
                    architecture=entry["architecture"],
                    settings=settings,
                )


Choice = tuple[Any, Mapping[str, Mapping[str, Any]]]  # a value as it is shown, and the settings it stands for


def _axes(kind: str, told: Any) -> dict[str, list[Choice]]:
    """Axis -> its choices; a section's key is named by the key alone."""
    found: dict[str, list[Choice]] = {}
    for name, values in _table(kind, told).items():
        if name in SECTIONS:
            for key, choices in _table(f"{kind}.{name}", values).items():
                found[key] = [(value, {name: {key: value}}) for value in _list(f"{kind}.{name}.{key}", choices)]
        elif isinstance(values, list) and all(isinstance(value, dict) and "name" in value for value in values):
            for value in values:
                _known(f"{kind}.{name}", value, ("name", *SECTIONS))
            found[name] = [(value["name"], {s: value[s] for s in SECTIONS if s in value}) for value in values]
        else:
            raise UnknownName(f"section of {kind} (an axis of points needs tables with a name)", name, SECTIONS)
    return found


def _points(axes: Mapping[str, list[Choice]]) -> Iterator[dict[str, Choice]]:
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _refuse(study: Study) -> None:
    """Raise for names and keys that would fail in every run; values that cannot be built are left to their cell."""
    from workbench.models import architecture

    models = list(dict.fromkeys(cell.model for cell in study.cells))
    for cell in study.cells:
        if cell.baseline not in models:
            raise UnknownName("baseline", cell.baseline, models)
    if study.tuned is not None and study.tuned not in study.axes:
        raise UnknownName("tuned axis of the grid", study.tuned, study.axes)
    jobs = plan(study, Path())
    if len({job.name for job in jobs}) < len(jobs):
        names = [cell.name for cell in study.cells]
        raise BadData(f"two models are called {next(n for n in names if names.count(n) > 1)!r}; give one a name")
    for cell in study.cells:
        _known(f"option of {cell.architecture}", cell.settings["options"], architecture(cell.architecture).options)
        _known("config key", cell.settings["model"], [f.name for f in dataclasses.fields(ModelConfig)])
        _known("training key", cell.settings["recipe"], [f.name for f in dataclasses.fields(TrainConfig)])
        kind = cell.settings["data"].get("kind", "text")
        if kind not in DATA_KEYS:
            raise UnknownName("kind of data", kind, DATA_KEYS)
        _known(f"key of {kind} data", cell.settings["data"], DATA_KEYS[kind])
        if study.outcome == "formation_step" and kind == "text":
            raise BadData("outcome formation_step needs repeated or backcopy data: text has no copy loss")


def _known(kind: str, told: Mapping[str, Any], choices: Any) -> None:
    for key in told:
        if key not in choices:
            raise UnknownName(kind if " of " in kind or "key" in kind else f"key of {kind}", key, choices)


def _table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadData(f"{name} is {value!r}; give a table")
    return value


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise BadData(f"{name} is {value!r}; give a list of values")
    return value


def _label(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{k}={v}" for k, v in value.items())
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


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
        axes = {axis: _label(value) for axis, value in job.cell.point.items()}
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
            rows.append(_compared(study, chosen, rest, group) | {study.tuned: f"best ({real[study.tuned].iloc[0]})"})
    return pd.DataFrame(rows)


def _best(study: Study, group: pd.DataFrame) -> pd.DataFrame:
    """A model's runs at its best value of the tuned axis; a value at which some seed has no outcome is not the best."""
    means = group.groupby(study.tuned, sort=False)[study.outcome].apply(
        lambda x: math.inf if x.isna().any() else x.mean()
    )
    return group[group[study.tuned] == means.idxmin()]


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
        "verdict": "baseline" if is_baseline else _verdict(study, change, values, failed), "failed": failed,
    }  # fmt: skip


def _verdict(study: Study, change: Interval, values: pd.Series, failed: int) -> str:
    if failed:
        return f"unresolved: {failed} of {len(values)} runs failed"
    if study.outcome == "formation_step" and values.isna().any():
        return f"unresolved: not formed in {int(values.isna().sum())} of {len(values)} runs"
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
