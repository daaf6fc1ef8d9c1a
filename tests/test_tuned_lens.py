"""Tuned lens: known affine maps are recovered, the last map is the identity, and edits change what it reads."""

from __future__ import annotations

import dashboard
import numpy as np
import pytest
import torch
import transformers
from foreign import hugging_face
from observed import see
from prompt_ids import some_ids

from workbench.data.data_sources import RepeatedData
from workbench.errors import BadData, WorkbenchError
from workbench.interventions import edited
from workbench.models.hooked import HookedModel
from workbench.prompts import fit_tuned_lens, load_tuned_lens, logit_lens
from workbench.prompts.tuned_lens import _Moments
from workbench.runs.run import Run
from workbench.views import Link, tuned_lens

PAPER = ["transformer", "resformer", "svformer", "neutreno", "denseformer"]


def documents(count=12, length=16, seed=0):
    return torch.randint(61, (count, length), generator=torch.Generator().manual_seed(seed))


def test_normal_equations_give_numpys_least_squares():
    x, noise = np.random.default_rng(0).normal(size=(2, 40, 3))
    y = x @ np.array([[1.0, 2.0, 0.0], [0.0, -1.0, 1.0], [0.5, 0.0, 3.0]]) + noise + 1.0
    moments = _Moments(1, 3, torch.device("cpu"))
    for part in (slice(0, 15), slice(15, 40)):  # streamed
        moments.add({0: torch.tensor(x[part]), 1: torch.tensor(y[part])})
    maps, shifts = moments.solve(0.0)
    root = (1 / np.square(y).mean(1, keepdims=True)) ** 0.5
    expected = np.linalg.lstsq(root * np.hstack([x, np.ones((40, 1))]), root * y, rcond=None)[0]
    np.testing.assert_allclose(maps[0].T, expected[:3], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(shifts[0], expected[3], rtol=1e-5, atol=1e-5)
    assert torch.equal(maps[1], torch.eye(3))
    assert shifts[1].abs().max() < 1e-15  # to rounding, which differs between processors
    assert (moments.solve(1e9)[0][0] - torch.eye(3)).abs().max() < 1e-6, "a strong ridge is the logit lens"


def test_two_by_two_by_hand():
    moments = _Moments(1, 2, torch.device("cpu"))
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    moments.add({0: x, 1: 3 * x.flip(1)})  # swaps both channels, times 3
    maps, shifts = moments.solve(0.0)
    assert maps[0].numpy() == pytest.approx(np.array([[0.0, 3.0], [3.0, 0.0]]), abs=1e-6)
    assert shifts[0].numpy() == pytest.approx(np.zeros(2), abs=1e-6)
    # ridge 1 with variance 1/2 in each channel: A = I + (C + 1/2 I)^-1 (3 C P - C), C = I / 2
    assert moments.solve(1.0)[0][0].numpy() == pytest.approx(np.array([[0.5, 1.5], [1.5, 0.5]]), abs=1e-6)


def assert_ridge(model, lens, ids):
    """The map of layer 1 is the ridge regression of the model's streams, in float64 by numpy: the minimum of

    mean w |y - x - D x - b|^2 + r |D|^2 with w = 1 / mean(y^2), of each position, and r the ridge times the channels' mean variance.
    """
    _, cache = model.run_with_cache(ids)
    last = model.config.n_layers - 1
    x, y = (
        cache[f"blocks.{n}.hook_resid_{at}"].flatten(0, 1).double().numpy() for n, at in ((1, "pre"), (last, "post"))
    )
    w = 1 / np.square(y).mean(1)
    x, y = (each - np.average(each, axis=0, weights=w) for each in (x, y))
    inner, outer = (x.T @ (w[:, None] * other) / w.sum() for other in (x, y - x))
    size = lens.fitted_on["ridge"] * np.diag(inner).mean()
    expected = np.eye(len(inner)) + np.linalg.solve(inner + size * np.eye(len(inner)), outer).T
    scale = np.abs(expected).max()
    np.testing.assert_allclose(lens.maps[1].numpy() / scale, expected / scale, atol=1e-4)


def test_a_known_map_of_a_handmade_model_is_recovered(tiny):
    """The last block adds nothing and the first has a known affine map in its place, so both maps are known."""
    model = tiny(config={"n_layers": 2, "n_heads": 1, "d_model": 8}, dtype=torch.float64)
    known = torch.eye(8).double() + 0.3 * torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).double()
    with torch.no_grad():
        for name, p in model.blocks.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.zero_()
    module = model.blocks[0]
    module.register_forward_hook(
        lambda block, args, out: (out[0] @ known.T + 0.5, *out[1:]) if isinstance(out, tuple) else out @ known.T + 0.5
    )
    lens = fit_tuned_lens(model, documents(8), ridge=0.0)
    torch.testing.assert_close(lens.maps[0], known.float(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lens.shifts[0], torch.full((8,), 0.5), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lens.maps[1], torch.eye(8), atol=1e-5, rtol=0)
    rows = lens.held_out.set_index(["layer", "lens"])["kl"]
    assert rows[0, "tuned"] < 1e-6 < rows[0, "logit"]


@pytest.mark.fast(2)
@pytest.mark.parametrize("architecture", PAPER)
def test_the_last_row_is_the_output_and_earlier_rows_are_nearer_than_the_frequencies(awake, architecture):
    model = awake(architecture)
    lens = fit_tuned_lens(model, documents(48), held_out=documents(4, seed=1), batch=48)
    assert_ridge(model, lens, documents(48))
    assert torch.equal(lens.maps[-1], torch.eye(model.config.d_model))
    rows = lens.held_out.set_index(["layer", "lens"])
    last = model.config.n_layers
    assert rows.loc[(last, "tuned"), "kl"] == rows.loc[(last, "logit"), "kl"] == pytest.approx(0, abs=1e-6)
    assert rows.loc[(last - 1, "tuned"), "kl"] < rows.loc[(last - 1, "frequency"), "kl"]
    assert rows.loc[(last, "logit"), "loss"] == pytest.approx(
        float(model(documents(4, seed=1), return_type="loss").detach()), abs=1e-5
    )
    counts = torch.bincount(documents(48)[:, 1:].flatten(), minlength=61) + 1.0  # a start token is never predicted
    expected = -(counts / counts.sum()).log()[documents(4, seed=1)[:, 1:]].mean()
    assert rows.loc[(0, "frequency"), "loss"] == pytest.approx(float(expected), abs=1e-6)
    tuned, plain = logit_lens(model, some_ids(9), tuned=lens), logit_lens(model, some_ids(9))
    np.testing.assert_array_equal(tuned.top_probability[-1], plain.top_probability[-1])
    assert np.abs(tuned.entropy[0] - plain.entropy[0]).max() > 1e-4


def test_an_edited_run_is_read_with_the_same_maps(awake):
    model, ids = awake("resformer"), some_ids(9)
    lens = fit_tuned_lens(model, documents())
    before = logit_lens(model, ids, tuned=lens)
    with edited(model, "head:layer=1,head=0"):
        after = logit_lens(model, ids, tuned=lens)
        with pytest.raises(WorkbenchError, match="hooks are registered"):
            fit_tuned_lens(model, documents())
        _, cache = model.run_with_cache(ids, names_filter=["blocks.2.hook_resid_pre"])
    np.testing.assert_array_equal(before.entropy[:2], after.entropy[:2])  # streams before the edited head
    assert np.abs(before.entropy[2] - after.entropy[2]).max() > 1e-5
    mapped = lens(2, cache["blocks.2.hook_resid_pre"])
    expected = model.unembed(model.ln_final(mapped))[0].softmax(-1)
    expected = torch.special.entr(expected).sum(-1).detach()
    np.testing.assert_allclose(after.entropy[2], expected, atol=1e-5)


def test_it_is_stored_with_what_it_was_fitted_on(awake, tmp_path, monkeypatch):
    model = awake("resformer")
    lens = fit_tuned_lens(model, documents(), store=tmp_path)
    (path,) = tmp_path.iterdir()
    loaded = load_tuned_lens(path, model)
    assert torch.equal(loaded.maps, lens.maps)
    assert loaded.held_out.equals(lens.held_out)
    assert loaded.fitted_on == lens.fitted_on
    assert (loaded.fitted_on["documents"], loaded.fitted_on["held_out"]) == (9, 3)
    with monkeypatch.context() as patch:
        patch.setattr(HookedModel, "run_with_cache", None)  # read from the file
        assert fit_tuned_lens(model, documents(), store=tmp_path).held_out.equals(lens.held_out)
    with torch.no_grad():
        model.unembed.weight[0, 0] += 1
    with pytest.raises(BadData, match="fitted on other weights"):
        load_tuned_lens(path, model)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(BadData, match="no tuned lens or damaged"):
        load_tuned_lens(path)
    with pytest.raises(BadData, match="the tuned lens maps"):
        logit_lens(awake(config={"n_layers": 2}), some_ids(9), tuned=lens)


def test_a_document_of_the_fit_is_not_held_out(awake):
    ids = documents()
    with pytest.raises(BadData, match="2 documents are held out and fitted"):
        fit_tuned_lens(awake(), ids, held_out=ids[3:5])
    with pytest.raises(BadData, match="1 documents are held out and fitted"):
        fit_tuned_lens(awake(), torch.cat([ids, ids[:1]]))


@pytest.mark.fast(1)
@pytest.mark.parametrize("family", ["GPT2", "Qwen3", "GPTNeoX", "Gemma2"])
def test_observed_decoders_have_a_tuned_lens(family):
    kind = getattr(transformers, f"{family}ForCausalLM", None) or transformers.GPT2LMHeadModel
    changes = {"head_dim": 8, "pad_token_id": None} if family in ("Qwen3", "Gemma2") else {}
    model = see(hugging_face(kind, getattr(transformers, f"{family}Config"), **changes), documents(2, 12))
    lens = fit_tuned_lens(model, documents(24), held_out=documents(4, seed=1), ridge=1e-2, batch=24)
    assert_ridge(model, lens, documents(24))
    rows = lens.held_out.set_index(["layer", "lens"])
    last = model.config.n_layers
    assert rows.loc[(last, "tuned"), "kl"] == pytest.approx(0, abs=1e-6)
    assert rows.loc[(last - 1, "tuned"), "kl"] < rows.loc[(last - 1, "frequency"), "kl"]
    row = logit_lens(model, some_ids(9), tuned=lens)
    assert row.kl[-1].max() < 1e-6


def test_the_view_draws_its_loss_and_refuses_to_fit_unasked(populated, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(Run, "data", RepeatedData(16))  # these runs have no corpus
    source, link = dashboard.kept(populated), Link("prompt", {"a": "text-resformer-s0", "prompt": "return values"})
    with pytest.raises(WorkbenchError, match="select the tuned lens"):
        tuned_lens.lens_loss(source, link)
    drawing = tuned_lens.lens_loss(source, link.but(lens="tuned"))
    assert set(drawing.table["lens"]) == {"tuned", "logit", "frequency"}
    (path,) = (tmp_path / "lenses").iterdir()
    assert path.suffix == ".safetensors"
    from workbench.views import prompt

    maps = [prompt.lens(source, link.but(lens=kind, quantity="entropy")).table["nats"] for kind in tuned_lens.KINDS]
    assert (maps[0] - maps[1]).abs().max() > 1e-4, "each lens has its own answer in the cache"


def test_a_model_whose_text_is_unknown_is_fitted_on_the_shipped_text_or_a_long_prompt(populated, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(tuned_lens, "DOCUMENTS", 12)

    def unknown(entry, count):
        raise WorkbenchError(f"the training text of {entry.name} is unknown")

    monkeypatch.setattr(tuned_lens, "validation_ids", unknown)
    source = dashboard.kept(populated)
    link = Link("prompt", {"a": "text-resformer-s0", "prompt": "return values", "lens": "tuned"})
    assert "9 documents of the shipped text" in tuned_lens.lens_loss(source, link).sentence
    from workbench.views import prompt

    assert prompt.lens(source, link).sentence.endswith("Maps fitted on the shipped text.")
    with pytest.raises(WorkbenchError, match="is unknown"):
        tuned_lens.lens_loss(source, link.but(fit="own"))
    with pytest.raises(WorkbenchError, match=r"the prompt has \d+ tokens: a fit needs 128 or more"):
        tuned_lens.lens_loss(source, link.but(fit="prompt"))
    long = "A cat sat on a mat and read 17 values of a residual stream. " * 20
    assert "documents of the prompt" in tuned_lens.lens_loss(source, link.but(fit="prompt", prompt=long)).sentence
