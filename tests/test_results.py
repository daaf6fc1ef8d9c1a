"""The table of records, and the store under several processes at once."""

from __future__ import annotations

import multiprocessing
import os
import time

import pandas as pd
import pyarrow.parquet as pq
import pytest

from workbench.errors import BadCheckpoint, WorkbenchError
from workbench.file_io import MARK, SUM, replacing, write_json, write_text
from workbench.runs.records import (
    COLUMNS,
    SAMPLE_COLUMNS,
    Store,
    load_records,
    one_sample,
    provenance,
    read_parquet,
    read_tables,
    records,
    typed,
    write_parquet,
)


def some(key, value=1.0, rows=3, **facts):
    """A measurement of a metric of the key's name."""
    origin = provenance(key=key, weights="w", **facts)
    return records({"run": "r", "metric": key, "layer": i, "value": value, "provenance": origin} for i in range(rows))


NOTHING = records([], SAMPLE_COLUMNS)


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


# ---- versions --------------------------------------------------------------------------------------------------------


def versioned(name, version, value):
    """Rows of a metric as a version of it wrote them; None: as before versions were numbers."""
    stated = {"metric": f"{name}@f3a9"} if version is None else {"version": version}
    return some(f"{name}-{version}", value, **stated).assign(metric=name)


def shown(folder, name="m"):
    frame = load_records([folder])
    return set(frame.loc[frame["metric"] == name, "value"])


@pytest.mark.parametrize(("old", "new"), [(9, 10)])
def test_a_new_version_takes_the_place_of_the_old_rows_and_not_of_its_neighbours(tmp_path, old, new):
    store = Store(tmp_path / "records")
    store.put("w", "d", pd.concat([versioned("m", old, 102.41), versioned("beside", old, 3.0)]), NOTHING)
    assert shown(tmp_path) == {102.41}
    store.put("w", "d", versioned("m", new, 2.41), NOTHING)
    assert shown(tmp_path) == {2.41}
    assert shown(tmp_path, "beside") == {3.0}
    assert list(store.get("w", "d", [f"m-{old}", f"m-{new}", f"beside-{old}"])) == [f"beside-{old}", f"m-{new}"]


def test_of_a_run_the_newest_version_of_a_metric_is_shown_whatever_weights_and_data_it_was_measured_on(tmp_path):
    store = Store(tmp_path / "records")
    for weights, data, version, value in (("w0", "d", None, 1.0), ("w1", "d", 1, 2.0), ("w1", "more", None, 3.0)):
        store.put(weights, data, versioned("m", version, value), NOTHING)
    assert shown(tmp_path) == {2.0}


def test_records_of_found_positions_and_of_the_first_one_stay_beside_each_other(tmp_path):
    store = Store(tmp_path / "records")
    for value, variant in ((1.0, None), (2.0, "found"), (3.0, "later_found"), (4.0, None)):
        store.put("w", "d", versioned("m", 1, value).assign(variant=variant), NOTHING)
    assert shown(tmp_path) == {3.0, 4.0}, "each replaces its own"


def test_an_older_program_leaves_newer_rows_alone(tmp_path):
    store = Store(tmp_path / "records")
    store.put("w", "d", versioned("m", 2, 2.0), NOTHING)
    store.put("w", "d", versioned("m", 1, 1.0), NOTHING)
    assert shown(tmp_path) == {2.0}


def test_samples_go_with_their_records(tmp_path):
    def samples(key):
        return records([{"metric": "m", "document": 1, "provenance": provenance(key=key)}], SAMPLE_COLUMNS)

    store = Store(tmp_path)
    store.put("w", "d", versioned("m", None, 1.0), samples("old"))
    store.put("w", "d", versioned("m", 1, 2.0), samples("new"))
    (path,) = tmp_path.glob("*.samples.parquet")
    assert len(read_parquet([path], SAMPLE_COLUMNS)) == 1


def test_tables_without_a_provenance_or_of_others_are_shown_as_they_are(tmp_path):
    (tmp_path / "records").mkdir()
    for i, provenances in enumerate([["", "[1]"], [None, "null"], ['"version":x', '{"version":0}']]):
        frame = pd.DataFrame({"metric": "m", "value": [float(i), i + 0.5], "provenance": provenances})
        frame.to_parquet(tmp_path / "records" / f"{i}.parquet")
    pd.DataFrame({"metric": ["m"], "value": [9.0]}).to_parquet(tmp_path / "records" / "bare.parquet")
    assert shown(tmp_path) == {0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 9.0}
    assert load_records([]).equals(records([]))


def measured_on(data, steps, n, metric="m", run="r"):
    """Rows of a metric of some checkpoints on one set of documents."""
    origin = provenance(key="k", data=data)
    return records({"run": run, "metric": metric, "step": s, "n": n, "value": 1.0, "provenance": origin} for s in steps)


@pytest.mark.parametrize(
    ("chosen", "other"),
    [
        (("a", [300], 8), ("b", [0, 100, 200], 64)),  # the latest step
        (("b", [300], 64), ("a", [300], 64)),  # then always the same
    ],
)
def test_of_several_sets_of_documents_one_is_shown_of_each_run_and_metric(chosen, other):
    beside = [measured_on(other[0], [0], 4, metric="m2"), measured_on(other[0], [0], 4, run="r2")]
    for order in ([chosen, other], [other, chosen]):
        frame = pd.concat([*(measured_on(*rows) for rows in order), *beside], ignore_index=True)
        wanted = pd.concat([measured_on(*chosen), *beside], ignore_index=True)
        pd.testing.assert_frame_equal(one_sample(frame), wanted)
    assert one_sample(wanted) is wanted


def _write_many(folder, name, n):
    store = Store(folder)
    for i in range(n):
        store.put("w", "d", some(f"{name}{i}", float(i)), NOTHING)


@pytest.mark.slow
def test_two_processes_write_while_a_third_reads(tmp_path, forkserver):
    context = multiprocessing.get_context()
    writers = [context.Process(target=_write_many, args=(tmp_path, name, 12)) for name in "ab"]
    for writer in writers:
        writer.start()
    keys, most = [f"{name}{i}" for name in "ab" for i in range(12)], 0
    while any(writer.is_alive() for writer in writers):
        found = Store(tmp_path).get("w", "d", keys)
        assert all(len(rows) == 3 for rows in found.values()), "a measurement is there whole or not at all"
        assert len(found) >= most, "nothing that was there vanishes"
        most = len(found)
        time.sleep(0.01)
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


def test_no_flipped_bit_is_read_as_other_rows(tmp_path):
    """Wherever it is: pages, their headers, the footer, its length, the sum and the mark before it."""
    path = tmp_path / "a.parquet"
    write_parquet(records([{"run": "r", "metric": "m", "step": i, "value": i / 7} for i in range(100)]), path)
    data, whole = path.read_bytes(), read_parquet([path])
    mark = data.index(MARK)
    for place in sorted(
        {*range(0, len(data), 97), *range(mark, mark + len(MARK) + SUM), *range(len(data) - 8, len(data))}
    ):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        if mark <= place < mark + len(MARK):  # then it has no sum, and its contents are sound
            pd.testing.assert_frame_equal(read_parquet([path]), whole)
            continue
        for read in (read_parquet, read_tables):
            with pytest.raises(BadCheckpoint, match=r"cannot read .*a\.parquet: its bytes are not those"):
                read([path])


def test_a_table_without_a_sum_is_read_as_it_is(tmp_path):
    """Of another program, or of this one before it wrote sums; pages may have checksums."""
    path = tmp_path / "a.parquet"
    rows = records([{"run": "r", "metric": "m", "step": i, "value": i / 7} for i in range(100)])
    rows.to_parquet(path, index=False, write_page_checksum=True)
    pd.testing.assert_frame_equal(read_parquet([path]), rows)
    data = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(0).column(COLUMNS.index("value"))
    data[column.dictionary_page_offset + column.total_compressed_size - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadCheckpoint, match=r"cannot read .*a\.parquet.*(CRC|checksum)"):
        read_parquet([path])


def test_other_programs_read_a_table_with_its_sum(tmp_path):
    path, rows = tmp_path / "a.parquet", records([{"run": "r", "metric": "m", "step": 1, "value": 0.5}])
    write_parquet(rows, path)
    assert MARK in path.read_bytes()
    pd.testing.assert_frame_equal(typed(pd.read_parquet(path)), rows)
