"""Sources of the values of every layer: projections and value tables, each with its coefficient.

    v_n = sum over b of c_nb x_b,   b: a layer, whose own projection x_b is, or a table by token id

Mixtures of mixtures (a layer that shares another's mixed values) are resolved to these. The same for our models, whose
wiring says it, and for observed ones, whose coefficients were fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench.errors import BadData
from workbench.models import Transformer
from workbench.models.hooked import HookedModel
from workbench.models.joint_attention import JointAttention
from workbench.observing.anatomy import output_map
from workbench.observing.observed_model import Observed
from workbench.observing.recognition.value_paths import NEGLIGIBLE
from workbench.prompts.softmaxes import attention_hook_points

Base = int | str
"""A layer, whose own projection is meant, or a table."""
Composition = dict[Base, float]
"""Coefficients of what layers project and tables hold."""
EFFECTIVE = "effective"
"""Stands for the effective values themselves, where something of them is added beside the attention."""


@dataclass(frozen=True, kw_only=True)
class LayerValues:
    """Sources and readers of one layer's values; strings are hook points."""

    layer: int
    vectors: dict[Base, str]
    """What it projects itself, and the tables it reads."""
    sources: tuple[Base, ...]
    """What its effective values are a sum of, in the order of the coefficients at `mix`."""
    expanded: frozenset[Base]
    """Sources that are read as they attend, after any mixing there."""
    mix: str | None
    """Coefficients of `sources`; None: one source, taken `alone` times."""
    alone: float = 1.0
    values: dict[int, str]
    """Values that its attention reads, by the layer whose keys go with them; its own first."""
    scores: list[str]
    """What its attention weights are made of."""
    weights: str | None = None
    """Coefficients of what is added beside the attention."""
    added: Callable[[Sequence[float]], Mapping[Base, float]] = field(default=lambda _: {})
    """These coefficients -> how much of `EFFECTIVE` and of the sources is added to the head outputs at the token's own place."""
    changed: bool = False
    """Whether something else, as a gate, changes the head outputs."""
    negligible: float = 0.0
    """Coefficients up to this are none."""

    @property
    def made_of(self) -> list[str]:
        """Hook points that tell what its values are made of."""
        return [*self.vectors.values(), *([self.mix] if self.mix else [])]

    @property
    def read(self) -> list[str]:
        """Hook points that tell who reads them."""
        return list(dict.fromkeys([*self.values.values(), *self.scores, *([self.weights] if self.weights else [])]))


def layer_values(model: HookedModel) -> list[LayerValues]:
    """Return the value sources of every layer; raises `BadData` if an observed model does not show values or attention."""
    describe = _observed if isinstance(model, Observed) else _ours
    return [describe(model, n) for n in range(model.config.n_layers)]


def compositions(layers: Sequence[LayerValues], mixes: Mapping[int, Sequence[float]]) -> list[Composition]:
    """Return the sources of every layer's effective values from the coefficients in use."""
    found: list[Composition] = []
    for layer in layers:
        weights = zip(layer.sources, mixes.get(layer.layer, [layer.alone]), strict=True)
        found.append(resolved(layer, {j: w for j, w in weights if abs(w) > layer.negligible}, found))
    return found


def resolved(layer: LayerValues, weights: Mapping[Base, float], known: Sequence[Composition]) -> Composition:
    """Expand a weighted sum of a layer's inputs into projections and tables; `known`: sources of earlier layers."""
    total: Composition = {}
    for source, weight in weights.items():
        parts = known[int(source)] if source in layer.expanded else {source: 1.0}
        for base, part in parts.items():
            total[base] = total.get(base, 0.0) + weight * part
    return total


def output_matrix(model: HookedModel, layer: int) -> Tensor:
    """W_O of a layer [head, d_head, d_model]; raises `BadData` where an observed model shows none."""
    if not isinstance(model, Observed):
        matrix: Tensor = model.blocks[layer].attn.W_O
        return matrix.detach()
    structure = model.structure.layers[layer]
    if structure.z is None:
        raise BadData(f"values cannot be followed here: no matrix W_O was found after the attention of layer {layer}")
    return output_map(model.foreign, structure)[0]


def _ours(model: Any, n: int) -> LayerValues:
    stem, attn = f"blocks.{n}.attn", model.blocks[n].attn
    wiring = attn.projections["v"]
    constant = not wiring.own_heads and not (wiring.mixer is not None and wiring.mixer.weighs_tokens)
    crossed = attn.attended.get("v", {}) if isinstance(attn, JointAttention) else {}
    scores = attn.recipe().needs if isinstance(attn, JointAttention) else attention_hook_points(n, ("rot_q", "rot_k"))
    names = attn.coefficients.get("output", ())
    sources = (*wiring.mixed, n) if wiring.shared_source is None else (wiring.shared_source,)

    def added(weights: Sequence[float]) -> Mapping[Base, float]:
        return _added(attn.outputs, n, dict(zip(names, weights, strict=True)), list(wiring.sources))

    return LayerValues(
        layer=n,
        vectors=({n: f"{stem}.own.hook_v"} if constant and wiring.projects else {})
        | {j: str(module.hook_v.name) for j, module, _ in attn.reads["v"] if isinstance(j, str)},
        sources=sources if constant else (n,),
        expanded=frozenset(j for j, state in wiring.sources.items() if _attends_with(model, j, state)),
        mix=f"{stem}.hook_v_mix" if wiring.mixer is not None and constant else None,
        values={n: f"{stem}.hook_v"} | {int(j): str(module.hook_v.name) for j, module in crossed.items()},
        scores=sorted(scores), weights=f"{stem}.hook_output_mix" if names else None, added=added,
        changed=bool(attn.gates),
    )  # fmt: skip


def _attends_with(model: Transformer, source: Base, state: str) -> bool:
    """True if a source contributes its effective values instead of its projection."""
    if not isinstance(source, int):
        return False
    return state == "effective" or source == 0 or not model.blocks[source].attn.projections["v"].projects


def _added(shortcuts: Sequence[Any], layer: int, weights: Mapping[str, float], read: Sequence[Base]) -> Composition:
    """Coefficients of the effective and the source values in what shortcuts add: they are linear, so ones tell."""
    found: Composition = {}
    for base in (EFFECTIVE, *read):
        ones = {j: torch.full((1, 1, 1, 1), float(j == base), dtype=torch.double) for j in (EFFECTIVE, *read)}
        z = v = ones.pop(EFFECTIVE)
        z = torch.zeros_like(v)
        for shortcut in shortcuts:
            z = shortcut.output(layer, z, v, ones, weights)
        if total := float(z):
            found[base] = total
    return found


def _observed(model: Any, n: int) -> LayerValues:
    stem, block = f"blocks.{n}.attn", model.blocks[n]
    scores = [name for name in attention_hook_points(n, ("rot_q", "rot_k")) if name in model.hook_dict]
    scores = scores or attention_hook_points(n, ("pattern",))
    for name in (f"{stem}.hook_v", *scores):
        if name not in model.hook_dict:
            raise BadData(
                f"values cannot be followed here: layer {n}: {model.absent.get(name, f'{name} is not shown')}"
            )
    own, mixed = f"{stem}.own.hook_v" in model.hook_dict, f"{stem}.hook_v_mix" in model.hook_dict
    vectors: dict[Base, str] = {n: f"{stem}.own.hook_v"} if own else {} if mixed else {n: f"{stem}.hook_v"}
    paths = [p for p in model.fitted_paths if p.layer == n]
    beside = [p for p in paths if p.into == "output"]
    alone = next((p.coefficients.get("own") for p in paths if p.into == "value" and p.exact and own), None)
    one = beside[0] if len(beside) == 1 and beside[0].exact else None
    added = {0 if s == "first" else EFFECTIVE: c for s, c in one.coefficients.items()} if one else {}
    return LayerValues(
        layer=n, vectors=vectors, sources=(*block.source_points, n) if mixed else (n,), expanded=frozenset(),
        mix=f"{stem}.hook_v_mix" if mixed else None, alone=1.0 if alone is None else alone, negligible=NEGLIGIBLE,
        values={n: f"{stem}.hook_v"}, scores=scores, added=lambda _: added,
        changed=bool(model.structure.layers[n].changed) or (bool(beside) and one is None),
    )  # fmt: skip
