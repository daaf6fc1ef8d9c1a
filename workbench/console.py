"""What a person sees in the terminal: lines, tables, progress with time left."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

ROWS = 60
console = Console(width=None if sys.stdout.isatty() else 200)
errors = Console(stderr=True)


def say(text: str) -> None:
    """One line, as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def table(frame: Any) -> None:
    """A data frame with its empty columns left out, the first rows of it where it is long."""
    shown = frame.dropna(axis=1, how="all").head(ROWS)
    shown = shown.drop(columns=[c for c in ("provenance",) if c in shown])
    grid = Table(show_edge=False, pad_edge=False)
    for name in shown.columns:
        grid.add_column(str(name), overflow="fold")
    for row in shown.itertuples(index=False):
        grid.add_row(*(_cell(value) for value in row))
    console.print(grid)
    if len(frame) > ROWS:
        say(f"... {len(frame) - ROWS} more of {len(frame)} rows; --json or --out writes them all")


def _cell(value: Any) -> str:
    import pandas as pd

    if pd.isna(value):
        return ""
    return f"{value:.5g}" if isinstance(value, float) else escape(str(value))


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner whose text the caller changes, which is also where a Ctrl-C that got lost is heard (`KeyboardInterrupt`)."""
    with errors.status(text) as spinner, _ctrl_c_noted() as noted:

        def update(now: str) -> None:
            if noted:
                raise KeyboardInterrupt
            spinner.update(escape(now))

        yield update


@contextmanager
def _ctrl_c_noted() -> Iterator[list[int]]:
    """Every Ctrl-C meanwhile. Python drops the exception of one that arrives inside a destructor or a weak reference's callback."""
    noted = list[int]()

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        signal.default_int_handler(number, frame)

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def train_progress(name: str, steps: int) -> Iterator[Callable[[int, float, float], None]]:
    """A bar for one training: loss, tokens per second, time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors) as progress:
        task = progress.add_task(escape(name), total=steps)

        def update(step: int, loss: float, rate: float) -> None:
            text = f"{escape(name)}  loss {loss:.3f} nats  {rate:,.0f} tokens/s"
            progress.update(task, completed=step, description=text)

        yield update


@contextmanager
def demo_progress() -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar over the demo's models."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=errors
    ) as progress:
        task = progress.add_task("training and measuring", total=None)

        def update(status: dict[str, Any]) -> None:
            left = "" if status["left_s"] is None else f", about {status['left_s']:.0f} s left"
            failed = f", {len(status['failed'])} failed" if status["failed"] else ""
            text = f"training and measuring{left}{failed}"
            progress.update(task, total=len(status["models"]), completed=len(status["ready"]), description=text)

        yield update


def time_left(took: Sequence[float], more: int) -> str:
    """How long so many more pieces of work will take, in words after a comma, from the seconds that each took so far.

    What was there already takes next to nothing and says nothing of the rest: pieces under a tenth of the longest are left out.
    """
    real = [seconds for seconds in took if seconds >= max(took) / 10]
    return f", about {more * sum(real) / len(real):.0f} s left" if real and more else ""
