"""One run of a module on example tokens, traced: each run of a submodule, each attention, a few rows of every tensor.

Of every tensor only the same few positions are kept (`ROWS`), so that what is compared afterwards stays small.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from workbench.errors import WorkbenchError
from workbench.observing.interception.function_mode import attention_functions, intercepting
from workbench.observing.interception.fused_calls import FusedCall
from workbench.observing.interception.masks import FUTURE, Modify, is_distribution, mask_kind, visible
from workbench.observing.interception.product_calls import ProductCall, arrange, attention_axes
from workbench.observing.interception.tensor_layouts import (
    TensorPath,
    by_position,
    get_at,
    head_repeats,
    tensors_in,
    to_heads,
)
from workbench.observing.recognition.attention_reference import near, reference
from workbench.observing.recognition.seen_softmax import SeenSoftmax, softmax_by_hand

ROWS = 192
MATRIX = "(matrix)"
"""Stands for a module's name where a product with a parameter is called by itself; its runs are counted in a block."""
NO_DISTRIBUTION = "what multiplies the values is no distribution (entries below 0, or rows that sum to more than 1)"
NO_KEY = "a column of its softmax is no key (sink logits): a share of each row goes to no token, shown as null"
LOOKUP = "(lookup)"
"""Stands for a module's name where vectors are looked up in a parameter; its runs are counted in all, `kind` names the parameter."""
BY_HAND = "by hand"
"""Kind of an attention whose softmax is written out."""
UNREAD = "unread"
"""Kind of what stands for the attention of a block that shows none."""


@dataclass
class TracedTensor:
    """A tensor as it passed: its path among inputs or outputs, and its rows [position, width]."""

    path: TensorPath
    rows: Tensor
    shape: tuple[int, ...]


@dataclass
class Execution:
    """One run of one submodule."""

    name: str
    kind: str
    parent: Execution | None
    start: int
    end: int = -1
    inputs: list[TracedTensor] = field(default_factory=list)
    outputs: list[TracedTensor] = field(default_factory=list)
    reads_tokens: bool = False

    def stack(self) -> list[Execution]:
        """From the outermost module to this one."""
        return [*(self.parent.stack() if self.parent else []), self]

    def holds(self, time: int) -> bool:
        """Whether it was running at a time."""
        return self.start < time < self.end


@dataclass
class TracedAttention:
    """One attention of the traced run: how it is called, where, and rows of its inputs and outputs."""

    kind: str  # fused, eager, `BY_HAND`, or `UNREAD`
    within: Execution
    times: tuple[int, ...]  # of its call, or of the products and softmax
    heads: int
    kv_heads: int
    repeats: int  # how often each key-value head is repeated in the call
    q: Tensor  # [row, head, d_head], in units in which a score is q . k / sqrt(d_head)
    k: Tensor  # [row, kv_head, d_head]
    v: Tensor  # [row, kv_head, d_value]
    z: Tensor  # [row, head, d_value]
    mask: str
    refusal: str = ""  # why it cannot be read at all
    exact: bool = True  # whether softmax(q k) v under the mask gives its output
    scale: float = 1.0  # score over q . k, of an eager attention
    note: str = ""
    is_aside: bool = (
        False  # whether its queries are no positions, so that it is something else than the block's attention
    )
    is_distribution: bool = True  # whether what multiplies the values is >= 0 with rows that sum to at most 1
    lse: Tensor | None = None  # [row, head], where the reference gives its output
    axes: Any = ()  # of an eager attention: which operand is q, orders of q and k; the pattern, of it, v and z
    columns: slice = field(
        default_factory=lambda: slice(None)
    )  # of an eager attention's softmax: those that are tokens
    has_null: bool = False  # whether the others are no keys at all, so that rows of the pattern sum to less than 1


class Trace:
    """Call handler and hooks of the one run; afterwards `executions` and `attentions` hold it in order."""

    def __init__(self, module: nn.Module, tokens: Tensor) -> None:
        self.module, self.tokens = module, tokens
        self.batch, self.length = tokens.shape
        first = torch.arange(self.batch)[: ROWS // 4] * self.length
        others = torch.randperm(self.batch * self.length, generator=torch.Generator().manual_seed(0))[:ROWS]
        self.rows = torch.cat((first, others)).unique().to(tokens.device)
        self.starts = self.rows % self.length == 0  # rows that no rotary encoding turns
        self.time = 0
        self.running: list[Execution] = []
        self.executions: list[Execution] = []
        self.lookups: list[Execution] = []
        self.attentions: list[TracedAttention] = []
        self.calls: list[tuple[int, str]] = []  # time and class of every call that is counted
        self.other_calls: set[str] = set()
        self.in_place = False  # whether the module writes over tensors after they have passed
        self._versions: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # of tensors that the module still holds
        self._kept: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}  # their rows, which many modules share
        self._products: list[tuple[int, ProductCall, Tensor]] = []
        self._softmax: SeenSoftmax | None = None

    def run(self, call: Callable[[Tensor], Any]) -> Any:
        """The module's output in the traced run."""
        functions = attention_functions(self.module)
        with torch.inference_mode(False), torch.no_grad(), self._hooks(), intercepting(self, functions):
            output = call(self.tokens)
        self._look_for_writing()
        self._products, self._softmax = [], None
        self._versions.clear()
        self._kept.clear()
        return output

    def looked_up(self, ids: Any, table: Any, output: Any) -> None:
        """Note vectors that are looked up by the tokens in a parameter, by its name."""
        name = next((n for n, p in self.module.named_parameters() if p is table), "")
        entry = Execution(LOOKUP, name, self.running[-1] if self.running else None, self._tick())
        entry.end = self._tick()
        entry.reads_tokens = (
            isinstance(ids, Tensor) and ids.shape == self.tokens.shape and torch.equal(ids, self.tokens)
        )
        self._keep(entry.outputs, (), output)
        self.lookups.append(entry)

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
        entry = Execution(name, type(module).__name__, parent, self._tick())
        for path, tensor in tensors_in((args, kwargs)):
            entry.reads_tokens |= self._is_tokens(tensor)
            self._keep(entry.inputs, path, tensor)
        self.executions.append(entry)
        self.running.append(entry)

    def _is_tokens(self, tensor: Tensor) -> bool:
        """Whether a tensor is the tokens [batch, pos], or [pos, batch]."""
        return not tensor.is_floating_point() and any(
            tensor.shape == ids.shape and torch.equal(tensor, ids) for ids in (self.tokens, self.tokens.T)
        )

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._look_for_writing()
        entry = self.running.pop()
        entry.end = self._tick()
        for path, tensor in tensors_in(output):
            self._keep(entry.outputs, path, tensor)

    def _keep(self, into: list[TracedTensor], path: TensorPath, tensor: Tensor) -> None:
        rows = by_position(tensor, self.batch, self.length)
        if rows is None:
            return
        version = -1 if tensor.is_inference() else tensor._version
        held, at, kept = self._kept.get(id(tensor), (None, 0, None))
        if kept is None or held is None or held() is not tensor or at != version or version < 0:
            kept = rows[self.rows]  # a copy
            self._kept[id(tensor)] = weakref.ref(tensor), version, kept
        into.append(TracedTensor(path, kept, tuple(tensor.shape)))
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

    def matrix(self, output: Any) -> Any:
        """Record the output of a product with a parameter, which may be called outside a module of its own."""
        entry = Execution(MATRIX, "matrix", self.running[-1] if self.running else None, self._tick())
        if isinstance(output, Tensor):
            self._keep(entry.outputs, (), output)
        entry.end = self._tick()
        self.executions.append(entry)
        return output

    def fused(self, call: FusedCall) -> Any:
        """Run the call and record what it did."""
        raw = call.run()
        time = self._count("fused")
        output = get_at(raw, call.output)
        q, k, v = call.heads(self.batch)
        for tensor in (*call.qkv, output):
            self._remember(tensor)
        if self._unfit(q, k, "fused", time):
            return raw
        mask, tensor = call.mask_kind(self.length), call.mask_tensor(self.length)
        z = call.z(output, self.batch)
        self._record("fused", (time,), q, k, v, z, mask, call.scale, tensor, call.causal, call.dropout, call.modify)
        return raw

    def product(self, call: ProductCall) -> Any:
        """Run the product; it may be the scores, or the values under a pattern."""
        out = call.run()
        time = self._count("product")
        seen = self._softmax or softmax_by_hand(call, self._products, self.length)
        if seen is not None and self._is_value_product(seen, call, out, time):
            self._softmax = None
        self._products = [*self._products[-2:], (time, call, out)]
        return out

    def softmax(self, scores: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Run the softmax; it may be an attention pattern."""
        pattern = run(scores)
        time = self._count("softmax")
        if scores.shape[-2] == self.length <= scores.shape[-1]:
            if scores.ndim > 3 and scores.shape[-1] > self.length:
                self.other_calls.add(_extra_columns(scores))
            size = scores.numel() // scores.shape[-1] * self.length
            before = [(t, call) for t, call, out in self._products if out.numel() == size]
            if before:
                self._softmax = SeenSoftmax(time, scores, pattern, before[-1])
        return pattern

    def _count(self, kind: str) -> int:
        time = self._tick()
        self.calls.append((time, kind))
        return time

    def _is_value_product(self, seen: SeenSoftmax, call: ProductCall, out: Tensor, time: int) -> bool:
        size = seen.pattern.numel() // seen.pattern.shape[-1] * self.length
        alike = [x.shape[-2:] == (self.length, self.length) and x.numel() == size for x in call.operands]
        if not any(alike):
            return False
        which = alike.index(True)
        used = call.operands[which]
        if (columns := seen.tokens(used, self.length)) is None:
            return False
        pattern, (before, score_call) = seen.pattern[..., columns], seen.product
        altered = not torch.equal(used.reshape(pattern.shape), pattern.to(used.dtype))
        if (axes := attention_axes(score_call, call, which)) is None:
            return False
        (first, q_order, k_order), (p_order, v_order, z_order) = axes
        q = to_heads(score_call.arranged(first, q_order), self.batch)
        k = to_heads(score_call.arranged(1 - first, k_order), self.batch)
        v = to_heads(call.arranged(1 - which, v_order), self.batch)
        z = to_heads(arrange(out, call.letters[2], z_order), self.batch)
        if self._unfit(q, k, "eager", time):
            return True
        scores = seen.scores[..., columns].reshape(self.batch, -1, self.length, self.length)
        allowed = visible(scores)
        mask, scale = mask_kind(allowed, False, self.length), seen.factor(scores, allowed, q, k)
        kind, times = ("eager", (before, seen.time, time)) if seen.time else (BY_HAND, (before, time))
        self._record(kind, times, q, k, v, z, mask, scale or 1.0, allowed, False, 0.0)
        attention = self.attentions[-1]
        attention.axes = first, q_order, k_order, which, p_order, v_order, z_order
        if scale is None:
            attention.note = "scores are not a multiple of q . k (a bias, a cap): no rot_q and rot_k"
        if altered:
            attention.note = "the pattern is changed after its softmax; statistics are of what multiplies the values"
        attention.exact &= scale is not None and not altered
        if not is_distribution(used):
            attention.is_distribution, attention.note = False, NO_DISTRIBUTION
        elif seen.scores.shape[-1] > self.length:
            attention.columns, attention.has_null, attention.note = columns, True, NO_KEY
            attention.exact = False  # rot_q and rot_k alone do not make it
            self.other_calls.discard(_extra_columns(seen.scores))
        return True

    def _unfit(self, q: Tensor, k: Tensor, kind: str, time: int) -> bool:
        reason = ""
        if q.shape[1] != k.shape[1]:
            reason = f"{q.shape[1]} queries attend to {k.shape[1]} keys (cross-attention or a cache)"
        elif q.shape[1] != self.length:
            reason = f"it runs over {q.shape[1]} positions for {self.length} tokens (a prefix, or another axis)"
        if reason:
            none, heads = q.new_zeros(0), (q.shape[2], k.shape[2])
            unfit = TracedAttention(kind, self._within(), (time,), *heads, 1, none, none, none, none, "", reason)
            unfit.is_aside = self.length != q.shape[1] != k.shape[1]
            self.attentions.append(unfit)
        return bool(reason)

    def _within(self) -> Execution:
        if not self.running:
            raise WorkbenchError("attention runs outside the module's forward")
        return self.running[-1]

    def _record(
        self, kind: str, times: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor, z: Tensor, mask: str, scale: float,
        tensor: Any, causal: bool, dropout: float, modify: Modify | None = None,
    ) -> None:  # fmt: skip
        repeats = head_repeats(k, v)
        k, v = k[:, :, ::repeats], v[:, :, ::repeats]
        refusal = f"it {mask}, so this is no decoder" if mask == FUTURE else ""
        if dropout:
            refusal = f"dropout of {dropout} is active in it: call module.eval() first"
        elif q.shape[2] % k.shape[2] or k.shape[2] != v.shape[2]:
            refusal = f"{q.shape[2]} query, {k.shape[2]} key and {v.shape[2]} value heads do not go together"
        attention = TracedAttention(
            kind, self._within(), times, q.shape[2], k.shape[2], repeats,
            self._pick(q) * (scale * q.shape[-1] ** 0.5), self._pick(k), self._pick(v), self._pick(z), mask, refusal,
            scale=scale,
        )  # fmt: skip
        if not refusal:
            found = reference(q, k, v, scale, tensor, causal, mask, modify)
            attention.exact = found is not None and near(found[0], z, v.dtype)
            if found is not None and attention.exact:
                attention.lse = self._pick(found[1].lse.transpose(1, 2))
            if not attention.exact:
                attention.note = "its output is not softmax(q k) v as seen (soft cap, sinks, a window of its own)"
        self.attentions.append(attention)

    def _pick(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)[self.rows].clone()


def _extra_columns(scores: Tensor) -> str:
    return f"softmax over {tuple(scores.shape)} (extra columns: a prefix or a cache)"


def rows_at(tensors: list[TracedTensor], path: TensorPath) -> Tensor | None:
    """Rows of the tensor at a path, None where there is none."""
    return next((t.rows for t in tensors if t.path == path), None)


def is_matrix(trace: Trace, entry: Execution) -> bool:
    """Whether the module of an execution is a matrix."""
    if entry.name == MATRIX:
        return False
    weight = getattr(trace.module.get_submodule(entry.name), "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2
