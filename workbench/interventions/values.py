"""Running a model differently: replace a tensor by its mean per token, by its mean, or by zero, and read the loss.

`replaced(model, tokens, layers, how, means)` is the context manager; `value_ablation` is the experiment built on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.errors import UnknownName, WorkbenchError
from workbench.interventions.base import batches_of, hook_points, intervention, losses, mean_row, text_of
from workbench.models.hooked import HookedModel
from workbench.observing.interception.segments import Segments

SITES = ("own_v", "v", "q", "k")
REPLACEMENTS = ("token_mean", "mean", "zero")
TABLE_TOKENS = 65_536  # enough to see nearly every id of a small vocabulary


def _hooks(model: HookedModel, site: str, layers: Sequence[int]) -> dict[int, str]:
    if site not in SITES:
        raise UnknownName("site", site, SITES)
    return {layer: name for layer, name in hook_points(model, site).items() if layer in layers}


@dataclass(frozen=True)
class TokenMeans:
    """Mean of a site per token id and layer: `counts` [d_vocab], `sums` {layer: [type, head, d_head]} of ids that occur, ascending."""

    site: str
    counts: Tensor
    sums: dict[int, Tensor]

    def seen(self, tokens: Tensor) -> Tensor:
        """Which of the ids [batch, pos] the table has a mean for."""
        return (self.counts > 0).to(tokens.device)[tokens]

    def replacement(self, layer: int, tokens: Tensor, how: str) -> Tensor:
        """Replacement values for ids [batch, pos], or one for all: [..., head, d_head], float64.

        Zero under `token_mean` where the table has never seen the id.
        """
        sums, there = self.sums[layer], self.counts > 0
        if how == "zero":
            return torch.zeros_like(sums[0], device=tokens.device)
        if how == "mean":
            return (sums.sum(0) / self.counts.sum()).to(tokens.device)
        ids = tokens.cpu()
        shares = there[ids] / self.counts[ids].clamp_min(1)
        return (sums[there.cumsum(0).sub(1).clamp_min(0)[ids]] * shares[..., None, None]).to(tokens.device)


@torch.no_grad()
def token_means(model: HookedModel, site: str, batches: Sequence[Tensor]) -> TokenMeans:
    """Means per token id over training batches [batch, pos], at every layer that has the site."""
    hooks = _hooks(model, site, range(model.config.n_layers))
    counts = torch.zeros(model.config.d_vocab, dtype=torch.double)
    texts = [text_of(model, tokens) for tokens in batches]
    for tokens, text in zip(batches, texts, strict=True):
        counts += tokens[text].bincount(minlength=len(counts)).double().cpu()
    place, types = (counts > 0).cumsum(0).sub(1), int((counts > 0).sum())
    sums: dict[int, Tensor] = {}
    for tokens, text in zip(batches, texts, strict=True):
        rows = place[tokens[text].cpu()]

        def add(tensor: Tensor, hook: Any, rows: Tensor = rows, text: Tensor = text) -> None:
            flat = tensor[text].double().cpu()
            total = sums.setdefault(int(hook.layer()), flat.new_zeros(types, *flat.shape[1:]))
            total.index_add_(0, rows, flat)

        with model.hooks([(name, add) for name in hooks.values()]):
            model(tokens, return_type=None)
    return TokenMeans(site, counts, sums)


@contextmanager
def replaced(
    model: HookedModel, tokens: Tensor, layers: Sequence[int], how: str, means: TokenMeans
) -> Iterator[HookedModel]:
    """While open, the vectors of the site of `means` at `layers` are replaced for runs on `tokens` [batch, pos].

    `how`: `token_mean` (the mean of the position's token id), `mean` (the mean over all tokens) or `zero`. Tokens that the
    table has never seen keep their own vectors under all three. Raises `UnknownName` for another way or site,
    `WorkbenchError` where no chosen layer has the site.
    """
    if how not in REPLACEMENTS:
        raise UnknownName("replacement", how, REPLACEMENTS)
    hooks = _hooks(model, means.site, layers)
    if not hooks:
        raise WorkbenchError(f"{model.architecture} has no {means.site} at layers {list(layers)}")
    seen = means.seen(tokens)[..., None, None]

    def swap(tensor: Tensor, hook: Any) -> Tensor:
        return torch.where(seen, means.replacement(int(hook.layer()), tokens, how).to(tensor), tensor)

    with model.hooks([(name, swap) for name in hooks.values()]):
        yield model


@torch.no_grad()
def _losses(
    model: HookedModel, batches: Sequence[Tensor], means: TokenMeans, layers: Sequence[int], how: str | None = None, *,
    segments: Segments | None = None,
) -> Tensor:  # fmt: skip
    """Loss (nats) per row with the site replaced as `how` says."""
    parts, start = [], 0
    for tokens in batches:
        of = None if segments is None else segments.rows(start, start := start + len(tokens))
        with replaced(model, tokens, layers, how, means) if how else nullcontext():
            parts.append(losses(model, [tokens], of))
    return torch.cat(parts)


@intervention(
    unit="nats", range="any", reading="lower: less context is needed", source="after Bank of Values, arXiv 2606.02780",
    by_document=True,
)  # fmt: skip
def value_ablation(
    model: HookedModel, sample: Any, data: Any, batch: int, *, sites: Sequence[str] = ("own_v",)
) -> Iterator[dict[str, Any]]:
    """Change of the validation loss when values are replaced by their per-token mean, their mean, or zero.

    Per layer, and for all layers after the first together (no layer). The table of means comes from 65,536 tokens of
    training documents. Positions with other ids keep their values under all three replacements, so all three cover the same
    positions. `kept` = 1 - change(token mean) / change(zero): the share of the values' effect that the token alone supplies.
    The first layer's own values are a function of the token, so their change under the token mean is exactly 0 up to
    rounding: a built-in check. Own values are replaced at their projection, and so in every layer that reads them (value
    residuals, shared keys and values). `sites=("v",)` replaces one layer's effective values in that layer only. Caution:
    zero also changes the scale of attention's output; read it beside the mean. Unit: nats.
    """
    training = _training(data, "value_ablation", max(1, TABLE_TOKENS // sample.ids.shape[1]), sample)
    batches = batches_of(model, sample, batch)
    for site in sites:
        means = token_means(model, site, [ids.to(batches[0].device) for ids in training.split(batch)])
        plain = _losses(model, batches, means, [], segments=sample.segments)
        groups: list[tuple[list[int], dict[str, int]]] = [([layer], {"layer": layer}) for layer in sorted(means.sums)]
        if deep := [layer for layer in sorted(means.sums) if layer]:
            groups.append((deep, {}))
        for layers, axes in groups:
            yield from _changes(
                model, batches, means, layers, plain, REPLACEMENTS, sample.segments, {"site": site, **axes}
            )


@intervention(
    unit="nats", range="any", reading="lower: less context is needed", source="after Bank of Values, arXiv 2606.02780",
    by_document=True,
)  # fmt: skip
def deep_value_ablation(model: HookedModel, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Change of the validation loss when all own values after the first layer are replaced at once, in four passes.

    `token_mean`, `zero` and `kept` as in `value_ablation`, without its row for each layer. `seen`: the share of positions whose
    id the table has a mean for; others keep their values. Caution: the table comes from as many documents as are measured,
    so rare ids have means of one or two vectors. They cost more than the means of `value_ablation`'s 65,536 tokens: `kept` is low.
    """
    training = _training(data, "deep_value_ablation", len(sample.ids), sample)
    batches = batches_of(model, sample, batch)
    means = token_means(model, "own_v", [ids.to(batches[0].device) for ids in training.split(batch)])
    if deep := [layer for layer in sorted(means.sums) if layer]:
        plain = _losses(model, batches, means, [], segments=sample.segments)
        yield from _changes(
            model, batches, means, deep, plain, ("token_mean", "zero"), sample.segments, {"site": "own_v"}
        )
    text = torch.ones_like(sample.ids, dtype=torch.bool) if sample.segments is None else sample.segments.is_text
    yield mean_row((means.seen(sample.ids) & text).sum(1) / text.sum(1), site="own_v", variant="seen", unit="share")


def _training(data: Any, name: str, documents: int, sample: Any) -> Tensor:
    """Sequences for a table of means; the documents do not depend on the batch size."""
    if data is None:
        raise WorkbenchError(
            f"{name} needs training sequences for its table of means: give a run, or data with a training side"
        )
    ids: Tensor = data.batch(0, documents, sample.ids.shape[1], 0)
    return ids


def _changes(
    model: HookedModel, batches: Sequence[Tensor], means: TokenMeans, layers: Sequence[int], plain: Tensor,
    ways: Sequence[str], segments: Segments | None, axes: dict[str, Any],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Rows of what each way of replacing these layers changes, and of the share that the token alone supplies."""
    changes = {how: _losses(model, batches, means, layers, how, segments=segments) - plain for how in ways}
    for how, change in changes.items():
        yield mean_row(change, **axes, variant=how, unit="nats")
    zero, token = float(changes["zero"].mean()), float(changes["token_mean"].mean())
    kept = 1 - token / zero if zero > 0 else math.nan
    yield {**axes, "variant": "kept", "value": kept, "unit": "share", "n": len(plain)}
