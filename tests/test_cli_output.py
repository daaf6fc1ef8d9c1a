"""Output that cannot be printed: characters are replaced, and a full disk ends in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(*command, out=subprocess.PIPE, encoding="utf-8"):
    environment = os.environ | {
        "PYTHONIOENCODING": encoding,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    code = "from workbench.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *command],
        stdout=out,
        stderr=subprocess.PIPE,
        timeout=120,
        check=False,
        env=environment,
    )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("command", [["list", "metrics"]])
def test_a_full_disk_is_one_sentence(command):
    with Path("/dev/full").open("wb") as full:
        done = run(*command, out=full)
    assert done.returncode == 2
    assert done.stderr.decode() == "workbench: the output cannot be written: No space left on device\n"


@pytest.mark.slow
def test_characters_that_the_terminal_lacks_are_replaced():
    done = run("generate", "models-resformer-s0", "--prompt", "日本", "-n", "2", "--seed", "1", encoding="cp1252")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"??")
