"""Base class of edits, their inputs, and their options as text: `layer=3`, `layer=2..5`, `layer=0/2/7..9`.

A kind of edit is one class. Its docstring describes it, `presets` name common forms, `refuse` and `check` reject invalid
options, `points` lists hook points, and `apply` makes the hooks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.errors import BadData, WorkbenchError, refuse_unknown
from workbench.hook_names import ACTIVATIONS, stream_hook
from workbench.interventions.ablation import TokenMeans, branches
from workbench.models.hooked import HookedModel

Numbers = tuple[int, ...]
_RANGE = re.compile(r"(-?\d+)(?:\.\.(-?\d+))?")
LARGEST = 1e15  # a norm squares its product with an activation, which float32 still holds
MAX_RANGE = 100_000  # longer than any context, short enough for the memory


def split_options(text: str) -> tuple[str, dict[str, str]]:
    """The kind and the options of `kind:key=value,key=value`; raises `WorkbenchError` for anything else."""
    kind, _, rest = text.strip().partition(":")
    options: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in rest.split(","))):
        key, equals, value = (x.strip() for x in part.partition("="))
        if not equals:
            raise WorkbenchError(f"{part!r} in {text!r} is no option; write key=value, as layer=3")
        if key in options:
            raise WorkbenchError(f"{text!r} gives {key} twice")
        options[key] = value
    return kind.strip(), options


def parsed_option(kind: str, option: dataclasses.Field[Any], value: Any) -> Any:
    """A value of the option's type, made from text where it is one; raises `UnknownName`, `BadData` or `WorkbenchError`."""
    where = f"{option.name} of {kind}"
    if "choices" in option.metadata:
        refuse_unknown(where, value, option.metadata["choices"])
        return value
    if option.type == "Numbers":  # one, several, or a text of them
        if isinstance(value, str):
            numbers: list[int] = []
            for part in filter(None, value.split("/")):
                match = _RANGE.fullmatch(part)
                if match is None:
                    raise BadData(f"{where}={value!r}: write numbers as 3, 2..5 or 0/2/7")
                start, end = int(match[1]), int(match[2] or match[1])
                if not start <= end < start + MAX_RANGE:
                    raise BadData(f"{where}={value!r}: a range rises and has fewer than {MAX_RANGE} numbers, as 2..5")
                numbers += range(start, end + 1)
            value = numbers
        items = list(value) if isinstance(value, Sequence | range | set) else [value]
        if any(isinstance(n, bool) or not isinstance(n, int) for n in items):
            raise BadData(f"{where}={value!r}: must be whole numbers, as 3, 2..5 or 0/2/7")
        return tuple(items) if "position" in where else tuple(sorted(set(items)))  # positions stay in their order
    if option.type == "str":
        if not isinstance(value, str) or set(value) & set(",;=:"):
            raise WorkbenchError(f"{where}={value!r}: must be a name")
        return value
    kinds, example = ((int, float), "0.5") if option.type == "float" else ((int,), "3")
    if isinstance(value, str):
        try:
            value = kinds[-1](value)
        except ValueError:
            raise WorkbenchError(f"{where}={value!r}: must be a number, as {example}") from None
    if isinstance(value, bool) or not isinstance(value, kinds) or not abs(value) <= LARGEST:
        raise WorkbenchError(f"{where}={value!r}: must be a finite number of at most {LARGEST:g}, as {example}")
    return kinds[-1](value)


def option_text(value: Any) -> str:
    """The text of an option's value, neighbouring numbers as ranges."""
    if not isinstance(value, tuple):
        return repr(value) if isinstance(value, float) else str(value)
    runs: list[list[int]] = []
    for n in value:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return "/".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


Hook = tuple[str, Callable[..., Any]]
KEY_VALUE = "key-value head"
HEADS = {"v": KEY_VALUE, "own_v": KEY_VALUE, "k": KEY_VALUE, "arriving": KEY_VALUE, "q": "head", "z": "head"}
"""What the heads of a site are called; sites that are not listed have none."""


def one_of(*choices: str) -> Any:
    """An option with these values, the first by default."""
    return field(default=choices[0], metadata={"choices": choices})


@dataclass
class Inputs:
    """Inputs of edits: the prompt [batch, pos], a second prompt, and tables of means by site."""

    tokens: Tensor | None = None
    other: Tensor | None = None
    means: Mapping[str, TokenMeans] = field(default_factory=dict)
    activations: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    """Of the unedited model: (`same` or `other` prompt, hook point) -> tensor."""

    @classmethod
    def of(cls, model: HookedModel, tokens: Any, other: Any, means: Any) -> Inputs:
        """From ids or text, and a table or several."""
        tables = [means] if isinstance(means, TokenMeans) else list((means or {}).values())
        ids, second = (None if x is None else model.to_tokens(x) for x in (tokens, other))
        return cls(ids, second, {table.site: table for table in tables})

    @torch.no_grad()
    def read(self, model: HookedModel, prompt: str, names: Sequence[str]) -> None:
        """Run a prompt once for its missing activations."""
        absent = [name for name in names if (prompt, name) not in self.activations]
        if absent:
            ids = self.tokens if prompt == "same" else self.other
            _, cache = model.run_with_cache(ids, names_filter=absent, return_type=None)
            self.activations.update({(prompt, name): cache[name] for name in absent})


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One change. `layer` lists layers from 0; empty means all layers that have the edited tensor.

    Numbers may be given as one, as a list or as text. Raises `UnknownName` and `WorkbenchError` for invalid options.
    """

    kind: ClassVar[str]
    presets: ClassVar[Mapping[str, str]] = {}  # common forms, as texts without their kind, in words
    layer: Numbers = ()

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            object.__setattr__(self, option.name, parsed_option(self.kind, option, getattr(self, option.name)))
        for name in ("layer", "head"):
            if any(n < 0 for n in getattr(self, name, ())):
                raise WorkbenchError(f"{self}: {name}s are counted from 0")
        self.refuse()

    def refuse(self) -> None:
        """Raise `WorkbenchError` for options that contradict each other."""

    def only_with(self, name: str, key: str, value: str) -> None:
        """Refuse an option that has no meaning here."""
        default = next(f.default for f in dataclasses.fields(self) if f.name == name)
        if getattr(self, name) != default and getattr(self, key) != value:
            raise WorkbenchError(f"{self}: {name} goes with {key}={value}; drop it or set {key}={value}")

    def changed(self) -> dict[str, Any]:
        return {f.name: v for f in dataclasses.fields(self) if (v := getattr(self, f.name)) != f.default}

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the kind and the options that are not the default."""
        return {"kind": self.kind} | {k: list(v) if isinstance(v, tuple) else v for k, v in self.changed().items()}

    def __str__(self) -> str:
        options = ",".join(f"{name}={option_text(value)}" for name, value in self.changed().items())
        return f"{self.kind}:{options}" if options else self.kind

    @property
    def target(self) -> str:
        """The site it changes: an activation's name, `stream`, or `arriving` (values from other layers or a table)."""
        return getattr(self, "site", "")

    @property
    def heads(self) -> str:
        """Name of the heads that can be edited separately; empty without any."""
        return HEADS.get(self.target, "") if hasattr(self, "head") else ""

    @property
    def reads(self) -> set[str]:
        """Its inputs: `prompt` (it then fits runs on this prompt alone), `other` (a second prompt), `means` (per token of its target)."""
        return set()

    @property
    def mixes_positions(self) -> bool:
        """True if the result at one position depends on all positions, or on where the prompt ends."""
        return getattr(self, "how", "") in ("mean", "shuffle") or any(p < 0 for p in getattr(self, "position", ()))

    def points(self, model: HookedModel, layer: int) -> list[str]:
        """Hook points it changes at a layer."""
        return site_points(model, self.target, layer)

    def what(self, model: HookedModel) -> str:
        """Describe the edited tensor; raises `WorkbenchError` if a model has none."""
        return self.target

    def has(self, model: HookedModel, layer: int) -> bool:
        """Return whether a layer of the model has the edited tensor."""
        points = self.points(model, layer)
        return bool(points) and all(name in model.hook_dict for name in points)

    def n_layers(self, model: HookedModel) -> int:
        """Number of layers that the edit counts."""
        return model.config.n_layers

    def layers(self, model: HookedModel) -> list[int]:
        """Edited layers: the named ones, or all that have the edited tensor.

        Raises `WorkbenchError` where the architecture lacks it at a layer that is named, or at all.
        """
        count, what = self.n_layers(model), self.what(model)
        if beyond := [n for n in self.layer if n >= count]:
            raise WorkbenchError(f"{self}: layer {beyond[0]} is beyond 0..{count - 1}; nearest {count - 1}")
        having = [n for n in range(count) if self.has(model, n)]
        if not having:
            raise WorkbenchError(f"{self}: {model.architecture} has no {what}")
        if lacking := [n for n in self.layer if n not in having]:
            raise WorkbenchError(
                f"{self}: {model.architecture} has no {what} at layer {lacking[0]}; it has at"
                f" {', '.join(map(str, having))}"
            )
        return list(self.layer) or having

    def n_heads(self, model: HookedModel) -> int:
        """Number of heads that can be edited separately."""
        return {"": 0, KEY_VALUE: model.config.n_key_value_heads}.get(self.heads, model.config.n_heads)

    def check(self, model: HookedModel, inputs: Inputs) -> None:
        """Raise if heads or positions are out of range or an input of the edit is missing."""
        count = self.n_heads(model)
        if beyond := [h for h in getattr(self, "head", ()) if h >= count]:
            raise WorkbenchError(f"{self}: {self.heads} {beyond[0]} is beyond 0..{count - 1}; nearest {count - 1}")
        if "prompt" in self.reads and inputs.tokens is None:
            raise BadData(f"{self} reads the prompt: give it as tokens=...")
        if "other" in self.reads:
            assert inputs.tokens is not None
            if inputs.other is None:
                raise BadData(f"{self} reads a second prompt: give it as other=...")
            (rows, length), (others, other) = inputs.tokens.shape, inputs.other.shape
            if others not in (1, rows):
                raise BadData(f"{self}: {others} second prompts for {rows} prompts; give one, or as many")
            if length != other and not getattr(self, "position", ()):
                how = "name positions, or cut one" if hasattr(self, "position") else "cut one"
                raise BadData(f"{self}: the prompts have {length} and {other} tokens; {how}")
        if inputs.tokens is not None:
            self.in_reach(getattr(self, "position", ()), inputs.tokens)

    def in_reach(self, positions: Numbers, ids: Tensor) -> None:
        """Raise `BadData` for a position beyond ids [batch, pos]."""
        length = ids.shape[1]
        if beyond := [p for p in positions if not -length <= p < length]:
            near = length - 1 if beyond[0] > 0 else -length
            raise BadData(f"{self}: position {beyond[0]} is beyond the {length} tokens; nearest {near}")

    def prepare(self, model: HookedModel, layers: Sequence[int], inputs: Inputs) -> None:
        """Store the activations of the unedited model that the edit needs in `inputs`."""

    def apply(self, model: HookedModel, layer: int, inputs: Inputs, stack: ExitStack) -> list[Hook]:
        """Hooks that make it at a layer; anything else is undone when the stack closes."""

        def change(tensor: Tensor, hook: Any) -> Tensor:
            new, heads = self.replaced(model, tensor, str(hook.name), layer, inputs), getattr(self, "head", ())
            if new.shape != tensor.shape or (heads and max(heads) >= tensor.shape[2]):
                have = f"{tensor.shape[2]} heads of its own, the others are another layer's"
                raise WorkbenchError(f"{self}: layer {layer} has {have}; leave these out, or choose site=v")
            if not heads:
                return new
            out = tensor.clone()
            out[:, :, list(heads)] = new[:, :, list(heads)]
            return out

        return [(name, change) for name in self.points(model, layer)]

    def replaced(self, model: HookedModel, tensor: Tensor, name: str, layer: int, inputs: Inputs) -> Tensor:
        """Replacement of an activation at a hook point."""
        raise NotImplementedError

    def same_prompt(self, tensor: Tensor, inputs: Inputs) -> None:
        """Raise `BadData` where the model runs on another prompt than the one that was read."""
        assert inputs.tokens is not None
        if tensor.shape[:2] != inputs.tokens.shape:
            raise BadData(
                f"{self} stands for a prompt of {tuple(inputs.tokens.shape)} tokens, but the model runs on"
                f" {tuple(tensor.shape[:2])}"
            )


def site_points(model: HookedModel, site: str, layer: int) -> list[str]:
    """Hook points of a site at a layer."""
    if site == "arriving":
        return branches(model).get(layer, [])
    if site == "stream":
        return [stream_hook(layer, model.config.n_layers)]
    own = ACTIVATIONS["own_v"].hook.format(layer=layer)
    if site == "v" and model.foreign is not None and own in model.hook_dict and _is_read_later(model, layer):
        return [own]  # the projection, which later layers read; what the attention reads reaches no other layer
    return [ACTIVATIONS[site].hook.format(layer=layer)]


def _is_read_later(model: Any, layer: int) -> bool:
    """Return whether an observed layer attends to its own values alone and later layers read them too."""
    paths = [p for p in model.fitted_paths if p.into in ("value", "output")]
    used = [(p.layer, 0 if source == "first" else source) for p in paths for source, c in p.coefficients.items() if c]
    alone = all(source == "own" for n, source in used if n == layer)
    return alone and any(n > layer and source == layer for n, source in used)


def mean_over_positions(tensor: Tensor) -> Tensor:
    """The mean of [batch, pos, ...] over positions, at each of them."""
    return tensor.mean(1, keepdim=True).expand_as(tensor)
