"""Streams with positions first: shown with the batch first, equal to the same decoder written that way."""

from __future__ import annotations

import pytest
import torch
from observed import see
from odd_stacks import PositionsFirst
from strangers import GPT, LAYERS, large

from workbench.models.decomposition import decompose


@pytest.fixture
def pair(ids):
    """A decoder with positions first and one of the same weights with the batch first, both observed."""
    theirs, same = large(PositionsFirst()), GPT([(1, 1), *[(0.3, 0.7)] * (LAYERS - 1)])
    same.load_state_dict(theirs.state_dict())
    return see(theirs, ids), see(same.eval(), ids)


@pytest.mark.slow
@torch.no_grad()
def test_every_site_is_the_one_of_the_decoder_with_the_batch_first(pair, ids):
    theirs, same = pair
    assert theirs.architecture == "resformer"
    assert set(theirs.hook_dict) == set(same.hook_dict)
    (logits, cache), (true, expected) = (model.run_with_cache(ids) for model in pair)
    torch.testing.assert_close(logits, true)
    for name in expected:
        torch.testing.assert_close(cache[name], expected[name], atol=1e-5, rtol=1e-4)
    assert decompose(theirs, ids, "logits", "value_path").error < 1e-4


@pytest.mark.slow
@pytest.mark.fast(1)
@torch.no_grad()
@pytest.mark.parametrize("point", ["hook_resid_pre", "hook_mlp_out", "attn.own.hook_v"])
def test_what_replaces_a_tensor_has_the_batch_first(pair, ids, point):
    def zeroed(x, hook):
        x = x.clone()
        x[0, 3] = 0
        return x

    changed = []
    for model in pair:
        with model.hooks([(f"blocks.1.{point}", zeroed)]):
            changed.append(model(ids))
    torch.testing.assert_close(*changed, atol=1e-5, rtol=1e-4)
    assert not torch.equal(changed[0], pair[0](ids))


@torch.no_grad()
def test_logits_are_turned(ids):
    observed = see(large(PositionsFirst(turned=False)), ids)
    assert observed(ids).shape[:2] == ids.shape
    torch.testing.assert_close(observed(ids), large(PositionsFirst())(ids))
    assert see(large(PositionsFirst()), ids.flatten()[:64].view(8, 8)).structure.layout.turned
