"""Find the axes of sequences and positions by runs of two sizes, and the positions that are tokens by changing one token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.errors import WorkbenchError
from workbench.observing.interception.function_mode import uncompiled
from workbench.observing.interception.positions import UNKNOWN_ORDER, Axes, BatchAxis, Layout, Positions
from workbench.observing.interception.tensor_layouts import tensors_in
from workbench.observing.recognition.trace import Place, ShapeTrace, Trace

_LEAST = 8  # positions of a run on other sizes


class Sizes(NamedTuple):
    """The axes of every tensor, and the lengths of all other axes: those that two runs of different sizes share."""

    axes: dict[Place, Axes | None]
    constants: set[int]
    other: ShapeTrace  # the run of the other size


def find_axes(module: nn.Module, call: Callable[[Tensor], Any], tokens: Tensor, layout: Layout) -> Sizes | None:
    """Find the axes of all tensors of a module by a run on the tokens and a run on other numbers of sequences and positions.

    The axis of positions has the length of the sequences in both runs; no other axis follows it. Returns None if the module cannot
    run on inputs of another size.
    """
    runs, trace = [], None
    for ids in (tokens, of_another_size(tokens)):
        trace = ShapeTrace(module, ids)
        try:
            trace.run(call)
        except Exception:  # whatever a module raises for a size that it does not take
            if ids is tokens:
                raise
            return None
        batch, length = ids.shape
        runs.append((Positions(batch, length, layout), trace.shapes))
    (first, shapes), (second, others) = runs
    axes: dict[Place, Axes | None] = {}
    constants: set[int] = set()
    for place, shape in shapes.items():
        if (other := others.get(place)) is not None and len(other) == len(shape):
            fits = (a for a in first.fitting(shape) if second.fits(other, a))
            axes[place] = next(fits, None)
            constants |= {n for n, m in zip(shape, other, strict=True) if n == m}
    assert trace is not None
    return Sizes(axes, constants, trace)


def find_batch_axes(
    module: nn.Module, call: Callable[[Tensor], Any], tokens: Tensor, layout: Layout, sizes: Sizes | None
) -> dict[tuple[str, int, str], BatchAxis]:
    """Find the axis of sequences in the tensors of every call that may be an attention's, by changing one sequence.

    Heads may stand before the sequences, and `[head * batch, pos, d_head]` has the shape of `[batch * head, pos, d_head]`.
    The runs have at least two sequences, unless the module takes one sequence only.
    """
    before = ShapeTrace(module, tokens) if sizes is None else sizes.other
    if before.batch < 2 or layout.packed:
        return {}
    if sizes is None:
        before.run(call)
    ids = before.tokens.clone()
    known = tokens.unique()
    ids[1] = known[(torch.searchsorted(known, ids[1]) + 1) % len(known)]
    after = ShapeTrace(module, ids)
    after.run(call)
    found = {}
    for place, samples in before.samples.items():
        axis = _batch_axis(samples, after.samples.get(place, []), before.batch)
        if axis is not None:
            found[place] = axis
    return found


_Samples = Sequence[tuple[str, dict[str, Tensor]]]
_LEAST_CHANGE, _SHARE = 1e-3, 0.02  # relative change that is one, and share of the largest below which it is rounding


def _batch_axis(before: _Samples, after: _Samples, batch: int) -> BatchAxis | None:
    """The axis along which only the changed sequence's part of a call's tensors changes; None if no axis can be that."""
    by_length: dict[str, int] = {}
    for (letters, entries), (others, changed) in zip(before, after or before, strict=True):
        fits = []
        for letter, x in entries.items():
            heads = x.shape[1] // batch
            by_length[letter] = max(heads, by_length.get(letter, 1))
            if letters != others or letter not in changed or changed[letter].shape != x.shape:
                continue
            change = (changed[letter] - x).norm(dim=0) / (changed[letter].norm(dim=0) + x.norm(dim=0)).clamp_min(1e-30)
            if float(change.max()) < _LEAST_CHANGE:
                continue
            at = set((change > _SHARE * change.max()).nonzero()[:, 0].tolist())
            if at <= set(range(heads, 2 * heads)):
                fits.append(BatchAxis(letter))
            if heads > 1 and at <= set(range(1, heads * batch, batch)):
                fits.append(BatchAxis(letter, is_inner=True))
        if len(fits) == 1:
            return fits[0]
    if not by_length:
        return None
    return BatchAxis(next(iter(by_length))) if list(by_length.values()) == [1] else UNKNOWN_ORDER


def of_another_size(tokens: Tensor) -> Tensor:
    """Return tokens in other numbers of sequences and positions, which differ from each other."""
    batch, length = tokens.shape
    fewer = length - 1 if length > _LEAST else length + 1
    more = batch + 1 if batch + 1 != fewer else batch + 2
    return resized(tokens, more, fewer)


def resized(tokens: Tensor, batch: int, length: int) -> Tensor:
    """Return `batch` sequences of `length` ids each, taken from the tokens at shifted places."""
    n = tokens.numel()
    places = torch.arange(batch)[:, None] * (tokens.shape[1] + 1) + torch.arange(length)
    return tokens.flatten()[places.to(tokens.device) % n]


def distinct_length(tokens: Tensor, constants: set[int]) -> Tensor:
    """Cut the tokens to a number of positions that no other axis has."""
    length = tokens.shape[1]
    lengths = [n for n in range(length, _LEAST - 1, -1) if n not in constants and n != len(tokens)]
    return tokens if not lengths else tokens[:, : lengths[0]]


def refuse_ambiguous_axes(trace: Trace) -> None:
    """Raise `WorkbenchError` if two axes of a tensor in the only possible run have the length of the sequences."""
    at = trace.positions
    for (name, _, side, _), shape in trace.shapes.items():
        if len(at.fitting(shape)) > 1:
            raise WorkbenchError(
                f"the {side} of {name or 'the module'} has shape {shape} for {at.batch} sequences of {at.length} tokens, and the module "
                "takes inputs of no other size: give example_tokens with another number of positions"
            )


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
            for x in (x for _, x in tensors_in((args, kwargs)) if x.is_floating_point() and x.ndim in (2, 3)):
                fits = [axes for axes in at.fitting(x.shape) if axes.is_inside or at.layout.packed]
                seen.extend(at.lined(x, axes).detach().clone() for axes in fits[:1])

    handles = [module.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True) for name in names]
    try:
        with torch.inference_mode(False), torch.no_grad(), uncompiled():
            call(ids)
    finally:
        for handle in handles:
            handle.remove()
    return seen[0] if seen else None
