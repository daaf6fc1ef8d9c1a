"""Models from elsewhere: without a tokenizer they read ids on every page, and a page that lacks something says what to do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from own_loop import GPT, loop

import workbench
from workbench import plots
from workbench.checkpoints import save
from workbench.errors import WorkbenchError
from workbench.importing import import_run
from workbench.results import records
from workbench.views import Link, Source, prompt
from workbench.views.depth import layers
from workbench.views.source import IDS, TEXT, example


@pytest.fixture
def imported(tmp_path, tiny):
    save(tiny(), tmp_path / "there")
    import_run(tmp_path / "there", tmp_path / "runs", name="theirs")
    return Source(tmp_path / "runs")


def test_a_model_without_a_tokenizer_has_ids_as_its_first_prompt(imported):
    (theirs,) = imported.catalogue().entries
    assert example(theirs) == imported.prompt(Link("prompt")) == IDS
    assert list(prompt.predictions(imported, Link("prompt", {"prompt": "3 14 15"})).table["id"])
    assert imported.tokens(imported.subjects(Link("prompt"))[0], "3 14 15") == ["3", "14", "15"]
    (imported.folder / "theirs" / "tokenizer.json").write_text("{}")
    assert example(theirs) == TEXT


def test_a_run_without_numbers_says_which_command_makes_them(imported):
    with pytest.raises(WorkbenchError, match=r"workbench measure \S+theirs -m token_identity_share .*--data FILE"):
        layers(imported, Link("depth"))


def test_a_recording_without_checkpoints_says_so_and_promises_none(tmp_path):
    with workbench.Recorder(
        model := GPT(), every=1, folder=tmp_path / "mine", quantities=["gradient_norm"]
    ) as recorder:
        loop(model, recorder, 2)
    ask = Source(tmp_path)
    for draw, page in ((layers, "depth"), (prompt.predictions, "prompt")):
        with pytest.raises(WorkbenchError, match="a recording holds no checkpoints"):
            draw(ask, Link(page))


def test_smoothing_is_told_in_training_steps_where_one_in_ten_was_written_down():
    rows = [{"run": "mine", "architecture": "GPT", "seed": 0, "step": s, "metric": "train_loss", "value": 4.0 - s / 100, "unit": "nats"}
            for s in range(0, 200, 10)]  # fmt: skip
    figure = plots.plot(records(rows), smooth=4)
    assert "running mean over 40 steps (4 records)" in figure.layout.title.subtitle.text


def test_the_first_page_asks_for_a_text_before_it_measures_an_imported_run(imported, browse):
    at = browse(imported.folder)
    assert not any(str(b.key).startswith("measure_") for b in at.button)
    assert any(c.value.startswith("workbench xray ") and c.value.endswith(" --data FILE") for c in at.code)


def test_the_training_page_says_that_imported_checkpoints_bring_no_log(imported, browse):
    assert any("no log of their training" in i.value for i in browse(imported.folder, "training").info)


def test_an_imported_run_is_xrayed_on_a_file_of_token_ids(imported, tmp_path):
    """The file is all the data there is: its first part gives the means per token, its end is what is measured."""
    ids = torch.randint(61, (2000,), generator=torch.Generator().manual_seed(0))
    ids.numpy().astype(np.uint16).tofile(tmp_path / "ids.bin")
    found = workbench.xray(imported.folder / "theirs", tmp_path / "ids.bin", n=4, T=16)
    assert set(found.records["n"].dropna()) == {4}
    assert "of the variance of the own values" in str(found)
    assert f"--data {tmp_path / 'ids.bin'}" in found.command
