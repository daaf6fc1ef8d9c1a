"""Registry of metrics: `@metric` on a function or a class, whose arguments name the activations it reads.

A metric has one of three forms. *Per sequence*: a function of named activations that returns one value per sequence
(first axis `batch`); the driver computes mean, standard error and n. *Accumulated*: a class with `update(...)`,
`merge(other)` and `result()`. *Derived*: a function of `weights`, `gradients` or a key-value `cache` that returns rows of
(part, layer, value). No metric sees a model, a file or a widget.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from workbench.errors import refuse_unknown
from workbench.hook_names import ACTIVATIONS

Form = Literal["per_sequence", "accumulated", "derived"]
F = TypeVar("F", bound=Callable[..., Any])

GIVEN = ("tokens", "counted", "window", "W_O", "weights", "gradients", "cache")
"""Arguments other than activations: ids [batch, pos], which of them count in the loss (bool [batch, pos]), the layer's output
matrix [head, d_head, d_model], tensors by name, a filled key-value cache."""

AXES = {"pos": "position", "head": "head", "kv_head": "head", "source": "source", "index": "index"}
"""Axes a value may have after `batch`, and the record's columns for them."""


@dataclass(frozen=True)
class Metric:
    """A registered metric; the fields after `form` are the settings of `@metric`."""

    function: Callable[..., Any]  # the pure function or the accumulator class
    form: Form
    unit: str
    range: str  # of the values, in words
    reading: str  # meaning of higher or lower values
    source: str  # paper or method
    sites: tuple[str, ...] = ()  # activations for a `vectors` argument, one at a time
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Keyword options by name; `per_head` adds a head axis."""
    controls: Mapping[str, Any] = field(default_factory=dict)
    """By name a function of `T` or `tokens` (per sequence), or keyword options (accumulated, derived)."""
    units: Mapping[str, str] = field(default_factory=dict)  # of variants that differ
    folds: int = 8  # jackknife groups of documents for the error of an accumulated value
    min_length: int = 1  # least number of positions of a document
    version: int = 1
    """Raise it whenever the numbers change, through the metric's code, a model's or a kernel's; older records are measured anew."""
    doubt: Callable[[Tensor], str] | None = None
    """Maps ids [batch, pos] to the reason why the numbers have no meaning on them, or to ""; shown under their figures."""
    ahead: Callable[[Tensor], Mapping[str, Any]] | None = None
    """Maps all ids [batch, pos] of a measurement to options with which an accumulator stores less for the same result."""
    found: bool = False
    """Whether it reads the positions where heads rest (`positions="found"`) instead of the first one."""

    @property
    def name(self) -> str:
        """Public name: the function's, or the class's in snake case."""
        raw = self.function.__name__
        return "".join(f"_{c.lower()}" if c.isupper() else c for c in raw).lstrip("_")

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (inspect.getdoc(self.function) or "").split("\n", 1)[0]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the required arguments; `vectors` is replaced by every one of `sites`."""
        return tuple(p.name for p in self._parameters() if p.default is p.empty or self.found)

    @property
    def optional(self) -> tuple[str, ...]:
        """Names of the arguments with a default of None, which are passed if a model has them."""
        if takes_positions(self):
            return ()
        return tuple(p.name for p in self._parameters() if p.default is not p.empty)

    def _parameters(self) -> list[inspect.Parameter]:
        call = self.function.update if inspect.isclass(self.function) else self.function  # type: ignore[attr-defined]
        parameters = inspect.signature(call).parameters.values()
        return [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of a per-sequence value after `batch`, from the return annotation without those of variants (`*axis`)."""
        if self.form != "per_sequence":
            return ()
        axes = typing.get_type_hints(self.function)["return"].dim_str.split()[1:]
        return tuple(axis for axis in axes if not axis.startswith("*"))

    def reads(self, site: str | None) -> tuple[str, ...]:
        """Return the names of the activations among the arguments, for one site."""
        named = (site if a == "vectors" else a for a in self.arguments)
        return tuple(a for a in named if a in ACTIVATIONS and a is not None)


def takes_positions(item: Any) -> bool:
    """Return whether a metric or an experiment is of the first position, and can be of those found (`positions`)."""
    return "positions" in inspect.signature(item.function).parameters


METRICS: dict[str, Metric] = {}


def metric(*, unit: str, range: str, reading: str, source: str, **settings: Any) -> Callable[[F], F]:  # noqa: A002
    """Register a metric under the name of its function or class; the settings are the fields of `Metric`.

    Raises `ValueError` if the name is taken, `UnknownName` for an argument that is no activation, or an axis no column of the records.
    """

    def register(function: F) -> F:
        form: Form = "derived"
        if inspect.isclass(function):
            form = "accumulated"
        elif "Float" in str(inspect.signature(function).return_annotation):
            form = "per_sequence"
        made = Metric(function, form, unit, range, reading, source, **settings)
        if made.name in METRICS:
            raise ValueError(f"metric {made.name!r} is registered already")
        for name in (*made.arguments, *made.optional):
            refuse_unknown(f"argument of {made.name}", name, (*ACTIVATIONS, *GIVEN, "vectors"))
        for name in made.sites:
            refuse_unknown(f"site of {made.name}", name, ACTIVATIONS)
        for name in made.axes:
            refuse_unknown(f"axis of {made.name}", name, AXES)
        METRICS[made.name] = made
        return function

    return register


def wide(x: Tensor) -> Tensor:
    """Cast to float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
