"""Edits of a forward pass, as data: short texts for links and command lines, JSON for files, frozen objects for notebooks.

    coefficient:layer=3,source=first,value=0     set a coefficient that mixes values (or queries, keys, patterns, streams)
    values:layer=2..5,how=token_mean             replace values: zero, mean, token_mean, layer, prompt, shuffle
    sink:layer=3,head=1                          no attention to position 0; how=keep: only what it writes is gone
    remove:layer=4,part=mlp                      an attention or an MLP adds nothing to the stream
    patch:layer=2,site=v,position=5              activations of a second prompt, or of other positions (prompt=same)
    head:layer=1,head=0/2,how=mean               head outputs become zero, or their mean over the prompt

Numbers are lists: `3`, `2..5`, `0/2/7..9`, negative positions from the end; none means all. Several edits are joined by `;`.
`workbench.edited(model, edits)` applies them. To add a kind write its class (`base.Edit`) and name it in `KINDS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from workbench.errors import UnknownName, WorkbenchError
from workbench.interventions.edits.base import Edit
from workbench.interventions.edits.coefficient import Coefficient
from workbench.interventions.edits.outputs import Head, Remove
from workbench.interventions.edits.patch import Patch
from workbench.interventions.edits.sink import Sink
from workbench.interventions.edits.text import split_options
from workbench.interventions.edits.values import Values

KINDS: dict[str, type[Edit]] = {each.kind: each for each in (Values, Coefficient, Sink, Remove, Head, Patch)}
PRESETS: dict[str, str] = {
    f"{kind.kind}:{options}".rstrip(":"): words for kind in KINDS.values() for options, words in kind.presets.items()
}
"""Common edits as texts, in words."""
Given = Edit | str | Mapping[str, Any]


def parse(text: str) -> Edit:
    """One edit from `kind:key=value,key=value`; raises `UnknownName` and `WorkbenchError` with the choices."""
    return _made(*split_options(text))


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
