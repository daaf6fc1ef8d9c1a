"""One run of a module on example tokens, traced: each run of a submodule, each attention, a few rows of every tensor.

Of every tensor only the same few positions are kept (`ROWS`), so that what is compared afterwards stays small.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from workbench.errors import WorkbenchError
from workbench.observing.interception.call_sites import Frames, running_frames
from workbench.observing.interception.function_mode import attention_functions, intercepting
from workbench.observing.interception.fused_calls import FusedCall, letters_of
from workbench.observing.interception.masks import CAUSAL, CROSSING, FUTURE, NOTHING, mask_kind, visible
from workbench.observing.interception.matrix_calls import Lookup, MatrixCall
from workbench.observing.interception.positions import (
    BATCH_FIRST,
    UNKNOWN_ORDER,
    Axes,
    BatchAxis,
    Beside,
    Layout,
    Positions,
)
from workbench.observing.interception.product_calls import ProductCall
from workbench.observing.interception.tensor_layouts import (
    TensorPath,
    get_at,
    head_repeats,
    tensors_in,
    tensors_of_output,
)
from workbench.observing.interception.weights import is_sharded
from workbench.observing.recognition.attention_reference import near, reference
from workbench.observing.recognition.executions import LOOKUP, MATRIX, Execution, TracedTensor
from workbench.observing.recognition.traced_attention import (
    BY_HAND,
    NO_TOKEN,
    EagerCall,
    EagerCalls,
    TracedAttention,
    chosen_heads,
    repeated,
)

ROWS = 192
_ENTRIES = 64  # of each index of an axis, to see what changes


Place = tuple[str, int, str, TensorPath]
"""Where a tensor passes: name of a module or product, how many of its runs before, input or output, path."""
AxesTable = Mapping[Place, Axes | None]
"""The axes of tensors by place, None where they are not of positions."""
BatchAxes = Mapping[tuple[str, int, str], BatchAxis]
"""Which axis of a call's tensors holds the sequences, by place: kind and module, how many such calls before."""
_OUTPUT = "(output)"
_NO_ORDER = (
    "which axis of its tensors holds the sequences and which the heads is not known, as changing the tokens of one sequence changes "
    "none or all of it: give example tokens with another number of sequences, or give it operands [batch, head, pos, d_head]"
)
_HEADS_FIRST = (
    "its heads stand before its sequences, which is read only in scaled_dot_product_attention and in products: give it operands "
    "[batch, head, pos, d_head]"
)


class Trace:
    """Call handler and hooks of the one run; afterwards `executions` and `attentions` hold it in order.

    `axes` holds the axes of tensors from runs of two sizes; without it the lengths of this run decide. `block_lists` is what those
    of BlockMasks do in the module's own runs. `noisy` adds noise of their own size to the outputs of products with a parameter, so
    that no two outputs are equal.
    """

    def __init__(
        self, module: nn.Module, tokens: Tensor, layout: Layout | None = None, axes: AxesTable | None = None, *,
        block_lists: str = "", noisy: bool = False, batch_axes: BatchAxes | None = None,
    ) -> None:  # fmt: skip
        self.module, self.tokens, self.axes = module, tokens, axes
        self.block_lists, self.batch_axes = block_lists, batch_axes or {}
        self.leaves_out: bool | None = None  # whether they leave out what `mask_mod` allows, where that is not known
        self.noise = torch.Generator().manual_seed(1) if noisy else None
        self.batch, self.length = tokens.shape
        self.positions = Positions(self.batch, self.length, layout)
        first = torch.arange(self.batch)[: ROWS // 4] * self.length
        others = torch.randperm(self.batch * self.length, generator=torch.Generator().manual_seed(0))[:ROWS]
        self.rows = torch.cat((first, others)).unique().to(tokens.device)
        self.starts = self.rows % self.length == 0  # rows that no rotary encoding turns
        self.time = 0
        self.running: list[Execution] = []
        self.executions: list[Execution] = []
        self.lookups: list[Execution] = []
        self.attentions: list[TracedAttention] = []
        self.elsewhere: list[tuple[Execution, int]] = []  # where attention runs over more positions, and how many
        self.calls: list[tuple[int, str, Frames]] = []  # time and class of every call, and where it is made
        self.shapes: dict[Place, tuple[int, ...]] = {}  # of every tensor of floating-point numbers
        self.output_axes: dict[TensorPath, Axes] = {}
        self._runs: Counter[str] = Counter()
        self.other_calls: set[str] = set()
        self.in_place = False  # whether the module writes over tensors after they have passed
        self._versions: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # of tensors that the module still holds
        self._kept: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}  # their rows, which many modules share
        self._eager = EagerCalls(self.positions)

    def run(self, call: Callable[[Tensor], Any]) -> Any:
        """The module's output in the traced run."""
        functions = attention_functions(self.module)
        with torch.inference_mode(False), torch.no_grad(), self._hooks(), intercepting(self, functions):
            output = call(self.tokens)
        for path, tensor in tensors_of_output(output).items():
            if (axes := self._axes_of((_OUTPUT, 0, _OUTPUT, path), tensor)) is not None:
                self.output_axes[path] = axes
        self._look_for_writing()
        self._eager = EagerCalls(self.positions)
        self._versions.clear()
        self._kept.clear()
        return output

    def looked_up(self, lookup: Lookup) -> Any:
        """Note vectors that are looked up by the tokens in a parameter, by its name."""
        table = lookup.table
        held = table if table._base is None else table._base
        name = next((n for n, p in self.module.named_parameters() if p is held), "")
        entry = Execution(LOOKUP, name, self.running[-1] if self.running else None, self._tick(), size=lookup.size)
        entry.end = self._tick()
        entry.reads_tokens = isinstance(lookup.ids, Tensor) and self._is_tokens(lookup.ids)
        if entry.reads_tokens:
            place = self._place(f"{LOOKUP}{name}", "output")
            self._keep(entry.outputs, (), lookup.by_position(lookup.output), place, afresh=True)
        self.lookups.append(entry)
        return lookup.output

    def wrote(self) -> None:
        """Look at once: a block's own variables are gone when it returns."""
        self._look_for_writing()

    def _look_for_writing(self) -> None:
        """Notice tensors that were written over, and forget those that the module has let go."""
        for key, (held, version) in list(self._versions.items()):
            tensor = held()
            if tensor is None:
                del self._versions[key]
                self._kept.pop(key, None)
            elif tensor._version != version:
                self.in_place = True

    # ---- modules -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, module in self.module.named_modules():
                if not isinstance(module, HookPoint):  # a hook on one may change what its model does
                    before = module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
                    stack.callback(before.remove)
                    stack.callback(module.register_forward_hook(self._leave, with_kwargs=True).remove)
            yield

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._look_for_writing()
        parent = self.running[-1] if self.running else None
        entry = Execution(name, type(module).__name__, parent, self._tick(), frame=id(sys._getframe(1)))
        place = entry.place = self._place(name, "input")
        for path, tensor in tensors_in((args, kwargs)):
            entry.reads_tokens |= self._is_tokens(tensor)
            self._keep(entry.inputs, path, tensor, place)
        self.executions.append(entry)
        self.running.append(entry)

    def _is_tokens(self, tensor: Tensor) -> bool:
        """Whether a tensor is the tokens: [batch, pos], [pos, batch], in one row, or with more before or after them."""
        if is_sharded(tensor) or tensor.is_floating_point() or tensor.ndim > 2 or tensor.numel() < self.tokens.numel():
            return False
        return self.positions.are_tokens(tensor, self.tokens)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._look_for_writing()
        entry = self.running.pop()
        entry.end = self._tick()
        for path, tensor in tensors_in(output):
            self._keep(entry.outputs, path, tensor, (*entry.place[:2], "output"))

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
        """Keep rows of a tensor, those kept already where it passed before; `afresh`: what it holds now may be a part of a sum."""
        if (axes := self._axes_of((*place, path), tensor)) is None:
            return
        rows = self.positions.by_position(tensor, axes)
        assert rows is not None
        version = -1 if tensor.is_inference() else tensor._version
        held, at, kept = self._kept.get(id(tensor), (None, 0, None))
        if afresh or kept is None or held is None or held() is not tensor or at != version or version < 0:
            kept = rows[self.rows]  # a copy
        if not afresh:
            self._kept[id(tensor)] = weakref.ref(tensor), version, kept
        into.append(TracedTensor(path, kept, tuple(tensor.shape), axes))
        self._remember(tensor)

    def _remember(self, tensor: Tensor) -> None:
        known = self._versions.get(id(tensor))
        if not tensor.is_inference() and (known is None or known[0]() is not tensor):  # those count no versions
            self._versions[id(tensor)] = weakref.ref(tensor), tensor._version

    def _tick(self) -> int:
        self.time += 1
        return self.time

    # ---- calls -------------------------------------------------------------------------------------------------------

    def other(self, name: str) -> None:
        """Remember the name of a call that may be an attention."""
        self.other_calls.add(f"a call of {name} (a custom kernel)")

    def matrix(self, call: MatrixCall) -> Any:
        """Record a product with a parameter, which may be called outside a module of its own."""
        parent, frames = self.running[-1] if self.running else None, running_frames()
        entry = Execution(MATRIX, "matrix", parent, self._tick(), frames=frames)
        name, number, _ = self._place(f"{MATRIX}{parent.name if parent else ''}", "output")
        if call.input is not None:
            self._keep(entry.inputs, (), call.input, (name, number, "input"))
            if not self.running or not is_matrix(self, self.running[-1]):  # else it would keep gathered weights alive
                entry.call = call.with_input(None)
        output = call.run()
        if isinstance(output, Tensor):
            output = output if self.noise is None else _with_noise(output, self.noise)
            self._keep(entry.outputs, (), output, (name, number, "output"), afresh=True)
        entry.end = self._tick()
        self.executions.append(entry)
        return output

    def fused(self, call: FusedCall) -> Any:
        """Run the call and record what it did."""
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
        mask, causal, whole = call.masks(self.positions)
        mask = self.positions.square(mask, self._every_key(beside)) if whole else mask
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
        """Run the product; it may be the scores, or the values under a pattern."""
        call = call.batch_first(self._batch_axis("product"), self.positions.rows)
        out = call.run()
        time = self._count("product")
        for each in self._eager.product(call, call.shown(out, self.positions.rows), time):
            self._written_out(each)
        return out

    def softmax(self, scores: Tensor, run: Callable[[Tensor], Tensor], axis: int) -> Tensor:
        """Run the softmax; it may be an attention pattern."""
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
        """The axis of the sequences in a call of this kind that is made now; None where that is not known."""
        return self.batch_axes.get(self._batch_place(kind))

    def _batch_place(self, kind: str) -> tuple[str, int, str]:
        return self._place(f"({kind}) {self.running[-1].name if self.running else ''}", kind)

    def _count(self, kind: str) -> int:
        time = self._tick()
        self.calls.append((time, kind, running_frames()))
        return time

    def _beside(self, q: Tensor, k: Tensor, kind_of: Callable[[Beside], str]) -> Beside | None:
        """How many keys before and after those of the tokens are none; None where queries or keys are not its positions."""
        front, back = self.positions.layout.beside
        more = k.shape[-2] - q.shape[-2]
        if q.shape[-2] != self.positions.columns or more < 0 or (more and self.positions.layout.packed):
            return None
        if not more:
            return front, back
        kinds = {beside: kind_of(beside) for beside in ((front + more, back), (front, back + more))}
        fit = sorted(
            (b for b, kind in kinds.items() if kind not in (FUTURE, NOTHING)), key=lambda b: kinds[b] != CAUSAL
        )
        return fit[0] if fit else None

    def _every_key(self, beside: Beside) -> Beside:
        """How many keys to leave out where all that tokens see are wanted: none, but those of other sequences in one row."""
        return beside if self.positions.layout.packed else (0, 0)

    def _written_out(self, each: EagerCall) -> None:
        """Record an attention whose products and softmax were calls of their own."""
        at, (left, right) = self.positions, each.cut
        if each.axes is None:
            return
        q, k, v = each.operands()
        if any(x.numel() % (at.rows * x.shape[-2] * x.shape[-1]) for x in (q, k, v)):
            return  # a factor that no sequence has of its own, as what mixes heads

        def square(x: Tensor, beside: Beside) -> Tensor:
            return chosen_heads(at.square(x, (left + beside[0], right + beside[1])), each.chosen, 1)

        def kind(beside: Beside) -> str:
            return mask_kind(visible(square(each.seen.scores, beside)), False, self.length)

        if (beside := self._beside(q, k, kind)) is None:
            self._unfit("eager", each.time, q, k)
            return
        every = self._every_key(beside)
        heads = chosen_heads(at.heads(q), each.chosen)
        keys = chosen_heads(at.heads(k, every), each.chosen), at.heads(v, every)
        scores, pattern = (square(x, beside) for x in (each.seen.scores, each.seen.pattern))
        scale = each.seen.factor(scores, visible(scores), heads, chosen_heads(at.heads(k, beside), each.chosen))
        z = at.heads(each.made)
        if each.is_combined:
            z = torch.einsum("bhij,bjhd->bihd", pattern.to(v.dtype), repeated(at.heads(v, beside), pattern.shape[1]))
        crossing = at.layout.packed and float(pattern.sum()) < (1 - 1e-4) * float(each.seen.pattern.sum())
        options = {"scale": scale or 1.0, "mask": visible(square(each.seen.scores, every)), "causal": False}
        mask = CROSSING if crossing else kind(beside)
        times: tuple[int, ...] = (each.time,)
        name = BY_HAND
        if each.seen.time:
            times, name = (each.seen.time, each.time), "eager"
        attention = self._record(name, (each.seen.product[0], *times), heads, keys, z, beside, mask, options)
        attention.softmax_beside = left + beside[0], right + beside[1]
        each.describe(attention, scale)
        batches = {each.seen.product[1].batch, each.call.batch}
        if not each.seen.letters and each.seen.batch not in (None, BATCH_FIRST, BatchAxis(is_inner=True)):
            batches.add(UNKNOWN_ORDER)  # axes that are not those of the product before it
        if UNKNOWN_ORDER in batches:
            attention.refusal = attention.refusal or _NO_ORDER
        if attention.has_null:
            self.other_calls.discard(_extra_columns(each.seen.scores))

    def _unfit(self, kind: str, time: int, q: Tensor, k: Tensor) -> None:
        """Record that an attention is over other positions than the tokens."""
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
        """Keep rows of an attention of q and z [batch, pos, head, d_head] over all keys and values that the tokens see."""
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
            found = reference(q, keys[0], repeated(keys[1], k.shape[2]), kind=mask, beside=(before, after), **options)
            attention.exact = found is not None and near(*found, z, v.dtype)
            if found is not None and attention.exact:
                attention.lse = self._pick(found[1].lse.transpose(1, 2))
            if not attention.exact:
                attention.note = "its output is not softmax(q k) v as seen (soft cap, sinks, a window of its own)"
        self.attentions.append(attention)
        return attention

    def _pick(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)[self.rows].clone()


class ShapeTrace(Trace):
    """A traced run that records shapes, and entries of the tensors of calls that may be an attention's.

    `samples` holds, for each call, the letters of each tensor and some entries [entry, index] at each index of each axis whose
    length is a multiple of the number of sequences.
    """

    def __init__(self, module: nn.Module, tokens: Tensor) -> None:
        super().__init__(module, tokens)
        self.samples: dict[tuple[str, int, str], list[tuple[str, dict[str, Tensor]]]] = {}

    def fused(self, call: FusedCall) -> Any:
        """Run the call."""
        self._sample("fused", [(x, letters_of(x)) for x in call.qkv], letters_of(call.qkv[0])[:-2])
        return call.run()

    def product(self, call: ProductCall) -> Any:
        """Run the product."""
        spelled = getattr(call.function, "__name__", "") == "einsum"
        lead = call.letters[2] if spelled else call.letters[2][:-2]
        self._sample("product", list(zip(call.operands, call.letters[:2], strict=True)), lead)
        return call.run()

    def softmax(self, scores: Tensor, run: Callable[[Tensor], Tensor], axis: int) -> Tensor:
        """Run the softmax."""
        shown = torch.where(visible(scores), scores, 0.0)
        self._sample("softmax", [(shown, letters_of(scores))], letters_of(scores)[:-1])
        return run(scores)

    def _sample(self, kind: str, tensors: Sequence[tuple[Tensor, str]], lead: str) -> None:
        generator, (within, number, _) = torch.Generator().manual_seed(0), self._batch_place(kind)
        samples = self.samples[within, number, kind] = []
        for x, letters in tensors:
            entries = {}
            for place, letter in enumerate(letters if not is_sharded(x) else ""):
                if letter in lead and x.shape[place] % self.batch == 0:
                    y = x.detach().movedim(place, -1)
                    at = [torch.randint(n, (_ENTRIES,), generator=generator).to(x.device) for n in y.shape[:-1]]
                    entries[letter] = y[tuple(at)].double().nan_to_num(0.0, 0.0, 0.0).cpu()
            samples.append((letters, entries))


def _with_noise(x: Tensor, generator: torch.Generator) -> Tensor:
    """Add noise with the tensor's own standard deviation, or with 1 if the tensor is constant."""
    if not x.is_floating_point() or is_sharded(x):
        return x
    size = x.std(correction=0)
    noise = torch.randn(x.shape, generator=generator).to(x.device, x.dtype)
    return x + torch.where(size > 0, size, 1.0) * noise


def _extra_columns(scores: Tensor) -> str:
    return f"softmax over {tuple(scores.shape)} (extra columns: a prefix or a cache)"


def is_matrix(trace: Trace, entry: Execution) -> bool:
    """Whether the module of an execution is a matrix."""
    if entry.name == MATRIX:
        return False
    weight = getattr(trace.module.get_submodule(entry.name), "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2
