"""Attention written step by step in any layout, and under `torch.autocast`: read as the module computes it."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from observed import BEFORE, STRANGERS, logits_of, see
from strangers import GPT, VOCABULARY, large
from transformers import LlamaConfig, LlamaForCausalLM

import workbench
from workbench.errors import WorkbenchError

ORDERS = "bsht", "bhts", "hbst", "thsb"


def by_einsum(order):
    """Scores [batch, head, query, key] in another order, the softmax over the axis of keys."""

    def attend(q, k, v, layer=0):
        seen = BEFORE if order.index("s") < order.index("t") else BEFORE.T
        lengths = [q.shape[2] if c in "st" else 1 for c in order]
        scores = torch.einsum(f"bhsd,bhtd->{order}", q, k) * 8**-0.5
        pattern = scores.masked_fill(~seen.reshape(lengths), -math.inf).softmax(order.index("t"))
        return torch.einsum(f"{order},bhtd->bhsd", pattern, v)

    return attend


def by_matmul(order):
    """The same, the scores permuted for the softmax alone."""

    def attend(q, k, v, layer=0):
        scores = (q @ k.mT * 8**-0.5).masked_fill(~BEFORE, -math.inf)
        pattern = scores.permute(["bhst".index(c) for c in order]).softmax(order.index("t"))
        return pattern.permute([order.index(c) for c in "bhst"]) @ v

    return attend


def keys_first(q, k, v, layer=0):
    return (k @ q.mT * 8**-0.5).masked_fill(~BEFORE.T, -math.inf).softmax(-2).mT @ v


FORMS = {
    f"{form.__name__} {order}": form(order) for order, form in zip(ORDERS, (by_einsum, by_matmul) * 2, strict=True)
}


@pytest.mark.fast(3)
@torch.no_grad()
@pytest.mark.parametrize("attend", [*FORMS.values(), keys_first], ids=[*FORMS, "keys first"])
def test_scores_are_read_in_any_order_of_batch_head_query_and_key(attend, ids):
    module = large(GPT(attend=attend))
    observed, at = see(module, ids), "blocks.1.attn.hook_"
    logits, cache = observed.run_with_cache(ids, [n for n in observed.hook_dict if n.startswith(at)])
    assert torch.equal(logits, module(ids)[0])
    q, k, v = (cache[f"{at}{x}"].double() for x in "qkv")
    pattern = (torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5).masked_fill(~BEFORE, -math.inf).softmax(-1)
    torch.testing.assert_close(cache[f"{at}pattern"].double(), pattern, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(cache[f"{at}received"].double(), pattern.sum(-2), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cache[f"{at}rot_q"].double(), q, atol=1e-5, rtol=1e-4)
    for name in ("pattern", "attn_scores"):
        edit = torch.randn(pattern.shape, generator=torch.Generator().manual_seed(1)).softmax(-1)
        with observed.hooks([(f"{at}{name}", lambda x, hook, edit=edit: edit)]):
            z = observed.run_with_cache(ids, [f"{at}z"])[1][f"{at}z"]
        used = edit.softmax(-1) if name == "attn_scores" else edit
        torch.testing.assert_close(z, torch.einsum("bhij,bjhd->bihd", used, v.float()), atol=1e-4, rtol=1e-4)


def llama(attention):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **shape)
    config._attn_implementation = attention
    return LlamaForCausalLM(config)


MIXED_PRECISION = {"llama sdpa": lambda: llama("sdpa"), "softmax by hand": STRANGERS["softmax by hand"]}


@pytest.mark.slow
@pytest.mark.fast(1)
@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, (torch.bfloat16, torch.float16)[number % 2]) for number, name in enumerate(MIXED_PRECISION)],
)
def test_under_autocast_attention_is_read_in_the_type_in_which_it_ran(name, dtype, ids):
    module, at = large(MIXED_PRECISION[name]()), "blocks.1.attn.hook_"

    def call(module, ids):
        with torch.autocast("cpu", dtype):
            return module(ids)

    own = logits_of(call(module, ids).to_tuple() if name.startswith("llama") else call(module, ids))
    for given, around in ((call, contextlib.nullcontext()), (None, torch.autocast("cpu", dtype))):
        with around:
            observed = see(module, ids, call=given)
            logits, cache = observed.run_with_cache(ids, [n for n in observed.hook_dict if n.startswith(at)])
            parts = [workbench.decompose(observed, ids, "logits", by=by) for by in ("layer", "head")]
        assert torch.equal(logits, own)
        assert {cache[f"{at}{x}"].dtype for x in ("v", "rot_q", "rot_k", "pattern")} == {dtype}
        q, k = (cache[f"{at}{x}"].double() for x in ("rot_q", "rot_k"))
        scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2))
        pattern = (scores * q.shape[-1] ** -0.5).masked_fill(~BEFORE, -math.inf).softmax(-1)
        step = 16 * torch.finfo(dtype).eps
        torch.testing.assert_close(cache[f"{at}pattern"].double(), pattern, atol=step, rtol=step)
        entropy = torch.special.entr(pattern).sum(-1)
        torch.testing.assert_close(cache[f"{at}row_entropy"].double(), entropy, atol=4 * step, rtol=step)
        assert all(part.error <= step * part.parts.abs().sum(0).max() for part in parts)


def masked_eagerly(bias, beside=0):
    """Eager attention under a bias [batch, 1, query, key], as Hugging Face's; with so many empty keys of a static cache."""

    def attend(q, k, v, layer=0):
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, beside)) for x in (k, v))
        return (q @ k.mT * 8**-0.5 + bias).softmax(-1) @ v

    return attend


LEAST = torch.finfo(torch.float32).min
CAUSAL_BIAS = torch.where(BEFORE, 0.0, LEAST).repeat(2, 1, 1, 1)


@pytest.mark.fast(1)
@torch.no_grad()
@pytest.mark.parametrize(("case", "fused"), [("an empty row", True), ("left padding", False), ("a static cache", True)])
def test_masks_of_padding_and_static_caches_are_read_as_the_module_applies_them(case, fused, ids):
    bias, beside = CAUSAL_BIAS.clone(), 0
    if case == "a static cache":
        bias, beside = torch.nn.functional.pad(bias, (0, 24), value=LEAST), 24
    else:
        bias[1, :, :, : 40 if case == "an empty row" else 9] = LEAST

    def attend(q, k, v, layer=0):
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, beside)) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    module = large(GPT(attend=attend if fused else masked_eagerly(bias, beside)))
    observed, at = see(module, ids), "blocks.1.attn.hook_"
    assert observed.structure.layers[1].attention.exact
    _, cache = observed.run_with_cache(ids, [f"{at}{x}" for x in ("q", "k", "v", "z", "pattern")])
    _, streamed = observed.run_with_cache(ids, [f"{at}{x}" for x in ("row_entropy", "received")])
    q, k, v = (cache[f"{at}{x}"] for x in "qkv")
    scores = torch.nn.functional.pad(torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5, (0, beside))
    whole = (scores + bias).softmax(-1)
    pattern = whole[..., :40]
    torch.testing.assert_close(cache[f"{at}pattern"], pattern, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(cache[f"{at}z"], torch.einsum("bhij,bjhd->bihd", pattern, v), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(streamed[f"{at}received"], pattern.sum(-2), atol=1e-4, rtol=1e-4)
    entropy = torch.special.entr(pattern).sum(-1) + torch.special.entr(whole[..., 40:].sum(-1))
    torch.testing.assert_close(streamed[f"{at}row_entropy"], entropy, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("bias", "cause"),
    [
        (torch.full((2, 1, 40, 40), LEAST), "its mask hides every position: give example tokens of which some are no padding"),
        (torch.where(BEFORE & (torch.arange(40) > 4), 0.0, -math.inf), r"GPT gives NaN on the example tokens.*finfo\(dtype\).min"),
    ],
    ids=["padding alone", "NaN"],
)  # fmt: skip
def test_masks_that_leave_nothing_to_read_are_refused_by_name(bias, cause, ids):
    with pytest.raises(WorkbenchError, match=cause):
        see(large(GPT(attend=masked_eagerly(bias))), ids)
