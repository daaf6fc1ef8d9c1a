"""Files of W&B, TensorBoard and MLflow become runs without weights, as text logs do."""

import json
import math
import sqlite3
import struct
import sys
import zlib
from contextlib import closing

import pytest
from test_training_logs import curves, one, written

from workbench.errors import BadData
from workbench.runs.log_import import import_logs


def test_event_files_are_read_in_both_encodings(tmp_path):
    SummaryWriter = pytest.importorskip("tensorboardX", reason="extra tensorboard").SummaryWriter
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    with SummaryWriter(str(tmp_path / "tb")) as writer:
        for step in (0, 10, 20):
            writer.add_scalar("train/loss", 3.0 - step / 10, step)
        writer.add_scalar("val/loss", 2.5, 1)  # a count of its own
    (file,) = (tmp_path / "tb").iterdir()
    newer = Event(step=30)
    value = newer.summary.value.add(tag="train/loss")
    value.tensor.dtype = 1
    value.tensor.float_val.append(0.25)
    data = newer.SerializeToString()
    length = struct.pack("<Q", len(data))
    event = length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))
    whole = file.read_bytes() + event
    written(file, whole + event[:20])
    run, numbers = curves(file)
    assert run[0]["train_loss"] == {0: 3.0, 10: 2.0, 20: 1.0, 30: 0.25}
    assert run[0]["validation_loss"] == {1: 2.5}
    assert numbers.skipped["the last event is cut off"] == 1
    for at in (len(whole) - 8, len(whole) - len(event)):  # in the value and in the length
        with pytest.raises(BadData, match="damaged at byte"):
            curves(written(file, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]))


def test_parts_of_a_tensorboard_run_are_one_run(tmp_path):
    SummaryWriter = pytest.importorskip("tensorboardX", reason="extra tensorboard").SummaryWriter
    for folder, loss in {"a/train": 3.0, "a/validation": 3.5, "b/loss_train": 2.0, "b/loss_val": 2.5}.items():
        with SummaryWriter(str(tmp_path / "logs" / folder)) as writer:
            writer.add_scalar("loss", loss, 10)
    result = import_logs([tmp_path / "logs"], tmp_path / "runs", name="tb")
    tables = {r.name: dict(zip(t["metric"], t["value"], strict=True)) for r in result.runs if len(t := r.telemetry())}
    assert tables == {
        "tb-s0": {"train_loss": 3.0, "validation_loss": 3.5}, "tb-s1": {"train_loss": 2.0, "validation_loss": 2.5},
    }  # fmt: skip


def event_file(folder, values, **options):
    """Write each (tag, value, step) to a new event file of a folder, and return its open writer."""
    writer = pytest.importorskip("tensorboardX", reason="extra tensorboard").SummaryWriter(str(folder), **options)
    for tag, value, step in values:
        writer.add_scalar(tag, value, step)
    writer.flush()
    return writer


def imported(place, tmp_path):
    """{run: {quantity: {step: value}}} of a folder of logs."""
    runs = import_logs([place], tmp_path / "runs", name=place.name).runs
    tables = {run.info["log"]["name"]: run.telemetry().groupby("metric") for run in runs}
    return {
        name: {metric: dict(zip(t["step"], t["value"], strict=True)) for metric, t in table}
        for name, table in tables.items()
    }


def test_results_beside_hyperparameters_are_no_run_and_groups_of_scalars_are_parts_of_theirs(tmp_path):
    with event_file(tmp_path / "tb" / "base", [("lr", 0.5, 10)]) as writer:
        writer.add_hparams({"lr": 0.5}, {"val_loss": 2.5})  # a file of its own, with step 0
        writer.add_scalars("loss", {"train": 3.0, "val": 3.5}, 10)  # the folders loss/train and loss/val
        writer.add_scalars("lr", {"embed": 0.25, "rest": 0.5}, 10)  # two groups in lr/embed and lr/rest, no runs
    expected = {"learning_rate": {10: 0.5}, "train_loss": {10: 3.0}, "validation_loss": {10: 3.5}}
    assert imported(tmp_path / "tb", tmp_path) == {"base": expected}


def test_a_restart_of_the_writer_voids_later_numbers_and_two_writers_at_once_are_refused(tmp_path):
    first = [("train/loss", 3.0, 0), ("train/loss", 2.0, 40), ("val/loss", 2.5, 20), ("val/loss", 2.0, 50)]
    event_file(tmp_path / "a", first).close()
    event_file(tmp_path / "a", [("train/loss", 1.0, 35)], purge_step=30, filename_suffix=".b").close()
    assert imported(tmp_path / "a", tmp_path) == {"a": {"train_loss": {0: 3.0, 35: 1.0}, "validation_loss": {20: 2.5}}}
    with event_file(tmp_path / "b", [("loss", 3.0, 0)]) as writer:
        event_file(tmp_path / "b", [("loss", 4.0, 0)], filename_suffix=".rank1").close()
        writer.add_scalar("loss", 2.5, 9)
    with pytest.raises(BadData, match="have loss of the same time"):
        imported(tmp_path / "b", tmp_path)


def test_scalars_of_one_run_from_tensorboards_page_are_one_run(tmp_path):
    for name, values in {"train_loss": {0: 3.0, 9: 2.0}, "val_loss": {0: 3.5, 5: 3.0, 9: 2.5}}.items():
        rows = "".join(f"1.5,{step},{value}\n" for step, value in values.items())
        written(tmp_path / "csv" / f"run-a-tag-{name}.csv", "Wall time,Step,Value\n" + rows)
    expected = {"train_loss": {0: 3.0, 9: 2.0}, "validation_loss": {0: 3.5, 5: 3.0, 9: 2.5}}
    assert imported(tmp_path / "csv", tmp_path) == {"run-a": expected}


def test_a_quantity_that_counts_epochs_beside_steps_is_left_out(tmp_path):
    steps, epochs = range(0, 200, 20), range(1, 4)
    values = [("train/loss", 3.0, step) for step in steps] + [("val/loss", 2.0, epoch) for epoch in epochs]
    event_file(tmp_path / "tb", values).close()
    assert imported(tmp_path / "tb", tmp_path) == {"tb": {"train_loss": dict.fromkeys(steps, 3.0)}}


def test_mlflow_folders_are_one_run(tmp_path):
    run = tmp_path / "mlruns" / "1" / "abc"
    written(run / "meta.yaml", "run_id: abc\n")
    written(run / "metrics" / "val" / "loss", "1700000000000 3.5 0\n1700000000001 3.25 100\n")
    written(run / "metrics" / "loss", "1700000000000 4.5 0\n1700000000001 nan 100\n")
    (imported,) = import_logs([tmp_path / "mlruns"], tmp_path / "runs", name="m").runs
    table = imported.telemetry()
    assert table[table["metric"] == "validation_loss"]["value"].tolist() == [3.5, 3.25]
    assert len(table[table["metric"] == "train_loss"]) == 2


def test_mlflow_runs_have_the_names_of_their_experiments_in_both_stores(tmp_path):
    text = {
        "1": "experiment_id: '1'\nname: 'Own ''name'''\n",
        "1/abc": "experiment_id: '1'\nrun_id: abc\nrun_name: base\n",
    }
    text["1/old"] = "experiment_id: '1'\nrun_id: old\nrun_name: base\nlifecycle_stage: deleted\n"
    for folder, meta in text.items():
        written(tmp_path / "mlruns" / folder / "meta.yaml", meta)
    for run in ("abc", "old"):
        written(tmp_path / "mlruns" / "1" / run / "metrics" / "loss", "17 4.5 0\n18 nan 100\n19 inf 200\n")
        written(tmp_path / "mlruns" / "1" / run / "artifacts" / "out.log", "step 5 loss 2.0\n")
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as store, store:
        store.execute("CREATE TABLE experiments (experiment_id INTEGER, name TEXT)")
        store.execute("CREATE TABLE runs (run_uuid TEXT, name TEXT, experiment_id INTEGER, lifecycle_stage TEXT)")
        store.execute("CREATE TABLE params (key TEXT, value TEXT, run_uuid TEXT)")
        store.executemany("INSERT INTO params VALUES ('lr', ?, ?)", [("0.1", "abc"), ("0.2", "old")])
        store.execute("CREATE TABLE metrics (key TEXT, value REAL, timestamp INT, run_uuid TEXT, step INT, is_nan INT)")
        store.execute("INSERT INTO experiments VALUES (1, 'Own ''name''')")
        store.executemany("INSERT INTO runs VALUES (?, 'base', 1, ?)", [("abc", "active"), ("old", "deleted")])
        rows = [
            ("loss", v, 17, run, step, nan)
            for run in ("abc", "old")
            for v, step, nan in ((4.5, 0, 0), (0, 100, 1), (sys.float_info.max, 200, 0))
        ]
        store.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", rows)
    for store in ("mlruns", "mlflow.db"):
        (run,) = import_logs([tmp_path / store], tmp_path / "runs", name=f"of-{store}").runs
        assert (run.architecture, run.info["log"]["name"]) == ("Own 'name'", "base abc")
        values = run.telemetry()["value"].tolist()  # MLflow stores 0 for NaN and the largest float for infinity
        assert values == pytest.approx([4.5, math.nan, math.inf], nan_ok=True)


def test_runs_of_one_setting_that_differ_in_a_hyperparameter_are_pointed_out(tmp_path):
    for run, rate in {"a": "0.001", "b": "0.0003", "c": "0.001"}.items():
        folder = tmp_path / "mlruns" / "1" / run
        written(folder / "meta.yaml", f"run_id: {run}\nexperiment_id: '1'\n")
        written(folder / "metrics" / "loss", f"17 4.{ord(run)} 1\n")
        for name, value in {"lr": rate, "seed": run, "output_dir": run, "width": "64"}.items():
            written(folder / "params" / name, value)
    notes = import_logs([tmp_path / "mlruns"], tmp_path / "runs", name="m").notes
    assert sum("its 3 runs differ in lr but count as seeds" in note for note in notes) == 1
    Record = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="extra wandb").Record
    for run in "ab":
        config = {
            "update": [
                {"key": "lr", "value_json": "0.1"},
                {"nested_key": ["model", "width"], "value_json": str(ord(run))},
            ]
        }
        records = [Record(run={"run_id": run, "run_group": "base", "config": config})]
        records.append(
            Record(
                history={
                    "item": [{"key": "loss", "value_json": f"{ord(run) / 32}"}, {"key": "step", "value_json": "1"}]
                }
            )
        )
        wandb_file(tmp_path / "wandb" / f"run-20260101_000000-{run}" / f"run-{run}.wandb", records)
    notes = import_logs([tmp_path / "wandb"], tmp_path / "runs", name="w").notes
    assert sum("base: its 2 runs differ in model.width but count as seeds" in note for note in notes) == 1


def wandb_file(path, records):
    """A file as W&B's client writes it; a record that does not fit into a block has a first and a last part."""
    data = b":W&B\xbe\xe1\0"
    for record in records:
        body = record.SerializeToString()
        room = (1 << 15) - len(data) % (1 << 15) - 7
        parts = [(1, body)] if len(body) <= room else [(2, body[:room]), (4, body[room:])]
        for kind, part in parts:
            data += struct.pack("<IHB", zlib.crc32(part, zlib.crc32(bytes([kind]))), len(part), kind) + part
    return written(path, data)


def test_a_wandb_file_is_one_run_without_its_console_output(tmp_path):
    Record = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="extra wandb").Record
    start = Record()
    start.run.run_id, start.run.display_name, start.run.run_group = "id1", "base", "lr 1"
    records = [start, Record(output_raw={"line": "x" * 32_700})]  # so that the next record is cut in two
    for call in range(3):
        values = {"train/loss": 3.0 - call, "trainer/global_step": 10 * call, "_step": call, "name": "x"}
        items = [{"key": key, "value_json": json.dumps(value)} for key, value in values.items()]
        records.append(Record(history={"item": [*items, {"nested_key": ["val", "loss"], "value_json": "NaN"}]}))
    folder = tmp_path / "wandb" / "offline-run-20260101_000000-id1"
    file = wandb_file(folder / "run-id1.wandb", records)
    written(folder / "files" / "output.log", "step 0 loss 3.0\n")
    (run,) = import_logs([tmp_path / "wandb"], tmp_path / "runs", name="w").runs
    assert (run.architecture, run.info["log"]["name"]) == ("lr 1", "base id1")
    table = run.telemetry().pivot_table(index="step", columns="metric", values="value", dropna=False)
    assert table["train_loss"].to_dict() == {0: 3.0, 10: 2.0, 20: 1.0}
    assert table["validation_loss"].isna().all()
    whole = file.read_bytes()
    assert one(written(file, whole[:-9]))["train_loss"] == {0: 3.0, 10: 2.0}, "the last record is cut off"
    with pytest.raises(BadData, match="damaged at byte"):
        one(written(file, whole[:-9] + b"123456789"))


def test_a_resumed_wandb_run_is_one_run_and_steps_that_begin_again_in_each_epoch_are_refused(tmp_path):
    Record = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="extra wandb").Record

    def folder(name, rows, *names):
        records = [Record(run={"run_id": "my-run", "display_name": name}) for name in names]
        items = [[{"key": key, "value_json": json.dumps(value)} for key, value in row.items()] for row in rows]
        history = [Record(history={"item": item}) for item in items]
        wandb_file(tmp_path / "wandb" / name / "run-my-run.wandb", [records[0], *history, *records[1:]])

    folder(
        "offline-run-20260101_000000-my-run", [{"loss": 3.0, "step": 0}, {"loss": 2.0, "step": 9}], "", "named later"
    )
    folder("offline-run-20260101_000000-my-run-1", [{"loss": 1.0, "step": 5}, {"loss": 0.5, "step": 10}], "")
    written(tmp_path / "wandb" / "offline-run-20260101_000000-my-run-1" / "files" / "output.log", "step 5 loss 9.0\n")
    expected = {"named later my-run": {"train_loss": {0: 3.0, 5: 1.0, 10: 0.5}}}
    assert imported(tmp_path / "wandb", tmp_path) == expected
    rows = [{"loss": 3.0, "step": step, "epoch": epoch} for epoch in (0, 1) for step in (0, 9)]
    folder("run-20260102_000000-x", rows, "x")
    with pytest.raises(BadData, match="begin again in epoch 1"):
        imported(tmp_path / "wandb" / "run-20260102_000000-x", tmp_path)


@pytest.mark.parametrize("name", ["lr", "width", "dataset", "rank"])
def test_parts_of_a_table_that_a_column_tells_apart_are_no_seeds(tmp_path, name):
    rows = [f"{value},{step},{3 - value},{step}" for value in (1, 2) for step in (0, 10, 20)]
    file = written(tmp_path / "a.csv", f"{name},step,val_loss,seconds\n" + "\n".join(rows) + "\n")
    with pytest.raises(BadData, match=f"begin again where {name} changes"):
        curves(file)
    descending = written(tmp_path / "b.csv", f"{name},step,val_loss\n3,20,1\n2,10,2\n1,0,3\n")
    assert one(descending)["validation_loss"] == {0: 3.0, 10: 2.0, 20: 1.0}


def test_runs_of_one_name_are_kept_apart_by_their_seed(tmp_path):
    rows = [f"base,{seed},{step},{seed + 2}" for step in (0, 10) for seed in (0, 1)]
    runs, _ = curves(written(tmp_path / "a.csv", "run,seed,step,val_loss\n" + "\n".join(rows) + "\n"))
    assert runs == [{"validation_loss": {0: 2.0, 10: 2.0}}, {"validation_loss": {0: 3.0, 10: 3.0}}]


def test_nan_in_place_of_an_empty_cell_is_no_number_and_nan_of_a_broken_run_is(tmp_path):
    table = "step,train_loss,val_loss\n0,3.0,nan\n10,nan,3.5\n20,2.0,nan\n30,nan,2.5\n40,nan,nan\n"
    run = one(written(tmp_path / "a.csv", table))
    assert {step: value for step, value in run["train_loss"].items() if value == value} == {0: 3.0, 20: 2.0}
    assert {name: list(curve) for name, curve in run.items()} == {
        "train_loss": [0, 20, 40],
        "validation_loss": [10, 30, 40],
    }


def test_a_training_loss_summed_over_micro_batches_is_pointed_out(tmp_path):
    for factor, words in ((4.1, "about 4.1 times"), (0.25, "about 0.25 times"), (1.2, None)):
        rows = "".join(f"{step},{factor * (3 - step / 10)},{3 - step / 10}\n" for step in range(5))
        _, numbers = curves(written(tmp_path / "a.csv", "step,train_loss,val_loss\n" + rows))
        assert [words in note for note in numbers.notes] == [True] * (words is not None)


def test_a_run_whose_steps_are_its_epochs_is_left_out(tmp_path):
    for first, read in ((1, False), (9, True)):
        rows = [{"_step": i, "epoch": i + first, "loss": 3 - i / 10} for i in range(4)]
        runs, numbers = curves(written(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))
        assert (bool(runs), "the steps count epochs; log the optimiser step" in numbers.skipped) == (read, not read)
    mlflow_run(tmp_path / "mlruns" / "1" / "a", {"loss": [(9 + step, 3.0, step) for step in range(4)]})
    written(tmp_path / "mlruns" / "1" / "a" / "params" / "epochs", "4")
    with pytest.raises(BadData, match="the steps count epochs"):
        imported(tmp_path / "mlruns", tmp_path)


def test_json_lines_have_one_counter_of_steps(tmp_path):
    rows = [{"_step": 0, "lr": 0.5}]
    rows += [{"_step": i + 1, "trainer/global_step": 100 * i, "train/loss": 3.0 - i} for i in range(3)]
    rows += [{"_step": 4, "system": 1.0}, {"_step": 5, "trainer/global_step": 300, "train/loss": 0.5}]
    file = written(tmp_path / "history.jsonl", "\n".join(map(json.dumps, rows)) + "\n")
    assert one(file) == {"train_loss": {0: 3.0, 100: 2.0, 200: 1.0, 300: 0.5}}


def mlflow_run(folder, metrics, tags=()):
    """Write a run of MLflow with lines (time, value, step) for each metric."""
    written(folder / "meta.yaml", f"run_id: {folder.name}\nexperiment_id: '1'\n")
    for name, rows in metrics.items():
        written(folder / "metrics" / name, "".join(f"{time} {value} {step}\n" for time, value, step in rows))
    for name, text in tags:
        written(folder / "tags" / name, text)


def test_a_parent_of_mlflow_is_the_setting_of_its_child_runs_and_no_run(tmp_path):
    experiment, parent = tmp_path / "mlruns" / "1", [("mlflow.parentRunId", "search")]
    mlflow_run(experiment / "search", {"val_loss": [(99, 2.0, 30)]})
    for run, loss in {"a": 2.0, "b": 3.0}.items():
        mlflow_run(experiment / run, {"val_loss": [(50, loss, 10), (60, loss - 1, 20)]}, parent)
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as store, store:
        store.execute("CREATE TABLE experiments (experiment_id INTEGER, name TEXT)")
        store.execute("CREATE TABLE runs (run_uuid TEXT, name TEXT, experiment_id INTEGER, lifecycle_stage TEXT)")
        store.execute("CREATE TABLE tags (key TEXT, value TEXT, run_uuid TEXT)")
        store.execute("CREATE TABLE metrics (key TEXT, value REAL, timestamp INT, run_uuid TEXT, step INT, is_nan INT)")
        store.execute("INSERT INTO experiments VALUES (1, '1')")
        store.executemany("INSERT INTO runs VALUES (?, NULL, 1, 'active')", [("search",), ("a",), ("b",)])
        store.executemany("INSERT INTO tags VALUES ('mlflow.parentRunId', 'search', ?)", [("a",), ("b",)])
        rows = [(2.0, 99, "search", 30), (2.0, 50, "a", 10), (1.0, 60, "a", 20), (3.0, 50, "b", 10), (2.0, 60, "b", 20)]
        store.executemany("INSERT INTO metrics VALUES ('val_loss', ?, ?, ?, ?, 0)", rows)
    for place in ("mlruns", "mlflow.db"):
        result = import_logs([tmp_path / place], tmp_path / "runs", name=f"of-{place}")
        values = {r.info["log"]["name"]: (r.architecture, r.telemetry()["value"].tolist()) for r in result.runs}
        assert values == {"a": ("1/search", [2.0, 1.0]), "b": ("1/search", [3.0, 2.0])}
        assert any("search has child runs" in note for note in result.notes)


def test_a_run_of_mlflow_that_is_deleted_between_two_imports_is_left_out(tmp_path):
    for run in ("a", "b"):
        mlflow_run(tmp_path / "mlruns" / "1" / run, {"loss": [(9, 2.0, 10)]})
    assert set(imported(tmp_path / "mlruns", tmp_path)) == {"a", "b"}
    meta = tmp_path / "mlruns" / "1" / "b" / "meta.yaml"
    written(meta, meta.read_text() + "lifecycle_stage: deleted\n")
    assert set(imported(tmp_path / "mlruns", tmp_path / "again")) == {"a"}


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([(2000, 2.2, 0)], "has step 0 when train_loss has step 40"),  # no step was given
        ([(1000 + s, 3.0, s * 524_288) for s in range(0, 50, 10)], "has step 5,242,880 when train_loss has step 0"),
        ([(1000 + 5 * s, 3.0, s) for s in (2, 4, 6)], None),  # within two logging intervals
    ],
)
def test_steps_of_one_time_that_differ_between_quantities_are_no_steps(tmp_path, rows, why):
    run = tmp_path / "mlruns" / "1" / "a"
    mlflow_run(run, {"loss": [(1000 + s, 3 - s / 100, s) for s in range(0, 50, 10)], "val_loss": rows})
    result = import_logs([tmp_path / "mlruns"], tmp_path / "runs", name="m")
    assert ("validation_loss" in set(result.runs[0].telemetry()["metric"])) == (why is None)
    assert why is None or any(why in note for note in result.notes)


def test_epochs_that_are_not_consecutive_are_told_from_steps_by_their_time(tmp_path):
    values = [("loss", 3.0, s, 1000 + s) for s in range(0, 500, 10)]
    with event_file(tmp_path / "tb", []) as writer:
        for tag, value, step, time in [*values, *(("val_loss", 2.0, epoch, 1000 + 50 * epoch) for epoch in (1, 3, 5))]:
            writer.add_scalar(tag, value, step, walltime=time)
    assert imported(tmp_path / "tb", tmp_path) == {"tb": {"train_loss": dict.fromkeys(range(0, 500, 10), 3.0)}}


def test_numbers_without_a_step_and_the_mean_of_a_training_are_no_curve(tmp_path):
    event_file(tmp_path / "tb", [("val/loss", 2.5, 0)]).close()
    with pytest.raises(BadData, match="the run has step 0 only"):
        imported(tmp_path / "tb", tmp_path)
    mlflow_run(tmp_path / "mlruns" / "1" / "a", {"train_loss": [(9, 2.5, 300)], "train_runtime": [(9, 60.0, 300)]})
    with pytest.raises(BadData, match="is the mean over the training"):
        imported(tmp_path / "mlruns", tmp_path)


def test_a_restart_voids_the_numbers_of_its_own_folder(tmp_path):
    event_file(tmp_path / "tb" / "train", [("loss", 3.0, step) for step in range(0, 60, 10)]).close()
    event_file(tmp_path / "tb" / "val", [("loss", 4.0, 50)]).close()
    event_file(tmp_path / "tb" / "train", [("loss", 1.0, 45)], purge_step=30, filename_suffix=".b").close()
    expected = {"train_loss": {0: 3.0, 10: 3.0, 20: 3.0, 45: 1.0}, "validation_loss": {50: 4.0}}
    assert imported(tmp_path / "tb", tmp_path) == {"tb": expected}


@pytest.mark.parametrize("final", [[], [{"step": 40, "eval_loss": 9.0}]])
def test_an_evaluation_after_the_end_of_the_training_is_no_loss_of_its_last_step(tmp_path, final):
    rows = [{"step": step, "eval_loss": 3 - step / 100} for step in (10, 20, 30)] + final
    summary = {"step": 40, "train_runtime": 9.0, "train_loss": 2.8}
    last = {"step": 40, "eval_loss": 2.7}  # of the best checkpoint, of step 30
    expected = {10: 2.9, 20: 2.8, 30: 2.7} | {row["step"]: row["eval_loss"] for row in final}
    state = written(tmp_path / "trainer_state.json", json.dumps({"log_history": [*rows, summary, last]}))
    assert one(state) == {"validation_loss": expected}
    names = {"step": "train/global_step", "eval_loss": "eval/loss", "train_runtime": "train/train_runtime"}
    lines = [{names.get(name, name): value for name, value in row.items()} for row in [*rows, summary, last]]
    export = written(tmp_path / "history.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert one(export)["validation_loss"] == expected
