"""Token identity of vectors: the rank of a position's own token among the rows of a table, by cosine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workbench.errors import UnknownName
from workbench.interventions.retention import token_tables, tokens_ahead
from workbench.models.hooked import HookedModel
from workbench.names import ACTIVATIONS
from workbench.prompts.single_pass import array, by_layer, chosen_positions, streams
from workbench.prompts.tokens import PromptLike, single_prompt

SITES = ("stream", "own_v", "v")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """How well each vector's nearest table row names its own token."""

    positions: np.ndarray
    """int64 [pos], the positions that were read."""
    tokens: list[str]
    """[pos], the prompt's tokens there."""
    reciprocal_rank: dict[str, np.ndarray]
    """Of each site `stream`, `own_v`, `v`: 1 / rank of the true token, float32 [layer, pos], NaN where a layer lacks it.

    1 where the true token is first. Streams have L + 1 rows: what the blocks read, and what the final norm reads.
    """
    chance: float
    """Expected 1 / rank of a token drawn at random."""


@torch.no_grad()
def token_identity(
    model: HookedModel, prompt: PromptLike, *, sites: Sequence[str] = SITES, positions: slice | None = None
) -> Identity:
    """Return the rank of every position's own token by cosine, among embeddings (streams) or the first layer's values
    (values).

    The experiment `nearest_embedding` uses the same measure. It needs no training. Costs one run, one run of the whole
    vocabulary for the table of values, and O(pos d_vocab width) in float64 for each layer and site. Select `positions` of
    long prompts. Raises `UnknownName` for another site.
    """
    prompt = single_prompt(model, prompt)
    where, n_layers = chosen_positions(prompt.ids.shape[1], positions), model.config.n_layers
    if other := next((s for s in sites if s not in SITES), None):
        raise UnknownName("site", other, SITES)
    places = {("stream", n): name for n, name in streams(model).items()}
    places |= {(s, n): ACTIVATIONS[s].hook.format(layer=n) for s in SITES[1:] for n in range(n_layers)}
    tables = token_tables(model, sites)
    places = {(s, n): name for (s, n), name in places.items() if s in tables and name in model.hook_dict}
    ranks = {s: np.full((n_layers + (s == "stream"), len(where)), np.nan, np.float32) for s in sites}
    true = prompt.ids[:, where.start : where.stop]

    def reduce(key: tuple[str, int], tensors: dict[str, Tensor]) -> None:
        site, layer = key
        x = next(iter(tensors.values())).flatten(2)[:, where.start : where.stop]
        ranks[site][layer] = array(1 / (1 + tokens_ahead(x, tables[site], true)[0].double()))

    by_layer(model, prompt.ids, {key: [name] for key, name in places.items()}, reduce)
    vocabulary = model.config.d_vocab
    return Identity(
        positions=np.arange(where.start, where.stop), tokens=prompt.strings(true[0].tolist()), reciprocal_rank=ranks,
        chance=sum(1 / rank for rank in range(1, vocabulary + 1)) / vocabulary,
    )  # fmt: skip
