"""`coefficient`: a coefficient of the architecture's own is set, at the hook point that it passes in every run.

    coefficient:layer=3,source=first,value=0

| path | what is mixed | who has it |
|---|---|---|
| `v`, `q`, `k` | values, queries, keys | ResFormer and its forms, value embeddings, controls |
| `output` | what is added to the attention's output | NeuTRENO, identity mapping |
| `pattern` | attention patterns | attention-pattern residual |
| `stream` | outputs of blocks | DenseFormer, hidden residual |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.interventions.edits.base import Edit, Inputs
from workbench.models.hooked import HookedModel
from workbench.models.transformer import Transformer
from workbench.names import position_axis

PATHS = ("v", "output", "q", "k", "pattern", "stream")


@dataclass(frozen=True, kw_only=True)
class Coefficient(Edit):
    """A coefficient of the architecture's own is set to `value`, whether it is fixed, learned or computed.

    `path`: `v`, `q`, `k` (what mixes values, queries, keys), `output` (what is added to the attention's output: NeuTRENO,
    identity map), `pattern` (the attention-pattern residual), `stream` (averages of outputs); empty: the value path, which is `v`
    where values are mixed and `output` elsewhere. `source`: `own`, `first`, `source.2` (layer 2's), `table`, `earlier`
    (the identity map's mean), of streams `embed` and `block.2`; empty: all but the own. Token-dependent weights are set for
    all tokens.
    """

    kind = "coefficient"
    presets: ClassVar[Mapping[str, str]] = {
        "value=0": "set the shortcut's coefficient to 0",
        "path=stream,value=0": "set the weights of earlier outputs in the stream to 0",
    }
    source: str = ""
    path: str = field(default="", metadata={"choices": ("", "v", "q", "k", "output", "pattern", "stream")})
    value: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == "source.0":
            object.__setattr__(self, "source", "first")

    def what(self, model: HookedModel) -> str:
        path = self._path(model)
        known = {name for n in range(model.config.n_layers) for name in sources_at(model, path, n)}
        if self.source and self.source not in known:
            raise UnknownName(f"source of the {path} coefficients of {model.architecture}", self.source, known)
        return f"coefficient of {path}" + (f" for {self.source}" if self.source else "")

    def _path(self, model: HookedModel) -> str:
        """The path it acts on; the value path where it names none."""
        if not isinstance(model, Transformer):
            raise BadData(f"{self}: the coefficients of an {type(model).__name__} model are not ours to set")
        has = [p for p in PATHS if any(sources_at(model, p, n) for n in range(model.config.n_layers))]
        if self.path in has:
            return self.path
        if not self.path and (value_paths := [p for p in ("v", "output") if p in has]):
            return value_paths[0]
        lacking = f"coefficient of {self.path}" if self.path else "coefficient of a value path"
        choices = f"it has path={' or '.join(has)}" if has else "it has none at all"
        raise WorkbenchError(f"{self}: {model.architecture} has no {lacking}; {choices}")

    def _places(self, model: HookedModel, layer: int) -> list[int]:
        """Which of a layer's coefficients it sets; without a source all but the own."""
        names = sources_at(model, self._path(model), layer)
        return [i for i, name in enumerate(names) if (name == self.source if self.source else name != "own")]

    def has(self, model: HookedModel, layer: int) -> bool:
        return bool(self._places(model, layer))

    def points(self, model: HookedModel, layer: int) -> list[str]:
        return [hook_of(model, self._path(model), layer)]

    def replaced(self, model: HookedModel, tensor: Tensor, name: str, layer: int, inputs: Inputs) -> Tensor:
        weights = tensor.clone()
        weights[..., self._places(model, layer)] = self.value
        return weights


def hook_of(model: Any, path: str, layer: int) -> str:
    """Hook point that the coefficients of a path pass at a layer."""
    if path == "stream":
        return f"blocks.{layer}.hook_dwa_weights"
    return f"blocks.{layer}.attn.{model.blocks[layer].attn.weight_points[path]}"


def sources_at(model: Any, path: str, layer: int) -> Sequence[str]:
    """Names of the terms that a path's coefficients multiply at a layer, in order; empty if there are none."""
    if path == "stream":
        return model.residual.coefficients(layer)
    return model.blocks[layer].attn.coefficients.get(path, ())


@torch.no_grad()
def coefficients(model: Any) -> list[Coefficient]:
    """Every coefficient of a model that is one number for all tokens, as the edit that changes nothing."""
    targets = [(p, n) for p in PATHS for n in range(model.config.n_layers) if sources_at(model, p, n)]
    targets = [(p, n) for p, n in targets if position_axis(hook_of(model, p, n)) is None]
    weights: dict[str, Tensor] = {}
    points = [(hook_of(model, p, n), lambda x, hook: weights.update({hook.name: x.detach()})) for p, n in targets]
    with model.hooks(points):
        model(torch.zeros(1, 1, dtype=torch.long), return_type=None)
    return [
        Coefficient(layer=(layer,), source=source, path=path, value=value)
        for path, layer in targets
        for source, value in zip(
            sources_at(model, path, layer), map(_short, weights[hook_of(model, path, layer)]), strict=True
        )
    ]


def _short(value: Tensor) -> float:
    """A number as it was written: 0.4, where float32 has 0.4000000059."""
    return float(str(value.cpu().numpy()))
