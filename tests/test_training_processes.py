"""Trainings in other processes: killed, stopped, doubled, out of disk, and what is refused before a folder exists."""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import pandas as pd
import pytest
import torch
from training_runs import CHILD, MODEL, RECIPE, child, last_word, start, telemetry, weights

from workbench.config import ModelConfig
from workbench.data.data_sources import BackcopyData, RepeatedData, prepare
from workbench.errors import BadCheckpoint, BadData, UnknownName, WorkbenchError
from workbench.measurement.measuring import measure
from workbench.models import build
from workbench.runs.run import Run, is_locked
from workbench.training.loop import train


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": MODEL.replace(d_vocab=32)}, "d_vocab=32"),
        ({"recipe": RECIPE.replace(T=128)}, "n_ctx=64"),
        ({"recipe": RECIPE.replace(T=15)}, "even length"),
        ({"checkpoints": [99]}, "99"),
        ({"seed": -1}, "seed"),
        ({"name": "../up"}, "plain folder name"),
        ({"lambda_v": 1.0}, "lambda_v1"),
        ({"architecture": "resfromer"}, "resformer"),
        ({"recipe": RECIPE.replace(lr_factors={"block.0.*": 5})}, r"unknown pattern .*'block\.0\.\*'"),
        ({"recipe": RECIPE.replace(lr_factors={"blocks.0.*": 5, "*.attn.*": 2})}, "both fit blocks.0.attn"),
    ],
)
def test_what_cannot_be_trained_leaves_nothing_behind(tmp_path, changes, says):
    with pytest.raises(WorkbenchError, match=says):
        start(tmp_path, **changes)
    assert not list(tmp_path.rglob("run.json"))


def test_other_settings_under_one_name_are_refused(tmp_path, uninterrupted):
    root = uninterrupted.path.parent
    before = weights(uninterrupted)
    for changes in ({"seed": 1}, {"recipe": RECIPE.replace(lr=1e-3)}, {"data": RepeatedData(32)}, {"lambda_v1": 0.7}):
        with pytest.raises(WorkbenchError, match="exists with another"):
            start(root, "resformer", **changes)
    assert weights(uninterrupted) == before
    with pytest.raises(UnknownName):
        start(root, "resformer", lambda_v9=1)


def test_a_loss_that_is_no_number_is_told_and_kept_nowhere(tmp_path):
    wild = RECIPE.replace(lr=1e30, clip=0.0, warmup=0)
    with pytest.raises(WorkbenchError, match=r"the loss is .* (nan|inf).* lower lr") as kept:
        start(tmp_path, recipe=wild, checkpoints=range(9))
    assert not is_locked(tmp_path / "resformer"), f"though a notebook keeps {kept.type}"
    run = Run.open(tmp_path / "resformer")
    assert all(p.isfinite().all() for p in run.load().parameters())


def test_a_damaged_resume_point_is_named(tmp_path):
    run = start(tmp_path)
    state = run.path / "resume" / "state.safetensors"
    whole = state.read_bytes()
    for folder in ("step_000008",):
        (run.path / folder / "config.json").unlink()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])  # one bit of one tensor
    for damaged in (whole[: len(whole) // 2], b"", b"\0" * 100, flipped):
        state.write_bytes(damaged)
        with pytest.raises(BadCheckpoint, match=r"state\.safetensors is damaged"):
            start(tmp_path)
    state.write_bytes(whole)
    assert start(tmp_path).finished


def test_a_folder_in_use_is_refused_at_once(tmp_path, uninterrupted, forked):
    lock = uninterrupted.writing()
    try:
        (uninterrupted.step_folder(8) / "config.json").rename(tmp_path / "config.json")
        process, heard = forked(uninterrupted.path.parent)
        assert "another process" in last_word(process, heard)
        assert process.exitcode == 1
    finally:
        (tmp_path / "config.json").rename(uninterrupted.step_folder(8) / "config.json")
        lock.release()


@pytest.mark.parametrize("attempt", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_bit_by_bit(tmp_path, uninterrupted, forked, attempt):
    """kill -9 at random moments, the last one in the middle of writing as likely as not."""
    moments = random.Random(attempt)
    for _ in range(2):
        process, heard = forked(tmp_path, pause=0.2)
        for _ in range(moments.randint(1, 2)):
            heard.recv()
        time.sleep(moments.random() * 0.2)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    (tmp_path / "resformer" / "resume" / ".state.safetensors.dead.part").write_bytes(b"half")
    run = start(tmp_path)
    assert weights(run) == weights(uninterrupted)
    assert weights(run, 0) == weights(uninterrupted, 0)
    pd.testing.assert_frame_equal(telemetry(run), telemetry(uninterrupted))
    assert not list(run.path.rglob("*.part"))


def test_ctrl_c_ends_with_everything_written(tmp_path, uninterrupted, forked):
    process, heard = forked(tmp_path, pause=0.3)
    heard.recv()
    os.kill(process.pid, signal.SIGINT)
    said = last_word(process, heard)
    assert process.exitcode == 130
    run = Run.open(tmp_path / "resformer")
    stopped = int(said.rsplit("stopped after step ", 1)[1].split()[0])
    assert 0 < stopped < RECIPE.steps
    assert run.telemetry("metric == 'train_loss'")["step"].max() == stopped - 1
    assert weights(start(tmp_path)) == weights(uninterrupted)
    pd.testing.assert_frame_equal(telemetry(run), telemetry(uninterrupted))


@pytest.mark.skipif(sys.platform == "win32", reason="RLIMIT_FSIZE is POSIX")
def test_a_full_disk_is_told_and_leaves_nothing_half_written(tmp_path, forked):
    """The weights fit, the resume point with its moments does not."""
    size = sum(p.numel() for p in build("resformer", MODEL).parameters()) * 4
    process, heard = forked(tmp_path, limit=2 * size)
    said = last_word(process, heard)
    assert process.exitcode == 1
    assert "cannot write" in said
    assert "state.safetensors" in said
    run = Run.open(tmp_path / "resformer")
    assert run.steps == [0]
    run.load(0)
    assert not (run.path / "resume" / "state.safetensors").exists()
    assert not list(run.path.rglob("*.part"))
    assert start(tmp_path).finished


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_two_processes_learn_what_one_learns(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    recipe = RECIPE.replace(steps=20, validate_every=10, save_every=10)
    unequal = CHILD.replace("RepeatedData", "BackcopyData")  # the processes have other numbers of copied tokens
    (tmp_path / "child.py").write_text(unequal)
    process = child(tmp_path / "two", recipe=recipe, before=(*launcher, str(tmp_path / "child.py")))
    _, said = process.communicate(timeout=120)
    one, two = start(tmp_path / "one", data=BackcopyData(), recipe=recipe), Run.open(tmp_path / "two" / "resformer")
    assert two.finished, said  # not the exit code: gloo's threads sometimes abort a process that has done its work
    for (name, mine), theirs in zip(one.load().named_parameters(), two.load().parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5, msg=name)
    columns = ["step", "metric", "part", "layer", "variant", "data"]
    pd.testing.assert_frame_equal(telemetry(one)[columns], telemetry(two)[columns])
    assert telemetry(one)["value"].to_numpy() == pytest.approx(
        telemetry(two)["value"].to_numpy(), abs=1e-4, nan_ok=True
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_training_and_measuring_on_a_gpu(tmp_path):
    recipe = RECIPE.replace(bf16=True)
    run = train("resformer", RepeatedData(), name="gpu", runs=tmp_path, model=MODEL, train=recipe, device="cuda")
    (run.step_folder(8) / "config.json").unlink()
    resumed = train("resformer", RepeatedData(), name="gpu", runs=tmp_path, model=MODEL, train=recipe, device="cuda")
    assert resumed.finished
    on_gpu, on_cpu = (measure(run, "loss", torch.arange(16)[None], device=d) for d in ("cuda", "cpu"))
    assert on_gpu["value"][0] == pytest.approx(on_cpu["value"][0], abs=1e-2)


def test_data_errors_come_first(tmp_path):
    (tmp_path / "book.txt").write_text(
        "\n\n".join(f"line {i} says {i * i % 89} and then stops here" for i in range(900))
    )
    data = prepare(texts=[tmp_path / "book.txt"], vocabulary=280)
    long = ModelConfig(n_layers=1, d_model=16, n_heads=2, d_mlp=8, d_vocab=280, n_ctx=10**6)
    with pytest.raises(BadData, match=r"choose a smaller length|the longest has"):
        start(tmp_path, "transformer", data=data, model=long, recipe=RECIPE.replace(T=500_000))
    assert not (tmp_path / "transformer").exists()
