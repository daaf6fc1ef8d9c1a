"""What follows the last stream of a decoder, found in its numbers: a norm, the head's matrix, and what they add."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.observing.recognition.frozen_norm import FrozenNorm, fit_norm
from workbench.observing.recognition.least_squares import EXACT

NO_NORM = "what the head reads is no norm of the last stream (several streams, another part between them)"
NOT_LINEAR = (
    "the logits are not what the head makes of what it reads: something follows it (a soft cap, a mixture of heads)"
)

_ALMOST = 1e-2
_ROWS = 8192  # of the head that are widened at a time


@dataclass(frozen=True)
class LinearEnding:
    """logits = factor * W norm(x) + bias, all but the divisors of the norm held in any run."""

    norm: FrozenNorm
    factor: float
    bias: Tensor | None  # float64 [d_vocab]; None where nothing is added
    transposed: bool  # whether the head keeps W as [d_model, d_vocab]

    @property
    def words(self) -> str:
        """What it is, in words."""
        norm = "mean and variance" if self.norm.centred else "root mean square"
        added = [word for word, x in (("shift", self.norm.shift), ("bias of the head", self.bias)) if x is not None]
        return ", ".join([norm, *added, *([f"logits times {self.factor:.4g}"] if abs(self.factor - 1) > 1e-6 else [])])


def find_ending(stream: Tensor, read: Tensor, logits: Tensor, weight: Tensor) -> LinearEnding | str:
    """What makes logits [row, d_vocab] of the last stream [row, d_model] through what the head reads; why not, in words."""
    if (norm := fit_norm(stream, read)) is None:
        return NO_NORM
    transposed = weight.shape != (logits.shape[1], read.shape[1])
    matrix = weight.T if transposed else weight
    if matrix.shape != (logits.shape[1], read.shape[1]):
        return NOT_LINEAR
    wide = torch.promote_types(read.dtype, torch.float32)
    made = torch.cat([read.to(wide) @ rows.to(wide).T for rows in matrix.split(_ROWS)], dim=1).double()
    seen = logits.double()
    part, rest = made - made.mean(0), seen - seen.mean(0)
    size = float(part.square().sum())
    factor = float((part * rest).sum()) / size if size else 1.0
    tolerance = EXACT.get(logits.dtype, 1e-2)
    if tolerance < abs(factor - 1) < _ALMOST:
        return NOT_LINEAR  # no factor that anybody chose, but a cap that small logits hardly reach
    factor = 1.0 if abs(factor - 1) <= tolerance else factor
    bias = (seen - factor * made).mean(0)
    if float((factor * made + bias - seen).norm()) > tolerance * float(torch.maximum(seen.norm(), made.norm())):
        return NOT_LINEAR
    adds = float(bias.norm()) * len(seen) ** 0.5 > tolerance * float(seen.norm())
    return LinearEnding(norm, factor, bias if adds else None, transposed)
