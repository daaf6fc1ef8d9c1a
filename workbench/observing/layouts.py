"""Tensors inside other people's calls: where they stand among arguments and outputs, and how their axes lie.

A `Path` leads to one tensor of a nested structure: `(0, "logits")` is `thing[0]["logits"]`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Path = tuple[int | str, ...]
_DEPTH = 3  # deeper than this nobody nests the stream


def tensors(thing: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor of nested tuples, lists, mappings and model outputs, in order, with the path to it."""
    if isinstance(thing, Tensor):
        yield path, thing
    elif len(path) < _DEPTH:
        items = thing.items() if isinstance(thing, Mapping) else enumerate(thing) if _listed(thing) else ()
        for key, value in items:
            yield from tensors(value, (*path, key))


def find(thing: Any, wanted: Callable[[Tensor], bool]) -> Path | None:
    """Path of the first tensor that is wanted."""
    return next((path for path, tensor in tensors(thing) if wanted(tensor)), None)


def get(thing: Any, path: Path) -> Any:
    """What stands at a path."""
    for key in path:
        thing = thing[key]
    return thing


def put(thing: Any, path: Path, value: Tensor) -> Any:
    """A copy of the structure in which `value` stands at the path; everything else is the same object."""
    if not path:
        return value
    inner = put(thing[path[0]], path[1:], value)
    if isinstance(thing, tuple):
        items = [inner if i == path[0] else item for i, item in enumerate(thing)]
        return type(thing)(*items) if hasattr(thing, "_fields") else type(thing)(items)
    changed = copy.copy(thing)
    changed[path[0]] = inner
    return changed


def _listed(thing: Any) -> bool:
    return isinstance(thing, tuple | list)


# ---- positions -------------------------------------------------------------------------------------------------------


def by_position(x: Tensor, batch: int, length: int) -> Tensor | None:
    """[batch * pos, width] from [batch, pos, ...], [pos, batch, ...], [batch, head, pos, d_head], [batch * pos, width]."""
    if not x.is_floating_point() or x.ndim < 2:
        return None
    if x.ndim > 2 and x.shape[:2] == (batch, length):
        return x.reshape(batch * length, -1)
    if x.ndim == 3 and x.shape[:2] == (length, batch):
        return x.transpose(0, 1).reshape(batch * length, -1)
    if x.ndim == 4 and (x.shape[0], x.shape[2]) == (batch, length):
        return x.transpose(1, 2).reshape(batch * length, -1)
    return x if x.ndim == 2 and x.shape[0] == batch * length else None


def from_positions(rows: Tensor, like: Tensor, batch: int, length: int) -> Tensor:
    """The inverse of `by_position`, in the layout of `like`."""
    if like.ndim == 4 and like.shape[:2] != (batch, length):
        return rows.view(batch, length, like.shape[1], like.shape[3]).transpose(1, 2)
    if like.ndim == 3 and like.shape[:2] != (batch, length):
        return rows.view(batch, length, -1).transpose(0, 1)
    return rows.view(like.shape)


# ---- heads -----------------------------------------------------------------------------------------------------------


def to_heads(x: Tensor, batch: int) -> Tensor:
    """[..., pos, d_head] with batch and heads in front, however they are grouped -> [batch, pos, head, d_head]."""
    return x.reshape(batch, -1, *x.shape[-2:]).transpose(1, 2)


def from_heads(x: Tensor, like: Tensor) -> Tensor:
    """[batch, pos, head, d_head] -> the layout of `like`."""
    return x.transpose(1, 2).reshape(like.shape)


def repeats_of(*groups: Tensor) -> int:
    """How often each key-value head of all these [batch, pos, head, d_head] stands side by side, exactly."""
    heads = groups[0].shape[2]
    for times in range(heads, 1, -1):
        if heads % times == 0 and all(torch.equal(x, x[:, :, ::times].repeat_interleave(times, dim=2)) for x in groups):
            return times
    return 1
