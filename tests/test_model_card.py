"""A step on the Hub: what goes up opens there, its card says what the run says, and what the Hub refuses is one sentence."""

from __future__ import annotations

import inspect
import json
import shutil

import pytest
import training_runs
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError

import workbench
from workbench.errors import BadData, WorkbenchError
from workbench.reports.model_card import HARNESS, card, losses_text, push_to_hub
from workbench.runs.run import Run

FOUND = {
    "alias": "arc_easy",
    "acc,none": 0.25,
    "acc_stderr,none": 0.01,
    "acc_norm,none": 0.5,
    "acc_norm_stderr,none": "N/A",
}
HARNESSED = {"results": {"arc_easy": FOUND}}


class Hub:
    """Takes what `HfApi` takes, and keeps it in a folder."""

    def __init__(self, folder, refuses=None):
        self.folder, self.refuses, self.said = folder, refuses, []

    def create_repo(self, *given, **named):
        self.said.append(inspect.signature(HfApi.create_repo).bind(self, *given, **named).arguments)
        return f"https://huggingface.co/{given[0]}"

    def upload_folder(self, *given, **named):
        asked = inspect.signature(HfApi.upload_folder).bind(self, *given, **named).arguments
        if self.refuses:
            raise self.refuses
        shutil.copytree(asked["folder_path"], self.folder)
        self.said.append(asked)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    made = [training_runs.start(root, name=f"resformer-s{seed}", seed=seed, lambda_v1=0.3) for seed in (0, 1)]
    return [*made, training_runs.start(root, "transformer")]


@pytest.mark.slow
def test_a_copy_of_a_run_is_no_second_seed_of_the_card(runs, tmp_path):
    for run, name in zip((*runs[:2], runs[0]), ("a", "b", "copy"), strict=True):
        shutil.copytree(run.path, tmp_path / name)
    losses = [one.telemetry("metric == 'validation_loss' and step == 8")["value"].iloc[0] for one in runs[:2]]
    assert f"| {sum(losses) / 2:.4f} (" in losses_text(Run.open(tmp_path / "a"), 8)
    assert ", 2 |" in losses_text(Run.open(tmp_path / "a"), 8)


@pytest.mark.slow
def test_a_step_goes_up_with_its_card_and_opens_there(runs, tmp_path):
    run, hub = runs[0], Hub(tmp_path / "repo")
    (run.path / HARNESS).write_text(json.dumps(HARNESSED))
    assert push_to_hub(run, "me/resformer-tiny", 8, private=True, api=hub) == "https://huggingface.co/me/resformer-tiny"
    assert hub.said[0]["private"] is True
    assert hub.said[1]["commit_message"] == "resformer-s0, step 8"
    model = workbench.load(tmp_path / "repo")
    assert (model.architecture, model.options["lambda_v1"]) == ("resformer", 0.3)
    text = (tmp_path / "repo" / "README.md").read_text()
    data = ModelCard(text).data
    assert data.library_name == "workbench"
    assert {"resformer", "value-residual"} <= set(data.tags)
    assert "V_n = lambda_v1 V_1 + lambda_own V_n^own" in text, "the formula"
    assert "`lambda_v1 = 0.3`" in text
    assert "`lr = 0.01`" in text
    losses = [one.telemetry("metric == 'validation_loss' and step == 8")["value"].iloc[0] for one in runs[:2]]
    assert f"| repeated | {losses[0]:.4f} |" in text
    assert f"| {sum(losses) / 2:.4f} ({min(losses):.4f} to {max(losses):.4f}), 2 |" in text, "over both seeds"
    assert "| arc_easy | acc | 0.2500 | 0.0100 |" in text
    assert "| arc_easy | acc_norm | 0.5000 |  |" in text
    assert "arc_easy" not in card(run, 0, "me/resformer-tiny"), "the file is of the last step"
    assert str(run.path.parent) not in text


@pytest.mark.slow
def test_what_the_hub_or_the_name_does_not_allow_is_one_sentence(runs, tmp_path):
    with pytest.raises(BadData, match="'me/x@main2' is no name of a repository"):
        push_to_hub(runs[0], "me/x@main2", api=Hub(tmp_path))
    refusal = HfHubHTTPError.__new__(HfHubHTTPError)
    refusal.args = ("403 Forbidden: you must use a write token\nmore",)
    with pytest.raises(WorkbenchError, match="me/x cannot be written: HfHubHTTPError: 403 Forbidden"):
        push_to_hub(runs[0], "me/x", api=Hub(tmp_path, refusal))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(BadData, match=r"other\.json holds no results of lm-evaluation-harness"):
        push_to_hub(runs[0], "me/x", harness=tmp_path / "other.json", api=Hub(tmp_path))
