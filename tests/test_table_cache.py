"""Records of many runs cache in memory: the same rows as the files', read once, given up where there are too many."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dashboard
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from workbench.runs import sqlite_index, table_cache
from workbench.runs.records import TEXT, records, write_parquet
from workbench.runs.run import Run
from workbench.runs.sqlite_index import INDEX
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


# ---- tables that others wrote ----

ODD = {
    "value": [["x"]], "layer": [[0.5], [2**63]], "data": [[["prose"]]], "metric": [[b"\xff\xfe"]],
}  # fmt: skip


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("kind", "column", "values"),
    [("telemetry", "value", ["x"]), *(("records", c, v) for c, many in ODD.items() for v in many)],
)
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


def part(folder, name, end):
    """A part of telemetry as a recorder writes it: replaced as a whole, with rows up to a step."""
    time.sleep(0.01)  # the folder's time is that of the system's last tick
    rows = [{"run": "r", "metric": m, "step": s, "value": float(s)} for s in range(int(name[:6]), end) for m in "ab"]
    write_parquet(records(rows), folder / "telemetry" / f"{name}.parquet")


def test_of_a_growing_telemetry_only_new_parts_are_read_and_a_new_beginning_forgets_the_old(ask, monkeypatch):
    """Part 1 grows, part 2 appears, then the run begins anew under the same names."""
    run, cache, opened = ask.folder / "text-resformer-s1", TelemetryCache(), []
    real = table_cache.read_tables
    monkeypatch.setattr(
        table_cache, "read_tables", lambda files, *how: opened.append(files[0].name[:6]) or real(files, *how)
    )

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
    before = table_cache._files_of(run)
    part(run, "000000-000030", 21)
    assert seen() == (list(range(21)), ["000000"]), "a part that holds the others is in their place"
    for file in before:
        (run / "telemetry" / file[0]).unlink()
    files_of, looks = table_cache._files_of, iter([before])
    monkeypatch.setattr(table_cache, "_files_of", lambda path: next(looks, None) or files_of(path))
    found, problems = TelemetryCache().rows([e for e in ask.catalogue().entries if e.name == run.name], ["a"])
    assert (found["step"].tolist(), problems) == (list(range(21)), {}), (
        "its training ended between a look and a reading"
    )
    for file in (run / "telemetry").glob("*.parquet"):
        file.unlink()
    assert seen() == ([], [])
    part(run, "000000-000010", 2)
    assert seen() == ([0, 1], ["000000"])


# ---- in the index ----------------------------------------------------------------------------------------------------


@pytest.fixture
def settled(ask):
    """The entries as they are long after their runs last changed."""
    return lambda: [dataclasses.replace(e, seen=time.time_ns() + 10**10) for e in ask.catalogue().entries]


def stored(folder, kind):
    """Run and metric of each part of a kind."""
    with contextlib.closing(sqlite3.connect(folder / INDEX)) as database:
        return database.execute("SELECT run, metric FROM part WHERE kind = ? ORDER BY metric", (kind,)).fetchall()


@pytest.mark.slow
def test_a_new_server_reads_many_runs_from_the_index_and_the_same_rows(ask, settled, monkeypatch):
    plain, choices = RecordCache(), (["token_importance"], ["sink_mass", "value_drain"], None, ["nothing"])
    wanted, names = [plain.rows(settled(), metrics)[0] for metrics in choices], plain.metrics(settled())
    RecordCache(ask.folder).rows(settled(), ["sink_mass"])
    monkeypatch.setattr(table_cache, "read_tables", lambda files, *how: pytest.fail(f"{files} were opened"))
    later = RecordCache(ask.folder)
    assert later.unread(settled()) == 0
    assert later.metrics(settled()) == names
    for metrics, frame in zip(choices, wanted, strict=True):
        cached, problems = later.rows(settled()[::-1], metrics)
        alike(cached, frame.astype(dict.fromkeys(TEXT, "str")))
        assert not problems


def test_runs_that_changed_just_now_or_are_being_written_are_not_indexed(ask, settled):
    entries = ask.catalogue().entries
    RecordCache(ask.folder).rows(entries)
    assert not stored(ask.folder, "records")
    with Run.open(entries[0].path).writing():
        RecordCache(ask.folder).rows(settled())
    assert [run for run, metric in stored(ask.folder, "records") if not metric] == [entries[1].name]


@pytest.mark.slow
def test_an_indexed_run_that_changes_is_read_from_its_own_files_and_indexed_again(ask, settled):
    RecordCache(ask.folder).rows(settled())
    for turn, value in enumerate((7.0, 8.0)):
        path = Path(settled()[turn].path) / "records" / "bb.parquet"
        write_parquet(records([{"metric": "sink_mass", "layer": 0, "value": value, "step": 20, "run": "x"}]), path)
        cache = RecordCache(ask.folder)
        assert cache.unread(settled()) == 1
        assert (cache.rows(settled(), ["sink_mass"])[0]["value"] == value).sum() == 1
    batches = {run for run, metric in stored(ask.folder, "records") if metric}
    assert len(batches) == 2, "the first batch, to which no run refers any more, is gone"
    later = RecordCache(ask.folder)
    assert later.unread(settled()) == 0
    assert {7.0, 8.0} <= set(later.rows(settled(), ["sink_mass"])[0]["value"])


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 4096, None])
def test_a_damaged_index_is_built_again(ask, settled, size):
    wanted = RecordCache(ask.folder).rows(settled())[0]
    file = ask.folder / INDEX
    file.write_bytes(b"x" * 9000 if size is None else file.read_bytes()[:size])
    for unread in (2, 0):
        cache = RecordCache(ask.folder)
        assert cache.unread(settled()) == unread
        cached, problems = cache.rows(settled())
        alike(cached, wanted.astype(dict.fromkeys(TEXT, "str")))
        assert not problems


@pytest.mark.slow
def test_a_byte_of_the_index_that_changes_changes_no_number(ask, settled):
    """SQLite checks the structure of its pages, and the checksums of rows their contents."""
    wanted = RecordCache(ask.folder).rows(settled())[0].astype(dict.fromkeys(TEXT, "str"))
    file, entries, draw = ask.folder / INDEX, settled(), random.Random(0)
    data = file.read_bytes()
    for at in (draw.randrange(len(data)) for _ in range(10)):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :])
        cached, problems = RecordCache(ask.folder).rows(entries)
        alike(cached, wanted)
        assert not problems


def test_a_part_that_another_process_replaces_is_read_from_the_files(ask, settled):
    first, entries = RecordCache(ask.folder), settled()
    wanted = first.rows(entries)[0].astype(dict.fromkeys(TEXT, "str"))
    first.answers.clear()
    with contextlib.closing(sqlite3.connect(ask.folder / INDEX)) as database, database:
        database.execute("DELETE FROM part WHERE metric = 'sink_mass'")
    alike(first.rows(entries)[0], wanted)


@pytest.mark.slow
def test_processes_that_write_the_index_at_once_lose_nothing(ask, settled):
    """Two servers that start together both read all runs; each row of the index is written by one of them."""
    entries, caches = settled(), [RecordCache(ask.folder) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda cache: cache.rows(entries)[0], caches))
    for answer in answers:
        alike(answer, answers[0].astype(dict.fromkeys(TEXT, "str")))
    assert RecordCache(ask.folder).unread(entries) == 0


@pytest.mark.fast(1)
@pytest.mark.parametrize("obstacle", ["folder", "device"])
def test_runs_of_a_folder_whose_index_cannot_be_written_stay_in_memory(ask, settled, obstacle):
    entries, file = settled(), ask.folder / INDEX
    file.unlink()
    if obstacle == "folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero")
    cache = RecordCache(ask.folder)
    assert set(cache.rows(entries)[0]["run"]) == {"text-resformer-s0", "text-resformer-s1"}
    assert cache.unread(entries) == 0


def test_the_index_of_a_shipped_or_closed_folder_is_in_the_users_cache(ask, settled, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(sqlite_index, "SHIPPED", ask.folder)
    entries = settled()
    RecordCache(ask.folder).rows(entries)
    assert RecordCache(ask.folder).unread(entries) == 0
    assert not (ask.folder / INDEX).exists()
