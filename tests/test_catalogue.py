"""One entry a run, read once and kept in an index that is never trusted further than it reaches."""

from __future__ import annotations

import json
import time

import dashboard
import pytest

from workbench.catalogue import INDEX, catalogue
from workbench.errors import UnknownName
from workbench.runs import Run


@pytest.fixture
def runs(tmp_path):
    dashboard.run(tmp_path, "a", "transformer", 0, "text")
    dashboard.run(tmp_path, "b", "resformer", 1, "text", steps=(0,))
    return tmp_path


def test_an_entry_says_what_the_run_says(runs):
    found = catalogue(runs)
    a, b = found.entries
    assert (a.name, a.architecture, a.seed, a.kind, a.steps, a.last) == ("a", "transformer", 0, "text", (0, 8, 20), 20)
    assert b.steps == (0,)
    assert a.group == b.group
    assert (a.n_layers, a.n_heads, a.n_ctx) == (2, 2, 128)
    assert found.entry("b") is b
    with pytest.raises(UnknownName, match="did you mean"):
        found.entry("bb")


def test_runs_that_differ_in_an_option_are_told_apart(runs):
    for name, value in (("c", 0.3), ("d", 0.7)):
        dashboard.run(runs, name, "resformer", 2, "text", steps=())
        path = runs / name / "run.json"
        info = json.loads(path.read_text())
        path.write_text(json.dumps(info | {"options": {"lambda_v1": value}}))
    series = {e.name: e.series for e in catalogue(runs).entries}
    assert series["c"] == "resformer lambda_v1=0.3"
    assert series["d"] == "resformer lambda_v1=0.7"


def test_only_what_changed_is_read_again(runs, monkeypatch):
    catalogue(runs)
    opened = []
    original = Run.open
    monkeypatch.setattr(Run, "open", classmethod(lambda cls, path: opened.append(path.name) or original(path)))
    assert len(catalogue(runs).entries) == 2
    assert opened == []
    time.sleep(0.01)
    (runs / "b" / "step_000008").mkdir()
    catalogue(runs)
    assert opened == ["b"]


@pytest.mark.parametrize(
    "content", ["", "[]", '{"version": 99}', '{"version": 1, "folder": "x", "entries": [{"name": 3}]}']
)
def test_a_damaged_index_is_made_anew(runs, content):
    whole = catalogue(runs)
    (runs / INDEX).write_text(content)
    assert catalogue(runs) == whole
    assert json.loads((runs / INDEX).read_text())["folder"] == str(runs.resolve())


def test_an_index_cannot_point_outside_the_folder(runs, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    dashboard.run(elsewhere, "secret", "transformer", 0, "text", steps=())
    catalogue(runs)
    kept = json.loads((runs / INDEX).read_text())
    kept["entries"].append(
        json.loads(json.dumps(kept["entries"][0])) | {"name": "secret", "path": str(elsewhere / "secret")}
    )
    (runs / INDEX).write_text(json.dumps(kept))
    assert [e.name for e in catalogue(runs).entries] == ["a", "b"]


def test_a_folder_that_cannot_be_written_is_read_all_the_same(runs, monkeypatch):
    from workbench import catalogue as module
    from workbench.errors import WorkbenchError

    def refuse(path, value):
        raise WorkbenchError("read-only")

    monkeypatch.setattr(module, "write_json", refuse)
    assert len(catalogue(runs).entries) == 2


def test_damaged_runs_are_problems_and_stay_out(runs):
    (runs / "a" / "run.json").write_text("{")
    found = catalogue(runs)
    assert [e.name for e in found.entries] == ["b"]
    assert "run.json" in found.problems["a"]
    assert catalogue(runs / "nowhere").entries == ()
