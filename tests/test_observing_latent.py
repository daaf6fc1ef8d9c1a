"""Multi-head latent attention (DeepSeek-AI 2024, eqs. 9-19): keys of two parts, values from a compressed state that is shown."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from observed import BEFORE, PLACE, see, stranger
from strangers import GPT, HEADS, D, large, split
from torch import nn

from workbench.hook_names import STATISTICS
from workbench.kernels.full_pattern_reference import statistics_of

RANK, PLAIN, TURNED, VALUE = 12, 8, 4, 6


def turned(x):
    """Rotary positions on the last axis of [..., pos, TURNED]."""
    angle = PLACE[: x.shape[-2], None] / 100 ** (torch.arange(0, TURNED, 2) / TURNED)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class Latent(nn.Module):
    """Queries and keys have a plain and a turned part; the keys' turned one is shared by all heads."""

    def __init__(self, layer, *, of_one_head=False):
        super().__init__()
        self.of_one_head = of_one_head
        self.q = nn.Linear(D, HEADS * (PLAIN + TURNED), bias=False)
        self.down, self.norm = nn.Linear(D, RANK + TURNED, bias=False), nn.LayerNorm(RANK)
        self.up, self.out = (
            nn.Linear(RANK, HEADS * (PLAIN + VALUE), bias=False),
            nn.Linear(HEADS * VALUE, D, bias=False),
        )

    def parts(self, x):
        q, (state, shared) = split(self.q(x)), self.down(x).split((RANK, TURNED), -1)
        state = self.norm(state)
        up = self.up(state[:, None])[:, 0] if self.of_one_head else self.up(state)
        k, v = split(up).split((PLAIN, VALUE), -1)
        q = torch.cat((q[..., :PLAIN], turned(q[..., PLAIN:])), -1)
        k = torch.cat((k, turned(shared)[:, None].expand(-1, HEADS, -1, -1)), -1)
        return q, k, v, state

    def forward(self, x, memory):
        q, k, v, _ = self.parts(x)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@torch.no_grad()
@pytest.mark.parametrize("of_one_head", [False, True])  # the second as transformers' DeepSeek hands it on
def test_latent_attention_shows_keys_with_both_parts_values_after_their_projection_and_what_they_come_from(
    ids, of_one_head
):
    module = large(GPT(attention=lambda i: Latent(i, of_one_head=of_one_head)))
    observed = see(module, ids)
    names = [n for n in observed.hook_dict if n.startswith("blocks.1")]
    logits, cache = observed.run_with_cache(ids, names_filter=names)
    assert torch.equal(logits, module(ids)[0])
    block = module.transformer.h[1]
    q, k, v, state = block.attn.parts(block.ln_1(cache["blocks.1.hook_resid_pre"]))
    assert torch.equal(cache["blocks.1.attn.hook_latent"], state)
    wanted = {"rot_q": q, "rot_k": k, "v": v}
    for name, true in wanted.items():
        assert torch.equal(cache[f"blocks.1.attn.hook_{name}"], true.transpose(1, 2)), name
    assert torch.equal(cache["blocks.1.attn.own.hook_v"], v.transpose(1, 2))
    scores = (q.double() @ k.double().mT / math.sqrt(PLAIN + TURNED)).masked_fill(~BEFORE, -math.inf)
    pattern = scores.softmax(-1)
    for name in STATISTICS:
        found, true = cache[f"blocks.1.attn.hook_{name}"].double(), getattr(statistics_of(scores, pattern), name)
        torch.testing.assert_close(found, true, atol=2e-5, rtol=1e-5, msg=name)
    torch.testing.assert_close(
        cache["blocks.1.attn.hook_z"].double(), (pattern @ v.double()).transpose(1, 2), atol=1e-5, rtol=1e-5
    )
    assert observed.architecture == "transformer"


@torch.no_grad()
def test_a_replaced_latent_changes_values_and_the_plain_part_of_keys_alone(ids):
    observed = see(large(GPT(attention=lambda i: Latent(i, of_one_head=True))), ids)
    names = ["blocks.1.attn.hook_v", "blocks.1.attn.hook_rot_k"]
    _, before = observed.run_with_cache(ids, names_filter=names)
    with observed.hooks([("blocks.1.attn.hook_latent", lambda state, hook: state * 0)]):
        _, after = observed.run_with_cache(ids, names_filter=names)
    assert not after[names[0]].any()
    assert torch.equal(after[names[1]][..., PLAIN:], before[names[1]][..., PLAIN:])
    assert not after[names[1]][..., :PLAIN].any()
    assert "blocks.1.attn.hook_latent" not in stranger("fused")[-1].hook_dict
