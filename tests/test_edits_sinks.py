"""Sinks that are cut: equal to forbidden scores or patterns without columns, without forming either."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from editing import hooks_standing, some_tokens

from workbench.interventions import edited
from workbench.interventions.edits.kinds import parse

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
@pytest.mark.parametrize("text", ["sink", "sink:how=keep"])
def test_a_cut_sink_forms_no_square_array(tiny, monkeypatch, text):
    def refuse(q, k):
        raise AssertionError("scores were formed")

    model, ids = tiny(config={"n_key_value_heads": 2}), some_tokens()
    monkeypatch.setattr("workbench.models.attention_layer.causal_scores", refuse)
    with edited(model, text):
        _, cache = model.run_with_cache(ids, names_filter=[f"blocks.1.attn.hook_{x}" for x in ("sink", "row_entropy")])
    assert cache["blocks.1.attn.hook_row_entropy"].isfinite().all()
    assert bool(cache["blocks.1.attn.hook_sink"][..., 1:].any()) == (text == "sink:how=keep")


@pytest.mark.parametrize("architecture", ["transformer", "cross_layer", "residual_attention"])
def test_generation_under_a_cut_sink_needs_no_whole_sequences(tiny, architecture):
    """A cached continuation, one query at a time, is the one that reads everything again."""
    model, prompt = tiny(architecture), torch.arange(7)
    for edits in ("sink", "sink:position=2,how=keep", "sink:position=9,how=keep"):  # 9 is generated
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
