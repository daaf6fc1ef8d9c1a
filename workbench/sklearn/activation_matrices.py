"""Activations as the matrix that scikit-learn reads: a row for each token, its id as the target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from workbench.errors import BadData, refuse_unknown
from workbench.hook_names import ACTIVATIONS
from workbench.interventions.registered_experiments import hook_points
from workbench.metrics.base import wide
from workbench.models.hooked import HookedModel
from workbench.prompts.prompt import by_layer

SITES = tuple(
    name for name, a in ACTIVATIONS.items() if a.axes.startswith("batch pos ") and name not in ("logits", "tokens")
)


def site_hooks(model: HookedModel, site: str) -> dict[int, str]:
    """Return the hook points of a site by layer, of the layers that have it; layer L of the stream is the final norm's input.

    Raises `UnknownName` for a site that has no vector for each token.
    """
    refuse_unknown("site", site, SITES)
    return hook_points(model, site)


def as_matrix(
    model: HookedModel, site: str, tokens: Any, *, layer: int | None = None, batch: int = 8
) -> tuple[np.ndarray, np.ndarray]:
    """Return the activations of a site at every token as a matrix, and the token ids.

    Args:
        model: A model of `load`, `build` or `observe`.
        site: A name of the list of activations with a vector for each token ("v", "own_v", "q", "k", "z", "stream", "attn_out"),
            or a hook point such as "blocks.3.attn.hook_v".
        tokens: Ids [documents, pos], or [pos] of one document.
        layer: Layer of a named site, from 0; the stream's layer L is the input of the final norm.
        batch: Documents per forward pass.

    Returns:
        X, float32 [documents * pos, width] with all heads of a token in one row, and y, int64 [documents * pos]. Row i is position
        i % pos of document i // pos.

    Raises:
        UnknownName: An unknown site.
        BadData: A layer without this site, a hook point without a vector for each token, or padding.
    """
    ids = as_ids(model, tokens)
    if site in model.hook_dict:
        name = site
        if layer is not None and f"blocks.{layer}." not in site:
            raise BadData(f"{site} is a hook point of its own layer: leave out layer={layer}")
    else:
        known = site_hooks(model, site)
        if layer not in known:
            raise BadData(f"layer {layer} has no {site}; choose from {list(known)}")
        name = known[layer]
    rows = [x for _, x in vectors(model, {0: name}, ids, batch)]
    return torch.cat(rows).numpy(), ids.flatten().numpy()


def as_matrices(
    model: HookedModel, site: str, tokens: Any, *, batch: int = 8
) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Return `as_matrix` of every layer that has the site, from one pass over the tokens: ({layer: X}, y)."""
    ids, parts = as_ids(model, tokens), dict[int, list[Tensor]]()
    for layer, x in vectors(model, site_hooks(model, site), ids, batch):
        parts.setdefault(layer, []).append(x)
    return {layer: torch.cat(parts[layer]).numpy() for layer in sorted(parts)}, ids.flatten().numpy()


def as_ids(model: HookedModel, tokens: Any) -> Tensor:
    """Return token ids [documents, pos] on the CPU, checked by the model."""
    ids: Tensor = model.to_tokens(tokens)
    return ids.cpu()


def vectors(model: HookedModel, names: Mapping[int, str], ids: Tensor, batch: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (layer, vectors [batch * pos, width]) batch by batch, float32 on the CPU; the model is locked for one batch at a time."""
    for part in ids.split(batch):
        found: list[tuple[int, Tensor]] = []
        text = None if model.foreign is None else cast(Any, model).run_with_segments(part)[1].is_text
        if text is not None and not text.all():
            count = f"{int((~text).sum())} of {text.numel()} tokens"
            raise BadData(f"{count} are padding, and would count as tokens: give documents of one length without it")

        def take(layer: int, tensors: dict[str, Tensor], part: Tensor = part, found: Any = found) -> None:
            ((name, x),) = tensors.items()
            if x.ndim < 3 or x.shape[:2] != part.shape:
                raise BadData(f"{name} has shape {tuple(x.shape)}, not a vector for each of {tuple(part.shape)} tokens")
            found.append((layer, wide(x.flatten(2).flatten(0, 1)).float().cpu()))

        with model.lock:
            by_layer(model, part.to(model.embed.weight.device), {layer: [name] for layer, name in names.items()}, take)
        yield from found
