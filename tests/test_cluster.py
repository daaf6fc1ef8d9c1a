"""A dask cluster in the pool's place: workers that die, that are not fit, and that are not there."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import training_runs

from workbench.errors import UnknownName, WorkbenchError
from workbench.jobs import dask_cluster
from workbench.jobs.running import Job, run_jobs
from workbench.measurement.measuring import measure
from workbench.runs.records import read_parquet
from workbench.runs.run import Run
from workbench.studies.study_file import read_study
from workbench.studies.study_runs import run_study

if importlib.util.find_spec("distributed") is None:
    pytest.skip("dask.distributed is not installed", allow_module_level=True)
ASKED = {"workbench": "a1", "torch": "2.13", "Python": "3.11", "threads": 1, "unseen": []}
STUDY = """
question = "Is it earlier?"
seeds = [0, 1]
outcome = "formation_step"
baseline = "transformer"
data = { kind = "repeated", vocabulary = 16 }
model = { n_layers = 2, d_model = 16, n_heads = 2, d_mlp = 8, d_vocab = 16, n_ctx = 32 }
recipe = { steps = 200, batch = 2, T = 16, warmup = 1, validate_every = 200, save_every = 5, validation_sequences = 2 }
[[models]]
architecture = "transformer"
[[models]]
architecture = "resformer"
"""


def ended(*_):
    pytest.fail("no job may begin")


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        (Exception("ModuleNotFoundError: No module named 'workbench'"), "cannot import workbench: install there"),
        (AttributeError("no attribute 'call'"), "has another version of workbench: AttributeError"),
        (ASKED | {"workbench": "b2"}, "has another version of workbench: b2, here a1"),
        (ASKED | {"torch": "2.12"}, "has another version of torch: 2.12, here 2.13"),
        (ASKED | {"unseen": ["/home/me/runs/.shared-1"]}, "does not see /home/me/runs: give a folder that all machines share"),
        (ASKED | {"threads": 4}, "has 4 threads: start it with --nthreads 1"),
    ],
)  # fmt: skip
def test_a_worker_that_would_not_do_the_same_is_named(says, sentence):
    with pytest.raises(WorkbenchError, match=f"the worker tcp://10.0.0.5:1 {sentence}"):
        dask_cluster._refuse("tcp://10.0.0.5:1", says, ASKED)


def test_what_a_job_failed_of_concerns_all_where_it_is_the_worker_that_is_not_fit():
    assert dask_cluster.explained_error("dask://x", None) is None
    error = ValueError("the loss is nan")
    assert dask_cluster.explained_error("dask://x", error) is error
    with pytest.raises(WorkbenchError, match="a worker of dask://x has another version of workbench, or none"):
        dask_cluster.explained_error("dask://x", ModuleNotFoundError("No module named 'workbench'"))


@pytest.mark.slow
def test_an_address_that_is_none_or_does_not_answer_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(dask_cluster, "ANSWERS_S", 0.2)
    with pytest.raises(WorkbenchError, match=r"dask://127\.0\.0\.1:1 does not answer: Timed out"):
        run_jobs([Job("a", abs, (1,))], "dask://127.0.0.1:1", ended)
    with pytest.raises(WorkbenchError, match=r"nowhere\.json is missing"):
        run_jobs([Job("a", abs, (1,))], f"dask://{tmp_path}/nowhere.json", ended)
    for address in ("ray://10.0.0.1", "10.0.0.1:8786"):
        with pytest.raises(UnknownName, match=r"choose from dask://HOST:PORT"):
            run_jobs([Job("a", abs, (1,))], address, ended)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A cluster of two workers on this machine, with a cache of their own."""
    import distributed

    environment = {"WORKBENCH_CACHE": str(tmp_path_factory.mktemp("cache"))}
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", env=environment) as made:
        made.cache = environment["WORKBENCH_CACHE"]
        yield made


def address(made):
    return made.scheduler_address.replace("tcp://", "dask://")


def soon(true, within=200.0):
    end = time.monotonic() + within
    while time.monotonic() < end and not true():
        time.sleep(0.02)
    return true()


def paces(frame):
    """How fast training was, by step: no second try is as fast to the last digit."""
    rows = frame[frame["metric"] == "tokens_per_second"]
    return dict(zip(rows["step"], rows["value"], strict=True))


@pytest.mark.slow
def test_a_study_ends_whole_though_a_worker_is_killed_and_nothing_is_trained_twice(local, tmp_path):
    """The worker of a run that has begun, in the middle of four runs."""
    (tmp_path / "killed.toml").write_text(STUDY)
    study, runs, killed = read_study(tmp_path / "killed.toml"), tmp_path / "runs", []

    def kill():
        begun = "killed-*/telemetry/000010-*.parquet"
        assert soon(lambda: list(runs.glob(begun)))
        run = next(runs.glob(begun)).parents[1]
        os.kill(writer_of(run.name, local), signal.SIGKILL)
        killed.append((run, paces(read_parquet(part for _, part in Run.open(run).telemetry_parts()[:2]))))

    killer = threading.Thread(target=kill)
    killer.start()
    frame = run_study(study, runs, workers=address(local))
    killer.join()
    assert (frame["failed"] == "").all(), frame["failed"].tolist()
    for name in frame["run"]:
        run = Run.open(runs / name)
        assert run.finished
        steps = run.telemetry("metric == 'train_loss'")["step"].tolist()
        assert steps == list(range(200)), "each step is written once"
    ((run, before),) = killed
    after = paces(Run.open(run).telemetry())
    assert len(before) == 2
    assert before.items() <= after.items(), "it went on from where it was: its first steps were taken once"
    assert not list(runs.rglob("*.part"))
    assert not list(runs.glob(".shared-*"))
    kept = {path: path.stat().st_mtime_ns for path in runs.rglob("*.safetensors")}
    run_study(study, runs, workers=address(local))
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*.safetensors")} == kept


def writer_of(run, made):
    """The worker's process that holds a run's lock."""
    import distributed

    with distributed.Client(made) as client:
        for pid, holds in client.run(_holds, run).values():
            if holds:
                return pid
    raise AssertionError(run)


def _holds(run):
    files = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return os.getpid(), any(file.endswith(f"{run}/.lock") for file in files)


@pytest.mark.slow
def test_measuring_many_steps_on_a_cluster_gives_the_same_rows(local, tmp_path):
    import distributed

    run = training_runs.start(tmp_path)
    there = measure(run, ["loss", "row_entropy"], steps="all", n=2, workers=address(local))
    shutil.rmtree(run.path / "records")
    here = measure(run, ["loss", "row_entropy"], steps="all", n=2)
    assert len(here) > len(run.steps)
    assert there.drop(columns="provenance").equals(here.drop(columns="provenance"))
    with distributed.Client(local) as client:
        looks = [*client.run(_looks).values(), *client.run(_looks, nanny=True).values()]
    assert looks == [[500.0, 500.0]] * 2 + [[500.0]] * 2, "two workers and their nannies look at themselves seldom"


def _looks(dask_worker):
    return [
        dask_worker.periodic_callbacks[name].callback_time
        for name in ("profile", "tick")
        if name in dask_worker.periodic_callbacks
    ]


@pytest.mark.slow
def test_runs_kept_elsewhere_are_measured_where_the_cache_is_at_one_place(local, tmp_path, monkeypatch):
    training_runs.start(tmp_path / "disk")
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "mine"))
    with pytest.raises(WorkbenchError, match=r"has its cache elsewhere than .*set WORKBENCH_CACHE to one path"):
        measure(f"file://{tmp_path}/disk/resformer", "loss", n=2, workers=address(local))
    monkeypatch.setenv("WORKBENCH_CACHE", local.cache)
    frame = measure(f"file://{tmp_path}/disk/resformer", "loss", n=2, workers=address(local))
    kept = {path.name for path in (tmp_path / "disk" / "resformer" / "records").iterdir()}
    assert len(frame) > 0
    assert len([name for name in kept if name.endswith(".samples.parquet")]) == 1, "put up by the worker"


WORKER = """
import asyncio, sys
class Without:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "workbench":
            raise ModuleNotFoundError("No module named 'workbench'", name="workbench")
if __name__ == "__main__":
    if sys.argv[2] == "nothing":
        sys.meta_path.insert(0, Without())
    else:
        sys.path.insert(0, sys.argv[2])
    from distributed import Worker
    async def work():
        async with Worker(sys.argv[1], nthreads=1) as worker:
            await worker.finished()
    asyncio.run(work())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has", "sentence"),
    [
        ("nothing", "cannot import workbench: install there"),
        ("other", "has another version of workbench: [0-9a-f]{16}"),
    ],
)
def test_a_worker_without_the_package_or_with_another_version_ends_it_before_anything_is_trained(
    has, sentence, tmp_path
):
    import distributed

    if has == "other":
        shutil.copytree(Path(dask_cluster.__file__).parents[1], tmp_path / "workbench")
        with (tmp_path / "workbench" / "hook_names.py").open("a") as file:
            file.write("# changed\n")
    (tmp_path / "worker.py").write_text(textwrap.dedent(WORKER))
    with distributed.LocalCluster(n_workers=0, dashboard_address=":0") as made, distributed.Client(made) as client:
        command = [
            sys.executable,
            tmp_path / "worker.py",
            made.scheduler_address,
            has if has == "nothing" else tmp_path,
        ]
        worker = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=tmp_path)
        try:
            client.wait_for_workers(1, timeout=60)
            with pytest.raises(WorkbenchError, match=sentence):
                run_jobs([Job("a", abs, (1,))], address(made), ended)
        finally:
            worker.kill()
            worker.communicate()
