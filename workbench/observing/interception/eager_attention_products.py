"""Products of two tensors, the steps of eager attention.

A call stores its original function and arguments, so that running it untouched changes no bit of the output.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from itertools import permutations
from typing import Any, TypeVar

import torch
from torch import Tensor

from workbench.observing.interception.position_axes import BatchAxis

_Result = TypeVar("_Result")
PRODUCTS = {"matmul": 0, "__matmul__": 0, "bmm": 0, "baddbmm": 1}
"""Functions of two matrices by name, and the index of the first among the arguments."""


@dataclass
class ProductCall:
    """A product of two tensors over one shared axis, with a letter for each axis."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    places: tuple[int, int]  # indices of the two tensors among the arguments
    letters: tuple[str, str, str]  # axes of the two and of the result
    batch: BatchAxis | None = None  # axis of the sequences in the original arguments, if known

    def __post_init__(self) -> None:
        self.args = tuple(autocast(x) if i in self.places else x for i, x in enumerate(self.args))

    @property
    def operands(self) -> tuple[Tensor, Tensor]:
        """The two tensors."""
        return self.args[self.places[0]], self.args[self.places[1]]

    def run(self, changed: Mapping[int, Tensor] | None = None) -> Any:
        """Run the original function, with operand 0 or 1 replaced."""
        args = list(self.args)
        for which, value in (changed or {}).items():
            args[self.places[which]] = value
        return self.function(*args, **self.kwargs)

    def batch_first(self, batch: BatchAxis | None, rows: int) -> ProductCall:
        """Return the call with its axis of sequences, and with views [batch, head, ...] of operands [head * batch]."""
        if batch is None or not batch.is_inner:
            return self if batch is None else replace(self, batch=batch)
        given, letters = self.operands, self.letters
        views = [batch.to_front(x, own, rows) for x, own in zip(given, letters, strict=False)]

        @wraps(self.function)
        def run(*args: Any, **kwargs: Any) -> Any:
            values = list(args)
            for place, x, view, own in zip(self.places, given, views, letters, strict=False):
                values[place] = x if values[place] is view else batch.from_front(values[place], own)
            return self.function(*values, **kwargs)

        args = list(self.args)
        for place, view in zip(self.places, views, strict=True):
            args[place] = view
        a, b, out = (batch.letter * (batch.letter in own) + own.replace(batch.letter, "*") for own in letters)
        return ProductCall(run, tuple(args), self.kwargs, self.places, (a, b, out), batch)

    def shown(self, out: Tensor, rows: int) -> Tensor:
        """Return the result with the axes `letters[2]`."""
        if self.batch is None or not self.batch.is_inner:
            return out
        return self.batch.to_front(out, self.letters[2][1:].replace("*", self.batch.letter), rows)

    def unshown(self, out: Tensor) -> Tensor:
        """Invert `shown`."""
        if self.batch is None or not self.batch.is_inner:
            return out
        return self.batch.from_front(out, self.letters[2][1:].replace("*", self.batch.letter))

    def arranged(self, which: int, order: str) -> Tensor:
        """Return an operand with its axes in `order`; a missing axis has length 1."""
        return arrange(self.operands[which], self.letters[which], order)

    def restored(self, which: int, x: Tensor, order: str) -> Tensor:
        """Invert `arranged` for a replacement of the operand."""
        return restore(x, order, self.letters[which])


def autocast(x: Any) -> Any:
    """Return a tensor in the type of a product under `torch.autocast`; anything else unchanged."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def as_written(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Run a function without `torch.autocast` on its first tensor's device."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> _Result:
        device = next(x.device.type for x in args if isinstance(x, Tensor))
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return run


def product_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ProductCall | None:
    """Read a product of two tensors of three axes or more; None for any other call."""
    name = getattr(function, "__name__", "")
    if name == "einsum":
        args = (args[0], *args[1]) if len(args) == 2 and isinstance(args[1], list | tuple) else args
        equation = args[0] if len(args) == 3 else None
        if not isinstance(equation, str) or "->" not in equation:
            return None  # without a named result
        terms, out = equation.replace(" ", "").split("->")
        letters = terms.split(",")
        if len(letters) == 2 and "..." in equation:
            if (spelled := _spelled_out(letters, out, args[1:])) is None:
                return None
            letters, out = spelled
        if len(letters) != 2 or not all(len(set(term)) == len(term) for term in (*letters, out)):
            return None
        return ProductCall(function, args, kwargs, (1, 2), (letters[0], letters[1], out))
    first = PRODUCTS[name]
    if "batch1" in kwargs and "batch2" in kwargs:
        args = (*args[:1], kwargs["batch1"], kwargs["batch2"])
        kwargs = {key: value for key, value in kwargs.items() if not key.startswith("batch")}
    pair = args[first : first + 2]
    if len(pair) < 2 or not all(isinstance(x, Tensor) and x.ndim > 2 for x in pair):
        return None
    lead = "abefgh"[-(max(x.ndim for x in pair) - 2) :]
    a, b = (lead[len(lead) - x.ndim + 2 :] for x in pair)
    return ProductCall(function, args, kwargs, (first, first + 1), (f"{a}ic", f"{b}cj", f"{lead}ij"))


def _spelled_out(terms: list[str], out: str, tensors: tuple[Any, ...]) -> tuple[list[str], str] | None:
    """Return terms and result of an equation with letters for its ellipses; None if they broadcast."""
    counts = [x.ndim - len(term.replace("...", "")) for term, x in zip(terms, tensors, strict=True)]
    widths = {n for term, n in zip(terms, counts, strict=True) if "..." in term}
    free = [c for c in string.ascii_letters if c not in "".join([*terms, out])]
    if "..." not in out or len(widths) != 1 or (n := widths.pop()) > len(free):
        return None
    axes = "".join(free[:n])
    spelled = [term.replace("...", axes) for term in (*terms, out)]
    sizes = [dict(zip(term, x.shape, strict=True)) for term, x in zip(spelled[:2], tensors, strict=True)]
    if any(size != sizes[1].get(c, size) for c, size in sizes[0].items() if c in axes):
        return None  # broadcast over
    return spelled[:2], spelled[2]


def arrange(x: Tensor, letters: str, order: str) -> Tensor:
    """Return a tensor with axes `letters` with its axes in `order`; a missing axis has length 1."""
    x = x.permute([letters.index(c) for c in order if c in letters])
    for place, c in enumerate(order):
        if c not in letters:
            x = x.unsqueeze(place)
    return x


def restore(x: Tensor, order: str, letters: str) -> Tensor:
    """Invert `arrange`."""
    for place in reversed([i for i, c in enumerate(order) if c not in letters]):
        x = x.squeeze(place)
    present = [c for c in order if c in letters]
    return x.permute([present.index(c) for c in letters])


def attention_axes(
    scores: ProductCall, values: ProductCall, pattern: int, rows: int, columns: int, key: str
) -> tuple[tuple[int, str, str], tuple[str, str, str]] | None:
    """Find the axes of q, k, v and z from the two products around a softmax over the axis `key` of the first result.

    Returns (operand that is q, order of q, order of k) and (order of the pattern, of v, of z). Each order starts with the batch of
    `rows` and ends in (query or key, d_head). None for other products.
    """
    first = 0 if key in scores.letters[1] else 1
    lead = _lead(scores, first, scores.letters[2], key, rows, columns)
    used = pattern_order(values, pattern, rows, columns)
    if lead is None or used is None:
        return None
    q, k = (scores.letters[i] for i in (first, 1 - first))
    p, v, z = values.letters[pattern], values.letters[1 - pattern], values.letters[2]
    inner = [c for c in q if c in k and c not in scores.letters[2]]
    width = [c for c in v if c not in p and c in z]
    if len(inner) != 1 or len(width) != 1 or key in q:
        return None
    before, query = lead
    return (
        (first, before + query + inner[0], before + key + inner[0]),
        (used, used[:-2] + used[-1] + width[0], used[:-1] + width[0]),
    )


def softmax_axes(call: ProductCall, shape: torch.Size, axis: int, rows: int, columns: int) -> Iterator[tuple[str, str]]:
    """Yield possible letters of a softmax's input, and their order (lead, query, key), the likeliest last.

    The softmax's axis has moved from `axis` to the end. Yields nothing if the input cannot be the product's result.
    """
    own, sizes = call.letters[2], _sizes(call)
    if len(own) != len(shape):
        return
    same = own[:axis] + own[axis + 1 :] + own[axis]
    orders = ("".join(order) for order in permutations(own) if order[-1] == own[-1])
    for letters in (*(order for order in orders if order != same), same):
        if all(sizes[c] == n for c, n in zip(letters, shape, strict=True)):
            key = letters[-1]
            lead = _lead(call, 0 if key in call.letters[1] else 1, own, key, rows, columns)
            if lead is not None:
                yield letters, "".join(lead) + key


def pattern_order(values: ProductCall, pattern: int, rows: int, columns: int) -> str | None:
    """Return the order (lead, query, key) of the axes of the operand that multiplies values; None if it is no pattern."""
    p, v, z = values.letters[pattern], values.letters[1 - pattern], values.letters[2]
    summed = [c for c in p if c in v and c not in z]
    lead = _lead(values, pattern, p, summed[0], rows, columns) if len(summed) == 1 else None
    return None if lead is None else "".join(lead) + summed[0]


def _sizes(call: ProductCall) -> dict[str, int]:
    """Return the lengths of the axes by letter, the longer of broadcast ones."""
    pairs = zip(call.operands, call.letters, strict=False)
    axes = [each for x, letters in pairs for each in zip(x.shape, letters, strict=True)]
    return {c: n for n, c in sorted(axes)}


def _lead(call: ProductCall, which: int, square: str, key: str, rows: int, columns: int) -> tuple[str, str] | None:
    """Return the letters before queries and keys, the batch first, in the order of the queries or outputs, and the queries' letter."""
    sizes = _sizes(call)
    own = [c for c in square if c in call.letters[which] and c not in call.letters[1 - which] and sizes[c] == columns]
    like = call.letters[which] if square is call.letters[2] else call.letters[2]
    if not own or key not in call.letters[1 - which]:
        return None
    query = square[-2] if square[-2] in own else own[0]
    lead = sorted((c for c in square if c not in (query, key)), key=like.find)
    spelled = getattr(call.function, "__name__", "") == "einsum"  # else the first axis may be [batch * head]
    batch = "" if call.batch is None else call.batch.letter
    if batch and batch in lead:
        lead.sort(key=lambda c: c != batch)
    elif lead and sizes[lead[0]] != rows and (spelled or sizes[lead[0]] % rows):
        lead.sort(key=lambda c: sizes[c] != rows)
    return "".join(lead), query
