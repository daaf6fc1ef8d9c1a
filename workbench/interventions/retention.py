"""Token recovery from vectors without training, and the output of attention sinks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from workbench.interventions.base import ByDocument, batches_of, hook_points, intervention, mean_row
from workbench.metrics.found_sinks import sink_positions
from workbench.statistics.sinks import sink_kind

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


def _from_found(given: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return each query's attention to its head's found positions [batch, head, pos], and their part of z; None for a mixed pattern."""
    at = sink_positions(given["received"], given["row_max"])
    most, heads = int(at.sum(-1).max()), at.shape[1]
    is_one, places = at.double().topk(max(most, 1), dim=-1)  # [batch, head, few]
    group = heads // given["v"].shape[2]
    where = places.transpose(1, 2)[..., None]  # [batch, few, head, 1]
    wide = (given[name].repeat_interleave(group, dim=2) for name in ("rot_k", "v"))
    keys, values = (x.gather(1, where.expand(-1, -1, -1, x.shape[-1])) for x in wide)
    scores = torch.einsum("bqhd,bkhd->bhqk", given["rot_q"], keys) * given["rot_q"].shape[-1] ** -0.5
    queries = torch.arange(at.shape[-1], device=at.device)[:, None]
    is_seen = (places[:, :, None] <= queries) & (is_one[:, :, None] > 0)
    weights = (scores - given["lse"][..., None]).exp().masked_fill(~is_seen, 0)
    sums = given["received"].gather(-1, places) * is_one
    if not torch.allclose(weights.sum(2), sums, rtol=1e-3, atol=1e-3):
        return None
    return weights.sum(-1), torch.einsum("bhqk,bkhd->bqhd", weights, values)


SINK_VARIANTS: dict[str | None, str] = {
    "mass": "share", None: "ratio", "spread": "share", "no_op": "share of documents", "broadcast": "share of documents",
}  # fmt: skip
"""Rows of `sink_output` for each head, and their units."""


@intervention(
    unit="ratio", range=">= 0", reading="near 0: the sink writes nothing; large: it writes to every position",
    source="attention to position 0 times its value through W_O, over the head's whole output",
)  # fmt: skip
@torch.no_grad()
def sink_output(
    model: Any, sample: Any, data: Any, batch: int, *, positions: str = "first"
) -> Iterator[dict[str, Any]]:
    """Contribution of position 0 to each head's output: ||A_i0 v_0 W_O|| / ||z_i W_O||, mean over queries i > 0.

    `spread`: variance of the head's output over positions, as a share of its mean square; `mass`: mean attention of those
    queries to position 0. A broadcasting sink has a large ratio and little spread, a no-op a small ratio. `no_op` and
    `broadcast`: share of documents in which the head is a sink of that kind. Thresholds of this project: mass above 0.3;
    ratio at most 0.2 (`no_op`); ratio at least 0.5 and spread at most 0.5 (`broadcast`). Caution: the ratio passes 1 where
    the rest cancels it. With positions `found`: of the sum over all positions where the head rests (`sink_positions`), in layers
    whose pattern the rotated queries and keys give.
    """
    is_first = positions == "first"
    points = ("sink", "v", "z") if is_first else ("v", "z", "rot_q", "rot_k", "lse", "received", "row_max")
    layers = [
        n for n, block in enumerate(getattr(model, "blocks", []))
        if hasattr(block.attn, "W_O") and (is_first or (
            getattr(block.attn, "joint", None) is None
            and all(f"blocks.{n}.attn.hook_{x}" in model.hook_dict for x in points)
        ))
    ]  # fmt: skip
    results = ByDocument()
    for ids in batches_of(model, sample, batch):
        names = [f"blocks.{n}.attn.hook_{x}" for n in layers for x in points]
        _, cache = model.run_with_cache(ids, names_filter=names)
        for n in layers:
            given = {x: cache[f"blocks.{n}.attn.hook_{x}"].double() for x in points}
            v, z = given["v"], given["z"]
            w_o = model.blocks[n].attn.W_O.double()
            if is_first:
                sink, first = given["sink"], v[:, 0].repeat_interleave(z.shape[2] // v.shape[2], dim=1)
                written = torch.einsum("bhd,hdm->bhm", first, w_o).norm(dim=-1)[..., None] * sink
            elif (rebuilt := _from_found(given)) is not None:
                sink, written = rebuilt[0], torch.einsum("bphd,hdm->bhpm", rebuilt[1], w_o).norm(dim=-1)
            else:
                continue
            out = torch.einsum("bphd,hdm->bhpm", z, w_o)
            ratio = (written[..., 1:] / out.norm(dim=-1)[..., 1:].clamp_min(1e-300)).mean(-1)
            later = out[:, :, 1:]
            spread = later.var(2, unbiased=False).sum(-1) / later.square().sum(-1).mean(-1).clamp_min(1e-300)
            mass = sink[..., 1:].mean(-1)
            for head in range(z.shape[2]):
                numbers = [x[:, head].cpu() for x in (mass, ratio, spread)]
                kinds = [sink_kind(*one) for one in zip(*(x.tolist() for x in numbers), strict=True)]
                no_op, broadcast = (torch.tensor([k == kind for k in kinds]) for kind in ("no-op", "broadcast"))
                for variant, values in zip(SINK_VARIANTS, (*numbers, no_op, broadcast), strict=True):
                    results.add(values, layer=n, head=head, variant=variant, unit=SINK_VARIANTS[variant])
    yield from results.rows()
