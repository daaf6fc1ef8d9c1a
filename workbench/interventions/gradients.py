"""Gradients of activations: how strongly the loss pulls on them, and which layers shape the first layer's values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from workbench.interventions.ablation import branches
from workbench.interventions.base import batches_of, hook_points, intervention, mean_row
from workbench.models.hooked import next_token_loss
from workbench.names import before_branching

SITES = ("stream", "v", "attn_out", "mlp_out")


def _each(logits: Tensor, ids: Tensor) -> Tensor:
    """Sum over documents of each one's mean loss, so that a gradient does not depend on the batch."""
    return next_token_loss(logits, ids, per_token=True).mean(1).sum()


@intervention(
    unit="loss per activation unit", range=">= 0", reading="higher: the loss pulls harder here",
    source="Frobenius norm of the gradient of a document's mean loss", version=2,
)  # fmt: skip
def activation_gradient_norm(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Norm of the loss's gradient at the streams, the effective values and what attention and MLP add, per layer.

    ||dloss/dh||_F over the positions of a document, of all that reads the activation: a stream that later averages read too
    counts them beside its block. `relative`: times the activation's own norm, so that scale drops out.
    Caution: a larger activation has a smaller gradient at equal importance; read the relative form beside it.
    """
    points = {
        before_branching(model, n, name): (site, n) for site in SITES for n, name in hook_points(model, site).items()
    }
    results: dict[tuple[str, int, str | None], list[Tensor]] = {}
    for ids in batches_of(model, sample, batch):
        _, values, grads = model.run_with_grads(ids, list(points), _each)
        for name, (site, layer) in points.items():
            norm = grads[name].double().flatten(1).norm(dim=-1).cpu()
            size = values[name].double().flatten(1).norm(dim=-1).cpu()
            results.setdefault((site, layer, None), []).append(norm)
            results.setdefault((site, layer, "relative"), []).append(norm * size)
    for (site, layer, variant), parts in results.items():
        unit = "loss per relative change" if variant else "loss per activation unit"
        yield mean_row(torch.cat(parts), site=site, layer=layer, variant=variant, unit=unit)


@intervention(
    unit="share", range="any, sums to 1 over layers", reading="higher: this layer shapes the first layer's values more",
    source="chain rule over the branches of the first layer's values",
)  # fmt: skip
def shortcut_gradient_share(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Share of each layer in the gradient that reaches the first layer's values.

    With g = dloss/dV_1 and g_n the part that comes through layer n's branch (its coefficient included; layer 0: its own
    attention): <g_n, g> / ||g||^2. The shares sum to 1 exactly and may be negative. A model whose later layers do not read
    V_1 has a share of 1 in layer 0. Caution: a larger gradient of W_V in layer 0 of such models is close to a tautology,
    since every shortcut adds a term.
    """
    origin = "blocks.0.attn.hook_v"
    points = {name: n for n, names in branches(model).items() for name in names if _reads_first(model, n, name)}
    if origin not in model.hook_dict:
        return
    results: dict[int, list[Tensor]] = {}
    for ids in batches_of(model, sample, batch):
        _, _, grads = model.run_with_grads(ids, [origin, *points], _each)
        total = grads[origin].double().flatten(1)
        size = total.square().sum(-1)
        shares = {n: (grads[name].double().flatten(1) * total).sum(-1) / size for name, n in points.items()}
        shares[0] = 1 - sum(shares.values(), torch.zeros_like(size))
        for layer, share in shares.items():
            results.setdefault(layer, []).append(share.cpu())
    for layer, parts in sorted(results.items()):
        yield mean_row(torch.cat(parts), layer=layer, unit="share")


def _reads_first(model: Any, layer: int, name: str) -> bool:
    """Whether a branch brings the first layer's values."""
    if name.endswith(".attn.cross.hook_v"):  # of one layer, which the name does not say
        return 0 in model.blocks[layer].attn.attended["v"]
    return name.endswith((".source.0.hook_v", ".cross.0.hook_v"))
