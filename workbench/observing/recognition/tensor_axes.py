"""Layout of a module's tensors: axes of sequences and positions from runs of two sizes, tokens from a run with one token changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.errors import WorkbenchError
from workbench.kernels.pytorch_switches import outside_inference_mode
from workbench.observing.interception.eager_attention_products import ProductCall
from workbench.observing.interception.function_mode import Interception, guarded, remove_module_hooks
from workbench.observing.interception.masks import visible_keys
from workbench.observing.interception.position_axes import UNKNOWN_ORDER, Axes, BatchAxis, Layout, Positions
from workbench.observing.interception.sdpa_and_flex_attention import FusedCall, letters_of
from workbench.observing.interception.sharded_weights import is_sharded
from workbench.observing.interception.tensor_paths import tensors_in
from workbench.observing.recognition.traced_run import Place, Trace

_LEAST = 8  # positions of a run of another size
_ENTRIES = 64  # sampled at each index of an axis
_LEAST_CHANGE, _SHARE = 1e-3, 0.02  # least relative change, and share of the largest below which it is rounding


class ShapeTrace(Trace):
    """A traced run that records shapes and samples of the tensors of calls that may be an attention's.

    For every call `samples` holds the letters of its tensors, and entries [entry, index] at every index of the axes whose
    length is a multiple of the number of sequences.
    """

    def __init__(self, module: nn.Module, tokens: Tensor) -> None:
        super().__init__(module, tokens)
        self.samples: dict[tuple[str, int, str], list[tuple[str, dict[str, Tensor]]]] = {}

    def fused(self, call: FusedCall) -> Any:
        """Sample and run a fused attention call."""
        self._sample("fused", [(x, letters_of(x)) for x in call.qkv], letters_of(call.qkv[0])[:-2])
        return call.run()

    def product(self, call: ProductCall) -> Any:
        """Sample and run a product."""
        is_einsum = getattr(call.function, "__name__", "") == "einsum"
        lead = call.letters[2] if is_einsum else call.letters[2][:-2]
        self._sample("product", list(zip(call.operands, call.letters[:2], strict=True)), lead)
        return call.run()

    def softmax(self, scores: Tensor, run: Callable[[Tensor], Tensor], axis: int) -> Tensor:
        """Sample and run a softmax."""
        shown = torch.where(visible_keys(scores), scores, 0.0)
        self._sample("softmax", [(shown, letters_of(scores))], letters_of(scores)[:-1])
        return run(scores)

    def _sample(self, kind: str, tensors: Sequence[tuple[Tensor, str]], lead: str) -> None:
        generator, (within, number, _) = torch.Generator().manual_seed(0), self.batch_place(kind)
        samples = self.samples[within, number, kind] = []
        for x, letters in tensors:
            entries = {}
            for place, letter in enumerate(letters if not is_sharded(x) else ""):
                if letter in lead and x.shape[place] % self.batch == 0:
                    y = x.detach().movedim(place, -1)
                    at = [torch.randint(n, (_ENTRIES,), generator=generator).to(x.device) for n in y.shape[:-1]]
                    entries[letter] = y[tuple(at)].double().nan_to_num(0.0, 0.0, 0.0).cpu()
            samples.append((letters, entries))


class Sizes(NamedTuple):
    """The axes of every tensor, the lengths that do not change with the size of the input, and the run of the other size."""

    axes: dict[Place, Axes | None]
    constants: set[int]
    other: ShapeTrace


def find_axes(module: nn.Module, call: Callable[[Tensor], Any], tokens: Tensor, layout: Layout) -> Sizes | None:
    """Find the axes of all tensors by a run on the tokens and one on other numbers of sequences and positions.

    The axis of positions is the one as long as the sequences in both runs. Returns None if the module takes no other size.
    """
    batch, length = tokens.shape
    fewer = length - 1 if length > _LEAST else length + 1
    more = batch + 1 if batch + 1 != fewer else batch + 2
    places = torch.arange(more)[:, None] * (length + 1) + torch.arange(fewer)
    resized = tokens.flatten()[places.to(tokens.device) % tokens.numel()]
    runs, trace = [], None
    for ids in (tokens, resized):
        trace = ShapeTrace(module, ids)
        try:
            trace.run(call)
        except Exception:  # whatever a module raises for a size that it does not take
            if ids is tokens:
                raise
            return None
        runs.append((Positions(len(ids), ids.shape[1], layout), trace.shapes))
    (first, shapes), (second, others) = runs
    axes: dict[Place, Axes | None] = {}
    constants: set[int] = set()
    for place, shape in shapes.items():
        if (other := others.get(place)) is not None and len(other) == len(shape):
            axes[place] = next((a for a in first.fitting(shape) if second.fits(other, a)), None)
            constants |= {n for n, m in zip(shape, other, strict=True) if n == m}
    assert trace is not None
    return Sizes(axes, constants, trace)


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


def find_batch_axes(
    module: nn.Module, call: Callable[[Tensor], Any], tokens: Tensor, layout: Layout, sizes: Sizes | None
) -> dict[tuple[str, int, str], BatchAxis]:
    """Find the axis of the sequences in the tensors of every call that may be an attention's, by changing one sequence.

    Heads may come before the sequences, and `[head * batch, pos, d_head]` has the shape of `[batch * head, pos, d_head]`.
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
    pairs = [(place, samples, after.samples.get(place, [])) for place, samples in before.samples.items()]
    axes = {place: _batch_axis(samples, others, before.batch) for place, samples, others in pairs}
    return {place: axis for place, axis in axes.items() if axis is not None}


_Samples = Sequence[tuple[str, dict[str, Tensor]]]


def _batch_axis(before: _Samples, after: _Samples, batch: int) -> BatchAxis | None:
    """Find the axis along which only the changed sequence's part of a call's tensors changes; None if no axis can be that."""
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


def find_layout(trace: Trace, call: Callable[[Tensor], Any]) -> Layout:
    """Find which positions inside a traced module are tokens: plain, unless all attentions run over more positions.

    Changes the last token of the first sequence. The first position that changes in the input of the first attention is that
    token's. Raises `WorkbenchError` if it is not before, between or after positions that are no tokens.
    """
    batch, length = trace.batch, trace.length
    if not trace.elsewhere or any(not a.refusal for a in trace.attentions):
        return Layout()
    within, queries = trace.elsewhere[0]
    names = [part.name for part in within.stack()[1:]]
    packed = batch > 1 and queries == batch * length
    guess = Positions(batch, length, Layout(packed=packed) if packed else Layout((queries - length, 0)))
    others = trace.tokens[trace.tokens != trace.tokens[0, -1]]
    ids = trace.tokens.clone()
    ids[0, -1] = others[0] if len(others) else (trace.tokens[0, -1] + 1) % 2
    inputs = list[Tensor | None]()
    for x in (trace.tokens, ids):
        first = _FirstInput([trace.module.get_submodule(name) for name in names], guess)
        with outside_inference_mode(), torch.no_grad():
            guarded(first, call, x)
        inputs.append(next(iter(first.inputs), None))
    before, after = inputs
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


class _FirstInput(Interception):
    """The first input [row, column, width] of some submodules in a run that has vectors at all positions."""

    def __init__(self, parts: Sequence[nn.Module], at: Positions) -> None:
        super().__init__(None)
        self.parts, self.at, self.inputs = parts, at, list[Tensor]()

    def begin(self) -> None:
        """Register the hooks, and run compiled code and fused layers in eager form."""
        super().begin()

        def note(part: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.inputs:
                for x in (x for _, x in tensors_in((args, kwargs)) if x.is_floating_point() and x.ndim in (2, 3)):
                    fits = [axes for axes in self.at.fitting(x.shape) if axes.is_inside or self.at.layout.packed]
                    self.inputs.extend(self.at.lined(x, axes).detach().clone() for axes in fits[:1])

        for part in self.parts:
            part.register_forward_pre_hook(note, with_kwargs=True)

    def end(self) -> None:
        """Remove the hooks."""
        remove_module_hooks(self, self.parts)
        super().end()
