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
from workbench.observing.interception.fused_calls import FusedCall, letters_of
from workbench.observing.interception.masks import (
    CAUSAL,
    CROSSING,
    FUTURE,
    is_distribution,
    mask_kind,
    masked_statistics,
    pattern_statistics,
    visible,
    window_mask,
)
from workbench.observing.interception.matrix_calls import Lookup, MatrixCall
from workbench.observing.interception.positions import Beside
from workbench.observing.interception.product_calls import ProductCall, arrange, restore
from workbench.observing.interception.tensor_layouts import get_at, replaced_at
from workbench.observing.listening.run import Heard, HookedRun
from workbench.observing.listening.sources import show_sources
from workbench.observing.recognition.attention_calls import (
    BY_HAND,
    NO_DISTRIBUTION,
    causal_attention,
    chosen_heads,
    repeated,
    with_chosen_heads,
)


class AttentionHooks:
    """Handler of the calls of one run: fires the hook points of its attention around them."""

    def __init__(self, run: HookedRun) -> None:
        self.run, self.at = run, run.positions
        self.mask_kinds: dict[
            int, tuple[str, Any]
        ] = {}  # by id of the mask's source, which is kept so that no other gets it

    def matrix(self, call: MatrixCall) -> Any:
        """Fire on the input and the output of a bare matrix product: a projection, or what a block adds to its stream."""
        inputs, outputs = self.run.bare_product()
        read = call.input
        for fire in inputs:
            read = read if read is None else fire(self.run, read)
        output = call.run(None if read is call.input else read)
        for fire in outputs if isinstance(output, Tensor) else ():
            output = fire(self.run, output)
        return output

    def looked_up(self, lookup: Lookup) -> Any:
        """Fire on the embedding where it is a parameter, and keep what tables of values give for the layers that read it."""
        run, output, table = self.run, lookup.output, lookup.table
        name = run.looked_up_in.get(id(table if table._base is None else table._base)) if run.looked_up_in else None
        if name is None:
            return output
        place, vectors = (name, run.lookups[name]), lookup.by_position(output)
        run.lookups[name] += 1
        if run.embed is not None and (run.embed.parameter, run.embed.run) == place:
            if (shown := self.at.shaped(vectors, run.embed.axes)) is None:
                return output
            fired = run.fire(run.points.embed, shown)
            return output if fired is shown else lookup.restored(self.at.unshaped(fired, vectors, run.embed.axes))
        for name, read in run.tables_read.items():
            if (read.parameter, read.run) == place and (
                shown := self.at.shaped(read.read(vectors), read.axes)
            ) is not None:
                run.tables[name] = shown.flatten(2)
        return output

    def other(self, name: str) -> None:
        """Calls of other functions fire nothing."""

    def wrote(self) -> None:
        """Nor do those that write over a tensor: where they do, hooks get copies."""

    # ---- a whole attention in one call -------------------------------------------------------------------------------

    def fused(self, call: FusedCall) -> Any:
        """Fire around one whole attention."""
        if self.run.structure.block_lists:
            call = call.as_in_own_runs(self.run.structure.block_lists)
        if not (listeners := self.run.listeners("fused")):
            return call.run()
        ((heard, _),) = listeners
        attention, names = heard.part.attention, heard.part.attention.statistics
        depends = heard.hooks_any("rot_q", "rot_k", *names)
        call = call.batch_first(attention.batch_axes.get("fused"), self.at.rows)
        self._check_lengths(heard, *call.qkv[:2])
        if self.run.masks is not None:
            self.run.masks.add(self._visible(call, attention.beside))
        self._check_mask(heard, self._mask_kind(call, attention.beside) if depends else CAUSAL, call.dropout)
        changed = self._inputs(heard, call)
        used = call.named | changed
        probabilities_, replaced = None, False
        if heard.hooks_any("attn_scores", "pattern"):
            probabilities_, replaced = self._pattern(heard, call, used)
        if heard.hooks_any(*names):
            self._show_statistics(heard, self._fused_statistics(heard, call, used, probabilities_))
        raw = call.run(changed)
        output = get_at(raw, call.output)
        z = before = call.z(output, self.at)
        if probabilities_ is not None and replaced:
            v = repeated(self._keys(heard, used["value"]), probabilities_.shape[1])
            z = torch.einsum("bhqk,bkhd->bqhd", probabilities_, v).to(before.dtype)
        z = self.run.fire_at(heard, "z", z) if heard.hooks_any("z") else z
        return raw if z is before else replaced_at(raw, call.output, call.raw(z, output, self.at))

    def _mask_kind(self, call: FusedCall, beside: Beside) -> str:
        """What a mask does, worked out once for all layers that share it."""
        source = call.mask_source
        if source is None:
            return call.mask_kind(self.at, beside)
        if id(source) not in self.mask_kinds:
            self.mask_kinds[id(source)] = call.mask_kind(self.at, beside), source
        return self.mask_kinds[id(source)][0]

    def _visible(self, call: FusedCall, beside: Beside) -> Tensor | None:
        """Keys that a call lets queries see, bool [batch or 1, any head, query, key]; None where it is causal and hides none."""
        if self._mask_kind(call, beside) == CAUSAL:
            return None
        mask, _, whole = call.masks(self.at)
        if not isinstance(mask, Tensor):
            window = self.at.length if call.window is None else call.window
            return window_mask(self.at.length, window, call.qkv[0].device)[None, None]
        mask = mask if mask.dtype == torch.bool else visible(mask)
        if whole:
            return self.at.square(mask, beside)
        lead = call.qkv[0].shape[:-2]
        if len(lead) == 2:
            return mask[(None,) * (4 - mask.ndim)]
        return mask.expand(*lead, *mask.shape[-2:]).reshape(self.at.batch, -1, *mask.shape[-2:])

    def _keys(self, heard: Heard, x: Tensor) -> Tensor:
        """Keys or values of all that the tokens see, [batch, key, kv_head, d_head]."""
        return self.at.heads(x, self._left_out(heard))

    def _left_out(self, heard: Heard) -> Beside:
        return heard.part.attention.beside if self.at.layout.packed else (0, 0)

    def _columns(self, heard: Heard, x: Tensor) -> Tensor:
        """Of [..., query, key] of all keys those of tokens."""
        before, after = (0, 0) if self.at.layout.packed else heard.part.attention.beside
        return x.narrow(-1, before, x.shape[-1] - before - after) if before or after else x

    def _inputs(self, heard: Heard, call: FusedCall) -> dict[str, Tensor]:
        """Fire on queries, keys and values as the attention reads them; what was replaced, by name, as the call takes it."""
        changed: dict[str, Tensor] = {}
        attention = heard.part.attention
        for name, hook in (("value", "v"), ("query", "rot_q"), ("key", "rot_k")):
            shows_sources = hook == "v" and self._shows_sources(heard)
            if not heard.hooks_any(hook) and not shows_sources:
                continue
            raw, beside = call.named[name], None if name == "query" else attention.beside
            wide = self.at.heads(raw, beside)
            n = wide.shape[2] if name == "query" else getattr(attention, hook[-1]).shape[1]
            repeats = wide.shape[2] // n
            x = wide[:, :, ::repeats] if repeats > 1 else wide
            if shows_sources:
                show_sources(self.run, heard, x)
            factor = call.scale * x.shape[-1] ** 0.5 if name == "query" else 1.0
            if (out := self._fire_scaled(heard, hook, x, factor)) is not x:
                changed[name] = self.at.from_heads(repeated(out, wide.shape[2]), raw, beside)
        return changed

    def _shows_sources(self, heard: Heard) -> bool:
        return heard.layer in self.run.mixtures or heard.layer in self.run.own_values_read

    def _fire_scaled(self, heard: Heard, name: str, x: Tensor, factor: float) -> Tensor:
        """Fire on queries in units in which a score is q . k / sqrt(d_head), which are `factor` times the call's own."""
        folded = x if abs(factor - 1) < 1e-6 else x * factor
        if not heard.hooks_any(name):
            return x
        out = self.run.fire_at(heard, name, folded, beside=folded is not x)
        return x if out is folded else out if folded is x else out / factor

    def _scores(self, heard: Heard, call: FusedCall, used: dict[str, Any]) -> Tensor:
        """Scaled, masked scores [batch, head, query, key] of tokens' queries and all keys that they see."""
        q, k = self.at.heads(used["query"]), self._keys(heard, used["key"])
        scores = torch.einsum("bqhd,bkhd->bhqk", q, repeated(k, q.shape[2])) * call.scale
        if (modify := call.modify(self.at)) is not None:
            each = [[modify(head, b, h, 0) for h, head in enumerate(heads)] for b, heads in enumerate(scores)]
            scores = torch.stack([torch.stack(heads) for heads in each])
        mask, causal, whole = call.masks(self.at)
        mask = self.at.square(mask, self._left_out(heard)) if whole else mask
        if causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        if mask is None:
            return scores
        return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask

    def _pattern(self, heard: Heard, call: FusedCall, used: dict[str, Any]) -> tuple[Tensor, bool]:
        """The pattern [batch, head, query, key] over all keys after the hooks, and whether one of them replaced anything."""
        scores = self._scores(heard, call, used)
        mine = self._columns(heard, scores)
        out = self.run.fire_at(heard, "attn_scores", mine, beside=True)
        if out is not mine:
            scores = _with_columns(scores, self._columns, heard, out)
        pattern = probabilities(scores, used["value"].dtype).nan_to_num(0.0)
        mine_ = self._columns(heard, pattern)
        out_ = self.run.fire_at(heard, "pattern", mine_, beside=True)
        if out_ is not mine_:
            pattern = _with_columns(pattern, self._columns, heard, out_)
        heard.lse = scores.logsumexp(-1)
        return pattern, out is not mine or out_ is not mine_

    def _fused_statistics(
        self, heard: Heard, call: FusedCall, used: dict[str, Any], pattern: Tensor | None
    ) -> AttentionStatistics:
        """Statistics of a fused call: of the pattern in use where hooks formed or replaced one."""
        attention = heard.part.attention
        if pattern is not None:
            mine, lse, heard.lse = self._columns(heard, pattern), heard.lse, None
            assert lse is not None
            null = (pattern.sum(-1) - mine.sum(-1)).clamp_min(0) if attention.has_null else None
            return pattern_statistics(lse, mine, null, self.run.segments)
        q, k, v = self.at.heads(used["query"]), self._keys(heard, used["key"]), self._keys(heard, used["value"])
        k, v = (_short(x, getattr(attention, name).shape[1]) for x, name in ((k, "k"), (v, "v")))
        plain = self.run.segments is None and not attention.has_null
        if (kind := self._mask_kind(call, attention.beside)) == CAUSAL and plain:
            return causal_attention(q, k, v, call.scale)[1]
        mask, causal, whole = call.masks(self.at)
        mask = self.at.square(mask, self._left_out(heard)) if whole else mask
        if not isinstance(mask, Tensor) and kind != CAUSAL:
            if call.window is None:
                raise WorkbenchError(f"attention in {attention.within.name} has {kind}: no statistics of it")
            mask = window_mask(self.at.length, call.window, q.device)
        options: Any = {"scale": call.scale, "mask": mask, "causal": causal, "modify": call.modify(self.at)}
        options["segments"] = self.run.segments
        beside = (0, 0) if self.at.layout.packed else attention.beside
        return masked_statistics(q, k, v, beside=beside, **options)[1]

    def _show_statistics(self, heard: Heard, statistics: AttentionStatistics) -> None:
        for name in heard.part.attention.statistics:
            self.run.show_at(heard, name, getattr(statistics, name))

    # ---- what it must be for its hook points to be true --------------------------------------------------------------

    def _check_lengths(self, heard: Heard, q: Tensor, k: Tensor) -> None:
        """Raise `WorkbenchError` where queries and keys [..., pos, d_head] are not the positions that they were."""
        more = sum(heard.part.attention.beside) - sum(self.at.layout.beside)
        if (q.shape[-2], k.shape[-2]) != (self.at.columns, self.at.columns + more):
            raise WorkbenchError(
                f"attention in layer {heard.layer} lets {q.shape[-2]} queries attend to {k.shape[-2]} keys for {self.at.length} "
                "tokens; give whole sequences, and no cache (use_cache=False, no past_key_values=)"
            )

    def _check_mask(self, heard: Heard, kind: str, dropout: float = 0.0) -> None:
        """Raise `WorkbenchError` where this attention is masked otherwise in a way that the hooked points depend on."""
        where, known = f"attention in layer {heard.layer}", heard.part.attention.mask
        if dropout:
            raise WorkbenchError(f"dropout of {dropout} is active in the {where}: call module.eval() first")
        if kind in (FUTURE, CROSSING) and heard.hooks_any(*heard.part.attention.statistics):
            raise WorkbenchError(f"{where} {kind} now, which it did not on the example tokens")
        if known == CAUSAL != kind and heard.hooks_any("rot_q", "rot_k"):
            raise WorkbenchError(
                f"{where} is masked otherwise now ({kind}) than on the example tokens ({known}), so that softmax of rot_q and "
                f"rot_k is not its pattern: read hook_pattern or the statistics, or give sequences it does not cut"
            )

    # ---- an attention in steps ---------------------------------------------------------------------------------------

    def product(self, call: ProductCall) -> Any:
        """Fire around the two products of an eager attention."""
        listeners = self.run.listeners("product")
        changed: dict[int, Tensor] = {}
        if listeners:
            heard, role = listeners[0]
            call = call.batch_first(heard.part.attention.batch_axes.get(role), self.at.rows)
        for heard, role in listeners:
            (self._before_scores if role == "scores" else self._before_values)(heard, call, changed)
        raw = call.run(changed)
        out = shown = call.shown(raw, self.at.rows)
        for heard, role in listeners:
            attention = heard.part.attention
            if role == "scores" and attention.kind == BY_HAND and heard.hooks_any(*attention.statistics):
                heard.dots = self.at.square(out.detach(), attention.beside)
            elif role == "values" and heard.hooks_any("z") and not attention.is_combined:
                order = attention.axes.z
                lined = arrange(out, call.letters[2], order)
                z = self.at.heads(lined)
                if (fired := self.run.fire_at(heard, "z", z)) is not z:
                    out = restore(self.at.from_heads(fired, lined), order, call.letters[2])
        return raw if out is shown else call.unshown(out)

    def _before_scores(self, heard: Heard, call: ProductCall, changed: dict[int, Tensor]) -> None:
        """Fire on queries and keys; what was replaced goes into `changed`, by operand."""
        attention = heard.part.attention
        first, q_order, k_order, *_ = attention.axes
        self._check_lengths(heard, call.arranged(first, q_order), call.arranged(1 - first, k_order))
        for name, which, order, beside in (
            ("rot_q", first, q_order, None), ("rot_k", 1 - first, k_order, attention.beside),
        ):  # fmt: skip
            if not heard.hooks_any(name):
                continue
            raw = arrange(changed.get(which, call.operands[which]), call.letters[which], order)
            wide = self.at.heads(raw, beside)
            mine = chosen_heads(wide, attention.chosen)
            short = mine if name == "rot_q" else _short(mine, attention.k.shape[1])
            factor = attention.scale * wide.shape[-1] ** 0.5 if name == "rot_q" else 1.0
            if (out := self._fire_scaled(heard, name, short, factor)) is not short:
                back = with_chosen_heads(wide, repeated(out, mine.shape[2]), attention.chosen)
                changed[which] = call.restored(which, self.at.from_heads(back, raw, beside), order)

    def softmax(self, scores: Tensor, run: Callable[[Tensor], Tensor], axis: int) -> Tensor:
        """Fire on an eager attention's scores, and on its pattern where others are combined with it before the values."""
        listeners = [heard for heard, _ in self.run.listeners("softmax")]
        for heard in listeners:
            shaped = self._square(heard, scores)
            out = self.run.fire_at(heard, "attn_scores", shaped)
            scores = scores if out is shaped else self._from_square(heard, out, scores)
        pattern = run(scores)
        for heard in listeners:
            attention, names = heard.part.attention, heard.part.attention.statistics
            if self.run.masks is not None:
                for head in self._square(heard, scores).split(1, 1):
                    self.run.masks.add(visible(head))
            if heard.hooks_any("rot_q", "rot_k", *names):
                shaped = self._square(heard, scores)[:, :1]
                self._check_mask(heard, mask_kind(visible(shaped), False, self.at.length))
            if heard.hooks_any(*names):
                wide = torch.promote_types(scores.dtype, torch.float32)
                heard.lse = self._row(heard, self._lined(heard, scores.detach()).to(wide).logsumexp(-1))
                if attention.has_null:
                    mine = self._square(heard, pattern.detach()).to(wide).sum(-1)
                    heard.null = (
                        self._row(heard, self._lined(heard, pattern.detach()).to(wide).sum(-1)) - mine
                    ).clamp_min(0)
            if attention.is_combined:
                square = self._square(heard, pattern)
                out = self._fire_pattern(heard, square)
                pattern = pattern if out is square else self._from_square(heard, out, pattern)
        return pattern

    def _square(self, heard: Heard, x: Tensor) -> Tensor:
        """[batch, head, query, key] of a softmax's scores or pattern, what is this attention's of it."""
        attention = heard.part.attention
        return chosen_heads(self.at.square(self._lined(heard, x), attention.softmax_beside), attention.chosen, 1)

    def _from_square(self, heard: Heard, square: Tensor, like: Tensor) -> Tensor:
        """The inverse of `_square`: `like` with what is this attention's replaced."""
        attention, lined = heard.part.attention, self._lined(heard, like)
        whole = with_chosen_heads(self.at.square(lined, attention.softmax_beside), square, attention.chosen, 1)
        back, axes = self.at.from_square(whole, lined, attention.softmax_beside), attention.axes
        back = restore(back, axes.square, axes.softmax) if axes.softmax else back
        batch = attention.batch_axes.get("softmax")
        return batch.from_front(back, letters_of(like)) if batch is not None and batch.is_inner else back

    def _lined(self, heard: Heard, x: Tensor) -> Tensor:
        """Scores or a pattern of a softmax, [..., query, key] however its axes lie."""
        axes, batch = heard.part.attention.axes, heard.part.attention.batch_axes.get("softmax")
        if batch is not None and batch.is_inner:
            x = batch.to_front(x, letters_of(x), self.at.rows)
        return arrange(x, axes.softmax, axes.square) if axes.softmax else x

    def _row(self, heard: Heard, x: Tensor) -> Tensor:
        """[batch, head, query] of numbers of a softmax's rows."""
        rows = self.at.cropped(self.at.all_heads(x[..., None]))[..., 0].transpose(1, 2)
        return chosen_heads(rows, heard.part.attention.chosen, 1)

    def _fire_pattern(self, heard: Heard, square: Tensor) -> Tensor:
        """Fire on a pattern [batch, head, query, key], and show statistics of what becomes of it."""
        used, attention = self.run.fire_at(heard, "pattern", square), heard.part.attention
        lse, null, dots = heard.lse, heard.null, heard.dots
        heard.lse = heard.null = heard.dots = None
        if self.run.masks is not None and attention.kind == BY_HAND:
            self.run.masks.add(square > 0)
        if dots is not None:
            lse = _lse_by_hand(dots, square, attention.scale)
            self._check_mask(heard, mask_kind(square[:, :1] > 0, False, self.at.length))
        if lse is not None:
            if used is square and not is_distribution(used):
                raise WorkbenchError(f"layer {heard.layer}: {NO_DISTRIBUTION} on these tokens, so it has no statistics")
            if null is not None and used is not square:
                null = (1 - used.sum(-1)).clamp_min(0)
            self._show_statistics(heard, pattern_statistics(lse, used, null, self.run.segments))
        return used

    def _before_values(self, heard: Heard, call: ProductCall, changed: dict[int, Tensor]) -> None:
        """Fire on values and, where it is the attention's own, on the pattern; what was replaced goes into `changed`, by operand."""
        attention = heard.part.attention
        which, p_order, v_order = attention.axes[3:6]
        if heard.hooks_any("v") or self._shows_sources(heard):
            raw = arrange(changed.get(1 - which, call.operands[1 - which]), call.letters[1 - which], v_order)
            wide = self.at.heads(raw, attention.beside)
            v = _short(wide, attention.v.shape[1])
            if self._shows_sources(heard):
                show_sources(self.run, heard, v)
            if (out := self.run.fire_at(heard, "v", v)) is not v:
                back = self.at.from_heads(repeated(out, wide.shape[2]), raw, attention.beside)
                changed[1 - which] = call.restored(1 - which, back, v_order)
        if not attention.is_combined:
            pattern = call.arranged(which, p_order)
            square = self.at.square(pattern, attention.beside)
            used = self._fire_pattern(heard, square)
            if used is not square:
                changed[which] = call.restored(which, self.at.from_square(used, pattern, attention.beside), p_order)


def _with_columns(whole: Tensor, columns: Callable[[Heard, Tensor], Tensor], heard: Heard, replaced: Tensor) -> Tensor:
    """[..., query, key] in which the columns of tokens are replaced."""
    if replaced.shape == whole.shape:
        return replaced
    whole = whole.clone()
    columns(heard, whole).copy_(replaced)
    return whole


def _lse_by_hand(dots: Tensor, pattern: Tensor, factor: float) -> Tensor:
    """Log-sum-exps [batch, head, query] of the scores under a pattern, from the largest weight of each row."""
    wide = torch.promote_types(pattern.dtype, torch.float32)
    top, place = pattern.detach().max(-1, keepdim=True)
    return (dots.gather(-1, place).to(wide) * factor - top.to(wide).log())[..., 0]


def _short(x: Tensor, heads: int) -> Tensor:
    """Keys or values [batch, pos, head, d_head] without repeats: some modules repeat them only where they pass a mask."""
    return x[:, :, :: x.shape[2] // heads]
