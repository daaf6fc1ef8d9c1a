"""Models from elsewhere: without a tokenizer they read ids on every page, and a page that lacks something says what to do."""

from __future__ import annotations

import shutil
import warnings

import dashboard
import numpy as np
import pytest
import torch
from app_pages import charts

import workbench
from workbench.checkpoints.saving import export, save
from workbench.checkpoints.transformers_modules import quiet
from workbench.data.tokenizer import train_tokenizer
from workbench.errors import BadCheckpoint, NotCovered, ObservedInstead, WorkbenchError
from workbench.runs.checkpoint_import import import_run
from workbench.runs.run import Run
from workbench.views import Source


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_another_librarys_run_is_measured_once_and_kept(another, monkeypatch):
    run, _ = another
    ids = torch.randint(270, (4, 16), generator=torch.Generator().manual_seed(0))
    first = workbench.measure(run, ["importance_entropy", "loss"], ids, steps="all")
    assert set(first["step"]) == {5, 10}
    monkeypatch.setattr(Run, "load", lambda *args, **kwargs: pytest.fail("it was measured already"))
    assert len(workbench.measure(run, ["importance_entropy", "loss"], ids, steps="all")) == len(first)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.fast(1)
@pytest.mark.parametrize(("page", "address", "figures"), dashboard.OF_OBSERVED[::2])
def test_pages_show_another_librarys_model(another, browse, page, address, figures):
    """Two of its steps beside each other; `test_builders.py` looks at one alone."""
    run, _ = another
    at = browse(run.path.parent, page, prompt="def mean(values)", compare="1", b="theirs", step_b="5", **address)
    assert len(charts(at)) == figures
    assert not [i.value for i in (*at.info, *at.warning, *at.error)]


@pytest.mark.slow
def test_the_page_takes_the_logits_of_another_librarys_model_apart(another, browse):
    run, _ = another
    at = browse(run.path.parent, "prompt", show="who", prompt="def mean(values)")
    assert len(charts(at)) == 1
    assert any("the parts sum to" in said.value for said in at.markdown)


@pytest.mark.slow
def test_an_imported_run_is_xrayed_on_a_file_of_token_ids(imported, tmp_path):
    """The file is all the data there is: its first part gives the means per token, its end is what is measured."""
    ids = torch.randint(61, (2000,), generator=torch.Generator().manual_seed(0))
    ids.numpy().astype(np.uint16).tofile(tmp_path / "ids.bin")
    found = workbench.xray(imported.folder / "theirs", tmp_path / "ids.bin", n=4, T=16)
    assert set(found.records["n"].dropna()) == {4}
    assert "of the variance of the own values" in str(found)
    assert f"--text {tmp_path / 'ids.bin'}" in found.command
