"""Depth routing: token-dependent weights of earlier outputs in each sublayer's input, and the loss without each output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

from workbench.interventions.base import batches_of, intervention, losses, mean_row

PAPER = "Attention Residuals, arXiv 2603.15031 (2026)"
MIN_SOURCES = 3  # two can only be in order or not


@intervention(
    unit="share", range="0..1, sums to 1 over sources", reading="higher: the sublayer reads more of this output", source=PAPER,
)  # fmt: skip
@torch.no_grad()
def depth_routing(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Share of an earlier output (part) in a sublayer's input: w_j / sum over i of w_i per token, averaged over a document.

    Site `mid_depth_weights` is the input of the layer's MLP, `depth_weights` the stream after the layer; one row per depth
    head. `variance`: over a document's tokens, 0 where the weights do not depend on them. `entropy`: of the
    shares over ln of their number, mean over tokens. The control `uniform` is the start: 1 / sources, and an entropy of 1.
    Caution: a weight multiplies an output of any size; the largest one need not matter most (`source_ablation`). Models without
    weights by token have no rows.
    """
    sources = _sources(model)
    found: dict[tuple[str, int], list[tuple[Tensor, Tensor, Tensor]]] = {}
    for ids in batches_of(model, sample, batch) if sources else ():
        _, cache = model.run_with_cache(ids, names_filter=list(sources))
        for name in sources:
            shares = cache[name].double() / cache[name].double().sum(-1, keepdim=True)  # [batch, pos, head, source]
            entropy = torch.special.entr(shares).sum(-1).mean(1) / math.log(shares.shape[-1])
            of_each = (x.cpu() for x in (shares.mean(1), shares.var(1, correction=0), entropy))
            for head, each in enumerate(zip(*(x.unbind(1) for x in of_each), strict=True)):
                found.setdefault((name, head), []).append(each)
    for (name, head), parts in found.items():
        mean, variance, entropy = (torch.cat(x) for x in zip(*parts, strict=True))
        axes = _place(name) | ({"head": head} if (name, 1) in found else {})
        for j, part in enumerate(sources[name]):
            yield mean_row(mean[:, j], **axes, part=part, unit="share")
            yield mean_row(variance[:, j], **axes, part=part, variant="variance", unit="share^2")
        yield axes | {"control": "uniform", "value": 1 / len(sources[name]), "unit": "share"}
        yield mean_row(entropy, **axes, variant="entropy", unit="ratio")
        yield axes | {"control": "uniform", "variant": "entropy", "value": 1.0, "unit": "ratio"}


@intervention(
    unit="nats", range="any", reading="higher: the sublayer needs this output more",
    source="arXiv 2606.13168 (2026; weight and effect need not agree), removal from one reader at a time; controls ours",
)  # fmt: skip
@torch.no_grad()
def source_ablation(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Change of the loss when one sublayer alone no longer reads one earlier output (part); sites as in `depth_routing`.

    `zero`: its weight is 0 and the other weights are renormalised; `mean`: it is replaced by its mean over the sample's
    tokens. The
    control `random` is a random vector of its length. `rank_correlation`: Spearman's, of the mean shares of a reader's outputs and
    the changes by `mean`, where there are three or more: 1 where the weights say what matters. Caution: three runs per
    output and sublayer; the order of changes below their standard error is random. Models without weights by token have no rows.
    """
    sources = _sources(model)
    batches = batches_of(model, sample, batch)
    if not sources or not batches:
        return
    names = {label: _outputs(label) for labels in sources.values() for label in labels}
    points = sorted({name for outputs in names.values() for name in outputs})
    means, shares = _means(model, batches, points, sources)
    plain = losses(model, batches)
    for name, labels in sources.items():
        changes = []
        for j, part in enumerate(labels):
            replacing = {
                "mean": lambda y, of=names[part]: torch.stack([means[point] for point in of]).sum(0).expand_as(y),
                "random": lambda y, seed=j: _random(y, seed),
            }
            hooks: dict[str, list[tuple[str, Callable[..., Any]]]] = {"zero": [(name, _without(j))]}
            hooks |= {how: _replaced(model, name, names[part], j, new) for how, new in replacing.items()}
            for how, put in hooks.items():
                with model.hooks(put):
                    row = mean_row(losses(model, batches) - plain, **_place(name), part=part, unit="nats")
                yield row | {"control" if how == "random" else "variant": how}
                changes += [row["value"]] if how == "mean" else []
        if len(labels) >= MIN_SOURCES and len(set(changes)) > 1 and len(set(shares[name].tolist())) > 1:
            value = float(spearmanr(shares[name].numpy(), changes).statistic)
            yield _place(name) | {
                "variant": "rank_correlation",
                "value": value,
                "n": len(labels),
                "unit": "correlation",
            }


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


def _means(
    model: Any, batches: list[Tensor], points: list[str], sources: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Mean over all tokens of every output [d_model] and of every sublayer's shares [source], averaged over heads."""
    totals: dict[str, Tensor] = {}
    for ids in batches:
        _, cache = model.run_with_cache(ids, names_filter=[*points, *sources])
        for name in (*points, *sources):
            x = cache[name].double()
            x = (x / x.sum(-1, keepdim=True)).mean(2) if name in sources else x
            totals[name] = totals.get(name, 0) + x.sum((0, 1)).cpu()
    tokens = sum(ids.numel() for ids in batches)
    return {p: (totals[p] / tokens) for p in points}, {name: totals[name] / tokens for name in sources}


def _without(j: int) -> Callable[..., Tensor]:
    def hook(weights: Tensor, hook: Any) -> Tensor:
        rest = weights.index_fill(-1, torch.tensor([j], device=weights.device), 0.0)
        return rest * (weights.sum(-1, keepdim=True) / rest.sum(-1, keepdim=True).clamp_min(1e-12))

    return hook


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

    return [*((point, see) for point in (*outputs, name)), (_reader(model, name), put)]


def _reader(model: Any, name: str) -> str:
    """Hook point of the sublayer input made by the weights at `name`."""
    place = _place(name)
    if place["site"].startswith("mid"):
        return f"blocks.{place['layer']}.hook_resid_mid"
    last = place["layer"] == model.config.n_layers - 1
    return f"blocks.{place['layer']}.hook_resid_post" if last else f"blocks.{place['layer'] + 1}.hook_resid_pre"


def _random(y: Tensor, seed: int) -> Tensor:
    """Random vectors of the lengths of y [batch, pos, d_model], the same directions in every document."""
    drawn = torch.randn(y.shape[1:], generator=torch.Generator().manual_seed(seed)).to(y)
    return drawn * (y.norm(dim=-1, keepdim=True) / drawn.norm(dim=-1, keepdim=True))
