"""Paths to tensors in the arguments and outputs of a module, and repeated heads.

A `TensorPath` leads to one tensor of a nested structure: `(0, "logits")` is `structure[0]["logits"]`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

TensorPath = tuple[int | str, ...]
_MAX_DEPTH = 3  # nesting of the stream in decoders
_MAX_OUTPUT_DEPTH = 8


def tensors_in(
    structure: Any, path: TensorPath = (), *, depth: int = _MAX_DEPTH
) -> Iterator[tuple[TensorPath, Tensor]]:
    """Yield every tensor of nested sequences, mappings, dataclasses and namespaces with its path."""
    if isinstance(structure, Tensor):
        yield path, structure
    elif len(path) < depth:
        for key, value in _items(structure, any_object=depth > _MAX_DEPTH):
            yield from tensors_in(value, (*path, key), depth=depth)


def tensors_of_output(output: Any) -> dict[TensorPath, Tensor]:
    """Return every tensor of a module's output by its path, including attributes of any object."""
    return dict(tensors_in(output, depth=_MAX_OUTPUT_DEPTH))


def ids_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the token ids [batch, pos] of a call: its first tensor of integers with two axes, or None."""
    inputs = (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
    return next((t for t in inputs if t.ndim == 2 and t.dtype != torch.bool and not t.is_floating_point()), None)


def _items(structure: Any, *, any_object: bool) -> Iterable[tuple[int | str, Any]]:
    """Return the parts of a structure by key, position or attribute name."""
    if isinstance(structure, Mapping):
        return structure.items()
    if isinstance(structure, Sequence):
        return () if isinstance(structure, str | bytes | range) else enumerate(structure)
    is_record = isinstance(structure, SimpleNamespace) or is_dataclass(structure)
    if isinstance(structure, type | nn.Module) or callable(structure) or not (is_record or any_object):
        return ()
    slots = [name for c in type(structure).__mro__ for name in getattr(c, "__slots__", ())]
    return [(n, getattr(structure, n)) for n in (*getattr(structure, "__dict__", ()), *slots) if hasattr(structure, n)]


def get_at(structure: Any, path: TensorPath) -> Any:
    """Return the value at a path."""
    for key in path:
        indexed = isinstance(structure, Mapping | Sequence)
        structure = structure[key] if indexed else getattr(structure, str(key))
    return structure


def replaced_at(structure: Any, path: TensorPath, value: Tensor) -> Any:
    """Return a copy of the structure with `value` at the path; all else is the same object."""
    if not path:
        return value
    inner = replaced_at(get_at(structure, path[:1]), path[1:], value)
    if isinstance(structure, tuple):
        items = [inner if i == path[0] else item for i, item in enumerate(structure)]
        return type(structure)(*items) if hasattr(structure, "_fields") else type(structure)(items)
    changed = copy.copy(structure)
    if isinstance(structure, Mapping | Sequence):
        changed[path[0]] = inner
    else:
        object.__setattr__(changed, str(path[0]), inner)  # a frozen dataclass too
    return changed


def head_repeats(*groups: Tensor) -> int:
    """Return how many adjacent heads are equal copies in all of these [batch, pos, head, d_head]."""
    heads = groups[0].shape[2]
    divisors = (n for n in range(heads, 1, -1) if heads % n == 0)
    fits = (n for n in divisors if all(torch.equal(x, x[:, :, ::n].repeat_interleave(n, dim=2)) for x in groups))
    return next(fits, 1)
