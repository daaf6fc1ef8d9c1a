"""Edits of a forward pass, as data: short texts for links and command lines, JSON for files, frozen objects for notebooks.

    coefficient:layer=3,source=first,value=0     set a coefficient that mixes values (or queries, keys, patterns, streams)
    values:layer=2..5,how=token_mean             replace values: zero, mean, token_mean, layer, prompt, shuffle
    sink:layer=3,head=1                          no attention to position 0; how=keep: only what it writes is gone
    remove:layer=4,part=mlp                      an attention or an MLP adds nothing to the stream
    patch:layer=2,site=v,position=5              activations of a second prompt, or of other positions (prompt=same)
    head:layer=1,head=0/2,how=mean               head outputs become zero, or their mean over the prompt

Numbers are lists: `3`, `2..5`, `0/2/7..9`, negative positions from the end; none means all. Several edits are joined by `;`.
`edited(model, edits)` of `workbench.interventions.editing` makes them stand.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from workbench.errors import BadData, UnknownName, WorkbenchError

Numbers = tuple[int, ...]
_RANGE = re.compile(r"(-?\d+)(?:\.\.(-?\d+))?")
MOST = 100_000  # numbers in one list: longer than any context, short enough not to fill the memory


def _one_of(*choices: str) -> Any:
    return field(default=choices[0], metadata={"choices": choices})


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One change; `layer` lists the layers from 0, empty: all that have what is changed.

    Numbers may be given as one, as a list or as text. Raises `UnknownName` and `WorkbenchError` for what is not allowed.
    """

    kind: ClassVar[str]
    layer: Numbers = ()

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = _checked(self.kind, each, getattr(self, each.name))
            object.__setattr__(self, each.name, value)
        for name in ("layer", "head"):
            if any(n < 0 for n in getattr(self, name, ())):
                raise WorkbenchError(f"{self}: {name}s are counted from 0")
        self.refuse()

    def refuse(self) -> None:
        """Raise `WorkbenchError` for options that contradict each other."""

    def only_with(self, name: str, key: str, value: str) -> None:
        """Refuse an option that says nothing here."""
        default = next(f.default for f in dataclasses.fields(self) if f.name == name)
        if getattr(self, name) != default and getattr(self, key) != value:
            raise WorkbenchError(f"{self}: {name} goes with {key}={value}; drop it or set {key}={value}")

    def changed(self) -> dict[str, Any]:
        """The options that are not the default."""
        return {f.name: v for f in dataclasses.fields(self) if (v := getattr(self, f.name)) != f.default}

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the kind and the options that are not the default."""
        return {"kind": self.kind} | {k: list(v) if isinstance(v, tuple) else v for k, v in self.changed().items()}

    def __str__(self) -> str:
        options = ",".join(f"{name}={_text(value)}" for name, value in self.changed().items())
        return f"{self.kind}:{options}" if options else self.kind


@dataclass(frozen=True, kw_only=True)
class Coefficient(Edit):
    """A coefficient of the architecture's own is set to `value`, whether it is fixed, learned or computed.

    `path`: `v`, `q`, `k` (what mixes values, queries, keys), `output` (what is added to the attention's output: NeuTRENO,
    identity map), `pattern` (the attention residual), `stream` (averages of outputs); empty: the value path, which is `v`
    where values are mixed and `output` elsewhere. `source`: `own`, `first`, `source.2` (layer 2's), `table`, `earlier`
    (the identity map's mean), of streams `embed` and `block.2`; empty: all but the own.
    """

    kind = "coefficient"
    source: str = ""
    path: str = field(default="", metadata={"choices": ("", "v", "q", "k", "output", "pattern", "stream")})
    value: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == "source.0":
            object.__setattr__(self, "source", "first")


@dataclass(frozen=True, kw_only=True)
class Values(Edit):
    """Values are replaced, of all heads or of some key-value heads.

    `site`: `v` (effective: what the pattern multiplies, and what later layers borrow), `own_v` (as projected here, before
    any mixing), `arriving` (what other layers or a table lend to this one). `how`: `zero`; `mean` over the positions of the
    prompt, later ones included; `token_mean` (by token id, from a table); `layer` (those of `from_layer` at this site);
    `prompt` (a second prompt's); `shuffle` (among positions, by `seed`). Other layers' and prompts' come from the unedited
    model.
    """

    kind = "values"
    head: Numbers = ()
    how: str = _one_of("zero", "mean", "token_mean", "layer", "prompt", "shuffle")
    site: str = _one_of("v", "own_v", "arriving")
    from_layer: int = 0
    seed: int = 0

    def refuse(self) -> None:
        self.only_with("from_layer", "how", "layer")
        self.only_with("seed", "how", "shuffle")
        if self.from_layer < 0 or self.seed < 0:
            raise WorkbenchError(f"{self}: from_layer and seed are counted from 0")
        if self.how == "token_mean" and self.site == "arriving":
            raise WorkbenchError(f"{self}: there is no table of what arrives; choose site=v or site=own_v")


@dataclass(frozen=True, kw_only=True)
class Sink(Edit):
    """Later queries do not attend to the positions (0: the usual sink), in all query heads or in some.

    `how`: `renormalise`, the other keys share the whole attention; `keep`, the pattern stays but what these positions would
    write is left out. A position still attends to itself, so that row 0 stays a distribution.
    """

    kind = "sink"
    head: Numbers = ()
    position: Numbers = (0,)
    how: str = _one_of("renormalise", "keep")

    def refuse(self) -> None:
        if not self.position:
            raise WorkbenchError("sink: name the positions that are cut, as position=0")


@dataclass(frozen=True, kw_only=True)
class Remove(Edit):
    """An attention, an MLP or both add nothing to the stream."""

    kind = "remove"
    part: str = _one_of("both", "attention", "mlp")


@dataclass(frozen=True, kw_only=True)
class Patch(Edit):
    """Activations become those of a second prompt (`prompt=other`), or of other positions of the prompt (`same`).

    `site`: `stream` (what block n reads; L: what the final norm reads), `v`, `own_v`, `q`, `k` (before the rotation), `z`,
    `attn_out`, `mlp_out`. `position` are set, from `from_position`: as many, one for all, or none for the same ones. Prompts
    of unequal length are aligned by naming positions. The activations come from the unedited model.
    """

    kind = "patch"
    site: str = _one_of("stream", "v", "own_v", "q", "k", "z", "attn_out", "mlp_out")
    head: Numbers = ()
    position: Numbers = ()
    prompt: str = _one_of("other", "same")
    from_position: Numbers = ()

    def refuse(self) -> None:
        if self.prompt == "same" and not self.from_position:
            raise WorkbenchError(f"{self}: say from which positions, as from_position=3")
        if len(set(self.position)) < len(self.position):
            raise WorkbenchError(f"{self}: a position is named twice")
        if self.head and self.site in ("stream", "attn_out", "mlp_out"):
            raise WorkbenchError(f"{self}: {self.site} has no heads; heads are told apart at v, own_v, q, k and z")
        if len(self.from_position) > 1 and self.position and len(self.from_position) != len(self.position):
            raise WorkbenchError(
                f"{self}: {len(self.from_position)} positions to read for {len(self.position)} to set; give as many, or one"
            )


@dataclass(frozen=True, kw_only=True)
class Head(Edit):
    """The output of query heads, before W_O, becomes zero or its mean over the positions of the prompt."""

    kind = "head"
    head: Numbers = ()
    how: str = _one_of("zero", "mean")


KINDS: dict[str, type[Edit]] = {each.kind: each for each in (Coefficient, Values, Sink, Remove, Patch, Head)}
Given = Edit | str | Mapping[str, Any]


def parse(text: str) -> Edit:
    """One edit from `kind:key=value,key=value`; raises `UnknownName` and `WorkbenchError` with the choices."""
    kind, _, rest = text.strip().partition(":")
    options: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in rest.split(","))):
        key, equals, value = (x.strip() for x in part.partition("="))
        if not equals:
            raise WorkbenchError(f"{part!r} in {text!r} is no option; write key=value, as layer=3")
        if key in options:
            raise WorkbenchError(f"{text!r} gives {key} twice")
        options[key] = value
    return _made(kind.strip(), options)


def from_dict(given: Mapping[str, Any]) -> Edit:
    """The edit that `to_dict` wrote; raises as `parse`."""
    if "kind" not in given:
        raise WorkbenchError(f"an edit needs a kind: one of {', '.join(KINDS)}")
    return _made(given["kind"], {k: v for k, v in given.items() if k != "kind"})


def as_edits(given: Given | Iterable[Given]) -> list[Edit]:
    """Edits from one or several objects, dictionaries, or texts (`sink:layer=3;remove:layer=4,part=mlp`)."""
    if isinstance(given, str):
        return [parse(part) for part in given.split(";") if part.strip()]
    if isinstance(given, Edit):
        return [given]
    if isinstance(given, Mapping):
        return [from_dict(given)]
    return [edit for each in given for edit in as_edits(each)]


def _made(kind: Any, options: Mapping[str, Any]) -> Edit:
    if kind not in KINDS:
        raise UnknownName("edit", kind, KINDS)
    fields = {f.name: f for f in dataclasses.fields(KINDS[kind])}
    for key in options:
        if key not in fields:
            raise UnknownName(f"option of {kind}", key, fields)
    for name, each in fields.items():
        if each.default is dataclasses.MISSING and name not in options:
            raise WorkbenchError(f"{kind} needs {name}, as {name}=0")
    return KINDS[kind](**options)


def _checked(kind: str, each: dataclasses.Field[Any], value: Any) -> Any:
    """A value of the field's type, made from text where it is one."""
    where = f"{each.name} of {kind}"
    if "choices" in each.metadata:
        if value not in each.metadata["choices"]:
            raise UnknownName(where, value, filter(None, each.metadata["choices"]))
        return value
    if each.type == "Numbers":
        return _numbers(where, value)
    if each.type == "str":
        if not isinstance(value, str) or set(value) & set(",;=:"):
            raise WorkbenchError(f"{where}={value!r}: must be a name")
        return value
    kinds, example = ((int, float), "0.5") if each.type == "float" else ((int,), "3")
    if isinstance(value, str):
        try:
            value = kinds[-1](value)
        except ValueError:
            raise WorkbenchError(f"{where}={value!r}: must be a number, as {example}") from None
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
        raise WorkbenchError(f"{where}={value!r}: must be a finite number, as {example}")
    return kinds[-1](value)


def _numbers(where: str, value: Any) -> Numbers:
    """One number, several, or a text of them; in their order for positions, where the order says what goes where."""
    if isinstance(value, str):
        found: list[int] = []
        for part in filter(None, value.split("/")):
            match = _RANGE.fullmatch(part)
            if match is None:
                raise BadData(f"{where}={value!r}: write numbers as 3, 2..5 or 0/2/7")
            start, end = int(match[1]), int(match[2] or match[1])
            if not start <= end < start + MOST:
                raise BadData(f"{where}={value!r}: a range rises and has fewer than {MOST} numbers, as 2..5")
            found += range(start, end + 1)
        value = found
    items = list(value) if isinstance(value, Sequence | range | set) else [value]
    if any(isinstance(n, bool) or not isinstance(n, int) for n in items):
        raise BadData(f"{where}={value!r}: must be whole numbers, as 3, 2..5 or 0/2/7")
    return tuple(items) if "position" in where else tuple(sorted(set(items)))


def _text(value: Any) -> str:
    if not isinstance(value, tuple):
        return repr(value) if isinstance(value, float) else str(value)
    runs: list[list[int]] = []
    for n in value:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return "/".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
