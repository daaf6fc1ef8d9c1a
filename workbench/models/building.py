"""`build` makes a model of a named architecture: it composes the shortcuts and refuses those that contradict each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from workbench.config import ModelConfig
from workbench.errors import WorkbenchError, refuse_unknown
from workbench.models.architecture_names_and_colours import ARCHITECTURES, architecture, options_of
from workbench.models.options import dtype_option
from workbench.models.shortcut import Projection, Shortcut, Source, overrides
from workbench.models.transformer import Transformer


def build(
    architecture: str,
    preset_or_config: str | ModelConfig | Mapping[str, Any],
    *,
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    **options: Any,
) -> Transformer:
    """Build a randomly initialised model of an architecture.

    Tensors with the same name and shape are bitwise equal in all architectures of one seed.

    Args:
        architecture: A name of `ARCHITECTURES`, or several joined by `+`.
        preset_or_config: A name of `PRESETS`, a `ModelConfig`, or a mapping with TransformerLens' keys.
        seed: Seed of the weights.
        device: Device of the weights, by default the CPU.
        dtype: Type of the weights, or its name; by default float32.
        options: The architecture's options, such as `lambda_v1`, `neutreno_lambda` or `dilation`.

    Returns:
        A `Transformer` in evaluation mode.

    Raises:
        UnknownName: No architecture, preset, config key, option or dtype has this name.
        WorkbenchError: An option is out of range, or two architectures cannot be combined.
    """
    weights = dtype_option(dtype)
    model = compose(architecture, ModelConfig.of(preset_or_config), **options)
    model.initialise(seed)
    model.source = {"seed": seed, "step": 0}
    return model.to(device=device, dtype=weights)


def compose(name: str, config: ModelConfig, **options: Any) -> Transformer:
    """Return the model of an architecture without drawing its weights; see `build`."""
    entry = architecture(name)
    for key in options:
        refuse_unknown(f"option of {name}", key, entry.options)
    settings, shortcuts = entry.options | options, list[Shortcut]()
    own = {s: {key: settings[key] for key in options_of(s)} for s in entry.shortcuts}
    names: dict[type[Shortcut], list[str]] = {}  # the parts of the name that use each shortcut
    for part in name.split("+"):
        for shortcut in ARCHITECTURES[part].shortcuts:
            names.setdefault(shortcut, []).append(part)
    if twice := next((parts for parts in names.values() if len(parts) > 1), []):
        first, second, *_ = twice
        why = "cannot be combined with itself" if first == second else f"and {second} set one shortcut; keep one"
        raise WorkbenchError(f"{name}: {first} {why}")
    for one, other in itertools.combinations(own, 2):
        if shared := sorted(own[one].keys() & own[other].keys()):
            both = f"{names[one][0]} and {names[other][0]}"
            raise WorkbenchError(f"{name}: {both} both take {shared[0]}; keep one of them")
    for shortcut, values in own.items():
        config = _made(name, values, partial(shortcut.reshaped, config, **values))
    for shortcut, values in own.items():
        shortcuts.append(_made(name, values, partial(shortcut, config, **values)))
        settings |= {key: getattr(shortcuts[-1], key) for key in values}
    _refuse_conflicts(name, {s: names[type(s)][0] for s in shortcuts}, config.n_layers)
    model = Transformer(config, shortcuts, architecture=name)
    model.options = settings
    return model.eval()


def _made(name: str, options: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """Return the result of `make`; turn an error about a value's type into a `WorkbenchError` with the options."""
    try:
        return make()
    except WorkbenchError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise WorkbenchError(f"{name} cannot be built with {dict(options)}: {error}") from error


def _refuse_conflicts(name: str, names: Mapping[Shortcut, str], n_layers: int) -> None:
    """Raise `WorkbenchError` if two shortcuts define the same tensor, or if one would have no effect."""
    shortcuts = list(names)

    def refuse(clashing: Sequence[Shortcut], why: str) -> None:
        raise WorkbenchError(f"{name}: {' and '.join(dict.fromkeys(names[s] for s in clashing))} {why}")

    streams = [s for s in shortcuts if overrides(s, "connections")]  # these define the skip connections too
    if len(both := [s for s in shortcuts if s in streams or overrides(s, "stream_sources")]) > 1:
        refuse(both, "both define what a block reads; keep one")
    if len(both := [s for s in shortcuts if s in streams or overrides(s, "skip")]) > 1:
        refuse(both, "both define what passes by a sublayer; keep one")
    if len(both := [s for s in shortcuts if overrides(s, "softmaxes")]) > 1:
        refuse(both, "both define the attention; keep one")
    for s in [s for s in shortcuts if overrides(s, "arriving")]:
        if others := [x for x in shortcuts if x is not s and any(x.sources("v", n) for n in range(n_layers))]:
            refuse([s, *others], "both read earlier layers' values, and only one of them another sequence's; keep one")
    tensors: tuple[Projection, ...] = ("q", "k", "v")
    roots: dict[tuple[Projection, int], Source] = {}
    # the shortcuts whose shared tensors leave each one nothing to mix or change, in some layer
    preempted: dict[Shortcut, list[Shortcut]] = {s: [] for s in shortcuts}
    effective: set[Shortcut] = set()
    for layer, tensor in itertools.product(range(n_layers), tensors):
        sharing = [s for s in shortcuts if s.shared_source(tensor, layer) != layer]
        mixing = [s for s in shortcuts if s.mixes(tensor, layer)]
        if len(sharing) > 1 or (len(mixing) > 1 and not sharing):
            refuse(sharing if len(sharing) > 1 else mixing, f"both define {tensor} of layer {layer}; keep one")
        all_heads = sharing and not sharing[0].own_heads(tensor, layer)
        source = sharing[0].shared_source(tensor, layer) if all_heads else layer
        roots[tensor, layer] = roots.get((tensor, source), source) if isinstance(source, int) else source
        changing = [s for s in shortcuts if tensor == "v" and overrides(s, "own_value") and s not in sharing]
        for s in {*mixing, *(s for s in changing if any(True for _ in s.parameters()))}:
            preempted[s] += [x for x in sharing if x is not s]
        effective.update(s for s in mixing if not sharing or s in sharing)
        effective.update(changing)
    for s, others in preempted.items():
        if others and s not in effective:
            refuse([s, *others], f"cannot be combined: no layer that {names[s]} mixes has its own to mix")
        if others and any(True for _ in s.parameters()):
            refuse([s, *others], f"cannot be combined: coefficients of {names[s]} would do nothing in some layers")
        if s.idle(lambda tensor, layer: roots[tensor, layer]):
            shared = [x for x in shortcuts if any(x.shared_source(t, n) != n for t, n in roots)]
            refuse([s, *shared], f"cannot be combined: all layers share what {names[s]} would tell apart")
