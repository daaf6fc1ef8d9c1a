"""The demo end to end in its quick form: real processes, real trainings, a report, nothing done twice."""

import json
import os
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
def test_dashboard_command_serves_loopback_and_is_found_again(tmp_path):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "workbench.cli", "app", "--runs", str(tmp_path), "--port", str(port)]
    server = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert f"http://127.0.0.1:{port}" in server.stdout.readline()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=10) as answer:
            assert answer.status == 200
        again = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
        assert again.returncode == 0
        assert "already running" in again.stdout
    finally:
        server.send_signal(2)
        server.wait(timeout=20)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=2)
