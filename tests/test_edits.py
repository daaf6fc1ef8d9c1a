"""Edits of a forward pass: exact where theory says so, refused by name where an architecture lacks them, gone afterwards."""

from __future__ import annotations

import re

import pytest
import torch
from editing import hooks_standing, some_tokens
from strangers import GPT, VOCABULARY, D, SharedValues, large

import workbench
from workbench.errors import BadData, WorkbenchError
from workbench.interventions import edited, replaced, token_means
from workbench.interventions.ablation import branches
from workbench.interventions.edits.kinds import KINDS, Head, Values
from workbench.prompts import edit_effect

# ---- values, heads, sublayers ----------------------------------------------------------------------------------------


@torch.no_grad()
def test_token_means_of_the_first_values_change_nothing(tiny, some_architecture):
    model, ids = tiny(some_architecture), some_tokens()
    site = "v" if some_architecture == "value_embedding" else "own_v"
    means = token_means(model, site, [some_tokens(4, seed=1), ids])
    with edited(model, Values(layer=0, how="token_mean", site=site), tokens=ids, means=means):
        torch.testing.assert_close(model(ids), tiny(some_architecture)(ids), rtol=0, atol=1e-5)


@torch.no_grad()
def test_replaced_values_by_hand(tiny):
    model, ids, others = tiny(config={"n_key_value_heads": 2}), some_tokens(1), some_tokens(1, seed=1)
    name = "blocks.1.attn.hook_v"
    plain, first, second = (
        model.run_with_cache(x, names_filter=n)[1][n]
        for x, n in ((ids, name), (ids, "blocks.0.attn.hook_v"), (others, name))
    )
    order = torch.randperm(16, generator=torch.Generator().manual_seed(2))
    for text, expected in {
        "zero": torch.zeros_like(plain),
        "mean": plain.mean(1, keepdim=True).expand_as(plain),
        "layer": first,
        "prompt": second,
        "shuffle,seed=2": plain[:, order],
    }.items():
        with edited(model, f"values:layer=1,head=1,how={text}", tokens=ids, other=others):
            found = model.run_with_cache(ids, names_filter=name)[1][name]
        assert torch.equal(found[:, :, 1], expected[:, :, 1]), text
        assert torch.equal(found[:, :, 0], plain[:, :, 0]), "the other key-value head is left alone"


@torch.no_grad()
def test_ablated_heads_by_hand(tiny):
    model, ids, name = tiny(), some_tokens(), "blocks.1.attn.hook_z"
    plain = model.run_with_cache(ids, names_filter=name)[1][name]
    for how, expected in (("zero", torch.zeros_like(plain)), ("mean", plain.mean(1, keepdim=True).expand_as(plain))):
        with edited(model, Head(layer=1, head=(0, 3), how=how)):
            found = model.run_with_cache(ids, names_filter=name)[1][name]
        assert torch.equal(found[:, :, [0, 3]], expected[:, :, [0, 3]])
        assert torch.equal(found[:, :, [1, 2]], plain[:, :, [1, 2]])


# ---- patches ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("site", ["stream", "v", "own_v", "q", "k", "z", "attn_out", "mlp_out"])
def test_patched_activations_by_hand(tiny, site):
    model, ids, others = tiny(), some_tokens(1), some_tokens(1, T=9, seed=1)
    name = {"stream": "hook_resid_pre", "own_v": "attn.own.hook_v"}.get(site, f"attn.hook_{site}")
    name = "blocks.1." + (name if "out" not in site else f"hook_{site}")
    plain, second = (model.run_with_cache(x, names_filter=name)[1][name] for x in (ids, others))
    cases = {
        "position=3/-1,from_position=-1/2": (ids, second, [3, 15], [8, 2]),
        "position=-1": (ids, second, [15], [8]),
        "position=4/5,prompt=same,from_position=0": (ids, plain, [4, 5], [0, 0]),
    }
    for text, (tokens, source, to, read) in cases.items():
        with edited(model, f"patch:layer=1,site={site},{text}", tokens=tokens, other=others):
            found = model.run_with_cache(ids, names_filter=name)[1][name]
        expected = plain.clone()
        expected[:, to] = source[:, read]
        assert torch.equal(found, expected), text
    if plain.ndim == 4:
        with edited(model, f"patch:layer=1,site={site},head=2,position=3,from_position=4", tokens=ids, other=others):
            found = model.run_with_cache(ids, names_filter=name)[1][name]
        expected = plain.clone()
        expected[:, 3, 2] = second[:, 4, 2]
        assert torch.equal(found, expected)


# ---- together, and afterwards ----------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("text", ["head:how=mean", "values:how=mean", "values:how=shuffle", "sink:position=-2"])
def test_what_mixes_positions_sees_a_whole_prompt_or_is_refused(tiny, text):
    model, ids = tiny(), some_tokens(2)
    cache = model.new_cache(2)
    model(ids[:, :8], past_kv_cache=cache)
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    with edited(model, text):
        whole = model.generate(ids[:, :8], 4, temperature=0, use_cache=False)
        assert torch.equal(model.generate(ids[:, :8], 4, temperature=0), whole), "without a cache by default"
        for more in ({"tokens": ids[:, 8:], "past_kv_cache": cache}, {"tokens": ids, "attention_mask": mask}):
            with pytest.raises(BadData, match="mixes or counts the positions of a prompt"):
                model(**more)
    assert model.decodes_with_cache
    assert model(ids, attention_mask=mask).isfinite().all()


@torch.no_grad()
def test_replaced_values_are_refused_for_tokens_of_another_shape(tiny):
    model, ids = tiny(), some_tokens(1)
    with replaced(model, ids, [1], "token_mean", token_means(model, "v", [ids])):
        for other in (ids[:, :1], ids.expand(3, -1)):
            with pytest.raises(BadData, match=r"are of \(1, 16\) tokens, but the model runs on"):
                model(other)


@torch.no_grad()
def test_edits_of_one_tensor_apply_in_their_order(tiny):
    model, ids, name = tiny(), some_tokens(1), "blocks.1.attn.hook_v"
    plain = model.run_with_cache(ids, names_filter=name)[1][name]
    patch, mean = "patch:layer=1,site=v,position=3,prompt=same,from_position=2", "values:layer=1,how=mean"
    patched = plain.clone()
    patched[:, 3] = plain[:, 2]
    first, second = patched.mean(1, keepdim=True).expand_as(plain), plain.mean(1, keepdim=True).repeat(1, 16, 1, 1)
    second[:, 3] = plain[:, 2]  # what a patch brings is that of the unedited model
    for edits, expected in ((f"{patch};{mean}", first), (f"{mean};{patch}", second)):
        with edited(model, edits, tokens=ids):
            found = model.run_with_cache(ids, names_filter=name)[1][name]
        assert torch.equal(found, expected)
    with edited(model, mean), edited(model, patch, tokens=ids):
        found = model.run_with_cache(ids, names_filter=name)[1][name]
    second[:, 3] = plain.mean(1)
    assert torch.equal(found, second), "inside another edit, that edit's model is the unedited one"


def changes_and_fails(model, ids, plain):
    assert (model(ids) - plain).abs().max() > 1e-3
    with torch.enable_grad():
        grad = torch.autograd.grad(model(ids, return_type="loss"), model.unembed.weight)[0]
    assert grad.isfinite().all()
    raise RuntimeError("inside")


@torch.no_grad()
def test_every_edit_is_right_or_refused_by_name_everywhere(tiny, any_architecture):
    """And nothing stands after it, or after an error inside; gradients pass through what is edited."""
    model, ids, others = tiny(any_architecture), some_tokens(), some_tokens(seed=1)
    plain = model(ids)
    texts = {"coefficient": "coefficient:path=v,value=2.5", "values": "values:site=arriving,how=shuffle"}
    has = {
        "coefficient": any(name.endswith(("v_mix", "v_weights")) for name in model.hook_dict),
        "values": bool(branches(model)),
    }
    for kind in KINDS:
        standing = edited(model, texts.get(kind, kind), tokens=ids, other=others)
        if not has.get(kind, True):
            with pytest.raises(WorkbenchError, match=re.escape(f"{any_architecture} has no")):
                standing.__enter__()
        else:
            with pytest.raises(RuntimeError, match="inside"), standing:
                changes_and_fails(model, ids, plain)
        assert not hooks_standing(model)
    assert torch.equal(model(ids), plain)


@pytest.mark.slow
def test_an_edit_of_a_compiled_model_is_seen(tiny):
    model, ids = tiny("neutreno"), some_tokens()
    plain, compiled = model(ids), torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(ids), plain, rtol=0, atol=1e-6)
    for text in ("sink", "coefficient:value=2"):
        with edited(model, text):
            expected = model(ids)
            torch.testing.assert_close(compiled(ids), expected, rtol=0, atol=1e-6)
        assert (expected - plain).abs().max() > 1e-3
    torch.testing.assert_close(compiled(ids), plain, rtol=0, atol=1e-6)


# ---- observed models -------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_other_peoples_modules_are_edited_where_they_can_be():
    ids = torch.randint(VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))
    model = workbench.observe(large(GPT(attention=SharedValues)), ids, quiet=True)
    plain, name = model(ids), "blocks.1.attn.hook_pattern"
    with edited(model, "sink:layer=1,head=0"):
        pattern = model.run_with_cache(ids, names_filter=name)[1][name]
    assert not pattern[:, 0, 1:, 0].any()
    torch.testing.assert_close(pattern.sum(-1), torch.ones_like(pattern[..., 0]), rtol=0, atol=1e-5)
    for text in ("remove:part=mlp", "head:head=1", "patch:layer=1,position=3,prompt=same,from_position=1"):
        assert abs(edit_effect(model, ids, text).change) > 1e-5, text
    with pytest.raises(BadData, match="coefficients of an Observed model"):
        edited(model, "coefficient:value=0").__enter__()
    assert torch.equal(model(ids), plain)


@torch.no_grad()
@pytest.mark.parametrize("options", [{"lambdas": [(0.4, 0.6)] * 3}, {"attention": SharedValues}])
def test_edited_values_of_an_observed_layer_reach_the_layers_that_read_them(options):
    """As in our models: what zeroes the first layer's values took them from the first layer's attention alone."""
    module, ids = large(GPT(**options)), torch.randint(VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))
    found = edit_effect(workbench.observe(module, ids, quiet=True), ids, "values:layer=0,how=zero")
    matrix = module.transformer["h"][0].attn.c_attn
    matrix.weight[-D:] = matrix.bias[-D:] = 0
    assert found.after == pytest.approx(module(ids)[0][0, -1].softmax(-1).numpy(), abs=1e-6)
