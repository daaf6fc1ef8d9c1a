"""The vanilla decoder in plain modules and fused attention, nothing from `workbench`: what the twins are made of."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rope_tables(length: int, d_head: int) -> tuple[Tensor, Tensor]:
    frequency = 10_000.0 ** -(torch.arange(0, d_head, 2).float() / d_head)
    angle = torch.outer(torch.arange(length).float(), frequency)
    return torch.cat((angle, angle), -1).cos()[:, None], torch.cat((-angle.sin(), angle.sin()), -1)[:, None]


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return z.transpose(1, 2)


class PlainBlock(nn.Module):
    def __init__(self, d: int, heads: int, kv_heads: int, mlp: int, projected: str) -> None:
        super().__init__()
        self.d_head = d // heads
        self.ln1, self.ln2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        for name in projected:  # those of q, k and v that this block has
            setattr(self, name, nn.Linear(d, d if name == "q" else self.d_head * kv_heads, bias=False))
        self.o = nn.Linear(d, d, bias=False)
        self.gate, self.up = nn.Linear(d, mlp, bias=False), nn.Linear(d, mlp, bias=False)
        self.down = nn.Linear(mlp, d, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.d_head)


class Twin(nn.Module):
    """The vanilla decoder. `m` holds what a forward pass carries from layer to layer."""

    def __init__(
        self, *, layers: int, d: int, heads: int, kv_heads: int, mlp: int, vocab: int, n_ctx: int, **extra: Any
    ) -> None:
        super().__init__()
        self.layers, self.width, self.d_head = layers, d * kv_heads // heads, d // heads
        self.embed, self.head = nn.Embedding(vocab, d), nn.Linear(d, vocab, bias=False)
        self.blocks = nn.ModuleList(PlainBlock(d, heads, kv_heads, mlp, self.projected(i)) for i in range(layers))
        self.norm = nn.RMSNorm(d, eps=1e-5)
        self.cos, self.sin = rope_tables(n_ctx, self.d_head)
        self.more(d, vocab)

    def more(self, d: int, vocab: int) -> None:
        """Parameters beyond the vanilla decoder's."""

    def projected(self, i: int) -> str:
        return "qkv"

    def start(self, tokens: Tensor, x: Tensor) -> dict[Any, Any]:
        return {}

    def query(self, i: int, b: PlainBlock, y: Tensor, m: dict[Any, Any]) -> Tensor:
        return rope(b.heads(b.q(y)), m["cos"], m["sin"])

    def key(self, i: int, b: PlainBlock, y: Tensor, m: dict[Any, Any]) -> Tensor:
        return rope(b.heads(b.k(y)), m["cos"], m["sin"])

    def value(self, i: int, b: PlainBlock, y: Tensor, m: dict[Any, Any]) -> Tensor:
        return b.heads(b.v(y))

    def attend(self, i: int, q: Tensor, k: Tensor, v: Tensor, y: Tensor, m: dict[Any, Any]) -> Tensor:
        return sdpa(q, k, v)

    def block(self, i: int, b: PlainBlock, x: Tensor, m: dict[Any, Any]) -> Tensor:
        y = b.ln1(x)
        q, k, v = self.query(i, b, y, m), self.key(i, b, y, m), self.value(i, b, y, m)
        x = x + b.o(self.attend(i, q, k, v, y, m).flatten(-2))
        y = b.ln2(x)
        return x + b.down(F.silu(b.gate(y)) * b.up(y))

    def after(self, i: int, x: Tensor, m: dict[Any, Any]) -> Tensor:
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        m = self.start(tokens, x)
        m["cos"], m["sin"] = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for i, b in enumerate(self.blocks):
            x = self.after(i, self.block(i, b, x, m), m)
        return self.head(self.norm(x))
