"""A stand-in for `flash_attn` 2 that computes on a CPU: its functions with their published arguments, ending in its operators."""

from __future__ import annotations

import math
import sys
import types

import torch
from torch import Tensor

OPTIONS = (
    "float dropout_p, float softmax_scale, bool causal, int window_size_left, int window_size_right, float softcap, "
    "Tensor? alibi_slopes"
)
RETURNS = "(Tensor, Tensor, Tensor, Tensor)"
SCHEMAS = {
    "_flash_attn_forward": f"(Tensor q, Tensor k, Tensor v, {OPTIONS}, bool return_softmax) -> {RETURNS}",
    "_flash_attn_varlen_forward":
        "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
        f"{OPTIONS}, bool return_softmax=False, Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, "
        f"bool zero_tensors=False, SymInt num_splits=0) -> {RETURNS}",
}  # fmt: skip


def dense(q, k, v, scale, causal, window, softcap, slopes):
    """Attention of one sequence, [pos, head, d_head], all of it at once; masks are aligned at the bottom right."""
    n, m = len(q), len(k)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap > 0 else scores
    ahead = torch.arange(m) - torch.arange(n)[:, None] - (m - n)
    scores = scores if slopes is None else scores - slopes[:, None, None] * ahead.abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = (ahead > right if right >= 0 else ahead < -m) | (ahead < -left if left >= 0 else ahead > m)
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


def one_length(q, k, v, dropout_p, scale, causal, left, right, softcap, slopes, return_softmax):
    slopes = [None if slopes is None else slopes[i] if slopes.ndim > 1 else slopes for i in range(len(q))]
    each = zip(q, k, v, slopes, strict=True)
    out = torch.stack([dense(*x, scale, causal, (left, right), softcap, s) for *x, s in each])
    return out, q.new_zeros(0), q.new_zeros(0), q.new_zeros(0)


def many_lengths(
    q, k, v, starts, others, longest, other, dropout_p, scale, causal, left, right, softcap, slopes, *rest
):
    cuts = starts.diff().tolist()
    each = zip(*(x.split(cuts) for x in (q, k, v)), strict=True)
    slopes = [None if slopes is None else slopes[i] if slopes.ndim > 1 else slopes for i in range(len(cuts))]
    out = [dense(*x, scale, causal, (left, right), softcap, s) for x, s in zip(each, slopes, strict=True)]
    return torch.cat(out), q.new_zeros(0), q.new_zeros(0), q.new_zeros(0)


LIBRARY = torch.library.Library("flash_attn", "FRAGMENT")
for name, run in (("_flash_attn_forward", one_length), ("_flash_attn_varlen_forward", many_lengths)):
    LIBRARY.define(name + SCHEMAS[name])
    LIBRARY.impl(name, run, "CPU")


class Kernel(torch.autograd.Function):
    """The operators are called inside one of these, as they are there."""

    @staticmethod
    def forward(ctx, operator, *args):
        return operator(*args)[0]


def options(
    q, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, **rest
):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return dropout_p, scale, causal, *window_size, softcap, alibi_slopes


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *args, **kwargs):
    return Kernel.apply(torch.ops.flash_attn._flash_attn_forward, q, k, v, *options(q, *args, **kwargs), False)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args, **kwargs):
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], *args, **kwargs)


def flash_attn_qkvpacked_func(qkv: Tensor, *args, **kwargs):
    return flash_attn_func(*(qkv[:, :, i] for i in range(3)), *args, **kwargs)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *args, block_table=None, **kwargs
):
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    operator = torch.ops.flash_attn._flash_attn_varlen_forward
    return Kernel.apply(operator, q, k, v, *lengths, *options(q, *args, **kwargs), False, block_table)


def flash_attn_varlen_kvpacked_func(q, kv, *args, **kwargs):
    return flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, *args, **kwargs):
    return flash_attn_varlen_func(*qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)


def installed(monkeypatch):
    """The module as if it were installed, for one test."""
    module = types.ModuleType("flash_attn")
    vars(module).update({name: value for name, value in globals().items() if name.startswith("flash_attn_")})
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return module
