"""The notebooks are plain calls that run from top to bottom, and are kept with what they show."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "analyses" / "notebooks").glob("*.ipynb"))
EXECUTOR = Path(__file__).parents[1] / "docs" / "notebooks.py"
NAMED = {"first_look", "following_one_value", "intervening", "paper_figure", "your_own_model_and_metric"}


def test_every_notebook_is_there():
    assert {notebook.stem for notebook in NOTEBOOKS} == NAMED


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_it_shows_is_kept_small_and_tells_nothing_of_a_machine(notebook):
    text = notebook.read_text()
    told = json.loads(text)
    assert told["nbformat"] == 4
    assert len(text) < 200_000
    assert not re.search(r"/(tmp|home|root|work|Users)/", text)
    ids = [cell["id"] for cell in told["cells"]]
    assert len(set(ids)) == len(ids)
    code = [cell for cell in told["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert sum(bool(cell["outputs"]) for cell in code) >= 2
    for kept in (data for cell in code for output in cell["outputs"] for data in output.get("data", {}).items()):
        assert "".join(kept[1]).strip(), f"{kept[0]} is empty"
    assert told["cells"][0]["cell_type"] == "markdown"


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs_in_order_and_shows_what_is_kept(notebook, tmp_path):
    """In a fresh process, without Jupyter; numbers may differ in their digits from machine to machine, words may not."""
    done = subprocess.run(
        [sys.executable, EXECUTOR, "--check", notebook.stem], cwd=tmp_path, capture_output=True, text=True, timeout=560,
        check=False, env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    kept = [[words(output) for output in cell["outputs"]] for cell in cells]
    assert [[words(output) for output in outputs] for outputs in json.loads(done.stdout)] == kept, (
        "run docs/notebooks.py"
    )


def words(output):
    """Of what a cell shows its kinds, and its text without numbers."""
    text = "".join(output.get("text") or output["data"]["text/plain"])
    return sorted(output.get("data", {})), re.sub(r"[-\d.e+]+|\s+", "", text)
