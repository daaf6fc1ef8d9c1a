"""Tensors inside a module's calls: where they stand among arguments and outputs, and whether heads repeat.

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


def head_repeats(*groups: Tensor) -> int:
    """How often each key-value head of all these [batch, pos, head, d_head] stands side by side, exactly."""
    heads = groups[0].shape[2]
    divisors = (n for n in range(heads, 1, -1) if heads % n == 0)
    fits = (n for n in divisors if all(torch.equal(x, x[:, :, ::n].repeat_interleave(n, dim=2)) for x in groups))
    return next(fits, 1)
