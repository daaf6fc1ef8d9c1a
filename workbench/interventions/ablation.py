"""What the model loses without a path: the value shortcut, a whole attention, a whole MLP."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from workbench.interventions.base import batches_of, intervention, losses, over_documents

_BRANCH = re.compile(r"blocks\.(\d+)\.attn\.(?:first|source\.\d+|table|cross(?:\.\d+)?)\.hook_v")


def branches(model: Any) -> dict[int, list[str]]:
    """Hook points at which other layers' (or a table's) values arrive, by layer."""
    found: dict[int, list[str]] = {}
    for name in model.hook_dict:
        if match := _BRANCH.fullmatch(name):
            found.setdefault(int(match[1]), []).append(name)
    return found


def _position_mean(model: Any, batches: list[Tensor], names: list[str]) -> dict[str, Tensor]:
    totals: dict[str, Tensor] = {}
    for ids in batches:
        _, cache = model.run_with_cache(ids, names_filter=names)
        for name in names:
            totals[name] = totals.get(name, 0) + cache[name].double().sum((0, 1))
    count = sum(ids.numel() for ids in batches)
    return {name: total / count for name, total in totals.items()}


@intervention(
    unit="nats", range="any", reading="higher: the shortcut matters more",
    source="Zhou et al. 2025 (shortcut removed from a trained model); controls ours",
)  # fmt: skip
@torch.no_grad()
def skip_ablation(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Change of the loss when the values that come from other layers are taken away, in one layer or in all.

    `zero`: nothing arrives (a coefficient of 0, which also changes the scale); `mean`: their mean over all tokens of the
    sample; `shuffled`: those of other positions of the same document; `other`: those of another document. Models without
    such a path have no rows. Caution: a trained model cannot make up for the loss; training without the path could.
    """
    found = branches(model)
    batches = batches_of(model, sample, batch)
    if not found:
        return
    everything = [name for names in found.values() for name in names]
    means, plain = _position_mean(model, batches, everything), losses(model, batches)
    for layers in [*([n] for n in sorted(found)), sorted(found)]:
        names = [name for n in layers for name in found[n]]
        axes = {"layer": layers[0]} if len(layers) == 1 else {}
        for how, change in _changes(means).items():
            with model.hooks([(name, change) for name in names]):
                yield over_documents(losses(model, batches) - plain, variant=how, unit="nats", **axes)
        if len(found) == 1:
            break


def _changes(means: dict[str, Tensor]) -> dict[str, Callable[..., Tensor]]:
    def shuffled(value: Tensor, hook: Any) -> Tensor:
        order = torch.randperm(value.shape[1], generator=torch.Generator().manual_seed(value.shape[1]))
        return value[:, order.to(value.device)]

    return {
        "zero": lambda value, hook: torch.zeros_like(value),
        "mean": lambda value, hook: means[hook.name].to(value).expand_as(value),
        "shuffled": shuffled,
        "other": lambda value, hook: value.roll(1, 0) if len(value) > 1 else value.flip(1),
    }


@intervention(
    unit="nats", range="any", reading="higher: the sublayer matters more",
    source="Zhou et al. 2025 (attention and MLP matter alike in deep layers), removal by zero",
)  # fmt: skip
@torch.no_grad()
def sublayer_removal(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Change of the loss when one layer's attention or MLP adds nothing to the stream.

    Caution: later layers read a stream they were never trained on; compare layers and models, not with training without.
    """
    batches = batches_of(model, sample, batch)
    plain = losses(model, batches)
    for layer in range(model.config.n_layers):
        for part, point in (("attention", "hook_attn_out"), ("mlp", "hook_mlp_out")):
            name = f"blocks.{layer}.{point}"
            if name not in model.hook_dict:
                continue
            with model.hooks([(name, lambda out, hook: torch.zeros_like(out))]):
                change = losses(model, batches) - plain
            yield over_documents(change, layer=layer, part=part, unit="nats")


@intervention(
    unit="cosine", range="-1..1", reading="higher: the approximation is better",
    source="Zhou et al. 2024 (same-key averaging against the identity map), before W_O, heads together",
)  # fmt: skip
@torch.no_grad()
def cross_layer_approximation(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """How well two shortcuts reproduce cross-layer attention to the previous layer, per layer of the unmodified model.

    Exact: U = softmax(Q_n [K_n; K_m]^T / sqrt(d)) [V_n; V_m], m = n - 1. `same_key`: A_n (V_n + V_m) / 2, what a value
    residual computes. `identity`: A_n V_n + V_m; `identity_all`: A_n V_n + the mean of all earlier values. `own`: A_n V_n
    alone, the baseline. Mean cosine over tokens of the head outputs together. A model of one layer has no rows.
    Caution: meant for a vanilla model.
    """
    from workbench.kernels.joint import Softmax, joint_attention

    layers = model.config.n_layers
    names = [f"blocks.{n}.attn.hook_{x}" for n in range(layers) for x in ("rot_q", "rot_k", "v")]
    if any(name not in model.hook_dict for name in names):
        return
    found: dict[tuple[int, str], list[Tensor]] = {}
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
            guesses = {
                "same_key": mixed,
                "identity": own + wide(v[n - 1]),
                "identity_all": own + wide(earlier),
                "own": own,
            }
            for how, guess in guesses.items():
                cosine = torch.cosine_similarity(exact.flatten(2).double(), guess.flatten(2).double(), dim=-1)
                found.setdefault((n, how), []).append(cosine.mean(1).cpu())
    for (layer, how), parts in found.items():
        row = over_documents(torch.cat(parts), layer=layer, unit="cosine")
        yield row | ({"control": "own"} if how == "own" else {"variant": how})
