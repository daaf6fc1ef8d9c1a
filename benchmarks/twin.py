"""A hook-free twin of each architecture: plain modules and fused attention, nothing from `workbench`.

What instrumentation costs is measured against these, with the same weights, in the same process.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rope_tables(length: int, d_head: int) -> tuple[Tensor, Tensor]:
    frequency = 10_000.0 ** -(torch.arange(0, d_head, 2).float() / d_head)
    angle = torch.outer(torch.arange(length).float(), frequency)
    return torch.cat((angle, angle), -1).cos()[:, None], torch.cat((-angle.sin(), angle.sin()), -1)[:, None]


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class PlainBlock(nn.Module):
    def __init__(self, d: int, heads: int, kv_heads: int, mlp: int, has_v: bool) -> None:
        super().__init__()
        self.d_head, self.grouped = d // heads, heads != kv_heads
        self.ln1, self.ln2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        width = self.d_head * kv_heads
        self.q, self.k = nn.Linear(d, d, bias=False), nn.Linear(d, width, bias=False)
        self.v = nn.Linear(d, width, bias=False) if has_v else None
        self.o = nn.Linear(d, d, bias=False)
        self.gate, self.up = nn.Linear(d, mlp, bias=False), nn.Linear(d, mlp, bias=False)
        self.down = nn.Linear(mlp, d, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.d_head)


class Twin(nn.Module):
    """Transformer, ResFormer, SVFormer, NeuTRENO, DenseFormer (1x1) or the key residual, written as one would without hooks."""

    def __init__(
        self, kind: str, *, layers: int, d: int, heads: int, kv_heads: int, mlp: int, vocab: int, n_ctx: int
    ) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(vocab, d), nn.Linear(d, vocab, bias=False)
        self.blocks = nn.ModuleList(
            PlainBlock(d, heads, kv_heads, mlp, has_v=kind != "svformer" or i == 0) for i in range(layers)
        )
        self.norm = nn.RMSNorm(d, eps=1e-5)
        self.cos, self.sin = rope_tables(n_ctx, d // heads)
        if kind == "denseformer":
            self.alphas = nn.ParameterList(nn.Parameter(torch.eye(i + 2)[-1]) for i in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        first_v = first_k = None
        history = [x]
        for i, b in enumerate(self.blocks):
            y = b.ln1(x)
            q, k = b.heads(b.q(y)), b.heads(b.k(y))
            v = b.heads(b.v(y)) if b.v is not None else first_v
            if i == 0:
                first_v, first_k = v, k
            elif self.kind == "resformer":
                v = 0.5 * first_v + 0.5 * v
            elif self.kind == "residual_k":
                k = 0.5 * first_k + 0.5 * k
            q, k = rope(q, cos, sin), rope(k, cos, sin)
            z = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=b.grouped
            ).transpose(1, 2)
            if self.kind == "neutreno" and i > 0:
                z = z + 0.4 * (first_v - v)
            x = x + b.o(z.flatten(-2))
            y = b.ln2(x)
            x = x + b.down(F.silu(b.gate(y)) * b.up(y))
            if self.kind == "denseformer":
                history.append(x)
                x = history[0] * self.alphas[i][0]
                for j in range(1, i + 2):
                    x = x + self.alphas[i][j] * history[j]
        return self.head(self.norm(x))


def twin_of(model) -> Twin:
    """The twin of a hooked model, with its weights."""
    c = model.config
    twin = Twin(
        model.architecture, layers=c.n_layers, d=c.d_model, heads=c.n_heads, kv_heads=c.n_key_value_heads, mlp=c.d_mlp,
        vocab=c.d_vocab, n_ctx=c.n_ctx,
    )  # fmt: skip
    names = {"attn.q_proj": "q", "attn.k_proj": "k", "attn.v_proj": "v", "attn.o_proj": "o", "mlp.gate_proj": "gate",
             "mlp.up_proj": "up", "mlp.down_proj": "down", "ln_final": "norm", "unembed": "head"}  # fmt: skip
    state = {}
    for name, tensor in model.state_dict().items():
        if name.startswith("dwa."):
            state[f"alphas.{name.split('.')[2]}"] = tensor[0]
            continue
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        state[name] = tensor
    twin.load_state_dict(state)
    return twin.eval()
