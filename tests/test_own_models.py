"""Models from elsewhere: without a tokenizer they read ids on every page, and a page that lacks something says what to do."""

from __future__ import annotations

import shutil
import warnings

import dashboard
import numpy as np
import pytest
import torch
from app_pages import charts
from own_loop import GPT, loop

import workbench
from workbench import plots
from workbench.checkpoints.saving import export, save
from workbench.checkpoints.transformers_modules import quiet
from workbench.data.tokenizer import train_tokenizer
from workbench.errors import BadCheckpoint, NotCovered, ObservedInstead, WorkbenchError
from workbench.runs.importing import import_run
from workbench.runs.records import records
from workbench.runs.run import Run
from workbench.views import Link, Source, prompt
from workbench.views.depth import layers
from workbench.views.source import IDS, TEXT, example


@pytest.fixture
def imported(tmp_path, tiny):
    save(tiny(), tmp_path / "there")
    import_run(tmp_path / "there", tmp_path / "runs", name="theirs")
    return Source(tmp_path / "runs")


@pytest.fixture(scope="module")
def another(tmp_path_factory):
    """Two steps of a GPT-2, which our decoder does not compute, as a run; with its modules."""
    import transformers

    folder, modules = tmp_path_factory.mktemp("gpt2"), {}
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=270, n_positions=64, bos_token_id=None, eos_token_id=None
    )
    for step in (5, 10):
        torch.manual_seed(step)
        modules[step] = transformers.GPT2LMHeadModel(config).eval()
        with quiet():
            modules[step].save_pretrained(folder / f"checkpoint-{step}")
        train_tokenizer([dashboard.PROSE], 270).save(folder / f"checkpoint-{step}" / "tokenizer.json")
    with pytest.warns(ObservedInstead, match="GPT2LMHeadModel and observed") as told:
        run = import_run(folder, folder / "runs", name="theirs")
    assert len(told) == 1, "what is so of a series is said once"
    return run, modules


@torch.no_grad()
def test_another_librarys_model_becomes_a_run_that_computes_what_it_did(another):
    run, modules = another
    ids = torch.arange(20)[None]
    assert (run.steps, run.observed, run.finished, run.architecture) == ([5, 10], True, True, "transformer")
    for step, module in modules.items():
        with warnings.catch_warnings(action="error"):  # said when it was imported
            model = run.load(step)
        torch.testing.assert_close(model(ids), module(ids).logits, atol=0, rtol=0)
        assert model.source["step"] == step
    assert run.weights_hash(5) != run.weights_hash(10)
    assert run.info["imported"]["assumed"] is False, "what it computes is the module's own, whatever it is called"
    assert run.load("last").tokenizer is not None
    with pytest.raises(NotCovered, match="architecture would be settings of ours"):
        workbench.load(run.path, architecture="resformer")
    with pytest.raises(WorkbenchError, match="is observed, not one of our models"):
        export(run.load(), run.path / "out")


def test_another_librarys_run_is_measured_once_and_kept(another, monkeypatch):
    run, _ = another
    ids = torch.randint(270, (4, 16), generator=torch.Generator().manual_seed(0))
    first = workbench.measure(run, ["importance_entropy", "loss"], ids, steps="all")
    assert set(first["step"]) == {5, 10}
    monkeypatch.setattr(Run, "load", lambda *args, **kwargs: pytest.fail("it was measured already"))
    assert len(workbench.measure(run, ["importance_entropy", "loss"], ids, steps="all")) == len(first)


def test_steps_of_different_shapes_are_no_series(another, tmp_path):
    import transformers

    run, _ = another
    shutil.copytree(run.path / "step_000005", tmp_path / "checkpoint-5")
    config = transformers.GPT2Config(
        n_layer=3, n_head=2, n_embd=16, vocab_size=270, n_positions=64, bos_token_id=None, eos_token_id=None
    )
    with quiet():
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "checkpoint-10")
    with (
        pytest.warns(ObservedInstead),
        pytest.raises(BadCheckpoint, match=r"not steps of one model: observed .*'parameters': "),
    ):
        import_run(tmp_path, tmp_path / "runs", name="odd")
    assert not (tmp_path / "runs" / "odd").exists()


@pytest.mark.parametrize(("page", "address", "figures"), dashboard.OF_OBSERVED)
def test_pages_show_another_librarys_model(another, browse, page, address, figures):
    """Two of its steps beside each other; `test_builders.py` looks at one alone."""
    run, _ = another
    at = browse(run.path.parent, page, prompt="def mean(values)", compare="1", b="theirs", step_b="5", **address)
    assert len(charts(at)) == figures
    assert not [i.value for i in (*at.info, *at.warning, *at.error)]


def test_attention_that_is_not_there_is_said_in_words():
    """A model whose layers mix tokens in another way has no pattern to draw."""
    import transformers

    from workbench.prompts import attention_inputs, attention_overview

    config = transformers.MambaConfig(
        hidden_size=16, num_hidden_layers=2, vocab_size=61, state_size=4, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    ids = torch.arange(20)[None]
    model = workbench.observe(transformers.MambaForCausalLM(config).eval(), ids, quiet=True)
    for query in (attention_inputs, attention_overview):
        with pytest.raises(WorkbenchError, match="cannot be drawn: layer 0 is"):
            query(model, ids)


def test_the_page_takes_the_logits_of_another_librarys_model_apart(another, browse):
    run, _ = another
    at = browse(run.path.parent, "prompt", show="who", prompt="def mean(values)")
    assert len(charts(at)) == 1
    assert any("sum of the parts" in said.value for said in at.markdown)


def test_a_model_without_a_tokenizer_has_ids_as_its_first_prompt(imported):
    (theirs,) = imported.catalogue().entries
    assert example(theirs) == imported.prompt(Link("prompt")) == IDS
    assert list(prompt.predictions(imported, Link("prompt", {"prompt": "3 14 15"})).table["id"])
    assert imported.tokens(imported.subjects(Link("prompt"))[0], "3 14 15") == ["3", "14", "15"]
    (imported.folder / "theirs" / "tokenizer.json").write_text("{}")
    assert example(theirs) == TEXT


def test_a_run_without_numbers_says_which_command_makes_them(imported):
    with pytest.raises(WorkbenchError, match=r"workbench measure \S+theirs -m token_identity_share .*--text FILE"):
        layers(imported, Link("depth"))


def test_a_recording_without_checkpoints_says_so_and_promises_none(tmp_path):
    with workbench.Recorder(
        model := GPT(), every=1, folder=tmp_path / "mine", quantities=["gradient_norm"]
    ) as recorder:
        loop(model, recorder, 2)
    ask = Source(tmp_path)
    for draw, page in ((layers, "depth"), (prompt.predictions, "prompt")):
        with pytest.raises(WorkbenchError, match="a recording has no checkpoints"):
            draw(ask, Link(page))


def test_smoothing_is_told_in_training_steps_where_one_in_ten_was_written_down():
    rows = [{"run": "mine", "architecture": "GPT", "seed": 0, "step": s, "metric": "train_loss", "value": 4.0 - s / 100, "unit": "nats"}
            for s in range(0, 200, 10)]  # fmt: skip
    figure = plots.plot(records(rows), smooth=4)
    assert "running mean over 40 steps (4 records)" in figure.layout.title.subtitle.text


def test_the_first_page_asks_for_a_text_before_it_measures_an_imported_run(imported, browse):
    at = browse(imported.folder)
    assert all(b.disabled for b in at.button if str(b.key).startswith("measure_"))
    assert any(c.value.startswith("workbench xray ") and c.value.endswith(" --text FILE") for c in at.code)


def test_the_training_page_says_that_imported_checkpoints_bring_no_log(imported, browse):
    assert any("no training log" in i.value for i in browse(imported.folder, "training").info)


def test_an_imported_run_is_xrayed_on_a_file_of_token_ids(imported, tmp_path):
    """The file is all the data there is: its first part gives the means per token, its end is what is measured."""
    ids = torch.randint(61, (2000,), generator=torch.Generator().manual_seed(0))
    ids.numpy().astype(np.uint16).tofile(tmp_path / "ids.bin")
    found = workbench.xray(imported.folder / "theirs", tmp_path / "ids.bin", n=4, T=16)
    assert set(found.records["n"].dropna()) == {4}
    assert "of the variance of the own values" in str(found)
    assert f"--text {tmp_path / 'ids.bin'}" in found.command
