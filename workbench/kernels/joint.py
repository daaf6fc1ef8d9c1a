"""Attention that is no single softmax over one set of keys: over the keys of several layers, or a sum of softmaxes.

    A = sum over c of w_c softmax(q_c [K_1; ...; K_S]^T / sqrt(d) + causal mask),   z = A [V_1; ...; V_S]

Every key set has the same positions, and a query sees position j of each set exactly if j is not later than its own.
Output and statistics work in strips of queries: O(T) memory, never a T x T array; the output is differentiable and made
of fused calls. Statistics fold the sets: a position receives what it receives in all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from workbench.kernels.reference import AttentionStatistics

STRIP = 128  # queries at a time; work above the diagonal is STRIP / T of the whole


@dataclass(frozen=True)
class Softmax:
    """One softmax of an attention: its weight, rotated queries and a list of rotated key sets."""

    weight: float | Tensor
    q: Float[Tensor, "batch query head d_head"]
    keys: Sequence[Float[Tensor, "batch pos kv_head d_head"]]


def joint_attention(softmaxes: Sequence[Softmax], values: Sequence[Tensor]) -> Tensor:
    """Head outputs [batch, query, head, d_head] for values [batch, pos, kv_head, d_head] of each key set.

    With fewer queries than positions, the queries are the last ones.
    """
    total: Tensor | None = None
    for softmax in softmaxes:
        z = _fused(softmax.q, softmax.keys, values)
        z = z if softmax.weight == 1.0 else softmax.weight * z
        total = z if total is None else total + z
    assert total is not None
    return total


def _fused(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    length, sets, width = q.shape[1], len(keys), values[0].shape[-1]
    past = keys[0].shape[1] - length
    # position-major, so that all keys up to a position are one slice
    k, v = (torch.cat(tuple(x), 2).view(q.shape[0], -1, *x[0].shape[2:]) if sets > 1 else x[0] for x in (keys, values))
    if v.shape[-1] < k.shape[-1]:  # unequal widths would leave the fused path
        v = F.pad(v, (0, k.shape[-1] - v.shape[-1]))
    attend = partial(F.scaled_dot_product_attention, enable_gqa=k.shape[2] != q.shape[2])
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
            strips.append(attend(*strip, attn_mask=mask[start - end :, -seen:].contiguous()))  # GPUs ask for alignment
        z = torch.cat(strips, 2)
    return (z if z.shape[-1] == width else z[..., :width]).transpose(1, 2)


_MASKS: dict[tuple[Any, ...], Tensor] = {}  # of short sequences, where making one would show
_MASK_SIZE, _MASK_COUNT = 2**18, 16  # elements, masks: 16 MiB at most


def _mask(queries: int, sets: int, positions: int, like: Tensor) -> Tensor:
    """To add to the scores of the last `queries` with all keys, position by position; earlier ones read its end."""
    key = queries, sets, positions, like.dtype, like.device
    if queries * sets * positions > _MASK_SIZE or torch.compiler.is_compiling():
        return _new_mask(*key)
    if (mask := _MASKS.get(key)) is None:
        if len(_MASKS) >= _MASK_COUNT:
            _MASKS.clear()
        mask = _MASKS[key] = _new_mask(*key)
    return mask


@torch.inference_mode(False)  # a mask made in inference mode could never be trained with
def _new_mask(queries: int, sets: int, positions: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    latest = torch.arange(positions - queries, positions, device=device)[:, None]
    future = torch.arange(positions, device=device).repeat_interleave(sets) > latest
    return torch.zeros(future.shape, dtype=dtype, device=device).masked_fill_(future, -math.inf)


def joint_scores(softmax: Softmax, start: int, end: int) -> Float[Tensor, "batch head query set pos"]:
    """Scaled, masked scores of queries start..end - 1 with every key set, positions up to the last query's."""
    q, past = softmax.q[:, start:end], softmax.keys[0].shape[1] - softmax.q.shape[1]
    seen, heads = past + end, q.shape[2]
    k = torch.stack([x[:, :seen].repeat_interleave(heads // x.shape[2], dim=2) for x in softmax.keys], 1)
    scores = torch.einsum("bqhd,bskhd->bhqsk", q, k) * q.shape[-1] ** -0.5
    latest = torch.arange(past + start, seen, device=q.device)[:, None, None]
    return scores.masked_fill(torch.arange(seen, device=q.device) > latest, -math.inf)


@torch.no_grad()
def joint_statistics(softmaxes: Sequence[Softmax]) -> AttentionStatistics:
    """Statistics of the attention in strips of queries, key sets folded; `lse` is that of the last softmax.

    Sums run in float32 (float64 for float64 inputs). The rows' entropy is over keys and sets together, so two equal sets
    add ln 2.
    """
    q = softmaxes[0].q
    wide = torch.promote_types(q.dtype, torch.float32)
    softmaxes = [Softmax(s.weight, s.q.to(wide), [k.to(wide) for k in s.keys]) for s in softmaxes]
    batch, _, heads, _ = q.shape
    received = torch.zeros(batch, heads, softmaxes[0].keys[0].shape[1], dtype=wide, device=q.device)
    rows: dict[str, list[Tensor]] = {"row_entropy": [], "row_max": [], "sink": [], "lse": []}
    for scores, pattern in _strips(softmaxes):
        strip = statistics_of_sets(scores, pattern)
        received[..., : pattern.shape[-1]] += strip.received
        for name, parts in rows.items():
            parts.append(getattr(strip, name))
    return AttentionStatistics(received=received, **{name: torch.cat(parts, -1) for name, parts in rows.items()})


def _strips(softmaxes: Sequence[Softmax]) -> Iterator[tuple[Tensor, Tensor]]:
    """(scores of the last softmax, pattern) [batch, head, query, set, pos] of a strip of queries at a time."""
    for start in range(0, softmaxes[0].q.shape[1], STRIP):
        end = min(start + STRIP, softmaxes[0].q.shape[1])
        pattern: Tensor | None = None
        for softmax in softmaxes:
            scores = joint_scores(softmax, start, end)
            part = softmax.weight * scores.flatten(-2).softmax(-1).view_as(scores)
            pattern = part if pattern is None else pattern + part
        assert pattern is not None
        yield scores, pattern


def statistics_of_sets(scores: Tensor, pattern: Tensor) -> AttentionStatistics:
    """Statistics of a pattern [batch, head, query, set, pos] that is at hand, key sets folded."""
    scores, pattern = (x.detach().to(torch.promote_types(x.dtype, torch.float32)) for x in (scores, pattern))
    flat = pattern.flatten(-2)
    return AttentionStatistics(
        received=pattern.sum((2, 3)),
        row_entropy=torch.special.entr(flat).sum(-1),
        row_max=flat.amax(-1),
        sink=pattern[..., 0].sum(-1),
        lse=scores.flatten(-2).logsumexp(-1),
    )
