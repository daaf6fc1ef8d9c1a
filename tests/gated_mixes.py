"""Decoders whose values are mixed by the token: gates on the first layer's values, tables of values by token id."""

from __future__ import annotations

import torch
from strangers import GPT, HEADS, LAYERS, VOCABULARY, D, causal, split
from torch import nn

KV = HEADS


class Mixing(nn.Module):
    """Queries, keys and values apart; `mix(attention, v, x, memory)` makes the values [batch, pos, head, d_head] that are used."""

    def __init__(self, layer, mix, own=True):
        super().__init__()
        self.layer, self.mix = layer, mix
        self.q, self.k, self.o = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.v = nn.Linear(D, D, bias=False) if own else None
        self.gate = nn.Linear(12, KV, bias=False)

    def forward(self, x, memory):
        v = self.v(x).unflatten(-1, (KV, -1)) if self.v else None
        v = self.mix(self, v, x, memory)
        y = causal(split(self.q(x)), split(self.k(x)), v.transpose(1, 2))
        return self.o(y.transpose(1, 2).reshape(x.shape))


class Tabled(GPT):
    """Tables of values by token id beside the embedding, handed from block to block with their own names."""

    def __init__(self, mix, tables=(0, 2), own=lambda i: True):
        super().__init__(attention=lambda i: Mixing(i, mix, own(i)))
        self.value_embeds = nn.ModuleDict({str(i): nn.Embedding(VOCABULARY, D) for i in tables})

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.shape[1]))
        memory = {}
        for i, block in enumerate(self.transformer.h):
            name = str(i)
            memory["table"] = self.value_embeds[name](idx) if name in self.value_embeds else None
            x = block(x, memory)
        return self.lm_head(self.transformer.ln_f(x))


def gate_of(attention, x):
    """[batch, pos, head, 1] in 0..1."""
    return attention.gate(x[..., :12]).sigmoid()[..., None]


def added(attention, v, x, memory):
    """SATFormer: V + relu(gate) V_1, a weight for each token and head."""
    first = memory.setdefault("v", v)
    return v + attention.gate(x[..., :12]).relu()[..., None] * first if attention.layer else v


def convex(attention, v, x, memory):
    """(1 - g) V + g V_1, one gate for all heads of a token."""
    first = memory.setdefault("v", v)
    g = gate_of(attention, x)[..., :1, :]
    return (1 - g) * v + g * first if attention.layer else v


def embedded(attention, v, x, memory):
    """nanochat: V + 3 sigmoid(W x[:12]) E[token] where there is a table."""
    table = memory["table"]
    return v if table is None else v + 3 * gate_of(attention, x) * table.view_as(v)


def halved(attention, v, x, memory):
    """modded-nanogpt: V and E[token] by constants where there is a table, else V by one."""
    table = memory["table"]
    return 0.7 * v if table is None else 0.4 * v + 0.6 * table.view_as(v)


def replaced(attention, v, x, memory):
    """Bank of Values: 1.5 E[token] in place of a projection."""
    return v if v is not None else 1.5 * memory["table"].unflatten(-1, (KV, -1))


def elementwise(attention, v, x, memory):
    """A gate for each number, which any values can be explained by."""
    first = memory.setdefault("v", v)
    return v + (attention.q(x).sigmoid().view_as(v) * first if attention.layer else 0)


GATED = {
    "added": (lambda: GPT(attention=lambda i: Mixing(i, added)), "first", (1, 2)),
    "convex": (lambda: GPT(attention=lambda i: Mixing(i, convex)), "first", (1, 2)),
    "embedded": (lambda: Tabled(embedded), "table", (0, 2)),
}
"""Decoders by name, what their gates are on, and in which layers."""
assert LAYERS == 3
