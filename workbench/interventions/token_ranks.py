"""Ranks of tokens by the cosine to a vector: token recovery without training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from workbench.interventions.registered_experiments import batches_of, hook_points, intervention, mean_row

CHUNK = 64  # positions whose scores over the vocabulary are held at a time
ALONE = 1024  # tokens read at once, each alone


def tokens_ahead(x: Tensor, unit: Tensor, ids: Tensor) -> Tensor:
    """Number of unit rows [d_vocab, width] with a higher cosine to x [batch, pos, width] than the row of its own token:
    [batch, pos].

    If x has only the first heads, only these are compared.
    """
    results, width = [], x.shape[-1]
    unit = unit if width == unit.shape[1] else _unit(unit[:, :width])
    for part, target in zip(x.double().split(CHUNK, 1), ids.split(CHUNK, 1), strict=True):
        scores = part @ unit.T  # the vector's own length does not change the order
        results.append((scores > scores.gather(-1, target[..., None])).sum(-1))
    return torch.cat(results, 1)


@intervention(
    unit="1 / rank", range="0..1", reading="higher: the token can be read off the vector",
    source="rank of the input token by cosine; values against the first layer's value of every token",
)  # fmt: skip
@torch.no_grad()
def nearest_embedding(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """How well a vector's nearest table row names its own token: mean reciprocal rank; `top_1`: share ranked first.

    The streams are compared with the rows of W_E, values with the table of first-layer values of every token. No training is needed.
    Chance is about (ln V + 0.58) / V (control). Caution: a layer may keep the token in other directions, so a low score does not
    prove a loss of information. Own values of layer 1 and all values of SVFormer are rows of the table by construction.
    """
    sites, vocabulary = ("stream", "own_v", "v"), model.config.d_vocab
    points = {name: (site, n) for site in sites for n, name in hook_points(model, site).items()}
    tables = token_tables(model, sites)
    results: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}
    for ids in batches_of(model, sample, batch):
        _, cache = model.run_with_cache(ids, names_filter=list(points))
        for name, (site, layer) in points.items():
            if (table := tables.get(site)) is not None:
                ahead = tokens_ahead(cache[name].flatten(2), table, ids)
                by_document = (1 / (1 + ahead.double())).mean(1).cpu(), (ahead == 0).double().mean(1).cpu()
                results.setdefault((site, layer), []).append(by_document)
    chance = sum(1 / rank for rank in range(1, vocabulary + 1)) / vocabulary
    for (site, layer), parts in results.items():
        rank, first = (torch.cat(column) for column in zip(*parts, strict=True))
        yield mean_row(rank, site=site, layer=layer, unit="1 / rank")
        yield mean_row(first, site=site, layer=layer, variant="top_1", unit="share")
        yield {"site": site, "layer": layer, "control": "chance", "value": chance, "unit": "1 / rank"}


def token_tables(model: Any, sites: Sequence[str]) -> dict[str, Tensor]:
    """Unit vectors of all tokens [d_vocab, width], float64, that a site is compared with; of the sites that have some."""
    tables = {"stream": _unit(model.embed.weight)} if "stream" in sites else {}
    name, rows = "blocks.0.attn.hook_v", list[Tensor]()
    if not set(sites) - {"stream"} or name not in model.hook_dict:
        return tables

    def take(values: Tensor, hook: Any) -> None:
        rows.append(values[:, 0].flatten(1).detach().clone())
        raise _Enough

    ids = torch.arange(model.config.d_vocab, device=model.embed.weight.device)
    for part in ids.split(ALONE):  # each token alone, for models whose positions are in the stream
        with suppress(_Enough), torch.no_grad(), model.hooks([(name, take)]):
            model(part[:, None])
    return tables | dict.fromkeys((site for site in sites if site != "stream"), _unit(torch.cat(rows)))


def _unit(table: Tensor) -> Tensor:
    return torch.nn.functional.normalize(table.double(), dim=-1)


class _Enough(Exception):
    """Stop the run there; the rest would take minutes for a large vocabulary."""
