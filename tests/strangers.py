"""Small decoders written the way other people write them; none of them knows anything of the workbench."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

D, HEADS, LAYERS, VOCABULARY, CONTEXT = 32, 4, 3, 61, 96


def large(module):
    """Weights large enough for attention to be far from uniform."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.25 if p.ndim > 1 else 0.1) + (p.ndim == 1))
    return module.eval()


def split(x, heads=HEADS):
    """[batch, pos, width] -> [batch, head, pos, d_head]."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def causal(q, k, v, layer=0):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def eagerly(form):
    """Attention by hand: its softmax called in one of the ways there are."""

    def attend(q, k, v, layer=0):
        t, scale = q.shape[2], q.shape[-1] ** -0.5
        future = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
        if form == "einsum":
            scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
            return torch.einsum("bhij,bhjd->bhid", scores.masked_fill(future, float("-inf")).softmax(-1), v)
        if form == "ellipsis":
            scores = torch.einsum("...id,...jd->...ij", q, k) * scale
            pattern = scores.masked_fill(future, float("-inf")).softmax(-1)
            return torch.einsum("...jd,...ij->...id", v, pattern)
        if form == "baddbmm":
            bias = torch.zeros(t, t, device=q.device).masked_fill(future, float("-inf"))
            flat = [x.reshape(-1, t, x.shape[-1]) for x in (q, k, v)]
            scores = torch.baddbmm(bias.expand(len(flat[0]), t, t), flat[0], flat[1].mT, alpha=scale)
            return torch.bmm(F.softmax(scores, -1), flat[2]).view_as(q)
        scores = ((q @ k.transpose(-2, -1)) * scale).masked_fill(future, float("-inf"))
        if form == "by hand":
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            return weights / weights.sum(-1, keepdim=True) @ v
        softmax = {"torch": torch.softmax, "functional": F.softmax, "method": torch.Tensor.softmax}[form]
        return softmax(scores, dim=-1) @ v

    return attend


@torch.library.custom_op("strangers::flash_attn_forward", mutates_args=())
def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention as a custom kernel."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).clone()


class FusedAttention(nn.Module):
    """One matrix for q, k and v; values mixed inline with the first layer's by hidden numbers."""

    def __init__(self, layer, lambdas=None, attend=causal):
        super().__init__()
        self.layer, self.lambdas, self.attend = layer, lambdas, attend
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x, memory):
        q, k, v = self.c_attn(x).split(D, dim=2)
        if self.lambdas is not None:
            memory.setdefault("v", v)
            if self.layer:
                v = self.lambdas[0] * memory["v"] + self.lambdas[1] * v
        y = self.attend(*(split(y) for y in (q, k, v)), self.layer)
        return self.c_proj(y.transpose(1, 2).contiguous().view(x.shape))


class GPTBlock(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(D), nn.LayerNorm(D), attention
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, x, memory):
        x = x + self.attn(self.ln_1(x), memory)
        return x + self.mlp(self.ln_2(x))


class InPlaceBlock(GPTBlock):
    """Writes over the stream it was given."""

    def forward(self, x, memory):
        x += self.attn(self.ln_1(x), memory)
        x += self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    """In the manner of nanoGPT: learned positions, and without targets logits of the last position only (`last`)."""

    def __init__(self, lambdas=None, attend=causal, *, last=False, attention=None, block=GPTBlock, dropout=0.0):
        super().__init__()
        self.block_size, self.last = CONTEXT, last
        make = attention or (lambda i: FusedAttention(i, lambdas[i] if lambdas else None, attend))
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, D),
                "wpe": nn.Embedding(CONTEXT, D),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(block(make(i)) for i in range(LAYERS)),
                "ln_f": nn.LayerNorm(D),
            }
        )
        self.lm_head = nn.Linear(D, VOCABULARY, bias=False)

    def forward(self, idx, targets=None):
        x = self.transformer.drop(
            self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.shape[1], device=idx.device))
        )
        memory = {}
        for block in self.transformer.h:
            x = block(x, memory)
        x = self.transformer.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return (self.lm_head(x[:, [-1]]) if self.last else self.lm_head(x)), None


class GroupedAttention(nn.Module):
    """Separate matrices, rotary positions, two key-value heads; repeated by hand, grouped in the call or in one einsum."""

    def __init__(self, layer, mode="repeat", scale=None):
        super().__init__()
        self.mode, self.scale, self.kv = mode, scale, 2
        self.wq, self.wk = nn.Linear(D, D, bias=False), nn.Linear(D, D // 2, bias=False)
        self.wv, self.wo = nn.Linear(D, D // 2, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x, memory):
        b, t, _ = x.shape
        d, group = D // HEADS, HEADS // self.kv
        q, k, v = split(self.wq(x)), split(self.wk(x), self.kv), split(self.wv(x), self.kv)
        angle = (torch.arange(t)[:, None] / 100 ** (torch.arange(0, d, 2) / d)).to(x.device)
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        q, k = (y * cos + torch.cat((-y[..., d // 2 :], y[..., : d // 2]), -1) * sin for y in (q, k))
        if self.mode == "einsum":
            q = q.reshape(b, self.kv, group, t, d)
            scores = torch.einsum("bkgid,bkjd->bkgij", q, k) / math.sqrt(d)
            scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
            y = torch.einsum("bkgij,bkjd->bkgid", torch.softmax(scores, -1), v).reshape(b, HEADS, t, d)
        elif self.mode == "gqa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=self.scale)
        elif self.mode == "by hand":
            y = eagerly("method")(q, *(y.repeat_interleave(group, dim=1) for y in (k, v)))
        else:
            k, v = (y.repeat_interleave(group, dim=1) for y in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.wo(y.transpose(1, 2).reshape(b, t, D))


class SharedValues(FusedAttention):
    """Later layers attend to the first layer's values and have no matrix for their own."""

    def __init__(self, layer):
        super().__init__(layer)
        self.c_attn = nn.Linear(D, (2 if layer else 3) * D)

    def forward(self, x, memory):
        parts = self.c_attn(x).split(D, dim=2)
        v = memory.setdefault("v", parts[-1])
        y = self.attend(split(parts[0]), split(parts[1]), split(v))
        return self.c_proj(y.transpose(1, 2).reshape(x.shape))


class Pulled(FusedAttention):
    """The attention's output is pulled toward the first layer's values."""

    pull = 0.37

    def forward(self, x, memory):
        q, k, v = (split(y) for y in self.c_attn(x).split(D, dim=2))
        y = self.attend(q, k, v) + self.pull * (memory.setdefault("v", v) - v)
        return self.c_proj(y.transpose(1, 2).reshape(x.shape))


class HeadwiseMixed(FusedAttention):
    """Each head has a coefficient of its own."""

    def forward(self, x, memory):
        q, k, v = (split(y) for y in self.c_attn(x).split(D, dim=2))
        first = memory.setdefault("v", v)
        if self.layer:
            share = torch.tensor([0.1, 0.2, 0.3, 0.4], device=x.device)[:, None, None]
            v = share * first + (1 - share) * v
        return self.c_proj(self.attend(q, k, v).transpose(1, 2).reshape(x.shape))


class DenselyMixed(FusedAttention):
    """Values are a sum over all layers so far."""

    def forward(self, x, memory):
        q, k, memory[self.layer] = self.c_attn(x).split(D, dim=2)
        v = sum((0.5 + 0.1 * j) * memory[j] for j in range(self.layer + 1))
        return self.c_proj(self.attend(*(split(y) for y in (q, k, v))).transpose(1, 2).reshape(x.shape))


class RawMatrix(FusedAttention):
    """The value matrix is a bare parameter."""

    def __init__(self, layer):
        super().__init__(layer)
        self.c_attn, self.wv = nn.Linear(D, 2 * D), nn.Parameter(torch.zeros(D, D))

    def forward(self, x, memory):
        q, k = self.c_attn(x).split(D, dim=2)
        v = x @ self.wv
        first = memory.setdefault("v", v)
        v = 0.3 * first + 0.7 * v if self.layer else v
        return self.c_proj(self.attend(*(split(y) for y in (q, k, v))).transpose(1, 2).reshape(x.shape))


class OneHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(D, D // HEADS, bias=False) for _ in range(3))

    def forward(self, x):
        t = x.shape[1]
        k, q = self.key(x), self.query(x)
        weights = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        weights = F.softmax(
            weights.masked_fill(torch.tril(torch.ones(t, t, device=x.device)) == 0, float("-inf")), dim=-1
        )
        return weights @ self.value(x)


class ListOfHeads(nn.Module):
    """A module for each head, as in courses."""

    def __init__(self, layer):
        super().__init__()
        self.heads, self.proj = nn.ModuleList(OneHead() for _ in range(HEADS)), nn.Linear(D, D)

    def forward(self, x, memory):
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class Averaged(GPT):
    """Blocks read weighted averages of what the blocks before them made."""

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx)
        made = [x]
        for block in self.transformer.h:
            made.append(block(x, {}))
            x = 0.2 * made[0] + 0.9 * made[-1] - 0.1 * made[-2]
        return self.lm_head(self.transformer.ln_f(x))


class Looped(GPT):
    """One block, run three times."""

    def __init__(self):
        super().__init__()
        self.transformer.h = nn.ModuleList([self.transformer.h[0]])

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx)
        for _ in range(LAYERS):
            x = self.transformer.h[0](x, {})
        return self.lm_head(self.transformer.ln_f(x))


class Pair(nn.Module):
    """Two decoders in one module."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = GPT([(1, 1), (0.4, 0.6), (0.4, 0.6)]), GPT()

    def forward(self, idx):
        self.teacher(idx)
        return self.student(idx)[0]


class Inline(nn.Module):
    """Everything in one forward: lists of matrices, no block that is a module."""

    def __init__(self, norms=True):
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCABULARY, D), nn.Linear(D, VOCABULARY)
        self.qkv = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(D, D) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(D, 2 * D) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(2 * D, D) for _ in range(LAYERS))
        self.norm_1, self.norm_2 = (nn.ModuleList(nn.LayerNorm(D) for _ in range(LAYERS)) for _ in range(2))
        self.final, self.norms = nn.LayerNorm(D), norms

    def norm(self, part, x):
        return part(x) if self.norms else F.layer_norm(x, (D,))

    def forward(self, idx):
        x, first = self.emb(idx), None
        for i in range(LAYERS):
            q, k, v = self.qkv[i](self.norm(self.norm_1[i], x)).chunk(3, dim=-1)
            first = v if first is None else first
            v = 0.2 * first + 0.8 * v if i else v
            x = x + self.out[i](causal(split(q), split(k), split(v)).transpose(1, 2).reshape(x.shape))
            x = x + self.down[i](F.gelu(self.up[i](self.norm(self.norm_2[i], x))))
        return self.head(self.norm(self.final, x))


class PaperBlock(nn.Module):
    """Nested outputs, a list handed from block to block, keywords only: how the value residual was published."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.norm, self.post, self.attn = layer, nn.LayerNorm(D), nn.LayerNorm(D), PaperAttention(layer)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, hidden, attention_mask=None, layer_values=None):
        residual = hidden
        hidden, layer_values = self.attn(x=self.norm(hidden), attention_mask=attention_mask, layer_values=layer_values)
        hidden = residual + hidden
        return (hidden + self.down(F.silu(self.up(self.post(hidden)))),), layer_values


class PaperAttention(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x, attention_mask, layer_values):
        v = self.v_proj(x)
        if self.layer == 0:
            layer_values.append(v)
        else:
            v = 0.5 * layer_values[0] + 0.5 * v
        q, k, v = split(self.q_proj(x)), split(self.k_proj(x)), split(v)
        weights = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1]) + attention_mask
        weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
        weights = nn.functional.dropout(weights, p=0.0, training=self.training)
        y = torch.matmul(weights, v).transpose(1, 2).contiguous()
        return self.o_proj(y.reshape(x.shape)), layer_values


class Paper(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(VOCABULARY, D), nn.LayerNorm(D), nn.Linear(D, VOCABULARY)
        self.layers = nn.ModuleList(PaperBlock(i) for i in range(LAYERS))

    def forward(self, input_ids):
        x, values = self.embed(input_ids), []
        mask = torch.full((x.shape[1],) * 2, torch.finfo(x.dtype).min, device=x.device).triu(1)[None, None]
        for layer in self.layers:
            outputs, values = layer(x, attention_mask=mask, layer_values=values)
            x = outputs[0]
        return {"logits": self.head(self.norm(x))}
