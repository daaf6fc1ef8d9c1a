"""Edit `sink`: mask some positions for later queries in fused attention calls, without a T x T array.

    sink:layer=3,head=1

One more head dimension masks a key: later queries hold a number there and the key a large negative one. Both are scaled so
that all other scores stay the same. Hooks on scores, patterns and statistics see the edited attention. A
query sees its own position always. `keep` leaves the softmax alone and takes the values of the position away instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.interventions.edits.base import Edit, Hook, Inputs, Numbers, one_of
from workbench.kernels.joint_and_null_softmax import Softmax
from workbench.models.attention_layer import JointAttention
from workbench.models.hooked import HookedModel
from workbench.models.transformer import Transformer

FORBIDDEN = -1e4
"""What is added to a forbidden score: its exponential is 0 in every dtype, and its factors fit half precision."""


@dataclass(frozen=True, kw_only=True)
class Sink(Edit):
    """Later queries do not attend to the positions (0: the usual sink), in all query heads or in some.

    `how`: `renormalise`, the other keys share the whole attention; `keep`, the pattern stays but what these positions would
    write is left out. A position still attends to itself, so that row 0 stays a distribution.
    """

    kind = "sink"
    presets: ClassVar[Mapping[str, str]] = {
        "": "cut attention to the first token",
        "how=keep": "keep the attention, drop what the first token writes",
    }
    head: Numbers = ()
    position: Numbers = (0,)
    how: str = one_of("renormalise", "keep")

    def refuse(self) -> None:
        if not self.position:
            raise WorkbenchError("sink: name the positions that are cut, as position=0")

    @property
    def heads(self) -> str:
        return "head"

    def what(self, model: HookedModel) -> str:
        return "attention to cut"

    def points(self, model: HookedModel, layer: int) -> list[str]:
        """The T x T array in which it can be made where nothing else will do."""
        return [f"blocks.{layer}.attn.hook_{'pattern' if self.how == 'keep' else 'attn_scores'}"]

    def has(self, model: HookedModel, layer: int) -> bool:
        return isinstance(model, Transformer) or super().has(model, layer)

    def apply(self, model: HookedModel, layer: int, inputs: Inputs, stack: ExitStack) -> list[Hook]:
        """Replace the layer's attention until the stack closes; hooks where nothing but T x T arrays will do.

        Layers whose attention a shortcut defines allow only `keep`; observed models allow both.
        """
        attn = model.blocks[layer].attn
        if not isinstance(model, Transformer):
            return [(name, self._cut_square) for name in self.points(model, layer)]
        if not isinstance(attn, JointAttention):
            _instead(attn, "attend", self._attend(attn.attend), stack)
            return []
        if self.how == "keep":
            modules = attn.key_sets[0] if len(attn.key_sets) == 1 else [attn]
            return [(str(module.hook_pattern.name), self._cut_square) for module in modules]
        inner = attn.joint.softmaxes

        def softmaxes(at: int, q: Tensor, k: Tensor, *read: Any) -> list[Softmax]:
            plain = inner(at, q, k, *read)
            if at != layer:
                return plain
            wider = [widened(s.q, s.keys, self) for s in plain]
            return [replace(s, q=q, keys=keys) for s, (q, keys) in zip(plain, wider, strict=True)]

        _instead(attn.joint, "softmaxes", softmaxes, stack)
        return []

    def _attend(self, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a layer's attention without the positions; a position still attends to itself."""

        def renormalised(q: Tensor, k: Tensor, v: Tensor, memory: Any) -> Tensor:
            width = v.shape[-1]
            q, (k,) = widened(q, [k], self)
            return inner(q, k, F.pad(v, (0, q.shape[-1] - width)), memory)[..., :width]

        def without_writing(q: Tensor, k: Tensor, v: Tensor, memory: Any) -> Tensor:
            heads, total, past = q.shape[2], k.shape[1], k.shape[1] - q.shape[1]
            k, v = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (k, v))
            positions = positions_in(self.position, total)
            left = v.clone()
            for p in positions:
                left[:, p, list(self.head) or slice(None)] = 0
            z = inner(q, k, left, memory).clone()
            gone = (v - left)[:, past:]
            for p in {p for p in positions if p >= past}:
                scores = torch.einsum("bhd,bkhd->bhk", q[:, p - past], k[:, : p + 1]) * q.shape[-1] ** -0.5
                own = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))[..., -1:].to(v.dtype)
                z[:, p - past] += own * gone[:, p - past]
            return z

        return without_writing if self.how == "keep" else renormalised

    def _cut_square(self, square: Tensor, hook: Any) -> Tensor:
        """Scores or a pattern [batch, head, query, key] without the positions."""
        square = square.clone()
        for p in positions_in(self.position, square.shape[-1]):
            for head in self.head or range(square.shape[1]):
                later = late(p, square.shape[-2], square.shape[-1], square)
                square[:, head, later, p] = 0 if self.how == "keep" else -math.inf
        return square


def _instead(module: Any, name: str, method: Callable[..., Any], stack: ExitStack) -> None:
    """Replace a method of one object and restore it at the end."""
    before = module.__dict__.get(name)
    module.__dict__[name] = method
    stack.callback(lambda: module.__dict__.pop(name) if before is None else module.__dict__.__setitem__(name, before))


def positions_in(positions: Sequence[int], length: int) -> list[int]:
    """Return the positions that exist in a sequence; negative ones count from its end."""
    return [p % length for p in positions if -length <= p < length]


def late(position: int, queries: int, total: int, like: Tensor) -> Tensor:
    """Which of the last `queries` of `total` positions come after one, [queries]."""
    return torch.arange(total - queries, total, device=like.device) > position


def widened(q: Tensor, keys: Sequence[Tensor], sink: Sink) -> tuple[Tensor, list[Tensor]]:
    """Rotated queries and key sets whose scores are the same but for the forbidden ones."""
    width, total = q.shape[-1], keys[0].shape[1]
    positions = positions_in(sink.position, total)
    wide = -(-(width + len(positions)) // 8) * 8  # fused kernels ask for multiples of 8
    more_q = q.new_zeros(*q.shape[:-1], wide - width)
    more_k = [k.new_zeros(*k.shape[:-1], wide - width) for k in keys]
    chosen = torch.zeros(q.shape[2], dtype=torch.bool, device=q.device)
    chosen[list(sink.head) or slice(None)] = True
    for n, p in enumerate(positions):
        more_q[..., n] = (late(p, q.shape[1], total, q)[:, None] & chosen) * math.sqrt(-FORBIDDEN)
        for more in more_k:
            more[:, p, :, n] = -math.sqrt(-FORBIDDEN * wide)
    q = torch.cat((q * math.sqrt(wide / width), more_q), -1)
    return q, [torch.cat((k, more), -1) for k, more in zip(keys, more_k, strict=True)]
