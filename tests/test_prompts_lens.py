"""Streams of a prompt read as predictions and as tokens, equal to the logits and the experiment of the model itself."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pandas as pd
import pytest
import torch
from prompt_ids import V, some_ids

from workbench.data.data_sources import RepeatedData, Sample
from workbench.errors import UnknownName, WorkbenchError
from workbench.hook_names import stream_hook
from workbench.interventions.token_ranks import nearest_embedding
from workbench.prompts import logit_lens, token_identity


def test_the_lens_ends_in_the_models_prediction(awake, some_architecture):
    model, ids = awake(some_architecture), some_ids()
    with torch.no_grad():
        logits, cache = model.run_with_cache(ids)
    found = logit_lens(model, ids, top=3)
    log_p = logits[0].log_softmax(-1)
    np.testing.assert_array_equal(found.top_ids[3], log_p.topk(3).indices)
    np.testing.assert_allclose(found.top_probability[3], log_p.exp().topk(3).values, atol=1e-5)
    np.testing.assert_allclose(found.kl[3], 0, atol=1e-5)
    assert (found.kl[:3].max(1) > 1e-4).all()
    for layer in range(4):
        early = model.unembed(model.ln_final(cache[stream_hook(layer, 3)][0])).log_softmax(-1)
        true = early[torch.arange(22), ids[0, 1:]]
        np.testing.assert_allclose(found.probability[layer, :22], true.detach().exp(), atol=1e-5)
        np.testing.assert_array_equal(found.rank[layer, :22], (early[:22] > true[:, None]).sum(-1))
        np.testing.assert_allclose(found.entropy[layer], torch.special.entr(early.exp()).sum(-1).detach(), atol=1e-4)
        gap = torch.nn.functional.kl_div(early, log_p, log_target=True, reduction="none").sum(-1)
        np.testing.assert_allclose(found.kl[layer], gap.detach(), atol=1e-4)
    assert np.isnan(found.probability[:, 22]).all()
    assert found.top_tokens[3][0] == [str(i) for i in found.top_ids[3, 0]]


def test_lens_of_some_positions(awake, monkeypatch):
    model, ids = awake("resformer"), some_ids()
    whole = logit_lens(model, ids)
    monkeypatch.setattr("workbench.prompts.prompt.MAX_LOGITS", 5 * V)  # several chunks
    part = logit_lens(model, ids, positions=slice(3, 20))
    assert part.positions.tolist() == list(range(3, 20))
    assert part.tokens == whole.tokens[3:20]
    for name in ("probability", "rank", "entropy", "kl", "top_probability"):
        np.testing.assert_allclose(getattr(part, name), getattr(whole, name)[:, 3:20], atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "factor", "told"), [(None, 1.003, True), ("bfloat16", 1.003, False), ("bfloat16", 1.5, True)]
)
def test_a_hooked_stream_is_no_reading_of_the_model(tiny, dtype, factor, told):
    """What the head reads was replaced, so the last stream does not say what the model says; half precision rounds as much."""
    model = tiny(dtype=dtype and getattr(torch, dtype))
    refused = pytest.raises(WorkbenchError, match="misses") if told else contextlib.nullcontext()
    with model.hooks([("ln_final.hook_normalized", lambda x, hook: x * factor)]), refused:
        logit_lens(model, some_ids())


def test_identity_is_nearest_embedding_per_position(awake, some_architecture):
    model, ids = awake(some_architecture), some_ids()
    found = token_identity(model, ids)
    records = pd.DataFrame(nearest_embedding(model, Sample(ids, range(1), "ids"), RepeatedData(V), 1))
    records = records[records["variant"].isna() & records["control"].isna()]
    seen = {(s, n): float(row.mean()) for s, t in found.reciprocal_rank.items() for n, row in enumerate(t)}
    expected = {(s, n): v for s, n, v in zip(records["site"], records["layer"], records["value"], strict=True)}
    assert {key: value for key, value in seen.items() if not math.isnan(value)} == pytest.approx(expected, abs=1e-6)
    assert found.chance == pytest.approx(sum(1 / n for n in range(1, 62)) / 61)


def test_identity_by_hand(tiny):
    """Embeddings and first values name their token; a place and a site can be chosen."""
    model, ids = tiny("svformer"), some_ids()
    found = token_identity(model, ids, sites=["v"], positions=slice(4, 9))
    assert list(found.reciprocal_rank) == ["v"]
    np.testing.assert_array_equal(found.reciprocal_rank["v"], np.ones((3, 5)))
    assert (token_identity(model, ids).reciprocal_rank["stream"][0] == 1).all()
    with pytest.raises(UnknownName, match="unknown site 'z'"):
        token_identity(model, ids, sites=["z"])
