"""What a stream says of a token before the model is done: the next one through the head, its own through the embedding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.interventions.retention import token_tables, tokens_ahead
from workbench.looks.reading import (
    array,
    by_layer,
    chosen_positions,
    log_chances,
    one_prompt,
    streams,
    strings_of,
    wide,
)
from workbench.models import Transformer
from workbench.models.hooked import HookedModel
from workbench.names import ACTIVATIONS

SITES = ("stream", "own_v", "v")
OFF = 1e-3
"""Largest difference in log-probability between the last stream's reading and the output, in float32."""


@dataclass(frozen=True, kw_only=True)
class Lens:
    """Predictions read off each stream; row n is what block n reads, row L what the final norm reads: the output."""

    positions: np.ndarray
    """int64 [pos], the positions that were read."""
    tokens: list[str]
    """[pos], the prompt's tokens there."""
    targets: list[str]
    """[pos], the tokens that are asked after; empty where there is none."""
    top_ids: np.ndarray
    """int32 [layer + 1, pos, top], likeliest first."""
    top_tokens: list[list[list[str]]]
    top_probability: np.ndarray
    """float32 [layer + 1, pos, top]."""
    probability: np.ndarray
    """Of the target, float32 [layer + 1, pos]; NaN where there is none, as in `rank`."""
    rank: np.ndarray
    """Tokens ahead of the target [layer + 1, pos], 0 where it leads."""
    entropy: np.ndarray
    """Of the reading, nats [layer + 1, pos]."""
    kl: np.ndarray
    """KL(output || reading), nats [layer + 1, pos]; 0 in the last row."""


@torch.no_grad()
def lens(
    model: HookedModel,
    ids: Any,
    targets: Literal["next", "own"] | int = "next",
    top: int = 5,
    *,
    positions: slice | None = None,
    letters: bool = False,
) -> Lens:
    """Logit lens: softmax(W_U norm(x_n)) of every stream x_n with the model's own final norm, at all positions or some.

    `targets`: the following token (the last position has none), the position's own, or one id everywhere. Costs one run and
    L + 1 times the head at each position; holds the streams of the chosen positions and a few positions' logits. An observed
    model keeps its norm and head to itself: it runs L + 4 times, with each layer's stream in the place of the last one, and
    holds the logits of all positions. Raises `BadData` for an id outside the vocabulary and for an observed model
    whose last stream cannot be replaced, `UnknownName` for other targets, and `WorkbenchError` where the last row is not the
    model's prediction, as after a hook changed a stream. Source: nostalgebraist 2020. Caution: early layers need not speak the
    head's language.
    """
    found = one_prompt(model, ids)
    where = chosen_positions(found.shape[1], positions)
    top = max(1, min(top, model.config.d_vocab))
    wanted = _targets(model, found[0], targets)[where.start : where.stop]
    if isinstance(model, Transformer):
        outputs, read = _by_parts(model, found, where)
    else:
        outputs, read = _by_runs(model, found, where)
    n_rows, n_pos, off = model.config.n_layers + 1, len(where), 0.0
    numbers = {n: np.full((n_rows, n_pos), np.nan, np.float32) for n in ("probability", "rank", "entropy", "kl")}
    top_ids = np.zeros((n_rows, n_pos, top), np.int32)
    top_probability = np.zeros((n_rows, n_pos, top), np.float32)
    for chunk, output in outputs:
        chances = output.exp()
        for layer in range(n_rows):
            log_p = read(layer, chunk)
            for name, values in _reading(log_p, output, chances, wanted[chunk]).items():
                numbers[name][layer, chunk] = values
            best = log_p.topk(top)
            top_ids[layer, chunk], top_probability[layer, chunk] = best.indices.cpu(), array(best.values.exp())
        off = max(off, float((log_p - output).abs().max()))
    if not off <= OFF * (50 if model.embed.weight.dtype in (torch.float16, torch.bfloat16) else 1):
        raise WorkbenchError(
            f"the last stream's reading misses the output by {off:.1e} nats: a hook changed one of them"
        )
    named = _named(model, top_ids, letters)
    return Lens(
        positions=np.arange(where.start, where.stop),
        tokens=strings_of(model, found[0, where.start : where.stop].tolist(), letters),
        targets=["" if t < 0 else strings_of(model, [t], letters)[0] for t in wanted.tolist()],
        top_ids=top_ids,
        top_tokens=[[[named[i] for i in cell] for cell in row] for row in top_ids.tolist()],
        top_probability=top_probability,
        **numbers,
    )


Readings = tuple[Iterable[tuple[slice, Tensor]], Callable[[int, slice], Tensor]]
"""The output's log-probabilities by chunks of positions, and those that a layer's stream gives at a chunk."""


def _by_parts(model: Transformer, ids: Tensor, where: range) -> Readings:
    """Of one of our models: its norm and its head on each stream."""
    held: dict[Any, Tensor] = {}

    def reduce(key: Any, tensors: dict[str, Tensor]) -> None:
        held[key] = next(iter(tensors.values()))[0, where.start : where.stop].clone()

    names = {n: [name] for n, name in streams(model).items()}
    by_layer(model, ids, {**names, "head": ["unembed.hook_in"]}, reduce)
    return log_chances(model, held["head"], normed=True), lambda layer, chunk: next(
        log_chances(model, held[layer][chunk])
    )[1]


def _by_runs(model: HookedModel, ids: Tensor, where: range) -> Readings:
    """Of an observed model: a run with each layer's stream in the place of the last one."""
    names, last = streams(model), model.config.n_layers
    if len(names) <= last or model.inert(names[last]):
        raise BadData(f"this {type(model.foreign).__name__} shows no stream that its head could be asked to read")
    _, held = model.run_with_cache(ids, names_filter=list(names.values()))

    def read(stream: Tensor | None) -> Tensor:
        instead: Any = [] if stream is None else [(names[last], lambda x, hook: stream)]
        with model.hooks(instead):
            return wide(model.everywhere(ids)[0, where.start : where.stop]).log_softmax(-1)

    output = read(None)
    if output.std() > 0 and torch.equal(read(held[names[last]].flip(-1)), output):
        raise BadData(f"this {type(model.foreign).__name__} reads its output from elsewhere than its last stream")
    return [(slice(0, len(where)), output)], lambda layer, chunk: read(held[names[layer]])[chunk]


def _targets(model: HookedModel, ids: Tensor, targets: str | int) -> Tensor:
    """Id asked after at each position [T], -1 for none."""
    if targets == "next":
        return torch.cat([ids[1:], ids.new_full((1,), -1)])
    if targets == "own":
        return ids
    if isinstance(targets, str):
        raise UnknownName("targets", targets, ["next", "own", "a token id"])
    if isinstance(targets, bool) or targets not in range(model.config.d_vocab):
        raise BadData(f"token id {targets!r} leaves the vocabulary 0..{model.config.d_vocab - 1}")
    return torch.full_like(ids, targets)


def _reading(log_p: Tensor, output: Tensor, chances: Tensor, targets: Tensor) -> dict[str, np.ndarray]:
    """Numbers of log-probabilities [pos, d_vocab] beside the output's, which are given as probabilities too."""
    mine = log_p.gather(-1, targets.clamp(min=0)[:, None])
    rank = (log_p > mine).sum(-1).float()
    none = targets < 0
    return {
        "probability": array(mine[:, 0].exp().masked_fill(none, torch.nan)),
        "rank": array(rank.masked_fill(none, torch.nan)),
        "entropy": array(-torch.linalg.vecdot(log_p.exp(), log_p)),
        "kl": array(torch.linalg.vecdot(chances, output - log_p).clamp(min=0)),
    }


def _named(model: HookedModel, ids: np.ndarray, letters: bool) -> dict[int, str]:
    found: Sequence[int] = np.unique(ids).tolist()
    return dict(zip(found, strings_of(model, found, letters), strict=True))


# ---- the token itself ------------------------------------------------------------------------------------------------


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
def identity(
    model: HookedModel,
    ids: Any,
    *,
    sites: Sequence[str] = SITES,
    positions: slice | None = None,
    letters: bool = False,
) -> Identity:
    """Rank of each position's own token by cosine, among the embeddings (streams) or the first layer's values (values).

    Nothing is trained; the same measure as the experiment `nearest_embedding`. Costs one run, one more of the whole
    vocabulary for the table of values, and pos x d_vocab x width for each layer and site, in float64: choose `positions` of
    long prompts. Raises `UnknownName` for another site.
    """
    found = one_prompt(model, ids)
    where, n_layers = chosen_positions(found.shape[1], positions), model.config.n_layers
    if other := next((s for s in sites if s not in SITES), None):
        raise UnknownName("site", other, SITES)
    places = {("stream", n): name for n, name in streams(model).items()}
    places |= {(s, n): ACTIVATIONS[s].hook.format(layer=n) for s in SITES[1:] for n in range(n_layers)}
    tables = token_tables(model, sites)
    places = {(s, n): name for (s, n), name in places.items() if s in tables and name in model.hook_dict}
    ranks = {s: np.full((n_layers + (s == "stream"), len(where)), np.nan, np.float32) for s in sites}
    true = found[:, where.start : where.stop]

    def reduce(key: tuple[str, int], tensors: dict[str, Tensor]) -> None:
        site, layer = key
        x = next(iter(tensors.values())).flatten(2)[:, where.start : where.stop]
        ranks[site][layer] = array(1 / (1 + tokens_ahead(x, tables[site], true)[0].double()))

    by_layer(model, found, {key: [name] for key, name in places.items()}, reduce)
    vocabulary = model.config.d_vocab
    return Identity(
        positions=np.arange(where.start, where.stop),
        tokens=strings_of(model, true[0].tolist(), letters),
        reciprocal_rank=ranks,
        chance=sum(1 / rank for rank in range(1, vocabulary + 1)) / vocabulary,
    )
