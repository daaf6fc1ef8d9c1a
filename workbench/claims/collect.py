"""Runs -> what their claims need is measured, or read from what is stored -> evidence.

What was measured before is not run again, so an interrupted analysis goes on where it stopped. A run that cannot be used
is left out with its reason, and the rest goes on.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from workbench.claims.by_metric import ByMetric
from workbench.claims.evidence import RUN_COLUMNS, SETTING, TELEMETRY, Evidence
from workbench.claims.registry import Claim
from workbench.config import ModelConfig
from workbench.console import Progress
from workbench.errors import BadData, OnlyHere, WorkbenchError
from workbench.files import digest
from workbench.interventions import INTERVENTIONS
from workbench.jobs.running import Job, Workers, run_jobs
from workbench.measurement.measuring import measure
from workbench.metrics import METRICS
from workbench.models import compose
from workbench.runs.catalogue import DAMAGE
from workbench.runs.records import SAMPLE_COLUMNS, load_records, one_sample, read_parquet, records
from workbench.runs.records import facts as origin
from workbench.runs.run import Run, list_runs
from workbench.statistics.loss_curves import step_at_loss
from workbench.storage.locations import locate

BASELINE = "transformer"
SERIES = 10  # checkpoints at most that show a course, spread evenly over those there are
EXPENSIVE = {"token_probe": 24}  # documents at most, for what takes half a minute a checkpoint on 64
BOOKKEEPING = ("log_every", "validate_every", "validation_sequences", "save_every", "checkpoints")


def find_runs(paths: Sequence[str | Path]) -> tuple[list[Run], dict[str, str]]:
    """The finished runs meant by paths of runs or of folders of runs, and why others are left out.

    Raises `BadData` where there is none.
    """
    runs: list[Run] = []
    problems: dict[str, str] = {}
    for location in map(locate, paths):
        path = location.path
        if location.is_run:
            try:
                runs.append(Run.open(location))
            except WorkbenchError as error:
                problems[path.name] = str(error)
        elif path.is_dir():
            more, bad = list_runs(path)
            runs, problems = runs + more, problems | bad
        else:
            problems[str(path)] = "no such run or folder"
    finished, unusable = usable(dict.fromkeys(runs))
    problems |= unusable
    if not finished:
        why = "; ".join(f"{name}: {reason}" for name, reason in problems.items())
        raise BadData(f"no finished run at {', '.join(map(str, paths))}{f' ({why})' if why else ''}; train some first")
    return finished, problems


def usable(runs: Iterable[Run]) -> tuple[list[Run], dict[str, str]]:
    """The runs that claims can be judged on, and why others cannot be."""
    finished, problems = list[Run](), dict[str, str]()
    for run in runs:
        if why := why_unusable(run):
            problems[run.name] = why
            continue
        try:
            run.telemetry()
            finished.append(run)
        except WorkbenchError as error:
            problems[run.name] = str(error)
    return finished, problems


def why_unusable(run: Run) -> str:
    """Why claims cannot be judged on a run, from its description alone; nothing where they can."""
    if run.recorded:
        return "recorded in a loop of its own: it has no settings to compare and no checkpoints"
    if not run.finished:
        return f"not finished ({run.progress} steps); the same training command goes on from there"
    try:
        facts(run)
    except WorkbenchError as error:
        return str(error)
    except DAMAGE as error:
        return f"run.json is incomplete: {type(error).__name__} {error}"
    return ""


def facts(run: Run, data: Any = None) -> dict[str, Any]:
    """One row of the evidence's `runs`: what must be equal for a comparison, and the model's name with its options."""
    shape, recipe, described, chosen = run.model, run.train, run.info["data"], run.options
    if run.observed:
        parameters, defaults = run.info["observed"]["parameters"], json.dumps(chosen)
    else:
        parameters, defaults = _outline(run.architecture, json.dumps(dataclasses.asdict(shape)), json.dumps(chosen))
    plain = json.loads(json.dumps(chosen))
    differ = {key: value for key, value in plain.items() if value != json.loads(defaults).get(key)}
    differ |= {key: value for key, value in dataclasses.asdict(recipe).items() if key == "lr_factors" and value}
    label = ",".join(f"{key}={json.dumps(value)}" for key, value in sorted(differ.items())).replace('"', "")
    kind = str(described["kind"])
    row = {
        **dataclasses.asdict(shape), **{k: v for k, v in dataclasses.asdict(recipe).items() if k not in BOOKKEEPING},
        "run": run.name, "architecture": run.architecture, "seed": run.seed,
        "model": run.architecture + (f"[{label}]" if label else ""), "parameters": parameters, "options": json.dumps(plain),
        "data": str(data) if data is not None else str(described.get("hash", kind)), "bos": bool(described.get("bos")),
        "task": "text" if kind in ("text", "tokens", "imported") else kind, "tokens": recipe.batch * recipe.T * recipe.steps,
        "optimiser": json.dumps([recipe.beta1, recipe.beta2, recipe.eps, recipe.clip, recipe.bf16]),
        "study": run.info.get("shipped", {}).get("study", ""),
    }  # fmt: skip
    return {column: row[column] for column in RUN_COLUMNS}


@cache
def _outline(architecture: str, shape: str, options: str) -> tuple[int, str]:
    """(parameters, options by default) of an architecture, from its outline without weights."""
    config = ModelConfig(**json.loads(shape))
    with torch.device("meta"):
        built = compose(architecture, config, **json.loads(options))
        defaults = compose(architecture, config).options
    return sum(p.numel() for p in built.parameters()), json.dumps(defaults)


def plan(run: Run, claims: Iterable[Claim], matched: Sequence[int] = ()) -> dict[int, tuple[str, ...]]:
    """Which metrics the claims need of a run at which of its checkpoints; `matched` are those around equal losses."""
    kind = str(run.info["data"]["kind"])
    wanted: dict[int, dict[str, None]] = {}
    for claim in claims:
        if kind == "repeated" or (claim.models and run.architecture not in claim.models):
            continue
        for step in _steps(run.steps, claim.steps, matched):
            wanted.setdefault(step, {}).update(dict.fromkeys(claim.metrics))
    return {step: tuple(names) for step, names in sorted(wanted.items()) if names}


def _steps(have: Sequence[int], which: str, matched: Sequence[int]) -> list[int]:
    if not have:
        return []
    ends = [have[0], have[-1]]
    spread = [have[round(i * (len(have) - 1) / (SERIES - 1))] for i in range(SERIES)]
    choices = {"last": have[-1:], "ends": ends, "matched": [*ends, *matched], "series": [*ends, *matched, *spread]}
    return sorted(set(choices[which]))


def matching_steps(runs: Sequence[Run]) -> dict[Run, list[int]]:
    """Checkpoints of each run around the step at which it had a loss that ends its baseline, or one that it is the baseline of.

    Runs are compared with the vanilla model of the same setting and seed; those without written losses have none.
    """
    matched: dict[Run, list[int]] = {run: [] for run in runs}
    curves = {run: _curve(run) for run in runs}
    groups: dict[tuple[Any, ...], list[tuple[Run, str]]] = {}
    for run in runs:
        fact = facts(run)
        groups.setdefault((*(fact[c] for c in SETTING), fact["seed"]), []).append((run, fact["model"]))
    for members in groups.values():
        for base in (run for run, model in members if model == BASELINE and len(curves[run])):
            for run in (r for r, _ in members if r is not base and len(curves[r])):
                loss = max(float(curves[run].min()), float(curves[base].min()))
                for one in (run, base):
                    step, have = step_at_loss(curves[one], loss), one.steps
                    matched[one] += [s for s in have if s <= step][-1:] + [s for s in have if s >= step][:1]
    return {run: sorted(set(steps)) for run, steps in matched.items()}


def _curve(run: Run) -> pd.Series:
    rows = run.telemetry("metric == 'validation_loss' and variant.isnull()")
    curve = rows.groupby("step")["value"].mean().sort_index()
    return curve.set_axis(curve.index.astype(int)).astype(float)


Gathered = tuple[pd.DataFrame, pd.DataFrame, list[str]]


def gather(run: Run, wanted: dict[int, tuple[str, ...]], data: Any = None, n: int = 64) -> Gathered:
    """Records and samples of a run at each planned step, and what could not be measured in words.

    A run that is shipped has those that came with it.
    """
    if run.shipped:
        return _kept(run)
    frames, problems, unsent = [records([])], list[str](), list[str]()

    def measured(names: str | list[str], step: int, most: int) -> pd.DataFrame:
        try:
            return measure(run, names, data, steps=[step], n=min(n, most))
        except OnlyHere as error:
            unsent.append(str(error))
            return error.made

    for step, names in wanted.items():
        fit, short = _fitting(names, run.train.T)
        problems += [s for s in short if s not in problems]
        for most in sorted({EXPENSIVE.get(name, n) for name in fit}):
            together = [name for name in fit if EXPENSIVE.get(name, n) == most]
            try:
                frames.append(measured(together, step, most))
            except WorkbenchError:
                failed: dict[str, list[str]] = {}
                for name in together:  # one of them does not work here: which?
                    try:
                        frames.append(measured(name, step, most))
                    except WorkbenchError as error:
                        failed.setdefault(str(error), []).append(name)
                problems += [f"{', '.join(names)} at step {step}: {error}" for error, names in failed.items()]
    frame = pd.concat(frames, ignore_index=True)
    return frame, samples_of(run, frame), problems + unsent[:1]


def _kept(run: Run) -> Gathered:
    """What a run holds already."""
    frame = one_sample(load_records([run.path]))
    return frame, samples_of(run, frame), []


def _fitting(names: Sequence[str], T: int) -> tuple[list[str], list[str]]:
    measures: dict[str, Any] = {**METRICS, **INTERVENTIONS}
    fit = [name for name in names if measures[name].min_length <= T]
    long = (name for name in names if name not in fit)
    return fit, [f"{name} needs sequences of {measures[name].min_length} tokens, these have {T}" for name in long]


def samples_of(run: Run, frame: pd.DataFrame) -> pd.DataFrame:
    """One value per document behind a run's records, of the loss: what pairs documents. Raises `BadCheckpoint` as `read_parquet` does."""
    keys = set(frame.loc[frame["metric"] == "loss", "provenance"])
    files = sorted((run.path / "records").glob("*.samples.parquet")) if keys else []
    samples = read_parquet(files, SAMPLE_COLUMNS)
    return samples[(samples["metric"] == "loss") & samples["provenance"].isin(keys)]


def _work(run: Run, wanted: dict[int, tuple[str, ...]], data: Any, n: int) -> Gathered:
    torch.set_num_threads(1)
    return gather(run, wanted, data, n)


def collect(
    runs: Sequence[Run],
    claims: Sequence[Claim],
    *,
    data: Any = None,
    n: int = 64,
    workers: Workers = 1,
    progress: Progress | None = None,
) -> tuple[Evidence, dict[str, str]]:
    """Measure what the claims need of every run, where `workers` says (see `run_jobs`), and return the evidence and problems.

    A run that cannot be measured, or whose process is killed, is a problem; the others go on.
    """
    matched = matching_steps(runs)
    jobs = [Job(str(run.path), _work, (run, plan(run, claims, matched[run]), data, n)) for run in runs]
    gathered: dict[Run, Gathered] = {}
    problems: dict[str, str] = {}
    ended = list[str]()

    def result(job: Job, measured: Gathered) -> None:
        gathered[job.arguments[0]] = measured

    def done(job: Job, error: BaseException | None) -> None:
        name = job.arguments[0].name
        if error is not None:
            problems[name] = str(error) if isinstance(error, WorkbenchError) else f"{type(error).__name__}: {error}"
        ended.append(name)
        if progress:
            progress(len(ended), len(jobs), f"last {name}")

    if workers == 1:
        for job in jobs:
            try:
                result(job, gather(*job.arguments))
                done(job, None)
            except Exception as error:  # of damaged files and of one's own modules
                done(job, error)
    else:
        run_jobs(jobs, workers, done, result, folders=list(dict.fromkeys(run.path.parent for run in runs)))
    gathered = {run: gathered[run] for run in runs if run in gathered}  # in their order, not in that of being ready
    problems |= {run.name: "; ".join(reasons) for run, (_, _, reasons) in gathered.items() if reasons}
    return evidence(gathered, data), problems


def evidence(gathered: dict[Run, Gathered], data: Any = None) -> Evidence:
    """The tables of runs and their records; the architecture of every row is the run's model with its options."""
    table = pd.DataFrame([facts(run, data) for run in gathered], columns=list(RUN_COLUMNS))
    label = dict(zip(table["run"], table["model"], strict=True))
    written = [
        run.telemetry(f"metric in {TELEMETRY}").assign(run=run.name) for run in gathered
    ]  # a copy tells its first name
    parts = [f for f, _, _ in gathered.values()], written, [s for _, s, _ in gathered.values()]
    frames = [pd.concat(full, ignore_index=True) if (full := [f for f in p if len(f)]) else records([]) for p in parts]
    seed = seeds_of(table, told_apart(frames[1], frames[0]))
    kept, telemetry, samples = (
        f.assign(architecture=f["run"].map(label), seed=f["run"].map(seed).astype("Int64")) if len(f) else f
        for f in frames
    )
    table = table.assign(seed=table["run"].map(seed))
    return Evidence(table, ByMetric.of_rows(kept), ByMetric.of_rows(telemetry), ByMetric.of_rows(samples))


def told_apart(written: pd.DataFrame, kept: pd.DataFrame) -> dict[str, str]:
    """What a run has in common with its copies alone: losses to the last digit, or where none were written its last weights."""
    last = kept[kept["step"] == kept.groupby("run")["step"].transform("max")].drop_duplicates("run")
    weights = {run: origin(text).get("weights") for run, text in zip(last["run"], last["provenance"], strict=True)}
    marks = {str(run): str(mark) for run, mark in weights.items() if mark is not None}
    losses = written[written["metric"].str.endswith("_loss")].sort_values(["metric", "data", "step"])
    for run, rows in losses.groupby("run"):
        if len(rows) > 1:
            marks[str(run)] = digest(rows["value"].to_numpy(dtype=float).tobytes())
    return marks


def seeds_of(table: pd.DataFrame, marks: dict[str, str]) -> dict[str, int]:
    """The seed of each run; a copy of a run, told by its mark, has that of the first of them."""
    seeds, first = dict(zip(table["run"], table["seed"], strict=True)), dict[tuple[str, str], int]()
    for run, model in zip(table["run"], table["model"], strict=True):
        if run in marks:
            seeds[run] = first.setdefault((model, marks[run]), seeds[run])
    return seeds
