"""Handler that fires hook points around attention calls: fused calls, and the products and softmax of eager attention.

A tensor that no hook replaces stays the same object, and a call that is only read runs untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.kernels.attention_and_its_statistics import AttentionStatistics
from workbench.models.patterns_and_gradients import probabilities
from workbench.observing.interception.eager_attention_products import ProductCall, arrange, restore
from workbench.observing.interception.function_mode import CallHandler
from workbench.observing.interception.masks import (
    CAUSAL,
    CROSSING,
    DIFFERENT,
    FUTURE,
    is_distribution,
    kind_within,
    mask_kind,
    masked_statistics,
    pattern_statistics,
    visible_keys,
    window_mask,
)
from workbench.observing.interception.position_axes import ALL_KEYS, Beside
from workbench.observing.interception.sdpa_and_flex_attention import FusedCall, letters_of
from workbench.observing.interception.tensor_paths import get_at, replaced_at
from workbench.observing.interception.weight_products_and_lookups import Lookup, MatrixCall
from workbench.observing.listening.one_hooked_run import HookedAttention, RunState
from workbench.observing.recognition.attention_calls import (
    BY_HAND,
    NO_DISTRIBUTION,
    causal_attention,
    chosen_heads,
    repeated,
    with_chosen_heads,
)
from workbench.observing.recognition.module_runs import MATRIX


class AttentionRun(RunState, CallHandler):
    """A run that handles its own attention calls."""

    mask_kinds: dict[int, tuple[str, Any]]  # by id of the mask's source, which stays alive here

    def matrix(self, call: MatrixCall) -> Any:
        """Fire on the input and output of a function call with a parameter."""
        if (place := self.call_site(MATRIX)) is None:
            return call.run()
        read = call.input
        for fire in self.matrix_inputs.get(place, ()):
            read = read if read is None else fire(self, read)
        output = call.run(None if read is call.input else read)
        for fire in self.matrix_outputs.get(place, ()) if isinstance(output, Tensor) else ():
            output = fire(self, output)
        return output

    def looked_up(self, lookup: Lookup) -> Any:
        """Fire on the embedding if it is a parameter, and store vectors of value tables for the layers that read them."""
        output, table = lookup.output, lookup.table
        name = self.looked_up_in.get(id(table if table._base is None else table._base))
        if name is None:
            return output
        place, vectors = (name, self.lookups[name]), lookup.by_position(output)
        self.lookups[name] += 1
        if self.embed is not None and (self.embed.parameter, self.embed.run) == place:
            if (shown := self.positions.shaped(vectors, self.embed.axes)) is None:
                return output
            fired = self.fire(self.points.embed, shown)
            if fired is shown:
                return output
            return lookup.restored(self.positions.unshaped(fired, vectors, self.embed.axes))
        for name, read in self.tables_read.items():
            if (read.parameter, read.run) == place:
                shown = self.positions.shaped(read.read(vectors), read.axes)
                if shown is not None:
                    self.tables[name] = shown.flatten(2)
        return output

    def fused(self, call: FusedCall) -> Any:
        """Fire around one fused attention."""
        if self.structure.block_lists:
            call = call.as_in_own_runs(self.structure.block_lists)
        if not (listeners := self.listeners("fused")):
            return call.run()
        ((hooked, _),) = listeners
        attention, names = hooked.part.attention, hooked.part.attention.statistics
        call = call.batch_first(attention.batch_axes.get("fused"), self.positions.rows)
        self._check_lengths(hooked, *call.qkv[:2])
        if self.masks is not None:
            self.masks.add(self._visible(call, attention.beside))
        depends = hooked.hooks_any("pattern", "rot_q", "rot_k", *names)
        kind = self._mask_kind(call, attention.beside) if depends else CAUSAL
        self._check_mask(hooked, kind, partial(self._visible, call, attention.beside), call.dropout)
        changed = self._inputs(hooked, call)
        used = call.named | changed
        pattern, is_replaced = None, False
        if hooked.hooks_any("attn_scores", "pattern"):
            pattern, is_replaced = self._pattern(hooked, call, used)
        if hooked.hooks_any(*names):
            self._show_statistics(hooked, self._fused_statistics(hooked, call, used, pattern))
        raw = call.run(changed)
        output = get_at(raw, call.output)
        z = before = call.z(output, self.positions)
        if pattern is not None and is_replaced:
            v = repeated(self.positions.heads(used["value"], ALL_KEYS), pattern.shape[1])
            z = torch.einsum("bhqk,bkhd->bqhd", pattern, v).to(before.dtype)
        z = self.fire_at(hooked, "z", z) if hooked.hooks_any("z") else z
        return raw if z is before else replaced_at(raw, call.output, call.raw(z, output, self.positions))

    def _mask_kind(self, call: FusedCall, beside: Beside) -> str:
        """Return the kind of a mask, computed once for all layers that share it."""
        source = call.mask if call.flex is None else call.flex.mask_mod  # the same in all layers that share it
        if source is None:
            return call.mask_kind(self.positions, beside)
        if id(source) not in self.mask_kinds:
            self.mask_kinds[id(source)] = call.mask_kind(self.positions, beside), source
        return self.mask_kinds[id(source)][0]

    def _visible(self, call: FusedCall, beside: Beside) -> Tensor | None:
        """Return the visible keys, bool [batch or 1, any head, query, key]; None for a causal call that hides none."""
        if self._mask_kind(call, beside) == CAUSAL:
            return None
        mask, _, of_all_positions = call.masks(self.positions)
        if not isinstance(mask, Tensor):
            window = self.positions.length if call.window is None else call.window
            return window_mask(self.positions.length, window, call.qkv[0].device)[None, None]
        mask = mask if mask.dtype == torch.bool else visible_keys(mask)
        if of_all_positions:
            return self.positions.square(mask, beside)
        lead = call.qkv[0].shape[:-2]
        if len(lead) == 2:
            return mask[(None,) * (4 - mask.ndim)]
        return mask.expand(*lead, *mask.shape[-2:]).reshape(self.positions.batch, -1, *mask.shape[-2:])

    def _columns(self, hooked: HookedAttention, x: Tensor) -> Tensor:
        """Return the columns of tokens in [..., query, key] of all keys."""
        length = self.positions.length
        return x.narrow(-1, hooked.part.attention.beside[0], length) if x.shape[-1] > length else x

    def _inputs(self, hooked: HookedAttention, call: FusedCall) -> dict[str, Tensor]:
        """Fire on queries, keys and values; return the replaced ones by name, as the call takes them."""
        changed: dict[str, Tensor] = {}
        attention = hooked.part.attention
        for name, hook in (("value", "v"), ("query", "rot_q"), ("key", "rot_k")):
            shows_sources = hook == "v" and self.shows_sources(hooked)
            takes = self.attended is not None and hook != "v"
            if not hooked.hooks_any(hook) and not shows_sources and not takes:
                continue
            raw, beside = call.named[name], None if name == "query" else attention.beside
            wide = self.positions.heads(raw, beside)
            x = wide if name == "query" else _without_repeats(wide, getattr(attention, hook[-1]).shape[1])
            if self.attended is not None and takes:
                self.attended[hooked.layer, hook[-1]] = x.detach()
            if shows_sources:
                self.show_sources(hooked, x)
            factor = call.scale * x.shape[-1] ** 0.5 if name == "query" else 1.0
            if (out := self._fire_scaled(hooked, hook, x, factor)) is not x:
                changed[name] = self.positions.from_heads(repeated(out, wide.shape[2]), raw, beside)
        return changed

    def _fire_scaled(self, hooked: HookedAttention, name: str, x: Tensor, factor: float) -> Tensor:
        """Fire on `factor` times a tensor: queries are shown so that a score is q . k / sqrt(d_head)."""
        if not hooked.hooks_any(name):
            return x
        scaled = x if abs(factor - 1) < 1e-6 else x * factor
        out = self.fire_at(hooked, name, scaled, beside=scaled is not x)
        return x if out is scaled else out if scaled is x else out / factor

    def _pattern(self, hooked: HookedAttention, call: FusedCall, used: dict[str, Any]) -> tuple[Tensor, bool]:
        """Fire on scores and pattern; return the pattern [batch, head, query, key] over all keys, and whether a hook replaced one."""
        q, k = self.positions.heads(used["query"]), self.positions.heads(used["key"], ALL_KEYS)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, repeated(k, q.shape[2])) * call.scale
        if (modify := call.modify(self.positions)) is not None:
            each = [[modify(head, b, h, 0) for h, head in enumerate(heads)] for b, heads in enumerate(scores)]
            scores = torch.stack([torch.stack(heads) for heads in each])
        mask, causal, of_all_positions = call.masks(self.positions)
        mask = self.positions.square(mask, ALL_KEYS) if of_all_positions else mask
        if causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        shown = self._columns(hooked, scores)
        fired = self.fire_at(hooked, "attn_scores", shown, beside=True)
        if is_replaced := fired is not shown:
            scores = self._with_columns(hooked, scores, fired)
        pattern = probabilities(scores, used["value"].dtype).nan_to_num(0.0)
        shown = self._columns(hooked, pattern)
        fired = self.fire_at(hooked, "pattern", shown, beside=True)
        hooked.lse = scores.logsumexp(-1)
        if fired is shown:
            return pattern, is_replaced
        return self._with_columns(hooked, pattern, fired), True

    def _with_columns(self, hooked: HookedAttention, x: Tensor, replaced: Tensor) -> Tensor:
        """Return [..., query, key] of all keys with the columns of tokens replaced."""
        if replaced.shape == x.shape:
            return replaced
        x = x.clone()
        self._columns(hooked, x).copy_(replaced)
        return x

    def _fused_statistics(
        self, hooked: HookedAttention, call: FusedCall, used: dict[str, Any], pattern: Tensor | None
    ) -> AttentionStatistics:
        attention = hooked.part.attention
        if pattern is not None:
            shown, lse, hooked.lse = self._columns(hooked, pattern), hooked.lse, None
            assert lse is not None
            null = (pattern.sum(-1) - shown.sum(-1)).clamp_min(0) if attention.has_null else None
            return pattern_statistics(lse, shown, null, self.segments)
        q = self.positions.heads(used["query"])
        k, v = (self.positions.heads(used[name], ALL_KEYS) for name in ("key", "value"))
        k, v = _without_repeats(k, attention.k.shape[1]), _without_repeats(v, attention.v.shape[1])
        plain = self.segments is None and not attention.has_null
        if (kind := self._mask_kind(call, attention.beside)) == CAUSAL and plain:
            return causal_attention(q, k, v, call.scale)[1]
        mask, causal, of_all_positions = call.masks(self.positions)
        mask = self.positions.square(mask, ALL_KEYS) if of_all_positions else mask
        if not isinstance(mask, Tensor) and kind != CAUSAL:
            if call.window is None:
                raise WorkbenchError(f"attention in {attention.within.name} has {kind}: no statistics of it")
            mask = window_mask(self.positions.length, call.window, q.device)
        return masked_statistics(
            q, k, v, scale=call.scale, mask=mask, causal=causal, modify=call.modify(self.positions), beside=attention.beside,
            segments=self.segments,
        )[1]  # fmt: skip

    def _show_statistics(self, hooked: HookedAttention, statistics: AttentionStatistics) -> None:
        for name in hooked.part.attention.statistics:
            self.show_at(hooked, name, getattr(statistics, name))

    def _check_lengths(self, hooked: HookedAttention, q: Tensor, k: Tensor) -> None:
        """Raise `WorkbenchError` if queries or keys [..., pos, d_head] have other positions than on the example tokens."""
        (_, layout_after), (before, after) = self.positions.layout.beside, hooked.part.attention.beside
        extra = k.shape[-2] - self.positions.columns
        same = extra == before + after - sum(self.positions.layout.beside)
        pooled = after > layout_after and extra >= 0  # keys computed from the tokens, after theirs
        if q.shape[-2] != self.positions.columns or not (same or pooled):
            raise WorkbenchError(
                f"attention in layer {hooked.layer} lets {q.shape[-2]} queries attend to {k.shape[-2]} keys for {self.positions.length} "
                "tokens; give whole sequences, and no cache (use_cache=False, no past_key_values=)"
            )

    def _check_mask(
        self, hooked: HookedAttention, kind: str, visible: Callable[[], Tensor | None], dropout: float = 0.0
    ) -> None:
        """Raise `WorkbenchError` if the hooked points depend on a mask that differs from that on the example tokens."""
        where, known = f"attention in layer {hooked.layer}", hooked.part.attention.mask
        within, seen = kind, visible() if kind == DIFFERENT and self.segments is not None else None
        if seen is not None and self.segments is not None:
            within = kind_within(seen, self.segments.ids)
        together = self.kinds_by_layer.setdefault(hooked.layer, within) == within  # a layer may have several attentions
        self.kinds_by_layer[hooked.layer] = within if together else DIFFERENT
        if dropout:
            raise WorkbenchError(f"dropout of {dropout} is active in the {where}: call module.eval() first")
        if kind in (FUTURE, CROSSING) and hooked.hooks_any(*hooked.part.attention.statistics):
            raise WorkbenchError(f"{where} {kind} now, which it did not on the example tokens")
        if known == CAUSAL != kind and hooked.hooks_any("rot_q", "rot_k"):
            raise WorkbenchError(
                f"{where} is masked otherwise now ({kind}) than on the example tokens ({known}), so that softmax of rot_q and "
                f"rot_k is not its pattern: read hook_pattern or the statistics, or give sequences it does not cut"
            )

    def product(self, call: ProductCall) -> Any:
        """Fire around the two products of an eager attention."""
        listeners = self.listeners("product")
        changed: dict[int, Tensor] = {}
        if listeners:
            hooked, role = listeners[0]
            call = call.batch_first(hooked.part.attention.batch_axes.get(role), self.positions.rows)
        for hooked, role in listeners:
            (self._before_scores if role == "scores" else self._before_values)(hooked, call, changed)
        raw = call.run(changed)
        out = shown = call.shown(raw, self.positions.rows)
        for hooked, role in listeners:
            attention = hooked.part.attention
            if role == "scores" and attention.kind == BY_HAND and hooked.hooks_any(*attention.statistics):
                hooked.dots = self.positions.square(out.detach(), attention.beside)
            elif role == "values" and hooked.hooks_any("z") and not attention.is_combined:
                order = attention.axes.z
                lined = arrange(out, call.letters[2], order)
                z = self.positions.heads(lined)
                if (fired := self.fire_at(hooked, "z", z)) is not z:
                    out = restore(self.positions.from_heads(fired, lined), order, call.letters[2])
        return raw if out is shown else call.unshown(out)

    def _before_scores(self, hooked: HookedAttention, call: ProductCall, changed: dict[int, Tensor]) -> None:
        """Fire on queries and keys; put replacements into `changed`, by operand."""
        attention = hooked.part.attention
        first, q_order, k_order, *_ = attention.axes
        self._check_lengths(hooked, call.arranged(first, q_order), call.arranged(1 - first, k_order))
        for name, which, order, beside in (
            ("rot_q", first, q_order, None), ("rot_k", 1 - first, k_order, attention.beside),
        ):  # fmt: skip
            if not hooked.hooks_any(name) and self.attended is None:
                continue
            raw = arrange(changed.get(which, call.operands[which]), call.letters[which], order)
            wide = self.positions.heads(raw, beside)
            own = chosen_heads(wide, attention.chosen)
            short = own if name == "rot_q" else _without_repeats(own, attention.k.shape[1])
            if self.attended is not None:
                self.attended[hooked.layer, name[-1]] = short.detach()
            factor = attention.scale * wide.shape[-1] ** 0.5 if name == "rot_q" else 1.0
            if (out := self._fire_scaled(hooked, name, short, factor)) is not short:
                back = with_chosen_heads(wide, repeated(out, own.shape[2]), attention.chosen)
                changed[which] = call.restored(which, self.positions.from_heads(back, raw, beside), order)

    def softmax(self, scores: Tensor, run: Callable[[Tensor], Tensor], axis: int) -> Tensor:
        """Fire on eager scores, and on the pattern if another is combined with it before the values."""
        listeners = [hooked for hooked, _ in self.listeners("softmax")]
        for hooked in listeners:
            shaped = self._square(hooked, scores)
            if self.masks is not None:  # of the module itself: a hook may hide keys too
                for head in shaped.split(1, 1):
                    self.masks.add(visible_keys(head))
            out = self.fire_at(hooked, "attn_scores", shaped)
            scores = scores if out is shaped else self._from_square(hooked, out, scores)
        pattern = run(scores)
        for hooked in listeners:
            attention, names = hooked.part.attention, hooked.part.attention.statistics
            if hooked.hooks_any("pattern", "rot_q", "rot_k", *names):
                seen = visible_keys(self._square(hooked, scores)[:, :1])
                self._check_mask(hooked, mask_kind(seen, False, self.positions.length), partial(Tensor.bool, seen))
            if hooked.hooks_any(*names):
                wide = torch.promote_types(scores.dtype, torch.float32)
                hooked.lse = self._row(hooked, self._lined(hooked, scores.detach()).to(wide).logsumexp(-1))
                if attention.has_null:
                    of_tokens = self._square(hooked, pattern.detach()).to(wide).sum(-1)
                    of_all = self._row(hooked, self._lined(hooked, pattern.detach()).to(wide).sum(-1))
                    hooked.null = (of_all - of_tokens).clamp_min(0)
            if attention.is_combined:
                square = self._square(hooked, pattern)
                out = self._fire_pattern(hooked, square)
                pattern = pattern if out is square else self._from_square(hooked, out, pattern)
        return pattern

    def _square(self, hooked: HookedAttention, x: Tensor) -> Tensor:
        """Return scores or a pattern of a softmax as [batch, head, query, key] of this attention's heads."""
        attention = hooked.part.attention
        square = self.positions.square(self._lined(hooked, x), attention.softmax_beside)
        return chosen_heads(square, attention.chosen, 1)

    def _from_square(self, hooked: HookedAttention, square: Tensor, like: Tensor) -> Tensor:
        """Invert `_square`: return `like` with this attention's part replaced."""
        attention, lined = hooked.part.attention, self._lined(hooked, like)
        of_all_heads = self.positions.square(lined, attention.softmax_beside)
        square = with_chosen_heads(of_all_heads, square, attention.chosen, 1)
        back, axes = self.positions.from_square(square, lined, attention.softmax_beside), attention.axes
        back = restore(back, axes.square, axes.softmax) if axes.softmax else back
        batch = attention.batch_axes.get("softmax")
        return batch.from_front(back, letters_of(like)) if batch is not None and batch.is_inner else back

    def _lined(self, hooked: HookedAttention, x: Tensor) -> Tensor:
        """Return scores or a pattern of a softmax as [..., query, key]."""
        axes, batch = hooked.part.attention.axes, hooked.part.attention.batch_axes.get("softmax")
        if batch is not None and batch.is_inner:
            x = batch.to_front(x, letters_of(x), self.positions.rows)
        return arrange(x, axes.softmax, axes.square) if axes.softmax else x

    def _row(self, hooked: HookedAttention, x: Tensor) -> Tensor:
        """Return one number for each row of a softmax as [batch, head, query]."""
        rows = self.positions.cropped(self.positions.all_heads(x[..., None]))[..., 0].transpose(1, 2)
        return chosen_heads(rows, hooked.part.attention.chosen, 1)

    def _fire_pattern(self, hooked: HookedAttention, square: Tensor) -> Tensor:
        """Fire on a pattern [batch, head, query, key], and show the statistics of its replacement."""
        used, attention = self.fire_at(hooked, "pattern", square), hooked.part.attention
        lse, null, dots = hooked.lse, hooked.null, hooked.dots
        hooked.lse = hooked.null = hooked.dots = None
        if self.masks is not None and attention.kind == BY_HAND:
            self.masks.add(square > 0)
        if attention.kind == BY_HAND and hooked.hooks_any("pattern", *attention.statistics):
            seen = square[:, :1] > 0
            self._check_mask(hooked, mask_kind(seen, False, self.positions.length), partial(Tensor.bool, seen))
        if dots is not None:  # the log-sum-exp follows from the largest weight of each row and its score
            wide = torch.promote_types(square.dtype, torch.float32)
            top, place = square.detach().max(-1, keepdim=True)
            lse = (dots.gather(-1, place).to(wide) * attention.scale - top.to(wide).log())[..., 0]
        if lse is not None:
            if used is square and not is_distribution(used):
                why = f"{NO_DISTRIBUTION} on these tokens, so it has no statistics"
                raise WorkbenchError(f"layer {hooked.layer}: {why}")
            if null is not None and used is not square:
                null = (1 - used.sum(-1)).clamp_min(0)
            self._show_statistics(hooked, pattern_statistics(lse, used, null, self.segments))
        return used

    def _before_values(self, hooked: HookedAttention, call: ProductCall, changed: dict[int, Tensor]) -> None:
        """Fire on values, and on a pattern that no other is combined with; put replacements into `changed`, by operand."""
        attention = hooked.part.attention
        which, p_order, v_order = attention.axes[3:6]
        if hooked.hooks_any("v") or self.shows_sources(hooked):
            raw = arrange(changed.get(1 - which, call.operands[1 - which]), call.letters[1 - which], v_order)
            wide = self.positions.heads(raw, attention.beside)
            v = _without_repeats(wide, attention.v.shape[1])
            if self.shows_sources(hooked):
                self.show_sources(hooked, v)
            if (out := self.fire_at(hooked, "v", v)) is not v:
                back = self.positions.from_heads(repeated(out, wide.shape[2]), raw, attention.beside)
                changed[1 - which] = call.restored(1 - which, back, v_order)
        if not attention.is_combined:
            pattern = call.arranged(which, p_order)
            square = self.positions.square(pattern, attention.beside)
            if (used := self._fire_pattern(hooked, square)) is not square:
                back = self.positions.from_square(used, pattern, attention.beside)
                changed[which] = call.restored(which, back, p_order)


def _without_repeats(x: Tensor, heads: int) -> Tensor:
    """Return keys or values [batch, pos, head, d_head] once each: some modules repeat them only with a mask."""
    return x[:, :, :: x.shape[2] // heads] if x.shape[2] > heads else x
