"""What edits change about a prompt: effects, sweeps and patching, against runs by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from editing import some_tokens

from workbench.errors import BadData, WorkbenchError
from workbench.interventions import edited
from workbench.interventions.edits.kinds import Patch
from workbench.prompts import edit_effect, edit_sweep, patch_sweep


@torch.no_grad()
def test_the_effect_of_edits_by_hand(tiny):
    model, ids = tiny(), some_tokens(1)
    found = edit_effect(model, ids, "remove", top=5)
    before, after = (
        x[0].double().log_softmax(-1) for x in (model(ids), model.unembed(model.ln_final(model.embed(ids))))
    )
    for losses, log_p in ((found.loss_before, before), (found.loss_after, after)):
        np.testing.assert_allclose(losses, -log_p[:-1].gather(-1, ids[0, 1:, None])[:, 0], atol=1e-5)
    assert found.n == 15
    assert found.change == pytest.approx(np.mean(found.loss_after - found.loss_before))
    assert found.divergence == pytest.approx(float((before[-1].exp() * (before[-1] - after[-1])).sum()), abs=1e-5)
    for table, column, log_p in ((found.top_before, "before", before), (found.top_after, "after", after)):
        assert table["id"].tolist() == log_p[-1].topk(5).indices.tolist()
        assert table[column].is_monotonic_decreasing
    assert found.top_before["after"].tolist() == pytest.approx(
        after[-1].exp()[found.top_before["id"]].tolist(), abs=1e-6
    )
    assert found.edits == ("remove",)


@torch.no_grad()
def test_an_edit_that_overflows_has_no_divergence_and_one_that_a_norm_cannot_square_is_refused(tiny):
    half, ids = tiny("resformer", dtype=torch.float16), some_tokens(1)
    assert np.isnan(edit_effect(half, ids, "coefficient:value=1e5").divergence), "its logits are NaN"
    largest = [
        edit_effect(tiny("resformer", dtype=dtype), ids, "coefficient:layer=1,value=1e15")
        for dtype in (torch.float32, torch.float64)
    ]
    np.testing.assert_allclose(largest[0].loss_after, largest[1].loss_after, atol=1e-4)
    with pytest.raises(WorkbenchError, match="at most 1e"):
        edit_effect(half, ids, "coefficient:value=1e19")


@torch.no_grad()
def test_a_sweep_is_its_edits_one_by_one(tiny):
    model, ids, calls = tiny("resformer"), some_tokens(1), []
    found = edit_sweep(
        model, ids, "sink", "layer x head", answer=7, progress=lambda done, total: calls.append((done, total))
    )
    assert calls == [(i, 12) for i in range(1, 13)]
    assert found.loss.shape == found.logit.shape == found.probability.shape == (3, 4)
    assert found.loss[2, 1] == pytest.approx(edit_effect(model, ids, "sink:layer=2,head=1").change, abs=1e-6)
    plain = model(ids)[0, -1].double()
    with edited(model, "sink:layer=2,head=1"):
        cut = model(ids)[0, -1].double()
    assert found.probability[2, 1] == pytest.approx(float(cut.softmax(-1)[7] - plain.softmax(-1)[7]), abs=1e-6)
    assert found.logit[2, 1] == pytest.approx(float(cut[7] - cut.mean() - plain[7] + plain.mean()), abs=1e-5)
    grouped = edit_sweep(tiny(config={"n_key_value_heads": 2}), ids, "values", "layer x head")
    assert grouped.loss.shape == (3, 2), "values have key-value heads"


def test_a_sweep_has_no_number_where_the_edit_has_no_place(tiny):
    found = edit_sweep(tiny("resformer"), some_tokens(1), "coefficient:value=0")
    assert found.loss.shape == (3,)
    assert np.isnan(found.loss[0])
    assert np.isfinite(found.loss[1:]).all()
    assert found.logit is None
    with pytest.raises(WorkbenchError, match="transformer has no coefficient"):
        edit_sweep(tiny(), some_tokens(1), "coefficient:value=0")
    streams = edit_sweep(tiny(), some_tokens(1), "patch:position=3", other=some_tokens(1, seed=1))
    assert streams.loss.shape == (4,), "the final norm's input is a stream too"


@pytest.mark.parametrize(
    ("kind", "over", "message"),
    [
        ("sink:layer=1", "layer", "sets the layer itself"),
        ("sink:head=1", "layer x head", "sets the layer and the head itself"),
        ("remove", "layer x head", "no heads to tell apart"),
        ("remove;sink", "layer", "takes one edit"),
        ("sink", "heads", "layer x head"),
    ],
)
def test_a_sweep_refuses_what_it_cannot_set(tiny, kind, over, message):
    with pytest.raises(WorkbenchError, match=message):
        edit_sweep(tiny(), some_tokens(1), kind, over)
    with pytest.raises(BadData, match="leaves the vocabulary"):
        edit_sweep(tiny(), some_tokens(1), "sink", answer=61)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["transformer", "resformer", "denseformer"])
def test_a_patch_sweep_restores_what_the_stream_carries(tiny, architecture):
    model, clean = tiny(architecture), some_tokens(1, T=8)
    corrupted = clean.clone()
    corrupted[0, 3] = (corrupted[0, 3] + 1) % 61
    calls = []
    answers = max(
        itertools.permutations(range(4, 10), 2),
        key=lambda pair: lead(model, clean, *pair) - lead(model, corrupted, *pair),
    )
    found = patch_sweep(model, clean, corrupted, answers, apart=0, progress=lambda done, total: calls.append(total))
    assert found.restored.shape == (4, 8)
    assert set(calls) == {4 * 5}, "before the prompts differ nothing is run"
    assert (found.restored[:, :3] == 0).all()
    np.testing.assert_allclose(found.restored[3], [0] * 7 + [1], atol=1e-5)
    if architecture != "denseformer":
        assert found.restored[0, 3] == pytest.approx(1, abs=1e-5), "the one differing token"
    logits = {name: model(ids)[0, -1].double() for name, ids in (("clean", clean), ("corrupted", corrupted))}
    right, wrong = answers
    assert found.clean == pytest.approx(float(logits["clean"][right] - logits["clean"][wrong]), abs=1e-5)
    assert found.corrupted == pytest.approx(float(logits["corrupted"][right] - logits["corrupted"][wrong]), abs=1e-5)
    with edited(model, Patch(layer=1, position=5), tokens=corrupted, other=clean):
        patched = model(corrupted)[0, -1].double()
    share = (float(patched[right] - patched[wrong]) - found.corrupted) / (found.clean - found.corrupted)
    assert found.restored[1, 5] == pytest.approx(share, abs=1e-5)


def lead(model, ids, right, wrong):
    logits = model(ids)[0, -1]
    return float(logits[right] - logits[wrong])


@torch.no_grad()
def test_a_patch_sweep_refuses_prompts_and_answers_that_tell_little_or_the_wrong_way(tiny):
    model, ids, others = tiny("svformer"), some_tokens(1), some_tokens(1, seed=1)
    with pytest.raises(BadData, match=r"must lead by more than 0\.5 more"):
        patch_sweep(model, ids, ids, (4, 9))
    apart = lead(model, ids, 4, 9) - lead(model, others, 4, 9)
    answers = (4, 9) if apart > 0 else (9, 4)
    with pytest.raises(BadData, match="choose answers"):
        patch_sweep(model, ids, others, answers[::-1], apart=0)
    with pytest.raises(BadData, match="choose answers"):
        patch_sweep(model, ids, others, answers, apart=abs(apart) + 1e-4)
    with pytest.raises(BadData, match="first prompt has 8 tokens and the second 16"):
        patch_sweep(model, ids[:, :8], ids, (4, 9))
    found = patch_sweep(model, ids, others, answers, "own_v", apart=abs(apart) - 1e-4)
    assert np.isnan(found.restored[1:]).all(), "later layers project no values"
    assert np.isfinite(found.restored[0]).all()
