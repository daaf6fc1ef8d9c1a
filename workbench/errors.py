"""Errors and warnings that a user can cause; each names the wrong value and the choices."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Collection, Iterable
from typing import Any


class WorkbenchError(ValueError):
    """A request that cannot be carried out; the message says what would work."""


class UnknownName(WorkbenchError):
    """A name that does not exist; the message lists the nearest names."""

    def __init__(self, kind: str, name: object, choices: Iterable[object]) -> None:
        self.kind, self.name, self.choices = kind, name, sorted(str(c) for c in choices if c not in (None, ""))
        super().__init__(f"unknown {kind} {name!r}; {suggest(str(name), self.choices)}")

    def __reduce__(self) -> tuple[type, tuple[str, object, list[str]]]:
        return type(self), (self.kind, self.name, self.choices)  # so that a worker process can send it home


def refuse_unknown(kind: str, name: object, choices: Collection[object]) -> None:
    """Raise `UnknownName` for a name that is not among the choices; True and False are no names."""
    if isinstance(name, bool) or name not in choices:
        raise UnknownName(kind, name, choices)


class BadData(WorkbenchError):
    """Text, tokens or documents that cannot be used as asked."""


class BadCheckpoint(WorkbenchError):
    """A run or checkpoint whose files are missing, damaged or contradictory."""


class InUse(WorkbenchError):
    """A run that another process is writing."""


class OnlyHere(WorkbenchError):
    """Files that are complete on this machine but could not be uploaded to the folder's URL."""

    made: Any = None  # the result of the call, if it is more than files: the records of `measure`


class NotCovered(BadCheckpoint):
    """An intact checkpoint of a model that our decoder does not compute; the message says how to open it."""


class ObservedInstead(UserWarning):
    """A checkpoint was opened as another library's module, because our decoder does not compute it."""


class NotMeasured(UserWarning):
    """A measurement has no numbers: its layers did not run, or the model does not show its activations."""


class PaddingLeftOut(UserWarning):
    """Padding was left out: averages are over the tokens of every document."""


class HooksNotCalled(UserWarning):
    """A foreign module was called directly; hooks of its observed model run only in calls of the observed model."""


class NoWorkersYet(UserWarning):
    """A cluster has no worker yet; its jobs wait."""


class NotSent(UserWarning):
    """An upload failed; it is repeated with the next one."""


class LeftOut(UserWarning):
    """Files at a URL could not be downloaded; the message names them, and the other files are available."""


class ArchitectureAssumed(UserWarning):
    """A checkpoint does not name its architecture, so one was assumed."""


def warn_caller(message: str, category: type[Warning]) -> None:
    """Issue a warning at the caller's line, outside this package and the libraries that call its hooks."""
    depth, frame = 1, sys._getframe()
    packages = (__name__.partition(".")[0], "torch", "transformer_lens", "transformers")
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in packages:
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, category, stacklevel=depth)


def suggest(name: str, choices: list[str]) -> str:
    """The nearest choices to `name` in words, or all of them where few or none are near."""
    if near := difflib.get_close_matches(name, choices, n=4, cutoff=0.5):
        return f"did you mean {', '.join(near)}?"
    return f"choose from {', '.join(choices[:60])}" if choices else "there is none"
