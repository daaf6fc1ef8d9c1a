"""Shares of sources in mixed tensors and in each sublayer's input, and the loss without each of these inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.interventions.edits.kinds import PATHS, hook_of, sources_at
from workbench.interventions.registered_experiments import ByDocument, batches_of, intervention, losses, mean_row
from workbench.models.cross_layer_wiring import source_name
from workbench.models.transformer import Transformer

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
    vectors = {place: _vectors(model, *place) for place in places}
    mixes = {(p, n): hook_of(model, p, n) for p, n in places if sources_at(model, p, n)}
    weights: dict[tuple[str, int], list[Tensor]] = {}
    sizes: dict[tuple[str, int], list[Tensor]] = {}  # ||w_j X_j|| [document, source]; of head outputs the rest first
    for ids in batches_of(model, sample, batch) if places else ():
        read = [*mixes.values(), *(name for names in vectors.values() for name in names)]
        _, cache = model.run_with_cache(ids, names_filter=read)
        for path, layer in places:
            terms = [cache[name] for name in vectors[path, layer]]
            factor: Tensor | None = None
            if (path, layer) in mixes:
                in_use = cache[mixes[path, layer]]
                by_token = in_use.ndim > 1
                mean = in_use.flatten(1, -2).mean(1) if by_token else in_use
                weights.setdefault((path, layer), []).append(mean.double().cpu())
                if path == "output":
                    terms = _added(model, ids, layer, terms[0], len(in_use))
                elif by_token:
                    terms = [w[..., None] * x for w, x in zip(in_use.unbind(-1), terms, strict=True)]
                else:
                    factor = in_use.double().cpu().abs()
            else:
                terms[0] = terms[0][:, :, model.blocks[layer].attn.projections[path].own_heads :]
            norms = torch.stack([x.double().flatten(1).norm(dim=-1).cpu() for x in terms], -1)
            sizes.setdefault((path, layer), []).append(norms if factor is None else norms * factor)
    for (path, layer), parts in sizes.items():
        each = torch.cat(parts)  # [document, source]
        shares = each / each.sum(-1, keepdim=True)
        axes = {"site": SITES[path], "layer": layer + (path == "stream")}
        sources = _sources_of(model, path, layer)
        for j, part in enumerate(["own", *sources] if path == "output" else sources):
            yield mean_row(shares[:, j], **axes, part=part, unit="share")
        coefficients = weights.get((path, layer), [])
        for j, part in enumerate(sources if coefficients else ()):
            axes |= {"part": part, "variant": "coefficient", "unit": "number"}
            if coefficients[0].ndim > 1:  # of each document
                yield mean_row(torch.cat(coefficients)[:, j], **axes)
            else:
                yield {**axes, "value": float(coefficients[0][j])}


def _sources_of(model: Transformer, path: str, layer: int) -> Sequence[str]:
    """Mixed tensors in the order of the coefficients; also for tensors whose heads have two sources."""
    if path in ("v", "q", "k") and (projection := model.blocks[layer].attn.projections[path]).own_heads:
        return [source_name(projection.shared_source), "own"]
    return sources_at(model, path, layer)


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
    gains = ByDocument()
    for ids in batches_of(model, sample, batch) if set(names) <= set(model.hook_dict) else ():
        _, cache = model.run_with_cache(ids, names_filter=names)
        product: Tensor | None = None
        for place, name in enumerate(names):
            mixed = cache[name].double()  # [batch, pos, into, from]
            product = mixed if product is None else mixed @ product
            if place % 2:
                for variant, axis in ((None, -1), ("backward", -2)):
                    gain = product.abs().sum(axis).amax(-1).mean(1)
                    gains.add(gain, layer=place // 2, variant=variant, unit="ratio")
    yield from gains.rows()


PAPER = "Attention Residuals, arXiv 2603.15031 (2026)"
MIN_SOURCES = 3  # two can only be in order or not


@intervention(
    unit="share", range="0..1, sums to 1 over sources", reading="higher: the sublayer reads more of this output", source=PAPER,
)  # fmt: skip
@torch.no_grad()
def depth_routing(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Share of an earlier output (part) in a sublayer's input: w_j / sum over i of w_i per token, averaged over a document.

    Site `mid_depth_weights` is the input of the layer's MLP, `depth_weights` the stream after the layer; one row per depth head.
    `variance`: over a document's tokens, 0 where the weights do not depend on them. `entropy`: of the shares over ln of their number,
    mean over tokens. The control `uniform` is the start: 1 / sources, and an entropy of 1. Caution: a weight multiplies an output of
    any size; the largest one need not matter most (`source_ablation`). Models without weights by token have no rows.
    """
    sources = _sources(model)
    results = ByDocument()
    for ids in batches_of(model, sample, batch) if sources else ():
        _, cache = model.run_with_cache(ids, names_filter=list(sources))
        for name in sources:
            shares = cache[name].double() / cache[name].double().sum(-1, keepdim=True)  # [batch, pos, head, source]
            entropy = torch.special.entr(shares).sum(-1).mean(1) / math.log(shares.shape[-1])
            mean, variance = shares.mean(1), shares.var(1, correction=0)
            for head in range(shares.shape[2]):
                axes = _place(name) | ({"head": head} if shares.shape[2] > 1 else {})
                for j, part in enumerate(sources[name]):
                    results.add(mean[:, head, j], **axes, part=part, unit="share")
                    results.add(variance[:, head, j], **axes, part=part, variant="variance", unit="share^2")
                results.add(entropy[:, head], **axes, variant="entropy", unit="ratio")
    for row in results.rows():
        if row.get("variant") != "entropy":
            yield row
            continue
        axes = {name: row[name] for name in ("site", "layer", "head") if name in row}
        count = len(sources[f"blocks.{row['layer']}.hook_{row['site']}"])
        yield axes | {"control": "uniform", "value": 1 / count, "unit": "share"}
        yield row
        yield axes | {"control": "uniform", "variant": "entropy", "value": 1.0, "unit": "ratio"}


@intervention(
    unit="nats", range="any", reading="higher: the sublayer needs this output more",
    source="arXiv 2606.13168 (2026; weight and effect need not agree), removal from one reader at a time; controls ours",
)  # fmt: skip
@torch.no_grad()
def source_ablation(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Change of the loss when one sublayer alone no longer reads one earlier output (part); sites as in `depth_routing`.

    `zero`: its weight is 0 and the other weights are renormalised; `mean`: it is replaced by its mean over the sample's tokens. The
    control `random` is a random vector of its length. `rank_correlation`: Spearman's, of the mean shares of a reader's outputs and
    the changes by `mean`, where there are three or more: 1 where the weights say what matters. Caution: three runs per output and
    sublayer; the order of changes below their standard error is random. Models without weights by token have no rows.
    """
    sources = _sources(model)
    batches = batches_of(model, sample, batch)
    if not sources or not batches:
        return
    names = {label: _outputs(label) for labels in sources.values() for label in labels}
    points = sorted({name for outputs in names.values() for name in outputs})
    sums: dict[str, Tensor] = {}  # over all tokens: of every output [d_model], of every sublayer's shares [source]
    for ids in batches:
        _, cache = model.run_with_cache(ids, names_filter=[*points, *sources])
        for name in (*points, *sources):
            x = cache[name].double()
            x = (x / x.sum(-1, keepdim=True)).mean(2) if name in sources else x
            sums[name] = sums.get(name, 0) + x.sum((0, 1)).cpu()
    means = {name: total / sum(ids.numel() for ids in batches) for name, total in sums.items()}
    plain = losses(model, batches)
    for name, labels in sources.items():
        changes = []
        for j, part in enumerate(labels):

            def without(weights: Tensor, hook: Any, j: int = j) -> Tensor:
                rest = weights.index_fill(-1, torch.tensor([j], device=weights.device), 0.0)
                return rest * (weights.sum(-1, keepdim=True) / rest.sum(-1, keepdim=True).clamp_min(1e-12))

            def mean(y: Tensor, part: str = part) -> Tensor:
                return torch.stack([means[point] for point in names[part]]).sum(0).expand_as(y)

            def random(y: Tensor, seed: int = j) -> Tensor:
                """Return vectors of the lengths of y [batch, pos, d_model], the same directions in every document."""
                drawn = torch.randn(y.shape[1:], generator=torch.Generator().manual_seed(seed)).to(y)
                return drawn * (y.norm(dim=-1, keepdim=True) / drawn.norm(dim=-1, keepdim=True))

            hooks: dict[str, list[tuple[str, Callable[..., Any]]]] = {"zero": [(name, without)]}
            for how, new in (("mean", mean), ("random", random)):
                hooks[how] = _replaced(model, name, names[part], j, new)
            for how, put in hooks.items():
                with model.hooks(put):
                    row = mean_row(losses(model, batches) - plain, **_place(name), part=part, unit="nats")
                yield row | {"control" if how == "random" else "variant": how}
                changes += [row["value"]] if how == "mean" else []
        if len(labels) >= MIN_SOURCES and len(set(changes)) > 1 and len(set(means[name].tolist())) > 1:
            from scipy.stats import spearmanr

            value = float(spearmanr(means[name].numpy(), changes).statistic)
            row = {"variant": "rank_correlation", "value": value, "n": len(labels), "unit": "correlation"}
            yield _place(name) | row


def _sources(model: Any) -> Mapping[str, tuple[str, ...]]:
    """Hook point of a sublayer's weights -> hook points of the outputs they multiply; empty for models without such weights."""
    residual: Any = getattr(model, "residual", None)
    return residual.depth_sources() if hasattr(residual, "depth_sources") else {}


def _place(name: str) -> dict[str, Any]:
    _, layer, point = name.split(".")
    return {"site": point.removeprefix("hook_"), "layer": int(layer)}


def _outputs(label: str) -> list[str]:
    """Hook points of the outputs whose sum a source is: `embed`, `0_attn_out`, or all from one to another (`0_attn_out:1_mlp_out`)."""
    if label == "embed":
        return ["hook_embed"]
    first, _, last = label.partition(":")
    ends = [2 * int(name.split("_")[0]) + name.endswith("mlp_out") for name in (first, last or first)]
    return [f"blocks.{s // 2}.hook_{'mlp' if s % 2 else 'attn'}_out" for s in range(ends[0], ends[1] + 1)]


def _replaced(
    model: Any, name: str, outputs: list[str], j: int, new: Callable[[Tensor], Tensor]
) -> list[tuple[str, Callable[..., Any]]]:
    """Hooks that put `new(y_j)` in the place of source j in what one sublayer reads: x + w_j (new - y_j)."""
    seen: dict[str, Tensor] = {}

    def see(tensor: Tensor, hook: Any) -> None:
        seen[hook.name] = tensor

    def put(x: Tensor, hook: Any) -> Tensor:
        y = sum((seen[point] for point in outputs[1:]), seen[outputs[0]])
        weight = seen[name][..., j]  # [batch, pos, head]
        weight = weight.repeat_interleave(x.shape[-1] // weight.shape[-1], -1)
        return x + weight * (new(y).to(y) - y)

    site, layer = _place(name).values()
    reader = f"blocks.{layer + 1}.hook_resid_pre"
    if site.startswith("mid"):
        reader = f"blocks.{layer}.hook_resid_mid"
    elif layer == model.config.n_layers - 1:
        reader = f"blocks.{layer}.hook_resid_post"
    return [*((point, see) for point in (*outputs, name)), (reader, put)]
