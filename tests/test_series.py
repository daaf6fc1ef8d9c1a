"""Checkpoints of one training: as a series of steps, and imported as a run."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest
import torch
from foreign import IDS, nanogpt, same
from transformers import AutoModelForCausalLM  # fmt: skip

import workbench
from workbench.checkpoints.paths import CONFIG, series, step_in_name
from workbench.errors import ArchitectureAssumed, BadCheckpoint, WorkbenchError
from workbench.runs.checkpoint_import import import_run
from workbench.runs.run import list_runs


@pytest.fixture
def trained(tiny, tmp_path):
    """Three steps as files of a script, beside what is no checkpoint."""
    folder = tmp_path / "out"
    folder.mkdir()
    for step in (20, 3, 100):
        torch.save(nanogpt(tiny("resformer", seed=step), iter_num=step), folder / f"ckpt_{step}.pt")
    torch.save({}, folder / "optimizer_100.pt")
    (folder / "notes_7.txt").write_text("")
    return folder


def test_a_series_is_a_folder_a_glob_or_a_pattern_sorted_by_number(trained):
    expected = [(s, trained / f"ckpt_{s}.pt") for s in (3, 20, 100)]
    assert series(trained) == expected
    assert series(f"{trained}/ckpt_*.pt") == expected
    assert series(rf"{trained}/ckpt_(?P<step>\d+)\.pt") == expected
    assert workbench.series(trained) == expected
    for step, path in expected:
        (trained / f"step{step}").mkdir()
        shutil.copy(path, trained / f"step{step}" / "model.pt")
    assert [s for s, _ in series(f"{trained}/step*/model.pt")] == [3, 20, 100]


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("none_*.pt", "no checkpoint there names its step"),
        (r"(?P<step>\d+", "is no regular expression"),
        (r"ckpt_(?P<step>.*)", r"the step '\d+\.pt' is no whole number"),
        ("ckpt_3.pt", "is no folder, no glob and no pattern"),
    ],
)
def test_a_series_that_is_none_is_refused(trained, where, told):
    with pytest.raises(BadCheckpoint, match=told):
        series(f"{trained}/{where}")


def test_two_checkpoints_of_one_step_are_refused(trained):
    shutil.copy(trained / "ckpt_20.pt", trained / "step_020.pt")
    with pytest.raises(BadCheckpoint, match=r"are both step 20; give a pattern"):
        series(trained)
    (trained / "final.pt").write_bytes(b"")
    with pytest.raises(BadCheckpoint, match=r"final\.pt does not name its step"):
        series(f"{trained}/*.pt")


@pytest.mark.parametrize("name", ["step_10k", "step_2.5M", "ckpt-50b_tokens"])
def test_a_step_with_a_unit_is_refused_and_not_cut_to_its_number(trained, name):
    shutil.copy(trained / "ckpt_20.pt", trained / f"{name}.pt")
    with pytest.raises(BadCheckpoint, match=rf"{name}\.pt: the step has a unit or is rounded"):
        series(trained)
    assert step_in_name(trained / f"{name}.pt") is None
    assert step_in_name(trained / "model_7b.pt") is None


@pytest.mark.slow
def test_an_imported_series_is_a_run_that_loads_and_measures(trained, tmp_path, tiny):
    runs = tmp_path / "runs"
    run = import_run(
        trained, runs, name="theirs", architecture="resformer", seed=5, config={"rms_norm_eps": 1e-5, "rope_theta": 1e4}
    )
    assert (run.name, run.architecture, run.steps, run.seed, run.finished) == (
        "theirs",
        "resformer",
        [3, 20, 100],
        5,
        True,
    )
    assert [r.name for r in list_runs(runs)[0]] == ["theirs"]
    with pytest.raises(BadCheckpoint, match=r"it holds runs: give one of them, as .*theirs"):
        workbench.load(runs)
    assert torch.equal(workbench.load(runs / "theirs", step=20)(IDS), tiny("resformer", seed=20)(IDS))
    frame = workbench.measure(run, "loss", IDS, steps="all")
    assert list(frame["step"]) == [3, 20, 100]
    origin = json.loads((runs / "theirs" / "step_000020" / CONFIG).read_text())["workbench"]["origin"]
    assert (origin["format"], list(origin["sha256"])) == ("nanoGPT", ["ckpt_20.pt"])
    with pytest.raises(BadCheckpoint, match="imported run was trained on; give data="):
        workbench.measure(run, "loss")
    with pytest.raises(WorkbenchError, match="exists; choose another name"):
        import_run(trained, runs, name="theirs")


@pytest.mark.slow
def test_an_import_that_fails_leaves_nothing(trained, tmp_path, tiny):
    torch.save(nanogpt(tiny(seed=1, config={"d_mlp": 24}), iter_num=200), trained / "ckpt_200.pt")
    with pytest.raises(BadCheckpoint, match="are not steps of one model: config"):
        import_run(
            trained, tmp_path / "runs", architecture="resformer", config={"rms_norm_eps": 1e-5, "rope_theta": 1e4}
        )
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
def test_import_and_export_from_the_command_line(tiny, tmp_path):
    from typer.testing import CliRunner

    from workbench.cli import app

    def command(*arguments):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ArchitectureAssumed)
            return CliRunner().invoke(app, [str(argument) for argument in arguments])

    torch.save(nanogpt(tiny()), tmp_path / "ckpt.pt")
    runs = tmp_path / "runs"
    done = command("import", tmp_path / "ckpt.pt", "--name", "mine", "--architecture", "transformer", "--runs", runs)
    assert done.exit_code == 0, done.output
    assert [run.steps for run in list_runs(runs)[0]] == [[500]]
    done = command("export", runs / "mine", tmp_path / "plain")
    assert done.exit_code == 0, done.output
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    same(lambda ids: llama(ids).logits, tiny()(IDS))
    done = command("import", tmp_path / "ckpt.pt", "--name", "../mine", "--runs", runs)
    assert "one plain folder name" in str(done.exception)


def test_a_checkpoint_that_names_no_step_is_kept_as_step_0(tiny, tmp_path):
    state = nanogpt(tiny())
    del state["iter_num"]
    torch.save(state, tmp_path / "final.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ArchitectureAssumed)
        run = import_run(tmp_path / "final.pt", tmp_path / "runs", architecture="transformer")
    assert (run.name, run.steps, run.train.steps, run.finished) == ("final", [0], 1, True)
