"""Ablations of paths: the value shortcut, one attention, one MLP."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench.interventions.base import batches_of, intervention, losses, mean_row
from workbench.models.hook_points import read_only

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


def _position_mean(model: Any, batches: list[Tensor], names: list[str]) -> dict[str, Tensor]:
    totals: dict[str, Tensor] = {}

    def add(name: str, value: Tensor) -> None:
        totals[name] = totals.get(name, 0) + value.sum((0, 1), dtype=torch.float64)

    for ids in batches:
        _read(model, ids, names, add)
    count = sum(ids.numel() for ids in batches)
    return {name: total / count for name, total in totals.items()}


@intervention(
    unit="nats", range="any", reading="higher: the shortcut matters more",
    source="Zhou et al. 2025 (shortcut removed from a trained model); controls ours", version=2,
)  # fmt: skip
@torch.no_grad()
def skip_ablation(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Change of the loss when the values that come from other layers are taken away, in one layer or in all.

    `zero`: a coefficient of 0, which also changes the scale. `mean`: their mean over all tokens of the sample. `shuffled`:
    values from other positions of the same document. `other`: values of the preceding document in the sample (the last one
    for the first; reversed positions if there is only one). Models without
    such a path have no rows. Caution: a trained model cannot make up for the loss; training without the path could.
    """
    by_layer = branches(model)
    batches = batches_of(model, sample, batch)
    if not by_layer:
        return
    everything = [name for names in by_layer.values() for name in names]
    means, plain = _position_mean(model, batches, everything), losses(model, batches)
    for layers in [*([n] for n in sorted(by_layer)), sorted(by_layer)]:
        names = [name for n in layers for name in by_layer[n]]
        axes = {"layer": layers[0]} if len(layers) == 1 else {}
        for how, change in _changes(means).items():
            with model.hooks([(name, change) for name in names]):
                yield mean_row(losses(model, batches) - plain, variant=how, unit="nats", **axes)
        yield mean_row(_losses_of_others(model, sample, batch, names) - plain, variant="other", unit="nats", **axes)
        if len(by_layer) == 1:
            break


def _changes(means: dict[str, Tensor]) -> dict[str, Callable[..., Tensor]]:
    def shuffled(value: Tensor, hook: Any) -> Tensor:
        order = torch.randperm(value.shape[1], generator=torch.Generator().manual_seed(value.shape[1]))
        return value[:, order.to(value.device)]

    return {
        "zero": lambda value, hook: torch.zeros_like(value),
        "mean": lambda value, hook: means[hook.name].to(value).expand_as(value),
        "shuffled": shuffled,
    }


def _losses_of_others(model: Any, sample: Any, batch: int, names: list[str]) -> Tensor:
    """Loss per document with the values of the preceding document at these points, independent of the batches."""
    others, only = replace(sample, ids=sample.ids.roll(1, 0)), len(sample.ids) == 1
    found = []
    for ids, before in zip(batches_of(model, sample, batch), batches_of(model, others, batch), strict=True):
        values: dict[str, Tensor] = {}
        _read(model, before, names, values.__setitem__)
        put = lambda _, hook, values=values: values.pop(hook.name).flip(1) if only else values.pop(hook.name)  # noqa: E731
        with model.hooks([(name, put) for name in names]):
            found.append(losses(model, [ids]))
    return torch.cat(found)


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
    source="Zhou et al. 2024 (same-key averaging against the identity map), before W_O, heads together",
)  # fmt: skip
@torch.no_grad()
def cross_layer_approximation(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """How well two shortcuts reproduce cross-layer attention to the previous layer, per layer of the unmodified model.

    Exact: U = softmax(Q_n [K_n; K_m]^T / sqrt(d)) [V_n; V_m], m = n - 1. `same_key`: A_n (V_n + V_m) / 2, as in a value
    residual. `identity`: A_n V_n + V_m; `identity_all`: A_n V_n + the mean of all earlier values. `own`: A_n V_n
    alone, the baseline. Mean cosine over tokens of the head outputs together. A model of one layer has no rows.
    Caution: meant for a vanilla model.
    """
    from workbench.kernels.joint import Softmax, joint_attention

    layers = model.config.n_layers
    names = [f"blocks.{n}.attn.hook_{x}" for n in range(layers) for x in ("rot_q", "rot_k", "v")]
    if any(name not in model.hook_dict for name in names):
        return
    cosines: dict[tuple[int, str], list[Tensor]] = {}
    for ids in batches_of(model, sample, batch):
        _, cache = model.run_with_cache(ids, names_filter=names)
        q, k, v = ([cache[f"blocks.{n}.attn.hook_{x}"] for n in range(layers)] for x in ("rot_q", "rot_k", "v"))
        for n in range(1, layers):
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
                cosines.setdefault((n, how), []).append(cosine.mean(1).cpu())
    for (layer, how), parts in cosines.items():
        row = mean_row(torch.cat(parts), layer=layer, unit="cosine")
        yield row | ({"control": "own"} if how == "own" else {"variant": how})
