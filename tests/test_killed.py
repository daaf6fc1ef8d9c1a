"""What really killed processes leave behind: whole files, nothing measured twice, nothing lost."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from analyses.common import QUICK_MODEL, quick_runs
from workbench.config import TrainConfig
from workbench.console import Task, time_left
from workbench.data.data_sources import RepeatedData
from workbench.jobs import worker_processes
from workbench.jobs.running import Job, run_jobs
from workbench.runs.run import Run
from workbench.training.loop import train

SERIES = TrainConfig(
    steps=24, batch=4, T=64, warmup=1, validate_every=24, save_every=2, log_every=8, validation_sequences=4
)


def started(*command):
    """A command in a process group of its own, as a terminal starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "workbench", *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def kept(runs):
    """Files of records, and when each was written."""
    files = [p for run in runs for p in (run / "records").glob("*.parquet") if "samples" not in p.name]
    return {path: path.stat().st_mtime_ns for path in files}


def killed(process, runs, how, least):
    """Send a signal to the whole group once so many files of records stand; what the process said last."""
    end = time.monotonic() + 200
    while len(kept(runs)) < least and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()
    os.killpg(process.pid, how)
    return process.communicate(timeout=100)


def test_time_left_does_not_count_what_was_there_already():
    """Two steps that really ran took 3 s on average; the hundredths of a second of the others say nothing of the rest."""
    assert time_left([0.01, 2.0, 0.02, 4.0], 5) == 15.0
    assert time_left([30.0, 1.0, 1.5], 4) == 5.0, "the first piece loads the libraries and the model"
    assert time_left([1.0, 50.0, *[2.0] * 8], 4) == 8.0
    assert time_left([2.0], 0) is None
    assert time_left([], 3) is None


def test_an_estimate_that_has_passed_or_that_nobody_has_is_not_shown(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("workbench.console.time.monotonic", lambda: now[0])
    task = Task("study", 20)
    task(15, left=math.inf)
    now[0] = 60.0
    assert task.line() == "study: 15 of 20, 60 s so far", "15 runs that had ended before say nothing of the rest"
    task(16, left=90.0)
    now[0] = 100.0
    assert task.line() == "study: 16 of 20, about 50 s left"
    now[0] = 160.0
    assert task.line() == "study: 16 of 20, 160 s so far"


def test_what_jobs_return_is_heard(forkserver, monkeypatch):
    monkeypatch.setattr(worker_processes, "default_processes", lambda: 1)
    heard, ended = {}, []
    jobs = [Job(name, len, (name,)) for name in ("a", "bb")]
    run_jobs(jobs, None, lambda job, error: ended.append((job.name, error)), heard.__setitem__)
    assert heard == {jobs[0]: 1, jobs[1]: 2}
    assert sorted(ended) == [("a", None), ("bb", None)], "in any order, as both may have ended"


@pytest.mark.slow
def test_a_killed_series_goes_on_where_it_was(tmp_path):
    """First by Ctrl-C, then without a word."""
    run = train(
        "resformer", RepeatedData(64), name="r", runs=tmp_path, model=QUICK_MODEL.replace(d_vocab=64), train=SERIES, device="cpu"
    )  # fmt: skip
    metrics = ["layer_similarity", "sublayer_removal"]
    command = [
        "measure",
        run.path,
        "-m",
        metrics[0],
        "-m",
        metrics[1],
        "--steps",
        "all",
        "--documents",
        "128",
        "--json",
    ]
    before = {}
    for how in (signal.SIGINT, signal.SIGKILL):
        process = started(*command)
        _, errors = killed(process, [run.path], how, len(before) + 1)
        assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
        assert "Traceback" not in errors
        assert ("stopped; the same command goes on from here" in errors) == (how == signal.SIGINT)
        assert list((run.path / "records").glob("*.part")) == [] or how == signal.SIGKILL
        after = kept([run.path])
        assert len(before) < len(after) < len(run.steps)
        assert {path: after[path] for path in before} == before, "nothing is measured twice"
        before = after
    again = started(*command)
    told, errors = again.communicate(timeout=560)
    assert again.returncode == 0, errors
    after = kept([run.path])
    assert {path: after[path] for path in before} == before, "nothing is measured twice"
    steps = pd.DataFrame(json.loads(told)).groupby("metric")["step"].nunique().to_dict()
    assert steps == dict.fromkeys(metrics, len(run.steps))


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_ends_an_analysis_with_one_sentence_and_it_goes_on(tmp_path):
    runs = quick_runs(tmp_path / "runs", ("transformer", "resformer", "svformer"))
    command = ["analyze", *runs, "--question", "smoothing", "--out", tmp_path / "out", "--documents", "16"]
    process = started(*command, "--workers", "2")
    said, errors = killed(process, runs, signal.SIGINT, 1)
    assert process.returncode == 130
    assert errors.strip().splitlines()[-1] == "workbench: stopped; the same command goes on from here"
    assert "Traceback" not in errors
    assert not said
    before = kept(runs)
    again = started(*command, "--workers", "1")
    told, errors = again.communicate(timeout=560)
    assert again.returncode == 0, errors
    assert "neutreno_smooths_less: not checkable" in told
    assert set(before) <= set(kept(runs))
    assert (tmp_path / "out" / "claims.html").exists()


TRAINING = """
import sys
from pathlib import Path
import training_runs
from workbench.jobs.running import Job, run_jobs
if __name__ == "__main__":
    recipe = training_runs.RECIPE.replace(steps=20_000, save_every=5)
    jobs = [Job(name, training_runs.trained_as, (Path(sys.argv[1]), name, recipe)) for name in ("a", "b", "c")]
    run_jobs(jobs, 2, lambda job, error: None)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds child processes in Linux's /proc")
def test_workers_end_with_a_parent_that_is_killed_alone_and_nobody_waits_for_them(tmp_path):
    """The third job never begins, and both runs can be written as soon as the parent is gone."""
    (tmp_path / "trains.py").write_text(TRAINING)
    tests = {"PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
    parent = subprocess.Popen([sys.executable, tmp_path / "trains.py", tmp_path / "runs"], env=os.environ | tests)
    states = [tmp_path / "runs" / name / "resume" / "state.safetensors" for name in ("a", "b")]
    try:
        assert soon(lambda: all(state.exists() for state in states), 200)
        threads = Path(f"/proc/{parent.pid}/task").glob("*/children")
        children = [Path("/proc", pid) for thread in threads for pid in thread.read_text().split()]
        workers = [child for child in children if b"spawn_main" in (child / "cmdline").read_bytes()]
        assert len(workers) == 2
    finally:
        parent.kill()  # not its group
        parent.wait()
    for name in ("a", "b"):
        Run.open(tmp_path / "runs" / name).writing().release()
    assert soon(lambda: not any(worker.exists() for worker in workers), 5)
    assert not (tmp_path / "runs" / "c").exists()


STARTING = """
import signal, sys, time
from pathlib import Path
from workbench import cli
from workbench.jobs.running import Job, run_jobs
if __name__ == "__mp_main__":  # a worker imports this before it can install its own handler
    (Path(sys.argv[1]) / "starting").touch()
    try:
        time.sleep(1)
    except KeyboardInterrupt:
        pass  # as in a destructor or a careless import
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, cli.terminated)
    run_jobs([Job(name, time.sleep, (1000,)) for name in "ab"], 1, lambda job, error: None)
"""


@pytest.mark.slow
def test_a_worker_that_is_just_starting_hears_sigterm(tmp_path):
    (tmp_path / "starts.py").write_text(STARTING)
    parent = subprocess.Popen([sys.executable, tmp_path / "starts.py", tmp_path], stderr=subprocess.PIPE, text=True)
    try:
        assert soon((tmp_path / "starting").exists, 100)
        parent.send_signal(signal.SIGTERM)
        _, errors = parent.communicate(timeout=100)
    finally:
        parent.kill()
    assert errors.splitlines()[-1].startswith("KeyboardInterrupt")


def soon(true, within):
    end = time.monotonic() + within
    while time.monotonic() < end and not true():
        time.sleep(0.05)
    return true()
