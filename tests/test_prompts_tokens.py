"""Prompts as a model reads them, what it expects after them, and the sizes of its values."""

from __future__ import annotations

import numpy as np
import pytest
from prompt_ids import V, some_ids

from workbench.errors import BadData
from workbench.hook_names import stream_hook
from workbench.models.decomposition import decompose
from workbench.prompts import (
    attention_inputs,
    attention_overview,
    logit_lens,
    next_tokens,
    token_identity,
    tokenise,
    value_norms,
)


def test_predictions_equal_the_logits(awake, some_architecture, monkeypatch):
    model, ids = awake(some_architecture), some_ids()
    log_p = model(ids)[0].detach().log_softmax(-1)
    monkeypatch.setattr("workbench.prompts.prompt.MAX_LOGITS", 4 * V)
    found = next_tokens(model, ids, position=-2, top=4)
    assert found.position == 21
    best = log_p[21].exp().topk(4)
    assert found.top["id"].tolist() == best.indices.tolist()
    assert found.top["probability"].tolist() == pytest.approx(best.values.tolist(), abs=1e-6)
    assert np.isnan(found.loss[0])
    loss = model(ids, return_type="loss", loss_per_token=True)[0].detach()
    np.testing.assert_allclose(found.loss[1:], loss, atol=1e-5)


def test_value_norms_of_a_value_residual_by_hand(tiny):
    """v_2 = 3 v_1 + 0.5 own: norms, shares and cosines against the tensors themselves."""
    model, ids = tiny("resformer_constant", lambda_v1=3.0, lambda_own=0.5), some_ids()
    _, cache = model.run_with_cache(ids)
    found = value_norms(model, ids)
    first, own, v = (cache[f"blocks.2.attn.{x}hook_v"][0].flatten(1) for x in ("first.", "own.", ""))
    for name, expected in {
        "own": own.norm(dim=-1),
        "first_part": 3 * first.norm(dim=-1),
        "effective": v.norm(dim=-1),
        "cosine": (own * v).sum(-1) / own.norm(dim=-1) / v.norm(dim=-1),
    }.items():
        np.testing.assert_allclose(getattr(found, name)[2], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.stream[3], cache[stream_hook(3, 3)][0].norm(dim=-1), rtol=1e-5)


def test_values_that_a_layer_lacks_are_absent(awake, some_architecture):
    model, ids = awake(some_architecture), some_ids()
    found = value_norms(model, ids)
    assert np.isfinite(found.effective).all()
    assert np.isfinite(found.stream).all()
    has_own = [f"blocks.{n}.attn.own.hook_v" in model.hook_dict for n in range(3)]
    assert np.isfinite(found.own).all(1).tolist() == has_own
    assert np.isfinite(found.cosine).all(1).tolist() == has_own
    parts = decompose(model, ids, by="value_path").labels
    if some_architecture.startswith(("resformer", "svformer")) and "sparse" not in some_architecture:
        assert np.isfinite(found.first_part).all(1).tolist() == [False, True, True]
        assert "L2H0.first" in parts or "L2H0.source.0" in parts
    if some_architecture in ("transformer", "neutreno", "denseformer", "cross_layer"):
        assert np.isnan(found.first_part).all()


def test_a_model_without_a_tokenizer_reads_ids(tiny):
    model = tiny()
    found = tokenise(model, " 3, 14 15\n60")
    assert found.ids.tolist() == [[3, 14, 15, 60]]
    assert found.tokens == ["3", "14", "15", "60"]
    for text in ("61 3", "9" * 5000):
        with pytest.raises(BadData, match=r"is no id of this model, whose ids are 0 to 60"):
            tokenise(model, text)
    for text in ("-1 3", "1.5 2", "٣ 4", "² 4"):
        with pytest.raises(BadData, match="so it reads token ids"):
            tokenise(model, text)


def test_prompts_of_letters_and_their_errors(tiny):
    model = tiny()
    found = tokenise(model, "ab c", letters=2)
    assert found.ids.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert found.tokens == list("abcabc")
    drawn = tokenise(model, None, letters=2)
    assert drawn.ids.shape == (1, 64)
    assert drawn.ids[0, :32].tolist() == drawn.ids[0, 32:].tolist()
    with pytest.raises(BadData, match="the sequence is empty"):
        tokenise(model, " ", letters=2)
    with pytest.raises(BadData, match=r"^\+: not among this model's tokens"):
        tokenise(model, "a+", letters=2)  # the 63rd symbol of 61
    with pytest.raises(BadData, match="the prompt is empty"):
        tokenise(model, "  ")
    with pytest.raises(BadData, match=r"write them as 3 14 15, or put its tokenizer\.json"):
        tokenise(model, "text")
    with pytest.raises(BadData, match="130 tokens long; this model reads 2 to 128, its context"):
        tokenise(model, "a" * 65, letters=2)
    assert next_tokens(model, found, top=2).tokens == list("abcabc")


def test_what_is_no_one_prompt_is_refused(tiny):
    model = tiny()
    for query in (attention_overview, attention_inputs, logit_lens, token_identity, next_tokens, value_norms):
        with pytest.raises(BadData, match="2 prompts at once"):
            query(model, some_ids().repeat(2, 1))
        with pytest.raises(BadData, match="1 token long"):
            query(model, [3])
        with pytest.raises(BadData, match="129 tokens exceed the model's context of n_ctx=128"):
            query(model, some_ids(129))
    with pytest.raises(BadData, match="position 23"):
        next_tokens(model, some_ids(), position=23)
