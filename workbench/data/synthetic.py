"""Synthetic tasks: repeated random tokens (induction), and a bigram chain with trigger tokens (Bigram-Backcopy).

With induction, the loss falls to 0 in the repeated half and stays at ln(vocabulary) in the first half. In Bigram-Backcopy a head is needed
only after a trigger and rests at other positions.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.errors import BadData

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

    check_numbers(batch=(batch, 1), period=(period, 1), vocabulary=(vocabulary, 2))
    first = torch.randint(vocabulary, (batch, period), generator=generator)
    if shortest is None:
        return torch.cat([first, first], dim=1)
    periods = torch.randint(shortest, period + 1, (batch, 1), generator=generator)
    return first.gather(1, torch.arange(2 * period) % periods)


START = 0
SHARPNESS = 2.0  # standard deviation of the chain's log odds: most rows have a few likely followers


def backcopy_tokens(
    batch: int, T: int, chain: torch.Tensor, triggers: torch.Tensor, *, generators: Sequence[torch.Generator]
) -> torch.Tensor:
    """Return one batch for each generator of a bigram chain with triggers: int64 [generator, batch, T].

    The token before a trigger follows the trigger. Several batches at once take less time than one by one, and equal them.

    Args:
        batch: Sequences of a batch.
        T: Tokens of a sequence. Token 0 is START.
        chain: Probability of the next token (column) after each token (row): [vocabulary, vocabulary]. It must not lead to START, nor from
            START to a trigger.
        triggers: Whether each token is a trigger: [vocabulary].
        generators: One random generator for each batch.

    Raises:
        BadData: A size is too small, or the chain leads to START or from START to a trigger.
    """
    import torch

    check_numbers(batch=(batch, 1), T=(T, 2))
    if bool(chain[:, START].any()) or bool(chain[START, triggers].any()):
        raise BadData("the chain leads to START, or from START to a trigger; give those pairs probability 0")
    if not bool((chain.sum(1) > 0).all()):
        raise BadData("a row of the chain has no next token; give one a positive probability")
    noise = torch.empty(len(generators), T - 1, batch, len(chain))
    for generator, drawn in zip(generators, noise, strict=True):
        for position in drawn:
            position.exponential_(generator=generator)
    ids = torch.full((len(generators), batch, T), START)
    for t in range(1, T):
        last = ids[..., t - 1]
        follower = (chain[last] / noise[:, t - 1]).argmax(-1)  # as torch.multinomial draws one token
        ids[..., t] = torch.where(triggers[last], ids[..., max(t - 2, 0)], follower)
    return ids


def task_generator(*name: object) -> torch.Generator:
    """Return a generator seeded by a name."""
    import torch

    seed = int.from_bytes(hashlib.sha256(repr(name).encode()).digest()[:8], "big") >> 1  # torch wants 63 bits
    return torch.Generator().manual_seed(seed)


def check_numbers(**limits: tuple[object, int]) -> None:
    """Raise `BadData` for a value that is no whole number of at least its limit."""
    for name, (value, least) in limits.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadData(f"{name} is {value!r}; give a whole number of at least {least}")
