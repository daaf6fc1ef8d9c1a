"""Next-token probabilities after one position of a prompt, and the loss per token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from workbench.errors import BadData
from workbench.models import Transformer
from workbench.models.hooked import HookedModel
from workbench.prompts.single_pass import array, by_layer, float32_or_better, log_probabilities, one_position
from workbench.prompts.tokens import PromptLike, single_prompt


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Next-token probabilities after one position, and the loss per token."""

    position: int
    tokens: list[str]
    top: pd.DataFrame
    """Likeliest next tokens: rank (from 0), id, token, probability."""
    probability: np.ndarray
    """Of every token to come next, float32 [d_vocab]."""
    loss: np.ndarray
    """-ln probability of each token given those before it, nats [T]; NaN at position 0."""


@torch.no_grad()
def next_tokens(model: HookedModel, prompt: PromptLike, position: int = -1, top: int = 10) -> Predictions:
    """Next-token probabilities at a position, and the loss of every token.

    Costs one run and the head once more; logits are held for a few positions at a time, of an observed model for all.
    Raises `BadData` for a position outside the prompt.
    """
    prompt = single_prompt(model, prompt)
    ids, T = prompt.ids, prompt.ids.shape[1]
    at, top = one_position(T, position), _count(top, model.config.d_vocab)
    loss = np.full(T, np.nan, dtype=np.float32)
    probabilities = ids.new_zeros(0, dtype=torch.float32)
    for where, log_p in _output(model, ids):
        if where.start <= at < where.stop:
            probabilities = log_p[at - where.start].exp()
        targets = ids[0, where.start + 1 : where.stop + 1, None]
        mine = log_p[: len(targets)].gather(-1, targets)
        loss[where.start + 1 : where.start + 1 + len(targets)] = array(-mine[:, 0])
    values, indices = probabilities.topk(top)
    frame = pd.DataFrame({"rank": range(top), "id": indices.tolist(), "probability": values.tolist()})
    frame.insert(2, "token", prompt.strings(indices.tolist()))
    return Predictions(position=at, tokens=prompt.tokens, top=frame, probability=array(probabilities), loss=loss)


def _count(top: int, vocabulary: int) -> int:
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise BadData(f"top={top!r}: how many of the likeliest tokens, at least 1")
    return min(top, vocabulary)


def _output(model: HookedModel, ids: Tensor) -> Iterable[tuple[slice, Tensor]]:
    """(positions, log-probabilities) of the whole prompt, as `log_probabilities`."""
    if not isinstance(model, Transformer):
        return [(slice(0, ids.shape[1]), float32_or_better(model.everywhere(ids)[0]).log_softmax(-1))]
    normed: list[Tensor] = []
    by_layer(model, ids, {"head": ["unembed.hook_in"]}, lambda _, tensors: normed.extend(tensors.values()))
    return log_probabilities(model, normed[0][0], normed=True)
