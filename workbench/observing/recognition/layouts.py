"""Which of a module's positions are its tokens, where it attends over others: found by changing one token and looking what moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import WorkbenchError
from workbench.observing.interception.function_mode import uncompiled
from workbench.observing.interception.positions import Layout, Positions
from workbench.observing.interception.tensor_layouts import tensors_in
from workbench.observing.recognition.trace import Trace


def find_layout(trace: Trace, call: Callable[[Tensor], Any]) -> Layout:
    """The layout of a traced module: plain, unless all its attentions are over as many positions more, or all sequences in a row.

    The last token of the first sequence is changed; the first position that this changes where the first attention reads is
    that token's. Raises `WorkbenchError` where it lies elsewhere than before, between or after positions that are no tokens.
    """
    batch, length = trace.batch, trace.length
    if not trace.elsewhere or any(not a.refusal for a in trace.attentions):
        return Layout()
    within, queries = trace.elsewhere[0]
    names = [part.name for part in within.stack()[1:]]
    packed = batch > 1 and queries == batch * length
    guess = Positions(batch, length, Layout(packed=packed) if packed else Layout((queries - length, 0)))
    before, after = (_read(trace.module, names, call, ids, guess) for ids in (trace.tokens, _changed(trace.tokens)))
    if before is None or after is None or before.shape != after.shape or torch.equal(before, after):
        return Layout()
    row, place = (before != after).flatten(2).any(-1).nonzero()[0].tolist()
    if packed and (row, place) == (0, length - 1):
        return guess.layout
    front = place - (length - 1)
    if packed or row or not 0 <= front <= queries - length:
        raise WorkbenchError(
            f"attention in {within.name or 'the module'} runs over {queries} positions for {length} tokens; token {length - 1} of the "
            f"first sequence is at {place} of row {row}: only tokens side by side, or sequences one after the other, can be told apart"
        )
    return Layout((front, queries - length - front))


def _changed(tokens: Tensor) -> Tensor:
    """The tokens with another one at the end of the first sequence, which stands elsewhere in them."""
    others = tokens[tokens != tokens[0, -1]]
    changed = tokens.clone()
    changed[0, -1] = others[0] if len(others) else (tokens[0, -1] + 1) % 2
    return changed


def _read(
    module: nn.Module, names: Sequence[str], call: Callable[[Tensor], Any], ids: Tensor, at: Positions
) -> Tensor | None:
    """What the first of these submodules that reads vectors at all positions reads, [row, column, width]."""
    seen: list[Tensor] = []

    def note(part: nn.Module, args: Any, kwargs: Any) -> None:
        if not seen:
            lined = (at.lined(x) for _, x in tensors_in((args, kwargs)) if x.is_floating_point() and x.ndim in (2, 3))
            seen.extend(x.detach().clone() for x in lined if x is not None and x.shape[:2] in at.shapes)

    handles = [module.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True) for name in names]
    try:
        with torch.inference_mode(False), torch.no_grad(), uncompiled():
            call(ids)
    finally:
        for handle in handles:
            handle.remove()
    return seen[0] if seen else None
