"""Whether one tensor is a norm of another: u = gain * (x - mean x) / divisor + shift, with a divisor for each position.

Fitted in float64 by alternating least squares, so that root-mean-square and layer norms of any library, with or without
weights, a multiple and the identity are all found, and nothing else is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.observing.recognition.least_squares import EXACT

_STEPS = 40  # of alternating least squares; two to five do unless a norm's epsilon weighs
_MIN_ROWS = 4
_NARROWED = 1e-6  # what norms leave that pass through float32 in a float64 model, as Llama's in transformers


@dataclass(frozen=True)
class FrozenNorm:
    """A norm whose divisors are held: linear in what it reads."""

    centred: bool
    gain: Tensor  # float64 [d_model]
    shift: Tensor | None  # float64 [d_model]; None where it adds nothing
    is_narrowed: bool = False  # whether a norm of float64 passes through float32

    def read(self, x: Tensor) -> Tensor:
        """What is divided, [..., d_model]."""
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def divisor(self, x: Tensor, u: Tensor) -> Tensor:
        """The divisors [..., 1] of a run in which it read x and made u [..., d_model]."""
        part, made = self.read(x) * self.gain.to(x), u if self.shift is None else u - self.shift.to(u)
        return part.square().sum(-1, keepdim=True) / (made * part).sum(-1, keepdim=True)


def fit_norm(x: Tensor, u: Tensor) -> FrozenNorm | None:
    """The norm that makes u of x [row, d_model], the simplest that does; None where none does."""
    if x.shape != u.shape or len(x) < _MIN_ROWS or not float(u.norm()):
        return None
    exact = EXACT.get(u.dtype, 1e-2)
    x, u = x.double(), u.double()
    for centred in (False, True):
        part = x - x.mean(-1, keepdim=True) if centred else x
        size = part.square().mean(-1, keepdim=True).sqrt()
        for shifted in (False, True):
            for start in (torch.ones_like(size), size):
                found, left = _alternate(part, u, start.clamp_min(1e-300), shifted)
                if found is not None and left < max(exact, _NARROWED):
                    return FrozenNorm(centred, *found, is_narrowed=left >= exact)
    return None


def _alternate(
    x: Tensor, u: Tensor, divisor: Tensor, shifted: bool
) -> tuple[tuple[Tensor, Tensor | None] | None, float]:
    """Gain and shift [d_model] of u = gain * x / divisor + shift, from a first guess of the divisors [row, 1], and what they leave."""
    size, before, found = float(u.norm()), float("inf"), None
    for _ in range(_STEPS):
        part = x / divisor
        shift, rest = torch.zeros_like(u[0]), part - part.mean(0) if shifted else part
        gain = (rest * u).sum(0) / rest.square().sum(0).clamp_min(1e-300)
        if shifted:
            shift = u.mean(0) - gain * part.mean(0)
        left = float((gain * part + shift - u).norm()) / size
        if not left < 0.9 * before:
            break
        before, found = left, (gain, shift if shifted else None)
        whole = x * gain
        divisor = whole.square().sum(-1, keepdim=True) / ((u - shift) * whole).sum(-1, keepdim=True)
    return found, before
