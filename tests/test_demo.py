"""The demo end to end in its quick form: real processes, real trainings, a report, nothing done twice."""

import itertools
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

from workbench.studies.demo import EXPERIMENTS, jobs

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
PATIENCE = 400.0
"""Seconds after which something hangs; on a busy machine everything here takes several times as long as on an idle one."""
pytestmark = pytest.mark.timeout(4 * PATIENCE)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def ends(ask, within=PATIENCE / 4):
    """Whether asking for a process raises that there is none, in the end."""
    begin = time.monotonic()
    while time.monotonic() - begin < within:
        try:
            ask()
        except ProcessLookupError:
            return True
        time.sleep(0.2)
    return False


def test_plan_pairs_every_architecture_with_every_seed_and_trains_on_text_where_asked(tmp_path):
    short, full, text = (jobs(tmp_path, seeds=3, **more) for more in ({}, {"full": True}, {"text": True}))
    sizes = {name: len(architectures) for name, architectures in EXPERIMENTS.items()}
    assert [job.name for job in short[:4]] == [
        "sinks-transformer-s0",
        "sinks-svformer-s0",
        "sinks-gated_attention-s0",
        "sinks_without_start-transformer-s0",
    ], "all lines of the first figure, its control's too"
    assert len(short) == 3 * 3 + 1
    assert all(job.name.startswith("sinks") for job in short)
    assert len(text) == 3 * sum(sizes.values()) - 2, "the control without a start token needs one seed"
    assert len(text) - len(full) == 3 * sizes["text"] - 3, "else one seed of three models to look into"
    figures = [job.name.partition("-")[0].partition("_")[0] for job in text]
    assert list(dict.fromkeys(figures)) == ["sinks", "race", "text"] == [f for f, _ in itertools.groupby(figures)]


@pytest.mark.slow
@pytest.mark.parametrize("everyone", [True, False], ids=["ctrl-c", "terminated"])
def test_stopping_keeps_the_work_and_leaves_nobody_behind(tmp_path, everyone):
    """Ctrl-C reaches the whole foreground group; a TERM only the command, which passes it on."""
    command = [
        sys.executable,
        "-m",
        "workbench",
        "demo",
        "--seeds",
        "1",
        "--runs",
        str(tmp_path),
        "--port",
        str(free_port()),
    ]
    demo = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    begin = time.monotonic()
    while not list(tmp_path.glob("sinks-*/telemetry/*.parquet")):
        assert time.monotonic() - begin < PATIENCE
        time.sleep(0.2)
    if everyone:
        os.killpg(demo.pid, signal.SIGINT)
    else:
        demo.terminate()
    _, said = demo.communicate(timeout=PATIENCE)
    assert demo.returncode == 130
    assert "the same command goes on from here" in said
    dashboard = json.loads((tmp_path / ".app.json").read_text())["pid"]
    assert ends(lambda: os.killpg(demo.pid, 0))
    assert ends(lambda: os.kill(dashboard, 0))
    assert list(tmp_path.glob("sinks-*/resume/state.safetensors"))


@pytest.mark.slow
def test_dashboard_command_serves_loopback_and_is_found_again(tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "workbench", "app", "--runs", str(tmp_path), "--port", str(port)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert f"http://127.0.0.1:{port}" in server.stdout.readline()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=60) as answer:
                assert answer.status == 200
            again = subprocess.run(
                command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE, check=False
            )
            assert again.returncode == 0
            assert "already running" in again.stdout
            other = ENVIRONMENT | {"WORKBENCH_BUILDERS": "mine:build"}
            refused = subprocess.run(command, env=other, capture_output=True, text=True, timeout=PATIENCE, check=False)
            assert refused.returncode != 0
            assert "shows these runs already, without WORKBENCH_BUILDERS" in refused.stderr
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=PATIENCE)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=2)
