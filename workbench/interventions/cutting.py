"""Attention without some of its keys, in fused calls: no T x T array is made, whatever the length.

A key is forbidden by one more dimension of the heads: late queries hold a number there, the key its large negative, and both
are scaled so that all other scores stay. What shows scores, patterns and statistics sees the attention as it then is. A
query sees its own position always. `keep` leaves the softmax alone and takes the values of the position away instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.interventions.edits import Sink
from workbench.kernels.joint import Softmax
from workbench.models.attention import Attention
from workbench.models.hooked import HookedModel
from workbench.models.transformer import Transformer

FORBIDDEN = -1e4
"""What is added to a forbidden score: its exponential is 0 in every dtype, and its factors fit half precision."""


def cut_sinks(model: HookedModel, layer: int, sinks: Sequence[Sink], stack: ExitStack) -> list[tuple[str, Any]]:
    """Let the sinks of one layer stand until the stack closes; returns hooks where nothing but T x T arrays will do.

    That is `keep` where a shortcut defines the attention (cross-layer, attention residual), and both in other people's
    modules.
    """
    attn = model.blocks[layer].attn
    if not isinstance(model, Transformer):
        return [(square_hook(s, layer), _without(s)) for s in sinks]
    kept, cut = ([s for s in sinks if s.how == how] for how in ("keep", "renormalise"))
    if attn.joint is None:
        if kept:  # inside, so that it sees what is forbidden
            _instead(attn, "attend", _without_writing(attn.attend, kept), stack)
        if cut:
            _instead(attn, "attend", _forbidding(attn.attend, cut), stack)
        return []
    if cut:
        inner = attn.joint.softmaxes

        def softmaxes(at: int, q: Tensor, k: Tensor, read: Any) -> list[Softmax]:
            found = inner(at, q, k, read)
            if at != layer:
                return found
            return [Softmax(s.weight, *widened(s.q, s.keys, cut)) for s in found]

        _instead(attn.joint, "softmaxes", softmaxes, stack)
    return [(name, _without(s)) for s in kept for name in _patterns(attn)]


def _instead(module: Any, name: str, method: Callable[..., Any], stack: ExitStack) -> None:
    """Another method for one object; what stood there comes back."""
    before = module.__dict__.get(name)
    module.__dict__[name] = method
    stack.callback(lambda: module.__dict__.pop(name) if before is None else module.__dict__.__setitem__(name, before))


def positions_in(positions: Sequence[int], length: int) -> list[int]:
    """Those of the positions that a sequence has, negative ones from its end."""
    return [p % length for p in positions if -length <= p < length]


def late(position: int, queries: int, total: int, like: Tensor) -> Tensor:
    """Which of the last `queries` of `total` positions come after one, [queries]."""
    return torch.arange(total - queries, total, device=like.device) > position


def widened(q: Tensor, keys: Sequence[Tensor], sinks: Sequence[Sink]) -> tuple[Tensor, list[Tensor]]:
    """Rotated queries and key sets whose scores are the same but for the forbidden ones."""
    width, total = q.shape[-1], keys[0].shape[1]
    places = [(s, p) for s in sinks for p in positions_in(s.position, total)]
    wide = -(-(width + len(places)) // 8) * 8  # fused kernels ask for multiples of 8
    more_q = q.new_zeros(*q.shape[:-1], wide - width)
    more_k = [k.new_zeros(*k.shape[:-1], wide - width) for k in keys]
    for n, (sink, p) in enumerate(places):
        heads = list(sink.head) or list(range(q.shape[2]))
        chosen = torch.zeros(q.shape[2], dtype=torch.bool, device=q.device)
        chosen[heads] = True
        more_q[..., n] = (late(p, q.shape[1], total, q)[:, None] & chosen) * math.sqrt(-FORBIDDEN)
        for more in more_k:
            more[:, p, :, n] = -math.sqrt(-FORBIDDEN * wide)
    q = torch.cat((q * math.sqrt(wide / width), more_q), -1)
    return q, [torch.cat((k, more), -1) for k, more in zip(keys, more_k, strict=True)]


def _forbidding(inner: Callable[..., Tensor], sinks: Sequence[Sink]) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        width = v.shape[-1]
        q, (k,) = widened(q, [k], sinks)
        return inner(q, k, F.pad(v, (0, q.shape[-1] - width)))[..., :width]

    return attend


def _without_writing(inner: Callable[..., Tensor], sinks: Sequence[Sink]) -> Callable[..., Tensor]:
    """What later queries read of the positions is left out, not what a position reads of itself."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, total, past = q.shape[2], k.shape[1], k.shape[1] - q.shape[1]
        k, v = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (k, v))
        places = [(p, list(s.head) or list(range(heads))) for s in sinks for p in positions_in(s.position, total)]
        left = v.clone()
        for p, chosen in places:
            left[:, p, chosen] = 0
        z = inner(q, k, left).clone()
        gone = (v - left)[:, past:]
        for p in {p for p, _ in places if p >= past}:
            scores = torch.einsum("bhd,bkhd->bhk", q[:, p - past], k[:, : p + 1]) * q.shape[-1] ** -0.5
            own = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))[..., -1:].to(v.dtype)
            z[:, p - past] += own * gone[:, p - past]
        return z

    return attend


def _patterns(attn: Attention) -> list[str]:
    """Hook points of the patterns that the values are multiplied by."""
    parts = attn.parts[0] if len(attn.parts) == 1 else [attn]
    return [str(part.hook_pattern.name) for part in parts]


def square_hook(sink: Sink, layer: int) -> str:
    """Hook point of the T x T array in which a sink can be cut."""
    return f"blocks.{layer}.attn.hook_{'pattern' if sink.how == 'keep' else 'attn_scores'}"


def _without(sink: Sink) -> Callable[..., Tensor]:
    """Change scores or a pattern [batch, head, query, key]."""

    def change(square: Tensor, hook: Any) -> Tensor:
        square = square.clone()
        for p in positions_in(sink.position, square.shape[-1]):
            for head in sink.head or range(square.shape[1]):
                gone = late(p, square.shape[-2], square.shape[-1], square)
                square[:, head, gone, p] = 0 if sink.how == "keep" else -math.inf
        return square

    return change
