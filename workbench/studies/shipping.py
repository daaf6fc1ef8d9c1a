"""Shipping of a finished study: its records and telemetry in a few files, or run folders with some steps' weights in bfloat16."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import torch

from workbench.checkpoints.paths import step_folder
from workbench.checkpoints.saving import save
from workbench.checkpoints.tokenizer_files import TOKENIZER
from workbench.claims.collect_evidence import TELEMETRY, collect
from workbench.claims.evidence import ByMetric, Evidence
from workbench.claims.judging import chosen
from workbench.claims.registry import Claim
from workbench.console import Progress
from workbench.errors import WorkbenchError
from workbench.file_io import read_json, write_json, write_table
from workbench.jobs.running import Workers
from workbench.measurement.measuring import measure
from workbench.runs.records import SAMPLE_COLUMNS, load_records, one_sample, read_parquet
from workbench.runs.run import RUN_FILE, STUDY, Run, written_now
from workbench.storage.packed import RUNS, TABLES, pack, unpacked
from workbench.studies.study_file import Study
from workbench.studies.study_runs import plan, sizes

WRITTEN = (*TELEMETRY, "chain_loss")
COARSE = 10  # steps between rows of the training losses, once there are more than this many of them:
MANY = 500


def ship(
    study: Study, file: Path, runs: Path, out: Path, *, questions: Sequence[str] | None = None, commit: str | None = None,
    weights: Sequence[int] = (), workers: Workers = 1, progress: Progress | None = None,
) -> Path:  # fmt: skip
    """Measure what claims need of a study's finished runs, write `out/<study>`, and return it.

    Only metrics of the `questions` ship (default all), since others may be measured on some runs only. Values have seven digits; losses and
    coefficients ship from the telemetry. `weights` are the steps whose weights ship too. Raises `WorkbenchError` for a run that is not
    finished, has another recipe than the study or lacks such a step, and for a metric that some of the runs that need it lack.
    """
    asked, runs = chosen(questions), unpacked(runs)
    recipes = {runs / run.name: sizes(run)[1] for run in plan(study, runs)}
    planned = [*recipes]
    if absent := [path.name for path in planned if not (path / RUN_FILE).exists() or not Run.open(path).finished]:
        few = f"{len(absent)} of {len(planned)} runs"
        raise WorkbenchError(f"{few} of {study.name} are not finished, first {absent[0]}")
    metrics = {name for claim in asked for name in claim.metrics} | set(study.measure.get("metrics") or ())
    place, opened = out / study.name, [Run.open(path) for path in planned]
    if again := next((run for run in opened if run.shipped), None):
        raise WorkbenchError(f"{again.path} ships already; give the folder in which the study was trained (--runs)")
    if other := next((run.name for run in opened if run.train != recipes[run.path]), None):
        raise WorkbenchError(
            f"{other} was trained with another recipe than {file.name} has; ship the file of the training"
        )
    with tempfile.TemporaryDirectory() as parts:
        kept = [_in_few_bytes(run, Path(parts) / run.name, weights) for run in opened] if weights else opened
        if weights and (asked_for := study.measure.get("metrics")):
            measure(kept, asked_for, steps="all", n=study.measure.get("n", 64))
        found, problems = collect(kept, asked, workers=workers, progress=progress)
        held = ByMetric.of_rows(load_records([run.path for run in kept]))
        _refuse_parts(study, replace(found, runs=found.runs.assign(study=study.name), kept=held), asked)
        shipped = {run.name: _shipped(run, study.name, metrics) for run in kept}
        for file_before in [place / RUNS, *(place / f"{kind}.parquet" for kind in TABLES)]:
            file_before.unlink(missing_ok=True)
        for run_before in place.glob(f"*/{RUN_FILE}"):
            shutil.rmtree(run_before.parent)
        for run in kept if weights else ():
            info, of_run = shipped[run.name]
            write_json(place / run.name / RUN_FILE, info)
            for step in run.steps:
                shutil.copytree(run.step_folder(step), step_folder(place / run.name, step))
            if (tokenizer := run.path / TOKENIZER).exists():
                shutil.copyfile(tokenizer, place / run.name / TOKENIZER)
            for kind, frame in of_run.items():
                if len(frame):
                    table_file = place / run.name / TABLES[kind].format(0, run.train.steps)
                    write_table(_small(frame), table_file, compression="zstd", compression_level=19)
        if not weights:
            full = {kind: [_small(t[kind]) for _, t in shipped.values() if len(t[kind])] for kind in TABLES}
            one = partial(pa.concat_tables, promote_options="permissive")
            tables = {kind: one(parts) if parts else pa.table({}) for kind, parts in full.items()}
            pack(place, {name: info for name, (info, _) in shipped.items()}, tables)
    shutil.copyfile(file, place / f"{study.name}.toml")
    if commit is None and (git := shutil.which("git")):
        asked_git = [git, "rev-parse", "--short", "HEAD"]
        answer = subprocess.run(asked_git, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
        commit = answer.stdout.strip() or None
    minutes, devices = 0.0, sorted({run.device for run in opened})
    for run in opened:  # from the logged pace
        pace = run.telemetry("metric == 'tokens_per_second'").sort_values("step")
        steps = pace["step"].astype(float)
        tokens = steps.diff().fillna(steps + 1) * run.train.batch * run.train.T
        minutes += float((tokens / pace["value"]).sum() / 60)
    write_json(place / STUDY, {
        "study": study.name, "commit": commit,
        "command": f"workbench study {'analyses/studies/' * (file.parent.name == 'studies')}{file.name}",
        "runs": len(opened), "training_minutes": round(minutes, 1),
        "machine": ", ".join(devices) if set(devices) - {"cpu", "unknown"} else "CPU, one thread a run",
        "not measured": problems, **written_now(),
    })  # fmt: skip
    return place


def _refuse_parts(study: Study, found: Evidence, asked: Sequence[Claim]) -> None:
    """Raise `WorkbenchError` if a metric of a claim or of the study is measured on some runs only."""
    parts = [found.measured_on_all(claim.metrics, claim.models)[1] for claim in asked]
    with_metric = {metric: found.kept.runs_with.get(metric, ()) for metric in study.measure.get("metrics") or ()}
    models = found.runs.set_index("run")["model"]
    unmeasured = set(models) - {models[run] for runs in with_metric.values() for run in runs}
    for metric, runs in with_metric.items():  # some models have no rows of some metric
        here = unmeasured | {models[run] for run in runs}
        parts.append(found.of_models(here).measured_on_all([metric])[1])
    if told := next(filter(None, parts), None):
        cure = "Measure the other runs, or ship other questions (--question)"
        raise WorkbenchError(f"{study.name} does not ship.{told} {cure}")


def _in_few_bytes(run: Run, place: Path, steps: Sequence[int]) -> Run:
    """Copy a run with some steps in bfloat16, to be measured as it ships."""
    for step in run.resolve(list(steps)):
        save(run.load(step).to(torch.bfloat16), step_folder(place, step), seed=run.seed, step=step, run=run.name)
    for name in (RUN_FILE, TOKENIZER, "telemetry"):
        if (part := run.path / name).exists():
            (shutil.copytree if part.is_dir() else shutil.copyfile)(part, place / name)
    return Run.open(place)


Shipped = tuple[dict[str, Any], dict[str, pd.DataFrame]]
"""What ships of a run: the contents of `run.json`, and its tables by kind."""


def _shipped(run: Run, study: str, metrics: Collection[str]) -> Shipped:
    """Description and tables of a run: losses per document at both ends, of long trainings at most 800 training losses
    and 80 values of each trained coefficient.

    The speed ships as its median over the run, at the last step that has one: it is logged at any step, and readers take the median.
    """
    info, steps, frame = read_json(run.path / RUN_FILE), run.steps, one_sample(load_records([run.path]))
    frame = frame[frame["metric"].isin(metrics)]
    samples = read_parquet(sorted((run.path / "records").glob("*.samples.parquet")), SAMPLE_COLUMNS)
    ends = samples[(samples["metric"] == "loss") & samples["step"].isin([steps[0], steps[-1]])]
    written = run.telemetry(f"metric in {WRITTEN}")
    every = COARSE * max(run.train.steps // 4_000, 1) if run.train.steps > MANY else 1
    pace = written["metric"] == "tokens_per_second"
    written = written.assign(value=written["value"].mask(pace, written.loc[pace, "value"].median()))
    fine = written["metric"].isin(["copy_loss", "validation_loss"]) | written["variant"].notna()
    ends_too = written["metric"].isin(["tokens_per_second", "coefficient"])
    last = ends_too & (written["step"] == written.groupby("metric")["step"].transform("max"))
    spacing = written["metric"].map({"coefficient": COARSE * every if every > COARSE else 1}).fillna(every)
    kept = last | (~pace & (fine | (written["step"] % spacing == 0)))
    tables = {
        "records": frame, "samples": ends[ends["provenance"].isin(set(frame["provenance"]))],
        "telemetry": written[kept],
    }  # fmt: skip
    return info | {"shipped": {"study": study, "steps": steps}}, tables


def _small(frame: pd.DataFrame) -> pa.Table:
    """Arrow table sorted by metric and step, without empty columns, with values of seven digits."""
    rows = frame.dropna(axis="columns", how="all").sort_values(["metric", "step"], kind="stable")
    types: dict[str, Any] = {str(c): "Int32" for c in rows if str(rows[c].dtype) == "Int64"}
    types |= {c: "float32" for c in ("value", "se") if c in rows}
    return pa.Table.from_pandas(rows.astype(types), preserve_index=False).replace_schema_metadata(None)
