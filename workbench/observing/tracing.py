"""One run of a module on example tokens, seen from everywhere: each execution of a part, each attention, a few rows of all.

Of every tensor only the same few positions are kept (`ROWS`), so that what is compared afterwards stays small.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from workbench.errors import WorkbenchError
from workbench.kernels.attention import attention_statistics
from workbench.observing.calls import Fused, Product, arrange, roles
from workbench.observing.layouts import Path, by_position, get, repeats_of, tensors, to_heads
from workbench.observing.masks import CAUSAL, FUTURE, HIDDEN, kind_of, masked_statistics
from workbench.observing.watching import interfaces, watching

ROWS = 192
MATRIX = "(matrix)"
"""Stands for the name of a part where a product with a parameter is called by itself; its runs are counted in a block."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""How far an attention's output may be from the reference, relative to its largest entry, to be the same computation."""


@dataclass
class Seen:
    """A tensor as it passed: its path among arguments or outputs, and its rows [position, width]."""

    path: Path
    rows: Tensor
    shape: tuple[int, ...]


@dataclass
class Execution:
    """One run of one part of the module."""

    name: str
    kind: str
    parent: Execution | None
    start: int
    end: int = -1
    given: list[Seen] = field(default_factory=list)
    made: list[Seen] = field(default_factory=list)
    reads_tokens: bool = False

    def stack(self) -> list[Execution]:
        """From the outermost part to this one."""
        return [*(self.parent.stack() if self.parent else []), self]

    def holds(self, time: int) -> bool:
        """Whether it was running at a time."""
        return self.start < time < self.end


@dataclass
class Attention:
    """One attention that was seen: how, where, and rows of what it read and made."""

    kind: str  # fused, or eager
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
    axes: tuple[
        Any, ...
    ] = ()  # of an eager attention: which operand is q, orders of q and k; the pattern, of it, v and z


class Trace:
    """Listener and hooks of the one run; afterwards `executions` and `attentions` say what happened, in order."""

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
        self.attentions: list[Attention] = []
        self.calls: list[tuple[int, str]] = []  # time and class of every call that is counted
        self.others: set[str] = set()
        self.versions: list[tuple[Tensor, int]] = []
        self._products: list[tuple[int, Product, Tensor]] = []
        self._softmax: tuple[int, Tensor, Tensor, tuple[int, Product]] | None = None

    def run(self, call: Callable[[Tensor], Any]) -> Any:
        """The module's output of the run."""
        with torch.inference_mode(False), torch.no_grad(), self._hooks(), watching(self, interfaces(self.module)):
            return call(self.tokens)

    @property
    def in_place(self) -> bool:
        """Whether the module writes over tensors after they have passed."""
        return any(tensor._version != version for tensor, version in self.versions)

    # ---- parts -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        handles = []
        try:
            for name, part in self.module.named_modules():
                if isinstance(part, HookPoint):  # listening at one may change what its model does
                    continue
                handles += [
                    part.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True),
                    part.register_forward_hook(self._leave, with_kwargs=True),
                ]
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        parent = self.running[-1] if self.running else None
        entry = Execution(name, type(part).__name__, parent, self._tick())
        for path, tensor in tensors((args, kwargs)):
            same = tensor.shape == self.tokens.shape and not tensor.is_floating_point()
            entry.reads_tokens |= same and torch.equal(tensor, self.tokens)
            self._see(entry.given, path, tensor)
        self.executions.append(entry)
        self.running.append(entry)

    def _leave(self, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        entry = self.running.pop()
        entry.end = self._tick()
        for path, tensor in tensors(output):
            self._see(entry.made, path, tensor)

    def _see(self, into: list[Seen], path: Path, tensor: Tensor) -> None:
        found = by_position(tensor, self.batch, self.length)
        if found is not None:
            into.append(Seen(path, found[self.rows].clone(), tuple(tensor.shape)))
            self._remember(tensor)

    def _remember(self, tensor: Tensor) -> None:
        if not tensor.is_inference():  # those count no versions
            self.versions.append((tensor, tensor._version))

    def _tick(self) -> int:
        self.time += 1
        return self.time

    # ---- calls -------------------------------------------------------------------------------------------------------

    def other(self, name: str) -> None:
        """Remember a name."""
        self.others.add(f"a call of {name} (a custom kernel)")

    def matrix(self, made: Any) -> Any:
        """Record an output of a matrix by itself, which may belong to no part of its own."""
        entry = Execution(MATRIX, "matrix", self.running[-1] if self.running else None, self._tick())
        if isinstance(made, Tensor):
            self._see(entry.made, (), made)
        entry.end = self._tick()
        self.executions.append(entry)
        return made

    def fused(self, call: Fused) -> Any:
        """Run the call and record what it did."""
        raw = call.run()
        time = self._count("fused")
        found = get(raw, call.output)
        q, k, v = call.heads(self.batch)
        for tensor in (*call.qkv, found):
            self._remember(tensor)
        if self._unfit(q, k, "fused", time):
            return raw
        mask = kind_of(call.mask, call.causal, self.length, call.window)
        self._record(
            "fused", (time,), q, k, v, call.z(found, self.batch), mask, call.scale, call.mask, call.causal, call.dropout
        )
        return raw

    def product(self, call: Product) -> Any:
        """Run the product; it may be the scores, or the values under a pattern."""
        out = call.run()
        time = self._count("product")
        if self._softmax is not None and self._is_value_product(call, out, time):
            self._softmax = None
        self._products = [*self._products[-2:], (time, call, out)]
        return out

    def softmax(self, scores: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Run the softmax; it may be an attention pattern."""
        pattern = run(scores)
        time = self._count("softmax")
        if scores.shape[-2:] != (self.length, self.length):
            if scores.ndim > 3 and scores.shape[-2] == self.length:
                self.others.add(f"softmax over {tuple(scores.shape)} (extra columns: sink logits, a prefix or a cache)")
            return pattern
        before = [(t, call) for t, call, out in self._products if out.numel() == scores.numel()]
        if before:
            self._softmax = time, scores, pattern, before[-1]
        return pattern

    def _count(self, kind: str) -> int:
        time = self._tick()
        self.calls.append((time, kind))
        return time

    def _is_value_product(self, call: Product, out: Tensor, time: int) -> bool:
        assert self._softmax is not None
        at, scores, pattern, (before, score_call) = self._softmax
        which = [
            i
            for i, x in enumerate(call.operands)
            if x.shape[-2:] == pattern.shape[-2:] and x.numel() == pattern.numel()
        ]
        if not which:
            return False
        used = call.operands[which[0]]
        altered = not torch.equal(used.reshape(pattern.shape), pattern.to(used.dtype))
        axes = roles(score_call, call, which[0])
        if axes is None:
            return False
        (first, q_order, k_order), (p_order, v_order, z_order) = axes
        q = to_heads(score_call.arranged(first, q_order), self.batch)
        k = to_heads(score_call.arranged(1 - first, k_order), self.batch)
        v = to_heads(call.arranged(1 - which[0], v_order), self.batch)
        z = to_heads(arrange(out, call.letters[2], z_order), self.batch)
        if self._unfit(q, k, "eager", time):
            return True
        scores = scores.reshape(self.batch, -1, self.length, self.length)
        allowed = scores > HIDDEN
        mask, scale = kind_of(allowed, False, self.length), _scale(scores, allowed, q, k)
        self._record("eager", (before, at, time), q, k, v, z, mask, scale or 1.0, allowed, False, 0.0)
        found = self.attentions[-1]
        found.axes = first, q_order, k_order, which[0], p_order, v_order, z_order
        if scale is None:
            found.exact, found.note = False, "scores are not a multiple of q . k (a bias, a cap): no rot_q and rot_k"
        if altered:
            found.exact, found.note = (
                False,
                "the pattern is changed after its softmax; statistics are of what multiplies the values",
            )
        return True

    def _unfit(self, q: Tensor, k: Tensor, kind: str, time: int) -> bool:
        reason = ""
        if q.shape[1] != k.shape[1]:
            reason = f"{q.shape[1]} queries attend to {k.shape[1]} keys (cross-attention or a cache)"
        elif q.shape[1] != self.length:
            reason = f"it runs over {q.shape[1]} positions for {self.length} tokens (a prefix, or another axis)"
        if reason:
            none = q.new_zeros(0)
            self.attentions.append(
                Attention(kind, self._within(), (time,), q.shape[2], k.shape[2], 1, none, none, none, none, "", reason)
            )
        return bool(reason)

    def _within(self) -> Execution:
        if not self.running:
            raise WorkbenchError("attention runs outside the module's forward")
        return self.running[-1]

    def _record(
        self, kind: str, times: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor, z: Tensor, mask: str, scale: float,
        tensor: Any, causal: bool, dropout: float,
    ) -> None:  # fmt: skip
        repeats = repeats_of(k, v)
        k, v = k[:, :, ::repeats], v[:, :, ::repeats]
        refusal = f"it {mask}, so this is no decoder" if mask == FUTURE else ""
        if dropout:
            refusal = f"dropout of {dropout} is active in it: call module.eval() first"
        elif q.shape[2] % k.shape[2] or k.shape[2] != v.shape[2]:
            refusal = f"{q.shape[2]} query, {k.shape[2]} key and {v.shape[2]} value heads do not go together"
        found = Attention(
            kind, self._within(), times, q.shape[2], k.shape[2], repeats,
            self._pick(q) * (scale * q.shape[-1] ** 0.5), self._pick(k), self._pick(v), self._pick(z), mask, refusal,
            scale=scale,
        )  # fmt: skip
        if not refusal:
            found.exact = _reproduced(q, k, v, z, scale, tensor, causal, mask)
            if not found.exact:
                found.note = "its output is not softmax(q k) v as seen (soft cap, sinks, a window of its own)"
        self.attentions.append(found)

    def _pick(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)[self.rows].clone()


def _scale(scores: Tensor, allowed: Tensor, q: Tensor, k: Tensor) -> float | None:
    """The factor between q . k and the scores [batch, head, query, key] where they are not masked; None where there is none."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    top = torch.zeros((), dtype=torch.double)
    sums = torch.zeros(2, dtype=torch.double)
    group = q.shape[2] // k.shape[2]
    if q.shape[2] % k.shape[2] or scores.shape[1] != q.shape[2]:
        return None
    pairs = [(b, h) for b in range(q.shape[0]) for h in range(q.shape[2])]
    dots = [(q[b, :, h].to(dtype) @ k[b, :, h // group].to(dtype).T).double() for b, h in pairs]
    for dot, (b, h) in zip(dots, pairs, strict=True):
        seen, score = dot[allowed[b, h]], scores[b, h][allowed[b, h]].double()
        sums += torch.stack([(seen * score).sum(), seen.square().sum()]).cpu()
        top = torch.maximum(top, score.abs().max().cpu())
    if not sums[1]:
        return None
    factor = float(sums[0] / sums[1])
    worst = max(
        float((dot * factor - scores[b, h].double())[allowed[b, h]].abs().max())
        for dot, (b, h) in zip(dots, pairs, strict=True)
    )
    return factor if worst <= TOLERANCE.get(q.dtype, 1e-2) * max(float(top), 1e-6) else None


def _reproduced(q: Tensor, k: Tensor, v: Tensor, z: Tensor, scale: float, tensor: Any, causal: bool, mask: str) -> bool:
    """Whether the reference gives the attention's own output."""
    if mask == CAUSAL:
        again, _ = causal_attention(q, k, v, scale)
    elif isinstance(tensor, Tensor) and not mask.startswith("a mask of type"):
        again, _ = masked_statistics(q, k, v, scale=scale, mask=tensor, causal=causal)
    else:
        return False
    error = (again.float() - z.float()).abs().max()
    return bool(error <= TOLERANCE.get(v.dtype, 1e-2) * z.float().abs().max().clamp_min(1e-20))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Any]:
    """`attention_statistics` in v's type, with a value width of its own."""
    wide, own = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = (nn.functional.pad(x, (0, wide - x.shape[-1])) if x.shape[-1] < wide else x for x in (q, k, v))
    z, statistics = attention_statistics(q.to(v.dtype), k.to(v.dtype), v, scale=scale)
    return z[..., :own], statistics


def rows_at(seen: list[Seen], path: Path) -> Tensor | None:
    """Rows of what stood at a path."""
    return next((s.rows for s in seen if s.path == path), None)
