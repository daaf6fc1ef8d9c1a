"""Hook-free twins of the architectures that change what passes between attention and MLP: depth weights, norms, streams."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from plain_decoder import Twin
from torch import nn


class AttentionResiduals(Twin):
    def more(self, d, vocab):
        places = range(1, 2 * self.layers + 1)
        self.queries, self.gains = (nn.ParameterDict({str(s): torch.empty(d) for s in places}) for _ in range(2))

    def start(self, tokens, x):
        queries = torch.stack([*self.queries.values()]) * torch.stack([*self.gains.values()])
        m = {"queries": queries, "values": [], "scores": []}
        self.keep(1, x, m)
        return m

    def keep(self, s, x, m):
        m["values"].append(x)
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        m["scores"].append((s, F.linear(x, m["queries"][s - 1 :]) * scale))

    def read(self, s, out, m):
        self.keep(s, out, m)
        weights = torch.stack([scores[..., s - first] for first, scores in m["scores"]], -1).softmax(-1)
        total = weights[..., :1] * m["values"][0]
        for j, value in enumerate(m["values"][1:], 1):
            total = total + weights[..., j : j + 1] * value
        return total

    def block(self, i, b, x, m):
        y = b.ln1(x)
        q, k, v = self.query(i, b, y, m), self.key(i, b, y, m), self.value(i, b, y, m)
        y = b.ln2(self.read(2 * i + 1, b.o(self.attend(i, q, k, v, y, m).flatten(-2)), m))
        return self.read(2 * i + 2, b.down(F.silu(b.gate(y)) * b.up(y)), m)


class SandwichNorm(Twin):
    def more(self, d, vocab):
        for b in self.blocks:
            b.ln1_post, b.ln2_post = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)

    def block(self, i, b, x, m):
        y = b.ln1(x)
        q, k, v = self.query(i, b, y, m), self.key(i, b, y, m), self.value(i, b, y, m)
        x = x + b.ln1_post(b.o(self.attend(i, q, k, v, y, m).flatten(-2)))
        y = b.ln2(x)
        return x + b.ln2_post(b.down(F.silu(b.gate(y)) * b.up(y)))


class NormedLinear(nn.Linear):
    def __init__(self, d):
        super().__init__(d, d, bias=False)
        self.norm = nn.RMSNorm(d, eps=1e-5)

    def forward(self, x):
        return self.norm(super().forward(x))


class PostNorm(SandwichNorm):
    def more(self, d, vocab):
        super().more(d, vocab)
        for b in self.blocks:
            b.ln1, b.ln2 = nn.Identity(), nn.Identity()
            b.q, b.k = NormedLinear(d), NormedLinear(d)


class Tanh(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight, self.bias, self.alpha = (
            nn.Parameter(torch.ones(d)),
            nn.Parameter(torch.ones(d)),
            nn.Parameter(torch.ones(())),
        )

    def forward(self, x):
        return torch.addcmul(self.bias, (self.alpha * x).tanh(), self.weight)


class DyT(Twin):
    def more(self, d, vocab):
        for b in self.blocks:
            b.ln1, b.ln2 = Tanh(d), Tanh(d)


STREAM_TWINS: dict[str, type[Twin]] = {
    "attention_residuals": AttentionResiduals,
    "sandwich_norm": SandwichNorm,
    "post_norm": PostNorm,
    "dyt": DyT,
}
