"""Which positions inside a module are its tokens, and how tensors of positions lie: the batch or positions first, by head, in one row.

Some modules put positions of their own before or after the tokens (registers, a prefix), some write all sequences into one
row. Outside this file every tensor is [batch, pos, ...] of tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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

    def shaped(self, x: Tensor) -> Tensor | None:
        """[batch, pos, ...] of a tensor in any layout: also [pos, batch, ...], [batch, head, pos, d_head], [batch * pos, width].

        None for one that is no floating-point tensor of positions.
        """
        lined = None if not x.is_floating_point() or x.ndim < 2 else self.lined(x)
        if lined is None or lined.shape[:2] == (self.batch, self.length):
            return lined
        return self.cropped(lined)

    def unshaped(self, tokens: Tensor, like: Tensor) -> Tensor:
        """The inverse of `shaped`: `like` with its tokens replaced."""
        lined = self.lined(like)
        assert lined is not None
        tokens = tokens.reshape(self.batch, self.length, *lined.shape[2:])
        if lined.shape[:2] != (self.batch, self.length):
            tokens = self._put(lined, tokens)
        if lined.ndim == like.ndim and lined.shape != like.shape:
            tokens = tokens.transpose(1, 2) if like.ndim == 4 else tokens.transpose(0, 1)
        return tokens.reshape(like.shape)

    def by_position(self, x: Tensor) -> Tensor | None:
        """[batch * pos, width] of such a tensor."""
        shaped = self.shaped(x)
        return None if shaped is None else shaped.reshape(self.batch * self.length, -1)

    def lined(self, x: Tensor) -> Tensor | None:
        """[row, column, ...] of all positions; of tokens alone where those are all it has."""
        for rows, columns in dict.fromkeys(((self.rows, self.columns), (self.batch, self.length))):
            if x.ndim > 2 and x.shape[:2] == (rows, columns):
                return x
            if x.ndim == 3 and x.shape[:2] == (columns, rows):
                return x.transpose(0, 1)
            if x.ndim == 4 and (x.shape[0], x.shape[2]) == (rows, columns):
                return x.transpose(1, 2)
            if x.ndim == 2 and len(x) == rows * columns:
                return x.view(rows, columns, -1)
        return None

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

    def tokens_in(self, ids: Tensor) -> Tensor | None:
        """The tokens' ids [batch, pos] among those of any layout; None where they are not as many."""
        for rows, columns in dict.fromkeys(((self.rows, self.columns), (self.batch, self.length))):
            if ids.shape in ((rows, columns), (columns, rows), (rows * columns,)):
                whole = ids.T if ids.shape == (columns, rows) != (rows, columns) else ids.reshape(rows, columns)
                return whole.reshape(self.batch, -1) if columns == self.length else self.cropped(whole)
        return None

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
