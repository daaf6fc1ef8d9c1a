"""Gradients of activations: how strongly the loss pulls on them, and which layers shape the first layer's values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from workbench.interventions.ablation import branches
from workbench.interventions.base import batches_of, intervention, over_documents
from workbench.models.hooked import next_token_loss
from workbench.names import ACTIVATIONS, stream_hook

SITES = ("stream", "v", "attn_out", "mlp_out")


def _each(logits: Tensor, ids: Tensor) -> Tensor:
    """Sum over documents of each one's mean loss, so that a gradient does not depend on the batch."""
    return next_token_loss(logits, ids, per_token=True).mean(1).sum()


@intervention(
    unit="loss per activation unit", range=">= 0", reading="higher: the loss pulls harder here",
    source="Frobenius norm of the gradient of a document's mean loss",
)  # fmt: skip
def activation_gradient_norm(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Norm of the loss's gradient at the streams, the effective values and what attention and MLP add, per layer.

    ||dloss/dh||_F over the positions of a document. `relative`: times the activation's own norm, so that scale drops out.
    Caution: a larger activation has a smaller gradient at equal importance; read the relative form beside it.
    """
    n_layers = model.config.n_layers
    places = {stream_hook(n, n_layers): ("stream", n) for n in range(n_layers + 1)}
    for site in SITES[1:]:
        places |= {ACTIVATIONS[site].hook.format(layer=n): (site, n) for n in range(n_layers)}
    places = {name: place for name, place in places.items() if name in model.hook_dict}
    found: dict[tuple[str, int, str | None], list[Tensor]] = {}
    for ids in batches_of(model, sample, batch):
        _, values, grads = model.run_with_grads(ids, list(places), _each)
        for name, (site, layer) in places.items():
            norm = grads[name].double().flatten(1).norm(dim=-1).cpu()
            size = values[name].double().flatten(1).norm(dim=-1).cpu()
            found.setdefault((site, layer, None), []).append(norm)
            found.setdefault((site, layer, "relative"), []).append(norm * size)
    for (site, layer, variant), parts in found.items():
        unit = "loss per relative change" if variant else "loss per activation unit"
        yield over_documents(torch.cat(parts), site=site, layer=layer, variant=variant, unit=unit)


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
    places = {name: n for n, names in branches(model).items() for name in names if _reads_first(model, n, name)}
    if origin not in model.hook_dict:
        return
    found: dict[int, list[Tensor]] = {}
    for ids in batches_of(model, sample, batch):
        _, _, grads = model.run_with_grads(ids, [origin, *places], _each)
        total = grads[origin].double().flatten(1)
        size = total.square().sum(-1)
        shares = {n: (grads[name].double().flatten(1) * total).sum(-1) / size for name, n in places.items()}
        shares[0] = 1 - sum(shares.values(), torch.zeros_like(size))
        for layer, share in shares.items():
            found.setdefault(layer, []).append(share.cpu())
    for layer, parts in sorted(found.items()):
        yield over_documents(torch.cat(parts), layer=layer, unit="share")


def _reads_first(model: Any, layer: int, name: str) -> bool:
    """Whether a branch brings the first layer's values."""
    if name.endswith(".attn.cross.hook_v"):  # of one layer, which the name does not say
        return 0 in model.blocks[layer].attn.reads["v"]
    return name.endswith((".first.hook_v", ".source.0.hook_v", ".cross.0.hook_v"))
