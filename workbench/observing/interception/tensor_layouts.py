"""Tensors inside a module's calls: where they stand among arguments and outputs, and how their axes lie.

A `TensorPath` leads to one tensor of a nested structure: `(0, "logits")` is `structure[0]["logits"]`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

TensorPath = tuple[int | str, ...]
_MAX_DEPTH = 3  # decoders nest the stream no deeper


def tensors_in(structure: Any, path: TensorPath = ()) -> Iterator[tuple[TensorPath, Tensor]]:
    """Every tensor of nested tuples, lists, mappings and model outputs, in order, with the path to it."""
    if isinstance(structure, Tensor):
        yield path, structure
    elif len(path) < _MAX_DEPTH:
        sequence = structure if isinstance(structure, tuple | list) else ()
        for key, value in structure.items() if isinstance(structure, Mapping) else enumerate(sequence):
            yield from tensors_in(value, (*path, key))


def get_at(structure: Any, path: TensorPath) -> Any:
    """What stands at a path."""
    for key in path:
        structure = structure[key]
    return structure


def replaced_at(structure: Any, path: TensorPath, value: Tensor) -> Any:
    """A copy of the structure in which `value` stands at the path; everything else is the same object."""
    if not path:
        return value
    inner = replaced_at(structure[path[0]], path[1:], value)
    if isinstance(structure, tuple):
        items = [inner if i == path[0] else item for i, item in enumerate(structure)]
        return type(structure)(*items) if hasattr(structure, "_fields") else type(structure)(items)
    changed = copy.copy(structure)
    changed[path[0]] = inner
    return changed


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


def to_heads(x: Tensor, batch: int) -> Tensor:
    """[..., pos, d_head] with batch and heads in front, however they are grouped -> [batch, pos, head, d_head]."""
    return x.reshape(batch, -1, *x.shape[-2:]).transpose(1, 2)


def from_heads(x: Tensor, like: Tensor) -> Tensor:
    """[batch, pos, head, d_head] -> the layout of `like`."""
    return x.transpose(1, 2).reshape(like.shape)


def head_repeats(*groups: Tensor) -> int:
    """How often each key-value head of all these [batch, pos, head, d_head] stands side by side, exactly."""
    heads = groups[0].shape[2]
    divisors = (n for n in range(heads, 1, -1) if heads % n == 0)
    fits = (n for n in divisors if all(torch.equal(x, x[:, :, ::n].repeat_interleave(n, dim=2)) for x in groups))
    return next(fits, 1)
