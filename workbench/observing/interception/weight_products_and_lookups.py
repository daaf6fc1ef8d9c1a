"""Products with a parameter as a function call, and lookups of vectors in a parameter by token id.

A call stores its original function and arguments, so that running it untouched changes no bit of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def is_parameter(x: Any) -> bool:
    """Return whether it is a parameter or a view of one."""
    return isinstance(x, Tensor) and isinstance(x if x._base is None else x._base, nn.Parameter)


@dataclass(frozen=True)
class MatrixCall:
    """A product with a parameter; `place`: argument that is its input, or None without a single input."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    place: int | str | None

    @property
    def input(self) -> Tensor | None:
        """The activations that are multiplied."""
        if self.place is None:
            return None
        return self.kwargs[self.place] if isinstance(self.place, str) else self.args[self.place]

    def run(self, changed: Tensor | None = None) -> Any:
        """Run the original function, with its input replaced if one is given."""
        call = self if changed is None else self.with_input(changed)
        return call.function(*call.args, **call.kwargs)

    def with_input(self, x: Any) -> MatrixCall:
        """Return the call with another input; None stores no activation."""
        if isinstance(self.place, str):
            return replace(self, kwargs={**self.kwargs, self.place: x})
        return replace(self, args=tuple(x if i == self.place else y for i, y in enumerate(self.args)))


def matrix_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> MatrixCall:
    """Read a call of `linear`, or another product with a parameter."""
    if len(args) == 2 and isinstance(args[0], str) and isinstance(args[1], list | tuple):
        args = args[0], *args[1]  # einsum takes its factors one by one or in a list
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    tensors = [(at, x) for at, x in named if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1]
    linear = getattr(function, "__name__", "") == "linear"
    inputs = [at for at, x in tensors if not is_parameter(x)][: 1 if linear else None]
    return MatrixCall(function, args, kwargs, inputs[0] if len(inputs) == 1 else None)


@dataclass(frozen=True)
class Lookup:
    """A lookup of vectors by token id; the axes of the ids begin at `axis` of the output."""

    ids: Tensor
    table: Any
    output: Any
    axis: int = 0

    @property
    def size(self) -> int:
        """Number of vectors in the table."""
        return int(self.table.shape[self.axis])

    def by_position(self, output: Tensor) -> Tensor:
        """Return [..., width] with the ids' axes in front and all others flattened."""
        ids = range(self.axis, self.axis + self.ids.ndim)
        front = output.permute([*ids, *(i for i in range(output.ndim) if i not in ids)])
        return front.reshape(*front.shape[: self.ids.ndim], -1)

    def restored(self, vectors: Tensor) -> Tensor:
        """Invert `by_position` for vectors [..., width]."""
        rest = [n for i, n in enumerate(self.output.shape) if not self.axis <= i < self.axis + self.ids.ndim]
        x = vectors.reshape(*vectors.shape[:-1], *rest)
        order = [*range(self.ids.ndim, self.ids.ndim + self.axis), *range(self.ids.ndim)]
        return x.permute([*order, *range(len(order), x.ndim)])


def indexed_parameter(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Lookup | None:
    """Read `W[ids]`, `W[:, ids]` or `W.index_select(axis, ids)` of a parameter; None for any other index."""
    table, *rest = (*args, *kwargs.values())
    if not is_parameter(table):
        return None
    if len(rest) == 2:  # index_select
        return Lookup(rest[1], table, output, int(rest[0]) % table.ndim)
    index = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
    by_ids = [i for i, x in enumerate(index) if isinstance(x, Tensor) and x.dtype in _INTEGERS]
    others = [x for i, x in enumerate(index) if i not in by_ids]
    if len(by_ids) != 1 or not all(x is Ellipsis or (isinstance(x, slice) and x == slice(None)) for x in others):
        return None
    skipped = table.ndim - len(index) if Ellipsis in others and index[-1] is not Ellipsis else 0
    return Lookup(index[by_ids[0]], table, output, by_ids[0] + skipped)
