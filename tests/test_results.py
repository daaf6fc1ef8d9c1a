"""The table of records, and the store under several processes at once."""

from __future__ import annotations

import multiprocessing
import os

import pandas as pd
import pytest

from workbench.errors import BadCheckpoint, WorkbenchError
from workbench.files import digest, replacing, write_json, write_text
from workbench.results import (
    COLUMNS,
    SAMPLE_COLUMNS,
    Store,
    load_records,
    provenance,
    read_parquet,
    records,
    typed,
    write_parquet,
)


def some(key, value=1.0, rows=3):
    origin = provenance(key=key, weights="w")
    return records({"run": "r", "metric": "m", "layer": i, "value": value, "provenance": origin} for i in range(rows))


NOTHING = records([], SAMPLE_COLUMNS)


def test_records_are_typed_whatever_is_missing():
    frame = records([{"run": "a", "layer": 1, "value": 2}, {"head": 3}])
    assert list(frame.columns) == list(COLUMNS)
    assert frame["layer"].tolist()[0] == 1
    assert frame["layer"].isna().tolist() == [False, True]
    assert {str(frame[c].dtype) for c in ("seed", "n", "position")} == {"Int64"}
    assert records([])["value"].dtype == "float64"


def test_a_table_survives_the_disk(tmp_path):
    frame = some("a")
    write_parquet(frame, tmp_path / "odd [name]*.parquet")
    write_parquet(some("b"), tmp_path / "odd n*.parquet")
    pd.testing.assert_frame_equal(read_parquet([tmp_path / "odd [name]*.parquet"]), frame)
    assert len(read_parquet([tmp_path / "odd [name]*.parquet"], where="layer = 1")) == 1
    assert read_parquet([]).equals(records([]))


def test_tables_with_other_columns_are_read_as_records(tmp_path):
    pd.DataFrame({"run": ["x"], "value": [1.5], "mood": ["good"]}).to_parquet(tmp_path / "a.parquet")
    frame = read_parquet([tmp_path / "a.parquet"])
    assert list(frame.columns) == list(COLUMNS)
    assert frame.equals(typed(frame))


def test_an_unreadable_file_is_named(tmp_path):
    write_parquet(some("a"), tmp_path / "good.parquet")
    data = (tmp_path / "good.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(BadCheckpoint, match=r"cut\.parquet"):
        read_parquet([tmp_path / "good.parquet", tmp_path / "cut.parquet"])
    with pytest.raises(BadCheckpoint, match=r"gone\.parquet"):
        read_parquet([tmp_path / "gone.parquet"])


def test_rows_of_one_key_are_replaced_and_others_kept(tmp_path):
    store = Store(tmp_path)
    assert store.get("w", "d", ["a"]) == {}
    store.put("w", "d", some("a"), NOTHING)
    store.put("w", "d", some("b", rows=2), NOTHING)
    changed = some("a", 7.0).assign(provenance=provenance(key="a", weights="w", torch="newer"))
    store.put("w", "d", changed, NOTHING)
    found = store.get("w", "d", ["a", "b", "c"])
    assert {key: rows["value"].tolist() for key, rows in found.items()} == {"a": [7.0] * 3, "b": [1.0] * 2}
    assert store.get("w", "other", ["a"]) == {}


def test_records_of_runs_leave_samples_out(tmp_path):
    sample = records([{"metric": "m", "document": 1, "provenance": provenance(key="a")}], SAMPLE_COLUMNS)
    Store(tmp_path / "run" / "records").put("w", "d", some("a"), sample)
    assert len(load_records([tmp_path / "run", tmp_path / "none"])) == 3
    assert len(load_records([tmp_path / "run"], "layer >= 1")) == 2


def _write_many(folder, name, n):
    store = Store(folder)
    for i in range(n):
        store.put("w", "d", some(f"{name}{i}", float(i)), NOTHING)


def test_two_processes_write_while_a_third_reads(tmp_path):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(tmp_path, name, 12)) for name in "ab"]
    for writer in writers:
        writer.start()
    keys, most = [f"{name}{i}" for name in "ab" for i in range(12)], 0
    while any(writer.is_alive() for writer in writers):
        found = Store(tmp_path).get("w", "d", keys)
        assert all(len(rows) == 3 for rows in found.values()), "a measurement is there whole or not at all"
        assert len(found) >= most, "nothing that was there vanishes"
        most = len(found)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert set(Store(tmp_path).get("w", "d", keys)) == set(keys)
    assert not list(tmp_path.glob("*.part")) + list(tmp_path.glob(".*.part"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "records").write_text("a file")
    with pytest.raises(WorkbenchError, match="cannot keep records in"):
        Store(tmp_path / "records").put("w", "d", some("a"), NOTHING)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(ZeroDivisionError), replacing(path) as part:
        part.write_text(f"ne{1 // 0}")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    with pytest.raises(WorkbenchError, match=r"cannot write .*a\.txt/b"):
        write_text(path / "b", "below a file")


def test_files_get_the_permissions_of_their_folder(tmp_path):
    before = os.umask(0o022)
    try:
        write_json(tmp_path / "a.json", {})
    finally:
        os.umask(before)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o644


def test_digests_tell_parts_apart():
    assert digest(b"ab", b"c") != digest(b"a", b"bc")
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert len(digest("x")) == 16
