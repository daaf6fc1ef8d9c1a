"""Numbers that a recorder sends on arrive in the files of W&B's and TensorBoard's own clients."""

from __future__ import annotations

import importlib.util
import json
import struct
import time
from types import SimpleNamespace

import pandas as pd
import pytest
from own_loop import loop
from recordings import rows

from workbench import Recorder
from workbench.errors import UnknownName, WorkbenchError

ONE = ["gradient_norm"]


def of_tensorboard(folder):
    """(tag, step) -> value of event files: TFRecords of a length, its checksum, an event and its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for file in (folder / "tensorboard").iterdir():
        data = file.read_bytes()
        while data:
            length = struct.unpack("<Q", data[:8])[0]
            event = Event.FromString(data[12 : 12 + length])
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            data = data[16 + length :]
    return found


def of_wandb(folder):
    """History of an offline run, once its process has written the end; short records of LevelDB's log format behind seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    for _ in range(100):
        data, records = file.read_bytes()[7:], []
        while len(data) > 7 and len(data) >= 7 + (length := struct.unpack("<IHB", data[:7])[1]):
            records.append(Record.FromString(data[7 : 7 + length]))
            data = data[7 + length :]
        if records and records[-1].WhichOneof("record_type") == "exit":
            break
        time.sleep(0.1)
    rows = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


def test_tensorboard_has_every_number_of_the_folder(gpt, tmp_path):
    with Recorder(gpt, 2, tmp_path / "r", quantities=ONE, to="tensorboard") as recorder:
        loop(gpt, recorder, 4)
        recorder.note("mine", 0.5)
    kept, sent = rows(tmp_path / "r", "gradient_norm"), of_tensorboard(tmp_path / "r")
    assert sent["workbench/mine", 4] == 0.5
    for part, layer, step, value in kept[["part", "layer", "step", "value"]].itertuples(index=False):
        place = "all" if part == "all" else part if pd.isna(layer) else f"{part}/{layer}"
        assert sent[f"workbench/gradient_norm/{place}", step] == pytest.approx(value)
    assert sum(name.startswith("workbench/gradient_norm") for name, _ in sent) == len(kept) > 4


@pytest.mark.slow  # the client starts a server of its own
def test_wandb_gets_an_offline_run_where_none_is_open(gpt, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with Recorder(gpt, 2, tmp_path / "r", quantities=ONE, to=["wandb"]) as recorder:
        loop(gpt, recorder, 4)
    import wandb

    assert wandb.run is None
    history = of_wandb(tmp_path / "r")
    assert [row["workbench/step"] for row in history] == [0, 2]
    kept = rows(tmp_path / "r", "gradient_norm", part="all")["value"]
    assert [row["workbench/gradient_norm/all"] for row in history] == pytest.approx(list(kept))


@pytest.mark.slow
def test_a_wandb_run_of_the_loop_is_written_to_and_stays_open(gpt, tmp_path, monkeypatch):
    import wandb

    logged = []
    run = SimpleNamespace(log=logged.append, define_metric=lambda *_, **__: None)  # without `finish`
    monkeypatch.setattr(wandb, "run", run)
    with Recorder(gpt, 1, tmp_path / "r", quantities=ONE, to="wandb") as recorder:
        loop(gpt, recorder, 2)
    assert [row["workbench/step"] for row in logged] == [0, 1]
    assert not (tmp_path / "r" / "wandb").exists()


def test_unknown_sinks_and_missing_clients_are_refused_before_a_folder_is_made(gpt, tmp_path, monkeypatch):
    with pytest.raises(UnknownName, match="unknown sink 'wanbd'; did you mean wandb"):
        Recorder(gpt, 1, tmp_path / "r", to="wanbd")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(WorkbenchError, match=r"to='tensorboard' needs its client: pip install '.*\[tensorboard\]'"):
        Recorder(gpt, 1, tmp_path / "r", to="tensorboard")
    assert not (tmp_path / "r").exists()
