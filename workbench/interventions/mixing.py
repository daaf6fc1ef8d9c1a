"""Shares of sources in mixed tensors: coefficients weighted by the norm of their terms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.interventions.base import batches_of, intervention, mean_row
from workbench.interventions.edits.coefficient import PATHS, hook_of, sources_at
from workbench.models.transformer import Transformer
from workbench.models.wiring import source_name

SITES = {"v": "v", "q": "q", "k": "k", "output": "z", "stream": "stream"}
"""Where a path's mixture is read. A pattern's rows sum to 1, so that its coefficients are their own shares."""


@intervention(
    unit="share", range="0..1, sums to 1 over sources", reading="higher: the source supplies more of the mixture",
    source="Zhou et al. 2024 and Pagliardini et al. 2024 (coefficients); weighed by norms, since a layer's own weights absorb a scale",
)  # fmt: skip
@torch.no_grad()
def coefficient_share(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Share per source in a layer's mix: |w_j| ||X_j|| / sum over i of |w_i| ||X_i||, norms over a document.

    Measured for values, queries and keys (X_j from another layer, a table, or the layer itself). Also for streams (embedding
    and raw block outputs, numbered by the reading layer) and head outputs (site z: the added term against the rest). Column
    part is the source. `coefficient`: w_j itself, where it depends on the token its mean. Fixed and learned ones alike.
    Values that are not mixed are one source's (1); those whose heads are of two, of these by their norms. Caution: (c w_1, c
    w_2, W_O / c) is the same model for every c, so compare shares, not coefficients; shares do not see what cancels.
    """
    if not isinstance(model, Transformer):  # whose coefficients are not ours to read
        return
    places = [(p, n) for p in PATHS if p in SITES for n in range(model.config.n_layers) if _sources_of(model, p, n)]
    for layer, block in enumerate(model.blocks):
        if not _sources_of(model, "v", layer) and "v" not in block.attn.wiring.attended:  # else a softmax mixes them
            source = block.attn.projections["v"].shared_source
            part = "own" if source is None else source_name(source)
            yield {"site": "v", "layer": layer, "part": part, "value": 1.0, "n": len(sample.ids), "unit": "share"}
    weights: dict[tuple[str, int], list[Tensor]] = {}
    sizes: dict[tuple[str, int], list[Tensor]] = {}
    for ids in batches_of(model, sample, batch) if places else ():
        for (path, layer), found in _sizes(model, ids, places, weights).items():
            sizes.setdefault((path, layer), []).append(found)
    for (path, layer), parts in sizes.items():
        each = torch.cat(parts)  # [document, source]
        shares = each / each.sum(-1, keepdim=True)
        axes = {"site": SITES[path], "layer": layer + (path == "stream")}
        sources = _sources_of(model, path, layer)
        for j, part in enumerate(["own", *sources] if path == "output" else sources):
            yield mean_row(shares[:, j], **axes, part=part, unit="share")
        in_use = weights.get((path, layer), [])
        for j, part in enumerate(sources if in_use else ()):
            axes |= {"part": part, "variant": "coefficient", "unit": "number"}
            if in_use[0].ndim > 1:  # of each document
                yield mean_row(torch.cat(in_use)[:, j], **axes)
            else:
                yield {**axes, "value": float(in_use[0][j])}


def _sources_of(model: Transformer, path: str, layer: int) -> Sequence[str]:
    """Mixed tensors in the order of the coefficients; also for tensors whose heads have two sources."""
    if path in ("v", "q", "k") and (projection := model.blocks[layer].attn.projections[path]).own_heads:
        return [source_name(projection.shared_source), "own"]
    return sources_at(model, path, layer)


def _sizes(
    model: Transformer, ids: Tensor, places: list[tuple[str, int]], weights: dict[tuple[str, int], list[Tensor]]
) -> dict[tuple[str, int], Tensor]:
    """||w_j X_j|| of each document and source [batch, source]; of head outputs the rest first. Adds the weights in use."""
    names = {(p, n): _vectors(model, p, n) for p, n in places}
    mixes = {(p, n): hook_of(model, p, n) for p, n in places if sources_at(model, p, n)}
    many = [name for vectors in names.values() for name in vectors]
    _, cache = model.run_with_cache(ids, names_filter=[*mixes.values(), *many])
    found = {}
    for path, layer in places:
        vectors = [cache[name] for name in names[path, layer]]
        if (path, layer) not in mixes:
            vectors[0] = vectors[0][:, :, model.blocks[layer].attn.projections[path].own_heads :]
            found[path, layer] = _norms(vectors)
            continue
        in_use = cache[mixes[path, layer]]
        by_token = in_use.ndim > 1
        weights.setdefault((path, layer), []).append(
            (in_use.flatten(1, -2).mean(1) if by_token else in_use).double().cpu()
        )
        if path == "output":
            found[path, layer] = _norms(_added(model, ids, layer, vectors[0], len(in_use)))
        elif by_token:
            found[path, layer] = _norms([w[..., None] * x for w, x in zip(in_use.unbind(-1), vectors, strict=True)])
        else:
            found[path, layer] = _norms(vectors) * in_use.double().cpu().abs()
    return found


def _norms(vectors: list[Tensor]) -> Tensor:
    return torch.stack([x.double().flatten(1).norm(dim=-1).cpu() for x in vectors], -1)


def _vectors(model: Transformer, path: str, layer: int) -> list[str]:
    """Hook points of the terms that a path's coefficients multiply at a layer; for head outputs, of their sum."""
    if path == "output":
        return [f"blocks.{layer}.attn.hook_z"]
    names = []
    for source in _sources_of(model, path, layer):
        if path == "stream":
            block = layer if source == "own" else int(source.removeprefix("block.")) if source != "embed" else None
            names.append("hook_embed" if block is None else f"blocks.{block}.hook_dwa_in")
        else:
            at = "source.0" if source == "first" else source
            names.append(f"blocks.{layer}.attn.{at}.hook_{path}")
    return names


def _added(model: Transformer, ids: Tensor, layer: int, whole: Tensor, count: int) -> list[Tensor]:
    """Head outputs without additions, then each addition as the difference to a run with its coefficient at 0."""
    kept: list[Tensor] = []
    for zeroed in ([*range(count)], *([i] for i in range(count))):

        def without(weights: Tensor, hook: Any, zeroed: list[int] = zeroed) -> Tensor:
            return weights.index_fill(0, torch.tensor(zeroed, device=weights.device), 0.0)

        with model.hooks([(hook_of(model, "output", layer), without)]):
            kept.append(model.run_with_cache(ids, names_filter=f"blocks.{layer}.attn.hook_z")[1]["z", layer])
    return [kept[0], *(whole - other for other in kept[1:])]


@intervention(
    unit="ratio", range=">= 0, 1 = neither grown nor shrunk", reading="higher: the streams' content grows on its way past the layers",
    source="composite gain of mHC, arXiv 2512.24880 (2025): largest sum of absolute values over a row or a column of the product",
)  # fmt: skip
@torch.no_grad()
def stream_gain(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Most that the mixing of several residual streams makes of one, from the embedding to behind a layer; mean over tokens.

    With M the product of the matrices h_res of all sublayers so far: largest row sum of |M|, how far a stream can grow on the way
    forward. `backward`: largest column sum, how far its gradient can. 1 where all matrices are doubly stochastic (mHC), at the start
    too (hyper-connections). Caution: outputs that are written on the way, and weights that read, are left out. Unit: ratio; models of
    one stream have no rows.
    """
    names = [f"blocks.{n}.hook_{kind}_h_res" for n in range(model.config.n_layers) for kind in ("attn", "mlp")]
    found: dict[tuple[int, str | None], list[Tensor]] = {}
    for ids in batches_of(model, sample, batch) if set(names) <= set(model.hook_dict) else ():
        _, cache = model.run_with_cache(ids, names_filter=names)
        product: Tensor | None = None
        for place, name in enumerate(names):
            mixed = cache[name].double()  # [batch, pos, into, from]
            product = mixed if product is None else mixed @ product
            if place % 2:
                for variant, axis in ((None, -1), ("backward", -2)):
                    gain = product.abs().sum(axis).amax(-1).mean(1).cpu()
                    found.setdefault((place // 2, variant), []).append(gain)
    for (layer, variant), parts in found.items():
        yield mean_row(torch.cat(parts), layer=layer, variant=variant, unit="ratio")
