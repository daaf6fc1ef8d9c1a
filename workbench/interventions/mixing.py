"""The coefficients an architecture has: where they stand, what they multiply, what they are now, how to set them.

| path | what is mixed | who has it |
|---|---|---|
| `v`, `q`, `k` | values, queries, keys, at `hook_v_mix` and its like | ResFormer and its forms, value embeddings, controls |
| `output` | what is added to the attention's output | NeuTRENO, identity mapping |
| `pattern` | attention patterns | attention residual |
| `stream` | outputs of blocks, at `hook_dwa_weights` | DenseFormer, hidden residual |
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.interventions.edits import Coefficient
from workbench.models.identity_map import IdentityMap
from workbench.models.neutreno import NeuTRENO
from workbench.models.residual_attention import AttentionResidual
from workbench.models.shortcut import Shortcut, Source

PATHS = ("v", "output", "q", "k", "pattern", "stream")
KNOBS: dict[str, dict[type[Shortcut], dict[str, str]]] = {
    "output": {NeuTRENO: {"first": "neutreno_lambda"}, IdentityMap: {"earlier": "identity_scale"}},
    "pattern": {AttentionResidual: {"first": "lambda_a1", "own": "lambda_a_own"}},
}
"""Coefficients that a shortcut reads off itself at each layer: path -> shortcut -> source -> its attribute."""


def sources_at(model: Any, path: str, layer: int) -> list[str]:
    """What the coefficients of a path multiply at a layer, in their order; empty where there are none."""
    attn = model.blocks[layer].attn
    if path in ("q", "k", "v"):
        return [*map(_name, attn.mixers[path][1]), "own"] if path in attn.mixers else []
    if path == "stream":
        averaged = model.averaged[layer]
        return [*("embed" if j == 0 else f"block.{j - 1}" for j in averaged[:-1]), "own"] if averaged else []
    return [source for source, _, _ in _knobs(model, path, layer)]


def _name(source: Source) -> str:
    if isinstance(source, str):
        return "table"
    return "first" if source == 0 else f"source.{source}"


def _knobs(model: Any, path: str, layer: int) -> list[tuple[str, Shortcut, str]]:
    """(source, shortcut, attribute) of the coefficients a shortcut holds as numbers and uses at a layer."""
    tensor = "v" if path == "output" else "rot_k"
    return [
        (source, shortcut, attribute)
        for shortcut in model.shortcuts
        for source, attribute in KNOBS.get(path, {}).get(type(shortcut), {}).items()
        if shortcut.sources(tensor, layer)
    ]


def indices(source: str, names: Sequence[str]) -> list[int]:
    """Which of a layer's coefficients an edit sets; without a source all but the own."""
    return [i for i, name in enumerate(names) if (name == source if source else name != "own")]


def path_of(model: Any, edit: Coefficient) -> str:
    """The path an edit speaks of; the value path where it names none. Raises `WorkbenchError` where there is none."""
    has = [p for p in PATHS if any(sources_at(model, p, n) for n in range(model.config.n_layers))]
    if edit.path in has:
        return edit.path
    if not edit.path and (values := [p for p in ("v", "output") if p in has]):
        return values[0]
    asked = f"coefficient of {edit.path}" if edit.path else "coefficient of a value path"
    choices = f"it has path={' or '.join(has)}" if has else "it has none at all"
    raise WorkbenchError(f"{edit}: {model.architecture} has no {asked}; {choices}")


def mixing_hook(path: str, layer: int) -> str:
    """Hook point of the coefficients of a path."""
    return f"blocks.{layer}.hook_dwa_weights" if path == "stream" else f"blocks.{layer}.attn.hook_{path}_mix"


def turn_knobs(model: Any, edit: Coefficient, layer: int, stack: ExitStack) -> None:
    """Set a shortcut's number while one layer's attention runs, until the stack closes."""
    path = path_of(model, edit)
    names = sources_at(model, path, layer)
    chosen = [names[i] for i in indices(edit.source, names)]
    for source, shortcut, attribute in _knobs(model, path, layer):
        if source in chosen:
            _turn(model.blocks[layer].attn, shortcut, attribute, edit.value, stack)


def _turn(attn: Any, shortcut: Shortcut, attribute: str, value: float, stack: ExitStack) -> None:
    before: list[float] = []

    def begin(module: Any, args: Any) -> None:
        before.append(getattr(shortcut, attribute))
        setattr(shortcut, attribute, value)

    def end(module: Any, args: Any, out: Any) -> None:
        if before:  # called after errors too, also of what stood before the beginning
            setattr(shortcut, attribute, before.pop())

    stack.callback(attn.register_forward_pre_hook(begin).remove)
    stack.callback(attn.register_forward_hook(end, prepend=True, always_call=True).remove)


@torch.no_grad()
def coefficients(model: Any) -> list[Coefficient]:
    """Every coefficient of a model with the value it has now, as the edit that changes nothing."""
    found: list[Coefficient] = []
    held: dict[str, Tensor] = {}
    places = [(p, n) for p in PATHS for n in range(model.config.n_layers) if sources_at(model, p, n)]
    names = [mixing_hook(p, n) for p, n in places if p not in KNOBS]
    with model.hooks([(name, lambda x, hook: held.update({hook.name: x.detach()})) for name in names]):
        model(torch.zeros(1, 1, dtype=torch.long), return_type=None)
    for path, layer in places:
        numbers = [getattr(s, a) for _, s, a in _knobs(model, path, layer)]
        values = numbers if path in KNOBS else held[mixing_hook(path, layer)].tolist()
        for source, value in zip(sources_at(model, path, layer), values, strict=True):
            found.append(Coefficient(layer=(layer,), source=source, path=path, value=value))
    return found
