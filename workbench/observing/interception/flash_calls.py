"""Direct calls of the kernels of flash_attn 2 and 3 and of `torch.nn.attention.varlen`.

Their public functions (packed or not, of one length or many) all call a few torch operators, which are read here by the names
of their arguments. Source: Dao-AILab/flash-attention, `flash_attn_interface.py`: tensors are [batch, pos, head, d_head],
or [pos, head, d_head] of sequences in one row that `cu_seqlens` divides; masks are aligned at the bottom right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.observing.interception.sdpa_and_flex_attention import FlexForm, FusedCall

OPERATORS = (
    "flash_attn._flash_attn_forward", "flash_attn._flash_attn_varlen_forward", "flash_attn_3._flash_attn_forward",
    "torch_attn._varlen_attn", "aten._flash_attention_forward",
)  # fmt: skip
_OURS = {
    "q": "query", "k": "key", "v": "value", "softmax_scale": "scale", "is_causal": "causal", "cu_seqlens_q": "starts",
    "cu_seq_q": "starts", "cum_seq_q": "starts", "cu_seqlens_k": "key_starts", "cu_seq_k": "key_starts", "cum_seq_k": "key_starts",
}  # fmt: skip
_READ = {
    *_OURS.values(), "dropout_p", "window_size", "window_size_left", "window_size_right", "softcap", "alibi_slopes",
}  # fmt: skip
_NO_MATTER = (
    "max_seqlen_q", "max_seqlen_k", "max_q", "max_k", "return_softmax", "return_debug_mask", "zero_tensors", "num_splits", "enable_gqa",
    "rotary_interleaved", "scheduler_metadata", "pack_gqa", "sm_margin",
)  # fmt: skip


def is_flash(function: Any) -> bool:
    """Return whether a torch operator is in `OPERATORS`."""
    return str(function).removesuffix(".default") in OPERATORS


def flash_call(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FusedCall:
    """Read a call of one of `OPERATORS`; raises `WorkbenchError` for unsupported arguments."""
    arguments = getattr(function, "default", function)._schema.arguments
    names = [str(a.name) for a in arguments]
    given: dict[str, Any] = {str(a.name): a.default_value for a in arguments}
    given |= dict(zip(names, args, strict=False)) | dict(kwargs)
    read = {_OURS.get(name, name): value for name, value in given.items() if _OURS.get(name, name) in _READ}
    others = {n: value for n, value in given.items() if _OURS.get(n, n) not in (*_READ, *_NO_MATTER)}
    unread = [n for n, value in others.items() if value is not None and (isinstance(value, Tensor) or bool(value))]
    starts, key_starts = read.get("starts"), read.get("key_starts")
    if starts is not None and key_starts is not None and not torch.equal(starts, key_starts):
        unread.append("cu_seqlens_k, which are not cu_seqlens_q")
    if unread:
        raise WorkbenchError(f"a call of {function} with {', '.join(unread)}: give whole sequences and their own keys")
    own = {"query": names[0], "key": names[1], "value": names[2]}

    def run(**values: Any) -> Any:
        changed = {name: values[ours].transpose(-3, -2) for ours, name in own.items()}
        placed = [changed.get(name, value) for name, value in zip(names, args, strict=False)]
        return function(*placed, **{name: changed.get(name, value) for name, value in kwargs.items()})

    named = {name: read[name].transpose(-3, -2) for name in own}
    scale = named["query"].shape[-1] ** -0.5 if read["scale"] is None else float(read["scale"])
    form, causal = _form(read, named)
    return FusedCall(
        run, named, None, causal, float(read.get("dropout_p") or 0.0), scale, output=(0,), heads_first=False, flex=form
    )


def _form(read: Mapping[str, Any], named: Mapping[str, Tensor]) -> tuple[FlexForm | None, bool]:
    """Return windows, documents and score changes as functions; without any, None and whether the call is causal."""
    left, right = read.get("window_size") or (read.get("window_size_left"), read.get("window_size_right"))
    left, right = (-1 if side is None else int(side) for side in (left, right))
    right = 0 if read["causal"] else right
    queries, keys = (named[name].shape[-2] for name in ("query", "key"))
    starts, cap, slopes = read.get("starts"), float(read.get("softcap") or 0.0), read.get("alibi_slopes")
    changes = cap > 0 or slopes is not None
    if starts is None and not changes and left < 0 and (right < 0 or (right == 0 and queries == keys)):
        return None, right == 0
    which = None  # the index of the sequence at each position of one row
    if starts is not None:
        which = torch.bucketize(torch.arange(queries, device=starts.device), starts[1:].to(torch.long), right=True)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        ahead = j - i - (keys - queries)
        allowed = ahead <= (right if right >= 0 else keys)
        allowed = allowed & (ahead >= -left) if left >= 0 else allowed
        return allowed if which is None else allowed & (which[i] == which[j])

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return cap * tanh(score / cap), minus slope * distance."""
        score = cap * torch.tanh(score / cap) if cap > 0 else score
        if slopes is None:
            return score
        slope = slopes[h] if slopes.ndim == 1 else slopes[b if which is None else which[i], h]
        return score - slope * (j - i - (keys - queries)).abs()

    return FlexForm(change if changes else None, seen, (1, 1), ((), ())), False
