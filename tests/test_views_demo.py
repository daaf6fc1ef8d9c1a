"""What the demo's story draws: how far it is, where attention rests, the race to copying, what deep values carry."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from types import SimpleNamespace

import dashboard
import numpy as np
import pytest

from workbench.errors import UnknownName, WorkbenchError
from workbench.file_io import write_json
from workbench.runs.records import load_records
from workbench.runs.run import Run
from workbench.studies.demo import SINK_METRICS, Watch, train_and_measure
from workbench.views import Link, Source, drawings, start


@pytest.fixture(scope="module")
def ask(populated):
    return dashboard.kept(populated)


def link(show, **options):
    return Link("start", {"show": show} | {k: str(v) for k, v in options.items()})


def status(folder, **told):
    told = {"finished": False, "ready": ["a"], "models": ["a", "b"], "left_s": 7, "failed": {}} | told
    write_json(folder / ".demo.json", told)
    return start.demo_status(folder)


def test_a_demo_says_how_far_it_is_and_when_it_has_gone_quiet(tmp_path):
    assert start.demo_status(tmp_path) is None
    found = status(tmp_path)
    assert (found.running, found.ready, found.planned, found.left_s) == (True, 1, 2, 7.0)
    assert not status(tmp_path, finished=True).running
    status(tmp_path)
    os.utime(tmp_path / ".demo.json", (1, 1))
    assert not start.demo_status(tmp_path).running
    (tmp_path / ".demo.json").write_text(json.dumps([1, 2]))
    assert start.demo_status(tmp_path) is None


@pytest.fixture(scope="module")
def resting(tmp_path_factory):
    """Two models of the demo's first experiment, trained and measured in its quick form by its own function."""
    folder = tmp_path_factory.mktemp("resting")
    for experiment in ("sinks", "sinks_without_start"):
        train_and_measure(experiment, "transformer", 0, folder, True, None)
    return Source(folder)


@pytest.mark.slow
def test_the_story_draws_where_attention_rests_while_its_models_train(resting):
    drawn = start.forming(resting, link("demo"))
    measured = drawn.table[drawn.table["control"].isna()]
    assert list(dict.fromkeys(measured["metric"])) == ["sink_mass", "value_drain", "importance_entropy"]
    assert set(measured["architecture"]) == {"transformer", "transformer · without start token"}
    assert set(measured["step"]) == {0, 50, 60}, "each checkpoint, not the last alone"
    of_one_head = measured.groupby(["metric", "run", "step"]).size()
    assert (of_one_head == 1).all()
    heads = start.resting_heads(resting, link("demo", when=50))
    assert set(heads.table["run"]) == {"sinks-transformer-s0"}
    assert heads.table["key"].max() == 31, "one sequence of the task itself"
    with pytest.raises(WorkbenchError, match=r"choose from \[0, 50, 60\]"):
        start.resting_heads(resting, link("demo", when=7))


@pytest.mark.slow
def test_a_training_is_measured_at_each_checkpoint_as_soon_as_it_is_there(resting, tmp_path):
    path = dashboard.copied(resting.folder / "sinks-transformer-s0", tmp_path / "sinks-transformer-s0")
    shutil.rmtree(path / "records")
    shutil.move(path / "step_000060", tmp_path / "later")
    look = Watch(path, Run.open(path).data)
    look()
    files = set((path / "records").iterdir())
    look()
    assert set((path / "records").iterdir()) == files, "nothing is measured twice"
    assert set(load_records([path])["step"]) == {0, 50}
    shutil.move(tmp_path / "later", path / "step_000060")
    look()
    found = load_records([path])
    assert set(found["step"]) == {0, 50, 60}
    assert set(found["metric"]) == set(SINK_METRICS)


@pytest.mark.slow
def test_what_deep_values_carry_is_of_shipped_models_where_one_seed_is_trained_at_most(ask, tmp_path, monkeypatch):
    shipped = [e for e in ask.catalogue().entries if e.name.startswith("text-")]
    renamed = [dataclasses.replace(e, name=e.name.replace("text-", "value_paths-")) for e in shipped]
    monkeypatch.setattr(Source, "shipped", lambda self: SimpleNamespace(entries=renamed))
    resting = Source(tmp_path)
    assert {e.name for e in start.text_models(resting)} == {e.name for e in renamed}
    assert start.text_models(ask) == start.demo_runs(ask, "text")
    assert set(start.identity_share(resting, link("demo")).table["architecture"]) >= {"transformer", "resformer"}


@pytest.mark.slow
def test_the_story_draws_the_race_what_values_carry_and_the_heads(ask):
    race = start.race(ask, link("demo"))
    assert set(race.table["metric"]) == {"copy_loss"}
    identity = start.identity_share(ask, link("demo"))
    assert set(identity.table["metric"]) == {"token_identity_share"}
    assert start.replaced_values(ask, link("demo")).figure.data
    heads = start.copying_heads(ask, link("demo", at=8))
    z = np.asarray(heads.figure.data[0].z, dtype=float)
    assert np.nansum(z, axis=1) == pytest.approx(1.0, abs=1e-5)
    assert np.isnan(z[0, 1])
    assert set(heads.table["step"]) == {8}
    assert set(heads.table["head"]) == {1}  # the highest stored induction score
    first = heads.table[heads.table["run"] == heads.table["run"].iloc[0]]
    assert first["attention"].to_numpy() == pytest.approx(z[first["query"], first["key"]], abs=1e-6)
    assert len(first) == np.isfinite(z).sum()


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"left": "race-svformer-s9"}, UnknownName, "did you mean race-svformer"),
        ({"at": 7}, WorkbenchError, r"choose from \[0, 8, 20\]"),
    ],
)
def test_heads_that_are_not_there_are_refused(ask, options, error, word):
    with pytest.raises(error, match=word):
        start.copying_heads(ask, link("demo", **options))


def test_only_the_shown_part_of_the_page_is_drawn(ask):
    with pytest.raises(WorkbenchError, match="show=demo"):
        start.race(ask, link("model"))
    with pytest.raises(UnknownName, match="part of the page"):
        start.race(ask, link("models"))
    ((name, drawing),) = drawings(ask, link("demo"), "race")
    assert name == "race"
    assert drawing.figure.data
