"""Runs -> what their claims need is measured -> evidence -> verdicts, tables, figures and one page.

    workbench analyze runs --out results

What was measured before is not run again, so an interrupted analysis goes on where it stopped. A run that cannot be used
is left out with its reason, and the rest goes on.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import torch

from workbench import plots
from workbench.claims import CLAIMS, QUESTIONS, RUN_COLUMNS, Claim, Evidence, Verdict
from workbench.claims.base import SETTING
from workbench.claims.concentration import against_loss
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.files import write_text
from workbench.interventions import INTERVENTIONS
from workbench.jobs import run_jobs, time_left
from workbench.measuring import measure
from workbench.metrics import METRICS
from workbench.models import compose
from workbench.results import SAMPLE_COLUMNS, load_records, one_sample, read_parquet, records, write_parquet
from workbench.runs import Run, list_runs
from workbench.statistics import step_at_loss

TOLD = ("validation_loss", "train_loss", "copy_loss", "coefficient", "tokens_per_second")  # of what training wrote down
BASELINE = "transformer"
SERIES = 10  # checkpoints at most that show a course, spread evenly over those there are
DEAR = {"token_probe": 24}  # documents at most, for what takes half a minute a checkpoint on 64
BOOKKEEPING = ("log_every", "validate_every", "validation_sequences", "save_every", "checkpoints")
Told = Callable[[int, int, str], None]
"""Called with (done, all, the run that is ready and about how long the others take)."""


@dataclass(frozen=True)
class Judged:
    """A claim, its verdict, and where there is one the figure that shows it with the rows behind it."""

    claim: Claim
    verdict: Verdict
    figure: go.Figure | None = None
    shown: pd.DataFrame = field(default_factory=pd.DataFrame)


@dataclass(frozen=True)
class Analysis:
    """Verdicts of all claims asked, the evidence behind them, and what was left out and why."""

    judged: tuple[Judged, ...]
    evidence: Evidence
    problems: dict[str, str]


def find_runs(paths: Sequence[str | Path]) -> tuple[list[Run], dict[str, str]]:
    """The finished runs meant by paths of runs or of folders of runs, and why others are left out.

    Raises `BadData` where there is none.
    """
    found: list[Run] = []
    problems: dict[str, str] = {}
    for path in map(Path, paths):
        if (path / "run.json").exists():
            found.append(Run.open(path))
        elif path.is_dir():
            more, bad = list_runs(path)
            found, problems = found + more, problems | bad
        else:
            problems[str(path)] = "no such run or folder"
    usable = []
    for run in dict.fromkeys(found):
        if run.recorded:
            problems[run.name] = "recorded in a loop of its own: it has no settings to compare and no checkpoints"
        elif not run.finished:
            problems[run.name] = f"not finished ({run.progress} steps); the same training command goes on from there"
        else:
            usable.append(run)
    if not usable:
        why = "; ".join(f"{name}: {reason}" for name, reason in problems.items())
        raise BadData(f"no finished run at {', '.join(map(str, paths))}{f' ({why})' if why else ''}; train some first")
    return usable, problems


# ---- what a run is ---------------------------------------------------------------------------------------------------


def facts(run: Run, data: Any = None) -> dict[str, Any]:
    """One row of the evidence's `runs`: what must be equal for a comparison, and the model's name with its options."""
    shape, recipe, described = run.model, run.train, run.info["data"]
    chosen = run.info.get("options", {})
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
    }  # fmt: skip
    return {column: row[column] for column in RUN_COLUMNS}


_outlines: dict[tuple[str, str, str], tuple[int, str]] = {}


def _outline(architecture: str, shape: str, options: str) -> tuple[int, str]:
    """(parameters, options by default) of an architecture, from its outline without weights."""
    from workbench.config import ModelConfig

    key = (architecture, shape, options)
    if key not in _outlines:
        config = ModelConfig(**json.loads(shape))
        with torch.device("meta"):
            built = compose(architecture, config, **json.loads(options))
            defaults = compose(architecture, config).options
        _outlines[key] = (sum(p.numel() for p in built.parameters()), json.dumps(defaults))
    return _outlines[key]


# ---- measuring -------------------------------------------------------------------------------------------------------


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
    found: dict[Run, list[int]] = {run: [] for run in runs}
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
                    found[one] += [
                        max((s for s in have if s <= step), default=0),
                        min((s for s in have if s >= step), default=0),
                    ]
    return {run: sorted(set(steps)) for run, steps in found.items()}


def _curve(run: Run) -> pd.Series:
    told = run.telemetry("metric = 'validation_loss' and variant is null")
    curve = told.groupby("step")["value"].mean().sort_index()
    return curve.set_axis(curve.index.astype(int)).astype(float)


Gathered = tuple[pd.DataFrame, pd.DataFrame, list[str]]


def gather(run: Run, wanted: dict[int, tuple[str, ...]], *, data: Any = None, n: int = 64) -> Gathered:
    """Records and samples of a run at each planned step, and what could not be measured in words."""
    frames, problems = [records([])], list[str]()
    for step, names in wanted.items():
        fit, short = _fitting(names, run.train.T)
        problems += [s for s in short if s not in problems]
        for most in sorted({DEAR.get(name, n) for name in fit}):
            together = [name for name in fit if DEAR.get(name, n) == most]
            try:
                frames.append(measure(run, together, data, steps=[step], n=min(n, most)))
            except WorkbenchError:
                failed: dict[str, list[str]] = {}
                for name in together:  # one of them does not work here: which?
                    try:
                        frames.append(measure(run, name, data, steps=[step], n=min(n, most)))
                    except WorkbenchError as error:
                        failed.setdefault(str(error), []).append(name)
                problems += [f"{', '.join(names)} at step {step}: {error}" for error, names in failed.items()]
    frame = pd.concat(frames, ignore_index=True)
    return frame, _samples(run, frame), problems


def _fitting(names: Sequence[str], T: int) -> tuple[list[str], list[str]]:
    measures: dict[str, Any] = {**METRICS, **INTERVENTIONS}
    fit = [name for name in names if measures[name].min_length <= T]
    short = [
        f"{name} needs sequences of {measures[name].min_length} tokens, these have {T}"
        for name in names
        if name not in fit
    ]
    return fit, short


def _samples(run: Run, frame: pd.DataFrame) -> pd.DataFrame:
    """One value per document behind these records, of the loss: what pairs documents."""
    keys = set(frame.loc[frame["metric"] == "loss", "provenance"])
    files = sorted((run.path / "records").glob("*.samples.parquet")) if keys else []
    found = read_parquet(files, SAMPLE_COLUMNS, where="metric = 'loss'")
    return found[found["provenance"].isin(keys)]


@dataclass(frozen=True)
class _Job:
    """What is to be measured of one run."""

    run: Run
    wanted: dict[int, tuple[str, ...]]
    data: Any
    n: int


def _work(job: _Job) -> Gathered:
    torch.set_num_threads(1)
    return gather(job.run, job.wanted, data=job.data, n=job.n)


def collect(
    runs: Sequence[Run],
    claims: Sequence[Claim],
    *,
    data: Any = None,
    n: int = 64,
    workers: int = 1,
    told: Told | None = None,
) -> tuple[Evidence, dict[str, str]]:
    """Measure what the claims need of every run, in processes of one thread each, and return the evidence and problems.

    A run that cannot be measured, or whose process is killed, is a problem; the others go on.
    """
    matched = matching_steps(runs)
    jobs = [_Job(run, plan(run, claims, matched[run]), data, n) for run in runs]
    gathered: dict[Run, Gathered] = {}
    problems: dict[str, str] = {}
    begin, took = time.perf_counter(), list[float]()

    def found(job: _Job, what: Gathered) -> None:
        gathered[job.run] = what

    def done(job: _Job, error: BaseException | None) -> None:
        if error is not None:
            told_by_us = isinstance(error, WorkbenchError)
            problems[job.run.name] = str(error) if told_by_us else f"{type(error).__name__}: {error}"
        took.append(time.perf_counter() - begin - sum(took))
        if told:
            told(len(took), len(jobs), f"{job.run.name}{time_left(took, len(jobs) - len(took))}")

    if workers <= 1:
        for job in jobs:
            try:
                found(job, gather(job.run, job.wanted, data=data, n=n))
                done(job, None)
            except WorkbenchError as error:
                done(job, error)
    else:
        run_jobs(_work, jobs, workers, done, found)
    gathered = {run: gathered[run] for run in runs if run in gathered}  # in their order, whoever was ready first
    problems |= {run.name: "; ".join(said) for run, (_, _, said) in gathered.items() if said}
    return evidence(gathered, data), problems


def evidence(gathered: dict[Run, Gathered], data: Any = None) -> Evidence:
    """The tables of runs and their records; the architecture of every row is the run's model with its options."""
    table = pd.DataFrame([facts(run, data) for run in gathered], columns=list(RUN_COLUMNS))
    label = dict(zip(table["run"], table["model"], strict=True))
    where = f"metric in {TOLD}"
    written = [run.telemetry(where) for run in gathered]
    frames = [
        _joined([f for f, _, _ in gathered.values()]),
        _joined(written),
        _joined([s for _, s, _ in gathered.values()]),
    ]
    kept, told, samples = (f.assign(architecture=f["run"].map(label)) if len(f) else f for f in frames)
    return Evidence(table, kept, told, samples)


def stored(runs: Sequence[Run], told: Callable[[int, int], None] | None = None) -> Evidence:
    """The evidence that runs hold already, nothing being measured; `told` is called with (done, all)."""
    gathered: dict[Run, Gathered] = {}
    for run in runs:
        frame = one_sample(load_records([run.path]))
        gathered[run] = frame, _samples(run, frame), []
        if told:
            told(len(gathered), len(runs))
    return evidence(gathered)


def _joined(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    full = [frame for frame in frames if len(frame)]
    return pd.concat(full, ignore_index=True) if full else records([])


# ---- verdicts and figures --------------------------------------------------------------------------------------------


def chosen(questions: Sequence[str] | None = None, claims: Sequence[str] | None = None) -> list[Claim]:
    """Claims of these questions and of these names (all unless given), question by question; raises `UnknownName`."""
    for kind, given, known in (("question", questions, QUESTIONS), ("claim", claims, CLAIMS)):
        if wrong := next((name for name in given or () if name not in known), None):
            raise UnknownName(kind, wrong, known)
    everything = not questions and not claims
    found = [c for c in CLAIMS.values() if everything or c.question in (questions or ()) or c.name in (claims or ())]
    return sorted(found, key=lambda c: list(QUESTIONS).index(c.question))


def judge(evidence: Evidence, claims: Sequence[Claim]) -> tuple[Judged, ...]:
    """The verdict and the figure of every claim."""
    found = [(claim, claim.judge(evidence)) for claim in claims]
    return tuple(Judged(claim, verdict, *figure(claim, verdict, evidence)) for claim, verdict in found)


def figure(claim: Claim, verdict: Verdict, evidence: Evidence) -> tuple[go.Figure | None, pd.DataFrame]:
    """The numbers a claim is about, of the runs its verdict compared, and their rows; None where there are none."""
    shows, nothing = dict(claim.shows), (None, pd.DataFrame())
    metric = shows.pop("metric", None)
    if metric is None:
        return nothing
    if metric == "against_loss":
        rows = against_loss(evidence, verdict.runs)
        return (plots.against_loss(rows), rows) if len(rows) else nothing
    part = evidence.of(evidence.runs[evidence.runs["run"].isin(verdict.runs)])
    table = part.telemetry if metric in TOLD else part.records
    rows = table[table["metric"] == metric]
    shows.setdefault("variant", None)
    for axis, value in shows.items():
        if value is not Ellipsis:
            rows = rows[rows[axis].isna() if value is None else rows[axis] == value]
    if metric not in TOLD:
        rows = rows[rows["step"].isin([0]) | (rows["step"] == rows.groupby("run")["step"].transform("max"))]
    try:
        return _drawn(str(metric), rows), rows
    except WorkbenchError:  # nothing was measured, or nothing that fits one figure: the verdict says so itself
        return nothing


def _drawn(metric: str, rows: pd.DataFrame) -> go.Figure:
    if metric == "copy_loss":
        return plots.race(rows)
    if metric == "tokens_per_second":
        return plots.pace(rows)
    if metric == "coefficient":
        return plots.coefficients(rows[rows["architecture"] == rows["architecture"].iloc[0]] if len(rows) else rows)
    if metric == "train_loss":
        return plots.plot(rows, smooth=min(100, max(1, int(rows["step"].max() or 0) // 10)) if len(rows) else 1)
    return plots.plot(rows)


# ---- files -----------------------------------------------------------------------------------------------------------


def analyse(
    paths: Sequence[str | Path],
    *,
    questions: Sequence[str] | None = None,
    claims: Sequence[str] | None = None,
    data: Any = None,
    n: int = 64,
    workers: int = 1,
    told: Told | None = None,
) -> Analysis:
    """Verdicts of the claims for the runs at some paths (runs, or folders of them).

    Args:
        paths: runs or folders of runs. questions, claims: which claims, all unless given.
        data: a text file for runs without data of their own (imported ones); n: documents.
        workers: processes. told: called with (done, all, run) after each run.

    Raises `BadData` where there is no finished run, `UnknownName` for another question or claim.
    """
    asked = chosen(questions, claims)
    runs, problems = find_runs(paths)
    found, more = collect(runs, asked, data=data, n=n, workers=workers, told=told)
    return Analysis(judge(found, asked), found, problems | more)


def verdicts(analysis: Analysis) -> pd.DataFrame:
    """One row per claim: question, claim, status with its scope, sentence, what is published."""
    rows = [
        {"question": j.claim.question, "claim": j.claim.name, "status": j.verdict.status, "scope": j.verdict.scope,
         "sentence": j.verdict.sentence, "runs": len(j.verdict.runs), "setting": j.verdict.setting,
         "text": j.claim.text, "published": j.claim.published, "source": j.claim.source}
        for j in analysis.judged
    ]  # fmt: skip
    return pd.DataFrame(rows)


def write_tables(analysis: Analysis, out: Path) -> list[Path]:
    """`verdicts`, the measured `records`, and the deciding table of every claim, each as CSV and Parquet."""
    written = [*_both(verdicts(analysis), out / "verdicts"), *_both(analysis.evidence.records, out / "records")]
    for j in analysis.judged:
        if len(j.verdict.table):
            written += _both(j.verdict.table, out / "tables" / j.claim.name)
    return written


def _both(frame: pd.DataFrame, path: Path) -> list[Path]:
    readable = frame.drop(columns="provenance", errors="ignore")  # nine tenths of the bytes; Parquet keeps it
    write_text(path.with_suffix(".csv"), readable.to_csv(index=False))
    write_parquet(frame, path.with_suffix(".parquet"))
    return [path.with_suffix(".csv"), path.with_suffix(".parquet")]


WIDTH = 1200  # pixels of a drawn figure


def write_figures(analysis: Analysis, out: Path, *, png: bool = False, svg: bool = False) -> list[Path]:
    """Every figure as an offline HTML page with its rows as a table beside it; where wanted, also drawn by a browser.

    Raises `WorkbenchError` where pictures are wanted and no browser is found; the pages are written before that.
    """
    from workbench.browser import figure

    written = []
    drawn = [(j.claim.name, j.figure, j.shown) for j in analysis.judged if j.figure is not None]
    for name, shown, rows in drawn:
        page = out / "figures" / f"{name}.html"
        write_text(page, plots.html(shown, whole=True))
        written += [page, *_both(rows, page.with_suffix(""))]
    for name, shown, _ in drawn:
        for kind in [".png"] * png + [".svg"] * svg:
            path = out / "figures" / f"{name}{kind}"
            written.append(figure(plots.paper(shown), path, width=WIDTH, height=int(shown.layout.height or 500)))
    return written
