"""A training loop as other people write it, with a small GPT; imported by child processes as well."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

PLAIN = ("gradient_norm", "update_ratio", "weight_norm", "activation_gradient_norm", "hidden_norm", "value_norm")


class Block(nn.Module):
    """A block as in many a notebook: fused queries, keys and values."""

    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(d, 3 * d), "c_proj": nn.Linear(d, d)})
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.attn["c_attn"](self.ln_1(x)).chunk(3, -1)
        )
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.attn["c_proj"](z)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, d=16, layers=2, vocabulary=31):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, d), nn.Embedding(64, d)
        self.h = nn.ModuleList(Block(d, 2) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(d), nn.Linear(d, vocabulary, bias=False)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def tokens(step, batch=3, length=12, vocabulary=31):
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(step))


def loss_of(model, ids):
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def loop(model, recorder, steps, *, first=0, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(first, first + steps):
        loss = loss_of(model, tokens(step))
        optimizer.zero_grad()
        loss.backward()
        recorder.step(loss)
        optimizer.step()
