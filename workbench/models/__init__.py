"""The registry: one line per named architecture, `a+b` composes, and `build` makes a model of one."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from workbench.config import ModelConfig
from workbench.errors import UnknownName, WorkbenchError
from workbench.models.bank_of_values import BankOfValues
from workbench.models.cross_layer import CrossLayer
from workbench.models.cut_skip import CutSkip
from workbench.models.denseformer import DenseFormer
from workbench.models.gated_attention import GatedAttention
from workbench.models.gqa import GQA
from workbench.models.identity_map import IdentityMap
from workbench.models.neutreno import NeuTRENO
from workbench.models.resformer import ResFormer
from workbench.models.resformer_dense import DenseResFormer
from workbench.models.resformer_learnable import LearnableResFormer, PlusResFormer
from workbench.models.residual import KeyResidual, QueryResidual
from workbench.models.residual_attention import AttentionResidual
from workbench.models.residual_hidden import HiddenResidual
from workbench.models.same_key import SameKey
from workbench.models.sharing import Sharing
from workbench.models.shortcut import Projection, Shortcut, Source, overrides
from workbench.models.svformer import SVFormer
from workbench.models.transformer import Transformer
from workbench.models.value_embedding import ValueEmbedding


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


def _entry(summary: str, *shortcuts: type[Shortcut], **constants: Any) -> Architecture:
    return Architecture(summary, shortcuts, constants)


ARCHITECTURES: dict[str, Architecture] = {
    "transformer": _entry("the vanilla decoder"),
    "resformer": _entry("values mixed with the first layer's, half and half", ResFormer),
    "resformer_constant": _entry(
        "the first layer's values twice, own values once", ResFormer, lambda_v1=2.0, lambda_own=1.0
    ),
    "resformer_learnable": _entry("a trained pair of coefficients for each layer", LearnableResFormer),
    "resformer_learnable_plus": _entry("trained coefficients that share one total over the layers", PlusResFormer),
    "resformer_sparse": _entry(
        "the first layer's values in the last layers alone", ResFormer, lambda_v1=5.0, lambda_own=1.0, layers="late"
    ),
    "resformer_dense": _entry("trained sums of all earlier layers' values", DenseResFormer),
    "svformer": _entry("every layer attends to the first layer's values", SVFormer),
    "neutreno": _entry("attention output pulled toward the first layer's values", NeuTRENO),
    "denseformer": _entry("blocks read weighted averages of all earlier outputs", DenseFormer),
    "gqa": _entry("pairs of query heads read one key-value head", GQA),
    "mqa": _entry("all query heads read one key-value head", GQA, query_group="all"),
    "cla": _entry("pairs of layers share keys and values", Sharing),
    "share_q": _entry("control: pairs of layers share queries", Sharing, share="q"),
    "share_k": _entry("control: pairs of layers share keys", Sharing, share="k"),
    "share_v": _entry("control: pairs of layers share values", Sharing, share="v"),
    "cross_layer": _entry("queries also see the previous layer's keys and values", CrossLayer),
    "cross_layer_all": _entry("queries also see every earlier layer's keys and values", CrossLayer, source="all"),
    "same_key": _entry("values averaged over all layers so far: cross-layer attention with own keys", SameKey),
    "identity_map": _entry("control: earlier values added past the attention pattern", IdentityMap),
    "residual_q": _entry("control: queries mixed with the first layer's", QueryResidual),
    "residual_k": _entry("control: keys mixed with the first layer's", KeyResidual),
    "residual_attention": _entry("control: attention patterns mixed with the first layer's", AttentionResidual),
    "residual_hidden": _entry("control: the embedding added to every block's input", HiddenResidual),
    "value_embedding": _entry("values by token id mixed into the first and last layers", ValueEmbedding),
    "bank_of_values": _entry("the last layers look their values up by token id", BankOfValues),
    "gated_attention": _entry("a sigmoid gate on the attention output", GatedAttention),
    "cut_skip": _entry("control: the first block without its skip connection", CutSkip),
    "resformer+neutreno": _entry("both, with the published weaker pull", ResFormer, NeuTRENO, neutreno_lambda=0.2),
    "resformer+denseformer": _entry("both: values from the first block, inputs averaged", ResFormer, DenseFormer),
    "svformer+gqa": _entry("shared values, and four query heads for each key-value head", SVFormer, GQA, query_group=4),
    "svformer+cla": _entry("shared values, and keys shared by pairs of layers", SVFormer, Sharing, share="k"),
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
    constants = {key: value for a in found for key, value in a.constants.items()}
    for known, a in ARCHITECTURES.items():  # what was published for some of these together holds in any order
        if "+" in known and set(known.split("+")) <= set(parts):
            constants |= a.constants
    return Architecture(" and ".join(a.summary for a in found), tuple(s for a in found for s in a.shortcuts), constants)


def compose(name: str, config: ModelConfig, **options: Any) -> Transformer:
    """The modules of an architecture, weights as PyTorch draws them; see `build`."""
    chosen = architecture(name)
    for key in options:
        if key not in chosen.options:
            raise UnknownName(f"option of {name}", key, chosen.options)
    called = _called(name)
    if twice := next((parts for parts in called.values() if len(parts) > 1), []):
        first, second, *_ = twice
        why = "cannot be combined with itself" if first == second else f"and {second} set one shortcut; keep one"
        raise WorkbenchError(f"{name}: {first} {why}")
    settings, shortcuts = chosen.options | options, list[Shortcut]()
    own = {s: {key: settings[key] for key in Architecture("", (s,)).options} for s in chosen.shortcuts}
    for one, other in itertools.combinations(own, 2):
        if shared := sorted(own[one].keys() & own[other].keys()):
            both = f"{called[one][0]} and {called[other][0]}"
            raise WorkbenchError(f"{name}: {both} both take {shared[0]}; keep one of them")
    for shortcut, given in own.items():
        config = _told(name, given, partial(shortcut.reshaped, config, **given))
    for shortcut, given in own.items():
        shortcuts.append(_told(name, given, partial(shortcut, config, **given)))
        settings |= {key: getattr(shortcuts[-1], key) for key in given}
    _refuse_conflicts(name, shortcuts, config.n_layers)
    model = Transformer(config, shortcuts, architecture=name)
    model.options = settings
    return model.eval()


def _called(name: str) -> dict[type[Shortcut], list[str]]:
    """Which parts of a name each shortcut stands for."""
    found: dict[type[Shortcut], list[str]] = {}
    for part in name.split("+"):
        for shortcut in ARCHITECTURES[part].shortcuts:
            found.setdefault(shortcut, []).append(part)
    return found


def _told(name: str, options: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """What `make` makes; values of a wrong type are refused with the architecture and its options."""
    try:
        return make()
    except WorkbenchError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise WorkbenchError(f"{name} cannot be built with {dict(options)}: {error}") from error


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
    """Raise `WorkbenchError` where two shortcuts define one thing, or one is left without effect."""
    called = {s: _called(name)[type(s)][0] for s in shortcuts}

    def refuse(found: Sequence[Shortcut], why: str) -> None:
        raise WorkbenchError(f"{name}: {' and '.join(dict.fromkeys(called[s] for s in found))} {why}")

    if len(found := [s for s in shortcuts if overrides(s, "stream_sources")]) > 1:
        refuse(found, "both define what a block reads; keep one")
    if len(found := [s for s in shortcuts if overrides(s, "softmaxes")]) > 1:
        refuse(found, "both define the attention; keep one")
    tensors: tuple[Projection, ...] = ("q", "k", "v")
    roots: dict[tuple[Projection, int], Source] = {}
    lenders: dict[Shortcut, list[Shortcut]] = {s: [] for s in shortcuts}  # who leaves it nothing to mix somewhere
    works: set[Shortcut] = set()
    for layer, tensor in itertools.product(range(n_layers), tensors):
        lending = [s for s in shortcuts if s.lender(tensor, layer) != layer]
        mixing = [s for s in shortcuts if s.mixes(tensor, layer)]
        if len(lending) > 1 or (len(mixing) > 1 and not lending):
            refuse(lending if len(lending) > 1 else mixing, f"both define {tensor} of layer {layer}; keep one")
        source = lending[0].lender(tensor, layer) if lending else layer
        roots[tensor, layer] = roots.get((tensor, source), source) if isinstance(source, int) else source
        for s in mixing:
            lenders[s] += lending
        works.update(mixing if not lending else ())
    for s, others in lenders.items():
        if others and s not in works:
            refuse([s, *others], f"cannot be combined: no layer that {called[s]} mixes has its own to mix")
        if others and any(True for _ in s.parameters()):
            refuse([s, *others], f"cannot be combined: coefficients of {called[s]} would do nothing in some layers")
        if s.idle(lambda tensor, layer: roots[tensor, layer]):
            borrowing = [x for x in shortcuts if any(x.lender(t, n) != n for t, n in roots)]
            refuse([s, *borrowing], f"cannot be combined: all layers share what {called[s]} would tell apart")
