"""A hook-free twin of each architecture: plain modules and fused attention, nothing from `workbench`.

What instrumentation costs is measured against these, with the same weights, in the same process. `Twin` is the vanilla
decoder; each kind overrides a line or two of it, as one would write it without hooks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from head_twins import HEAD_TWINS
from plain_decoder import Twin, rope, sdpa
from stream_twins import STREAM_TWINS
from torch import nn


class ResFormer(Twin):
    first, own, mixing = 0.5, 0.5, range(1, 1_000)

    def value(self, i, b, y, m):
        v = b.heads(b.v(y))
        if i == 0:
            m["v"] = v
        return self.first * m["v"] + self.own * v if i in self.mixing else v


class ResFormerConstant(ResFormer):
    first, own = 2.0, 1.0


class ResFormerSparse(ResFormer):
    first, own, mixing = 5.0, 1.0, range(5, 8)


class ResFormerLearnable(Twin):
    def more(self, d, vocab):
        self.firsts, self.owns = (nn.Parameter(torch.empty(self.layers - 1)) for _ in range(2))

    def start(self, tokens, x):
        return {"firsts": self.firsts}

    def value(self, i, b, y, m):
        v = b.heads(b.v(y))
        if i == 0:
            m["v"] = v
            return v
        return m["firsts"][i - 1] * m["v"] + self.owns[i - 1] * v


class ResFormerLearnablePlus(ResFormerLearnable):
    def more(self, d, vocab):
        self.logits, self.owns = (nn.Parameter(torch.empty(self.layers - 1)) for _ in range(2))
        self.scale = nn.Parameter(torch.empty(()))

    def start(self, tokens, x):
        return {"firsts": self.scale * self.logits.softmax(-1)}


class ResFormerDense(Twin):
    def more(self, d, vocab):
        self.rows = nn.ParameterDict({str(i): nn.Parameter(torch.empty(i + 1)) for i in range(1, self.layers)})

    def start(self, tokens, x):
        return {"values": []}

    def value(self, i, b, y, m):
        m["values"].append(b.heads(b.v(y)))
        if i == 0:
            return m["values"][0]
        return sum(w * v for w, v in zip(self.rows[str(i)], m["values"], strict=True))


class SVFormer(Twin):
    def projected(self, i):
        return "qk" if i else "qkv"

    def value(self, i, b, y, m):
        if i == 0:
            m["v"] = b.heads(b.v(y))
        return m["v"]


class NeuTRENO(Twin):
    pull = 0.4

    def attend(self, i, q, k, v, y, m):
        if i == 0:
            m["v"] = v
            return sdpa(q, k, v)
        return sdpa(q, k, v) + self.pull * (m["v"] - v)


class DenseFormer(Twin):
    def more(self, d, vocab):
        self.alphas = nn.ParameterList(nn.Parameter(torch.empty(i + 2)) for i in range(self.layers))

    def start(self, tokens, x):
        return {"history": [x]}

    def after(self, i, x, m):
        m["history"].append(x)
        x = m["history"][0] * self.alphas[i][0]
        for j in range(1, i + 2):
            x = x + self.alphas[i][j] * m["history"][j]
        return x


class Sharing(Twin):
    """Pairs of layers share what `share` names."""

    share = "kv"

    def projected(self, i):
        return "".join(n for n in "qkv" if n not in self.share or i % 2 == 0)

    def query(self, i, b, y, m):
        return self.shared("q", i, b, y, m, super().query)

    def key(self, i, b, y, m):
        return self.shared("k", i, b, y, m, super().key)

    def value(self, i, b, y, m):
        return self.shared("v", i, b, y, m, super().value)

    def shared(self, name, i, b, y, m, make):
        if name not in self.share:
            return make(i, b, y, m)
        if i % 2 == 0:
            m[name] = make(i, b, y, m)
        return m[name]


class ShareQ(Sharing):
    share = "q"


class ShareK(Sharing):
    share = "k"


class ShareV(Sharing):
    share = "v"


class CrossLayer(Twin):
    """One softmax over the concatenated keys, with the causal mask repeated for each set."""

    def read(self, pairs: list[Any]) -> list[Any]:
        return pairs[-2:]

    def start(self, tokens, x):
        if getattr(self, "causal", None) is None or len(self.causal) != tokens.shape[1]:
            self.causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
            self.masks = {n: self.causal.repeat(1, n) for n in range(2, self.layers + 1)}
        return {"pairs": []}

    def attend(self, i, q, k, v, y, m):
        m["pairs"].append((k, v))
        if i == 0:
            return sdpa(q, k, v)
        keys, values = zip(*self.read(m["pairs"]), strict=True)
        return sdpa(q, torch.cat(keys, 1), torch.cat(values, 1), self.masks[len(keys)])


class CrossLayerAll(CrossLayer):
    def read(self, pairs):
        return pairs


class SameKey(Twin):
    def value(self, i, b, y, m):
        v = b.heads(b.v(y))
        m["total"] = v if i == 0 else m["total"] + v
        return m["total"] / (i + 1) if i else v


class IdentityMap(Twin):
    def attend(self, i, q, k, v, y, m):
        z = sdpa(q, k, v) if i == 0 else sdpa(q, k, v) + m["total"] / i
        m["total"] = v if i == 0 else m["total"] + v
        return z


class ResidualQ(Twin):
    def query(self, i, b, y, m):
        q = b.heads(b.q(y))
        if i == 0:
            m["q"] = q
        return rope(q if i == 0 else 0.5 * m["q"] + 0.5 * q, m["cos"], m["sin"])


class ResidualK(Twin):
    def key(self, i, b, y, m):
        k = b.heads(b.k(y))
        if i == 0:
            m["k"] = k
        return rope(k if i == 0 else 0.5 * m["k"] + 0.5 * k, m["cos"], m["sin"])


class ResidualAttention(Twin):
    def attend(self, i, q, k, v, y, m):
        if i == 0:
            m["qk"] = q, k
            return sdpa(q, k, v)
        return 0.5 * sdpa(*m["qk"], v) + 0.5 * sdpa(q, k, v)


class ResidualHidden(Twin):
    def start(self, tokens, x):
        return {"x": x}

    def after(self, i, x, m):
        return x + m["x"] if i < self.layers - 1 else x


class ValueEmbedding(Twin):
    def more(self, d, vocab):
        self.tables = nn.ParameterList(nn.Parameter(torch.empty(vocab, self.width)) for _ in range(3))
        self.owns, self.lambdas = nn.Parameter(torch.empty(self.layers)), nn.Parameter(torch.empty(6))

    def start(self, tokens, x):
        return {"tables": [F.embedding(tokens, t).unflatten(-1, (-1, self.d_head)) for t in self.tables]}

    def value(self, i, b, y, m):
        v = self.owns[i] * b.heads(b.v(y))
        if i < 3:
            return v + self.lambdas[i] * m["tables"][i]
        j = i - (self.layers - 3)
        return v + self.lambdas[3 + j] * m["tables"][j] if j >= 0 else v


class BankOfValues(Twin):
    def more(self, d, vocab):
        self.tables = nn.ParameterDict({str(i): nn.Parameter(torch.empty(vocab, self.width)) for i in self.bank()})
        self.gains = nn.Parameter(torch.empty(len(self.bank())))

    def bank(self) -> range:
        return range(self.layers - self.layers // 3, self.layers)

    def projected(self, i):
        return "qk" if i in self.bank() else "qkv"

    def start(self, tokens, x):
        return {"tokens": tokens}

    def value(self, i, b, y, m):
        if i not in self.bank():
            return b.heads(b.v(y))
        return self.gains[i - self.bank().start] * b.heads(F.embedding(m["tokens"], self.tables[str(i)]))


class GatedAttention(Twin):
    def more(self, d, vocab):
        self.gates = nn.ParameterList(nn.Parameter(torch.empty(d, d)) for _ in range(self.layers))

    def attend(self, i, q, k, v, y, m):
        z = sdpa(q, k, v)
        return z * F.linear(y, self.gates[i]).sigmoid().view_as(z)


class ExclusiveAttention(Twin):
    def attend(self, i, q, k, v, y, m):
        z = sdpa(q, k, v)
        return z - (z * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True).clamp_min(1e-8) * v


class CutSkip(Twin):
    def block(self, i, b, x, m):
        if i > 0:
            return super().block(i, b, x, m)
        y = b.ln1(x)
        q, k, v = self.query(i, b, y, m), self.key(i, b, y, m), self.value(i, b, y, m)
        y = b.ln2(b.o(sdpa(q, k, v).flatten(-2)))
        return b.down(F.silu(b.gate(y)) * b.up(y))


class ResFormerNeuTRENO(NeuTRENO):
    pull = 0.2

    def value(self, i, b, y, m):
        v = b.heads(b.v(y))
        return 0.5 * m["v"] + 0.5 * v if i else v


class ResFormerDenseFormer(DenseFormer):
    def value(self, i, b, y, m):
        v = b.heads(b.v(y))
        if i == 0:
            m["v"] = v
        return 0.5 * m["v"] + 0.5 * v if i else v


class SVFormerCLA(SVFormer):
    def projected(self, i):
        return "qkv" if i == 0 else "q" if i % 2 else "qk"

    def key(self, i, b, y, m):
        if i % 2 == 0:
            m["k"] = super().key(i, b, y, m)
        return m["k"]


TWINS: dict[str, type[Twin]] = {
    "transformer": Twin,
    "resformer": ResFormer,
    "resformer_constant": ResFormerConstant,
    "resformer_learnable": ResFormerLearnable,
    "resformer_learnable_plus": ResFormerLearnablePlus,
    "resformer_sparse": ResFormerSparse,
    "resformer_dense": ResFormerDense,
    "svformer": SVFormer,
    "neutreno": NeuTRENO,
    "denseformer": DenseFormer,
    "gqa": Twin,
    "mqa": Twin,
    "cla": Sharing,
    "share_q": ShareQ,
    "share_k": ShareK,
    "share_v": ShareV,
    "cross_layer": CrossLayer,
    "cross_layer_all": CrossLayerAll,
    "same_key": SameKey,
    "identity_map": IdentityMap,
    "residual_q": ResidualQ,
    "residual_k": ResidualK,
    "residual_attention": ResidualAttention,
    "residual_hidden": ResidualHidden,
    "value_embedding": ValueEmbedding,
    "bank_of_values": BankOfValues,
    "gated_attention": GatedAttention,
    "exclusive_attention": ExclusiveAttention,
    "cut_skip": CutSkip,
    "resformer+neutreno": ResFormerNeuTRENO,
    "resformer+denseformer": ResFormerDenseFormer,
    "svformer+gqa": SVFormer,
    "svformer+cla": SVFormerCLA,
    **STREAM_TWINS,
    **HEAD_TWINS,
}

NAMES = {  # a fragment of our tensors' names -> of the twin's
    "attn.q_proj": "q", "attn.k_proj": "k", "attn.v_proj": "v", "attn.o_proj": "o", "mlp.gate_proj": "gate",
    "mlp.up_proj": "up", "mlp.down_proj": "down", "ln_final": "norm", "unembed": "head", "dwa.alphas": "alphas",
    "attention_residuals.": "", "gated_value_embedding.": "", "satformer.": "", "value_scale.": "", "value_gate.": "",
    "value_gate_query.": "", "sink_logit.": "",
    "hyper_connections.": "", "mhc.": "",
    "gated_attention.": "", "bank_of_values.": "", "value_embedding.own": "owns", "value_embedding.tables": "tables",
    "value_embedding.table": "lambdas", "resformer_dense.": "", "resformer_learnable_plus.own": "owns",
    "resformer_learnable_plus.": "", "resformer_learnable.first": "firsts", "resformer_learnable.own": "owns",
}  # fmt: skip


def twin_of(model) -> Twin:
    """The twin of a hooked model of 8 layers, with its weights."""
    c = model.config
    assert c.n_layers == 8, "the published late layers and tables are written out for 8"
    twin = TWINS[model.architecture](
        layers=c.n_layers, d=c.d_model, heads=c.n_heads, kv_heads=c.n_key_value_heads, mlp=c.d_mlp,
        vocab=c.d_vocab, n_ctx=c.n_ctx,
    )  # fmt: skip
    state = {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        if name.startswith("alphas"):
            name, tensor = name.removesuffix(".weight"), tensor[0]
        state[name] = tensor
    twin.load_state_dict(state)
    return twin.eval()
