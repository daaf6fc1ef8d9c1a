"""One forward pass on one prompt: hook points are reduced layer by layer as they fire, the head reads few positions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.errors import BadData
from workbench.models import Transformer
from workbench.models.hooked import HookedModel
from workbench.names import stream_hook

MAX_LOGITS = 2**22
"""Logits that are in memory at a time: 16 MiB in float32."""


def chosen_positions(T: int, positions: slice | None) -> range:
    """Positions of a slice of 0..T - 1, None for all; raises `BadData` where it is empty or skips some."""
    chosen = range(*(slice(None) if positions is None else positions).indices(T))
    if not chosen or chosen.step != 1:
        raise BadData(f"positions {positions} of {T}: give a slice of neighbours that holds at least one of 0..{T - 1}")
    return chosen


def one_position(T: int, position: int) -> int:
    """A position 0..T - 1, negative ones from the end; raises `BadData` for others."""
    if isinstance(position, bool) or not isinstance(position, int) or not -T <= position < T:
        raise BadData(f"position {position!r}: the prompt has positions 0..{T - 1}, or -1..-{T} from its end")
    return position % T


@torch.no_grad()
def by_layer(
    model: HookedModel, ids: Tensor, names: Mapping[Any, Sequence[str]],
    reduce: Callable[[Any, dict[str, Tensor]], None], head: slice | None = None,
) -> Tensor:  # fmt: skip
    """Run once; `reduce(key, {name: activation})` for each group of hook points, as soon as all of it has fired.

    A group is dropped once it is reduced, so memory is one layer's. Returns logits [1, pos, d_vocab] of the positions in
    `head`; None: they are not wanted. Our models make no others: the logits of a long prompt would outweigh everything else.
    """
    owner = {name: key for key, group in names.items() for name in group}
    model.hook_names(list(owner))  # refused by name before anything runs
    waiting: dict[Hashable, dict[str, Tensor]] = {}

    def collect(tensor: Tensor, hook: Any) -> None:
        key = owner[str(hook.name)]
        group = waiting.setdefault(key, {})
        group[str(hook.name)] = tensor.detach()
        if len(group) == len(names[key]):
            reduce(key, waiting.pop(key))

    def cut(tensor: Tensor, hook: Any) -> Tensor:
        return tensor[:, slice(0, 1) if head is None else head]

    points: list[Any] = [(name, collect) for name in owner]
    if isinstance(model, Transformer):
        with model.hooks([*points, ("unembed.hook_in", cut)]):
            return model(ids)
    with model.hooks(points):
        return model(ids) if head is None else model.everywhere(ids)[:, head]


def streams(model: HookedModel) -> dict[int, str]:
    """Hook points of the residual streams: 0..L - 1 are inputs of blocks, L is the input of the final norm."""
    n_layers = model.config.n_layers
    return {n: name for n in range(n_layers + 1) if (name := stream_hook(n, n_layers)) in model.hook_dict}


def log_probabilities(model: Transformer, x: Tensor, normed: bool = False) -> Iterator[tuple[slice, Tensor]]:
    """(positions, log-probabilities [pos, d_vocab]) of streams x [pos, d_model], a few positions at a time.

    Float32 or better. `normed`: x has passed the final norm already. Norm and head are applied without their hooks, which
    are the run's own matter.
    """
    norm, step = model.ln_final, max(1, MAX_LOGITS // model.config.d_vocab)
    for start in range(0, len(x), step):
        part = x[start : start + step]
        if not normed:
            part = F.rms_norm(part, norm.weight.shape, norm.weight, norm.eps)
        logits = F.linear(part, model.unembed.weight)
        yield slice(start, start + len(part)), float32_or_better(logits).log_softmax(-1)


def float32_or_better(x: Tensor) -> Tensor:
    """Float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def array(x: Tensor) -> np.ndarray:
    """A float32 array."""
    return x.detach().float().cpu().numpy()
