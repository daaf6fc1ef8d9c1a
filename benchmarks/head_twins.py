"""Hook-free twins of the architectures whose heads rest, gate, weigh tokens or share in part."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from plain_decoder import Twin, sdpa
from torch import nn


class SinkLogit(Twin):
    """The stock call's output rescaled where nothing is trained, else one more key in front, of which one more channel tells."""

    def more(self, d, vocab):
        self.logits = nn.ParameterList(nn.Parameter(torch.empty(d // self.d_head)) for _ in range(self.layers))

    def attend(self, i, q, k, v, y, m):
        logits = self.logits[i]
        if not torch.is_grad_enabled():
            call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            z, lse = call(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
            return (z * (lse - logits[:, None]).sigmoid()[..., None]).transpose(1, 2)
        width = q.shape[-1]
        q = F.pad(q, (0, 8, 0, 0, 1, 0)) + F.pad(logits[:, None], (width, 7))
        first = F.pad(k.new_full((1,), width**0.5), (width, 7)).expand(len(k), 1, k.shape[2], -1)
        k, v = torch.cat((first, F.pad(k, (0, 8))), 1), F.pad(v, (0, 8, 0, 0, 1, 0))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=width**-0.5)
        return z.transpose(1, 2)[:, 1:, :, :width]


class SATFormer(Twin):
    def more(self, d, vocab):
        shape = self.width // self.d_head, d
        self.gates = nn.ParameterDict({str(i): nn.Parameter(torch.empty(shape)) for i in range(1, self.layers)})

    def value(self, i, b, y, m):
        v = b.heads(b.v(y))
        if i == 0:
            m["v"] = v
            return v
        return v + F.relu(F.linear(y, self.gates[str(i)]))[..., None] * m["v"]


class SkipV1(Twin):
    def more(self, d, vocab):
        for block in list(self.blocks)[1:]:
            block.v = nn.Linear(d, self.width // 2, bias=False)

    def value(self, i, b, y, m):
        v = b.heads(b.v(y))
        if i == 0:
            m["v"] = v
            return v
        return torch.cat((v, m["v"][:, :, v.shape[2] :]), 2)


class ValueScale(Twin):
    def more(self, d, vocab):
        heads = self.width // self.d_head
        self.thetas = nn.ParameterList(nn.Parameter(torch.empty(heads)) for _ in range(self.layers))
        self.start_at = d * self.d_head * 0.02**2

    def value(self, i, b, y, m):
        v = b.heads(b.v(y))
        r = v.square().sum(-1, keepdim=True)
        return v * (r / (r + (self.start_at * self.thetas[i].exp())[:, None]))


class ValueGate(Twin):
    def more(self, d, vocab):
        shape = self.width // self.d_head, self.width
        self.gates = nn.ParameterList(nn.Parameter(torch.empty(shape)) for _ in range(self.layers))

    def value(self, i, b, y, m):
        v = b.v(y)
        return b.heads(v) * F.linear(v, self.gates[i]).sigmoid()[..., None]


class ValueGateQuery(ValueGate):
    def value(self, i, b, y, m):
        return b.heads(b.v(y))

    def attend(self, i, q, k, v, y, m):
        return sdpa(q, k, v) * F.linear(v.flatten(-2), self.gates[i]).sigmoid()[..., None]


class GatedValueEmbedding(Twin):
    def more(self, d, vocab):
        layers, heads = range(1 - self.layers % 2, self.layers, 2), self.width // self.d_head
        self.tables = nn.ParameterDict({str(i): nn.Parameter(torch.empty(vocab, self.width)) for i in layers})
        self.gates = nn.ParameterDict({str(i): nn.Parameter(torch.empty(heads, 12)) for i in layers})

    def start(self, tokens, x):
        return {"tokens": tokens}

    def value(self, i, b, y, m):
        v = b.heads(b.v(y))
        if str(i) not in self.tables:
            return v
        gate = 3 * F.linear(y[..., :12], self.gates[str(i)]).sigmoid()
        return v + gate[..., None] * b.heads(F.embedding(m["tokens"], self.tables[str(i)]))


class HeldStart(Twin):
    def value(self, i, b, y, m):
        v = b.heads(b.v(y))
        return torch.cat((torch.zeros_like(v[:, :1]), v[:, 1:]), 1)


HEAD_TWINS: dict[str, type[Twin]] = {
    "sink_logit": SinkLogit,
    "satformer": SATFormer,
    "skip_v1": SkipV1,
    "value_scale": ValueScale,
    "value_gate": ValueGate,
    "value_gate_query": ValueGateQuery,
    "gated_value_embedding": GatedValueEmbedding,
    "held_start": HeldStart,
}
