"""Strongest attention weights per head in a few documents, as prompts.

    pairs = sharpest_pairs(model, ids)             # a row for each head and document
    excerpt(model, ids[3], query=41, key=17).text  # at most 200 characters around

A head's weights of one document are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from workbench.data.synthetic import SYMBOLS
from workbench.errors import BadData
from workbench.models.hooked import HookedModel
from workbench.prompts.attention_maps import attention_inputs, weights_by_keys
from workbench.prompts.prompt import tokenise

MOST = 200  # characters of an excerpt: a prompt that an address can hold
AFTER = 4  # tokens of an excerpt behind the query
TRIES = 8  # places to begin an excerpt at, where the key is too far away to be in it


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """A piece of a document as a prompt."""

    text: str
    # position of the query where a model reads the text; None where it would read other tokens than the document's
    query: int | None


@torch.no_grad()
def sharpest_pairs(
    model: HookedModel, ids: Tensor, *, progress: Callable[[int, int], None] | None = None
) -> pd.DataFrame:
    """Return the largest weight per head and document, except those to the first position and to the query itself.

    ids: int64 [document, pos]. Returns a row for each layer, head and document (the row of `ids`): query, key (positions),
    weight, and first_position, the mean weight of position 0 over all later queries. Equal weights: the earliest query, then
    key. Costs one run per document and O(L H T^2 d_head); the model is locked for one document at a
    time. `progress` is called with (documents done, all), and may raise to stop. Raises `BadData` for fewer than 3 tokens and
    where an observed model shows no attention.
    """
    documents, T = ids.shape
    if T < 3:
        raise BadData(f"documents of {T} tokens: give at least 3, so that there is a pair beside the first position")
    others, rows = torch.ones(T, T, dtype=torch.bool).tril(-1), []
    others[:, 0] = False
    for document in range(documents):
        with model.lock:
            inputs = attention_inputs(model, ids[document : document + 1])
        for layer, softmaxes in enumerate(inputs.layers):
            for head in range(softmaxes[0].heads):
                weights = torch.zeros(T, T)
                for _, _, part in weights_by_keys(softmaxes, head, range(T), range(T)):
                    weights += part
                query, key = divmod(int(weights.where(others, -torch.inf).argmax()), T)
                first = float(weights[1:, 0].mean())
                rows.append((layer, head, document, query, key, float(weights[query, key]), first))
        if progress is not None:
            progress(document + 1, documents)
    return pd.DataFrame(rows, columns=["layer", "head", "document", "query", "key", "weight", "first_position"])


def excerpt(model: HookedModel, ids: Sequence[int], query: int, key: int, *, letters: int = 0) -> Excerpt:
    """A document's text around a query, mostly before it, in at most `MOST` characters.

    ids: the document's [pos]. `letters`: see `Prompt`. It begins where reading it gives the document's own tokens. Earlier
    context is cut off, so attention differs slightly from that in the document.
    """
    document, end = list(ids), min(len(ids), query + 1 + AFTER)
    if letters > 1:  # a period, which is read so many times
        text = _written(model, document[: len(document) // letters], letters)
        return Excerpt(
            text=text, query=query if _read(model, text, letters)[: query + 1] == document[: query + 1] else None
        )
    first = query
    while first and len(_written(model, document[first - 1 : end], letters)) <= MOST:
        first -= 1
    while end < len(document) and len(_written(model, document[first : end + 1], letters)) <= MOST:
        end += 1
    for begin in range(first, min(query, max(key, first + TRIES)) + 1):
        text = _written(model, document[begin:end], letters)
        if _read(model, text, letters)[: query + 1 - begin] == document[begin : query + 1]:
            return Excerpt(text=text, query=query - begin)
    return Excerpt(text=_written(model, document[first:end], letters)[:MOST], query=None)


def _written(model: HookedModel, ids: Sequence[int], letters: int) -> str:
    """Ids as a prompt that can be typed."""
    if letters:
        return "".join(SYMBOLS[i] if i < len(SYMBOLS) else "?" for i in ids)
    return " ".join(map(str, ids)) if model.tokenizer is None else str(model.tokenizer.decode(ids))


def _read(model: HookedModel, text: str, letters: int) -> list[int]:
    """The ids that a model reads in a text; none where it cannot."""
    try:
        found: list[int] = tokenise(model, text, letters=letters).ids[0].tolist()
    except BadData:
        return []
    return found
