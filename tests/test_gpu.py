"""The one command that waits for a GPU: rehearsed on a CPU, to its end, and on from there."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.py"
pytestmark = pytest.mark.slow


def test_the_rehearsal_leaves_every_table_and_goes_on_where_it_was(tmp_path, monkeypatch):
    """In this process; its tests and its studies are processes of their own."""
    spec = importlib.util.spec_from_file_location("gpu", SCRIPT)
    spec.loader.exec_module(gpu := importlib.util.module_from_spec(spec))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--rehearse", "--out", str(tmp_path), "--minutes", "4"])
    assert gpu.main() == 0
    timed, steps = pd.read_parquet(tmp_path / "kernels.parquet"), pd.read_parquet(tmp_path / "training.parquet")
    assert (timed.loc[timed["form"] == "statistics", "error"] < 0.05).all()
    assert steps["architecture"].tolist() == ["transformer", "resformer"]
    assert (steps[["tokens_per_second", "share_of_matmul"]] > 0).all(axis=None)
    losses = pd.read_parquet(tmp_path / "losses.parquet")
    assert losses["run"].nunique() == 8, "two models at two rates on one seed, then at the better rate on two others"
    assert losses["step"].max() == 4
    summary = (tmp_path / "summary.md").read_text()
    assert "attention statistics over one fused forward, T 64, float32" in summary
    assert "studies: rehearsal_rates done, rehearsal done; 8 runs are begun." in summary
    kept = {path: path.stat().st_mtime_ns for path in [tmp_path / "kernels.parquet", *tmp_path.glob("runs/*/step_*/*")]}
    assert gpu.main() == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "nothing is done twice"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_device_it_says_so_and_ends_with_2(tmp_path):
    command = [sys.executable, SCRIPT, "--out", str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 2
    assert done.stderr == "no CUDA device here; --rehearse goes the same way on a CPU\n"
    assert not (tmp_path / "results").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_everything_says_on_a_pretended_device_what_it_says_on_the_cpu():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "tests/test_devices.py",
    ]
    environment = os.environ | {"WORKBENCH_PRETENDED_DEVICE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parents[1], env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout
