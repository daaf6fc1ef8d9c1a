"""One traced run of a module on example tokens: the runs of submodules, the attentions, and a few rows of every tensor.

All tensors are stored at the same few positions, so that later comparisons are small.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import WorkbenchError
from workbench.kernels.pytorch_switches import outside_inference_mode
from workbench.observing.interception.call_sites import Frames, running_frames
from workbench.observing.interception.eager_attention_products import ProductCall
from workbench.observing.interception.function_mode import (
    CallHandler,
    Interception,
    InterceptionMode,
    attention_functions,
    guarded,
    remove_module_hooks,
)
from workbench.observing.interception.masks import CAUSAL, CROSSING, FUTURE, NOTHING, mask_kind, visible_keys
from workbench.observing.interception.position_axes import (
    BATCH_FIRST,
    UNKNOWN_ORDER,
    Axes,
    BatchAxis,
    Beside,
    Layout,
    Positions,
)
from workbench.observing.interception.sdpa_and_flex_attention import FusedCall, letters_of
from workbench.observing.interception.sharded_weights import is_sharded
from workbench.observing.interception.tensor_paths import (
    TensorPath,
    get_at,
    head_repeats,
    tensors_in,
    tensors_of_output,
)
from workbench.observing.interception.weight_products_and_lookups import Lookup, MatrixCall
from workbench.observing.recognition.attention_calls import (
    BY_HAND,
    NO_TOKEN,
    EagerCall,
    EagerCalls,
    TracedAttention,
    chosen_heads,
    near,
    reference,
    repeated,
)
from workbench.observing.recognition.module_runs import LOOKUP, MATRIX, Execution, TracedTensor

ROWS = 192


Place = tuple[str, int, str, TensorPath]
"""Where a tensor passes: name of a module or product, number of its earlier runs, input or output, path."""
AxesTable = Mapping[Place, Axes | None]
"""Axes of tensors by place; None for tensors without an axis of positions."""
BatchAxes = Mapping[tuple[str, int, str], BatchAxis]
"""The axis of the sequences in a call's tensors, by place: kind of call and module, number of earlier calls."""
_OUTPUT = "(output)"
_NO_ORDER = (
    "it is not known which axis of its tensors holds the sequences and which the heads, as other tokens in one sequence change "
    "none or all of it: give example tokens with another number of sequences, or give it operands [batch, head, pos, d_head]"
)
_HEADS_FIRST = (
    "its heads come before its sequences, which is read only in scaled_dot_product_attention and in products: give it operands "
    "[batch, head, pos, d_head]"
)


class Trace(CallHandler):
    """Call handler and hooks of the traced run; afterwards `executions` and `attentions` hold its course in order.

    Without `axes`, those of tensors in runs of two sizes, the lengths of this run decide. `block_lists` is the effect of the block
    lists of BlockMasks in the module's own runs. `noisy` adds noise to the output of every product with a parameter, so that no
    two outputs are equal.
    """

    def __init__(
        self, module: nn.Module, tokens: Tensor, layout: Layout | None = None, axes: AxesTable | None = None, *,
        block_lists: str = "", noisy: bool = False, batch_axes: BatchAxes | None = None,
    ) -> None:  # fmt: skip
        self.module, self.tokens, self.axes = module, tokens, axes
        self.block_lists, self.batch_axes = block_lists, batch_axes or {}
        self.leaves_out: bool | None = None  # whether block lists of unknown effect leave out what `mask_mod` allows
        self.noise = torch.Generator().manual_seed(1) if noisy else None
        self.batch, self.length = tokens.shape
        self.positions = Positions(self.batch, self.length, layout)
        first = torch.arange(self.batch)[: ROWS // 4] * self.length
        others = torch.randperm(self.batch * self.length, generator=torch.Generator().manual_seed(0))[:ROWS]
        self.rows = torch.cat((first, others)).unique().to(tokens.device)
        self.starts = self.rows % self.length == 0  # rows that no rotary encoding rotates
        self.time = 0
        self.running: list[Execution] = []
        self.executions: list[Execution] = []
        self.lookups: list[Execution] = []
        self.attentions: list[TracedAttention] = []
        self.elsewhere: list[tuple[Execution, int]] = []  # runs with attention over more positions, and their number
        self.calls: list[tuple[int, str, Frames]] = []  # time and kind of every call, and its frames
        self.shapes: dict[Place, tuple[int, ...]] = {}  # of every floating-point tensor
        self.output_axes: dict[TensorPath, Axes] = {}
        self.tanhs: list[tuple[int, torch.Size]] = []  # time and shape of each tanh, which may be a soft cap
        self._runs: Counter[str] = Counter()
        self.other_calls: set[str] = set()
        self.in_place = False  # whether the module overwrites tensors that have passed
        self._versions: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # of tensors that are still alive
        self._copies: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}  # their rows, shared by many modules
        self._eager = EagerCalls(self.positions)

    def run(self, call: Callable[[Tensor], Any]) -> Any:
        """Return the module's output in the traced run."""

        def run() -> Any:
            with outside_inference_mode(), torch.no_grad():
                return call(self.tokens)

        output = guarded(_TracedRun(self), run)
        for path, tensor in tensors_of_output(output).items():
            if (axes := self._axes_of((_OUTPUT, 0, _OUTPUT, path), tensor)) is not None:
                self.output_axes[path] = axes
        self.wrote()
        self._eager = EagerCalls(self.positions)
        self._versions.clear()
        self._copies.clear()
        return output

    def looked_up(self, lookup: Lookup) -> Any:
        """Record a lookup of vectors by token id in a parameter."""
        table = lookup.table
        table = table if table._base is None else table._base
        name = next((n for n, p in self.module.named_parameters() if p is table), "")
        entry = Execution(LOOKUP, name, self.running[-1] if self.running else None, self._tick(), size=lookup.size)
        entry.end = self._tick()
        entry.reads_tokens = isinstance(lookup.ids, Tensor) and self._is_tokens(lookup.ids)
        if entry.reads_tokens:
            place = self._place(f"{LOOKUP}{name}", "output")
            self._keep(entry.outputs, (), lookup.by_position(lookup.output), place, afresh=True)
        self.lookups.append(entry)
        return lookup.output

    def wrote(self) -> None:
        """Detect overwritten tensors, and forget those that the module has freed."""
        for key, (alive, version) in list(self._versions.items()):
            tensor = alive()
            if tensor is None:
                del self._versions[key]
                self._copies.pop(key, None)
            elif tensor._version != version:
                self.in_place = True

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.wrote()
        parent = self.running[-1] if self.running else None
        entry = Execution(name, type(module).__name__, parent, self._tick(), frame=id(sys._getframe(1)))
        place = entry.place = self._place(name, "input")
        for path, tensor in tensors_in((args, kwargs)):
            entry.reads_tokens |= self._is_tokens(tensor)
            self._keep(entry.inputs, path, tensor, place)
        self.executions.append(entry)
        self.running.append(entry)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.wrote()
        entry = self.running.pop()
        entry.end = self._tick()
        for path, tensor in tensors_in(output):
            self._keep(entry.outputs, path, tensor, (*entry.place[:2], "output"))
        axes = {made.shape: made.axes for made in entry.outputs}
        for path, tensor in tensors_in(output):
            if tuple(tensor.shape) in axes and not tensor.is_floating_point() and not is_sharded(tensor):
                of_it = axes[tuple(tensor.shape)]
                rows = self.positions.by_position(tensor.double(), of_it)
                assert rows is not None
                entry.indices.append(TracedTensor(path, rows[self.rows], tuple(tensor.shape), of_it))

    def _is_tokens(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the tokens: [batch, pos], [pos, batch], in one row, or with more before or after them."""
        if is_sharded(tensor) or tensor.is_floating_point() or tensor.ndim > 2 or tensor.numel() < self.tokens.numel():
            return False
        return self.positions.are_tokens(tensor, self.tokens)

    def _place(self, name: str, side: str) -> tuple[str, int, str]:
        self._runs[name] += 1
        return name, self._runs[name] - 1, side

    def _axes_of(self, place: Place, tensor: Tensor) -> Axes | None:
        """Return the axes of a tensor, or None if it has no axis of positions."""
        if is_sharded(tensor) or not tensor.is_floating_point():
            return None
        shape = self.shapes[place] = tuple(tensor.shape)
        if self.axes is not None and place in self.axes:
            known = self.axes[place]
            return known if known is not None and self.positions.fits(shape, known) else None
        return next(iter(self.positions.fitting(shape)), None)

    def _keep(
        self, into: list[TracedTensor], path: TensorPath, tensor: Tensor, place: tuple[str, int, str], *, afresh: bool = False
    ) -> None:  # fmt: skip
        """Keep rows of a tensor, sharing copies of unchanged ones; `afresh`: copy in any case, as it may be part of a sum."""
        if (axes := self._axes_of((*place, path), tensor)) is None:
            return
        rows = self.positions.by_position(tensor, axes)
        assert rows is not None
        version = -1 if tensor.is_inference() else tensor._version
        alive, at, copy = self._copies.get(id(tensor), (None, 0, None))
        if afresh or copy is None or alive is None or alive() is not tensor or at != version or version < 0:
            copy = rows[self.rows]
        if not afresh:
            self._copies[id(tensor)] = weakref.ref(tensor), version, copy
        into.append(TracedTensor(path, copy, tuple(tensor.shape), axes))
        self._remember(tensor)

    def _remember(self, tensor: Tensor) -> None:
        known = self._versions.get(id(tensor))
        if not tensor.is_inference() and (known is None or known[0]() is not tensor):  # else it has no version
            self._versions[id(tensor)] = weakref.ref(tensor), tensor._version

    def _tick(self) -> int:
        self.time += 1
        return self.time

    def other(self, name: str) -> None:
        """Remember the name of a call that may be an attention."""
        self.other_calls.add(f"a call of {name} (a custom kernel)")

    def tanh(self, shape: torch.Size) -> None:
        """Remember the time of a tanh: small scores and logits do not show a soft cap."""
        self.tanhs.append((self._tick(), shape))

    def matrix(self, call: MatrixCall) -> Any:
        """Run and record a product with a parameter."""
        parent, frames = self.running[-1] if self.running else None, running_frames()
        entry = Execution(MATRIX, "matrix", parent, self._tick(), frames=frames)
        name, number, _ = self._place(f"{MATRIX}{parent.name if parent else ''}", "output")
        if call.input is not None:
            self._keep(entry.inputs, (), call.input, (name, number, "input"))
            if not self.running or not is_matrix(self, self.running[-1]):  # its call would keep gathered weights alive
                entry.call = call.with_input(None)
        output = call.run()
        if isinstance(output, Tensor):
            if self.noise is not None and output.is_floating_point() and not is_sharded(output):
                size = output.std(correction=0)
                noise = torch.randn(output.shape, generator=self.noise).to(output.device, output.dtype)
                output = output + torch.where(size > 0, size, 1.0) * noise
            self._keep(entry.outputs, (), output, (name, number, "output"), afresh=True)
        entry.end = self._tick()
        self.executions.append(entry)
        return output

    def fused(self, call: FusedCall) -> Any:
        """Run and record a fused attention call."""
        if self.block_lists:
            call = call.as_in_own_runs(self.block_lists)
        elif call.flex is not None and call.flex.block_mask:
            self.leaves_out = bool(self.leaves_out) or call.of_listed_blocks() is not None
        batch = self._batch_axis("fused")
        call = call.batch_first(batch, self.positions.rows)
        raw = call.run()
        time = self._count("fused")
        output = get_at(raw, call.output)
        for tensor in (*call.qkv, output):
            self._remember(tensor)
        beside = self._beside(call.qkv[0], call.qkv[1], partial(call.mask_kind, self.positions))
        if beside is None:
            self._unfit("fused", time, *call.qkv[:2])
            return raw
        mask, causal, is_square = call.masks(self.positions)
        mask = self.positions.square(mask, self._every_key(beside)) if is_square else mask
        options = {"scale": call.scale, "mask": mask, "causal": causal, "modify": call.modify(self.positions)}
        keys = tuple(self.positions.heads(x, self._every_key(beside)) for x in call.qkv[1:])
        attention = self._record(
            "fused", (time,), self.positions.heads(call.qkv[0]), keys, call.z(output, self.positions), beside,
            call.mask_kind(self.positions, beside), options, call.dropout,
        )  # fmt: skip
        if call.batch is not None:
            attention.batch_axes = {"fused": call.batch}
        if batch == UNKNOWN_ORDER:
            attention.refusal = attention.refusal or _NO_ORDER
        elif call.batch is not None and (call.flex is not None or not call.heads_first):
            attention.refusal = attention.refusal or _HEADS_FIRST
        if any(beside):
            attention.note = NO_TOKEN
        return raw

    def product(self, call: ProductCall) -> Any:
        """Run a product, and record an attention if it multiplies values by a pattern."""
        call = call.batch_first(self._batch_axis("product"), self.positions.rows)
        out = call.run()
        time = self._count("product")
        for each in self._eager.product(call, call.shown(out, self.positions.rows), time):
            self._record_eager(each)
        return out

    def softmax(self, scores: Tensor, run: Callable[[Tensor], Tensor], axis: int) -> Tensor:
        """Run a softmax, which may be an attention pattern."""
        pattern = made = run(scores)
        time = self._count("softmax")
        if (batch := self._batch_axis("softmax")) is not None and batch.is_inner:
            letters, axis = letters_of(scores), axis + 1
            scores, made = (batch.to_front(x, letters, self.positions.rows) for x in (scores, made))
        if self.positions.columns in scores.shape[:-1] and self.positions.columns <= scores.shape[-1]:
            if scores.ndim > 3 and scores.shape[-1] > self.positions.columns == scores.shape[-2]:
                self.other_calls.add(_extra_columns(scores))
            self._eager.softmax(scores, made, axis, time, batch)
        elif self.positions.columns < scores.shape[-2] <= scores.shape[-1]:
            self.elsewhere.append((self._within(), scores.shape[-2]))
        return pattern

    def _batch_axis(self, kind: str) -> BatchAxis | None:
        """Return the axis of the sequences in the current call of a kind; None if unknown."""
        return self.batch_axes.get(self.batch_place(kind))

    def batch_place(self, kind: str) -> tuple[str, int, str]:
        """Return the place of the current call of a kind among those of the running module."""
        return self._place(f"({kind}) {self.running[-1].name if self.running else ''}", kind)

    def _count(self, kind: str) -> int:
        time = self._tick()
        self.calls.append((time, kind, running_frames()))
        return time

    def _beside(self, q: Tensor, k: Tensor, kind_of: Callable[[Beside], str]) -> Beside | None:
        """Count the keys before and after the tokens' keys; None if queries or keys are not the module's positions."""
        front, back = self.positions.layout.beside
        more = k.shape[-2] - q.shape[-2]
        if q.shape[-2] != self.positions.columns or more < 0 or (more and self.positions.layout.packed):
            return None
        if not more:
            return front, back
        kinds = {beside: kind_of(beside) for beside in ((front + more, back), (front, back + more))}
        fit = [at for at, kind in kinds.items() if kind not in (FUTURE, NOTHING)]
        return min(fit, key=lambda at: kinds[at] != CAUSAL, default=None)

    def _every_key(self, beside: Beside) -> Beside:
        """Count the keys to leave out of all that tokens see: none, unless other sequences are in the same row."""
        return beside if self.positions.layout.packed else (0, 0)

    def _record_eager(self, each: EagerCall) -> None:
        at, softmax, (left, right) = self.positions, each.softmax, each.cut
        if each.axes is None:
            return
        q, k, v, made = each.tensors()
        if any(x.numel() % (at.rows * x.shape[-2] * x.shape[-1]) for x in (q, k, v)):
            return  # a factor that sequences share, for example one that mixes heads

        def square(x: Tensor, beside: Beside) -> Tensor:
            return chosen_heads(at.square(x.narrow(-1, left, x.shape[-1] - left - right), beside), each.chosen, 1)

        def kind(beside: Beside) -> str:
            return mask_kind(visible_keys(square(softmax.scores, beside)), False, self.length)

        if (beside := self._beside(q, k, kind)) is None:
            self._unfit("eager", each.time, q, k)
            return
        every = self._every_key(beside)
        heads = chosen_heads(at.heads(q), each.chosen)
        keys = chosen_heads(at.heads(k, every), each.chosen), at.heads(v, every)
        scores, pattern = (square(x, beside) for x in (softmax.scores, softmax.pattern))
        between = softmax.product[0], softmax.time or each.time
        capped = any(between[0] < t < between[1] and shape.numel() >= scores.numel() for t, shape in self.tanhs)
        own_keys = chosen_heads(at.heads(k, beside), each.chosen)
        scale = None if capped else softmax.factor(scores, visible_keys(scores), heads, own_keys)
        z = at.heads(made)
        if each.is_combined:
            z = torch.einsum("bhij,bjhd->bihd", pattern.to(v.dtype), repeated(at.heads(v, beside), pattern.shape[1]))
        crossing = at.layout.packed and float(pattern.sum()) < (1 - 1e-4) * float(softmax.pattern.sum())
        options = {"scale": scale or 1.0, "mask": visible_keys(square(softmax.scores, every)), "causal": False}
        mask = CROSSING if crossing else kind(beside)
        name, times = ("eager", (softmax.time, each.time)) if softmax.time else (BY_HAND, (each.time,))
        attention = self._record(name, (softmax.product[0], *times), heads, keys, z, beside, mask, options)
        attention.softmax_beside = left + beside[0], right + beside[1]
        each.describe(attention, scale)
        batches = {softmax.product[1].batch, each.call.batch}
        if not softmax.letters and softmax.batch not in (None, BATCH_FIRST, BatchAxis(is_inner=True)):
            batches.add(UNKNOWN_ORDER)  # its axes differ from those of the product before it
        if UNKNOWN_ORDER in batches:
            attention.refusal = attention.refusal or _NO_ORDER
        if attention.has_null:
            self.other_calls.discard(_extra_columns(softmax.scores))

    def _unfit(self, kind: str, time: int, q: Tensor, k: Tensor) -> None:
        """Record an attention over other positions than the tokens."""
        queries, keys = q.shape[-2], k.shape[-2]
        if queries != keys:
            reason = f"{queries} queries attend to {keys} keys (cross-attention or a cache)"
        else:
            reason = f"it runs over {queries} positions for {self.length} tokens (a prefix, or another axis)"
        none, (h, kv) = q.new_zeros(0), [x.shape[-3] if x.ndim > 3 else 1 for x in (q, k)]
        unfit = TracedAttention(kind, self._within(), (time,), h, kv, 1, none, none, none, none, "", reason)
        unfit.is_aside = self.positions.columns != queries != keys
        self.attentions.append(unfit)
        if queries > self.positions.columns:
            self.elsewhere.append((self._within(), queries))

    def _within(self) -> Execution:
        if not self.running:
            raise WorkbenchError("attention runs outside the module's forward")
        return self.running[-1]

    def _record(
        self, kind: str, times: tuple[int, ...], q: Tensor, keys: tuple[Tensor, ...], z: Tensor, beside: Beside, mask: str,
        options: dict[str, Any], dropout: float = 0.0,
    ) -> TracedAttention:  # fmt: skip
        """Record an attention with q and z [batch, pos, head, d_head], and all keys and values that the tokens see."""
        repeats = head_repeats(*keys) if keys[0].shape[2] == keys[1].shape[2] else 1
        keys = tuple(x[:, :, ::repeats] for x in keys)
        before, after = (0, 0) if self.positions.layout.packed else beside
        k, v = (x.narrow(1, before, x.shape[1] - before - after) for x in keys)
        refusal = f"it {mask}, so this is no decoder" if mask == FUTURE else ""
        if mask == NOTHING:
            refusal = f"its mask {mask}: give example tokens of which some are no padding"
        elif mask == CROSSING:
            refusal = f"it {mask}: mask them, or give one sequence at a time"
        elif dropout:
            refusal = f"dropout of {dropout} is active in it: call module.eval() first"
        elif q.shape[2] % k.shape[2] or k.shape[2] % v.shape[2]:
            refusal = f"{q.shape[2]} query, {k.shape[2]} key and {v.shape[2]} value heads do not go together"
        scale = options["scale"]
        attention = TracedAttention(
            kind, self._within(), times, q.shape[2], v.shape[2], repeats, self._pick(q) * (scale * q.shape[-1] ** 0.5),
            self._pick(k), self._pick(v), self._pick(z), mask, refusal, scale=scale, beside=beside,
        )  # fmt: skip
        if not refusal:
            expected = reference(
                q, keys[0], repeated(keys[1], k.shape[2]), kind=mask, beside=(before, after), **options
            )
            attention.exact = expected is not None and near(*expected, z, v.dtype)
            if expected is not None and attention.exact:
                attention.lse = self._pick(expected[1].lse.transpose(1, 2))
            if not attention.exact:
                attention.note = "its output is not softmax(q k) v as seen (soft cap, sinks, a window of its own)"
        self.attentions.append(attention)
        return attention

    def _pick(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)[self.rows].clone()


class _TracedRun(Interception):
    """The hooks and the function mode of a traced run."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(InterceptionMode(trace), attention_functions(trace.module))
        self.trace = trace

    def begin(self) -> None:
        """Register hooks on all submodules and begin the interception."""
        for name, module in self.trace.module.named_modules():
            if not hasattr(module, "fwd_hooks"):  # a hook on a hook point may change what its model does
                module.register_forward_pre_hook(partial(self.trace._enter, name), with_kwargs=True)
                module.register_forward_hook(self.trace._leave, with_kwargs=True)
        super().begin()

    def end(self) -> None:
        """Remove all hooks and end the interception."""
        remove_module_hooks(self.trace, self.trace.module.modules())
        super().end()


def _extra_columns(scores: Tensor) -> str:
    return f"softmax over {tuple(scores.shape)} (extra columns: a prefix or a cache)"


def is_matrix(trace: Trace, entry: Execution) -> bool:
    """Return whether the module of an execution is a matrix."""
    if entry.name == MATRIX:
        return False
    weight = getattr(trace.module.get_submodule(entry.name), "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2
