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


class HyperConnections(Twin):
    n = 4

    def more(self, d, vocab):
        n = self.n
        for name, shape in (
            ("pre", (n,)),
            ("res", (n * n,)),
            ("post", (n,)),
            ("matrices", (n + 2, d)),
            ("scales", (2,)),
        ):
            setattr(self, name, nn.ParameterList(torch.empty(shape) for _ in range(2 * self.layers)))

    def start(self, tokens, x):
        return {"streams": x.unsqueeze(-2).expand(*x.shape[:-1], self.n, -1)}

    def weights(self, s, X):
        said = torch.tanh(F.linear(F.rms_norm(X, X.shape[-1:], None, 1e-5), self.matrices[s]))
        a, b = self.scales[s]
        res = self.res[s].view(self.n, self.n).T + a * said[..., 1:-1].mT
        return self.pre[s] + a * said[..., 0], res, self.post[s] + b * said[..., -1]

    def through(self, s, f, m):
        X = m["streams"]
        pre, res, post = self.weights(s, X)
        passing = res @ X
        out = f((pre.unsqueeze(-2) @ X).squeeze(-2))
        m["streams"] = torch.addcmul(passing, post.unsqueeze(-1), out.unsqueeze(-2))

    def block(self, i, b, x, m):
        def attention(x):
            y = b.ln1(x)
            q, k, v = self.query(i, b, y, m), self.key(i, b, y, m), self.value(i, b, y, m)
            return b.o(self.attend(i, q, k, v, y, m).flatten(-2))

        def mlp(x):
            y = b.ln2(x)
            return b.down(F.silu(b.gate(y)) * b.up(y))

        self.through(2 * i, attention, m)
        self.through(2 * i + 1, mlp, m)
        return m["streams"].mean(-2) if i == self.layers - 1 else x


class MHC(HyperConnections):
    def more(self, d, vocab):
        n = self.n
        rows = n * n + 2 * n
        for name, shape in (("matrices", (rows, n * d)), ("biases", (rows,)), ("scales", (3,))):
            setattr(self, name, nn.ParameterList(torch.empty(shape) for _ in range(2 * self.layers)))

    def weights(self, s, X):
        n, flat = self.n, X.flatten(-2)
        said = F.linear(F.rms_norm(flat, flat.shape[-1:], None, 1e-5), self.matrices[s])
        parts = zip(said.split((n, n, n * n), -1), self.biases[s].split((n, n, n * n)), self.scales[s], strict=True)
        pre, post, res = (scale * part + bias for part, bias, scale in parts)
        res = (res - res.amax(-1, keepdim=True)).exp().unflatten(-1, (n, n))
        for _ in range(20):
            res = res / res.sum(-2, keepdim=True)
            res = res / res.sum(-1, keepdim=True)
        return pre.sigmoid(), res, 2 * post.sigmoid()


STREAM_TWINS: dict[str, type[Twin]] = {
    "attention_residuals": AttentionResiduals,
    "hyper_connections": HyperConnections,
    "mhc": MHC,
    "sandwich_norm": SandwichNorm,
    "post_norm": PostNorm,
    "dyt": DyT,
}
