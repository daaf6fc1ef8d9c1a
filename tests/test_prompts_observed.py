"""Questions to observed models: answered from what they show, refused in words where they show too little."""

from __future__ import annotations

import numpy as np
import pytest
import strangers
import torch
from prompt_ids import some_ids

import workbench
from workbench.errors import BadData
from workbench.prompts import (
    attention_inputs,
    attention_map,
    attention_overview,
    edit_sweep,
    fit_tuned_lens,
    logit_attribution,
    logit_lens,
    next_tokens,
    token_identity,
    token_path,
    value_norms,
)


@pytest.fixture
def observed():
    """An observed decoder of other people's, that mixes values."""
    module = strangers.large(strangers.GPT([(0.4, 0.6)] * 3))
    return workbench.observe(module, some_ids(), quiet=True)


def test_observed_models_answer_as_far_as_they_show(observed):
    ids = some_ids()
    _, cache = observed.run_with_cache(ids)
    found, inputs = attention_overview(observed, ids), attention_inputs(observed, ids)
    for layer in range(3):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0].detach()
        np.testing.assert_allclose(np.nan_to_num(found.tiles[layer]), pattern, atol=1e-5)
        np.testing.assert_allclose(np.nan_to_num(attention_map(inputs, layer, 1).weights), pattern[1], atol=1e-5)
    log_p = observed(ids)[0].detach().log_softmax(-1)
    likeliest = next_tokens(observed, ids, top=3).top["probability"].tolist()
    assert likeliest == pytest.approx(log_p[-1].exp().topk(3).values.tolist(), abs=1e-6)
    sizes = value_norms(observed, ids)
    norms = cache["blocks.2.attn.hook_v"][0].detach().flatten(1).norm(dim=-1)
    np.testing.assert_allclose(sizes.effective[2], norms, rtol=1e-5)
    own, first = (cache[f"blocks.2.attn.{x}.hook_v"][0].detach().flatten(1).norm(dim=-1) for x in ("own", "first"))
    np.testing.assert_allclose(sizes.own[2], own, rtol=1e-5)
    np.testing.assert_allclose(sizes.first_part[2], 0.4 * first, rtol=1e-4)
    assert token_identity(observed, ids).reciprocal_rank["v"].shape == (3, 23)


def test_maps_made_of_whole_patterns_say_how_many_tokens_they_bear(monkeypatch):
    """Capped scores: queries and keys do not make the pattern, which is kept whole, 4 bytes a cell of each head."""

    def capped(q, k, v, layer=0):
        scores = 5 * torch.tanh(q @ k.transpose(-2, -1) / 5)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return torch.softmax(scores.masked_fill(future, float("-inf")), -1) @ v

    ids = some_ids()
    observed = workbench.observe(strangers.GPT([(0.4, 0.6)] * 3, capped), ids, quiet=True)
    assert len(attention_overview(observed, ids).tiles) == 3
    cells = 3 * observed.config.n_heads * 4
    monkeypatch.setattr("workbench.prompts.attention_maps.MOST_BYTES", cells * 20**2)
    with pytest.raises(BadData, match=f"for {ids.shape[1]} tokens: give (19|20) at most"):
        attention_overview(observed, ids)


@torch.no_grad()
def test_the_lens_of_an_observed_model_is_its_own_norm_and_head_on_each_stream(observed):
    ids, module = some_ids(), observed.foreign
    _, cache = observed.run_with_cache(ids)
    found = logit_lens(observed, ids, top=3)
    for layer in range(4):
        stream = cache["blocks.2.hook_resid_post" if layer == 3 else f"blocks.{layer}.hook_resid_pre"]
        chances = module.lm_head(module.transformer.ln_f(stream))[0].softmax(-1)
        best = chances.topk(3)
        np.testing.assert_allclose(found.top_probability[layer], best.values, atol=1e-6)
        np.testing.assert_array_equal(found.top_ids[layer], best.indices)
    assert found.kl[-1].max() == 0 < found.kl[0].min()
    some = logit_lens(observed, ids, positions=slice(3, 5))
    np.testing.assert_array_equal(some.kl, found.kl[:, 3:5])


def test_first_values_are_each_tokens_alone_where_positions_are_in_the_stream(observed):
    """A token further on in a text has another first value, and none of the table's rows may be one of those."""
    from workbench.interventions.token_ranks import token_tables

    ids = some_ids()
    _, cache = observed.run_with_cache(ids, names_filter="blocks.0.attn.hook_v")
    first = torch.nn.functional.normalize(cache["blocks.0.attn.hook_v"][0, 0].flatten().double(), dim=-1)
    table = token_tables(observed, ["v"])["v"]
    assert table.shape == (61, 32)
    assert not table.requires_grad
    torch.testing.assert_close(table[ids[0, 0]], first, atol=1e-6, rtol=0)
    alone = observed.run_with_cache(ids[:, 7:8], names_filter="blocks.0.attn.hook_v")[1]["blocks.0.attn.hook_v"]
    torch.testing.assert_close(
        table[ids[0, 7]], torch.nn.functional.normalize(alone.flatten().double(), dim=-1), atol=1e-6, rtol=0
    )


def test_an_observed_model_whose_output_does_not_follow_its_last_stream_has_no_lens(observed, monkeypatch):
    fixed = observed.everywhere(some_ids())
    monkeypatch.setattr(observed, "everywhere", lambda ids: fixed)
    with pytest.raises(BadData, match="reads its output from elsewhere"):
        logit_lens(observed, some_ids())


@pytest.mark.parametrize("change", [-4, 4])
def test_tokens_are_those_of_the_logits_where_the_head_has_other_rows_than_the_embedding(change):
    ids = some_ids()
    module, rows = strangers.large(strangers.GPT([(0.4, 0.6)] * 3)), 61 + change
    module.lm_head = torch.nn.Linear(module.lm_head.in_features, rows, bias=False)
    seen = ids % min(rows, 61)
    observed = workbench.observe(module, seen, quiet=True)
    assert observed.n_logits == rows
    assert logit_attribution(observed, seen, -1, rows - 1).error < 1e-4
    assert np.isfinite(token_path(observed, seen, 1, 0, 5, 3, rows - 1).head_logits)
    assert len(next_tokens(observed, seen, top=10**6).top) == rows
    assert logit_lens(observed, seen, top=10**6).top_ids.shape[-1] == rows
    assert np.isfinite(fit_tuned_lens(observed, torch.randint(0, 57, (8, 9))).held_out["loss"]).all()
    for ask in (lambda t: logit_attribution(observed, seen, -1, t), lambda t: token_path(observed, seen, 1, 0, 5, 3, t),
                lambda t: edit_sweep(observed, seen, "remove", answer=t)):  # fmt: skip
        with pytest.raises(BadData, match=rf"token id {rows} leaves the vocabulary of the logits, 0\.\.{rows - 1}"):
            ask(rows)
    if change < 0:
        seen[0, 3] = rows
        for read in (next_tokens, logit_lens, lambda model, ids: fit_tuned_lens(model, ids.repeat(4, 1))):
            with pytest.raises(BadData, match=f"next tokens go up to {rows} and logits to {rows - 1}"):
                read(observed, seen)
