"""A run folder and its records, written before the modules moved into packages: everything in it opens, and training goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import workbench
from workbench.checkpoints.saving import weights_hash
from workbench.config import TrainConfig
from workbench.data.data_sources import RepeatedData
from workbench.runs.records import load_records
from workbench.training.loop import train

FOLDER = Path(__file__).parent / "golden" / "run_before" / "resformer-before-s0"
FILES = {0: "df9a222858d5aec7", 24: "f24f7960227d35e6"}
"""Content address of each step's files: the names of its tables of records begin with it."""
MODELS = {0: "072b60e55c00e098", 24: "ef5f8bf5e04e05d0"}
"""Content address of each step's model."""


@pytest.fixture
def run(tmp_path):
    """A copy that a test may write into."""
    return workbench.Run.open(shutil.copytree(FOLDER, tmp_path / FOLDER.name))


def test_the_run_says_what_it_is():
    run = workbench.Run.open(FOLDER)
    assert (run.architecture, run.seed, run.steps, run.finished, run.progress) == (
        "resformer",
        0,
        [0, 24],
        True,
        "24/24",
    )
    assert (run.model.n_layers, run.train.T, run.data.hash) == (3, 32, run.info["data"]["hash"])


@pytest.mark.parametrize("step", FILES)
def test_content_addresses_are_what_they_were(step):
    """Records are found by them."""
    run = workbench.Run.open(FOLDER)
    assert run.weights_hash(step) == FILES[step]
    assert any((FOLDER / "records").glob(f"{FILES[step]}-*.parquet"))
    assert weights_hash(run.load(step)) == MODELS[step]


def test_both_steps_load_by_every_path_to_them():
    for step, path in ((0, FOLDER / "step_000000"), (24, FOLDER / "step_000024"), (24, FOLDER)):
        model = workbench.load(path)
        assert weights_hash(model) == MODELS[step]
        assert (model.architecture, model.options["lambda_v1"], model.assumed) == ("resformer", 0.5, False)
        assert (model.source["run"], model.source["step"], model.source["seed"]) == (FOLDER.name, step, 0)


def test_telemetry_and_records_are_read():
    telemetry = workbench.Run.open(FOLDER).telemetry()
    assert set(telemetry["metric"]) >= {"train_loss", "validation_loss", "gradient_norm"}
    assert telemetry["step"].max() == 24
    rows = load_records([FOLDER])
    assert set(rows["metric"]) >= {"loss", "importance_entropy", "value_ablation"}
    loss = rows[rows["metric"] == "loss"].groupby("step")["value"].mean()
    assert loss.to_dict() == pytest.approx({0: 3.460986, 24: 3.463355}, abs=1e-6)


def test_training_goes_on_from_its_resume_point(run):
    """To the step it had reached the weights come out as they were, and further with more steps."""
    data = RepeatedData(run.model.d_vocab)
    settings = {"name": run.name, "runs": run.path.parent, "model": run.model, "device": "cpu"}
    shutil.rmtree(run.step_folder(24))
    again = train("resformer", data, train=run.train, **settings)
    assert again.steps == [0, 24]
    assert weights_hash(again.load()) == MODELS[24]
    longer = json.loads((run.path / "run.json").read_text())
    longer["train"]["steps"] = 28
    (run.path / "run.json").write_text(json.dumps(longer))
    further = train("resformer", data, train=TrainConfig.of(longer["train"]), **settings)
    assert further.steps[-1] == 28
    assert further.telemetry()["step"].max() == 28
    assert not torch.equal(further.load().embed.weight, again.load(24).embed.weight)
