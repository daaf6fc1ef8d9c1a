"""Decoders with several attentions in a block, and with positions inside that are no tokens."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from strangers import GPT, HEADS, D, FusedAttention, GPTBlock, causal, eagerly, split
from torch import nn


def softmax(q, k):
    """Causal pattern [batch, head, query, key]."""
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, -math.inf).softmax(-1)


class Differential(nn.Module):
    """Two attentions over half the heads' width each, subtracted, normed by head; in one of the ways it is written."""

    def __init__(self, layer, form="calls", norm=True):
        super().__init__()
        self.form, self.share = form, 0.3 + 0.1 * layer
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.norm = nn.RMSNorm(D // 2) if norm else nn.Identity()

    def forward(self, x, memory):
        b, t, _ = x.shape
        q, k, v = split(self.wq(x)), split(self.wk(x)), split(self.wv(x), HEADS // 2)
        (q0, q1), (k0, k1) = ((y[:, ::2], y[:, 1::2]) for y in (q, k))
        if self.form == "calls":
            y = causal(q0, k0, v) - self.share * causal(q1, k1, v)
        elif self.form == "halves of values":
            one, two = ([causal(a, c, half) for half in v.chunk(2, -1)] for a, c in ((q0, k0), (q1, k1)))
            y = torch.cat(one, -1) - self.share * torch.cat(two, -1)
        elif self.form == "one softmax":  # as published
            pattern = softmax(q, k).view(b, HEADS // 2, 2, t, t)
            y = (pattern[:, :, 0] - self.share * pattern[:, :, 1]) @ v
        else:
            y = (softmax(q0, k0) - self.share * softmax(q1, k1)) @ v
        return self.wo(0.8 * self.norm(y).transpose(1, 2).reshape(b, t, D))


class Groups(FusedAttention):
    """Half of the heads see a window, half everything; `gated`: all see both, weighed by token."""

    def __init__(self, layer, gated=False):
        super().__init__(layer)
        self.gate = nn.Linear(D, 2 * HEADS) if gated else None

    def forward(self, x, memory):
        q, k, v = (split(y) for y in self.c_attn(x).split(D, dim=2))
        place = torch.arange(x.shape[1])
        near = (place[:, None] >= place) & (place[:, None] - place < 4)
        window = lambda *qkv: F.scaled_dot_product_attention(*qkv, attn_mask=near)  # noqa: E731
        if self.gate is None:
            y = torch.cat((window(*(y[:, :2] for y in (q, k, v))), causal(*(y[:, 2:] for y in (q, k, v)))), 1)
        else:
            g = self.gate(x).sigmoid().unflatten(-1, (2, HEADS)).permute(2, 0, 3, 1)[..., None]
            y = g[0] * window(q, k, v) + g[1] * causal(q, k, v)
        return self.c_proj(y.transpose(1, 2).reshape(x.shape))


class TwoAttentions(GPTBlock):
    """Two attentions one after the other, each with matrices of its own."""

    def __init__(self, attention):
        super().__init__(attention)
        self.ln_3, self.more = nn.LayerNorm(D), FusedAttention(0, attend=eagerly("torch"))

    def forward(self, x, memory):
        return super().forward(x + self.more(self.ln_3(x), {}), memory)


class Registers(GPT):
    """Learned positions before and after the tokens."""

    def __init__(self, before=2, after=1, **parts):
        super().__init__(**parts)
        self.before, self.registers = before, nn.Parameter(torch.zeros(before + after, D))

    def forward(self, idx, targets=None):
        b, n = len(idx), self.before
        own = self.registers.expand(b, *self.registers.shape)
        x = torch.cat((own[:, :n], self.transformer.wte(idx), own[:, n:]), 1)
        x = x + self.transformer.wpe(torch.arange(x.shape[1]))
        for block in self.transformer.h:
            x = block(x, {})
        return self.lm_head(self.transformer.ln_f(x))  # of all positions


class Prefixed(FusedAttention):
    """Keys and values of a learned prefix before those of the tokens."""

    def __init__(self, layer, fused=True, n=3):
        super().__init__(layer)
        self.fused, self.prefix = fused, nn.Parameter(torch.zeros(2, HEADS, n, D // HEADS))

    def forward(self, x, memory):
        q, k, v = (split(y) for y in self.c_attn(x).split(D, dim=2))
        own, t = self.prefix.expand(len(x), *self.prefix.shape), x.shape[1]
        k, v = torch.cat((own[:, 0], k), 2), torch.cat((own[:, 1], v), 2)
        seen = F.pad(torch.ones(t, t, dtype=torch.bool).tril(), (k.shape[2] - t, 0), value=True)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        else:
            y = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -math.inf).softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(x.shape))


class Packed(GPT):
    """All sequences in one row, kept apart by a mask (or not)."""

    def __init__(self, form="fused", apart=True):
        super().__init__(attend=self.attend)
        self.form, self.apart, self.sizes = form, apart, (0, 0)

    def attend(self, q, k, v, layer):
        b, t = self.sizes
        seen = torch.ones(b * t, b * t, dtype=torch.bool).tril()
        if self.apart:
            which = torch.arange(b).repeat_interleave(t)
            seen &= which[:, None] == which
        if self.form == "fused":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -math.inf).softmax(-1) @ v

    def forward(self, idx, targets=None):
        self.sizes = b, t = idx.shape
        x = self.transformer.wte(idx.reshape(1, -1)) + self.transformer.wpe(torch.arange(t).repeat(b))
        for block in self.transformer.h:
            x = block(x, {})
        return self.lm_head(self.transformer.ln_f(x))[0]
