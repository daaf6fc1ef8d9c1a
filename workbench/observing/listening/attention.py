"""Hook points of an observed module's attention, fired around its calls: fused ones, and the products and softmax of an eager one.

What no hook replaces goes on as the same tensor, and a call that is only read runs untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.kernels.attention import AttentionStatistics
from workbench.models.activations import probabilities
from workbench.observing.interception.fused_calls import FusedCall
from workbench.observing.interception.masks import (
    CAUSAL,
    FUTURE,
    is_distribution,
    mask_kind,
    masked_statistics,
    pattern_statistics,
    visible,
    window_mask,
)
from workbench.observing.interception.product_calls import ProductCall, arrange, restore
from workbench.observing.interception.tensor_layouts import from_heads, get_at, replaced_at, to_heads
from workbench.observing.listening.run import HookedRun
from workbench.observing.recognition.attention_reference import causal_attention
from workbench.observing.recognition.least_squares import fit, weights_by_token
from workbench.observing.recognition.structure import LayerStructure
from workbench.observing.recognition.trace import BY_HAND, NO_DISTRIBUTION, TracedAttention
from workbench.observing.recognition.value_paths import TABLE

_MAX_FITTED = 4096  # positions: enough for coefficients to 1e-7


class AttentionHooks:
    """Handler of the calls of one run: fires the hook points of its attention around them."""

    def __init__(self, run: HookedRun) -> None:
        self.run, self.layers = run, run.layers
        self.batch, self.length = run.batch, run.length
        self.lse: dict[int, Tensor] = {}  # of eager scores whose statistics are hooked
        self.scores: dict[
            int, Tensor
        ] = {}  # products of queries and keys under a softmax that is written out, where statistics are
        self.null: dict[int, Tensor] = {}  # of these, what of each row goes to columns that are no keys
        self.mask_kinds: dict[
            int, tuple[str, Any]
        ] = {}  # by id, with what the mask is made of so that its id stays its own

    def matrix(self, output: Any) -> Any:
        """Fire on a projection that is a bare matrix product."""
        run = self.run
        if not run.matrix_projections:
            return output
        place = run.count_call("matrix")
        for projection in run.matrix_projections.get(place, ()) if isinstance(output, Tensor) else ():
            output = run.fire_projection(projection, output)
        return output

    def looked_up(self, ids: Any, table: Any, output: Any) -> None:
        """Keep what tables of values give for the layers that read it."""
        run = self.run
        place, run.lookups = run.lookups, run.lookups + 1
        if place in run.tables_at and isinstance(output, Tensor):
            run.tables[run.tables_at[place]] = output

    def other(self, name: str) -> None:
        """Calls of other functions fire nothing."""

    def wrote(self) -> None:
        """Nor do those that write over a tensor: where they do, hooks get copies."""

    def fused(self, call: FusedCall) -> Any:
        """Fire around one whole attention."""
        i, count = self.run.count_call("fused")
        layer = self.layers[i]
        if i < 0 or layer.attention.kind != "fused" or layer.calls != (count,) or i not in self.run.intercepted:
            return call.run()
        q, k, v = call.heads(self.batch)
        depends = self.run.hooks_any(i, "rot_q", "rot_k", *layer.statistics)
        self._check(i, q, k, self._mask_kind(call) if depends else CAUSAL, call.dropout)
        repeats = _repeats(v, layer.attention)
        short_k, short_v = k[:, :, ::repeats], v[:, :, ::repeats]
        factor = call.scale * q.shape[-1] ** 0.5
        changed = self._inputs(i, q, short_k, short_v, factor)
        used = {"query": q, "key": short_k, "value": short_v} | changed
        q, short_k, short_v = used.values()
        repeated = {n: x.repeat_interleave(repeats, dim=2) for n, x in changed.items() if n != "query" and repeats > 1}
        wide = changed | repeated
        pattern, replaced = None, False
        if self.run.hooks_any(i, "attn_scores", "pattern"):
            scores = _scores(q, short_k, call)
            pattern, replaced = self._pattern(i, scores, v.dtype)
        self._show_statistics(i, lambda: self._fused_statistics(call, q, short_k, short_v, layer, pattern))
        if pattern is not None and replaced:
            z = torch.einsum("bhqk,bkhd->bqhd", pattern, _wide(short_v, q.shape[2]))
            raw = call.run(wide)
            return replaced_at(raw, call.output, call.raw(z.to(v.dtype), get_at(raw, call.output)))
        raw = call.run(wide)
        if layer.z is None and self.run.hooks_any(i, "z"):
            output = get_at(raw, call.output)
            z = call.z(output, self.batch)
            out = self.run.fire_at(i, "z", z)
            return raw if out is z else replaced_at(raw, call.output, call.raw(out, output))
        return raw

    def _mask_kind(self, call: FusedCall) -> str:
        """What a mask does, worked out once for all layers that share it."""
        source = call.mask_source
        if source is None:
            return call.mask_kind(self.length)
        if id(source) not in self.mask_kinds:
            self.mask_kinds[id(source)] = call.mask_kind(self.length), source
        return self.mask_kinds[id(source)][0]

    def _inputs(self, i: int, q: Tensor, k: Tensor, v: Tensor, factor: float) -> dict[str, Tensor]:
        """Fire on q, k, v [batch, pos, head, d_head] as the attention reads them; what was replaced, by name."""
        changed: dict[str, Tensor] = {}
        self._sources(i, v)
        if (out := self.run.fire_at(i, "v", v)) is not v:
            changed["value"] = out
        if (out := self._fire_rot_q(i, q, factor)) is not q:
            changed["query"] = out
        if (out := self.run.fire_at(i, "rot_k", k)) is not k:
            changed["key"] = out
        return changed

    def _fire_rot_q(self, i: int, q: Tensor, factor: float) -> Tensor:
        """Fire on q in units in which a score is q . k / sqrt(d_head), which are `factor` times the call's own."""
        if not self.run.hooks_any(i, "rot_q"):
            return q
        folded = q if abs(factor - 1) < 1e-6 else q * factor
        out = self.run.fire_at(i, "rot_q", folded)
        return q if out is folded else out if folded is q else out / factor

    def _sources(self, i: int, v: Tensor) -> None:
        """Show the sources of a mixed value and their coefficients in it."""
        run, own, block = self.run, self.run.own_values, self.run.points.blocks[i]
        if i in run.own_values_read and self.layers[i].v is None and not block.mixture.sources:
            own[i] = v
        if i not in run.mixtures:
            return
        for j, point in run.mixtures[i].items():
            run.show(point, own[j])
        table = run.tables[block.mixture.table].reshape(v.shape) if block.mixture.table else None
        if table is not None:
            run.show(block.table_point, table)
        if not run.hooks_any(i, "v_mix", "v_weights"):
            return
        dtype = torch.promote_types(v.dtype, torch.float32)
        if run.hooks_any(i, "v_weights"):
            named: dict[Any, Any] = {"own": own.get(i), "first": own.get(0), TABLE + block.mixture.table: table, **own}
            weights, _ = weights_by_token(v, [named[s] for s in block.mixture.order])
            run.show(run.point(i, "v_weights"), weights.to(dtype))
            return
        values = [own[j] for j in (*run.mixtures[i], i) if j in own]
        target, *values = (x.flatten(0, 1)[:_MAX_FITTED] for x in (v, *values))
        coefficients, _ = fit(target, values)
        coefficients = coefficients if i in own else [*coefficients, 0.0]
        run.show(run.point(i, "v_mix"), v.new_tensor(coefficients, dtype=dtype))

    def _pattern(self, i: int, scores: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """The pattern [batch, head, query, key] of scores after the hooks, and whether one of them replaced anything."""
        first = self.run.fire_at(i, "attn_scores", scores)
        pattern = probabilities(first, dtype).nan_to_num(0.0)
        out = self.run.fire_at(i, "pattern", pattern)
        return out, first is not scores or out is not pattern

    def _fused_statistics(
        self, call: FusedCall, q: Tensor, k: Tensor, v: Tensor, layer: LayerStructure, pattern: Tensor | None
    ) -> AttentionStatistics:
        """Statistics of a fused call: of the pattern in use where hooks formed or replaced one."""
        if pattern is not None:
            return pattern_statistics(_scores(q, k, call).logsumexp(-1), pattern)
        if (kind := self._mask_kind(call)) == CAUSAL:
            return causal_attention(q, k, v, call.scale)[1]
        mask = call.mask_tensor(self.length)
        if not isinstance(mask, Tensor):
            if call.window is None:
                raise WorkbenchError(f"attention in {layer.attention.within.name} has {kind}: no statistics of it")
            mask = window_mask(self.length, call.window, q.device)
        options: Any = {"scale": call.scale, "mask": mask, "causal": call.causal, "modify": call.modify}
        return masked_statistics(q, k, v, **options)[1]

    def _show_statistics(self, i: int, compute: Callable[[], AttentionStatistics]) -> None:
        if self.run.hooks_any(i, *self.layers[i].statistics):
            statistics = compute()
            for name in self.layers[i].statistics:
                self.run.show(self.run.point(i, name), getattr(statistics, name))

    def _check(self, i: int, q: Tensor, k: Tensor, kind: str = CAUSAL, dropout: float = 0.0) -> None:
        """Raise `WorkbenchError` where this attention is not the observed one in a way that the hooked points depend on."""
        where, known = f"attention in layer {i}", self.layers[i].attention.mask
        if dropout:
            raise WorkbenchError(f"dropout of {dropout} is active in the {where}: call module.eval() first")
        if q.shape[1] != k.shape[1] or q.shape[1] != self.length:
            raise WorkbenchError(
                f"{where} lets {q.shape[1]} queries attend to {k.shape[1]} keys for {self.length} tokens; give whole sequences"
            )
        if kind == FUTURE and self.run.hooks_any(i, *self.layers[i].statistics):
            raise WorkbenchError(f"{where} {kind} now, which it did not on the example tokens")
        if known == CAUSAL != kind and self.run.hooks_any(i, "rot_q", "rot_k"):
            raise WorkbenchError(
                f"{where} is masked otherwise now ({kind}) than on the example tokens ({known}), so that softmax of rot_q and "
                f"rot_k is not its pattern: read hook_pattern or the statistics, or give sequences it does not cut"
            )

    def product(self, call: ProductCall) -> Any:
        """Fire around the two products of an eager attention."""
        i, count = self.run.count_call("product")
        layer = self.layers[i]
        if i < 0 or layer.attention.kind not in ("eager", BY_HAND) or i not in self.run.intercepted:
            return call.run()
        if count == layer.calls[0]:
            return self._score_product(i, call)
        return self._value_product(i, call) if count == layer.calls[-1] else call.run()

    def _score_product(self, i: int, call: ProductCall) -> Any:
        attention = self.layers[i].attention
        by_hand = attention.kind == BY_HAND and self.run.hooks_any(i, *self.layers[i].statistics)
        if not by_hand and not self.run.hooks_any(i, "rot_q", "rot_k"):
            return call.run()
        which, q_order, k_order = attention.axes[:3]
        arranged = call.arranged(which, q_order), call.arranged(1 - which, k_order)
        q, k = (to_heads(x, self.batch) for x in arranged)
        self._check(i, q, k)
        repeats = _repeats(k, attention)
        short, changed = k[:, :, ::repeats], {}
        if (out := self._fire_rot_q(i, q, attention.scale * q.shape[-1] ** 0.5)) is not q:
            changed[which] = call.restored(which, from_heads(out, arranged[0]), q_order)
        if (out := self.run.fire_at(i, "rot_k", short)) is not short:
            wide = from_heads(out.repeat_interleave(repeats, dim=2), arranged[1])
            changed[1 - which] = call.restored(1 - which, wide, k_order)
        scores = call.run(changed)
        if by_hand:
            self.scores[i] = scores.detach().reshape(self.batch, -1, self.length, self.length)
        return scores

    def softmax(self, scores: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Fire on an eager attention's scores."""
        i, count = self.run.count_call("softmax")
        layer = self.layers[i]
        if i < 0 or layer.attention.kind != "eager" or count != layer.calls[1]:
            return run(scores)
        attention, names = layer.attention, layer.statistics
        shaped = scores[..., attention.columns].reshape(self.batch, -1, self.length, self.length)
        out = self.run.fire_at(i, "attn_scores", shaped)
        used = scores if out is shaped else _with_tokens(scores, out, attention.columns)
        pattern = run(used)
        if self.run.hooks_any(i, "rot_q", "rot_k", *names):
            kind = mask_kind(visible(shaped[:, :1]), False, self.length)
            self._check(i, shaped[:, 0], shaped[:, 0].mT, kind)
        if self.run.hooks_any(i, *names):
            wide = torch.promote_types(out.dtype, torch.float32)
            self.lse[i] = used.detach().to(wide).logsumexp(-1).view(shaped.shape[:3])
            if attention.has_null:
                null = pattern.detach().to(wide).sum(-1) - pattern[..., attention.columns].detach().to(wide).sum(-1)
                self.null[i] = null.clamp_min(0).view(shaped.shape[:3])
        return pattern

    def _value_product(self, i: int, call: ProductCall) -> Any:
        attention = self.layers[i].attention
        which, _, v_order, z_order = attention.axes[3:]
        changed: dict[int, Tensor] = {}
        arranged = call.arranged(1 - which, v_order)
        wide_v = to_heads(arranged, self.batch)
        repeats = _repeats(wide_v, attention)
        v = wide_v[:, :, ::repeats]
        self._sources(i, v)
        if (out := self.run.fire_at(i, "v", v)) is not v:
            wide = from_heads(out.repeat_interleave(repeats, dim=2), arranged)
            changed[1 - which] = call.restored(1 - which, wide, v_order)
        pattern = call.operands[which]
        shaped = pattern.reshape(self.batch, -1, self.length, self.length)
        used = self.run.fire_at(i, "pattern", shaped)
        if used is not shaped:
            changed[which] = used.reshape(pattern.shape)
        lse = self.lse.pop(i, None)
        if (scores := self.scores.pop(i, None)) is not None:
            lse = _lse_by_hand(scores, shaped, attention.scale)
            self._check(i, shaped[:, 0], shaped[:, 0].mT, mask_kind(shaped[:, :1] > 0, False, self.length))
        if lse is not None:
            if used is shaped and not is_distribution(used):
                raise WorkbenchError(f"layer {i}: {NO_DISTRIBUTION} on these tokens, so it has no statistics")
            null = self.null.pop(i, None)
            if null is not None and used is not shaped:
                null = (1 - used.sum(-1)).clamp_min(0)
            self._show_statistics(i, lambda: pattern_statistics(lse, used, null))
        raw = call.run(changed)
        if self.layers[i].z is None and self.run.hooks_any(i, "z"):
            lined = arrange(raw, call.letters[2], z_order)
            z = to_heads(lined, self.batch)
            out = self.run.fire_at(i, "z", z)
            return raw if out is z else restore(from_heads(out, lined), z_order, call.letters[2])
        return raw


def _scores(q: Tensor, k: Tensor, call: FusedCall) -> Tensor:
    """Scaled, masked scores [batch, head, query, key] of a fused call."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, _wide(k, q.shape[2])) * call.scale
    if call.modify is not None:
        each = [[call.modify(head, b, h, 0) for h, head in enumerate(heads)] for b, heads in enumerate(scores)]
        scores = torch.stack([torch.stack(heads) for heads in each])
    mask = call.mask_tensor(scores.shape[-1])
    if call.causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    if mask is None:
        return scores
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask


def _lse_by_hand(dots: Tensor, pattern: Tensor, factor: float) -> Tensor:
    """Log-sum-exps [batch, head, query] of the scores under a pattern, from the largest weight of each row."""
    wide = torch.promote_types(pattern.dtype, torch.float32)
    top, place = pattern.detach().max(-1, keepdim=True)
    return (dots.gather(-1, place).to(wide) * factor - top.to(wide).log())[..., 0]


def _with_tokens(scores: Tensor, tokens: Tensor, columns: slice) -> Tensor:
    """Scores of a softmax in which those of tokens are replaced."""
    if tokens.numel() == scores.numel():
        return tokens.reshape(scores.shape)
    changed = scores.clone()
    changed[..., columns] = tokens.reshape(changed[..., columns].shape)
    return changed


def _repeats(x: Tensor, attention: TracedAttention) -> int:
    """How often each key-value head is repeated in this call: some modules repeat them only where they pass a mask."""
    return x.shape[2] // attention.kv_heads


def _wide(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[2], dim=2)
