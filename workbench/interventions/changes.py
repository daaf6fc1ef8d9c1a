"""What stands in for activations under an edit: hooks, and what they read of the unedited model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.errors import BadData
from workbench.interventions.edits import Coefficient, Edit, Head, Numbers, Patch, Remove, Values
from workbench.interventions.mixing import indices, mixing_hook, path_of, sources_at
from workbench.interventions.places import Inputs, layers_of, names_at
from workbench.models.hooked import HookedModel

Hook = tuple[str, Callable[..., Any]]


@torch.no_grad()
def hold(model: HookedModel, edit: Edit, layers: Sequence[int], inputs: Inputs) -> None:
    """Run the prompts once for all activations that the edit reads and `inputs` lacks."""
    which = "same" if getattr(edit, "how", "") == "layer" or getattr(edit, "prompt", "") == "same" else "other"
    wanted: list[str] = []
    if isinstance(edit, Patch) or (isinstance(edit, Values) and edit.how == "prompt"):
        wanted = [name for n in layers for name in names_at(model, edit, n)]
    elif isinstance(edit, Values) and edit.how == "layer":
        wanted = [_lending(model, edit)]
    if wanted := [name for name in wanted if (which, name) not in inputs.held]:
        ids = inputs.tokens if which == "same" else inputs.other
        _, cache = model.run_with_cache(ids, names_filter=wanted, return_type=None)
        inputs.held.update({(which, name): cache[name] for name in wanted})


def _lending(model: HookedModel, edit: Values) -> str:
    """Hook point of the values that `how=layer` puts elsewhere; what arrives is exchanged for effective values."""
    site = "v" if edit.site == "arriving" else edit.site
    source = Values(layer=(edit.from_layer,), site=site)
    layers_of(model, source)
    return names_at(model, source, edit.from_layer)[0]


def _coefficient(model: HookedModel, edit: Coefficient, layer: int, inputs: Inputs) -> list[Hook]:
    path = path_of(model, edit)
    at = indices(edit.source, sources_at(model, path, layer))

    def change(weights: Tensor, hook: Any) -> Tensor:
        weights = weights.clone()
        weights[at] = edit.value
        return weights

    return [(mixing_hook(path, layer), change)]


def _values(model: HookedModel, edit: Values, layer: int, inputs: Inputs) -> list[Hook]:
    def change(tensor: Tensor, hook: Any) -> Tensor:
        return _into(tensor, _replacement(model, edit, layer, tensor, str(hook.name), inputs), edit.head)

    return [(name, change) for name in names_at(model, edit, layer)]


def _replacement(model: HookedModel, edit: Values, layer: int, tensor: Tensor, name: str, inputs: Inputs) -> Tensor:
    """What stands in for values [batch, pos, kv_head, d_head]."""
    if edit.how == "zero":
        return torch.zeros_like(tensor)
    if edit.how == "mean":
        return _mean(tensor)
    if edit.how == "shuffle":
        order = torch.randperm(tensor.shape[1], generator=torch.Generator().manual_seed(edit.seed))
        return tensor[:, order.to(tensor.device)]
    _same_prompt(edit, tensor, inputs)
    if edit.how == "token_mean":
        table, tokens = inputs.means[edit.site], inputs.tokens
        assert tokens is not None
        return torch.where(
            table.seen(tokens)[..., None, None], table.replacement(layer, tokens, "token_mean").to(tensor), tensor
        )
    key = ("same", _lending(model, edit)) if edit.how == "layer" else ("other", name)
    return inputs.held[key].expand_as(tensor)


def _head(model: HookedModel, edit: Head, layer: int, inputs: Inputs) -> list[Hook]:
    def change(z: Tensor, hook: Any) -> Tensor:
        return _into(z, torch.zeros_like(z) if edit.how == "zero" else _mean(z), edit.head)

    return [(name, change) for name in names_at(model, edit, layer)]


def _remove(model: HookedModel, edit: Remove, layer: int, inputs: Inputs) -> list[Hook]:
    return [(name, lambda out, hook: torch.zeros_like(out)) for name in names_at(model, edit, layer)]


def _patch(model: HookedModel, edit: Patch, layer: int, inputs: Inputs) -> list[Hook]:
    def change(tensor: Tensor, hook: Any) -> Tensor:
        _same_prompt(edit, tensor, inputs)
        source = inputs.held[edit.prompt, str(hook.name)]
        length = tensor.shape[1]
        to = [p % length for p in edit.position] or list(range(length))
        chosen = edit.from_position or edit.position
        read = [p % source.shape[1] for p in chosen] or list(range(length))
        read = read * len(to) if len(read) == 1 else read
        if len(read) != len(to):
            raise BadData(f"{edit}: {len(read)} positions to read for {len(to)} to set; give as many, or one")
        new = tensor.clone()
        new[:, to] = source[:, read].to(tensor)
        return _into(tensor, new, edit.head)

    return [(name, change) for name in names_at(model, edit, layer)]


HOOKS: dict[type[Edit], Callable[..., list[Hook]]] = {
    Coefficient: _coefficient, Values: _values, Remove: _remove, Patch: _patch, Head: _head,
}  # fmt: skip


def _into(tensor: Tensor, new: Tensor, heads: Numbers) -> Tensor:
    """`new` at the heads [batch, pos, head, d_head], all where none is named; `tensor` elsewhere."""
    if not heads:
        return new
    out = tensor.clone()
    out[:, :, list(heads)] = new[:, :, list(heads)]
    return out


def _mean(tensor: Tensor) -> Tensor:
    """The mean over positions at each of them."""
    return tensor.mean(1, keepdim=True).expand_as(tensor)


def _same_prompt(edit: Edit, tensor: Tensor, inputs: Inputs) -> None:
    assert inputs.tokens is not None
    if tensor.shape[:2] != inputs.tokens.shape:
        raise BadData(
            f"{edit} stands for a prompt of {tuple(inputs.tokens.shape)} tokens, but the model runs on"
            f" {tuple(tensor.shape[:2])}"
        )
