"""The checks see: names that nothing defines are reported wherever code is, whatever else annotations say."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUFF = shutil.which("ruff", path=sysconfig.get_path("scripts"))
FOLDERS = sorted({p.parent.relative_to(ROOT) for folder in ("workbench", "app", "analyses", "tests", "docs", "benchmarks")
                  for p in (ROOT / folder).rglob("*.py") if "golden" not in p.parts})  # fmt: skip
FAULTY = '''"""A file as somebody may write one."""

import torch


def scaled(x: torch.Tensor) -> torch.Tensor:
    """Twice."""
    return x * no_such_factor


def annotated(x: "NoSuchType") -> None:
    """Nothing."""
'''


def ruff(source, name):
    command = [RUFF, "check", "--no-cache", "--output-format=concise", "--stdin-filename", ROOT / name, "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, cwd=ROOT, check=False).stdout


@pytest.mark.slow
@pytest.mark.skipif(RUFF is None, reason="ruff is not installed")
def test_names_that_nothing_defines_are_reported_in_every_folder():
    for folder in FOLDERS:
        said = ruff(FAULTY, folder / "written.py")
        assert said.count("F821") == 2, f"{folder}: {said}"


@pytest.mark.slow
def test_the_type_checker_reports_names_that_nothing_defines(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed")
    faulty = tmp_path / "faulty.py"
    faulty.write_text("def scaled(x: int) -> int:\n    return x * no_such_factor\n")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        ROOT / "pyproject.toml",
        "--cache-dir",
        tmp_path / "cache",
    ]
    done = subprocess.run([*command, faulty], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1, done.stderr
    assert "[name-defined]" in done.stdout
