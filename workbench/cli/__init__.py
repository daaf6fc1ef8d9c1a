"""The command line: demo, train, study, measure, analyze, view, report, app, list and more. A command's help is its docstring.

Heavy imports happen inside the commands, so `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Any

# isort: off  (help lists the commands in this order)
from workbench.cli import checkpoints, measuring, showing, training
from workbench.cli.arguments import app

# isort: on

__all__ = ["app", "checkpoints", "main", "measuring", "showing", "training"]


def _terminated(*_: Any) -> None:
    """SIGTERM is Ctrl-C for this process and for its workers, which a terminal would have signalled itself."""
    import multiprocessing
    import os

    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, signal.SIGINT)
    raise KeyboardInterrupt("ended; the same command goes on from here")


_standard = warnings.formatwarning


def _one_sentence(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> str:
    """Our own warnings as a sentence; the line of code that warned says nothing on a command line."""
    ours = category.__module__ == "workbench.errors"
    return f"workbench: {message}\n" if ours else _standard(message, category, *where, **more)


def _dropped(what: sys.UnraisableHookArgs) -> None:
    """Ctrl-C that lands in a destructor, which Python drops, is heard at the next sign of progress: nothing to print."""
    if what.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(what)


class _Output(io.TextIOWrapper):
    """Standard output, where characters that its encoding lacks become `?`, and a full disk is a `WorkbenchError`."""

    def write(self, text: str) -> int:
        with _printing():
            return super().write(text)

    def flush(self) -> None:
        with _printing():
            super().flush()


@contextlib.contextmanager
def _printing() -> Iterator[None]:
    from workbench.errors import WorkbenchError

    try:
        yield
    except BrokenPipeError:  # of `| head`: typer ends in silence
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what the interpreter prints when it ends
        raise WorkbenchError(f"the output cannot be written: {error.strerror}") from error


def main() -> None:
    """Run a command; what a user can cause is one sentence on stderr and exit code 2, Ctrl-C is 130."""
    from workbench.errors import WorkbenchError
    from workbench.places import refuse_a_namesake

    refuse_a_namesake()  # which this package's face has done, unless it is theirs by now
    signal.signal(signal.SIGTERM, _terminated)
    warnings.formatwarning, sys.unraisablehook = _one_sentence, _dropped
    if type(sys.stdout) is io.TextIOWrapper:
        terminal, encoding = sys.stdout.line_buffering, sys.stdout.encoding
        sys.stdout = _Output(sys.stdout.detach(), encoding, errors="replace", line_buffering=terminal)
    try:
        try:
            app()
        finally:
            if sys.stdout:  # none where it is closed, as by >&-
                sys.stdout.flush()
    except WorkbenchError as error:
        print(f"workbench: {error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:
        stop = getattr(end.__context__, "__cause__", None)  # typer turns Ctrl-C into exit code 130 and says nothing
        if isinstance(stop, KeyboardInterrupt):
            print(f"workbench: {str(stop) or 'stopped; the same command goes on from here'}", file=sys.stderr)
        raise
