"""A prompt as one model reads it, and one forward pass on it, reduced layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.data.data_sources import RepeatedData
from workbench.data.synthetic import SYMBOLS
from workbench.errors import BadData
from workbench.hook_names import stream_hook
from workbench.metrics.base import wide
from workbench.models import Transformer
from workbench.models.hooked import HookedModel
from workbench.models.patterns_and_gradients import RebuiltPatterns

if TYPE_CHECKING:
    from workbench.models.activation_cache import Cache

PERIOD = 32  # random tokens, written twice, that a repeated-token model reads where no text is given


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as token ids and strings."""

    ids: Tensor  # int64 [1, T]
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

    For models of random tokens, `letters` is how often the text's letters and digits are repeated (2 for the repeated-token task).
    Without a text, the prompt is a fixed sequence of `PERIOD` random tokens. Raises `BadData` for an empty text, letters outside the
    vocabulary, words given to a model of ids, fewer than 2 tokens, and more tokens than the model's context.
    """
    d_vocab = model.config.d_vocab
    if letters and text is None:
        ids = RepeatedData(d_vocab).sample(1, 2 * PERIOD).ids[0, :PERIOD].tolist() * letters
    elif letters:
        known, given = SYMBOLS[:d_vocab], [c for c in text or "" if not c.isspace()]
        if not given:
            raise BadData("the sequence is empty; type some letters or digits")
        if unknown := sorted(set(given) - set(known)):
            raise BadData(f"{' '.join(unknown[:8])}: not among this model's tokens, which are {known}")
        ids = [known.index(c) for c in given] * letters
    elif not (text or "").strip():
        raise BadData("the prompt is empty; type some text")
    elif model.tokenizer is None:
        words = (text or "").replace(",", " ").split()
        if not all(word.isascii() and word.isdigit() for word in words):
            raise BadData(
                "this model came without a tokenizer, so it reads token ids: write them as 3 14 15, or put its tokenizer.json "
                "into the run's folder"
            )
        if beyond := [word for word in words if len(word) > len(str(d_vocab)) or int(word) >= d_vocab]:
            raise BadData(f"{beyond[0][:20]} is no id of this model, whose ids are 0 to {d_vocab - 1}")
        ids = [int(word) for word in words]
    else:
        ids = model.to_tokens(text)[0].tolist()
    if not 2 <= len(ids) <= model.config.n_ctx:
        raise BadData(
            f"the prompt is {len(ids)} token{'s' if len(ids) != 1 else ''} long; this model reads 2 to"
            f" {model.config.n_ctx}, its context"
        )
    return Prompt(ids=torch.tensor([ids], dtype=torch.long), tokenizer=model.tokenizer, letters=letters)


MAX_LOGITS = 2**22  # logits that are in memory at a time: 16 MiB in float32


def chosen_positions(T: int, positions: slice | None) -> range:
    """Positions of a slice of 0..T - 1, None for all; raises `BadData` where it is empty or skips some."""
    chosen = range(*(slice(None) if positions is None else positions).indices(T))
    if not chosen or chosen.step != 1:
        raise BadData(f"positions {positions} of {T}: give a slice of neighbours that holds at least one of 0..{T - 1}")
    return chosen


def one_position(T: int, position: int) -> int:
    """A position 0..T - 1, negative ones from the end; raises `BadData` for others."""
    if isinstance(position, bool) or not isinstance(position, int) or not -T <= position < T:
        raise BadData(f"position {position!r}: the prompt has positions 0..{T - 1}, or -1..-{T} from its end")
    return position % T


@torch.no_grad()
def by_layer(
    model: HookedModel, ids: Tensor, names: Mapping[Any, Sequence[str]],
    reduce: Callable[[Any, dict[str, Tensor]], None], head: slice | None = None,
) -> Tensor:  # fmt: skip
    """Run once; `reduce(key, {name: activation})` for each group of hook points, as soon as all of it has fired.

    A group is dropped once it is reduced, so memory is one layer's. Returns logits [1, pos, d_vocab] of the positions in
    `head`; None: they are not wanted. Our models make no others: the logits of a long prompt would outweigh everything else.
    """
    owner = {name: key for key, group in names.items() for name in group}
    model.hook_names(list(owner))  # refused by name before anything runs
    waiting: dict[Hashable, dict[str, Tensor]] = {}

    def collect(tensor: Tensor, hook: Any) -> None:
        key = owner[str(hook.name)]
        group = waiting.setdefault(key, {})
        group[str(hook.name)] = tensor.detach()
        if len(group) == len(names[key]):
            reduce(key, waiting.pop(key))

    points: list[Any] = [(name, collect) for name in owner]
    if isinstance(model, Transformer):
        wanted = slice(0, 1) if head is None else head
        with model.hooks([*points, ("unembed.hook_in", lambda x, hook: x[:, wanted])]):
            return model(ids)
    with model.hooks(points):
        return model(ids) if head is None else model.everywhere(ids)[:, head]


def cached_run(
    model: HookedModel, ids: Tensor, names: Iterable[str], head: slice | None = None
) -> tuple[Tensor, Cache]:
    """Run once; return logits as `by_layer` and a cache of the hook points, from which patterns are rebuilt."""
    from workbench.models.activation_cache import Cache

    tensors = RebuiltPatterns()
    groups = {name: [name] for name in dict.fromkeys(names)}
    logits = by_layer(model, ids, groups, lambda _, one: tensors.update(one), head)
    return logits, Cache(tensors.with_recipes(model.recipes()), model, has_batch_dim=True)


def streams(model: HookedModel) -> dict[int, str]:
    """Hook points of the residual streams: 0..L - 1 are inputs of blocks, L is the input of the final norm."""
    n_layers = model.config.n_layers
    return {n: name for n in range(n_layers + 1) if (name := stream_hook(n, n_layers)) in model.hook_dict}


def log_probabilities(model: Transformer, x: Tensor, normed: bool = False) -> Iterator[tuple[slice, Tensor]]:
    """(positions, log-probabilities [pos, d_vocab]) of streams x [pos, d_model], a few positions at a time.

    Float32 or better. `normed`: x has passed the final norm already. Norm and head are applied without their hooks, which
    are the run's own matter.
    """
    norm, step = model.ln_final, max(1, MAX_LOGITS // model.config.d_vocab)
    for start in range(0, len(x), step):
        part = x[start : start + step]
        if not normed:
            part = F.rms_norm(part, norm.weight.shape, norm.weight, norm.eps)
        logits = F.linear(part, model.unembed.weight)
        yield slice(start, start + len(part)), wide(logits).log_softmax(-1)


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) over the last axis in nats, >= 0; 0 from tokens that p rules out (-inf), as a mask of the head does."""
    return (log_p.exp() * (log_p - log_q)).masked_fill(log_p == -torch.inf, 0).sum(-1).clamp(min=0)


def array(x: Tensor) -> np.ndarray:
    """A float32 array."""
    return x.detach().float().cpu().numpy()
