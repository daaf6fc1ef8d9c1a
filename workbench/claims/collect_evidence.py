"""Evidence of runs from stored records and telemetry; missing metrics are measured on request."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from workbench.claims.evidence import RUN_COLUMNS, SETTING, TELEMETRY, ByMetric, Evidence, loss_curve
from workbench.claims.registry import Claim
from workbench.config import ModelConfig
from workbench.console import Progress
from workbench.errors import BadCheckpoint, BadData, OnlyHere, WorkbenchError
from workbench.file_io import digest
from workbench.interventions import INTERVENTIONS
from workbench.jobs.running import Job, Workers, run_jobs
from workbench.measurement.measuring import measure
from workbench.metrics import METRICS
from workbench.models import compose
from workbench.places import absent_studies
from workbench.runs.catalogue import DAMAGE, Entry
from workbench.runs.records import SAMPLE_COLUMNS, load_records, one_sample, read_parquet, records
from workbench.runs.records import facts as origin
from workbench.runs.run import SAME_NAME, Run, list_runs
from workbench.runs.table_cache import BATCH, RecordCache, TableCache, TelemetryCache
from workbench.statistics.loss_curves import step_at_loss
from workbench.storage.path_or_url import locate

BASELINE = "transformer"
SERIES = 10  # checkpoints at most that show a course, spread evenly over those there are
EXPENSIVE = {"token_probe": 24}  # documents at most, for what takes half a minute a checkpoint on 64
AT_ONCE = 50  # runs whose losses are compared together
UNKNOWN = ("batch", "lr", "lr_final", "warmup", "weight_decay", "validation_sequences", "precision", "device")
"""Facts of imported checkpoints that nothing states."""
BOOKKEEPING = ("log_every", "validate_every", "save_every", "checkpoints")


def find_runs(paths: Sequence[str | Path]) -> tuple[list[Run], dict[str, str]]:
    """Return the finished runs at paths of runs or folders, and why other runs are left out; raises `BadData` without any."""
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
            absent = str(path) in absent_studies() and "not in this installation; `workbench data` adds it"
            problems[str(path)] = absent or "no such run or folder"
    finished, unusable = usable(dict.fromkeys(runs))
    named = dict[str, Run]()
    for run in finished:
        if named.setdefault(run.name, run) is not run:
            raise BadData(f"{run.path}: {SAME_NAME.format(named[run.name].path)}")
    problems |= unusable
    if not finished:
        why = "; ".join(f"{name}: {reason}" for name, reason in problems.items())
        raise BadData(f"no finished run at {', '.join(map(str, paths))}{f' ({why})' if why else ''}; train some first")
    return finished, problems


def usable(runs: Iterable[Run]) -> tuple[list[Run], dict[str, str]]:
    """Return the runs that claims can be judged on, and why the others cannot be used."""
    finished, problems = list[Run](), dict[str, str]()
    for run in runs:
        try:
            if not (why := why_unusable(run)):
                run.telemetry()
                finished.append(run)
        except WorkbenchError as error:
            why = str(error)
        if why:
            problems[run.name] = why
    return finished, problems


def why_unusable(run: Run) -> str:
    """Return why claims cannot be judged on a run, from its description alone; empty if they can."""
    if run.recorded:
        return "recorded in a loop of its own: it has no settings to compare and no checkpoints"
    if not run.finished:
        return f"not finished ({run.progress} steps); the same training command goes on from there"
    try:
        run_facts(run)
    except WorkbenchError as error:
        return str(error)
    except DAMAGE as error:
        return f"run.json is incomplete: {type(error).__name__} {error}"
    return ""


def has_start_tokens(described: Mapping[str, Any]) -> bool | float:
    """Return True if every sequence of some data begins with a start token, NaN if such tokens stand anywhere, as of documents."""
    if described["kind"] == "backcopy":
        return described.get("bos", "first") is not None  # older runs say nothing of it, and all had one
    return {None: False, "each": True}.get(described.get("bos"), math.nan)


def run_facts(run: Run, data: Any = None) -> dict[str, Any]:
    """Return a run's row of `Evidence.runs`: its settings, and the name of its model with options."""
    if run.logged:  # facts that the user did not give are null, which equals only other unknowns
        log, known = run.info["log"], run.info["log"]["known"]
        row = {
            **known, "run": run.name, "architecture": run.architecture, "model": run.architecture, "seed": run.seed, "options": "{}",
            "data": str(data if data is not None else known.get("data", f"log {log['experiment']}")), "bos": False, "task": "text",
            "tokens": known.get("tokens_per_step", math.nan) * log["last"], "steps": log["last"], "study": "",
        }  # fmt: skip
        return {column: row.get(column, "unknown" if column == "optimiser" else math.nan) for column in RUN_COLUMNS}
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
        "query_group": 1.0 if "query_group" in plain else shape.n_heads / shape.n_key_value_heads,  # an option tells models apart
        "model": run.architecture + (f"[{label}]" if label else ""), "parameters": parameters, "options": json.dumps(plain),
        "data": str(data) if data is not None and kind == "imported" else str(described.get("hash", kind)),
        "bos": has_start_tokens(described),
        "task": "text" if kind in ("text", "tokens", "imported") else kind, "tokens": recipe.batch * recipe.T * recipe.steps,
        "optimiser": json.dumps([recipe.beta1, recipe.beta2, recipe.eps, recipe.clip, recipe.bf16]),
        "study": run.info.get("shipped", {}).get("study", ""), "precision": run.precision, "device": run.device,
    }  # fmt: skip
    if kind == "imported":  # nothing says how checkpoints were trained; its recipe is a placeholder
        row |= dict.fromkeys((*UNKNOWN, "tokens"), math.nan) | {"optimiser": "unknown"}
    return {column: row[column] for column in RUN_COLUMNS}


@cache
def _outline(architecture: str, shape: str, options: str) -> tuple[int, str]:
    """Number of parameters and default options of an architecture."""
    config = ModelConfig(**json.loads(shape))
    with torch.device("meta"):
        built = compose(architecture, config, **json.loads(options))
        defaults = compose(architecture, config).options
    return sum(p.numel() for p in built.parameters()), json.dumps(defaults)


def metrics_needed(run: Run, claims: Iterable[Claim], matched: Sequence[int] = ()) -> dict[int, tuple[str, ...]]:
    """Return the metrics that claims need of a run, by checkpoint; `matched` are the checkpoints around equal losses."""
    kind, have = str(run.info["data"]["kind"]), run.steps
    if not have:
        return {}
    ends, wanted = [have[0], have[-1]], dict[int, dict[str, None]]()
    spread = [have[round(i * (len(have) - 1) / (SERIES - 1))] for i in range(SERIES)]
    choices = {"last": have[-1:], "ends": ends, "matched": [*ends, *matched], "series": [*ends, *matched, *spread]}
    for claim in claims:
        if kind == "repeated" or (claim.models and run.architecture not in claim.models):
            continue
        for step in sorted(set(choices[claim.steps])):
            wanted.setdefault(step, {}).update(dict.fromkeys(claim.metrics))
    return {step: tuple(names) for step, names in sorted(wanted.items()) if names}


def matching_steps(runs: Sequence[Run]) -> dict[Run, list[int]]:
    """Return every run's checkpoints around the loss that it and its baseline both reach.

    The baseline is the Transformer of the same setting and seed. Runs without a loss curve have no such checkpoints.
    """
    matched: dict[Run, list[int]] = {run: [] for run in runs}
    curves = {run: loss_curve(run.telemetry("metric == 'validation_loss' and variant.isnull()")) for run in runs}
    groups: dict[tuple[Any, ...], list[tuple[Run, str]]] = {}
    for run in runs:
        fact = run_facts(run)
        groups.setdefault((*(fact[c] for c in SETTING), fact["seed"]), []).append((run, fact["model"]))
    for members in groups.values():
        for base in (run for run, model in members if model == BASELINE and len(curves[run])):
            for run in (r for r, _ in members if r is not base and len(curves[r])):
                loss = max(float(curves[run].min()), float(curves[base].min()))
                for one in (run, base):
                    step, have = step_at_loss(curves[one], loss), one.steps
                    matched[one] += [s for s in have if s <= step][-1:] + [s for s in have if s >= step][:1]
    return {run: sorted(set(steps)) for run, steps in matched.items()}


Gathered = tuple[pd.DataFrame, pd.DataFrame, list[str]]


def gather(
    run: Run, wanted: dict[int, tuple[str, ...]], data: Any = None, n: int = 64, *, alone: bool = False
) -> Gathered:
    """Return the records and samples of a run at each planned step, and what could not be measured.

    The stored tables of a shipped run are returned unchanged. `alone`: in a new process, with one thread.
    """
    if alone:
        torch.set_num_threads(1)
    if run.shipped:
        frame = one_sample(load_records([run.path]))
        return frame, samples_of(run, frame), []
    frames, problems, unsent = [records([])], list[str](), list[str]()
    measures: dict[str, Any] = {**METRICS, **INTERVENTIONS}
    lengths = {name: measure_.min_length for name, measure_ in measures.items()}

    def measured(names: str | list[str], step: int, most: int) -> pd.DataFrame:
        try:
            return measure(run, names, data, steps=[step], n=min(n, most))
        except OnlyHere as error:
            unsent.append(str(error))
            return error.made

    for step, names in wanted.items():
        T, fit = run.train.T, [name for name in names if lengths[name] <= run.train.T]
        short = [name for name in names if name not in fit]
        reasons = [f"{name} needs sequences of {lengths[name]} tokens, these have {T}" for name in short]
        problems += [reason for reason in reasons if reason not in problems]
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


def samples_of(run: Run, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the loss per document behind a run's records, for pairing documents."""
    keys = set(frame.loc[frame["metric"] == "loss", "provenance"])
    files = sorted((run.path / "records").glob("*.samples.parquet")) if keys else []
    samples = read_parquet(files, SAMPLE_COLUMNS).assign(run=run.name)  # also of a renamed one
    return samples[(samples["metric"] == "loss") & samples["provenance"].isin(keys)]


def collect(
    runs: Sequence[Run], claims: Sequence[Claim], *, data: Any = None, n: int = 64, workers: Workers = 1, progress:
    Progress | None = None,
) -> tuple[Evidence, dict[str, str]]:  # fmt: skip
    """Measure what claims need of every run, and return the evidence, and why runs or metrics were left out.

    An interrupted analysis resumes where it stopped. `workers`: number of processes, or a cluster; see `run_jobs`.
    """
    matched = matching_steps(runs)
    work = gather if workers == 1 else partial(gather, alone=True)
    jobs = [Job(str(run.path), work, (run, metrics_needed(run, claims, matched[run]), data, n)) for run in runs]
    gathered, problems, ended = dict[Run, Gathered](), dict[str, str](), list[str]()

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
                result(job, job())
                done(job, None)
            except Exception as error:  # of damaged files and of one's own modules
                done(job, error)
    else:
        run_jobs(jobs, workers, done, result, folders=list(dict.fromkeys(run.path.parent for run in runs)))
    gathered = {run: gathered[run] for run in runs if run in gathered}  # in their order, not in that of being ready
    problems |= {run.name: "; ".join(reasons) for run, (_, _, reasons) in gathered.items() if reasons}
    return evidence(gathered, data), problems


def evidence(gathered: dict[Run, Gathered], data: Any = None) -> Evidence:
    """Return the evidence of measured runs."""
    table = pd.DataFrame([run_facts(run, data) for run in gathered], columns=list(RUN_COLUMNS))
    label = dict(zip(table["run"], table["model"], strict=True))
    written = [run.telemetry(f"metric in {TELEMETRY}") for run in gathered]
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
    """Return a mark per run that only its copies share: its loss curve, or else the hash of its last weights."""
    last = kept[kept["step"] == kept.groupby("run")["step"].transform("max")].drop_duplicates("run")
    weights = {run: origin(text).get("weights") for run, text in zip(last["run"], last["provenance"], strict=True)}
    marks = {str(run): str(mark) for run, mark in weights.items() if mark is not None}
    losses = written[written["metric"].str.endswith("_loss")].sort_values(["metric", "data", "step"])
    for run, rows in losses.groupby("run"):
        if len(rows) > 1:
            marks[str(run)] = digest(rows["value"].to_numpy(dtype=float).tobytes())
    return marks


def seeds_of(table: pd.DataFrame, marks: dict[str, str]) -> dict[str, int]:
    """Return every run's seed; copies of a run (with its mark) have the seed of the first copy."""
    seeds, first = dict(zip(table["run"], table["seed"], strict=True)), dict[tuple[str, str], int]()
    for run, model in zip(table["run"], table["model"], strict=True):
        if run in marks:
            seeds[run] = first.setdefault((model, marks[run]), seeds[run])
    return seeds


def stored(
    entries: Sequence[Entry], progress: Callable[[int, int], None] | None = None, *,
    record_cache: RecordCache | None = None, telemetry_cache: TelemetryCache | None = None,
) -> tuple[Evidence, dict[str, str]]:  # fmt: skip
    """Return the evidence of runs without measuring, and why some runs have none.

    Rows of a metric are read when a claim asks for them. `progress` is called with (done, total); the caches hold earlier reads.
    """
    kept, written = record_cache or RecordCache(), telemetry_cache or TelemetryCache()
    rows, samples, problems = dict[str, dict[str, object]](), dict[str, pd.DataFrame](), dict[str, str]()
    for begin in range(0, len(entries), BATCH):
        part = entries[begin : begin + BATCH]
        for tables in (kept, written):
            tables.metrics(part)
        for i, entry in enumerate(part, begin + 1):
            if progress:
                progress(i, len(entries))
            run = Run.open(entry.path)
            try:
                each = read_parquet(sorted(run.path.glob("records/*.samples.parquet")), SAMPLE_COLUMNS)
            except BadCheckpoint as error:
                problems[entry.name] = str(error)
                continue
            if why := why_unusable(run):
                problems[entry.name] = why
                continue
            rows[entry.path] = run_facts(run) | {"run": entry.name}
            samples[entry.name] = each[each["metric"] == "loss"].assign(run=entry.name)
    problems |= kept.rows(entries, ())[1] | written.rows(entries, ())[1]
    readable = [e for e in entries if e.path in rows and e.name not in problems]
    table = pd.DataFrame([rows[e.path] for e in readable], columns=list(RUN_COLUMNS))
    full = [samples[e.name] for e in readable if len(samples[e.name])]
    losses = pd.concat(full, ignore_index=True) if full else records([], SAMPLE_COLUMNS)
    marks = dict[str, str]()
    for begin in range(0, len(readable), AT_ONCE):
        part = readable[begin : begin + AT_ONCE]
        curves = written.rows(part, [name for name in TELEMETRY if name.endswith("_loss")])[0]
        known = set(curves["run"].unique())
        marks |= told_apart(curves, kept.rows([e for e in part if e.name not in known])[0])
    label, seed = dict(zip(table["run"], table["model"], strict=True)), seeds_of(table, marks)

    def named(frame: pd.DataFrame) -> pd.DataFrame:
        return frame.assign(architecture=frame["run"].map(label), seed=frame["run"].map(seed).astype("Int64"))

    def of(runs: Collection[str]) -> list[Entry]:
        return [entry for entry in readable if entry.name in runs]

    def measured(runs: Collection[str], metric: str) -> pd.DataFrame:
        return named(one_sample(kept.rows(of(runs), [metric])[0]))

    def logged(runs: Collection[str], metric: str) -> pd.DataFrame:
        return named(written.rows(of(runs), [metric])[0])

    def documents(runs: Collection[str], metric: str) -> pd.DataFrame:
        asked = losses["run"].isin(runs) & losses["provenance"].isin(set(measured(runs, metric)["provenance"]))
        return named(losses[asked])

    def runs_with(cache: TableCache) -> dict[str, set[str]]:
        runs: dict[str, set[str]] = {}
        for entry in readable:
            for metric in cache.metrics([entry]):
                runs.setdefault(metric, set()).add(entry.name)
        return runs

    evidence_of = Evidence(
        table.assign(seed=table["run"].map(seed)),
        ByMetric(measured, runs_with(kept), records([])),
        ByMetric(logged, {m: runs for m, runs in runs_with(written).items() if m in TELEMETRY}, records([])),
        ByMetric(documents, {"loss": set(losses["run"].unique())}, records([], SAMPLE_COLUMNS)),
    )
    return evidence_of, problems
