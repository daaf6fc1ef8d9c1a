"""How a measure is registered: `@metric` on a function or a class; its arguments say what it reads.

Three forms, told apart by type. *Per sequence*: a function of named activations that returns one value per sequence
(first axis `batch`), so the driver supplies mean, standard error and n. *Accumulated*: a class with `update(...)`,
`merge(other)` and `result()`. *Derived*: a function of `weights` or `gradients` that returns rows of (part, layer, value).
None sees a model, a file or a widget.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from workbench.errors import UnknownName
from workbench.files import digest
from workbench.names import ACTIVATIONS

Form = Literal["per_sequence", "accumulated", "derived"]
F = TypeVar("F", bound=Callable[..., Any])

GIVEN = ("tokens", "T", "weights", "gradients", "positions")
"""Arguments the driver hands in beside activations: ids [batch, pos], their length, tensors by name."""


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
        """What it reads; `vectors` stands for each of `sites` in turn."""
        call = self.function.update if inspect.isclass(self.function) else self.function  # type: ignore[attr-defined]
        parameters = inspect.signature(call).parameters.values()
        return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self")

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
        return tuple(a for a in named if a is not None and a in ACTIVATIONS and a not in GIVEN)

    def version(self) -> str:
        """Changes with the code and the declared options, so stored results of older code are not taken for new ones."""
        return digest(inspect.getsource(self.function), dict(self.variants), sorted(self.controls), self.sites)


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
) -> Callable[[F], F]:
    """Register a measure under its own name.

    `sites`: activations a `vectors` argument takes in turn. `variants`: name -> keyword options (`per_head` adds a head
    axis). `controls`: name -> a function of `T`, `tokens`, `positions` (per sequence) or keyword options (accumulated).
    `units`: unit of a variant where it differs. `folds`: jackknife groups of documents behind an accumulated value's error.
    Raises if the name is taken or an argument is no activation.
    """

    def register(function: F) -> F:
        returned = inspect.signature(function).return_annotation if not inspect.isclass(function) else None
        form: Form = (
            "accumulated"
            if inspect.isclass(function)
            else "derived"
            if "Float" not in str(returned)
            else "per_sequence"
        )
        made = Metric(
            function,
            form,
            unit,
            range,
            reading,
            source,
            sites,
            variants or {},
            controls or {},
            units or {},
            folds,
            min_length,
        )
        if made.name in METRICS:
            raise ValueError(f"metric {made.name!r} is registered already")
        for argument in made.arguments:
            if argument not in (*ACTIVATIONS, *GIVEN, "vectors"):
                raise UnknownName(f"argument of {made.name}", argument, [*ACTIVATIONS, *GIVEN])
        METRICS[made.name] = made
        return function

    return register


def find(name: str) -> Metric:
    """The registered measure; raises `UnknownName` with the nearest."""
    if name not in METRICS:
        raise UnknownName("metric", name, METRICS)
    return METRICS[name]


def harmonic(n: int) -> float:
    """H_n = 1 + 1/2 + ... + 1/n."""
    return math.fsum(1.0 / i for i in range(1, n + 1))
