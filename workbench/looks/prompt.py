"""What goes into a model and what comes out at each position: tokens, value norms, predictions and losses of one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from workbench.errors import BadData
from workbench.looks.reading import (
    array,
    by_layer,
    decoder,
    log_chances,
    one_position,
    one_prompt,
    streams,
    strings_of,
    wide,
)
from workbench.models import Transformer
from workbench.models.hooked import HookedModel
from workbench.observing.observed import Observed
from workbench.tasks import SYMBOLS, RepeatedTokens


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Ids that a model reads, and what they stand for."""

    ids: np.ndarray
    """int64 [1, T]."""
    tokens: list[str]


def tokenise(
    model: HookedModel, text: str | None, *, letters: bool = False, period: int = 32, most: int | None = None
) -> Prompt:
    """Ids of a text, or those it writes as numbers where the model came without a tokenizer; with `letters`, of
    repeated-token models, its letters and digits written twice.

    None with `letters` is a fixed sequence of `period` random tokens, written twice. `most`: tokens at most; beyond the
    model's context, whose positions have no rotation, all are refused. Raises `BadData` for an empty text, letters that are
    no tokens, words where ids are read, and fewer than 2 or too many tokens.
    """
    if letters:
        ids = _repeated(model, text, period)
    elif not (text or "").strip():
        raise BadData("the prompt is empty; type some text")
    elif model.tokenizer is None:
        ids = _numbers(text or "", model.config.d_vocab)
    else:
        ids = model.tokenizer.encode(text)
    n_ctx = model.config.n_ctx
    limit = n_ctx if most is None else min(most, n_ctx)
    if not 2 <= len(ids) <= limit:
        why = f"this model reads 2 to {n_ctx}, its context" if limit == n_ctx else f"this view reads 2 to {limit}"
        raise BadData(f"the prompt is {len(ids)} token{'s' if len(ids) != 1 else ''} long; {why}")
    return Prompt(ids=np.array([ids], dtype=np.int64), tokens=strings_of(model, ids, letters))


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


def _repeated(model: HookedModel, text: str | None, period: int) -> list[int]:
    if text is None:
        return RepeatedTokens(vocabulary=model.config.d_vocab, period=period).validation(1)[0].tolist()
    known = SYMBOLS[: model.config.d_vocab]
    letters = [c for c in text if not c.isspace()]
    if not letters:
        raise BadData("the sequence is empty; type some letters or digits")
    if unknown := sorted(set(letters) - set(known)):
        raise BadData(f"{' '.join(unknown[:8])}: not among this model's tokens, which are {known}")
    return [known.index(c) for c in letters] * 2


# ---- predictions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """What the model expects after one position, and how well it expected each token."""

    position: int
    tokens: list[str]
    top: pd.DataFrame
    """Likeliest next tokens: rank (from 0), id, token, probability."""
    probability: np.ndarray
    """Of every token to come next, float32 [d_vocab]."""
    loss: np.ndarray
    """-ln probability of each token given those before it, nats [T]; NaN at position 0."""
    rank: np.ndarray
    """Tokens that were likelier [T], 0 where it led; NaN at position 0."""


@torch.no_grad()
def predictions(
    model: HookedModel, ids: Any, position: int = -1, top: int = 10, *, letters: bool = False
) -> Predictions:
    """Next-token probabilities at a position, and the loss of every token.

    Costs one run and the head once more; logits are held for a few positions at a time, of an observed model for all.
    Raises `BadData` for a position outside the prompt.
    """
    found = one_prompt(model, ids)
    T = found.shape[1]
    at, top = one_position(T, position), _count(top, model.config.d_vocab)
    loss, rank = np.full((2, T), np.nan, dtype=np.float32)
    chances = found.new_zeros(0, dtype=torch.float32)
    for where, log_p in _output(model, found):
        if where.start <= at < where.stop:
            chances = log_p[at - where.start].exp()
        targets = found[0, where.start + 1 : where.stop + 1, None]
        mine = log_p[: len(targets)].gather(-1, targets)
        after = slice(where.start + 1, where.start + 1 + len(targets))
        loss[after] = array(-mine[:, 0])
        rank[after] = array((log_p[: len(targets)] > mine).sum(-1))
    values, indices = chances.topk(top)
    frame = pd.DataFrame({"rank": range(top), "id": indices.tolist(), "probability": values.tolist()})
    frame.insert(2, "token", strings_of(model, frame["id"].tolist(), letters))
    tokens = strings_of(model, found[0].tolist(), letters)
    return Predictions(position=at, tokens=tokens, top=frame, probability=array(chances), loss=loss, rank=rank)


def _count(top: int, vocabulary: int) -> int:
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise BadData(f"top={top!r}: how many of the likeliest tokens, at least 1")
    return min(top, vocabulary)


def _output(model: HookedModel, ids: Tensor) -> Any:
    """(positions, log-probabilities) of the whole prompt, as `log_chances`."""
    if not isinstance(model, Transformer):
        everywhere = getattr(model, "everywhere", model)
        return [(slice(0, ids.shape[1]), wide(everywhere(ids)[0]).log_softmax(-1))]
    kept: list[Tensor] = []
    by_layer(model, ids, {"head": ["unembed.hook_in"]}, lambda _, found: kept.extend(found.values()))
    return log_chances(decoder(model, "predictions"), kept[0][0], normed=True)


# ---- values ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Values:
    """Sizes of value vectors and streams; Euclidean norms over all key-value heads, NaN where a layer has no such vector."""

    tokens: list[str]
    own: np.ndarray
    """As projected from the layer's own input [layer, T]."""
    own_part: np.ndarray
    """The same, times its coefficient [layer, T]: what it puts into the effective value."""
    first_part: np.ndarray
    """The first layer's value times its coefficient [layer, T], at the layers that mix or borrow it."""
    effective: np.ndarray
    """What the attention multiplies [layer, T]."""
    cosine: np.ndarray
    """Between own and effective value [layer, T]."""
    stream: np.ndarray
    """[layer + 1, T]: what the blocks read, and what the final norm reads; row 0 is the embedding's in most models."""
    drains: pd.DataFrame
    """site, layer, ratio: norm at position 0 over the median of the others: below 1 drained, above 1 a peak."""


@torch.no_grad()
def values(model: HookedModel, ids: Any, *, letters: bool = False) -> Values:
    """Norms of values and streams at each layer and position, and how far mixing turns the values.

    Costs one run; memory one layer's values. NeuTRENO's pull comes after the attention and is no part of a value. Source of
    the ratio: Guo et al. 2024, arXiv 2410.13835.
    """
    found = one_prompt(model, ids)
    T, n_layers, shown = found.shape[1], model.config.n_layers, streams(model)
    rows = {
        n: np.full((n_layers, T), np.nan, np.float32) for n in ("own", "own_part", "first_part", "effective", "cosine")
    }
    stream = np.full((n_layers + 1, T), np.nan, dtype=np.float32)
    groups: dict[Any, list[str]] = {("stream", n): [name] for n, name in shown.items()}
    groups |= {n: _value_points(model, n) for n in range(n_layers)}

    def reduce(key: Any, tensors: dict[str, Tensor]) -> None:
        if isinstance(key, tuple):
            stream[key[1]] = _norms(next(iter(tensors.values())))
            return
        for name, row in _of_layer(model, key, tensors).items():
            rows[name][key] = row

    by_layer(model, found, groups, reduce)
    drains = [
        {"site": site, "layer": layer, "ratio": _ratio(row)}
        for site, table in (("own_v", rows["own"]), ("v", rows["effective"]), ("stream", stream))
        for layer, row in enumerate(table)
        if not np.isnan(row[0])
    ]
    tokens = strings_of(model, found[0].tolist(), letters)
    return Values(**rows, tokens=tokens, stream=stream, drains=pd.DataFrame(drains, columns=["site", "layer", "ratio"]))


def _value_points(model: HookedModel, layer: int) -> list[str]:
    stem = f"blocks.{layer}.attn"
    names = [f"{stem}.hook_v", f"{stem}.own.hook_v", f"{stem}.hook_v_mix", _mixed(model, layer)[1]]
    return [n for n in names if n in model.hook_dict]


def _mixed(model: HookedModel, layer: int) -> tuple[list[Any] | None, str]:
    """Whose values are mixed with a layer's own (None: nothing is), and the hook point of the first layer's, else empty."""
    attn: Any = model.blocks[layer].attn
    if not hasattr(attn, "hook_v_mix"):
        return None, ""
    if isinstance(model, Observed):
        sources, points = list(model.mixing(layer)), model.sources_of(layer)
    else:
        sources, points = list(attn.mixers["v"][1]), {j: b.hook_v for j, (b, _) in attn.branches["v"].items()}
    return sources, str(points[0].name) if 0 in sources else ""


def _of_layer(model: HookedModel, layer: int, tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Rows of one layer, those that it has."""
    stem = f"blocks.{layer}.attn"
    v, own = tensors[f"{stem}.hook_v"], tensors.get(f"{stem}.own.hook_v")
    found = {"effective": _norms(v)}
    sources, first = _mixed(model, layer)
    shares: dict[Any, float] = {"own": 1.0}
    if sources is not None:
        shares = dict(zip([*sources, "own"], wide(tensors[f"{stem}.hook_v_mix"]).tolist(), strict=True))
    if own is not None:
        cosine = torch.cosine_similarity(wide(own[0].flatten(1)), wide(v[0].flatten(1)), dim=-1)
        found |= {"own": _norms(own), "own_part": abs(shares["own"]) * _norms(own), "cosine": array(cosine)}
    if first:
        found["first_part"] = abs(shares[0]) * _norms(tensors[first])
    elif own is None and getattr(model.blocks[layer].attn, "lenders", {}).get("v") == 0:
        found["first_part"] = found["effective"]
    return found


def _ratio(norms: np.ndarray) -> float:
    """First over the median of the others; NaN where these are 0."""
    usual = float(np.median(norms[1:]))
    return float(norms[0]) / usual if usual > 0 else float("nan")


def _norms(x: Tensor) -> np.ndarray:
    """[T] of a tensor [1, T, ...]."""
    return array(wide(x[0].flatten(1)).norm(dim=-1))
