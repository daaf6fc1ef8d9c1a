"""Synthetic data with a known answer: random tokens repeated once, which only a copying model predicts.

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

LABELS = string.ascii_lowercase + string.ascii_uppercase + string.digits + "+-"


def repeated_tokens(batch: int, period: int, vocabulary: int, *, generator: torch.Generator) -> torch.Tensor:
    """Independent uniform tokens [batch, period], then the same once more: int64 [batch, 2 * period]."""
    import torch

    _check(batch=(batch, 1), period=(period, 1), vocabulary=(vocabulary, 2))
    first = torch.randint(vocabulary, (batch, period), generator=generator)
    return torch.cat([first, first], dim=1)


@dataclass(frozen=True, kw_only=True)
class RepeatedTokens:
    """A data source of repeated random tokens; every batch depends on (seed, step) alone."""

    vocabulary: int = 64
    period: int = 32

    def __post_init__(self) -> None:
        _check(vocabulary=(self.vocabulary, 2), period=(self.period, 1))

    @property
    def hash(self) -> str:
        """A short content address of the task, not of a batch."""
        return digest("repeated", self.vocabulary, self.period)

    def batch(self, step: int, batch_size: int, seed: int) -> torch.Tensor:
        """The training batch of one step, [batch_size, 2 * period]."""
        _check(step=(step, 0), seed=(seed, 0))
        return repeated_tokens(batch_size, self.period, self.vocabulary, generator=_generator("repeated", seed, step))

    def validation(self, n: int, seed: int = 0) -> torch.Tensor:
        """A fixed held-out set [n, 2 * period], from a stream of numbers that no training step draws from."""
        _check(seed=(seed, 0))
        return repeated_tokens(n, self.period, self.vocabulary, generator=_generator("repeated validation", seed))

    def token_strings(self, ids: Iterable[int]) -> list[str]:
        """Letters, then digits, + and -; from 64 on the number itself, as #64."""
        found = [int(i) for i in ids]
        wrong = next((i for i in found if not 0 <= i < self.vocabulary), None)
        if wrong is not None:
            raise BadData(f"token id {wrong} is not in the vocabulary; ids go from 0 to {self.vocabulary - 1}")
        return [LABELS[i] if i < len(LABELS) else f"#{i}" for i in found]


def _generator(*name: object) -> torch.Generator:
    import torch

    seed = int.from_bytes(hashlib.sha256(repr(name).encode()).digest()[:8], "big") >> 1  # torch wants 63 bits
    return torch.Generator().manual_seed(seed)


def _check(**limits: tuple[object, int]) -> None:
    for name, (value, least) in limits.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadData(f"{name} is {value!r}; give a whole number of at least {least}")
