"""Records of many runs held in memory: the same rows as the files', read once, given up where there are too many."""

from __future__ import annotations

from pathlib import Path

import dashboard
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from workbench.results import facts, records, write_parquet
from workbench.views import Source
from workbench.views.growing import Growing
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


# ---- tables that others wrote ----

ODD = {
    "value": [["x"], [[1.0]], [{"a": 1.0}], [pd.Timestamp(0)]],
    "layer": [["first"], [0.5], [2**63]],
    "step": [["now"]],
    "se": [["much"]],
    "data": [[["prose"]]],
    "metric": [[b"\xff\xfe"]],
}


@pytest.mark.parametrize(("column", "values"), [(c, v) for c, many in ODD.items() for v in many])
@pytest.mark.parametrize("kind", ["records", "telemetry"])
def test_a_foreign_table_is_left_out_by_its_name_and_column_and_the_other_runs_stand(ask, kind, column, values):
    run = ask.folder / "text-resformer-s1"
    foreign = pd.DataFrame({"metric": ["sink_mass"], "value": [1.0]} | {column: values})
    name = {"records": "zz.parquet", "telemetry": "000000-000020.parquet"}[kind]
    (run / kind).mkdir(exist_ok=True)
    foreign.to_parquet(run / kind / name)
    common = {"run": "text-resformer-s0", "architecture": "resformer", "seed": 0}
    write_parquet(records(dashboard.telemetry(common, "text")), ask.folder / common["run"] / "telemetry" / name)
    entries = ask.catalogue().entries
    found, problems = (Held() if kind == "records" else Growing()).rows(entries)
    assert set(found["run"]) == {"text-resformer-s0"}
    assert list(problems) == ["text-resformer-s1"]
    assert f"{name} is no table of records: column {column}" in problems["text-resformer-s1"]
    getattr(ask, kind)(entries)  # the same from a terminal
    assert ask.problems == problems


def test_a_foreign_table_may_spell_numbers_and_gaps_its_own_way(ask):
    path = ask.folder / "text-resformer-s1" / "records" / "aa.parquet"
    table = pa.table(
        {"metric": ["m", "m"], "value": [1, 2], "layer": [0.0, float("nan")], "data": [7, 8], "theirs": [[1], []]}
    )
    pq.write_table(table, path)
    found, problems = Held().rows(ask.catalogue().entries, ["m"])
    assert not problems
    assert found["value"].tolist() == [1.0, 2.0]
    assert found["layer"].fillna(-1).tolist() == [0, -1]
    assert found["data"].tolist() == ["7", "8"]


@pytest.mark.parametrize("text", ["<b>", "[1]", "3", "null", '"x"', ""])
def test_a_provenance_that_is_not_ours_says_nothing(text):
    assert facts(text) == {}
