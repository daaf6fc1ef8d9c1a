"""Synthetic data with a known answer: random tokens repeated, which only a copying model predicts.

The second half equals the first, so its loss falls to 0 where induction works; the first half stays at ln(vocabulary).
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.errors import BadData
from workbench.files import digest

if TYPE_CHECKING:
    import torch

SYMBOLS = string.ascii_lowercase + string.ascii_uppercase + string.digits + "+-"


def repeated_tokens(
    batch: int, period: int, vocabulary: int, *, generator: torch.Generator, shortest: int | None = None
) -> torch.Tensor:
    """Independent uniform tokens repeated to a length of 2 * period: int64 [batch, 2 * period].

    Every sequence repeats after `period` tokens; with `shortest` after a number drawn from shortest..period for each, so
    that looking back a fixed distance, without recognising the token, is no longer enough.
    """
    import torch

    _check(batch=(batch, 1), period=(period, 1), vocabulary=(vocabulary, 2))
    first = torch.randint(vocabulary, (batch, period), generator=generator)
    if shortest is None:
        return torch.cat([first, first], dim=1)
    periods = torch.randint(shortest, period + 1, (batch, 1), generator=generator)
    return first.gather(1, torch.arange(2 * period) % periods)


@dataclass(frozen=True, kw_only=True)
class RepeatedTokens:
    """A data source of repeated random tokens; every batch depends on (seed, step) alone."""

    vocabulary: int = 64
    period: int = 32
    shortest: int | None = None

    def __post_init__(self) -> None:
        _check(vocabulary=(self.vocabulary, 2), period=(self.period, 1))
        if self.shortest is not None and not 1 <= self.shortest <= self.period:
            raise BadData(f"shortest is {self.shortest}; it must lie within 1..{self.period}, the longest period")

    @property
    def hash(self) -> str:
        """A short content address of the task, not of a batch."""
        return digest("repeated", self.vocabulary, self.period, self.shortest)

    def batch(self, step: int, batch_size: int, seed: int) -> torch.Tensor:
        """The training batch of one step, [batch_size, 2 * period]."""
        _check(step=(step, 0), seed=(seed, 0))
        generator = _generator("repeated", seed, step)
        return repeated_tokens(batch_size, self.period, self.vocabulary, generator=generator, shortest=self.shortest)

    def validation(self, n: int, seed: int = 0) -> torch.Tensor:
        """A fixed held-out set [n, 2 * period] of the longest period, from numbers that no training step draws."""
        _check(seed=(seed, 0))
        return repeated_tokens(n, self.period, self.vocabulary, generator=_generator("repeated validation", seed))

    def token_strings(self, ids: Iterable[int]) -> list[str]:
        """Letters, then digits, + and -; from 64 on the number itself, as #64."""
        found = [int(i) for i in ids]
        wrong = next((i for i in found if not 0 <= i < self.vocabulary), None)
        if wrong is not None:
            raise BadData(f"token id {wrong} is not in the vocabulary; ids go from 0 to {self.vocabulary - 1}")
        return [SYMBOLS[i] if i < len(SYMBOLS) else f"#{i}" for i in found]


def _generator(*name: object) -> torch.Generator:
    import torch

    seed = int.from_bytes(hashlib.sha256(repr(name).encode()).digest()[:8], "big") >> 1  # torch wants 63 bits
    return torch.Generator().manual_seed(seed)


def _check(**limits: tuple[object, int]) -> None:
    for name, (value, least) in limits.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadData(f"{name} is {value!r}; give a whole number of at least {least}")
