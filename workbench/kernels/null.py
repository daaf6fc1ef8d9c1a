"""Fused attention whose softmax has one more column that is no key, with a given logit and no value.

    p_ij = e^{s_ij} / (sum_j e^{s_ij} + e^{b_h}),   z_i = sum_j p_ij v_j

On the CPU PyTorch's fused call returns the rows' log-sum-exp, and its output is multiplied by sigmoid(lse_i - b_h). Its backward
call, given ln(e^lse_i + e^b_h) and that product, computes the exact gradients. With D_i = dL/dz_i . z_i they are
dL/ds_ij = p_ij (dL/dz_i . v_j - D_i) and dL/db_h = -sum_i p_i,null D_i. On other devices and in compiled graphs the column is one
more key, which is zero except in one more channel of the heads. Neither form has a T x T array. Reference: `reference.shares`.

Source: sink logits of gpt-oss (OpenAI 2025); off by one: Miller (2023), Attention Is Off By One.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CALL = "_scaled_dot_product_flash_attention_for_cpu"
_CALLS: Any = [  # None in a PyTorch without them
    getattr(getattr(torch.ops.aten, _CALL + more, None), "default", None) for more in ("", "_backward")
]
_FORWARD, _BACKWARD = _CALLS
_MULTIPLE = 8  # of channels in fused calls on a GPU


def attention_with_null(
    q: Tensor, k: Tensor, v: Tensor, null: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """`scaled_dot_product_attention` of [batch, head, pos, d_head] with a differentiable `null` [head]; repeats key-value heads."""
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    if q.device.type != "cpu" or _BACKWARD is None or torch.compiler.is_compiling():
        return _as_a_key(q, k, v, null, attn_mask, is_causal)
    if k.shape[1] < q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if torch.is_grad_enabled():
        result: Tensor = _Rescaled.apply(q, k, v, null, attn_mask, is_causal)
        return result
    return _rescaled(q, k, v, null, attn_mask, is_causal)[0]


def _rescaled(
    q: Tensor, k: Tensor, v: Tensor, null: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the output, and the rows' log-sum-exp without the column."""
    z, lse = _FORWARD(q, k, v, 0.0, causal, attn_mask=mask)
    return z * (lse - null.to(lse.dtype)[:, None]).sigmoid_().to(z.dtype)[..., None], lse


class _Rescaled(torch.autograd.Function):
    """`_rescaled` with its gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, null: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        z, lse = _rescaled(q, k, v, null, mask, causal)
        ctx.save_for_backward(q, k, v, z, torch.logaddexp(lse, null.to(lse.dtype)[:, None]), null)
        ctx.mask, ctx.causal = mask, causal
        return z

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, z, lse, null = ctx.saved_tensors
        by_q, by_k, by_v = _BACKWARD(slope, q, k, v, z, lse, 0.0, ctx.causal, attn_mask=ctx.mask)
        along = (slope * z).sum(-1, dtype=lse.dtype)
        by_null = -(along * (null.to(lse.dtype)[:, None] - lse).exp_()).sum((0, 2))
        return by_q, by_k, by_v, by_null.to(null.dtype), None, None


def _as_a_key(q: Tensor, k: Tensor, v: Tensor, null: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Attend with one more key in front that every query sees; a causal call gets a query for it, whose output is dropped."""
    width, length = q.shape[-1], q.shape[2]
    more = -(-(width + 1) // _MULTIPLE) * _MULTIPLE - width
    logits = F.pad(null.to(q.dtype)[:, None, None], (width, more - 1))  # in the first of the further channels
    q = F.pad(q, (0, more, int(causal), 0)) + logits
    key = F.pad(k.new_full((1,), width**0.5), (width, more - 1))
    k = torch.cat((key.expand(*k.shape[:2], 1, -1), F.pad(k, (0, more))), 2)
    v = F.pad(v, (0, more, 1, 0))
    mask = None if mask is None else F.pad(mask, (1, 0), value=mask.dtype == torch.bool)
    z = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=width**-0.5, enable_gqa=k.shape[1] != q.shape[1]
    )
    return z[:, :, -length:, :width]
