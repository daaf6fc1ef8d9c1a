"""Decoders whose blocks are not what they look like: streams kept outside, several streams, mixers that are no attention."""

from __future__ import annotations

import torch
from strangers import GPT, HEADS, LAYERS, D, FusedAttention, GPTBlock, eagerly
from torch import nn


class Outside(GPT):
    """Norms and additions stand outside the parts, as in x-transformers: a part reads the normed stream."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(D), part])
            for i in range(LAYERS)
            for part in (FusedAttention(i), nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D)))
        )
        self.transformer.h = nn.ModuleList()

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx)
        for norm, part in self.layers:
            x = x + (part(norm(x), {}) if isinstance(part, FusedAttention) else part(norm(x)))
        return self.lm_head(self.transformer.ln_f(x))


class StreamsBlock(GPTBlock):
    """Reads two streams [2, batch, pos, d_model] and adds to both."""

    def forward(self, streams, memory):
        x = 0.7 * streams[0] + 0.3 * streams[1]
        x = self.attn(self.ln_1(x), memory)
        streams = streams + torch.stack((x, 0.5 * x))
        y = self.mlp(self.ln_2(streams[0]))
        return streams + torch.stack((y, -y))


class Streams(GPT):
    """Hyper-connections: several streams, mixed inside the blocks."""

    def __init__(self):
        super().__init__(block=StreamsBlock)

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx)
        streams = torch.stack((x, 0 * x))
        for block in self.transformer.h:
            streams = block(streams, {})
        return self.lm_head(self.transformer.ln_f(streams.sum(0)))


class Running(nn.Module):
    """A mixer that is no attention: the running mean of a projection."""

    def __init__(self):
        super().__init__()
        self.w, self.out = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, memory):
        y = self.w(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return self.out(y)


class Scaled(GPTBlock):
    """What parts make is scaled before it is added, so that no two outputs add up."""

    def forward(self, x, memory):
        x = x + 0.22 * self.attn(self.ln_1(x), memory)
        return x + 0.22 * self.mlp(self.ln_2(x))


class TwoMixers(GPTBlock):
    """Adds three outputs, as Falcon-H1 does."""

    def __init__(self, attention):
        super().__init__(attention)
        self.other = nn.Linear(D, D)

    def forward(self, x, memory):
        y = self.ln_1(x)
        x = x + (self.attn(y, memory) + self.other(y))
        return x + self.mlp(self.ln_2(x))


def squared(q, k, v, layer):
    """Attention without an exponential."""
    e = (q @ k.mT * q.shape[-1] ** -0.5).relu().square().tril() + 1e-6 * torch.ones(q.shape[2], q.shape[2]).tril()
    return e / e.sum(-1, keepdim=True) @ v


def hybrid(block=GPTBlock):
    """Attention in block 1 alone."""
    return GPT(attention=lambda i: FusedAttention(i) if i == 1 else Running(), block=block)


def half_written():
    """Block 0 attends with something that is no softmax, later ones in one call; values of all are mixed with the first."""
    attend = [squared, None, eagerly("torch")]
    pairs = [(1.0, 1.0), (0.3, 0.7), (0.3, 0.7)]
    return GPT(attention=lambda i: FusedAttention(i, pairs[i], *([attend[i]] if attend[i] else [])))


def negative(q, k, v, layer):
    """Differential attention in one product."""
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    one, two = ((x @ k.mT * 8**-0.5).masked_fill(future, float("-inf")).softmax(-1) for x in (q.roll(1, -1), q))
    return (two - 0.4 * one) @ v


def talking(q, k, v, layer):
    """Heads exchange their patterns after the softmax."""
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    pattern = (q @ k.mT * 8**-0.5).masked_fill(future, float("-inf")).softmax(-1)
    mix = torch.eye(HEADS) + 0.3 * torch.arange(HEADS * HEADS).view(HEADS, HEADS).sin()
    return torch.einsum("gh,bhij->bgij", mix, pattern) @ v


def sinking(form):
    """A sink's share is taken through the log-sum-exp after the attention."""

    def attend(q, k, v, layer):
        future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        scores = (q @ k.mT * 8**-0.5).masked_fill(future, float("-inf"))
        sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])[:, None]
        share = torch.sigmoid(scores.logsumexp(-1) - sinks)[..., None]
        if form == "eager":
            return scores.softmax(-1) @ v * share
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True) * share

    return attend


class Gated(FusedAttention):
    """The heads' outputs pass a gate before W_O, or are multiplied by numbers of any sign."""

    def __init__(self, layer, per_head=False, positive=True):
        super().__init__(layer)
        self.positive = positive
        self.gate = nn.Linear(D, HEADS if per_head else D)

    def forward(self, x, memory):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.c_attn(x).split(D, dim=2))
        y = self.attend(q, k, v).transpose(1, 2)
        gate = self.gate(x).unflatten(-1, (HEADS, -1))
        gate = gate.sigmoid() if self.positive else gate
        return self.c_proj((y * gate).reshape(x.shape))


class Headed(GPT):
    """A head of several parts: what its last norm reads is no stream."""

    def __init__(self):
        super().__init__()
        self.first_norm, self.dense = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx)
        for block in self.transformer.h:
            x = block(x, {})
        x = nn.functional.gelu(self.dense(self.first_norm(x)))
        return self.lm_head(self.transformer.ln_f(x))


class PositionsFirst(GPT):
    """Streams are [pos, batch, d_model], as in fairseq; logits are too where they are not turned at the end."""

    def __init__(self, turned=True, **options):
        super().__init__(attention=PositionsFirstAttention, **options)
        self.turned = turned

    def forward(self, idx, targets=None):
        ids = idx.T
        x = self.transformer.wte(ids) + self.transformer.wpe(torch.arange(len(ids)))[:, None]
        memory = {}
        for block in self.transformer.h:
            x = block(x, memory)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits.transpose(0, 1) if self.turned else logits


class PositionsFirstAttention(FusedAttention):
    """Values are 0.3 of the first layer's and 0.7 of its own."""

    def forward(self, x, memory):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3) for y in self.c_attn(x).split(D, dim=2))
        first = memory.setdefault("v", v)
        y = self.attend(q, k, 0.3 * first + 0.7 * v if self.layer else v)
        return self.c_proj(y.permute(2, 0, 1, 3).flatten(2))
