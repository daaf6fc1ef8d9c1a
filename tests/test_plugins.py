"""Packages add metrics and architectures by entry points: commands, registries and models know them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MODULES = {
    "metrics": '''from jaxtyping import Float
from torch import Tensor

from workbench.metrics.base import metric


@metric(unit="share", range="0..1", reading="higher: larger", source="a test", sites=("stream",))
def planted_share(vectors: Float[Tensor, "batch pos *width"]) -> Float[Tensor, " batch"]:
    """A share that a package adds."""
    return vectors.flatten(1).float().mean(1)
''',
    "architectures": '''from workbench.models.architecture_names_and_colours import ARCHITECTURES, Architecture

ARCHITECTURES["planted"] = Architecture(
    label="Planted", colour="#123456", symbol="star", summary="later values times a constant", plain="a test",
    classes=("planted.scaled.ValuesScaled",), neutral={"value_factor": 1.0},
)
''',
    "scaled": "from workbench.models.architectures.values_scaled import ValuesScaled\n",
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """A Python of its own that sees an installed package `planted`."""
    (tmp_path / "planted").mkdir()
    for name, text in ({"__init__": ""} | MODULES).items():
        (tmp_path / "planted" / f"{name}.py").write_text(text)
    info = tmp_path / "planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    points = "".join(f"[workbench.{kind}]\nplanted = planted.{kind}\n" for kind in ("metrics", "architectures"))
    (info / "entry_points.txt").write_text(points)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    def run(*command):
        return subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=False, env=environment, timeout=120
        )

    return run


@pytest.mark.slow
def test_a_packages_metric_and_architecture_are_known_everywhere(run):
    code = (
        "import typer.testing, workbench.cli\n"
        "print(typer.testing.CliRunner().invoke(workbench.cli.app, ['list', 'metrics']).output)\n"
        "import planted.metrics, torch, workbench\n"
        "model = workbench.build('planted', dict(n_layers=2, d_model=16, n_heads=2, d_mlp=24, d_vocab=32, n_ctx=16), seed=0)\n"
        "ids = torch.arange(24).reshape(2, 12)\n"
        "print(workbench.measure(model, 'planted_share', ids)['metric'].unique().tolist(), workbench.ARCHITECTURES['planted'].options)\n"
    )
    used = run("-c", code)
    assert "planted_share\tper_sequence\tshare" in used.stdout, used.stderr
    assert "['planted_share'] {'value_factor': 0.5}" in used.stdout, used.stderr


def test_a_package_that_fails_is_named(run, tmp_path):
    (tmp_path / "planted" / "architectures.py").write_text("raise RuntimeError('broken here')\n")
    done = run("-c", "import workbench; workbench.ARCHITECTURES")
    assert (
        "ImportError: planted: its entry point workbench.architectures, planted.architectures, fails: broken here"
        in done.stderr
    )
