"""Records of many runs cache in memory: the same rows as the files', read once, given up where there are too many."""

from __future__ import annotations

import dataclasses
import random
import time
from pathlib import Path

import dashboard
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from workbench.errors import BadCheckpoint
from workbench.runs import packed_tables, table_cache
from workbench.runs.packed_tables import compact
from workbench.runs.records import TEXT, facts, load_records, records, write_parquet
from workbench.runs.table_cache import RecordCache, TelemetryCache
from workbench.views import Source

ORDER = ["run", "metric", "step", "site", "layer", "head", "position", "variant", "control"]


@pytest.fixture
def ask(tmp_path):
    for seed in range(2):
        common = dashboard.run(tmp_path, f"text-resformer-s{seed}", "resformer", seed, "text", steps=(0,))
        path = tmp_path / common["run"] / "records" / "aa.parquet"
        rows = [row for row in dashboard.measured(common, "text") if seed == 0 or row["metric"] != "value_drain"]
        write_parquet(records(rows), path)
    return Source(tmp_path)


def alike(a, b):
    a = a.astype(dict.fromkeys(TEXT, "str"))  # an answer holds texts as categories
    a, b = (f.sort_values(ORDER).reset_index(drop=True) for f in (a, b))
    pd.testing.assert_frame_equal(a, b)


@pytest.mark.parametrize("metrics", [None, ["sink_mass"], ["sink_mass", "token_importance"], ["nothing"]])
def test_cached_records_are_those_of_the_files(ask, metrics):
    entries = ask.catalogue().entries
    cached, problems = RecordCache().rows(entries, metrics)
    stored = load_records([Path(e.path) for e in entries]).assign(architecture="resformer")
    alike(cached, stored if metrics is None else stored[stored["metric"].isin(metrics)])
    assert not problems


def test_a_run_is_read_again_only_when_it_changes(ask, monkeypatch):
    cache, opened, entries = RecordCache(), [], ask.catalogue().entries
    real = pq.ParquetFile
    monkeypatch.setattr(pq, "ParquetFile", lambda path, **options: opened.append(str(path)) or real(path, **options))
    assert cache.unread(entries) == 2
    cache.rows(entries, ["sink_mass"])
    cache.rows(entries, ["value_drain"])
    assert len(opened) == 2
    assert cache.unread(entries) == 0
    path = Path(entries[1].path) / "records" / "bb.parquet"
    write_parquet(records([{"metric": "sink_mass", "layer": 0, "value": 7.0, "step": 20, "run": "x"}]), path)
    entries = ask.catalogue().entries
    assert cache.unread(entries) == 1
    found, _ = cache.rows(entries, ["sink_mass"])
    assert found.loc[found["value"] == 7.0, "run"].tolist() == [entries[1].name]


def test_a_damaged_file_is_named_and_the_other_runs_are_there(ask):
    entries = ask.catalogue().entries
    path = Path(entries[0].path) / "records" / "aa.parquet"
    path.write_bytes(path.read_bytes()[:60])
    found, problems = RecordCache().rows(entries, ["sink_mass"])
    assert list(problems) == [entries[0].name]
    assert "aa.parquet" in problems[entries[0].name]
    assert set(found["run"]) == {entries[1].name}


def test_a_table_of_another_program_is_named(ask):
    entries = ask.catalogue().entries
    pd.DataFrame({"colour": ["red"], "metric": [3]}).to_parquet(Path(entries[0].path) / "records" / "theirs.parquet")
    _, problems = RecordCache().rows(entries)
    assert "no table of records: it has no value" in problems[entries[0].name]


def test_answers_are_given_up_where_they_take_too_much(ask):
    cache, entries = RecordCache(budget=1), ask.catalogue().entries
    for metric in ("sink_mass", "value_drain", "sink_mass"):
        cache.rows(entries, [metric])
        assert len(cache.answers) == 1


# ---- tables that others wrote ----

ODD = {
    "value": [["x"], [[1.0]], [{"a": 1.0}], [pd.Timestamp(0)]], "layer": [["first"], [0.5], [2**63]], "step": [["now"]],
    "se": [["much"]], "data": [[["prose"]]], "metric": [[b"\xff\xfe"]],
}  # fmt: skip


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
    found, problems = (RecordCache() if kind == "records" else TelemetryCache()).rows(entries)
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
    found, problems = RecordCache().rows(ask.catalogue().entries, ["m"])
    assert not problems
    assert found["value"].tolist() == [1.0, 2.0]
    assert found["layer"].fillna(-1).tolist() == [0, -1]
    assert found["data"].tolist() == ["7", "8"]


@pytest.mark.parametrize("text", ["<b>", "[1]", "3", "null", '"x"', ""])
def test_a_provenance_that_is_not_ours_says_nothing(text):
    assert facts(text) == {}


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_kept_columns_say_something_in_few_bytes():
    """Of 21 columns a metric fills a few; the two that every answer writes anew are not kept either."""
    rows = {
        "run": ["r", "r"], "architecture": ["a", "a"], "metric": ["m", "m"], "step": [0, 2**40], "layer": [3, None],
        "head": [None, None], "variant": [None, None], "value": [0.1, 0.2],
    }  # fmt: skip
    kinds = {"head": pa.int64(), "layer": pa.int64(), "variant": pa.string()}
    kept = compact(pa.table({name: pa.array(values, kinds.get(name)) for name, values in rows.items()}))
    assert kept.column_names == ["metric", "step", "layer", "value"]
    assert [str(kept[name].type) for name in ("step", "layer", "value")] == ["int64", "int32", "double"]
    assert pa.types.is_dictionary(kept["metric"].type)
    assert {name: kept[name].to_pylist() for name in kept.column_names} == {
        name: rows[name] for name in ("metric", "step", "layer", "value")
    }


def part(folder, name, end):
    """A part of telemetry as a recorder writes it: replaced as a whole, with rows up to a step."""
    time.sleep(0.01)  # the folder's time is that of the system's last tick
    rows = [{"run": "r", "metric": m, "step": s, "value": float(s)} for s in range(int(name[:6]), end) for m in "ab"]
    write_parquet(records(rows), folder / "telemetry" / f"{name}.parquet")


def test_of_a_growing_telemetry_only_new_parts_are_read_and_a_new_beginning_forgets_the_old(ask, monkeypatch):
    """Part 1 grows, part 2 appears, then the run begins anew under the same names."""
    run, cache, opened = ask.folder / "text-resformer-s1", TelemetryCache(), []
    real = table_cache._part
    monkeypatch.setattr(table_cache, "_part", lambda file: opened.append(file.name[:6]) or real(file))

    def seen():
        (entry,) = (e for e in ask.catalogue().entries if e.name == run.name)
        opened.clear()
        found, problems = cache.rows([entry], ["a"])
        assert not problems
        assert set(found["metric"]) <= {"a"}
        return found["step"].tolist(), list(opened)

    part(run, "000000-000010", 4)
    assert seen() == ([0, 1, 2, 3], ["000000"])
    part(run, "000000-000010", 10)
    assert seen() == (list(range(10)), ["000000"]), "the last part is replaced as it grows"
    part(run, "000010-000020", 12)
    assert seen() == (list(range(12)), ["000010"])
    part(run, "000010-000020", 20)
    part(run, "000020-000030", 21)
    assert seen() == (list(range(21)), ["000010", "000020"])
    before = table_cache._parts_of(run)
    part(run, "000000-000030", 21)
    assert seen() == (list(range(21)), ["000000"]), "a part that holds the others is in their place"
    for file in before:
        (run / "telemetry" / file[0]).unlink()
    parts_of, looks = table_cache._parts_of, iter([before])
    monkeypatch.setattr(table_cache, "_parts_of", lambda path: next(looks, None) or parts_of(path))
    found, problems = TelemetryCache().rows([e for e in ask.catalogue().entries if e.name == run.name], ["a"])
    assert (found["step"].tolist(), problems) == (list(range(21)), {}), (
        "its training ended between a look and a reading"
    )
    for file in (run / "telemetry").glob("*.parquet"):
        file.unlink()
    assert seen() == ([], [])
    part(run, "000000-000010", 2)
    assert seen() == ([0, 1], ["000000"])


# ---- packed ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def packing(ask, monkeypatch):
    """Two runs are many, and nothing changes any more."""
    monkeypatch.setattr(table_cache, "FEW", 2)
    monkeypatch.setattr(packed_tables, "MAX_FILES", 1)
    return lambda: [dataclasses.replace(e, seen=time.time_ns() + 10**10) for e in ask.catalogue().entries]


def test_a_new_server_reads_many_runs_from_one_file_and_the_same_rows(ask, packing, monkeypatch):
    plain, choices = RecordCache(), (["token_importance"], ["sink_mass", "value_drain"], None, ["nothing"])
    wanted, names = [plain.rows(packing(), metrics)[0] for metrics in choices], plain.metrics(packing())
    RecordCache(ask.folder).rows(packing(), ["sink_mass"])
    monkeypatch.setattr(table_cache, "_part", lambda path: pytest.fail(f"{path} was opened"))
    later = RecordCache(ask.folder)
    assert later.unread(packing()) == 0
    assert later.metrics(packing()) == names
    for metrics, frame in zip(choices, wanted, strict=True):
        cached, problems = later.rows(packing()[::-1], metrics)
        alike(cached, frame.astype(dict.fromkeys(TEXT, "str")))
        assert not problems


def test_packed_telemetry_is_held_in_memory_no_longer(ask, packing):
    for entry in packing():
        part(Path(entry.path), "000000-000010", 4)
    cache = TelemetryCache(ask.folder)
    for _ in range(2):
        assert len(cache.rows(packing(), ["a"])[0]) == 4 * len(packing())
        assert not cache.runs
        assert not cache.parts


def test_a_packed_run_that_changes_is_read_from_its_own_files_and_packed_anew(ask, packing):
    path = Path(packing()[1].path) / "records" / "bb.parquet"
    RecordCache(ask.folder).rows(packing())
    write_parquet(records([{"metric": "sink_mass", "layer": 0, "value": 7.0, "step": 20, "run": "x"}]), path)
    cache = RecordCache(ask.folder)
    assert cache.unread(packing()) == 1
    assert (cache.rows(packing(), ["sink_mass"])[0]["value"] == 7.0).sum() == 1
    write_parquet(
        records([{"metric": "sink_mass", "layer": 0, "value": 8.0, "step": 20, "run": "x"}]),
        Path(packing()[0].path) / "records" / "bb.parquet",
    )
    again = RecordCache(ask.folder).rows(packing(), ["sink_mass"])[0][
        "value"
    ]  # two are loose now and packed; both files become one
    assert {7.0, 8.0} <= set(again)
    assert len(list((ask.folder / ".tables").iterdir())) == 1
    later = RecordCache(ask.folder)
    assert later.unread(packing()) == 0
    assert sorted(later.rows(packing(), ["sink_mass"])[0]["value"]) == sorted(again)


@pytest.mark.parametrize(
    "harm",
    [
        lambda p: p.write_bytes(p.read_bytes()[:-9]),
        lambda p: p.write_bytes(p.read_bytes()[:200] + b"x" + p.read_bytes()[201:]),
    ],
)
def test_a_damaged_packed_file_is_none(ask, packing, harm):
    wanted = RecordCache(ask.folder).rows(packing())[0]
    (file,) = (ask.folder / ".tables").iterdir()
    harm(file)
    cached, problems = RecordCache(ask.folder).rows(packing())
    alike(cached, wanted.astype(dict.fromkeys(TEXT, "str")))
    assert not problems


def test_a_byte_of_a_packed_file_that_changes_is_noticed_wherever_it_is(ask, packing):
    """Pages have sums of Parquet's own; headers and the footer, which says how many rows are null, have not."""
    RecordCache(ask.folder).rows(packing())
    (file,) = (ask.folder / ".tables").iterdir()
    whole, draw = file.read_bytes(), random.Random(0)
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for at in (draw.randrange(4, footer) if i % 3 == 0 else draw.randrange(footer, len(whole)) for i in range(150)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
        with pytest.raises(BadCheckpoint):  # noqa: PT012 - where it is noticed hangs on the byte
            pack = packed_tables._opened(file)
            for i in range(len(pack.metrics)):
                packed_tables._row_group(pack, i)


def test_runs_of_a_folder_that_cannot_be_written_stay_in_memory(ask, packing):
    (ask.folder / ".tables").write_text("in the way")
    cache = RecordCache(ask.folder)
    assert set(cache.rows(packing())[0]["run"]) == {"text-resformer-s0", "text-resformer-s1"}
    assert cache.unread(packing()) == 0
