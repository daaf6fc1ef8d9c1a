"""Edits of a forward pass: exact where theory says so, refused by name where an architecture lacks them, gone afterwards."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest
import torch
from strangers import GPT, VOCABULARY, SharedValues, large

import workbench
from workbench.data import Sample
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.interventions import coefficients, edited, token_means
from workbench.interventions.ablation import branches, skip_ablation
from workbench.interventions.edits import (
    KINDS,
    Coefficient,
    Head,
    Patch,
    Remove,
    Sink,
    Values,
    as_edits,
    from_dict,
    parse,
)
from workbench.looks.edits import effect, patch_sweep, sweep
from workbench.models import ARCHITECTURES

TEXTS = [
    "coefficient:layer=2,source=first,value=0.25",
    "coefficient:path=stream,value=-1.0",
    "values:layer=1..2,head=0/2,how=token_mean,site=own_v",
    "values:how=layer,from_layer=1",
    "values:how=shuffle,seed=3",
    "sink:layer=2,head=1",
    "sink:position=0/-1,how=keep",
    "remove:layer=2,part=mlp",
    "patch:layer=2,site=v,position=5",
    "patch:site=z,head=1,position=-2..-1,prompt=same,from_position=3..4",
    "head:layer=1,head=0/2,how=mean",
    "remove",
]


def some_tokens(n=2, T=16, seed=0):
    return torch.randint(61, (n, T), generator=torch.Generator().manual_seed(seed))


def hooks_standing(model):
    """Names of modules with anything attached that a finished edit would leave."""
    return [
        name
        for name, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks or {"attend", "softmaxes"} & set(module.__dict__)
    ]


# ---- as data ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_text_json_and_object_are_one(text):
    edit = parse(text)
    assert str(edit) == text
    assert from_dict(json.loads(json.dumps(edit.to_dict()))) == edit
    assert as_edits([text, edit, edit.to_dict()]) == [edit] * 3
    assert hash(edit) == hash(parse(text))


def test_numbers_are_lists_however_they_are_written():
    assert Sink(layer=3) == Sink(layer=(3,)) == Sink(layer=[3]) == parse("sink:layer=3")
    assert parse("sink:layer=0/2..4").layer == (0, 2, 3, 4)
    assert parse("sink:layer=2/0").layer == (0, 2)
    assert parse("patch:position=5/2").position == (5, 2), "what is read goes to positions in their order"
    assert as_edits("sink; remove:part=mlp;") == [Sink(), Remove(part="mlp")]
    assert Coefficient(source="source.0", value=1) == Coefficient(source="first", value=1)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("skin:layer=3", UnknownName, "did you mean sink"),
        ("sink:layers=3", UnknownName, "did you mean layer"),
        ("sink:how=keeps", UnknownName, "did you mean keep"),
        ("values:how=token_men", UnknownName, "token_mean"),
        ("sink:layer", WorkbenchError, "write key=value"),
        ("sink:layer=1,layer=2", WorkbenchError, "gives layer twice"),
        ("sink:layer=a", BadData, "write numbers as"),
        ("sink:layer=5..2", BadData, "a range rises"),
        ("sink:layer=0..99999999999", BadData, "a range rises"),
        ("sink:layer=-1", WorkbenchError, "counted from 0"),
        ("sink:position=", WorkbenchError, "name the positions"),
        ("coefficient:layer=1", WorkbenchError, "needs value"),
        ("coefficient:value=nan", WorkbenchError, "finite"),
        ("coefficient:value=x", WorkbenchError, "number, as 0.5"),
        ("values:from_layer=1", WorkbenchError, "goes with how=layer"),
        ("values:seed=1", WorkbenchError, "goes with how=shuffle"),
        ("values:how=token_mean,site=arriving", WorkbenchError, "no table of what arrives"),
        ("patch:prompt=same", WorkbenchError, "from which positions"),
        ("patch:site=stream,head=1", WorkbenchError, "stream has no heads"),
        ("patch:position=1/1", WorkbenchError, "named twice"),
        ("patch:position=1..3,from_position=1..2", WorkbenchError, "as many, or one"),
    ],
)
def test_what_cannot_be_meant_is_refused(text, error, message):
    with pytest.raises(error, match=re.escape(message)):
        parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sink:layer=3", "layer 3 is beyond 0..2; nearest 2"),
        ("sink:head=4", "head 4 is beyond 0..3; nearest 3"),
        ("values:head=2", "key-value head 2 is beyond 0..1; nearest 1"),
        ("sink:position=16", "position 16 is beyond the 16 tokens; nearest 15"),
        ("values:how=layer,from_layer=3", "layer 3 is beyond 0..2"),
        ("coefficient:layer=0,value=0", "no coefficient of v at layer 0; it has at 1, 2"),
        ("coefficient:source=third,value=0", "first"),
        ("coefficient:path=stream,value=0", "no coefficient of stream; it has path=v"),
        ("values:layer=0,site=arriving", "no values that arrive from elsewhere at layer 0; it has at 1, 2"),
        ("patch", "give it as other="),
        ("values:how=prompt", "give it as other="),
        ("values:how=token_mean", "needs a table"),
    ],
)
def test_what_a_model_or_a_prompt_lacks_is_refused_before_anything_stands(tiny, text, message):
    model = tiny("resformer", config={"n_key_value_heads": 2})
    with pytest.raises(WorkbenchError, match=re.escape(message)), edited(model, ["remove", text], tokens=some_tokens()):
        pass
    assert not hooks_standing(model)


def test_prompts_that_do_not_fit_are_refused(tiny):
    model = tiny()
    with pytest.raises(BadData, match="16 and 9 tokens"), edited(model, "patch", tokens=some_tokens(), other=[1] * 9):
        pass
    with pytest.raises(BadData, match="3 second prompts for 2"):
        edited(model, "patch", tokens=some_tokens(), other=some_tokens(3)).__enter__()
    with pytest.raises(BadData, match="position -10 is beyond the 9"):
        edited(model, "patch:position=3,from_position=-10", tokens=some_tokens(), other=[1] * 9).__enter__()
    with pytest.raises(BadData, match="reads the prompt"):
        edited(model, "patch").__enter__()
    with (
        edited(model, "patch:prompt=same,position=3,from_position=1", tokens=some_tokens()),
        pytest.raises(BadData, match=re.escape("stands for a prompt of (2, 16)")),
    ):
        model(some_tokens(T=8))
    means = token_means(tiny(config={"d_vocab": 80}), "v", [some_tokens()])
    with pytest.raises(BadData, match="another model's"):
        edited(model, "values:how=token_mean", tokens=some_tokens(), means=means).__enter__()


# ---- coefficients ----------------------------------------------------------------------------------------------------

WITHOUT_COEFFICIENTS = {
    "transformer", "svformer", "gqa", "mqa", "cla", "share_q", "share_k", "share_v", "cross_layer", "cross_layer_all",
    "bank_of_values", "gated_attention", "cut_skip", "svformer+gqa", "svformer+cla",
}  # fmt: skip


@torch.no_grad()
def test_a_coefficient_set_to_what_it_is_changes_nothing(awake, any_architecture):
    model, ids = awake(any_architecture), some_tokens()
    present, plain = coefficients(model), model(ids)
    assert (not present) == (any_architecture in WITHOUT_COEFFICIENTS)
    for edit in present:
        with edited(model, edit):
            torch.testing.assert_close(model(ids), plain, rtol=0, atol=2e-5)
        with edited(model, f"coefficient:layer={edit.layer[0]},source={edit.source},path={edit.path},value=3.5"):
            assert (model(ids) - plain).abs().max() > 1e-3, edit
    if not present:
        with pytest.raises(WorkbenchError, match=re.escape(f"{any_architecture} has no coefficient")):
            edited(model, "coefficient:value=0").__enter__()
    assert torch.equal(model(ids), plain)


def test_present_coefficients_are_those_of_the_papers(tiny):
    told = {name: [str(c) for c in coefficients(tiny(name)) if c.layer == (2,)] for name in ("resformer", "neutreno")}
    half = "coefficient:layer=2,source={},path=v,value=0.5"
    assert told["resformer"] == [half.format("first"), half.format("own")]
    assert told["neutreno"] == ["coefficient:layer=2,source=first,path=output,value=0.4"]
    dense = [c.source for c in coefficients(tiny("resformer_dense")) if c.layer == (2,)]
    assert dense == ["first", "source.1", "own"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "edits"),
    [
        ("resformer", "coefficient:value=0;coefficient:source=own,value=1"),
        ("resformer_learnable", "coefficient:value=0;coefficient:source=own,value=1"),
        ("resformer_dense", "coefficient:value=0;coefficient:source=own,value=1"),
        ("value_embedding", "coefficient:layer=0/2,source=table,value=0;coefficient:source=own,value=1"),
        ("same_key", "coefficient:value=0;coefficient:source=own,value=1"),
        ("neutreno", "coefficient:value=0"),
        ("identity_map", "coefficient:value=0"),
        ("residual_q", "coefficient:path=q,value=0;coefficient:path=q,source=own,value=1"),
        ("residual_k", "coefficient:path=k,value=0;coefficient:path=k,source=own,value=1"),
        ("residual_attention", "coefficient:path=pattern,value=0;coefficient:path=pattern,source=own,value=1"),
        ("residual_hidden", "coefficient:path=stream,source=embed,value=0"),
        ("denseformer", "coefficient:path=stream,value=0;coefficient:path=stream,source=own,value=1"),
    ],
)
def test_without_its_coefficients_a_model_is_the_vanilla_decoder(tiny, architecture, edits):
    """Equal-named weights are equal over architectures of one seed."""
    model, ids = tiny(architecture), some_tokens()
    with edited(model, edits):
        torch.testing.assert_close(model(ids), tiny()(ids), rtol=0, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["resformer", "resformer_learnable", "resformer_dense", "same_key"])
def test_a_coefficient_of_zero_is_the_shortcut_taken_away(awake, architecture):
    model, ids = awake(architecture), some_tokens(4)
    with edited(model, "coefficient:value=0"):
        change = model(ids, return_type="loss", loss_per_token=True)
    change = float((change - model(ids, return_type="loss", loss_per_token=True)).mean())
    rows = [r for r in skip_ablation(model, Sample(ids, range(4), "ids"), None, 4) if r["variant"] == "zero"]
    assert next(r["value"] for r in rows if "layer" not in r) == pytest.approx(change, abs=1e-5)
    assert abs(change) > 1e-3
    with edited(model, "values:site=arriving"), edited(model, "coefficient:value=0"):
        pass
    with edited(model, "values:site=arriving"):
        arriving = model(ids)
    with edited(model, "coefficient:value=0"):
        torch.testing.assert_close(model(ids), arriving, rtol=0, atol=1e-5)


def test_a_coefficient_holds_at_its_layer_and_after_errors(tiny):
    """NeuTRENO keeps one number for all layers: it is set while the layer runs, and never stays."""
    model, ids = tiny("neutreno"), some_tokens()
    seen = {}
    watch = [
        (f"blocks.{n}.attn.hook_z", lambda z, hook: seen.update({hook.name: model.shortcuts[0].neutreno_lambda}))
        for n in range(3)
    ]
    with edited(model, "coefficient:layer=1,value=2;coefficient:layer=1,value=3"), model.hooks(watch):
        model(ids)
    assert list(seen.values()) == [0.4, 3.0, 0.4]

    def fail(z, hook):
        raise RuntimeError("stop")

    with (
        pytest.raises(RuntimeError, match="stop"),
        edited(model, "coefficient:value=2"),
        model.hooks([("blocks.1.attn.hook_z", fail)]),
    ):
        model(ids)
    assert model.shortcuts[0].neutreno_lambda == 0.4
    assert not hooks_standing(model)


# ---- sinks -----------------------------------------------------------------------------------------------------------

SINKS = ["sink", "sink:head=1,position=0/3", "sink:layer=2,position=-2"]


def by_scores(sink):
    """The independent way: forbidden scores are minus infinity, in arrays [batch, head, query, key]."""

    def change(scores, hook):
        scores = scores.clone()
        for p in sink.position:
            p = p % scores.shape[-1]
            for head in sink.head or range(scores.shape[1]):
                scores[:, head, p + 1 :, p] = -torch.inf
        return scores

    return change


def by_pattern(sink):
    def change(pattern, hook):
        pattern = pattern.clone()
        for p in sink.position:
            p = p % pattern.shape[-1]
            for head in sink.head or range(pattern.shape[1]):
                pattern[:, head, p + 1 :, p] = 0
        return pattern

    return change


@torch.no_grad()
def test_a_cut_sink_is_the_one_of_forbidden_scores(awake, any_architecture):
    model, ids = awake(any_architecture, dtype=torch.float64), some_tokens()
    for text, how in itertools.product(SINKS, ("renormalise", "keep")):
        sink = parse(f"{text}{',' if ':' in text else ':'}how={how}")
        point, change = (r"\S*hook_attn_scores", by_scores(sink))
        if how == "keep":
            point, change = r"(cross\.(\d+\.)?)?hook_pattern", by_pattern(sink)
        layers = "".join(map(str, sink.layer or range(3)))
        names = [n for n in model.hook_dict if re.fullmatch(rf"blocks\.[{layers}]\.attn\.{point}", n)]
        with model.hooks([(name, change) for name in names]):
            expected = model(ids)
        with edited(model, sink):
            torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-9)
        assert (model(ids) - expected).abs().max() > 1e-3
    assert not hooks_standing(model)


@torch.no_grad()
def test_rows_of_a_cut_pattern_sum_to_one_without_the_sink(tiny, any_architecture):
    model, ids = tiny(any_architecture), some_tokens()
    names = [n for n in model.hook_dict if re.fullmatch(r"blocks\.2\.attn\.(cross\.(\d\.)?)?hook_pattern", n)]
    with edited(model, "sink:layer=2,head=1"):
        _, cache = model.run_with_cache(ids, names_filter=names)
    pattern = torch.stack([cache[name] for name in names])
    torch.testing.assert_close(pattern.sum((0, -1)), torch.ones(2, 4, 16), rtol=0, atol=1e-5)
    assert not pattern[:, :, 1, 1:, 0].any()
    assert pattern[:, :, 0, 1:, 0].any(), "other heads keep theirs"
    torch.testing.assert_close(pattern[:, :, 1, 0, 0].sum(0), torch.ones(2), rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("text", ["sink", "sink:how=keep"])
def test_a_cut_sink_forms_no_square_array(tiny, monkeypatch, text):
    def refuse(q, k):
        raise AssertionError("scores were formed")

    model, ids = tiny(config={"n_key_value_heads": 2}), some_tokens()
    monkeypatch.setattr("workbench.models.attention.causal_scores", refuse)
    with edited(model, text):
        _, cache = model.run_with_cache(ids, names_filter=[f"blocks.1.attn.hook_{x}" for x in ("sink", "row_entropy")])
    assert cache["blocks.1.attn.hook_row_entropy"].isfinite().all()
    assert bool(cache["blocks.1.attn.hook_sink"][..., 1:].any()) == (text == "sink:how=keep")


@pytest.mark.parametrize("architecture", ["transformer", "cross_layer", "residual_attention"])
def test_generation_under_a_cut_sink_needs_no_whole_sequences(tiny, architecture):
    """A cached continuation, one query at a time, is the one that reads everything again."""
    model, prompt = tiny(architecture), torch.arange(7)
    for edits in ("sink", "sink:position=2,how=keep"):
        with edited(model, edits):
            found = [model.generate(prompt, 6, temperature=0, use_cache=cached) for cached in (True, False)]
        assert torch.equal(*found)


@torch.no_grad()
def test_a_cut_and_a_kept_sink_hold_together(tiny):
    model, ids = tiny(), some_tokens()
    kept, cut = parse("sink:position=3,how=keep"), parse("sink:position=1")
    with model.hooks(
        [(f"blocks.{n}.attn.hook_attn_scores", by_scores(cut)) for n in range(3)]
        + [(f"blocks.{n}.attn.hook_pattern", by_pattern(kept)) for n in range(3)]
    ):
        expected = model(ids)
    for edits in ([kept, cut], [cut, kept]):
        with edited(model, edits):
            torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cut_sink_costs_no_precision_in_half(tiny, dtype):
    """The error against float64 is the model's own."""
    model, ids = tiny(dtype=dtype), some_tokens(T=64)
    exact = tiny(dtype=torch.float64)
    exact.load_state_dict({name: p.double() for name, p in model.state_dict().items()})
    plain = (model(ids) - exact(ids)).abs().mean()
    with edited(model, "sink"), edited(exact, "sink"):
        assert (model(ids) - exact(ids)).abs().mean() < 1.5 * plain


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
        assert abs(effect(model, ids, text).change) > 1e-5, text
    with pytest.raises(BadData, match="coefficients of an Observed model"):
        edited(model, "coefficient:value=0").__enter__()
    assert torch.equal(model(ids), plain)


# ---- values, heads, sublayers ----------------------------------------------------------------------------------------


@torch.no_grad()
def test_token_means_of_the_first_values_change_nothing(tiny, any_architecture):
    model, ids = tiny(any_architecture), some_tokens()
    site = "v" if any_architecture == "value_embedding" else "own_v"
    means = token_means(model, site, [some_tokens(4, seed=1), ids])
    with edited(model, Values(layer=0, how="token_mean", site=site), tokens=ids, means=means):
        torch.testing.assert_close(model(ids), tiny(any_architecture)(ids), rtol=0, atol=1e-5)


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


@torch.no_grad()
def test_without_sublayers_only_the_embedding_speaks(tiny, any_architecture):
    model, ids = tiny(any_architecture), some_tokens()
    expected = model.unembed(model.ln_final(model.embed(ids)))
    if any_architecture == "cut_skip":
        expected = torch.zeros_like(expected)  # nothing passes by the first block
    with edited(model, "remove"):
        torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-3)  # residual_hidden: a multiple, normalised
    with edited(model, "remove:part=attention;remove:part=mlp"):
        torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-3)


# ---- patches ---------------------------------------------------------------------------------------------------------

ELSEWHERE = {"denseformer", "resformer+denseformer", "residual_hidden", "value_embedding", "bank_of_values"}
"""Architectures in which later layers read the embedding, or the token ids, beside the first stream."""


@torch.no_grad()
def test_a_whole_stream_of_another_prompt_is_the_other_prompt(awake, any_architecture):
    model, ids, others = awake(any_architecture), some_tokens(), some_tokens(seed=1)
    plain, expected = model(ids), model(others)
    with edited(model, "patch:layer=3", tokens=ids, other=others):
        assert torch.equal(model(ids), expected)
    with edited(model, "patch:layer=0", tokens=ids, other=others):
        assert torch.equal(model(ids), expected) == (any_architecture not in ELSEWHERE)
    with edited(model, "patch:layer=0", tokens=ids, other=ids):
        assert torch.equal(model(ids), plain)
    with edited(model, "patch:layer=0,position=9", tokens=ids, other=others):
        found = model(ids)
    assert torch.equal(found[:, :9], plain[:, :9]), "what comes earlier does not hear of it"
    assert (found[:, 9:] - plain[:, 9:]).abs().amax((0, 2)).min() > 1e-4


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
        "coefficient": any("v_mix" in name for name in model.hook_dict),
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


# ---- looks -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_effect_of_edits_by_hand(tiny):
    model, ids = tiny(), some_tokens(1)
    found = effect(model, ids, "remove", top=5)
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


def test_a_prompt_of_one_token_has_next_tokens_and_no_loss(tiny):
    found = effect(tiny(), [5], "sink")
    assert found.n == 0
    assert np.isnan(found.change)
    assert len(found.top_before) == 10
    assert found.divergence == pytest.approx(0, abs=1e-12), "the only token attends to itself"
    with pytest.raises(BadData, match="2 prompts"):
        effect(tiny(), some_tokens(), "sink")


@torch.no_grad()
def test_a_sweep_is_its_edits_one_by_one(tiny):
    model, ids, calls = tiny("resformer"), some_tokens(1), []
    found = sweep(
        model, ids, "sink", "layer x head", answer=7, progress=lambda done, total: calls.append((done, total))
    )
    assert calls == [(i, 12) for i in range(1, 13)]
    assert found.loss.shape == found.logit.shape == found.probability.shape == (3, 4)
    assert found.loss[2, 1] == pytest.approx(effect(model, ids, "sink:layer=2,head=1").change, abs=1e-6)
    plain = model(ids)[0, -1].double()
    with edited(model, "sink:layer=2,head=1"):
        cut = model(ids)[0, -1].double()
    assert found.probability[2, 1] == pytest.approx(float(cut.softmax(-1)[7] - plain.softmax(-1)[7]), abs=1e-6)
    assert found.logit[2, 1] == pytest.approx(float(cut[7] - cut.mean() - plain[7] + plain.mean()), abs=1e-5)
    grouped = sweep(tiny(config={"n_key_value_heads": 2}), ids, "values", "layer x head")
    assert grouped.loss.shape == (3, 2), "values have key-value heads"


def test_a_sweep_has_no_number_where_the_edit_has_no_place(tiny):
    found = sweep(tiny("resformer"), some_tokens(1), "coefficient:value=0")
    assert found.loss.shape == (3,)
    assert np.isnan(found.loss[0])
    assert np.isfinite(found.loss[1:]).all()
    assert found.logit is None
    with pytest.raises(WorkbenchError, match="transformer has no coefficient"):
        sweep(tiny(), some_tokens(1), "coefficient:value=0")
    streams = sweep(tiny(), some_tokens(1), "patch:position=3", other=some_tokens(1, seed=1))
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
        sweep(tiny(), some_tokens(1), kind, over)
    with pytest.raises(BadData, match="no token id"):
        sweep(tiny(), some_tokens(1), "sink", answer=61)


def test_a_sweep_can_be_cancelled(tiny):
    model, ids = tiny(), some_tokens(1)
    plain = model(ids)

    def cancel(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(model, ids, "head", progress=cancel)
    assert not hooks_standing(model)
    assert torch.equal(model(ids), plain)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["transformer", "resformer", "denseformer"])
def test_a_patch_sweep_restores_what_the_stream_carries(tiny, architecture):
    model, clean = tiny(architecture), some_tokens(1, T=8)
    corrupted = clean.clone()
    corrupted[0, 3] = (corrupted[0, 3] + 1) % 61
    calls = []
    found = patch_sweep(model, clean, corrupted, (4, 9), progress=lambda done, total: calls.append(total))
    assert found.restored.shape == (4, 8)
    assert set(calls) == {4 * 5}, "before the prompts differ nothing is run"
    assert (found.restored[:, :3] == 0).all()
    np.testing.assert_allclose(found.restored[3], [0] * 7 + [1], atol=1e-5)
    if architecture != "denseformer":
        assert found.restored[0, 3] == pytest.approx(1, abs=1e-5), "the one differing token"
    logits = {name: model(ids)[0, -1].double() for name, ids in (("clean", clean), ("corrupted", corrupted))}
    assert found.clean == pytest.approx(float(logits["clean"][4] - logits["clean"][9]))
    assert found.corrupted == pytest.approx(float(logits["corrupted"][4] - logits["corrupted"][9]))
    with edited(model, Patch(layer=1, position=5), tokens=corrupted, other=clean):
        patched = model(corrupted)[0, -1].double()
    share = (float(patched[4] - patched[9]) - found.corrupted) / (found.clean - found.corrupted)
    assert found.restored[1, 5] == pytest.approx(share, abs=1e-5)
    heads = patch_sweep(model, clean, corrupted, (4, 9), "z", "layer x head")
    assert heads.restored.shape == (3, 4)
    with edited(model, Patch(layer=1, site="z", head=2), tokens=corrupted, other=clean):
        patched = model(corrupted)[0, -1].double()
    share = (float(patched[4] - patched[9]) - found.corrupted) / (found.clean - found.corrupted)
    assert heads.restored[1, 2] == pytest.approx(share, abs=1e-5)


def test_a_patch_sweep_refuses_prompts_that_tell_nothing(tiny):
    model, ids = tiny("svformer"), some_tokens(1)
    with pytest.raises(BadData, match="both prompts have a logit difference"):
        patch_sweep(model, ids, ids, (4, 9))
    with pytest.raises(BadData, match="first prompt has 8 tokens and the second 16"):
        patch_sweep(model, ids[:, :8], ids, (4, 9))
    with pytest.raises(WorkbenchError, match="no heads"):
        patch_sweep(model, ids, some_tokens(1, seed=1), (4, 9), over="layer x head")
    found = patch_sweep(model, ids, some_tokens(1, seed=1), (4, 9), "own_v", "layer x head")
    assert np.isnan(found.restored[1:]).all(), "later layers project no values"
    assert np.isfinite(found.restored[0]).all()


def test_every_architecture_is_told_whether_it_has_coefficients():
    assert set(ARCHITECTURES) >= WITHOUT_COEFFICIENTS
