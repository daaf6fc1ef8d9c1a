"""Which training logs are one training, which are seeds of one setting, and which seeds they have."""

import math

import pytest
from test_training_logs import written

from workbench.runs.log_import import import_logs


def test_files_of_one_training_are_one_seed(tmp_path):
    losses = {step: 5 - step / 100 + math.sin(step) / 50 for step in range(200)}
    written(tmp_path / "a" / "out.log", "".join(f"step {s} loss {losses[s]:.4f}\n" for s in range(0, 200, 10)))
    written(tmp_path / "a" / "m.csv", "step,loss\n" + "".join(f"{s},{loss}\n" for s, loss in losses.items()))
    for rank in (0, 1):
        rows = "".join(f"step {s} loss {loss + rank / 50:.4f}\n" for s, loss in losses.items())
        written(tmp_path / "b" / f"rank{rank}.log", rows)
    result = import_logs([tmp_path / "a", tmp_path / "b"], tmp_path / "runs", name="n")
    names = [run.info["log"]["name"] for run in result.runs]
    assert names == ["m.csv", "rank0.log"]
    assert any("with the losses of another log of their setting: out.log" in note for note in result.notes)
    assert any("b/rank1.log (another rank than 0)" in note for note in result.notes)


def test_logs_that_are_no_seeds_of_one_setting_are_pointed_out(tmp_path):
    for version, (first, rate) in enumerate(((0, 0.1), (60, 0.2))):
        rows = "".join(f"0,{step},{5 - step / 100},{rate}\n" for step in range(first, first + 51, 10))
        written(tmp_path / "logs" / f"version_{version}" / "metrics.csv", "epoch,step,train_loss,lr\n" + rows)
    notes = import_logs([tmp_path / "logs"], tmp_path / "runs", name="n").notes
    assert any("version_1 begins at step 60, after the end of version_0" in note for note in notes)
    assert any("learning rates of its runs reach 0.1 to 0.2 but count as seeds" in note for note in notes)


def test_runs_have_the_seeds_that_their_logs_name_and_are_paired_by_them(tmp_path):
    luck = {1: 0.0, 2: 0.5, 3: 1.0}
    runs = [("transformer", seed, 3 + luck[seed]) for seed in (1, 2, 3)]
    runs += [("resformer", seed, 2.9 + luck[seed]) for seed in (2, 3)]
    rows = "".join(f"{model},{seed},{step},{loss - step / 100}\n" for model, seed, loss in runs for step in (0, 10))
    written(tmp_path / "t.csv", "model,seed,step,val_loss\n" + rows)
    for model, seed, loss in runs:
        written(tmp_path / "logs" / model / f"seed_{seed}.log", f"step 0 val_loss 9\nstep 10 val_loss {loss - 0.1}\n")
    for place in ("t.csv", "logs"):
        imported = import_logs([tmp_path / place], tmp_path / "runs", name=f"of-{place}").runs
        losses = {(run.architecture, run.seed): run.telemetry()["value"].iloc[-1] for run in imported}
        assert losses == pytest.approx({(model, seed): loss - 0.1 for model, seed, loss in runs})
    written(tmp_path / "twice" / "seed1" / "a.log", "step 1 loss 2\n")
    written(tmp_path / "twice" / "seed1" / "b.log", "step 1 loss 3\n")
    assert [run.seed for run in import_logs([tmp_path / "twice"], tmp_path / "runs", name="twice").runs] == [0, 1]


def test_a_log_that_begins_inside_another_one_is_pointed_out(tmp_path):
    for name, steps in {"first": range(0, 11), "second": range(8, 21), "other": range(0, 21)}.items():
        written(tmp_path / "logs" / f"{name}.log", "".join(f"step {i} loss {9 - i / len(name)}\n" for i in steps))
    notes = import_logs([tmp_path / "logs"], tmp_path / "runs").notes
    assert [note for note in notes if "begins" in note] == [
        "second.log begins at step 8, inside first.log; if it continues that run, join the files, else they count as two seeds"
    ]
