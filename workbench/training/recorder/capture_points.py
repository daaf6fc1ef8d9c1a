"""Capture points: modules at which streams, values and attention statistics are read in training, and names of matrices.

Our models and modules under `workbench.observe` have named hook points. In other modules, a list of similar blocks gives
the streams: each block's input, and the output of the last block. A value projection inside a block gives its own values,
which may differ from the values that its attention uses.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch import Tensor, nn

from workbench.metrics.weights import PARTS, part_of
from workbench.names import ACTIVATIONS, NamedHookPoints, before_branching, stream_hook

VALUE_PROJECTIONS = ("v_proj", "value", "value_proj", "v_lin", "to_v", "wv", "w_v", "W_V")
"""Names of a linear map whose output is a block's values."""
FOREIGN_PARTS = {
    "attn.c_attn": "W_QKV", "attn.c_proj": "W_O", "mlp.c_fc": "W_up", "mlp.c_proj": "W_down",
    "wte": "W_E", "embed_tokens": "W_E", "wpe": "W_pos", "lm_head": "W_U",
}  # fmt: skip
"""Matrices of GPT-2's and Llama's layouts that our own models name otherwise."""


LISTS = (nn.ModuleList, nn.Sequential)
ATTENTION_INPUT = "attention input"
"""Alias of the attention's normalised input, which has no hook point and is read at the module that uses it."""


def _whole(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class CapturePoint:
    """A place to read one activation: `part` of the tensor that `find` returns for a module's inputs (`before`) or output."""

    alias: str
    axes: Mapping[str, Any]  # site and layer of records
    module: nn.Module
    find: Callable[[Any], Tensor | None]
    part: Callable[[Tensor], Tensor] = _whole
    before: bool = False
    is_branch: bool = False  # a hook point: its gradient is that of its output alone
    read_only: bool = False  # a copy without a gradient


def has_named_hooks(model: nn.Module) -> bool:
    """Return whether a module has our hook points: our model, or a foreign one under `workbench.observe`."""
    return isinstance(model, NamedHookPoints)


def is_observed(model: nn.Module) -> bool:
    """Return whether it is a foreign module under `workbench.observe`."""
    return isinstance(model, NamedHookPoints) and model.foreign is not None


def capture_points(model: nn.Module, aliases: Iterable[str]) -> list[CapturePoint]:
    """Return every place at which the activations can be read; empty for activations that the module does not show."""
    find = _named_points if has_named_hooks(model) else _foreign_points
    wanted = dict.fromkeys(aliases)
    inputs = list(_attention_inputs(model)) if wanted.pop(ATTENTION_INPUT, "absent") is None else []
    return [point for alias in wanted for point in find(model, alias)] + inputs


def _activation(output: Any) -> Tensor | None:
    return output if isinstance(output, Tensor) and output.ndim > 2 else None


def _named_points(model: Any, alias: str) -> Iterator[CapturePoint]:
    n_layers = model.config.n_layers
    layers: list[Any] = [*range(n_layers), *([n_layers, "final"] if alias == "stream" else [])]
    for layer in layers:
        name = stream_hook(layer, n_layers) if alias == "stream" else ACTIVATIONS[alias].hook.format(layer=layer)
        if name in model.hook_dict:
            name = before_branching(model, layer, name)
            axes = {"site": "final", "layer": n_layers} if layer == "final" else {"site": alias, "layer": layer}
            read_only = is_observed(model) and model.is_read_only(name)
            hook_point = model.hook_dict[name]
            yield CapturePoint(alias, axes, hook_point, _activation, is_branch=not read_only, read_only=read_only)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the decoder's blocks: the outermost list of similar modules that is nearest to the token embedding, else the longest.

    This excludes experts inside blocks and a separate vision tower. Modules are similar if they have one class, or if their
    children share a name (hybrids).
    """
    tables = {n: m.num_embeddings for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    table = max(tables, key=lambda name: tables[name], default="")
    lists = {n: m for n, m in model.named_modules() if isinstance(m, LISTS) and _alike(m)}
    inside = {n: m for n, m in lists.items() if not _holds(n, table)}  # else it contains the decoder
    outermost = {n: m for n, m in inside.items() if not any(_holds(other, n) for other in inside)}

    def nearness(name: str) -> tuple[int, int]:
        one, other = name.split("."), table.split(".")
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
        return 2 * shared - len(one) - len(other), len(outermost[name])

    return list(outermost[max(outermost, key=nearness)]) if outermost else []


def _holds(outer: str, inner: str) -> bool:
    """Return whether one named module contains another."""
    return inner.startswith(f"{outer}.") or (outer == "" != inner)


def _alike(parts: nn.ModuleList | nn.Sequential) -> bool:
    """Return whether all modules of a list have children, and one class or a child of the same name."""
    names = [{name for name, child in part.named_children() if not isinstance(child, LISTS)} for part in parts]
    one_class = len({type(part) for part in parts}) == 1 and all(any(part.children()) for part in parts)
    shared = isinstance(parts, nn.ModuleList) and bool(names and set.intersection(*names))
    return one_class or shared


def _foreign_points(model: nn.Module, alias: str) -> Iterator[CapturePoint]:
    blocks = blocks_of(model)
    if alias == "stream" and blocks:
        for layer, block in enumerate(blocks):
            yield CapturePoint(alias, {"site": alias, "layer": layer}, block, _first_states, before=True)
        yield CapturePoint(alias, {"site": alias, "layer": len(blocks)}, blocks[-1], _first_states)
    for layer, block in enumerate(blocks if alias == "own_v" else ()):
        projection = _value_projection(block)
        if projection is not None:
            module, part = projection
            yield CapturePoint(alias, {"site": alias, "layer": layer}, module, _activation, part)


def _attention_inputs(model: Any) -> Iterator[CapturePoint]:
    """Yield the inputs of our attention modules, and the inputs of other blocks' value projections."""
    ours = has_named_hooks(model) and not is_observed(model)
    for layer, block in enumerate(model.blocks if ours else blocks_of(model.foreign if is_observed(model) else model)):
        projection = None if ours else _value_projection(block)
        if (module := block.attn if ours else projection and projection[0]) is not None:
            yield CapturePoint(ATTENTION_INPUT, {"layer": layer}, module, _first_states, before=True)


def _value_projection(block: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Tensor]] | None:
    for name, module in block.named_modules():
        last = name.rsplit(".", 1)[-1]
        if last in VALUE_PROJECTIONS and hasattr(module, "weight"):
            return module, _whole
        if last == "c_attn" and getattr(module, "weight", None) is not None:
            rows, columns = sorted(module.weight.shape)
            if columns == 3 * rows:  # GPT-2's queries, keys and values in one
                return module, lambda tensor: tensor.chunk(3, -1)[2]
    return None


def _first_states(tensors: Any) -> Tensor | None:
    """Return the first tensor [batch, pos, width] among inputs (args, kwargs) or outputs."""
    if isinstance(tensors, Tensor):
        return tensors if tensors.ndim == 3 and tensors.is_floating_point() else None
    parts = tensors.values() if isinstance(tensors, Mapping) else tensors if isinstance(tensors, tuple | list) else ()
    return next((state for part in parts if (state := _first_states(part)) is not None), None)


Places = dict[str, tuple[str, int | None]]


def matrix_places(model: nn.Module, known: Places | None = None) -> Places:
    """Return a unique (part, layer) of each trained matrix by parameter name; parts of foreign modules start with `W_`.

    Matrices in `known` stay as they were, and new ones are added.
    """
    known = known or {}
    names = [name for name, p in model.named_parameters() if p.ndim > 1 and p.requires_grad and name not in known]
    place_of = part_of if has_named_hooks(model) and not is_observed(model) else _foreign_place
    places = {name: place_of(name) for name in names}
    counts = Counter([*places.values(), *known.values()])
    new = {name: at if counts[at] == 1 else (f"W_{_stripped(name)}", at[1]) for name, at in places.items()}
    return known | new


def _stripped(name: str) -> str:
    return name.replace("_orig_mod.", "").removesuffix(".weight")


def _foreign_place(name: str) -> tuple[str, int | None]:
    match = re.search(r"(?:^|\.)(\d+)\.(.+)$", _stripped(name))
    stem = match[2] if match else _stripped(name)
    last = stem.rsplit(".", 1)[-1]
    known = FOREIGN_PARTS.get(".".join(stem.split(".")[-2:])) or FOREIGN_PARTS.get(last)
    return PARTS.get(last) or known or f"W_{stem}", int(match[1]) if match else None
