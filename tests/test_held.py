"""Records of many runs held in memory: the same rows as the files', read once, given up where there are too many."""

from __future__ import annotations

from pathlib import Path

import dashboard
import pandas as pd
import pyarrow.parquet as pq
import pytest

from workbench.results import records, write_parquet
from workbench.views import Source
from workbench.views.held import Held

ORDER = ["run", "metric", "step", "site", "layer", "head", "position", "variant", "control"]


@pytest.fixture
def ask(tmp_path):
    for seed in range(2):
        common = dashboard.run(tmp_path, f"text-resformer-s{seed}", "resformer", seed, "text", steps=(0,))
        path = tmp_path / common["run"] / "records" / "aa.parquet"
        write_parquet(records(dashboard.measured(common, "text")), path)
    return Source(tmp_path)


def alike(a, b):
    a, b = (f.sort_values(ORDER).reset_index(drop=True) for f in (a, b))
    pd.testing.assert_frame_equal(a, b)


@pytest.mark.parametrize("metrics", [None, ["sink_mass"], ["sink_mass", "token_importance"], ["nothing"]])
def test_held_records_are_those_of_the_files(ask, metrics):
    entries = ask.catalogue().entries
    found, problems = Held().rows(entries, metrics)
    alike(found, ask.records(entries, metrics))
    assert not problems


def test_a_run_is_read_again_only_when_it_changes(ask, monkeypatch):
    held, opened = Held(), []
    real = pq.ParquetFile
    monkeypatch.setattr(pq, "ParquetFile", lambda path, **options: opened.append(str(path)) or real(path, **options))
    entries = ask.catalogue().entries
    assert held.unread(entries) == 2
    held.rows(entries, ["sink_mass"])
    held.rows(entries, ["value_drain"])
    assert len(opened) == 2
    assert held.unread(entries) == 0
    path = Path(entries[1].path) / "records" / "bb.parquet"
    write_parquet(records([{"metric": "sink_mass", "layer": 0, "value": 7.0, "step": 20, "run": "x"}]), path)
    entries = ask.catalogue().entries
    assert held.unread(entries) == 1
    found, _ = held.rows(entries, ["sink_mass"])
    assert found.loc[found["value"] == 7.0, "run"].tolist() == [entries[1].name]


def test_a_damaged_file_is_named_and_the_other_runs_are_there(ask):
    entries = ask.catalogue().entries
    path = Path(entries[0].path) / "records" / "aa.parquet"
    path.write_bytes(path.read_bytes()[:60])
    found, problems = Held().rows(entries, ["sink_mass"])
    assert list(problems) == [entries[0].name]
    assert "aa.parquet" in problems[entries[0].name]
    assert set(found["run"]) == {entries[1].name}


def test_somebody_elses_table_is_named(ask):
    entries = ask.catalogue().entries
    pd.DataFrame({"colour": ["red"], "metric": [3]}).to_parquet(Path(entries[0].path) / "records" / "theirs.parquet")
    _, problems = Held().rows(entries)
    assert "no table of records: it has no value" in problems[entries[0].name]


def test_answers_are_given_up_where_they_take_too_much(ask):
    held, entries = Held(budget=1), ask.catalogue().entries
    for metric in ("sink_mass", "value_drain", "sink_mass"):
        held.rows(entries, [metric])
        assert len(held.answers) == 1
