"""Softmaxes with a column that is no key: sink logits, off by one. Its share of each row is a part of its own everywhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from observed import BEFORE, see
from strangers import GPT, large

import workbench
from workbench.prompts import attention_inputs, attention_map, attention_overview
from workbench.reports.xray_sentences import sinks_text

SINKS = torch.tensor([1.5, -0.5, 0.0, 3.0])


def with_null(form):
    """Attention with one more column: a learned logit of each head last or first, shifted rows, zero for softmax_1."""

    def attend(q, k, v, layer=0):
        t = q.shape[2]
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~BEFORE[:t, :t], -math.inf)
        logits = (SINKS if form != "off by one" else torch.zeros(4)).view(1, 4, 1, 1).expand(len(q), -1, t, 1)
        if form == "first":
            return torch.cat((logits, scores), -1).softmax(-1)[..., 1:] @ v
        both = torch.cat((scores, logits), -1)
        both = both - both.amax(-1, keepdim=True) if form == "shifted" else both
        return F.softmax(both, dim=-1)[..., :-1] @ v

    return attend


@pytest.mark.fast(1)
@pytest.mark.parametrize("form", ["first", "shifted", "off by one"])
@torch.no_grad()
def test_what_goes_to_no_key_is_a_part_of_its_own(form, ids):
    module = large(GPT(attend=with_null(form)))
    observed = see(module, ids)
    logits, cache = observed.run_with_cache(ids, names_filter=lambda n: n.startswith("blocks.1.attn"))
    assert torch.equal(logits, module(ids)[0])
    q, k, v = (cache[f"blocks.1.attn.hook_{x}"].double() for x in "qkv")
    scores = (torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(8)).masked_fill(~BEFORE, -math.inf)
    sink = (SINKS if form != "off by one" else torch.zeros(4)).double().view(4, 1, 1).expand(2, 4, 40, 1)
    whole = torch.cat((scores, sink), -1).softmax(-1)
    pattern, null = whole[..., :-1], whole[..., -1]
    wanted = {
        "pattern": pattern, "null": null, "received": pattern.sum(-2), "sink": pattern[..., 0],
        "row_max": pattern.amax(-1), "row_entropy": torch.special.entr(whole).sum(-1),
        "z": torch.einsum("bhij,bjhd->bihd", pattern, v),
    }  # fmt: skip
    for name, true in wanted.items():
        torch.testing.assert_close(cache[f"blocks.1.attn.hook_{name}"].double(), true, atol=1e-5, rtol=1e-5, msg=name)
    torch.testing.assert_close(  # the log-sum-exp that makes a weight of a score, up to what the module takes off its rows
        (cache["blocks.1.attn.hook_attn_scores"].double() - cache["blocks.1.attn.hook_lse"].double()[..., None]).exp(),
        pattern, atol=1e-5, rtol=1e-5,
    )  # fmt: skip
    assert "blocks.1.attn.hook_rot_q" not in observed.hook_dict, "they alone do not make this pattern"


@torch.no_grad()
def test_measures_and_maps_count_what_goes_to_no_key(ids):
    observed = see(large(GPT(attend=with_null("last"))), ids)
    _, cache = observed.run_with_cache(ids, names_filter=lambda n: ".attn." in n)
    frame = workbench.measure(observed, ["null_mass", "importance_entropy", "sink_mass", "concentration_parts"], ids)
    of = lambda name, layer: frame[(frame.metric == name) & (frame.layer == layer) & frame.variant.isna()]  # noqa: E731
    null = cache["blocks.2.attn.hook_null"].double()
    np.testing.assert_allclose(of("null_mass", 2).sort_values("head")["value"], null.mean((0, 2)), atol=1e-6)
    p = torch.cat((cache["blocks.2.attn.hook_received"].double() / 40, null.mean(-1, keepdim=True)), -1).mean(1)
    assert p.sum(-1).tolist() == pytest.approx([1, 1], abs=1e-6)
    entropy = of("importance_entropy", 2)
    assert entropy[entropy.control.isna()]["value"].item() == pytest.approx(
        float(torch.special.entr(p).sum(-1).mean()), abs=1e-6
    )
    parts = frame[(frame.metric == "concentration_parts") & (frame.layer == 2) & frame.control.isna()]
    assert (parts["value"] > -1e-9).all(), "a divergence of what goes to tokens, which sums to 1"
    mass = frame[frame.metric == "null_mass"]["value"]
    assert f"a column that is no token: {mass.mean():.1%} of all attention" in sinks_text(frame)
    inputs, found = attention_inputs(observed, ids[:1]), attention_overview(observed, ids[:1])
    pattern = cache["blocks.1.attn.hook_pattern"][0]
    np.testing.assert_allclose(np.nan_to_num(attention_map(inputs, 1, 3).weights), pattern[3], atol=1e-6)
    np.testing.assert_allclose(inputs.layers[1][0].null, cache["blocks.1.attn.hook_null"][0], atol=1e-6)
    heads = found.statistics[found.statistics.layer == 2]
    np.testing.assert_allclose(heads["null_mass"], null[0].mean(-1), atol=1e-6)


@torch.no_grad()
def test_a_replaced_pattern_or_score_takes_its_share_from_no_key(ids):
    observed = see(large(GPT(attend=with_null("last"))), ids)
    names = ["blocks.1.attn.hook_null", "blocks.1.attn.hook_pattern"]
    with observed.hooks([("blocks.1.attn.hook_pattern", lambda x, hook: x * 0.5)]):
        _, cache = observed.run_with_cache(ids, names_filter=names)
    torch.testing.assert_close(cache[names[0]], 1 - cache[names[1]].sum(-1), atol=1e-6, rtol=1e-5)
    with observed.hooks([("blocks.1.attn.hook_attn_scores", lambda x, hook: x - 100)]):
        _, cache = observed.run_with_cache(ids, names_filter=names)
    assert cache[names[0]].min() > 0.999
