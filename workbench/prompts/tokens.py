"""A prompt as one model reads it: its ids, and their tokens as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.data.tasks import SYMBOLS, RepeatedTokens
from workbench.errors import BadData
from workbench.models.hooked import HookedModel

PERIOD = 32
"""Random tokens, written twice, that a repeated-token model reads where no text is given."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as token ids and strings."""

    ids: Tensor
    """int64 [1, T]."""
    tokenizer: Any = None
    letters: int = 0
    """How often a sequence of letters and digits is read in a row, where ids are such, as those of models of random tokens."""

    @property
    def tokens(self) -> list[str]:
        """The prompt's tokens as people read them [T]."""
        return self.strings(self.ids[0].tolist())

    def strings(self, ids: Iterable[int]) -> list[str]:
        """Any ids of the model as people read them: text, letters, or numbers where there is no tokenizer.

        Ids beyond the vocabulary of either, as in a padded one, are `#<id>`.
        """
        given = list(ids)
        if self.letters:
            return [SYMBOLS[i] if i < len(SYMBOLS) else f"#{i}" for i in given]
        if self.tokenizer is None:
            return [str(i) for i in given]
        known = self.tokenizer.vocab_size
        named = iter(self.tokenizer.token_strings([i for i in given if i < known]))
        return [next(named) if i < known else f"#{i}" for i in given]


PromptLike = Prompt | Tensor | np.ndarray | Sequence[int] | str
"""A prompt, its ids [pos] or [1, pos], or its text for a model with a tokenizer."""


def single_prompt(model: HookedModel, given: PromptLike, least: int = 2) -> Prompt:
    """One prompt of a model, on its device.

    Raises `BadData` for several prompts, for fewer than `least` tokens, and beyond the context.
    """
    ids = model.to_tokens(given.ids if isinstance(given, Prompt) else given)
    if len(ids) != 1:
        raise BadData(f"{len(ids)} prompts at once: give ids [1, T] of one")
    if ids.shape[1] < least:
        raise BadData(f"the prompt is {ids.shape[1]} token long; give at least {least}")
    return Prompt(ids=ids, tokenizer=model.tokenizer, letters=given.letters if isinstance(given, Prompt) else 0)


def second_prompt(model: HookedModel, first: Prompt, given: PromptLike) -> Prompt:
    """A prompt that is compared with a first one: a text is read as the first was. Raises as `tokenise`."""
    if isinstance(given, str):
        return tokenise(model, given, letters=first.letters)
    return single_prompt(model, given, least=1)


def tokenise(model: HookedModel, text: str | None, *, letters: int = 0) -> Prompt:
    """The prompt of a text, or of the ids it writes as numbers where the model came without a tokenizer.

    For models of random tokens, `letters` is how often the text's letters and digits are repeated (2 for the repeated-token
    task). Without a text, the prompt is a fixed sequence of `PERIOD` random tokens. Raises `BadData` for an empty text,
    letters outside the vocabulary, words given to a model of ids, fewer than 2 tokens, and more tokens than the model's
    context.
    """
    if letters:
        ids = _letters(model, text) * letters
    elif not (text or "").strip():
        raise BadData("the prompt is empty; type some text")
    elif model.tokenizer is None:
        ids = _numbers(text or "", model.config.d_vocab)
    else:
        ids = model.tokenizer.encode(text)
    if not 2 <= len(ids) <= model.config.n_ctx:
        raise BadData(
            f"the prompt is {len(ids)} token{'s' if len(ids) != 1 else ''} long; this model reads 2 to"
            f" {model.config.n_ctx}, its context"
        )
    return Prompt(ids=torch.tensor([ids], dtype=torch.long), tokenizer=model.tokenizer, letters=letters)


def _numbers(text: str, d_vocab: int) -> list[int]:
    words = text.replace(",", " ").split()
    if not all(word.isascii() and word.isdigit() for word in words):
        raise BadData(
            "this model came without a tokenizer, so it reads token ids: write them as 3 14 15, or put its tokenizer.json "
            "into the run's folder"
        )
    if beyond := [word for word in words if len(word) > len(str(d_vocab)) or int(word) >= d_vocab]:
        raise BadData(f"{beyond[0][:20]} is no id of this model, whose ids are 0 to {d_vocab - 1}")
    return [int(word) for word in words]


def _letters(model: HookedModel, text: str | None) -> list[int]:
    if text is None:
        return RepeatedTokens(vocabulary=model.config.d_vocab, period=PERIOD).validation(1)[0, :PERIOD].tolist()
    known = SYMBOLS[: model.config.d_vocab]
    letters = [c for c in text if not c.isspace()]
    if not letters:
        raise BadData("the sequence is empty; type some letters or digits")
    if unknown := sorted(set(letters) - set(known)):
        raise BadData(f"{' '.join(unknown[:8])}: not among this model's tokens, which are {known}")
    return [known.index(c) for c in letters]
