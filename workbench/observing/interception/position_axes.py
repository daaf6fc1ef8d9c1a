"""Token positions inside a module, and the axes of its tensors: batch first, positions first, by head, in one row.

Some modules add positions before or after the tokens (registers, a prefix), and some put all sequences into one row. Outside this
file every tensor is [batch, pos, ...] of tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Beside = tuple[int, int]
"""Number of positions (or keys) before the tokens and after them."""
ALL_KEYS: Beside = (0, 0)
"""Leaves no keys out."""


@dataclass(frozen=True)
class Layout:
    """Layout of the tokens in a module, the same for inputs of any size."""

    beside: Beside = (0, 0)
    packed: bool = False  # whether all sequences follow one another in one row
    turned: bool = False  # whether streams are [pos, batch, d_model]

    @property
    def words(self) -> str:
        """Description of an unusual layout, else empty."""
        sides = zip(self.beside, ("before", "after"), strict=True)
        more = " and ".join(f"{n} positions {side} the tokens" for n, side in sides if n)
        notes = {
            f"{more} are no tokens (registers, a prefix): what goes there is shown as null": bool(more),
            "all sequences stand in one row inside the module: they are shown one by one": self.packed,
            "streams are [pos, batch, d_model] inside the module: hooks get and give [batch, pos, d_model]": self.turned,
        }
        return "; ".join(note for note, applies in notes.items() if applies)


@dataclass(frozen=True)
class Axes:
    """The axes of sequences and positions in a tensor, equal for [batch * pos]."""

    batch: int = 0
    pos: int = 1
    is_inside: bool = False  # whether the tensor has all the module's positions, not the tokens alone


class BatchAxis(NamedTuple):
    """The axis of the sequences in a call's tensors, by its letter."""

    letter: str = "a"
    is_inner: bool = False  # whether the axis is [head * batch], not [batch] or [batch * head]

    def to_front(self, x: Tensor, letters: str, rows: int) -> Tensor:
        """Return a view [batch, ...] of a tensor with these axes, with a separate axis for heads."""
        if self.letter not in letters:
            return x
        place = letters.index(self.letter)
        if self.is_inner:
            x = x.unflatten(place, (-1, rows if x.shape[place] > 1 else 1))
        return x.movedim(place + self.is_inner, 0)

    def from_front(self, x: Tensor, letters: str) -> Tensor:
        """Invert `to_front`."""
        if self.letter not in letters:
            return x
        place = letters.index(self.letter)
        x = x.movedim(0, place + self.is_inner)
        return x.flatten(place, place + 1) if self.is_inner else x


BATCH_FIRST = BatchAxis()
"""Axis of the sequences in most calls."""
UNKNOWN_ORDER = BatchAxis("?")
"""Axis of the sequences in a call that may have them before or after its heads."""


class Positions:
    """Positions of `batch` sequences of `length` tokens in a layout."""

    def __init__(self, batch: int, length: int, layout: Layout | None = None) -> None:
        self.batch, self.length, self.layout = batch, length, layout or Layout()
        packed, before = self.layout.packed, sum(self.layout.beside)
        self.rows, self.columns = (1, batch * length) if packed else (batch, length + before)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Possible [row, column] of streams: sequences may be in one row inside attention alone."""
        inside = (self.rows, self.columns)
        return (inside, (self.batch, self.length)) if self.layout.packed else (inside,)

    def fitting(self, shape: Sequence[int]) -> list[Axes]:
        """Return the axes that fit a tensor's shape.

        [batch, pos, ...], [pos, batch, width], [batch, head, pos, d_head] or [batch * pos, width].
        """
        orders = {2: ((0, 0),), 3: ((0, 1), (1, 0))}.get(len(shape), ((0, 1), (0, 2)) if len(shape) == 4 else ((0, 1),))
        insides = (True, False) if self.layout.packed or any(self.layout.beside) else (False,)
        fits = [Axes(*order, inside) for inside in insides for order in orders] if len(shape) > 1 else []
        return [axes for axes in fits if self.fits(shape, axes)]

    def fits(self, shape: Sequence[int], axes: Axes) -> bool:
        """Return whether these axes of a tensor have the lengths of the run."""
        rows, columns = self._lengths(axes)
        if axes.batch == axes.pos:
            return len(shape) == 2 and shape[0] == rows * columns
        return len(shape) > 2 and len(shape) > axes.pos and (shape[axes.batch], shape[axes.pos]) == (rows, columns)

    def _lengths(self, axes: Axes) -> tuple[int, int]:
        return (self.rows, self.columns) if axes.is_inside else (self.batch, self.length)

    def shaped(self, x: Tensor, axes: Axes) -> Tensor | None:
        """Return a tensor with these axes as [batch, pos, ...], or None if it has other positions."""
        if not x.is_floating_point() or not self.fits(x.shape, axes):
            return None
        lined = self.lined(x, axes)
        return self.cropped(lined) if axes.is_inside else lined

    def unshaped(self, tokens: Tensor, like: Tensor, axes: Axes) -> Tensor:
        """Invert `shaped`: return `like` with its tokens replaced."""
        lined = self.lined(like, axes)
        tokens = tokens.reshape(self.batch, self.length, *lined.shape[2:])
        if axes.is_inside:
            tokens = self._put(lined, tokens)
        if axes.batch == axes.pos:
            return tokens.reshape(like.shape)
        return tokens.movedim((0, 1), (axes.batch, axes.pos))

    def by_position(self, x: Tensor, axes: Axes) -> Tensor | None:
        """Return [batch * pos, width] of such a tensor, or None."""
        shaped = self.shaped(x, axes)
        return None if shaped is None else shaped.reshape(self.batch * self.length, -1)

    def lined(self, x: Tensor, axes: Axes) -> Tensor:
        """Return a tensor with these axes as [row, column, ...] of all its positions."""
        if axes.batch == axes.pos:
            return x.unflatten(0, self._lengths(axes))
        return x if (axes.batch, axes.pos) == (0, 1) else x.movedim((axes.batch, axes.pos), (0, 1))

    def cropped(self, x: Tensor, beside: Beside | None = None) -> Tensor:
        """Return the tokens [batch, pos, ...] of [row, column, ...]."""
        if self.layout.packed:
            return x.reshape(self.batch, self.length, *x.shape[2:])
        beside = self.layout.beside if beside is None else beside
        return x.narrow(1, beside[0], self.length) if any(beside) else x

    def _put(self, x: Tensor, tokens: Tensor, beside: Beside | None = None) -> Tensor:
        """Invert `cropped`."""
        before, after = self.layout.beside if beside is None else beside
        if self.layout.packed or not (before or after):
            return tokens.reshape(x.shape)
        whole = x.clone()
        self.cropped(whole, beside).copy_(tokens)
        return whole

    def are_tokens(self, ids: Tensor, tokens: Tensor) -> bool:
        """Return whether ids in any layout are the tokens [batch, pos], with or without other positions."""
        for rows, columns in dict.fromkeys(((self.rows, self.columns), (self.batch, self.length))):
            lined = [ids.reshape(rows, columns)] if ids.shape in ((rows, columns), (rows * columns,)) else []
            lined += [ids.T] if ids.shape == (columns, rows) else []
            for each in lined:
                if torch.equal(each.reshape(self.batch, -1) if columns == self.length else self.cropped(each), tokens):
                    return True
        return False

    def heads(self, x: Tensor, beside: Beside | None = None) -> Tensor:
        """Return the tokens [batch, pos, head, d_head] of [..., pos, d_head] with batch and heads in front."""
        return self.cropped(self.all_heads(x), beside)

    def all_heads(self, x: Tensor) -> Tensor:
        """Return all positions [row, column, head, d_head]."""
        return x.reshape(self.rows, -1, *x.shape[-2:]).transpose(1, 2)

    def from_heads(self, heads: Tensor, like: Tensor, beside: Beside | None = None) -> Tensor:
        """Invert `heads`: return `like` with its tokens replaced."""
        heads = self._put(self.all_heads(like), heads, beside) if heads.shape[1] != like.shape[-2] else heads
        return heads.transpose(1, 2).reshape(like.shape)

    def square(self, x: Tensor, beside: Beside | None = None) -> Tensor:
        """Return scores or a pattern [..., pos, pos] as [batch, head, query, key] of tokens."""
        return self._tokens_of(x.reshape(self.rows, -1, *x.shape[-2:]), beside)

    def from_square(self, square: Tensor, like: Tensor, beside: Beside | None = None) -> Tensor:
        """Invert `square`: return `like` with its entries between tokens replaced."""
        if square.numel() == like.numel():
            return square.reshape(like.shape)
        whole = like.clone(memory_format=torch.contiguous_format)
        self._tokens_of(whole.view(self.rows, -1, *like.shape[-2:]), beside).copy_(square)
        return whole

    def _tokens_of(self, x: Tensor, beside: Beside | None) -> Tensor:
        """Return a view of [row, head, query, key] between tokens of one sequence."""
        if self.layout.packed:
            each = x.unflatten(2, (self.batch, self.length)).unflatten(4, (self.batch, self.length))
            return each[0].diagonal(dim1=1, dim2=3).permute(3, 0, 1, 2)
        x = x.narrow(2, self.layout.beside[0], self.length) if any(self.layout.beside) else x
        beside = self.layout.beside if beside is None else beside
        return x.narrow(3, beside[0], self.length) if any(beside) else x
