"""The folder of a recorder: listed, continued, refused, readable after a kill, and drawn on the Training page."""

from __future__ import annotations

import multiprocessing
import signal
import time

import pytest
from own_loop import GPT, PLAIN, loop
from recordings import record_for_ever, rows

from workbench import Recorder
from workbench.cli.list_tables import listing
from workbench.errors import WorkbenchError
from workbench.measurement.measuring import measure
from workbench.runs.run import Run, is_locked, list_runs
from workbench.training.recorder.recorder import SPAN


def test_a_recording_is_listed_as_a_run(gpt, tmp_path):
    recorder = Recorder(gpt, 2, tmp_path / "mine", quantities=PLAIN, seed=3)
    loop(gpt, recorder, 5)
    assert is_locked(tmp_path / "mine")
    assert listing("runs", tmp_path)[0][0]["state"] == "training"
    recorder.close()
    found, problems = list_runs(tmp_path)
    assert not problems
    (run,) = found
    assert (run.recorded, run.finished, run.steps, run.seed, run.architecture) == (True, True, [], 3, "GPT")
    (row,), _ = listing("runs", tmp_path)
    assert (row["run"], row["steps"], row["state"]) == ("mine", "4 recorded", "finished")
    with pytest.raises(WorkbenchError, match="holds no checkpoints"):
        measure(run, "loss")


def test_it_goes_on_in_the_same_folder_where_it_is_told(gpt, tmp_path):
    """Steps 0..5, then again from 3: the same rows as without the interruption."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    start = {n: p.detach().clone() for n, p in gpt.named_parameters()}
    with Recorder(gpt, 1, straight, quantities=PLAIN) as recorder:
        loop(gpt, recorder, 6)
    gpt.load_state_dict(start)
    with Recorder(gpt, 1, broken, quantities=PLAIN) as recorder:
        loop(gpt, recorder, 3)
        halfway = {n: p.detach().clone() for n, p in gpt.named_parameters()}
        loop(gpt, recorder, 2, first=3)
    gpt.load_state_dict(halfway)
    with pytest.raises(WorkbenchError, match=r"up to step 4; say start= \(0 begins anew, 5 goes on\)"):
        Recorder(gpt, 1, broken, quantities=PLAIN)
    with Recorder(gpt, 1, broken, quantities=PLAIN, start=3) as recorder:
        loop(gpt, recorder, 3, first=3)
    keys = ["step", "metric", "part", "site", "layer", "value"]
    first, second = (Run.open(p).telemetry() for p in (straight, broken))
    kept = [f[~f["metric"].isin(["seconds_per_step", "recorder_share"])][keys].reset_index(drop=True) for f in (first, second)]  # fmt: skip
    assert kept[0].equals(kept[1])
    with Recorder(gpt, 1, broken, quantities=PLAIN, start=0) as recorder:
        loop(gpt, recorder, 1)
    assert set(Run.open(broken).telemetry()["step"]) == {0}


@pytest.mark.slow
def test_long_recordings_have_few_files(gpt, tmp_path):
    with Recorder(gpt, 1, tmp_path / "r", quantities=["gradient_norm"]) as recorder:
        loop(gpt, recorder, 2 * SPAN + 3)
    assert len(Run.open(tmp_path / "r").telemetry_parts()) == 3
    assert rows(tmp_path / "r", "gradient_norm", part="all")["step"].tolist() == list(range(2 * SPAN + 3))


def test_foreign_folders_and_other_models_are_refused(gpt, tmp_path):
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "run.json").write_text('{"architecture": "resformer"}')
    with pytest.raises(WorkbenchError, match="training's run"):
        Recorder(gpt, 1, tmp_path / "trained", quantities=PLAIN)
    Recorder(gpt, 1, tmp_path / "r", quantities=PLAIN).close()
    with pytest.raises(WorkbenchError, match="another model"):
        Recorder(GPT(layers=3), 1, tmp_path / "r", quantities=PLAIN)
    assert not is_locked(tmp_path / "r")


def test_a_recorder_that_is_never_closed_writes_its_rows(gpt, tmp_path):
    recorder = Recorder(gpt, 1, tmp_path / "r", quantities=["gradient_norm"])
    loop(gpt, recorder, 4)
    del recorder
    assert set(rows(tmp_path / "r", "train_loss")["step"]) == {0, 1, 2}, "the last waited for its update"
    assert not is_locked(tmp_path / "r")


def test_a_killed_process_leaves_a_readable_folder(gpt, tmp_path, forkserver):
    process = multiprocessing.get_context().Process(target=record_for_ever, args=(tmp_path,))
    process.start()
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.is_alive():
        if list(tmp_path.glob("r/telemetry/*.parquet")) and Run.open(tmp_path / "r").telemetry()["step"].max() > 0:
            break
        time.sleep(0.1)
    process.kill()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    run = Run.open(tmp_path / "r")
    steps = sorted(run.telemetry()["step"].unique())
    assert steps[:2] == [0, 1]
    with Recorder(gpt, 1, tmp_path / "r", quantities=PLAIN, start=int(steps[-1]) + 1) as recorder:
        loop(gpt, recorder, 2)
    assert int(run.telemetry()["step"].max()) == steps[-1] + 2


def test_only_as_much_is_written_as_a_hundredth_of_the_time(gpt, tmp_path, monkeypatch):
    recorder = Recorder(gpt, 1, tmp_path / "r", quantities=["gradient_norm"])
    writes = []
    monkeypatch.setattr(
        "workbench.training.recorder.recorder.write_parquet", lambda frame, path: writes.append(len(frame))
    )
    loop(gpt, recorder, SPAN - 2)
    assert len(writes) == 1, "the first at once, the others when a second has passed"
    recorder.folder.tried -= 1000.0
    loop(gpt, recorder, 1)
    assert len(writes) == 2
    recorder.close()
