"""How a measure is registered: `@metric` on a function or a class; its arguments say what it reads.

Three forms, told apart by type. *Per sequence*: a function of named activations that returns one value per sequence
(first axis `batch`), so the driver supplies mean, standard error and n. *Accumulated*: a class with `update(...)`,
`merge(other)` and `result()`. *Derived*: a function of `weights`, `gradients` or a key-value `cache` that returns rows of
(part, layer, value). None sees a model, a file or a widget.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from workbench.errors import UnknownName
from workbench.names import ACTIVATIONS

Form = Literal["per_sequence", "accumulated", "derived"]
F = TypeVar("F", bound=Callable[..., Any])

GIVEN = ("tokens", "counted", "W_O", "weights", "gradients", "cache")
"""Arguments the driver hands in beside activations: ids [batch, pos], which of them count in the loss
(bool [batch, pos]), the layer's output matrix [head, d_head, d_model],
tensors by name, a filled key-value cache."""

AXES = {"pos": "position", "head": "head", "kv_head": "head", "source": "source", "index": "index"}
"""Axes a value may have after `batch`, and the record's columns for them."""


@dataclass(frozen=True)
class Metric:
    """A registered measure. `function` is the pure function or the accumulator class itself."""

    function: Callable[..., Any]
    form: Form
    unit: str
    range: str
    reading: str
    source: str
    sites: tuple[str, ...] = ()
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    controls: Mapping[str, Any] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    folds: int = 8
    min_length: int = 1
    version: int = 1
    doubt: Callable[[Tensor], str] | None = None
    ahead: Callable[[Tensor], Mapping[str, Any]] | None = None

    @property
    def name(self) -> str:
        """The public name: the function's own, or the class's in lower case with underscores."""
        raw = self.function.__name__
        return "".join(f"_{c.lower()}" if c.isupper() else c for c in raw).lstrip("_")

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (inspect.getdoc(self.function) or "").split("\n", 1)[0]

    @property
    def arguments(self) -> tuple[str, ...]:
        """What it cannot do without; `vectors` stands for each of `sites` in turn."""
        return tuple(p.name for p in self._parameters() if p.default is p.empty)

    @property
    def optional(self) -> tuple[str, ...]:
        """What it reads besides where a model has it: arguments whose default is None."""
        return tuple(p.name for p in self._parameters() if p.default is not p.empty)

    def _parameters(self) -> list[inspect.Parameter]:
        call = self.function.update if inspect.isclass(self.function) else self.function  # type: ignore[attr-defined]
        parameters = inspect.signature(call).parameters.values()
        return [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of a per-sequence value after `batch`, read from the return annotation (`*axis`: only a variant has it)."""
        if self.form != "per_sequence":
            return ()
        axes = typing.get_type_hints(self.function)["return"].dim_str.split()[1:]
        return tuple(axis for axis in axes if not axis.startswith("*"))

    def reads(self, site: str | None) -> tuple[str, ...]:
        """Names of the activations behind the arguments, for one site."""
        named = (site if a == "vectors" else a for a in self.arguments)
        return tuple(a for a in named if a in ACTIVATIONS and a is not None)


METRICS: dict[str, Metric] = {}


def metric(
    *,
    unit: str,
    range: str,  # noqa: A002 - the word of the record
    reading: str,
    source: str,
    sites: tuple[str, ...] = (),
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    controls: Mapping[str, Any] | None = None,
    units: Mapping[str, str] | None = None,
    folds: int = 8,
    min_length: int = 1,
    version: int = 1,
    doubt: Callable[[Tensor], str] | None = None,
    ahead: Callable[[Tensor], Mapping[str, Any]] | None = None,
) -> Callable[[F], F]:
    """Register a measure under its own name.

    `sites`: activations a `vectors` argument takes in turn. `variants`: name -> keyword options (`per_head` adds a head
    axis). `controls`: name -> a function of `T` or `tokens` (per sequence) or keyword options (accumulated, derived).
    `units`: unit of a variant where it differs. `folds`: jackknife groups of documents behind an accumulated value's error.
    `version`: raised whenever the metric's numbers change, through its own code or through a model's or kernel's; stored
    records of an older version are then measured anew, and only those.
    `doubt`: of token ids [batch, pos], why the numbers say nothing there, or ""; stands under every figure of them.
    `ahead`: of all the ids [batch, pos] that will come, options with which an accumulator keeps less and says the same.
    Raises if the name is taken, an argument is no activation or an axis no column of the records.
    """

    def register(function: F) -> F:
        made = Metric(
            function, _form(function), unit, range, reading, source, sites, variants or {}, controls or {}, units or {},
            folds, min_length, version, doubt, ahead,
        )  # fmt: skip
        if made.name in METRICS:
            raise ValueError(f"metric {made.name!r} is registered already")
        _refuse(f"argument of {made.name}", [*made.arguments, *made.optional], [*ACTIVATIONS, *GIVEN, "vectors"])
        _refuse(f"site of {made.name}", made.sites, ACTIVATIONS)
        _refuse(f"axis of {made.name}", made.axes, AXES)
        METRICS[made.name] = made
        return function

    return register


def _form(function: Callable[..., Any]) -> Form:
    if inspect.isclass(function):
        return "accumulated"
    return "per_sequence" if "Float" in str(inspect.signature(function).return_annotation) else "derived"


def _refuse(kind: str, names: Iterable[str], choices: Iterable[str]) -> None:
    known = list(choices)
    for name in names:
        if name not in known:
            raise UnknownName(kind, name, known)


def wide(x: Tensor) -> Tensor:
    """The same numbers in float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def harmonic(n: int) -> float:
    """H_n = 1 + 1/2 + ... + 1/n."""
    return math.fsum(1.0 / i for i in range(1, n + 1))
