"""Fused attention, one call each: `scaled_dot_product_attention`, FlexAttention, Hugging Face's interface.

A call stores its original function and arguments, so that running it untouched changes no bit of the output.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.observing.interception.eager_attention_products import autocast
from workbench.observing.interception.masks import CROSSING, FUTURE, NOTHING, Modify, mask_kind, visible_keys
from workbench.observing.interception.position_axes import BATCH_FIRST, UNKNOWN_ORDER, BatchAxis, Beside, Positions

COMPLETE, APPLIED, IGNORED = "complete", "applied", "ignored"
"""Effect of the block lists of FlexAttention's BlockMasks in a module's own runs: none if `mask_mod` hides the same keys; else
compiled code applies them, and eager code ignores them."""
CHANGED = "changes its scores by a function (score_mod, a soft cap, ALiBi)"
_FUSED = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_INTERFACE = ("module", "query", "key", "value", "attention_mask")


@dataclass(frozen=True)
class FlexForm:
    """The functions of one call in FlexAttention's form: `score_mod` (None: scores are not changed) and `mask_mod`."""

    score_mod: Callable[..., Tensor] | None
    mask_mod: Callable[..., Tensor]
    sizes: tuple[int, int]  # batch and heads of the mask, 1 where it is shared
    buffers: tuple[tuple[Any, ...], tuple[Any, ...]]  # further arguments of these functions in compiled code
    block_mask: tuple[Any, ...] = ()  # as FlexAttention's operator takes it

    @property
    def of_listed_blocks(self) -> FlexForm:
        """The form in which a query sees the listed blocks of keys alone, as in compiled code; eager code ignores the lists.

        `mask_mod` applies within partial blocks and not within full ones. Raises `WorkbenchError` if a row lists a block of keys
        twice, which compiled code would count twice.
        """
        _, keys, *lists = self.block_mask[:6]
        q_block, k_block, mask_mod = self.block_mask[-3:]
        partial = _block_table(lists[0], lists[1], -(-keys // k_block))
        full = torch.zeros_like(partial) if lists[2] is None else _block_table(lists[2], lists[3], partial.shape[-1])
        if bool((partial + full > 1).any()):
            raise WorkbenchError("a BlockMask lists a block of keys twice for one block of queries: list each once")

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor, *buffers: Any) -> Tensor:
            place = b * (partial.shape[0] > 1), h * (partial.shape[1] > 1), i // q_block, j // k_block
            return (full[place] > 0) | ((partial[place] > 0) & mask_mod(b, h, i, j, *buffers))

        return replace(self, mask_mod=seen)

    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Bool [batch or 1, head or 1, query, key]."""
        from torch.nn.attention.flex_attention import create_mask

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:  # four arguments make it a mask_mod
            return self.mask_mod(b, h, i, j, *self.buffers[1])

        return create_mask(seen, *self.sizes, queries, keys, device=str(device))

    def modify(self, scores: Tensor, sequence: int, head: int, query: int, key: int) -> Tensor:
        """Apply `score_mod` to scaled scores [query, key] of one head; `query`, `key`: first positions."""
        assert self.score_mod is not None
        score_mod, buffers = self.score_mod, self.buffers[0]
        b, h = (torch.tensor(i, device=scores.device) for i in (sequence, head))
        rows, columns = (torch.arange(n, device=scores.device) for n in scores.shape)

        def one(score: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score_mod(score, b, h, i, j, *buffers)

        return torch.vmap(torch.vmap(one, (0, None, 0)), (0, 0, None))(scores, rows + query, columns + key)


@dataclass
class FusedCall:
    """One fused attention: q, k, v [..., pos, d_head] in, head outputs out."""

    function: Callable[..., Any]
    named: dict[str, Any]
    mask: Any
    causal: bool
    dropout: float
    scale: float
    window: int | None = None  # number of latest visible keys, if an argument limits them
    output: tuple[int, ...] = ()  # path to the head outputs in its result
    heads_first: bool = True  # whether its output is [..., head, pos, d_head]
    flex: FlexForm | None = None  # of FlexAttention and flash kernels: functions of scores and positions
    batch: BatchAxis | None = None  # axis of the sequences in the original arguments, if not the first

    def batch_first(self, batch: BatchAxis | None, rows: int) -> FusedCall:
        """Return the call with its queries, keys, values and mask as views [batch, head, ...]."""
        if batch is None or batch in (BATCH_FIRST, UNKNOWN_ORDER):
            return self
        original = {name: self.named[name] for name in ("query", "key", "value")}
        letters = letters_of(original["query"])
        views = {name: batch.to_front(x, letters, rows) for name, x in original.items()}
        mask = self.mask
        if isinstance(mask, Tensor) and mask.ndim > 2:
            mask = batch.to_front(mask[(None,) * (len(letters) - mask.ndim)], letters, rows)

        def run(**values: Any) -> Any:
            for name, x in original.items():
                values[name] = x if values[name] is views[name] else batch.from_front(values[name], letters)
            return self.function(**values)

        return replace(self, function=run, named=self.named | views, mask=mask, batch=batch)

    def of_listed_blocks(self) -> FusedCall | None:
        """Return the call with the block lists of its BlockMask applied; None if they change nothing."""
        if self.flex is None or not self.flex.block_mask:
            return None
        listed, (q, k, _) = self.flex.of_listed_blocks, self.qkv
        if torch.equal(*(form.mask(q.shape[-2], k.shape[-2], q.device) for form in (self.flex, listed))):
            return None
        named = self.named | {"block_mask": (*self.flex.block_mask[:-1], listed.mask_mod)}
        return replace(self, named=named, flex=listed)

    def as_in_own_runs(self, block_lists: str) -> FusedCall:
        """Return the call as the module's own runs make it; raises `WorkbenchError` if their use of block lists is unknown."""
        listed = None if block_lists == IGNORED else self.of_listed_blocks()
        if listed is not None and block_lists == COMPLETE:
            raise WorkbenchError(
                "a BlockMask of FlexAttention leaves out blocks of keys that its mask_mod allows: compiled runs leave them out, eager ones "
                "do not. It left none out on the example tokens, so observe the module on sequences as long as these"
            )
        return listed or self

    def masks(self, positions: Positions) -> tuple[Any, bool, bool]:
        """Return the mask as `scaled_dot_product_attention` takes it, whether the call is causal besides, and the mask's extent.

        The extent is True for [row, any head, query, key] of all positions, if these are not the tokens alone.
        """
        (queries, keys), mask = (x.shape[-2] for x in self.qkv[:2]), self.mask
        if self.flex is not None:
            mask = self.flex.mask(queries, keys, self.named["query"].device)
        if queries == keys == positions.length or not (mask is None or isinstance(mask, Tensor)):
            return mask, self.causal, False
        if mask is None:
            mask = torch.ones(queries, keys, dtype=torch.bool, device=self.named["query"].device)
        if self.causal:
            past = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
            mask = mask & past if mask.dtype == torch.bool else mask.masked_fill(~past, -torch.inf)
        return mask[(None,) * (4 - mask.ndim)].expand(positions.rows, -1, queries, keys), False, True

    def mask_kind(self, positions: Positions, beside: Beside) -> str:
        """Describe its mask between tokens; `beside`: numbers of other keys before and after theirs."""
        mask, causal, of_all_positions = self.masks(positions)
        if of_all_positions:
            every, mask = mask, positions.square(mask, beside)
            if positions.layout.packed:
                seen = [x if x.dtype == torch.bool else visible_keys(x) for x in (every, mask)]
                if seen[0].sum() != seen[1].sum():
                    return CROSSING
        kind = mask_kind(mask, causal, positions.length, self.window)
        return CHANGED if kind not in (FUTURE, NOTHING, CROSSING) and self.flex and self.flex.score_mod else kind

    def modify(self, positions: Positions) -> Modify | None:
        """Return the function that changes the scores of tokens' queries before the mask, or None."""
        form, packed, before = self.flex, positions.layout.packed, positions.layout.beside[0]
        if form is None or form.score_mod is None:
            return None
        if packed:  # sequences follow one another in one row
            return lambda x, b, h, first: form.modify(x, 0, h, b * positions.length + first, b * positions.length)
        return lambda x, b, h, first: form.modify(x, b, h, before + first, 0)

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the call."""
        return self.named["query"], self.named["key"], self.named["value"]

    def run(self, changed: Mapping[str, Tensor] | None = None) -> Any:
        """Run the original function, with some of query, key and value replaced."""
        return self.function(**self.named | dict(changed or {}))

    def z(self, raw: Tensor, positions: Positions) -> Tensor:
        """Return the head outputs [batch, pos, head, d_head]."""
        return positions.heads(self._lined(raw, positions))

    def raw(self, z: Tensor, like: Tensor, positions: Positions) -> Tensor:
        """Invert `z`."""
        out = positions.from_heads(z, self._lined(like, positions))
        if self.batch is not None:
            return self.batch.from_front(out, letters_of(like))
        return out if self.heads_first else out.transpose(-3, -2)

    def _lined(self, raw: Tensor, positions: Positions) -> Tensor:
        """Return its output as [batch, ..., pos, d_head]."""
        if self.batch is not None:
            return self.batch.to_front(raw, letters_of(raw), positions.rows)
        return raw if self.heads_first else raw.transpose(-3, -2)


def letters_of(x: Tensor) -> str:
    """Return one letter for each axis."""
    return string.ascii_lowercase[: x.ndim]


def _block_table(counts: Tensor, indices: Tensor, blocks: int) -> Tensor:
    """Count how often each block of queries lists each block of keys, [batch or 1, head or 1, query block, key block]."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    places = indices.long().clamp(max=blocks).where(listed, blocks)
    table = places.new_zeros(*places.shape[:-1], blocks + 1)
    return table.scatter_add_(-1, places, listed.long())[..., :-1]


def sdpa_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall:
    """Read a call of `torch.nn.functional.scaled_dot_product_attention`."""
    named = dict(zip(_FUSED, args, strict=False)) | dict(kwargs)
    if torch.is_autocast_enabled(named["query"].device.type):
        named = {name: autocast(x) for name, x in named.items()}
    scale = named.get("scale")
    scale = named["query"].shape[-1] ** -0.5 if scale is None else float(scale)
    causal, dropout = bool(named.get("is_causal", False)), float(named.get("dropout_p", 0.0))
    return FusedCall(function, named, named.get("attn_mask"), causal, dropout, scale)


def interface_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall:
    """Read a call of a function that is registered in Hugging Face's `AttentionInterface`."""
    named = dict(zip(_INTERFACE, args, strict=False)) | dict(kwargs)
    mask, causal, scale = named.get("attention_mask"), named.get("is_causal"), named.get("scaling")
    causal = mask is None and bool(getattr(named["module"], "is_causal", True) if causal is None else causal)
    scale = named["query"].shape[-1] ** -0.5 if scale is None else float(scale)
    return FusedCall(
        lambda **values: function(*[values.pop(name) for name in _INTERFACE if name in values], **values), named, mask, causal,
        float(named.get("dropout") or 0.0), scale, window=named.get("sliding_window"), output=(0,), heads_first=False,
    )  # fmt: skip


_FLEX = (
    "query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options", "score_mod_other_buffers", "mask_mod_other_buffers",
)  # fmt: skip


def flex_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall:
    """Read a call of FlexAttention's higher-order operator."""
    named = dict(zip(_FLEX, args, strict=False)) | dict(kwargs)
    if torch._C.DispatchKey.AutocastCPU in getattr(function, "py_kernels", {}):  # else it ignores autocast
        named |= {name: autocast(named[name]) for name in ("query", "key", "value")}
    score_mod, block_mask = named["score_mod"], named["block_mask"]
    plain = score_mod is None or getattr(score_mod, "__name__", "") == "_identity"
    sizes = next((tuple(x.shape[:2]) for x in block_mask if isinstance(x, Tensor) and x.ndim > 2), (1, 1))
    buffers = tuple(named.get("score_mod_other_buffers", ())), tuple(named.get("mask_mod_other_buffers", ()))
    form = FlexForm(None if plain else score_mod, block_mask[-1], (sizes[0], sizes[1]), buffers, tuple(block_mask))
    return FusedCall(
        lambda **values: function(*[values[name] for name in _FLEX if name in values]), named, None, False, 0.0,
        float(named["scale"]), output=(0,), flex=form,
    )  # fmt: skip
