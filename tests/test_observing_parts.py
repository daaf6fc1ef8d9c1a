"""What the stream and the logits of foreign decoders are made of: parts that sum to them, and each is what it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from observed import LAMBDAS, see, stranger
from odd_stacks import Gated, Scaled, TwoMixers, hybrid, negative
from strangers import GPT, HEADS, D, GPTBlock, Pulled, large
from torch import nn

import workbench
from workbench.errors import BadData, WorkbenchError
from workbench.models.decomposition import decompose
from workbench.prompts import check_model, edit_sweep, fit_tuned_lens, logit_attribution, logit_lens

WIDE = torch.float64
LEVELS = ("layer", "head", "value_path")


class RootMeanSquare(nn.Module):
    """Its gain is one more than its weight, as in Gemma."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(D))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + self.weight)


class PostNormed(GPTBlock):
    """What parts make is normed before it is added, as in Gemma 2 and OLMo 2."""

    def __init__(self, attention):
        super().__init__(attention)
        self.after_1, self.after_2 = RootMeanSquare(), nn.LayerNorm(D)

    def forward(self, x, memory):
        x = x + self.after_1(self.attn(self.ln_1(x), memory))
        return x + self.after_2(self.mlp(self.ln_2(x)))


class Recalling(GPTBlock):
    """The stream is scaled and what the first block reads comes back."""

    def forward(self, x, memory):
        x = 0.8 * x + 0.3 * memory.setdefault("x", x)
        x = x + self.attn(self.ln_1(x), memory)
        return x + self.mlp(self.ln_2(x))


class WritingOver(GPTBlock):
    """Parallel, and the MLP's output is written over before anything returns."""

    def forward(self, x, memory):
        y = self.mlp(self.ln_2(x))
        y += self.attn(self.ln_1(x), memory)
        return x + y


class ByToken(nn.Module):
    """For each token some of one and some of the other."""

    def forward(self, x, y):
        share = torch.sigmoid(4 * y.mean(-1, keepdim=True))
        return share * x + (1 - share) * y


class Leaving(GPTBlock):
    """The first one leaves what it reads behind, and a mixture by token is what the MLPs read (Inkling 2)."""

    def __init__(self, attention):
        super().__init__(attention)
        self.mix = ByToken()

    def forward(self, x, memory):
        attended = self.attn(self.ln_1(x), memory)
        stream = attended if memory.setdefault("first", x) is x else x + attended
        return stream + self.mlp(self.ln_2(self.mix(memory["first"], stream)))


class TwoStreams(GPTBlock):
    """Each of two streams grows by what reads the other (Reformer)."""

    def forward(self, x, other):
        x = x + self.attn(self.ln_1(other), {})
        return other + self.mlp(self.ln_2(x)), x


class Reversible(GPT):
    def forward(self, idx, targets=None):
        x = other = self.transformer.wte(idx)
        for block in self.transformer.h:
            other, x = block(x, other)
        return self.lm_head(self.transformer.ln_f(other)), None


class Ended(GPT):
    """A decoder with an end of its own: `norm` of the stream, `then` of the logits."""

    def __init__(self, norm=None, then=None, **options):
        super().__init__(**options)
        self.transformer["ln_f"], self.then = norm or nn.Identity(), then

    def forward(self, idx, targets=None):
        logits, _ = super().forward(idx)
        return self.then(logits) if self.then else logits


ENDINGS = {
    "root mean square": (RootMeanSquare, None),
    "no norm": (nn.Identity, None),
    "logits times 0.25": (RootMeanSquare, lambda x: 0.25 * x),
}
BLOCKS = {
    "scaled": Scaled, "post-normed": PostNormed, "recalling": Recalling, "writing over": WritingOver, "leaving": Leaving,
}  # fmt: skip


def wide(module):
    return large(module).to(WIDE)


def sums(observed, ids, tolerance=1e-9, levels=LEVELS):
    """Each level of the last stream and of the logits, held against the module's own."""
    true = observed.everywhere(ids)
    for by in levels:
        assert decompose(observed, ids, by=by).error < tolerance
        found = decompose(observed, ids, "logits", by)
        torch.testing.assert_close(found.parts.sum(0), true, atol=tolerance, rtol=0)
    return found


@pytest.mark.parametrize("block", [GPTBlock, PostNormed, Recalling, Scaled])
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 0), (torch.bfloat16, 300), (torch.float16, 300)])
@torch.no_grad()
def test_the_rounding_of_a_massive_activation_confuses_no_parts(ids, block, dtype, size):
    """In bfloat16 the rounding of a channel of 300 is larger than all that attention and MLP add to the other channels."""
    module, factor = large(GPT(block=block)), 0.22 if block is Scaled else 1.0
    module.transformer.wte.weight[:, 3] += size
    module, added = module.to(dtype), {}
    for n, one in enumerate(module.transformer.h):
        parts = (one.after_1, one.after_2) if block is PostNormed else (one.attn, one.mlp)
        for name, part in zip(("attn_out", "mlp_out"), parts, strict=True):
            part.register_forward_hook(lambda _, x, y, to=f"blocks.{n}.hook_{name}": added.update({to: factor * y}))
    module(ids)
    plain = dict(added)
    observed = see(module, ids)
    _, cache = observed.run_with_cache(ids, names_filter=list(plain))
    for name, part in plain.items():
        torch.testing.assert_close(cache[name], part, atol=0, rtol=1e-2, msg=name)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_small_pull_toward_the_first_values_is_a_path_in_half_precision(ids, dtype):
    """A pull of less than 20 % of a bfloat16 head's output was left out of its value paths."""
    slightly = type("Slightly", (Pulled,), {"pull": 0.05})
    observed = see(large(GPT(attention=slightly)).to(dtype), ids)
    heads, paths = (decompose(observed, ids, by=by) for by in ("head", "value_path"))
    for head in range(HEADS):
        both, whole = paths[f"L2H{head}.own"] + paths[f"L2H{head}.first"], heads[f"L2H{head}"]
        assert float((both - whole).norm() / whole.norm()) < 0.01


PATHS = (
    "softmax by hand", "grouped heads", "grouped einsum", "shared values", "pulled", "headwise", "dense", "bare matrix", "averaged",
    "inline",
)  # fmt: skip
"""Strangers whose attention, value path or stream is taken apart in a way of its own."""


@pytest.mark.fast(4)
@torch.no_grad()
@pytest.mark.parametrize("name", PATHS)
def test_parts_sum_to_the_logits_of_strangers(name, ids):
    *_, observed = stranger(name)
    sums(observed, ids, 1e-4, levels=("value_path",))
    frame = logit_attribution(observed, ids[:1], 9, 5, 11).frame
    for finer, coarser in (("head", "layer"), ("value_path", "head")):
        keys = ["part", "layer"] if coarser == "layer" else ["part", "layer", "head"]
        apart, whole = (frame[frame["level"] == x].groupby(keys, dropna=False)["value"].sum() for x in (finer, coarser))
        assert (apart - whole).abs().max() < 1e-4


@torch.no_grad()
def test_each_part_is_what_plain_torch_says(ids):
    """Of values that are mixed by 0.3141592 and 0.7, through W_O, the frozen norm and the head."""
    module = wide(GPT(LAMBDAS))
    observed = see(module, ids)
    found = sums(observed, ids)
    _, cache = observed.run_with_cache(ids)
    part, attn = module.transformer, module.transformer.h[1].attn
    stream = cache["blocks.2.hook_resid_post"]
    scale = (stream.var(-1, unbiased=False, keepdim=True) + part.ln_f.eps).sqrt()

    def arrives(x):
        return (x - x.mean(-1, keepdim=True)) / scale * part.ln_f.weight @ module.lm_head.weight.T

    w_o = attn.c_proj.weight.T.unflatten(0, (HEADS, -1))
    for head in range(HEADS):
        pattern = cache["blocks.1.attn.hook_pattern"][:, head]
        for path, c in zip(("first", "own"), LAMBDAS[1], strict=True):
            v = cache[f"blocks.1.attn.{path}.hook_v"][:, :, head]
            torch.testing.assert_close(found[f"L1H{head}.{path}"], arrives(pattern @ (c * v) @ w_o[head]))
    torch.testing.assert_close(found["2_mlp_out"], arrives(cache["blocks.2.hook_mlp_out"]))
    torch.testing.assert_close(found["embed"], arrives(cache["blocks.0.hook_resid_pre"]))
    torch.testing.assert_close(found["1_attn_bias"], arrives(attn.c_proj.bias).expand_as(found["1_attn_bias"]))
    bias = (module.lm_head.weight @ part.ln_f.bias).expand_as(found["bias"])
    torch.testing.assert_close(found["bias"], bias, atol=1e-9, rtol=0)


@pytest.mark.fast(1)
@torch.no_grad()
@pytest.mark.parametrize("words", ENDINGS)
def test_ends_of_every_kind_are_gone_through(words, ids):
    norm, then = ENDINGS[words]
    observed = see(wide(Ended(norm(), then)), ids)
    row = observed.sites.set_index("site").loc["final norm"]
    assert row["found"]
    assert words in ("no norm", row["where"]) or words in row["where"]
    sums(observed, ids)


@pytest.mark.fast(3)
@torch.no_grad()
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_that_norm_scale_recall_or_write_over_are_taken_apart(name, ids):
    module = wide(GPT(block=BLOCKS[name]))
    observed = see(module, ids)
    sums(observed, ids)
    _, cache = observed.run_with_cache(ids)
    block, x = module.transformer.h[1], cache["blocks.1.hook_resid_pre"]
    if name == "scaled":
        attended = 0.22 * block.attn(block.ln_1(x), {})
        torch.testing.assert_close(cache["blocks.1.hook_attn_out"], attended)
        with observed.hooks([("blocks.1.hook_attn_out", lambda x, hook: 0 * x)]):
            changed = observed.run_with_cache(ids, "blocks.1.hook_resid_post")[1]["blocks.1.hook_resid_post"]
        torch.testing.assert_close(changed, x + 0.22 * block.mlp(block.ln_2(x)))
    if name == "leaving":
        first, x = module.transformer.h[0], cache["blocks.0.hook_resid_pre"]
        torch.testing.assert_close(cache["blocks.0.hook_attn_out"], first.attn(first.ln_1(x), {}))
        assert decompose(observed, ids)["embed"].abs().max() == 0
    if name == "recalling":
        weight = decompose(observed, ids)["embed"] / cache["blocks.0.hook_resid_pre"]
        # 1.1 E in the first block, then 0.8 times and 0.3 more in each
        torch.testing.assert_close(weight, torch.full_like(weight, (1.1 * 0.8 + 0.3) * 0.8 + 0.3))


@pytest.mark.slow
@torch.no_grad()
def test_a_head_of_several_mixers_and_last_positions_are_read(ids):
    sums(see(large(GPT(last=True)), ids), ids, 1e-4)
    labels = decompose(see(large(hybrid()), ids), ids, by="value_path").labels
    assert "0_attn_out" in labels
    assert "L1H3.own" in labels
    module = large(GPT(block=TwoMixers))
    beside, stream, block = (
        see(module, ids),
        module.transformer.wte(ids) + module.transformer.wpe.weight[: ids.shape[1]],
        module.transformer.h[0],
    )
    parts = decompose(beside, ids)
    assert parts.labels == ["embed", "0_block_out", "1_block_out", "2_block_out"], (
        "a block that adds three outputs stays whole"
    )
    torch.testing.assert_close(parts["0_block_out"], block(stream, {}) - stream, atol=1e-5, rtol=0)
    sums(beside, ids, 1e-4, ["layer"])
    with pytest.raises(BadData, match="layer 0 of this model shows no parts"):
        decompose(beside, ids, by="head")
    for per_head in (True, False):
        gated = see(large(GPT(attention=lambda i, of=per_head: Gated(i, per_head=of))), ids)
        assert sums(gated, ids, 1e-4)["L1H0.own"].abs().max() > 0


@torch.no_grad()
def test_parts_are_those_of_the_weights_of_now(ids):
    """A live module trains on: its norm, its head and its mixing are found when they are asked for."""
    module = wide(GPT(LAMBDAS))
    observed = see(module, ids)
    module.transformer["ln_f"].weight.mul_(3)
    module.transformer["h"][1].attn.lambdas = (0.9, 0.2)
    module.lm_head.weight.add_(0.1)
    sums(observed, ids)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.fast(1)
@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "by", "told"),
    [
        (lambda: Reversible(block=TwoStreams), "layer", "the stream is kept outside it"),
        (lambda: GPT(attend=negative), "value_path", "W_O reads a combination of attn.0 and attn.1"),
        (lambda: GPT(attend=lambda q, k, v, i: F.scaled_dot_product_attention(q, k, v.abs(), is_causal=True)),
         "value_path", "its values hold more than what layers project"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_apart_is_refused_in_words(make, by, told, ids):
    observed = see(large(make()), ids)
    with pytest.raises(BadData, match=told):
        decompose(observed, ids, None, by)


@torch.no_grad()
def test_a_level_that_is_missing_is_a_note_and_the_others_answer(ids):
    found = logit_attribution(see(large(GPT(attention=lambda i: Gated(i, positive=False))), ids), ids[:1], -1, 5)
    assert list(found.totals) == ["layer", "head"]
    assert found.notes[0].startswith("No parts by value path: layer 0 shows no value paths: W_O reads more")


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "cap"), [(torch.float32, 3), (torch.bfloat16, 20), (torch.float16, 20)])
def test_a_soft_cap_of_logits_is_found_where_rounding_hides_it_in_each_logit(ids, dtype, cap):
    """A bfloat16 logit of 12.6 under a cap of 30 had parts that summed to 13.4."""
    module = large(Ended(nn.LayerNorm(D), lambda x: cap * torch.tanh(x / cap))).to(dtype)
    module.lm_head.weight.mul_(2)
    with pytest.raises(BadData, match="a soft cap"):
        logit_attribution(see(module, ids), ids[:1], -1, 5)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [0.985, 1.0])
def test_a_factor_of_logits_near_one_is_told_in_half_precision(ids, dtype, factor):
    """A factor of 0.985 was taken for 1 in bfloat16, so parts were 1.5 % too large."""
    observed = see(large(Ended(nn.LayerNorm(D), lambda x: factor * x)).to(dtype), ids)
    assert observed.anatomy().structure.ending.factor == pytest.approx(factor, abs=2e-3 * (factor < 1))


@torch.no_grad()
@pytest.mark.parametrize("value", [-torch.inf, torch.finfo(torch.float32).min, -1e9])
def test_tokens_that_a_mask_rules_out_change_no_number_of_the_others(ids, value):
    """Image tokens of Chameleon and rows that pad a vocabulary. Parts of a cached run were a fifth too small, changes of a logit 0."""

    def masked(logits):
        logits[..., 53:] = value
        return logits

    ids = ids % 53
    plain, hidden = (see(large(Ended(nn.LayerNorm(D), then)), ids) for then in (None, masked))
    alone, free = ids[:1], plain(ids[:1])[0, :, :53]
    parts, right = (decompose(m, m.run_with_cache(ids)[1], "logits", tokens=5)["embed"] for m in (hidden, plain))
    torch.testing.assert_close(parts, right)
    assert logit_attribution(hidden, alone, -1, 5).error < 1e-5
    with plain.hooks([("blocks.1.hook_mlp_out", lambda x, hook: 0 * x)]):
        change = plain(ids[:1])[0, -1, :53] - free[-1]
    assert edit_sweep(hidden, alone, "remove:part=mlp", answer=5).logit[1] == pytest.approx(
        float(change[5] - change.mean()), abs=1e-5
    )
    lens, module = logit_lens(hidden, alone), plain.foreign
    stream = plain.run_with_cache(alone)[1]["blocks.1.hook_resid_pre"]
    log_p, log_q = (x.log_softmax(-1) for x in (free, module.lm_head(module.transformer.ln_f(stream))[0, :, :53]))
    np.testing.assert_allclose(lens.entropy[1], -(log_q.exp() * log_q).sum(-1), atol=1e-5)
    np.testing.assert_allclose(lens.kl[1], (log_p.exp() * (log_p - log_q)).sum(-1), atol=1e-5)
    assert fit_tuned_lens(hidden, ids).held_out["kl"].notna().all()
    if value == -torch.inf:
        with pytest.raises(BadData, match="rules out has no parts"):
            logit_attribution(hidden, ids[:1], -1, 55)


@torch.no_grad()
def test_sums_that_a_hook_breaks_are_refused(ids):
    observed = stranger("hidden lambdas")[-1]
    with (
        observed.hooks([("blocks.1.hook_resid_post", lambda x, hook: 2 * x)]),
        pytest.raises(WorkbenchError, match="parts by layer miss the stream by"),
    ):
        decompose(observed, ids)
    with (
        observed.hooks([("unembed.hook_in", lambda x, hook: x + 1)]),
        pytest.raises(WorkbenchError, match="miss logits by"),
    ):
        decompose(observed, ids, "logits")
    assert check_model(observed, ids[:1]).set_index("check").loc[["parts of the stream", "value paths"], "holds"].all()
    with pytest.raises(WorkbenchError, match="final norm is not ours to apply"):
        workbench.measure(observed, "logit_attribution", ids)
