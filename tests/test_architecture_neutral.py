"""In its neutral setting, or with its tensors made neutral by hand, each architecture is the vanilla decoder."""

from __future__ import annotations

import pytest
import torch
from inputs import WIDE, tokens

from workbench.errors import BadData, WorkbenchError
from workbench.models import ARCHITECTURES

NEUTRAL = [(name, entry.neutral) for name, entry in ARCHITECTURES.items() if entry.neutral is not None]
FURTHER = [
    ("resformer_dense", {"lambda_source": 0, "dense_source": "mixed"}),
    ("svformer", {"anchors": [0, 1, 2]}),
    *(("denseformer", {"dilation": d, "period": p}) for d, p in ((1, 2), (3, 1), (2, 3))),
]


def same(a, b, ids, *, exact=True):
    torch.testing.assert_close(a(ids), b(ids), atol=0 if exact else 1e-12, rtol=0)
    grads = []
    for model in (a, b):
        model(ids, return_type="loss").backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name in grads[0].keys() & grads[1].keys():
        torch.testing.assert_close(grads[0][name], grads[1][name], atol=1e-12, rtol=1e-9, msg=name)


@pytest.mark.fast(23)
@pytest.mark.parametrize(("architecture", "options"), [*NEUTRAL, *FURTHER])
def test_neutral_setting_is_the_vanilla_decoder_exactly(tiny, architecture, options):
    heads = 4 if {"gqa", "mqa"} & set(architecture.split("+")) else 2  # query_group = 1 means as many as query heads
    config = {"n_key_value_heads": heads}
    vanilla, model = (
        tiny(name, dtype=WIDE, config=config, **o) for name, o in (("transformer", {}), (architecture, options))
    )
    same(vanilla, model, tokens(vanilla, 11))


def test_scores_mixed_with_nothing_are_the_vanilla_decoders(tiny):
    """To rounding: the two halves of its heads are scaled by sqrt(2)."""
    vanilla, model = (
        tiny(dtype=WIDE),
        tiny("residual_attention", dtype=WIDE, **ARCHITECTURES["residual_attention"].neutral, attn_mix="logit"),
    )
    same(vanilla, model, tokens(vanilla, 11), exact=False)


@pytest.mark.parametrize("architecture", ["cross_layer", "cross_layer_all", "same_key", "identity_map", "resformer"])
def test_with_one_layer_there_is_nothing_earlier(tiny, architecture):
    vanilla, model = (tiny(name, dtype=WIDE, config={"n_layers": 1}) for name in ("transformer", architecture))
    same(vanilla, model, tokens(vanilla, 11))


def test_a_bank_of_the_first_layers_own_values_is_that_layer(tiny):
    vanilla, model = tiny(dtype=WIDE), tiny("bank_of_values", dtype=WIDE, bank_layers=[0])
    first = vanilla.blocks[0]
    with torch.no_grad():
        model.get_parameter("bank_of_values.tables.0").copy_(first.attn.v_proj(first.ln1(vanilla.embed.weight)))
    ids = tokens(model, 9)
    torch.testing.assert_close(model(ids), vanilla(ids), atol=1e-12, rtol=0)


def test_an_exclusive_head_says_nothing_along_the_tokens_own_value(tiny):
    model = tiny("exclusive_attention+resformer", dtype=WIDE, config={"n_key_value_heads": 2})
    _, cache = model.run_with_cache(tokens(model, 9))
    for layer in range(model.config.n_layers):
        z, v = cache["z", layer], cache["v", layer].repeat_interleave(2, dim=2)
        assert (z * v).sum(-1).abs().max() < 1e-10
        assert z[:, 0].abs().max() < 1e-12, "the first token hears itself alone"
        assert z[:, 1:].abs().max() > 0.01


def test_a_shuffled_first_layer_is_another_sequences(tiny):
    model, resformer = tiny("first_layer_shuffled", dtype=WIDE), tiny("resformer", dtype=WIDE)
    ids = torch.randint(61, (3, 7), generator=torch.Generator().manual_seed(0))
    _, cache = model.run_with_cache(ids)
    first, own, mixed = cache["v", 0], cache["v", 2, "own"], cache["v", 2]
    for b, other in ((0, 2), (1, 0), (2, 1)):
        assert torch.equal(cache["v", 2, "first"][b], first[other])
        torch.testing.assert_close(mixed[b], (first[other] + own[b]) / 2, atol=1e-14, rtol=0)
    pair = ids[:2]
    torch.testing.assert_close(model(pair.flip(0)), model(pair).flip(0), atol=1e-12, rtol=0)
    equal = ids[:1].repeat(2, 1)
    torch.testing.assert_close(model(equal), resformer(equal), atol=1e-12, rtol=0)
    _, _, slopes = model.run_with_grads(ids, ["blocks.0.attn.hook_v"], lambda logits, _: logits[0].square().sum())
    reached = slopes["blocks.0.attn.hook_v"].abs().amax((1, 2, 3)) > 0
    assert reached.tolist() == [True, False, True], (
        "its own through the first layer's attention, the last one's by the mix"
    )


def test_a_shuffled_first_layer_refuses_what_has_no_other_sequence(tiny):
    model = tiny("first_layer_shuffled", dtype=WIDE)
    ids = torch.arange(10).view(2, 5)
    for mode in (model.eval(), model.train()):
        with pytest.raises(BadData, match=r"first_layer_shuffled .* batch of 2 or more"):
            mode(ids[:1])
    with pytest.raises(WorkbenchError, match="first_layer_shuffled has no key-value cache"):
        model.generate(ids, 3, use_cache=True)
    grown = model.generate(ids, 2, temperature=0)
    assert torch.equal(grown[:, 5], model(ids)[:, -1].argmax(-1))
