"""The notebooks are plain calls that run from top to bottom, and are kept without what they printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "analyses" / "notebooks").glob("*.ipynb"))
NAMED = {"first_look", "following_one_value", "intervening", "your_own_model_and_metric"}


def code(notebook):
    """The source of its code cells, in order."""
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_every_notebook_is_there():
    assert {notebook.stem for notebook in NOTEBOOKS} == NAMED


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_that_was_printed_is_kept(notebook):
    told = json.loads(notebook.read_text())
    assert told["nbformat"] == 4
    ids = [cell["id"] for cell in told["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in told["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    assert told["cells"][0]["cell_type"] == "markdown"


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs_in_order(notebook, tmp_path):
    """As one script in a fresh process, so that no Jupyter is needed."""
    assert code(notebook)
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join(code(notebook)) + '\n\nprint("to the end")\n')
    done = subprocess.run(
        [sys.executable, "cells.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("to the end\n")
