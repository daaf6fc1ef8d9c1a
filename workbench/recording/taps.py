"""Where a module's streams, values and attention statistics pass by, and what its matrices are called.

Our models, and modules under `workbench.observe`: hook points by name. Anyone else's: the longest list of like blocks gives
the streams (what each block reads, and what leaves the last); a value projection inside a block gives the values.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from workbench.metrics.weights import PARTS, part_of
from workbench.names import ACTIVATIONS, stream_hook

VALUES = ("v_proj", "value", "value_proj", "v_lin", "to_v", "wv", "w_v", "W_V")
"""Names of a linear map whose output is a block's values."""

FOREIGN = {
    "attn.c_attn": "W_QKV", "attn.c_proj": "W_O", "mlp.c_fc": "W_up", "mlp.c_proj": "W_down",
    "wte": "W_E", "embed_tokens": "W_E", "wpe": "W_pos", "lm_head": "W_U",
}  # fmt: skip
"""Matrices of GPT-2's and Llama's layouts that our own models name otherwise."""


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _last_third(tensor: Tensor) -> Tensor:
    return tensor.chunk(3, -1)[2]


@dataclass(frozen=True)
class Tap:
    """A place where one activation passes: `part` of the tensor that `take` finds in what the module got (`before`) or gave."""

    alias: str
    axes: Mapping[str, Any]  # site and layer, as records name them
    module: nn.Module
    take: Callable[[Any], Tensor | None]
    part: Callable[[Tensor], Tensor] = _as_it_is
    before: bool = False
    branch: bool = False  # a hook point: its gradient is that of what leaves it there alone
    inert: bool = False  # a copy beside the model: it carries no gradient


def is_ours(model: nn.Module) -> bool:
    """Whether a module is one of the package's models; does not import them for the sake of asking."""
    hooked = sys.modules.get("workbench.models.hooked")
    return hooked is not None and isinstance(model, hooked.HookedModel)


def is_observed(model: nn.Module) -> bool:
    """Whether it is somebody else's module under our names."""
    observed = sys.modules.get("workbench.observing.observed")
    return observed is not None and isinstance(model, observed.Observed)


def taps_of(model: nn.Module, aliases: Iterable[str]) -> list[Tap]:
    """Every place where one of the named activations passes; empty for those that this module does not show."""
    find = _our_taps if is_ours(model) else _foreign_taps
    return [tap for alias in dict.fromkeys(aliases) for tap in find(model, alias)]


def _whole(found: Any) -> Tensor | None:
    return found if isinstance(found, Tensor) and found.ndim > 2 else None


def _our_taps(model: Any, alias: str) -> Iterator[Tap]:
    n_layers = model.config.n_layers
    places: list[Any] = [*range(n_layers), *([n_layers, "final"] if alias == "stream" else [])]
    for layer in places:
        name = stream_hook(layer, n_layers) if alias == "stream" else ACTIVATIONS[alias].hook.format(layer=layer)
        if name in model.hook_dict:
            axes = {"site": "final", "layer": n_layers} if layer == "final" else {"site": alias, "layer": layer}
            inert = is_observed(model) and model.inert(name)
            yield Tap(alias, axes, model.hook_dict[name], _whole, branch=not inert, inert=inert)


# ---- anyone else's modules -------------------------------------------------------------------------------------------


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The decoder's blocks: the longest list of modules of one class that have parts themselves."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m)]
    alike = [list(m) for m in lists if len({type(c) for c in m}) == 1 and all(any(c.children()) for c in m)]
    return max(alike, key=len, default=[])


def _foreign_taps(model: nn.Module, alias: str) -> Iterator[Tap]:
    blocks = blocks_of(model)
    if alias == "stream" and blocks:
        for layer, block in enumerate(blocks):
            yield Tap(alias, {"site": alias, "layer": layer}, block, _first_states, before=True)
        yield Tap(alias, {"site": alias, "layer": len(blocks)}, blocks[-1], _first_states)
    for layer, block in enumerate(blocks if alias == "v" else ()):
        found = _value_projection(block)
        if found is not None:
            yield Tap(alias, {"site": alias, "layer": layer}, found[0], _whole, found[1])


def _value_projection(block: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Tensor]] | None:
    for name, module in block.named_modules():
        last = name.rsplit(".", 1)[-1]
        if last in VALUES and hasattr(module, "weight"):
            return module, _as_it_is
        if last == "c_attn" and getattr(module, "weight", None) is not None:
            rows, columns = sorted(module.weight.shape)
            if columns == 3 * rows:  # GPT-2's queries, keys and values in one
                return module, _last_third
    return None


def _first_states(found: Any) -> Tensor | None:
    """The first [batch, pos, width] among arguments (args, kwargs) or outputs."""
    if isinstance(found, Tensor):
        return found if found.ndim == 3 and found.is_floating_point() else None
    parts = found.values() if isinstance(found, Mapping) else found if isinstance(found, tuple | list) else ()
    return next((state for part in parts if (state := _first_states(part)) is not None), None)


# ---- matrices --------------------------------------------------------------------------------------------------------


def places(model: nn.Module) -> dict[str, tuple[str, int | None]]:
    """(part, layer) of each matrix by parameter name, no two alike; foreign ones begin with `W_` as well."""
    names = [name for name, p in model.named_parameters() if p.ndim > 1 and p.requires_grad]
    place = part_of if is_ours(model) and not is_observed(model) else _foreign_place
    found = {name: place(name) for name in names}
    taken = Counter(found.values())
    return {n: at if taken[at] == 1 else (f"W_{_bare(n)}", at[1]) for n, at in found.items()}


def _bare(name: str) -> str:
    return name.replace("_orig_mod.", "").removesuffix(".weight")


def _foreign_place(name: str) -> tuple[str, int | None]:
    match = re.search(r"(?:^|\.)(\d+)\.(.+)$", _bare(name))
    stem = match[2] if match else _bare(name)
    last = stem.rsplit(".", 1)[-1]
    part = PARTS.get(last) or FOREIGN.get(".".join(stem.split(".")[-2:])) or FOREIGN.get(last) or f"W_{stem}"
    return part, int(match[1]) if match else None
