"""Synthetic tasks: repeated random tokens (induction), and a bigram chain with trigger tokens (Bigram-Backcopy).

With induction, the loss falls to 0 in the repeated half and stays at ln(vocabulary) in the first half. In Bigram-Backcopy a head is needed
only after a trigger and rests at other positions.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from workbench.errors import BadData
from workbench.files import digest

if TYPE_CHECKING:
    import torch

SYMBOLS = string.ascii_lowercase + string.ascii_uppercase + string.digits + "+-"


def repeated_tokens(
    batch: int, period: int, vocabulary: int, *, generator: torch.Generator, shortest: int | None = None
) -> torch.Tensor:
    """Return uniform random tokens, repeated to a length of 2 * period: int64 [batch, 2 * period].

    Every sequence repeats after `period` tokens. With `shortest`, each has a period drawn from shortest..period, so that looking
    back a fixed distance is not enough.
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
    """A source of repeated random tokens; a batch depends on (seed, step) alone."""

    vocabulary: int = 64
    period: int = 32
    shortest: int | None = None

    def __post_init__(self) -> None:
        _check(vocabulary=(self.vocabulary, 2), period=(self.period, 1))
        if self.shortest is not None and not 1 <= self.shortest <= self.period:
            raise BadData(f"shortest is {self.shortest}; it must lie within 1..{self.period}, the longest period")

    @property
    def hash(self) -> str:
        """Hash of the task's settings."""
        return digest("repeated", self.vocabulary, self.period, self.shortest)

    def batch(self, step: int, batch_size: int, seed: int) -> torch.Tensor:
        """The training batch of one step, [batch_size, 2 * period]."""
        _check(step=(step, 0), seed=(seed, 0))
        generator = _generator("repeated", seed, step)
        return repeated_tokens(batch_size, self.period, self.vocabulary, generator=generator, shortest=self.shortest)

    def validation(self, n: int, seed: int = 0) -> torch.Tensor:
        """Return a fixed validation set [n, 2 * period] of the longest period, apart from all training steps."""
        _check(seed=(seed, 0))
        return repeated_tokens(n, self.period, self.vocabulary, generator=_generator("repeated validation", seed))

    def token_strings(self, ids: Iterable[int]) -> list[str]:
        """Return a letter, digit, + or - for each id, and #64 and so on from 64 on."""
        checked = [int(i) for i in ids]
        wrong = next((i for i in checked if not 0 <= i < self.vocabulary), None)
        if wrong is not None:
            raise BadData(f"token id {wrong} is not in the vocabulary; ids go from 0 to {self.vocabulary - 1}")
        return [SYMBOLS[i] if i < len(SYMBOLS) else f"#{i}" for i in checked]


START = 0
SHARPNESS = 2.0  # standard deviation of the chain's log odds: most rows have a few likely followers


def backcopy_tokens(
    batch: int, T: int, chain: torch.Tensor, triggers: torch.Tensor, *, generator: torch.Generator
) -> torch.Tensor:
    """Return sequences of a bigram chain, in which the token before a trigger follows the trigger: int64 [batch, T].

    Token 0 is START. `chain` [vocabulary, vocabulary] has the probability of the next token (column) after each token (row). It must not
    lead to START, nor from START to a trigger. `triggers` [vocabulary] marks the trigger tokens.
    """
    import torch

    _check(batch=(batch, 1), T=(T, 2))
    if bool(chain[:, START].any()) or bool(chain[START, triggers].any()):
        raise BadData("the chain leads to START, or from START to a trigger; give those pairs probability 0")
    ids = torch.full((batch, T), START)
    for t in range(1, T):
        last = ids[:, t - 1]
        drawn = torch.multinomial(chain[last], 1, generator=generator)[:, 0]
        ids[:, t] = torch.where(triggers[last], ids[:, max(t - 2, 0)], drawn)
    return ids


@dataclass(frozen=True, kw_only=True)
class BackcopyTokens:
    """Bigram-Backcopy after Guo et al. (2024), Active-Dormant Attention Heads (arXiv 2410.13835); 0 is the start token.

    Their chain is from letters of Shakespeare; ours is the softmax of N(0, 2^2) log odds, the same for every seed. Triggers are the last
    ids. Without `start` a sequence begins inside the chain.
    """

    vocabulary: int = 64
    triggers: int = 4
    start: bool = True

    def __post_init__(self) -> None:
        _check(vocabulary=(self.vocabulary, 4), triggers=(self.triggers, 1))
        if self.triggers > self.vocabulary - 3:
            most = f"a vocabulary of {self.vocabulary} leaves at most {self.vocabulary - 3}"
            raise BadData(f"triggers is {self.triggers}; {most}")

    @property
    def hash(self) -> str:
        """Hash of the task's settings."""
        return digest("backcopy", self.vocabulary, self.triggers, *([] if self.start else ["no start"]))

    @cached_property
    def is_triggering(self) -> torch.Tensor:
        """Mask of trigger tokens [vocabulary]."""
        import torch

        return torch.arange(self.vocabulary) >= self.vocabulary - self.triggers

    def is_trigger(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return whether each token is a trigger."""
        return tokens >= self.vocabulary - self.triggers

    @cached_property
    def chain(self) -> torch.Tensor:
        """Probabilities of the next token [vocabulary, vocabulary]; rows of triggers are unused."""
        import torch

        odds = SHARPNESS * torch.randn(self.vocabulary, self.vocabulary, generator=_generator("backcopy chain"))
        odds[:, START] = -torch.inf
        odds[START, self.is_triggering] = -torch.inf
        return odds.softmax(1)

    def batch(self, step: int, batch_size: int, T: int, seed: int) -> torch.Tensor:
        """The training batch of one step, [batch_size, T]."""
        _check(step=(step, 0), seed=(seed, 0))
        return self._drawn(batch_size, T, _generator("backcopy", seed, step))

    def validation(self, n: int, T: int, seed: int = 0) -> torch.Tensor:
        """Return a fixed validation set [n, T], apart from all training steps."""
        _check(seed=(seed, 0))
        return self._drawn(n, T, _generator("backcopy validation", seed))

    def _drawn(self, n: int, T: int, generator: torch.Generator) -> torch.Tensor:
        without = int(not self.start)
        return backcopy_tokens(n, T + without, self.chain, self.is_triggering, generator=generator)[:, without:]


def _generator(*name: object) -> torch.Generator:
    import torch

    seed = int.from_bytes(hashlib.sha256(repr(name).encode()).digest()[:8], "big") >> 1  # torch wants 63 bits
    return torch.Generator().manual_seed(seed)


def _check(**limits: tuple[object, int]) -> None:
    for name, (value, least) in limits.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadData(f"{name} is {value!r}; give a whole number of at least {least}")
