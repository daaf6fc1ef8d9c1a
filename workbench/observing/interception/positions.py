"""Positions inside a module that are its tokens, and the axes of tensors: batch first, positions first, by head, in one row.

Some modules put positions of their own before or after the tokens (registers, a prefix), some write all sequences into one
row. Outside this file every tensor is [batch, pos, ...] of tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

Beside = tuple[int, int]
"""How many positions (or keys) stand before the tokens and after them."""


@dataclass(frozen=True)
class Layout:
    """How a module lays out its tokens, the same for inputs of any size."""

    beside: Beside = (0, 0)
    packed: bool = False  # whether all sequences stand in one row, one after the other
    turned: bool = False  # whether streams are [pos, batch, d_model]

    @property
    def words(self) -> str:
        """What is unusual about it, in words; empty where nothing is."""
        before, after = self.beside
        told = [f"{n} positions {where} the tokens" for n, where in ((before, "before"), (after, "after")) if n]
        notes = (
            [f"{' and '.join(told)} are no tokens (registers, a prefix): what goes there is shown as null"]
            if told
            else []
        )
        notes += ["all sequences stand in one row inside the module: they are shown one by one"] if self.packed else []
        notes += (
            ["streams are [pos, batch, d_model] inside the module: hooks get and give [batch, pos, d_model]"]
            if self.turned
            else []
        )
        return "; ".join(notes)

    def turn(self) -> Layout:
        """The same with positions first."""
        return replace(self, turned=True)


@dataclass(frozen=True)
class Axes:
    """The axes of a tensor's sequences and positions; the same axis if [batch * pos] is one."""

    batch: int = 0
    pos: int = 1
    is_inside: bool = False  # whether it has all the module's positions, also those that are no tokens


class BatchAxis(NamedTuple):
    """Which axis of a call's tensors holds the sequences, by its letter among the letters of a tensor's axes."""

    letter: str = "a"
    is_inner: bool = False  # whether that axis is [head * batch]; else it is [batch] or [batch * head]

    def to_front(self, x: Tensor, letters: str, rows: int) -> Tensor:
        """Return a view [batch, ...] of a tensor with these axes; heads before the sequences get an axis of their own."""
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

    def front_letters(self, letters: str) -> str:
        """Return the letters of the axes that `to_front` gives: `*` for heads that shared the axis of the sequences."""
        return self.letter * (self.letter in letters) + letters.replace(self.letter, "*" if self.is_inner else "")


BATCH_FIRST = BatchAxis()
"""The axis of the sequences in most calls."""
UNKNOWN_ORDER = BatchAxis("?")
"""The axis of a call that may have its sequences before or after its heads."""


class Positions:
    """A layout for `batch` sequences of `length` tokens."""

    def __init__(self, batch: int, length: int, layout: Layout | None = None) -> None:
        self.batch, self.length, self.layout = batch, length, layout or Layout()
        packed, before = self.layout.packed, sum(self.layout.beside)
        self.rows, self.columns = (1, batch * length) if packed else (batch, length + before)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """[row, column] of streams: those in one row may stand so inside attention alone."""
        inside = (self.rows, self.columns)
        return (inside, (self.batch, self.length)) if self.layout.packed else (inside,)

    # ---- tensors with one axis of positions --------------------------------------------------------------------------

    def fitting(self, shape: Sequence[int]) -> list[Axes]:
        """Return the axes that a tensor of this shape may have by their lengths alone.

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
        """[batch * pos, width] of such a tensor."""
        shaped = self.shaped(x, axes)
        return None if shaped is None else shaped.reshape(self.batch * self.length, -1)

    def lined(self, x: Tensor, axes: Axes) -> Tensor:
        """Return a tensor with these axes as [row, column, ...], with all positions that it has."""
        if axes.batch == axes.pos:
            return x.unflatten(0, self._lengths(axes))
        return x if (axes.batch, axes.pos) == (0, 1) else x.movedim((axes.batch, axes.pos), (0, 1))

    def cropped(self, x: Tensor, beside: Beside | None = None) -> Tensor:
        """[row, column, ...] -> [batch, pos, ...]."""
        if self.layout.packed:
            return x.reshape(self.batch, self.length, *x.shape[2:])
        before, after = self.layout.beside if beside is None else beside
        return x.narrow(1, before, x.shape[1] - before - after) if before or after else x

    def _put(self, x: Tensor, tokens: Tensor, beside: Beside | None = None) -> Tensor:
        """The inverse of `cropped`."""
        before, after = self.layout.beside if beside is None else beside
        if self.layout.packed or not (before or after):
            return tokens.reshape(x.shape)
        whole = x.clone()
        self.cropped(whole, beside).copy_(tokens)
        return whole

    def are_tokens(self, ids: Tensor, tokens: Tensor) -> bool:
        """Return whether ids of any layout are these tokens [batch, pos], with or without ids of other positions."""
        for rows, columns in dict.fromkeys(((self.rows, self.columns), (self.batch, self.length))):
            lined = [ids.reshape(rows, columns)] if ids.shape in ((rows, columns), (rows * columns,)) else []
            lined += [ids.T] if ids.shape == (columns, rows) else []
            for each in lined:
                found = each.reshape(self.batch, -1) if columns == self.length else self.cropped(each)
                if torch.equal(found, tokens):
                    return True
        return False

    # ---- operands of attention ---------------------------------------------------------------------------------------

    def heads(self, x: Tensor, beside: Beside | None = None) -> Tensor:
        """[..., pos, d_head] with batch and heads in front, however they are grouped -> [batch, pos, head, d_head]."""
        return self.cropped(self.all_heads(x), beside)

    def all_heads(self, x: Tensor) -> Tensor:
        """The same, of all positions."""
        return x.reshape(self.rows, -1, *x.shape[-2:]).transpose(1, 2)

    def from_heads(self, heads: Tensor, like: Tensor, beside: Beside | None = None) -> Tensor:
        """The inverse of `heads`: `like` with those of its tokens replaced."""
        whole = self._put(self.all_heads(like), heads, beside) if heads.shape[1] != like.shape[-2] else heads
        return whole.transpose(1, 2).reshape(like.shape)

    def square(self, x: Tensor, beside: Beside | None = None) -> Tensor:
        """[..., pos, pos] of scores or a pattern -> [batch, head, query, key] of tokens."""
        return self._tokens_of(x.reshape(self.rows, -1, *x.shape[-2:]), beside)

    def from_square(self, square: Tensor, like: Tensor, beside: Beside | None = None) -> Tensor:
        """The inverse of `square`: `like` with what stands between tokens replaced."""
        if square.numel() == like.numel():
            return square.reshape(like.shape)
        whole = like.clone(memory_format=torch.contiguous_format)
        self._tokens_of(whole.view(self.rows, -1, *like.shape[-2:]), beside).copy_(square)
        return whole

    def _tokens_of(self, x: Tensor, beside: Beside | None) -> Tensor:
        """The part of [row, head, query, key] that lies between tokens of one sequence: a view."""
        if self.layout.packed:
            each = x.unflatten(2, (self.batch, self.length)).unflatten(4, (self.batch, self.length))
            return each[0].diagonal(dim1=1, dim2=3).permute(3, 0, 1, 2)
        before, after = self.layout.beside
        x = x.narrow(2, before, x.shape[2] - before - after) if before or after else x
        before, after = self.layout.beside if beside is None else beside
        return x.narrow(3, before, x.shape[3] - before - after) if before or after else x
