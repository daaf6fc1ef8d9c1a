"""The errors a user can cause; each names the value that was wrong and the choices."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable
from typing import Any


class WorkbenchError(ValueError):
    """Something the user asked for cannot be done; the message says what would work."""


class UnknownName(WorkbenchError):
    """A name that is not in its vocabulary; the message lists the nearest that are."""

    def __init__(self, kind: str, name: object, choices: Iterable[str]) -> None:
        self.kind, self.name, self.choices = kind, name, sorted(choices)
        super().__init__(f"unknown {kind} {name!r}; {suggest(str(name), self.choices)}")

    def __reduce__(self) -> tuple[type, tuple[str, object, list[str]]]:
        return type(self), (self.kind, self.name, self.choices)  # so that a worker process can send it home


class BadData(WorkbenchError):
    """Text, tokens or documents that cannot be used as asked."""


class BadCheckpoint(WorkbenchError):
    """A run or checkpoint whose files are missing, damaged or contradictory."""


class InUse(WorkbenchError):
    """A run that another process is writing."""


class OnlyHere(WorkbenchError):
    """What was written is whole on this machine, and could not be put up where the folder stands for one elsewhere."""

    made: Any = None
    """What was asked for, where that is more than files: the records of `measure`."""


class NotCovered(BadCheckpoint):
    """A sound checkpoint of a model that our decoder does not compute; the message says what it is and what opens it."""


class ObservedInstead(UserWarning):
    """A checkpoint our decoder does not compute was opened as another library's module, and is observed from outside."""


class NotMeasured(UserWarning):
    """What was asked for has no numbers here: layers that did not run, a metric of what the model does not show."""


class PaddingLeftOut(UserWarning):
    """Some positions are padding, or rows hold several documents: averages are over the tokens of each document."""


class HooksNotCalled(UserWarning):
    """A foreign module was called itself while hooks of its observed model were open: they fire in the observed model's runs only."""


class NoWorkersYet(UserWarning):
    """A cluster has no worker at the moment; its jobs wait for the first."""


class NotSent(UserWarning):
    """What was written here could not be put up; it is tried again with what is written next."""


class LeftOut(UserWarning):
    """Files of a folder at a URL could not be brought to this machine; the message names them, and the others are here."""


class ArchitectureAssumed(UserWarning):
    """A checkpoint does not say which architecture it holds, so one was assumed."""


def warn_caller(message: str, category: type[Warning]) -> None:
    """Issue a warning that points at the caller's line outside this package and the packages that call its modules and hooks."""
    depth, frame = 1, sys._getframe()
    packages = (__name__.partition(".")[0], "torch", "transformer_lens", "transformers")
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in packages:
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, category, stacklevel=depth)


def suggest(name: str, choices: list[str]) -> str:
    """The nearest choices to `name` in words, or all of them where few or none are near."""
    near = difflib.get_close_matches(name, choices, n=4, cutoff=0.5)
    if near:
        return f"did you mean {', '.join(near)}?"
    return f"choose from {', '.join(choices[:60])}" if choices else "there is none"
