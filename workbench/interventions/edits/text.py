"""Options of edits as text: `layer=3`, `layer=2..5`, `layer=0/2/7..9`; checked, and written back in the shortest form."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from workbench.errors import BadData, UnknownName, WorkbenchError

Numbers = tuple[int, ...]
_RANGE = re.compile(r"(-?\d+)(?:\.\.(-?\d+))?")
LARGEST = 1e30  # whose product with an activation float32 still holds
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
        if value not in option.metadata["choices"]:
            raise UnknownName(where, value, filter(None, option.metadata["choices"]))
        return value
    if option.type == "Numbers":
        return _numbers(where, value)
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


def _numbers(where: str, value: Any) -> Numbers:
    """One number, several, or a text of them; in their order for positions, where the order says what goes where."""
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
    return tuple(items) if "position" in where else tuple(sorted(set(items)))


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
