"""A newcomer adds one of each: how many files that touches, and that commands, measures and verdicts know it at once."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from foreign import EXAMPLE, example_container

from workbench.models import build

ROOT = Path(__file__).parents[1]
RUNS = Path(__file__).parent / "golden" / "run_before"
SHAPE = {"n_layers": 3, "d_model": 32, "n_heads": 4, "d_mlp": 48, "d_vocab": 61, "n_ctx": 32}
COPIED = ("workbench", "app", "analyses", "docs")

ARCHITECTURE, ENTRY, _ = re.findall(
    r"^```python\n(.*?)^```",
    (ROOT / "docs" / "own_architecture.md").read_text(encoding="utf-8"),
    re.MULTILINE | re.DOTALL,
)
"""The file and the entry that the documentation shows."""
METRIC = '''

@metric(unit="norm", range=">= 0", reading="higher: a longer vector somewhere", source="an example", sites=("v",))
def longest_value(vectors: Float[Tensor, "batch pos *width"]) -> Float[Tensor, " batch"]:
    """Largest norm of a value over the positions.

    Caution: grows with the length.
    """
    return wide(vectors.flatten(2)).norm(dim=-1).amax(-1)
'''
CLAIM = '''

@claim(supports="always", refutes="never", scale="any", published="none", source="an example", shows={"metric": "loss"})
def runs_are_there(evidence: Evidence) -> Verdict:
    """There are runs."""
    return Verdict("unresolved", f"{len(evidence.runs)} runs.", pd.DataFrame())
'''
PAGE = '''"""Newcomer: one figure."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from workbench.views.registered_views import Drawing, view
from workbench.views.page_links import Link
from workbench.views.source import Source


@view("newcomer")
def hello(source: Source, link: Link) -> Drawing:
    """A point."""
    return Drawing(go.Figure(go.Scatter(x=[0], y=[0])), pd.DataFrame({"x": [0]}), "One point.")
'''

ON_PAGES = '"depth": PageInfo('

USE = """
import json, sys
import pandas as pd, torch, workbench
from workbench.claims import CLAIMS
sys.path.append("docs")
from generate import PAGES as DOCS
ids = torch.randint(0, 61, (3, 16), generator=torch.Generator().manual_seed(0))
shape = json.loads(sys.argv[2])
plain, scaled = (workbench.build(name, shape, seed=0) for name in ("transformer", "scaled"))
neutral = workbench.build("scaled", shape, **workbench.ARCHITECTURES["scaled"].neutral)
frame = workbench.measure(scaled, ["longest_value"], ids)
opened = workbench.load(sys.argv[1] + "/theirs.pt", architecture="transformer")
from streamlit.testing.v1 import AppTest
page = AppTest.from_string("from app import page_layout\\npage_layout.all_views('newcomer')", default_timeout=60).run()
print(json.dumps({
    "changed": bool((scaled(ids) != plain(ids)).any()), "neutral": bool((neutral(ids) == plain(ids)).all()),
    "measured": sorted(frame["layer"].unique().tolist()), "claim": CLAIMS["runs_are_there"].text,
    "documented": ["scaled" in DOCS["models.md"](), "longest_value" in DOCS["metrics.md"]()],
    "label": workbench.plots.style.label("scaled") if hasattr(workbench, "plots") else "",
    "page": page.title[0].value, "figures": len(page.get("bidi_component")),
    "opened": bool((opened(ids) == plain(ids)).all()), "step": opened.source["step"],
}))
"""


def append(path, text):
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")


def touched(copy):
    """Files of the copy that differ from the repository's, or are new."""
    files = [p.relative_to(copy) for folder in COPIED for p in (copy / folder).rglob("*.py")]
    return {str(p) for p in files if not (ROOT / p).exists() or not filecmp.cmp(copy / p, ROOT / p, shallow=False)}


def run(copy, *arguments):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=copy, capture_output=True, text=True, timeout=560, check=False,
        env=os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WORKBENCH_RUNS": str(copy / "runs")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the product that additions are made to."""
    here = tmp_path_factory.mktemp("copy")
    for folder in COPIED:
        shutil.copytree(ROOT / folder, here / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(RUNS, here / "runs")  # an index is written beside the runs that are looked at
    return here


@pytest.mark.slow
def test_one_of_each_touches_one_or_two_files_and_is_known_everywhere(copy, tmp_path):
    product, before = copy / "workbench", set()
    costs = {}

    def added(kind):
        nonlocal before
        costs[kind], before = len(touched(copy) - before), touched(copy)

    (product / "models" / "architectures" / "scaled.py").write_text(ARCHITECTURE)
    append(product / "models" / "architecture_names_and_colours.py", ENTRY)
    added("architecture")
    append(product / "metrics" / "values.py", METRIC)
    added("metric")
    append(product / "claims" / "depth.py", CLAIM)
    added("claim")
    (product / "checkpoints" / "formats" / "example.py").write_text(EXAMPLE)
    added("format")
    (product / "views" / "newcomer.py").write_text(PAGE)
    pages = product / "views" / "page_links.py"
    pages.write_text(
        pages.read_text().replace(ON_PAGES, '"newcomer": PageInfo("Newcomer", "star", "One figure"),\n    ' + ON_PAGES)
    )
    added("page")
    assert costs == {"architecture": 2, "metric": 1, "claim": 1, "format": 1, "page": 2}
    torch.save(example_container(build("transformer", SHAPE, seed=0)), tmp_path / "theirs.pt")
    known = json.loads(run(copy, "-c", USE, tmp_path, json.dumps(SHAPE)).splitlines()[-1])
    assert known == {
        "changed": True, "neutral": True, "measured": [0, 1, 2], "claim": "There are runs.", "documented": [True, True],
        "label": "Scaled", "opened": True, "step": 7, "page": "Newcomer", "figures": 1,
    }  # fmt: skip
