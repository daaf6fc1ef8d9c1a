"""Ablations: the value shortcut, one attention, one MLP, one reader of the stream, and values replaced by means."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from workbench.errors import BadData, WorkbenchError, refuse_unknown
from workbench.interventions.registered_experiments import (
    ByDocument,
    batches_of,
    hook_points,
    intervention,
    losses,
    mean_row,
)
from workbench.models.decomposition import decompose
from workbench.models.hook_points import read_only
from workbench.models.hooked import HookedModel
from workbench.models.transformer import Transformer

_BRANCH = re.compile(r"blocks\.(\d+)\.attn\.(?:source\.\d+|table|cross(?:\.\d+)?)\.hook_v")


def branches(model: Any) -> dict[int, list[str]]:
    """Hook points at which other layers' (or a table's) values arrive, by layer."""
    by_layer: dict[int, list[str]] = {}
    for name in model.hook_dict:
        if match := _BRANCH.fullmatch(name):
            by_layer.setdefault(int(match[1]), []).append(name)
    return by_layer


def _read(model: Any, ids: Tensor, names: list[str], read: Callable[[str, Tensor], None]) -> None:
    """Hand what arrives at these points to `read`, and keep nothing of the run: its logits may be larger than all else."""
    with model.hooks([(name, read_only(lambda value, hook: read(hook.name, value))) for name in names]):
        model(ids, return_type=None)


@intervention(
    unit="nats", range="any", reading="higher: the shortcut matters more",
    source="Zhou et al. 2025 (shortcut removed from a trained model); controls ours", version=3,
)  # fmt: skip
@torch.no_grad()
def skip_ablation(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Change of the loss when the values that come from other layers are taken away, in one layer or in all.

    `zero`: a coefficient of 0, which also changes the scale (NeuTRENO's takes V_n away too). `mean`: their mean over all tokens of
    the sample. `shuffled`: values from other positions of the same document. `other`: values of the preceding document in the
    sample (the last one for the first; reversed positions if there is only one). Models without such a path have no rows.
    Caution: a trained model cannot make up for the loss; training without the path could.
    """
    by_layer = branches(model)
    batches = batches_of(model, sample, batch)
    if not by_layer:
        return
    sums: dict[str, Tensor] = {}

    def add(name: str, value: Tensor) -> None:
        sums[name] = sums.get(name, 0) + value.sum((0, 1), dtype=torch.float64)

    for ids in batches:
        _read(model, ids, [name for names in by_layer.values() for name in names], add)
    means = {name: total / sum(ids.numel() for ids in batches) for name, total in sums.items()}

    def shuffled(value: Tensor, hook: Any) -> Tensor:
        order = torch.randperm(value.shape[1], generator=torch.Generator().manual_seed(value.shape[1]))
        return value[:, order.to(value.device)]

    changes: dict[str, Callable[..., Tensor]] = {
        "zero": lambda value, hook: torch.zeros_like(value),
        "mean": lambda value, hook: means[hook.name].to(value).expand_as(value),
        "shuffled": shuffled,
    }
    plain = losses(model, batches)
    for layers in [*([n] for n in sorted(by_layer)), sorted(by_layer)]:
        names = [name for n in layers for name in by_layer[n]]
        axes = {"layer": layers[0]} if len(layers) == 1 else {}
        weights = [name for n in layers if (name := f"blocks.{n}.attn.hook_output_mix") in model.hook_dict]
        for how, change in changes.items():
            with model.hooks([(name, change) for name in [*names, *(weights if how == "zero" else [])]]):
                yield mean_row(losses(model, batches) - plain, variant=how, unit="nats", **axes)
        yield mean_row(_losses_of_others(model, sample, batch, names) - plain, variant="other", unit="nats", **axes)
        if len(by_layer) == 1:
            break


def _losses_of_others(model: Any, sample: Any, batch: int, names: list[str]) -> Tensor:
    """Loss per document with the values of the preceding document at these points, independent of the batches."""
    others, only = replace(sample, ids=sample.ids.roll(1, 0)), len(sample.ids) == 1
    changed = []
    for ids, before in zip(batches_of(model, sample, batch), batches_of(model, others, batch), strict=True):
        values: dict[str, Tensor] = {}
        _read(model, before, names, values.__setitem__)
        put = lambda _, hook, values=values: values.pop(hook.name).flip(1) if only else values.pop(hook.name)  # noqa: E731
        with model.hooks([(name, put) for name in names]):
            changed.append(losses(model, [ids]))
    return torch.cat(changed)


@intervention(
    unit="nats", range="any", reading="higher: the sublayer matters more",
    source="Zhou et al. 2025 (attention and MLP matter alike in deep layers), removal by zero", by_document=True,
)  # fmt: skip
@torch.no_grad()
def sublayer_removal(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Change of the loss when one layer's attention or MLP adds nothing to the stream.

    Caution: later layers read a stream they were never trained on; compare layers and models, not with training without.
    """
    batches = batches_of(model, sample, batch)
    plain = losses(model, batches, sample.segments)
    for layer in range(model.config.n_layers):
        for part, point in (("attention", "hook_attn_out"), ("mlp", "hook_mlp_out")):
            name = f"blocks.{layer}.{point}"
            if name not in model.hook_dict:
                continue
            with model.hooks([(name, lambda out, hook: torch.zeros_like(out))]):
                change = losses(model, batches, sample.segments) - plain
            yield mean_row(change, layer=layer, part=part, unit="nats")


@intervention(
    unit="cosine", range="-1..1", reading="higher: the approximation is better",
    source="Zhou et al. 2024 (same-key averaging against the identity map), before W_O, heads together", version=2,
)  # fmt: skip
@torch.no_grad()
def cross_layer_approximation(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """How well two shortcuts reproduce cross-layer attention to the previous layer, per layer of the unmodified model.

    Exact: U = softmax(Q_n [K_n; K_m]^T / sqrt(d)) [V_n; V_m], m = n - 1. `same_key`: A_n (V_n + V_m) / 2, as in a value residual.
    `identity`: A_n V_n + V_m; `identity_all`: A_n V_n + the mean of all earlier values. `own`: A_n V_n alone, the baseline. Mean
    cosine over tokens of the head outputs together. A model of one layer and layers whose pattern A_n is not softmax(Q_n K_n^T / sqrt(d))
    (sink logits, other layers' keys or patterns) have no rows. Caution: meant for a vanilla model.
    """
    from workbench.kernels.joint_and_null_softmax import Softmax, joint_attention

    layers = model.config.n_layers
    names = [f"blocks.{n}.attn.hook_{x}" for n in range(layers) for x in ("rot_q", "rot_k", "v")]
    if any(name not in model.hook_dict for name in names):
        return
    cosines, plain = ByDocument(), sorted(set(range(1, layers)) - {recipe.layer for recipe in model.recipes()})
    for ids in batches_of(model, sample, batch) if plain else ():
        _, cache = model.run_with_cache(ids, names_filter=names)
        q, k, v = ([cache[f"blocks.{n}.attn.hook_{x}"] for n in range(layers)] for x in ("rot_q", "rot_k", "v"))
        for n in plain:
            repeat = q[n].shape[2] // v[n].shape[2]
            wide = lambda x, repeat=repeat: x.repeat_interleave(repeat, dim=2)  # noqa: E731
            exact = joint_attention([Softmax(1.0, q[n], [k[n], k[n - 1]])], [v[n], v[n - 1]])
            own = joint_attention([Softmax(1.0, q[n], [k[n]])], [v[n]])
            mixed = joint_attention([Softmax(1.0, q[n], [k[n]])], [(v[n] + v[n - 1]) / 2])
            earlier = torch.stack(v[:n]).mean(0)
            guesses = {"same_key": mixed, "identity": own + wide(v[n - 1])}
            guesses |= {"identity_all": own + wide(earlier), "own": own}
            for how, guess in guesses.items():
                cosine = torch.cosine_similarity(exact.flatten(2).double(), guess.flatten(2).double(), dim=-1)
                cosines.add(cosine.mean(1), layer=n, unit="cosine", **{"control" if how == "own" else "variant": how})
    yield from cosines.rows()


SITES = ("own_v", "v", "q", "k")
REPLACEMENTS = ("token_mean", "mean", "zero")
TABLE_TOKENS = 65_536  # enough to see nearly every id of a small vocabulary
Groups = list[tuple[list[int], dict[str, int]]]  # layers that are replaced together, and the axes of their rows


def _hooks(model: HookedModel, site: str, layers: Sequence[int]) -> dict[int, str]:
    refuse_unknown("site", site, SITES)
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
    texts, observed = [torch.ones_like(tokens, dtype=torch.bool) for tokens in batches], cast(Any, model)
    if model.foreign is not None:  # an observed module's masks may hide padding
        texts = [observed.run_with_segments(tokens)[1].is_text for tokens in batches]
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
    `WorkbenchError` where no chosen layer has the site; the run raises `BadData` for tokens of another shape.
    """
    refuse_unknown("replacement", how, REPLACEMENTS)
    hooks = _hooks(model, means.site, layers)
    if not hooks:
        raise WorkbenchError(f"{model.architecture} has no {means.site} at layers {list(layers)}")
    seen = means.seen(tokens)[..., None, None]

    def swap(tensor: Tensor, hook: Any) -> Tensor:
        if tensor.shape[:2] != tokens.shape:
            given, here = tuple(tokens.shape), tuple(tensor.shape[:2])
            raise BadData(f"the vectors that replace {means.site} are of {given} tokens, but the model runs on {here}")
        return torch.where(seen, means.replacement(int(hook.layer()), tokens, how).to(tensor), tensor)

    with model.hooks([(name, swap) for name in hooks.values()]):
        yield model


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
    positions. `kept` = 1 - change(token mean) / change(zero): the share of the values' effect that the token alone supplies; NaN
    if the change under zero is not above two of its standard errors.
    The first layer's own values are a function of the token, so their change under the token mean is exactly 0 up to
    rounding: a built-in check. Own values are replaced at their projection, and so in every layer that reads them (value
    residuals, shared keys and values). `sites=("v",)` replaces one layer's effective values, in our models also where later
    layers read these. Caution: zero also changes the scale of attention's output; read it beside the mean. Unit: nats.
    """
    for site in sites:
        means = _training_means(model, sample, data, batch, site, max(1, TABLE_TOKENS // sample.ids.shape[1]))
        layers = sorted(means.sums)
        groups: Groups = [([layer], {"layer": layer}) for layer in layers]
        groups += [([layer for layer in layers if layer], {})]
        yield from _replacement_rows(model, sample, batch, means, groups, REPLACEMENTS)


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
    means = _training_means(model, sample, data, batch, "own_v", len(sample.ids))
    deep = [layer for layer in sorted(means.sums) if layer]
    yield from _replacement_rows(model, sample, batch, means, [(deep, {})], ("token_mean", "zero"))
    text = torch.ones_like(sample.ids, dtype=torch.bool) if sample.segments is None else sample.segments.is_text
    yield mean_row((means.seen(sample.ids) & text).sum(1) / text.sum(1), site="own_v", variant="seen", unit="share")


def _training_means(model: HookedModel, sample: Any, data: Any, batch: int, site: str, documents: int) -> TokenMeans:
    """Return a table of means from training sequences, which do not depend on the batch size."""
    if data is None:
        raise WorkbenchError("a table of means needs training sequences: give a run, or data with a training side")
    training = data.batch(0, documents, sample.ids.shape[1], 0).to(model.embed.weight.device)
    return token_means(model, site, training.split(batch))


def _replacement_rows(
    model: HookedModel, sample: Any, batch: int, means: TokenMeans, groups: Groups, ways: Sequence[str],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield what each way of replacing a group of layers changes, and the share that the token alone supplies."""

    @torch.no_grad()
    def each(layers: Sequence[int] = (), how: str | None = None) -> Tensor:
        """Return the loss (nats) per row with the site replaced as `how` says."""
        parts, start = [], 0
        for tokens in batches_of(model, sample, batch):
            end = start + len(tokens)
            segments = None if sample.segments is None else sample.segments.rows(start, end)
            with replaced(model, tokens, layers, how, means) if how else nullcontext():
                parts.append(losses(model, [tokens], segments))
            start = end
        return torch.cat(parts)

    plain = each()
    for layers, where in groups:
        if not layers:
            continue
        axes = {"site": means.site, **where}
        changes = {how: each(layers, how) - plain for how in ways}
        for how, change in changes.items():
            yield mean_row(change, **axes, variant=how, unit="nats")
        zero, token = mean_row(changes["zero"]), float(changes["token_mean"].mean())
        share = 1 - token / zero["value"] if zero["value"] > 2 * zero["se"] else math.nan  # else a ratio of noise
        yield {**axes, "variant": "kept", "value": share, "unit": "share", "n": len(plain)}


PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}


@intervention(
    unit="nats", range="any", reading="higher: what this projection reads of it matters more",
    source="this project: removal from one reader at a time, of the mean over the document",
)  # fmt: skip
@torch.no_grad()
def reader_ablation(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Change of the loss when one layer's queries, keys or values (site) alone no longer read one part of the stream.

    Part `embed` is the embedding, `latest` the output of the preceding layer (attention and MLP). The part's deviation from
    its document mean, with its weight in the stream, is removed before the norm. Layers after the first with their
    projections. Unit: nats. Caution: parts of a stream may replace each other, so compare projections, not parts. Six runs
    per layer. Models whose modules are not ours have no rows.
    """
    changes = ByDocument()
    for ids in batches_of(model, sample, batch) if isinstance(model, Transformer) else ():
        plain = losses(model, [ids])
        for layer in range(1, model.config.n_layers):
            block = model.blocks[layer]
            readers = {site: name for site, name in PROJECTIONS.items() if hasattr(block.attn, name)}
            stream = decompose(model, ids, layer)
            labelled = list(zip(stream.labels, stream.parts, strict=True))
            arriving = {
                "embed": next(x for label, x in labelled if label == "embed"),
                "latest": sum(x for label, x in labelled if label.startswith(f"{layer - 1}_")),
            }
            for part, x in arriving.items():
                reads = block.ln1((stream.whole - (x - x.mean(1, keepdim=True))).to(model.embed.weight.dtype))
                for site, name in readers.items():
                    projection = getattr(block.attn, name)
                    with model.lock:
                        handle = projection.register_forward_pre_hook(lambda _, __, reads=reads: (reads,))
                        try:
                            change = losses(model, [ids]) - plain
                        finally:
                            handle.remove()
                    changes.add(change, site=site, layer=layer, part=part, unit="nats")
    yield from changes.rows()
