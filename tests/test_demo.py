"""The demo end to end in its quick form: real processes, real trainings, a report, nothing done twice."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from workbench.demo import COST, RACE_ARCHITECTURES, TEXT_ARCHITECTURES, jobs
from workbench.runs import Run

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
COMMAND = [sys.executable, "-m", "workbench.cli", "demo", "--quick", "--seeds", "1"]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def ends(ask, within=20.0):
    """Whether asking for a process raises that there is none, soon."""
    begin = time.monotonic()
    while time.monotonic() - begin < within:
        try:
            ask()
        except ProcessLookupError:
            return True
        time.sleep(0.2)
    return False


def test_plan_pairs_every_architecture_with_every_seed_race_first(tmp_path):
    plan = jobs(tmp_path, seeds=3)
    assert len(plan) == 3 * (len(RACE_ARCHITECTURES) + len(TEXT_ARCHITECTURES))
    assert [job.experiment for job in plan] == sorted((job.experiment for job in plan), key=list(COST).index)
    assert [job.seed for job in plan[: len(RACE_ARCHITECTURES)]] == [0] * len(RACE_ARCHITECTURES)


@pytest.mark.slow
def test_quick_demo_trains_measures_reports_and_reuses(tmp_path):
    done = subprocess.run(
        [*COMMAND, "--no-app", "--runs", tmp_path],
        capture_output=True,
        text=True,
        timeout=280,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    status = json.loads((tmp_path / ".demo.json").read_text())
    assert status["finished"]
    assert sorted(status["ready"]) == sorted(status["models"])
    assert (tmp_path / "report.html").stat().st_size > 1_000_000
    weights = Run.open(tmp_path / "text-resformer-s0").step_folder(20) / "model.safetensors"
    written = weights.stat().st_mtime_ns
    begin = time.monotonic()
    again = subprocess.run(
        [*COMMAND, "--no-app", "--runs", tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    for question in ("race_to_induction", "deep_values"):
        command = [sys.executable, "-m", f"analyses.{question}", "--runs", tmp_path, "--out", tmp_path / "results"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, env=ENVIRONMENT, check=False)
        assert said.returncode == 0, said.stderr
        assert (tmp_path / "results" / f"{question}.html").exists()
    assert weights.stat().st_mtime_ns == written
    assert time.monotonic() - begin < 60


@pytest.mark.slow
@pytest.mark.parametrize("everyone", [True, False], ids=["ctrl-c", "terminated"])
def test_stopping_keeps_the_work_and_leaves_nobody_behind(tmp_path, everyone):
    """Ctrl-C reaches the whole foreground group; a TERM only the command, which passes it on."""
    command = [
        sys.executable,
        "-m",
        "workbench.cli",
        "demo",
        "--seeds",
        "1",
        "--runs",
        str(tmp_path),
        "--port",
        str(free_port()),
    ]
    demo = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    begin = time.monotonic()
    while not list(tmp_path.glob("race-*/telemetry/*.parquet")):
        assert time.monotonic() - begin < 90
        time.sleep(0.2)
    if everyone:
        os.killpg(demo.pid, signal.SIGINT)
    else:
        demo.terminate()
    said, _ = demo.communicate(timeout=90)
    assert demo.returncode == 130
    assert "the same command goes on from here" in said
    dashboard = json.loads((tmp_path / ".app.json").read_text())["pid"]
    assert ends(lambda: os.killpg(demo.pid, 0))
    assert ends(lambda: os.kill(dashboard, 0))
    assert list(tmp_path.glob("race-*/resume/state.safetensors"))


@pytest.mark.slow
def test_dashboard_command_serves_loopback_and_is_found_again(tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "workbench.cli", "app", "--runs", str(tmp_path), "--port", str(port)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert f"http://127.0.0.1:{port}" in server.stdout.readline()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=10) as answer:
                assert answer.status == 200
            again = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
            assert again.returncode == 0
            assert "already running" in again.stdout
            other = ENVIRONMENT | {"WORKBENCH_BUILDERS": "mine:build"}
            refused = subprocess.run(command, env=other, capture_output=True, text=True, timeout=60, check=False)
            assert refused.returncode != 0
            assert "shows these runs already, without WORKBENCH_BUILDERS" in refused.stderr
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=20)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=2)
