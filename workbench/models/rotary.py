"""Rotary positions in half-split form: x cos + rot(x) sin, with rot([a; b]) = [-b; a] over the two halves of a head.

Source: Su et al. (2021), RoFormer; the halves as in Llama's published code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS = 256  # of the smallest table; larger ones have a power of two
Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines of some positions, each [length, 1, d_head]."""


class Rotary(nn.Module):
    """Tables of cosines and sines for each device and dtype, as long as the longest sequence so far."""

    def __init__(self, d_head: int, n_ctx: int, theta: float) -> None:
        super().__init__()
        self.d_head, self.n_ctx, self.theta = d_head, n_ctx, theta
        self.tables: dict[tuple[torch.device, torch.dtype], Rotation] = {}

    def forward(self, length: int, like: Tensor, start: int = 0) -> Rotation:
        """Return cosines and signed sines of `length` positions from `start`, on the device and in the dtype of `like`."""
        key = (like.device, like.dtype)
        if torch.compiler.is_compiling():  # a table that grows would recompile the graph
            cos, sin = self._table(like, self.n_ctx)
            return cos[start : start + length], sin[start : start + length]
        if key not in self.tables or len(self.tables[key][0]) < start + length:
            self.tables[key] = self._table(like, max(ROWS, 1 << (start + length - 1).bit_length()))
        cos, sin = self.tables[key]
        return cos[start : start + length], sin[start : start + length]

    @torch.inference_mode(False)  # a table of inference mode could not be used in training
    def _table(self, like: Tensor, rows: int) -> Rotation:
        wide = torch.promote_types(like.dtype, torch.float32)
        exponent = torch.arange(0, self.d_head, 2, device=like.device, dtype=wide) / self.d_head
        position = torch.arange(rows, device=like.device, dtype=wide)
        angle = torch.outer(position, 1.0 / self.theta**exponent)
        cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((-angle.sin(), angle.sin()), -1)
        return cos[:, None].to(like.dtype), sin[:, None].to(like.dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate [batch, pos, head, d_head] by position; the signed sines include the sign of rot()."""
    return (
        x * rotation[0] + x.roll(x.shape[-1] // 2, -1) * rotation[1]
    )  # unfused, for the rounding of the published code
