"""The registry: one line per named architecture, `a+b` composes, and `build` makes a model of one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.config import ModelConfig
from workbench.errors import UnknownName, WorkbenchError
from workbench.models.denseformer import DenseFormer
from workbench.models.neutreno import NeuTRENO
from workbench.models.resformer import ResFormer
from workbench.models.residual import KeyResidual
from workbench.models.shortcut import Shortcut, overrides
from workbench.models.svformer import SVFormer
from workbench.models.transformer import Transformer


@dataclass(frozen=True)
class Architecture:
    """A named list of shortcuts, with constants of its own where it was published with them."""

    summary: str
    shortcuts: tuple[type[Shortcut], ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """Every option with its default."""
        defaults: dict[str, Any] = {}
        for shortcut in self.shortcuts:
            parameters = inspect.signature(shortcut).parameters.values()
            defaults |= {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        return defaults | dict(self.constants)


ARCHITECTURES: dict[str, Architecture] = {
    "transformer": Architecture("the vanilla decoder"),
    "resformer": Architecture("values mixed with the first layer's, half and half", (ResFormer,)),
    "svformer": Architecture("every layer attends to the first layer's values", (SVFormer,)),
    "neutreno": Architecture("attention output pulled toward the first layer's values", (NeuTRENO,)),
    "denseformer": Architecture("blocks read weighted averages of all earlier outputs", (DenseFormer,)),
    "resformer+neutreno": Architecture(
        "both, with the published weaker pull", (ResFormer, NeuTRENO), {"neutreno_lambda": 0.2}
    ),
    "residual_k": Architecture("control: keys mixed with the first layer's", (KeyResidual,)),
}


def architecture(name: str) -> Architecture:
    """The registered architecture, or the composition `a+b` of registered ones; raises `UnknownName`."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    parts = name.split("+") if isinstance(name, str) else [name]
    for part in parts:
        if part not in ARCHITECTURES:
            raise UnknownName("architecture", part, ARCHITECTURES)
    found = [ARCHITECTURES[part] for part in parts]
    shortcuts = tuple(s for a in found for s in a.shortcuts)
    constants: dict[str, Any] = {}
    for known in ARCHITECTURES.values():  # what was published for some of these together holds in any order
        if set(known.shortcuts) <= set(shortcuts):
            constants |= known.constants
    return Architecture(" and ".join(a.summary for a in found), shortcuts, constants)


def compose(name: str, config: ModelConfig, **options: Any) -> Transformer:
    """The modules of an architecture, weights as PyTorch draws them; see `build`."""
    chosen = architecture(name)
    for key in options:
        if key not in chosen.options:
            raise UnknownName(f"option of {name}", key, chosen.options)
    settings, shortcuts = chosen.options | options, []
    for shortcut in chosen.shortcuts:
        own = {key: settings[key] for key in Architecture("", (shortcut,)).options}
        try:
            shortcuts.append(shortcut(config, **own))
        except WorkbenchError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise WorkbenchError(f"{name} cannot be built with {own}: {error}") from error
        settings |= {key: getattr(shortcuts[-1], key) for key in own}
    _refuse_conflicts(name, shortcuts, config.n_layers)
    model = Transformer(config, shortcuts, architecture=name)
    model.options = settings
    return model.eval()


def build(
    architecture: str,
    preset_or_config: str | ModelConfig | Mapping[str, Any],
    *,
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Transformer:
    """A model at random init, in evaluation mode.

    `preset_or_config`: a name of `PRESETS`, a `ModelConfig`, or a mapping with TransformerLens' keys. `options` are the
    architecture's own (`lambda_v1`, `neutreno_lambda`, `dilation`, ...). Equal-named tensors of equal shape are bitwise
    equal over architectures for one `seed`. Raises `UnknownName` or `WorkbenchError` naming the valid choices.
    """
    model = compose(architecture, ModelConfig.of(preset_or_config), **options)
    model.initialise(seed)
    model.source = {"seed": seed, "step": 0}
    return model.to(device=device, dtype=dtype)


def _refuse_conflicts(name: str, shortcuts: list[Shortcut], n_layers: int) -> None:
    if len({s.prefix for s in shortcuts}) < len(shortcuts):
        raise WorkbenchError(f"{name}: an architecture cannot be combined with itself")
    if len([s for s in shortcuts if overrides(s, "stream")]) > 1:
        raise WorkbenchError(f"{name}: two of these define what a block reads; keep one")
    for layer in range(n_layers):
        for projection in ("q", "k", "v"):
            mixing = [s.prefix for s in shortcuts if s.mixes(projection, layer)]
            if len(mixing) > 1:
                raise WorkbenchError(
                    f"{name}: {' and '.join(mixing)} both define {projection} of layer {layer}; keep one"
                )
