"""TransformerLens' own tools on every architecture, each against our exact parts or its definition; known traps."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from lensed import AVERAGED, WIDE, close, tokens
from transformer_lens.tools.analysis import direct_logit_attribution, logit_lens
from transformer_lens.utilities import get_act_name

from workbench.data.tokenizer import train_tokenizer
from workbench.errors import BadData, WorkbenchError
from workbench.hook_names import is_statistic, stream_hook
from workbench.models.decomposition import decompose


@pytest.fixture
def awake(awake):
    """Those of all tests, in float64."""
    return functools.partial(awake, dtype=WIDE)


# ---- decompositions of the stream ------------------------------------------------------------------------------------


def test_their_decompositions_sum_to_the_stream_and_equal_ours(awake, any_architecture):
    model, ids = awake(any_architecture), tokens()
    normed = {"sandwich_norm", "post_norm"} & set(any_architecture.split("+"))  # their outputs, behind W_O and the MLP
    _, cache = model.run_with_cache(ids)
    for layer in (1, 2, None):
        stream = cache[stream_hook(3 if layer is None else layer, 3)]
        parts, labels = cache.decompose_resid(layer, return_labels=True)
        ours = decompose(model, cache, layer)
        assert labels == ours.labels
        close(parts, ours.parts)
        close(parts.sum(0), stream)
        heads, labels = cache.stack_head_results(
            -1 if layer is None else layer, return_labels=True, incl_remainder=True
        )
        by_head = decompose(model, cache, layer, "head")
        for label, part in zip(labels[:-1], heads, strict=False):
            close(part, by_head[label])
        close(heads.sum(0), stream)
        if normed:
            with pytest.raises(WorkbenchError, match="use complete MLPs"):
                cache.stack_neuron_results(layer)
            close(cache.get_full_resid_decomposition(layer, expand_neurons=False).sum(0), stream)
            continue
        neurons, labels = cache.stack_neuron_results(layer, return_labels=True, incl_remainder=True)
        assert labels[-2:] == [f"L{2 if layer is None else layer - 1}N47", "remainder"]
        for n in range(3 if layer is None else layer):
            close(neurons[48 * n : 48 * (n + 1)].sum(0), ours[f"{n}_mlp_out"])
        close(neurons.sum(0), stream)
        for options in ({}, {"expand_neurons": False}):
            close(cache.get_full_resid_decomposition(layer, **options).sum(0), stream)
    middle = cache.decompose_resid(1, mlp_input=True)
    close(middle.sum(0), cache["resid_mid", 1])
    whole = {"expand_neurons": not normed}
    close(cache.get_full_resid_decomposition(1, mlp_input=True, **whole).sum(0), cache["resid_mid", 1])


@pytest.mark.fast(4)
@pytest.mark.parametrize("architecture", ["transformer", *AVERAGED])
def test_decompositions_scale_project_and_slice_as_theirs(awake, architecture):
    """The final norm's scale, a projection and a position commute with the weights on the way."""
    model = awake(architecture)
    logits, cache = model.run_with_cache(tokens())
    direction = model.tokens_to_residual_directions(torch.tensor([3, 8])).T
    for options in ({}, {"expand_neurons": False}):
        full = cache.get_full_resid_decomposition(apply_ln=True, project_output_onto=direction, pos_slice=-1, **options)
        close(full.sum(0), logits[:, -1, [3, 8]])
    neurons = cache.stack_neuron_results(
        3, apply_ln=True, project_output_onto=direction[:, 0], incl_remainder=True, pos_slice=[2, 5]
    )
    close(neurons.sum(0), logits[:, [2, 5], 3])
    parts = cache.decompose_resid(apply_ln=True, pos_slice=-1, mode="mlp", incl_embeds=False)
    ours = decompose(model, cache, "final", pos=-1)
    close(parts, torch.stack([ours[f"{n}_mlp_out"][:, 0] for n in range(3)]))
    single = model.run_with_cache(tokens(batch=1), remove_batch_dim=True)[1]
    close(single.decompose_resid().sum(0), single["resid_post", 2])


# ---- logits ----------------------------------------------------------------------------------------------------------


def test_logit_attributions_with_an_unfolded_gain_equal_ours_and_sum_to_the_logit(awake, some_architecture):
    """The final gain is away from 1 and part of the token's direction, so that nothing needs folding."""
    model, ids = awake(some_architecture), tokens()
    answer, other, rows = torch.tensor([3, 9]), torch.tensor([4, 4]), torch.arange(2)
    logits, cache = model.run_with_cache(ids)
    wanted = logits[rows, -1, answer] - logits[rows, -1, other]
    by_layer, by_head = (
        decompose(model, cache, "logits", by, tokens=answer, against=other, pos=-1) for by in ("layer", "head")
    )
    found = direct_logit_attribution(model, ids, answer, other)
    assert found.labels == by_layer.labels
    close(found.attribution, by_layer.parts[..., 0])
    close(found.attribution.sum(0), wanted)
    found = direct_logit_attribution(model, cache=cache, answer_tokens=answer, incorrect_tokens=other, unit="head")
    for label, part in zip(found.labels[:-1], found.attribution, strict=False):
        close(part, by_head[label][:, 0])
    close(found.attribution.sum(0), wanted)
    found = direct_logit_attribution(model, ids, answer, other, unit="layer")
    assert found.labels[-1] == "final_post"
    close(found.attribution[-1], wanted)
    every = cache.logit_attrs(cache.decompose_resid(), ids)
    close(every, decompose(model, cache, "logits", tokens=ids).parts)


def test_the_logit_lens_reads_each_stream_through_the_final_norm(awake, some_architecture):
    model, ids = awake(some_architecture), tokens()
    logits, cache = model.run_with_cache(ids)
    for found in (logit_lens(model, ids, positions=None), cache.logit_lens(positions=None)):
        assert found.labels == ["0_pre", "1_pre", "2_pre", "final_post"]
        for index, read in enumerate(found.readout.values):
            stream = decompose(model, cache, index).parts.sum(0)
            scale = (stream.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()
            close(read, stream / scale * model.ln_final.weight @ model.unembed.weight.T)
        close(found.readout.values[-1], logits)


def test_tokens_may_be_texts(awake):
    tokenizer = train_tokenizer(["the cat sat on the mat"], vocab_size=260)
    model = awake("resformer", config={"d_vocab": tokenizer.vocab_size})
    model.tokenizer = tokenizer
    text = "the cat"
    ids = model.to_tokens(text)
    letters = [model.to_single_str_token(i) for i in ids[0].tolist()]
    assert letters == model.to_str_tokens(text)
    assert model.to_string(ids[0]) == text
    answer = model.to_single_token("a")
    by_text = direct_logit_attribution(model, text, "a").attribution
    close(by_text, direct_logit_attribution(model, ids, answer).attribution)
    close(decompose(model, text, "logits", tokens="a", pos=-1).parts.sum(0)[:, 0], model(text)[:, -1, answer])
    assert logit_lens(model, text, targets="a").target_names == ["a"]
    with pytest.raises(BadData, match="tokens, not one"):
        model.tokens_to_residual_directions("zzz")


# ---- known traps -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.fast(2)
def test_an_edit_in_place_is_the_same_as_an_edit_returned(awake, some_architecture):
    """Patching edits in place; layers that share a tensor, the history of averages and parameters must not hear of it."""
    model, ids = awake(some_architecture), tokens(5)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name in model.hook_dict:
            if name.startswith("blocks.1."):
                continue  # as in the last layer
            alike = some_architecture != "transformer" and (".mlp." in name or ".ln" in name)  # in all architectures
            if alike or is_statistic(name):
                continue
            returned = model.run_with_hooks(ids, fwd_hooks=[(name, lambda x, hook: x * 1.5)])
            in_place = model.run_with_hooks(ids, fwd_hooks=[(name, lambda x, hook: x.mul_(1.5))])
            torch.testing.assert_close(in_place, returned, atol=1e-12, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
    for name, p in model.named_parameters():
        assert torch.equal(p, weights[name]), name


def test_shorthand_reaches_branches_and_never_another_tensor(awake):
    model = awake("resformer_dense")
    _, cache = model.run_with_cache(tokens())
    assert get_act_name("v", 2, "own") == "blocks.2.attn.hook_v"  # theirs passes over the branch
    assert cache["v", 2, "own"] is cache["blocks.2.attn.own.hook_v"]
    assert cache["v", -1, "source.1"] is cache["blocks.2.attn.source.1.hook_v"]
    assert cache["v", 1, "first"] is cache["blocks.1.attn.first.hook_v"]
    assert cache["v_mix", 2, "attn"] is cache["blocks.2.attn.hook_v_mix"]
    assert cache["v", 2] is cache["v", 2, "attn"]
    assert cache["v", 2, "first"] is cache["v", 2, "source.0"]
    for key in (("v", 2, "table"), ("v", 2, "cross"), "own.v"):
        with pytest.raises(KeyError):
            cache[key]


def test_caches_without_their_models_do_not_keep_them_alive(awake):
    def one(architecture):
        model = awake(architecture)
        _, cache = model.run_with_cache(tokens())
        pattern, cache.model = cache["pattern", 1], None
        return weakref.ref(model), cache, pattern

    held = [one(architecture) for architecture in ("resformer", "cross_layer", "residual_attention")]
    gc.collect()  # once: it looks at every object of every library
    for gone, cache, pattern in held:
        assert gone() is None
        assert torch.equal(cache["pattern", 1], pattern)  # rebuilt from what the cache holds
