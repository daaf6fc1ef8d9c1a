"""Files of W&B, TensorBoard and MLflow become runs without weights, as text logs do."""

import json
import sqlite3
import struct
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
        written(tmp_path / "mlruns" / "1" / run / "metrics" / "loss", "17 4.5 0\n18 nan 100\n")
        written(tmp_path / "mlruns" / "1" / run / "artifacts" / "out.log", "step 5 loss 2.0\n")
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as store, store:
        store.execute("CREATE TABLE experiments (experiment_id INTEGER, name TEXT)")
        store.execute("CREATE TABLE runs (run_uuid TEXT, name TEXT, experiment_id INTEGER, lifecycle_stage TEXT)")
        store.execute("CREATE TABLE metrics (key TEXT, value REAL, timestamp INT, run_uuid TEXT, step INT, is_nan INT)")
        store.execute("INSERT INTO experiments VALUES (1, 'Own ''name''')")
        store.executemany("INSERT INTO runs VALUES (?, 'base', 1, ?)", [("abc", "active"), ("old", "deleted")])
        rows = [
            ("loss", v, 17, run, step, nan) for run in ("abc", "old") for v, step, nan in ((4.5, 0, 0), (0, 100, 1))
        ]
        store.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", rows)
    for store in ("mlruns", "mlflow.db"):
        (run,) = import_logs([tmp_path / store], tmp_path / "runs", name=f"of-{store}").runs
        assert (run.architecture, run.info["log"]["name"]) == ("Own 'name'", "base abc")
        assert run.telemetry()["value"].isna().tolist() == [False, True], "MLflow stores 0 in place of NaN"


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
