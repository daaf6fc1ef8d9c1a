"""Attention over the keys of several layers, with a sum of softmaxes, or with one more column that is no key.

    A = sum over c of w_c softmax(q_c [K_1; ...; K_S]^T / sqrt(d) + causal mask),   z = A [V_1; ...; V_S]

Every key set has the same positions, and a query sees position j of a set exactly if j is not later than its own. Output and
statistics are computed in strips of queries with O(T) memory. The output is differentiable and comes from fused calls.
Statistics, as `received`, sum over the sets.

The column that is no key has a logit b_h and no value: p_ij = e^{s_ij} / (sum_j e^{s_ij} + e^{b_h}). On the CPU PyTorch's fused
call returns the rows' log-sum-exp, and its output is multiplied by sigmoid(lse_i - b_h). Its backward call, given
ln(e^lse_i + e^b_h) and that product, computes the exact gradients: with D_i = dL/dz_i . z_i they are
dL/ds_ij = p_ij (dL/dz_i . v_j - D_i) and dL/db_h = -sum_i p_i,null D_i. On other devices and in compiled graphs the column is one
more key, which is zero except in one more channel of the heads.
Source: sink logits of gpt-oss (OpenAI 2025); off by one: Miller (2023), Attention Is Off By One.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from workbench.kernels.attention_and_its_statistics import attention_statistics
from workbench.kernels.full_pattern_reference import AttentionStatistics, Null, shares, statistics_of

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
        return attend_with_a_key(q, k, v, null, attn_mask, is_causal)
    if k.shape[1] < q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if torch.is_grad_enabled():
        return _Rescaled.apply(q, k, v, null, attn_mask, is_causal)
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


def attend_with_a_key(q: Tensor, k: Tensor, v: Tensor, null: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
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


STRIP = 128  # queries at a time; the share of work above the diagonal is STRIP / T


@dataclass(frozen=True)
class Softmax:
    """One softmax of an attention: weight, rotated queries, rotated key sets, and logits of a column that is no key."""

    weight: float | Tensor
    q: Float[Tensor, "batch query head d_head"]
    keys: Sequence[Float[Tensor, "batch pos kv_head d_head"]]
    null: Null = None


def joint_attention(softmaxes: Sequence[Softmax], values: Sequence[Tensor]) -> Tensor:
    """Return head outputs [batch, query, head, d_head] for one tensor of values [batch, pos, kv_head, d_head] per key set.

    If there are fewer queries than positions, they are the last ones.
    """
    total: Tensor | None = None
    for softmax in softmaxes:
        q, keys = softmax.q, softmax.keys
        length, sets, width = q.shape[1], len(keys), values[0].shape[-1]
        past = keys[0].shape[1] - length
        k, v = keys[0], values[0]
        if sets > 1:  # position-major, so that all keys up to a position are one slice
            k, v = (torch.cat(tuple(x), 2).view(q.shape[0], -1, *x[0].shape[2:]) for x in (keys, values))
        if v.shape[-1] < k.shape[-1]:  # unequal widths would leave the fused path
            v = F.pad(v, (0, k.shape[-1] - v.shape[-1]))
        attend: Callable[..., Tensor] = partial(F.scaled_dot_product_attention, enable_gqa=k.shape[2] != q.shape[2])
        if softmax.null is not None:
            attend = partial(attention_with_null, null=softmax.null)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if sets == 1 and past == 0:
            z = attend(q, k, v, is_causal=True)
        elif length == 1:
            z = attend(q, k, v)
        elif length <= STRIP:
            z = attend(q, k, v, attn_mask=_mask(length, sets, past + length, q))
        else:
            strips, mask = [], _mask(STRIP, sets, past + length, q)
            for start in range(0, length, STRIP):
                end = min(start + STRIP, length)
                seen = sets * (past + end)
                strip = q[:, :, start:end], k[:, :, :seen], v[:, :, :seen]
                # GPUs ask for alignment
                strips.append(attend(*strip, attn_mask=mask[start - end :, -seen:].contiguous()))
            z = torch.cat(strips, 2)
        z = (z if z.shape[-1] == width else z[..., :width]).transpose(1, 2)
        z = z if softmax.weight == 1.0 else softmax.weight * z
        total = z if total is None else total + z
    assert total is not None
    return total


_MASKS: dict[tuple[Any, ...], Tensor] = {}  # of short sequences, for which creating one takes noticeable time
_MASK_SIZE, _MASK_COUNT = 2**18, 16  # elements, masks: 16 MiB at most


def _mask(queries: int, sets: int, positions: int, like: Tensor) -> Tensor:
    """Return the mask to add to scores of the last `queries` with all keys, by position and set."""
    key = queries, sets, positions, like.dtype, like.device
    is_plain = type(like) is Tensor and not torch.compiler.is_compiling()  # no fake tensor of an estimate
    is_kept = queries * sets * positions <= _MASK_SIZE and is_plain
    if is_kept and key in _MASKS:
        return _MASKS[key]
    with torch.inference_mode(False):  # a mask created in inference mode could not be used in training
        latest = torch.arange(positions - queries, positions, device=like.device)[:, None]
        future = torch.arange(positions, device=like.device).repeat_interleave(sets) > latest
        mask = torch.zeros(future.shape, dtype=like.dtype, device=like.device).masked_fill_(future, -math.inf)
    if is_kept:
        if len(_MASKS) >= _MASK_COUNT:
            _MASKS.clear()
        _MASKS[key] = mask
    return mask


def joint_scores(softmax: Softmax, start: int, end: int) -> Float[Tensor, "batch head query set pos"]:
    """Return scaled, masked scores of queries start to end - 1 with every key set, up to the last query's position."""
    q, past = softmax.q[:, start:end], softmax.keys[0].shape[1] - softmax.q.shape[1]
    seen, heads = past + end, q.shape[2]
    k = torch.stack([x[:, :seen].repeat_interleave(heads // x.shape[2], dim=2) for x in softmax.keys], 1)
    scores = torch.einsum("bqhd,bskhd->bhqsk", q, k) * q.shape[-1] ** -0.5
    latest = torch.arange(past + start, seen, device=q.device)[:, None, None]
    return scores.masked_fill(torch.arange(seen, device=q.device) > latest, -math.inf)


@torch.no_grad()
def joint_statistics(softmaxes: Sequence[Softmax]) -> AttentionStatistics:
    """Compute statistics in strips of queries, summed over key sets; `lse` belongs to the last softmax.

    Sums run in float32 (float64 for float64 inputs). Entropy and maximum of a row are of its sum over sets, one number a position.
    """
    first, *others = softmaxes
    q = first.q
    if not others and first.weight == 1.0 and len(first.keys) == 1 and first.keys[0].shape[1] == q.shape[1]:
        return attention_statistics(q, first.keys[0], first.keys[0], null=first.null)[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    softmaxes = [replace(s, q=s.q.to(wide), keys=[k.to(wide) for k in s.keys]) for s in softmaxes]
    batch, _, heads, _ = q.shape
    received = torch.zeros(batch, heads, softmaxes[0].keys[0].shape[1], dtype=wide, device=q.device)
    rows: dict[str, list[Tensor]] = {"row_entropy": [], "row_max": [], "sink": [], "lse": []}
    null = softmaxes[-1].null
    rows |= {} if null is None else {"null": []}
    for start in range(0, q.shape[1], STRIP):
        pattern: Tensor | None = None
        for softmax in softmaxes:
            scores = joint_scores(softmax, start, min(start + STRIP, q.shape[1]))
            part = softmax.weight * shares(scores.flatten(-2), softmax.null).view_as(scores)
            pattern = part if pattern is None else pattern + part
        assert pattern is not None
        strip = statistics_of_sets(scores, pattern, null)
        received[..., : pattern.shape[-1]] += strip.received
        for name, parts in rows.items():
            parts.append(getattr(strip, name))
    return AttentionStatistics(received=received, **{name: torch.cat(parts, -1) for name, parts in rows.items()})


def statistics_of_sets(scores: Tensor, pattern: Tensor, null: Null = None) -> AttentionStatistics:
    """Compute statistics of a pattern [batch, head, query, set, pos], summed over key sets."""
    return statistics_of(scores.flatten(-2), pattern.sum(-2), null)
