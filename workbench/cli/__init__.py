"""The command line: demo, train, study, measure, analyze, view, report, app, list and more. A command's help is its docstring.

Heavy imports happen inside the commands, so `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

# isort: off  (help lists the commands in this order)
from workbench.cli import checkpoint_commands, measure_commands, show_commands, train_commands
from workbench.cli.arguments import app, show_tracebacks, tracebacks_shown

# isort: on

__all__ = ["app", "checkpoint_commands", "main", "measure_commands", "show_commands", "train_commands"]
NETWORK = {
    "aiobotocore", "aiohttp", "botocore", "gcsfs", "httpcore", "httpx", "httpx2", "huggingface_hub", "requests", "s3fs", "socket",
    "urllib", "urllib3",
}  # fmt: skip
"""Packages whose errors mean that a server cannot be reached or refuses a request."""


def terminated(*_: Any) -> None:
    """Treat SIGTERM as Ctrl-C, for this process and its workers."""
    import multiprocessing

    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, signal.SIGINT)
    raise KeyboardInterrupt("ended; the same command goes on from here")


_standard = warnings.formatwarning


def _one_sentence(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> str:
    """Format our own warnings as a sentence, without the line of code that issued them."""
    ours = category.__module__ == "workbench.errors"
    return f"workbench: {message}\n" if ours else _standard(message, category, *where, **more)


class _Output(io.TextIOWrapper):
    """Standard output that prints `?` for characters its encoding lacks and raises `WorkbenchError` on a full disk."""

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
    except BrokenPipeError:  # of `| head`: typer ends without a message
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what the interpreter prints when it ends
        raise WorkbenchError(f"the output cannot be written: {error.strerror}") from error


def main() -> None:
    """Run a command. An error is one sentence on stderr with exit code 2, or 1 for an internal error; Ctrl-C is 130."""
    from workbench.errors import WorkbenchError
    from workbench.places import refuse_a_namesake

    refuse_a_namesake()  # `import workbench` checked too, but another package may have replaced it since
    show_tracebacks(False)
    signal.signal(signal.SIGTERM, terminated)
    warnings.formatwarning = _one_sentence
    if type(sys.stdout) is io.TextIOWrapper:
        terminal, encoding = sys.stdout.line_buffering, sys.stdout.encoding
        sys.stdout = _Output(sys.stdout.detach(), encoding, errors="replace", line_buffering=terminal)
    code, raised = 2, Exception()
    try:
        try:
            app()
        finally:
            if sys.stdout:  # None where it is closed, as by >&-
                sys.stdout.flush()
    except WorkbenchError as error:
        raised, sentence = error, str(error)
    except SystemExit as end:
        stop = getattr(end.__context__, "__cause__", None)  # typer turns Ctrl-C into exit code 130 without a message
        if isinstance(stop, KeyboardInterrupt):
            print(f"workbench: {str(stop) or 'stopped; the same command goes on from here'}", file=sys.stderr)
        raise
    except Exception as error:
        raised, sentence = error, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if type(error).__module__.partition(".")[0] in NETWORK or isinstance(error, ConnectionError | TimeoutError):
            sentence = f"the network cannot be used: {sentence}"
        else:
            code, sentence = 1, f"unexpected error, {sentence}; run it again with --debug for the traceback"
    if tracebacks_shown():
        traceback.print_exception(raised)
    print(f"workbench: {sentence}", file=sys.stderr)
    sys.exit(code)
