"""Output for people: results on stdout as lines and tables, progress and time left on stderr."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape as escape_html
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

ROWS = 60
console = Console(width=None if sys.stdout and sys.stdout.isatty() else 200)  # no stdout: `>&-`
errors = Console(stderr=True)


def say(text: str) -> None:
    """Print one line."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_table(rows: Any) -> None:
    """Print a data frame or a list of rows: on a terminal a table that fits its width, elsewhere TSV with all rows.

    On a terminal, constant columns become a caption, and a table that is too wide is cut into several.
    """
    if hasattr(rows, "to_dict"):
        rows = rows.drop(columns="provenance", errors="ignore").dropna(axis=1, how="all").to_dict("records")
    names = list(rows[0]) if rows else []
    if not (console.is_terminal and names):
        for row in [dict(zip(names, names, strict=True)), *rows] if names else ():
            print("\t".join("" if _missing(row[name]) else " ".join(str(row[name]).split()) for name in names))
        return
    shown = [
        {k: f"{v:.5g}" if isinstance(v, float) else str(v) for k, v in row.items() if not _missing(v)}
        for row in rows[:ROWS]
    ]
    cells = {name: [row.get(name, "") for row in shown] for name in names}
    several = [name for name in names if name not in ("value", "se") and len(rows) > 1]
    constant = [name for name in several if len({str(row[name]) for row in rows}) == 1]  # in all rows and digits
    numeric = [name for name in names if all(_missing(row[name]) or isinstance(row[name], int | float) for row in rows)]
    if caption := ", ".join(f"{name} {cells[name][0]}" for name in constant if cells[name][0]):
        say(caption)
    for part in _parts(cells, [name for name in names if name not in constant] or names[:1], numeric):
        grid = Table(show_edge=False, pad_edge=False)
        for name in part:
            style: dict[str, Any] = {"no_wrap": True, "justify": "right"} if name in numeric else {"overflow": "fold"}
            grid.add_column(Text(name, overflow="fold", no_wrap=False), min_width=_width(cells, name, numeric), **style)
        for row in zip(*(cells[name] for name in part), strict=True):
            grid.add_row(*(Text(cell) for cell in row))
        console.print(grid)
    if len(rows) > ROWS:
        say(f"... {len(rows) - ROWS} more of {len(rows)} rows; --json, --out or a pipe gives all rows")


def _width(cells: Mapping[str, Sequence[str]], name: str, numeric: Sequence[str]) -> int:
    """Return the least width of a column: numbers and names of up to 24 characters are not broken."""
    longest = max(len(cell) for cell in (name, *cells[name])) if name in numeric else max(map(len, cells[name]))
    return max(1, longest if name in numeric else min(longest, 24))


def _parts(cells: Mapping[str, Sequence[str]], names: Sequence[str], numeric: Sequence[str]) -> list[list[str]]:
    """Cut columns into tables that fit the terminal; each begins with the first column."""
    parts, first, between = [list(names[:1])], names[:1], 3
    for name in names[1:]:
        if sum(_width(cells, n, numeric) + between for n in (*parts[-1], name)) > console.width and len(parts[-1]) > 1:
            parts.append(list(first))
        parts[-1].append(name)
    return parts


def json_rows(rows: Any) -> Any:
    """Return a data frame or a list of rows as dictionaries, with None for missing values, also inside lists."""
    value = rows.to_dict("records") if hasattr(rows, "to_dict") else rows.tolist() if hasattr(rows, "tolist") else rows
    if isinstance(value, Mapping):
        return {name: json_rows(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_rows(inner) for inner in value]
    return None if _missing(value) else value


def json_text(value: Any) -> str:
    """Return JSON with all digits of the numbers; infinity is 1e999, which programs read as infinity."""
    return re.sub(r"(?<=[ \[])(-?)Infinity(?=[,}\]])", r"\g<1>1e999", json.dumps(json_rows(value), default=str))


def print_json(rows: Any) -> None:
    """Print a data frame or a list of rows as a JSON array; each row's provenance is an object."""
    listed = json_rows(rows)
    for row in listed:
        if isinstance(row.get("provenance"), str):
            row["provenance"] = json.loads(row["provenance"] or "{}")
    print(json_text(listed))


def notebook_html(title: str, facts: Mapping[str, Any], *parts: str) -> str:
    """Return HTML for notebooks: a title, a table of the facts that are set, and further parts."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape_html(name)}</th><td style='text-align:left'>{escape_html(str(value))}</td></tr>"
        for name, value in facts.items()
        if value is not None and value != "" and value != {}
    )
    return f"<div><b>{escape_html(title)}</b><table>{rows}</table>{''.join(parts)}</div>"


def _missing(value: Any) -> bool:
    return (
        value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value)
    )


Progress = Callable[[int, int, str], None]  # called with (pieces done, number of pieces, present piece)
EVERY = 5.0  # seconds between two lines where no terminal shows a bar
_silent = False


def silence(quiet: bool) -> None:
    """Switch progress off or on (`--quiet`)."""
    global _silent
    _silent = quiet


def note(text: str) -> None:
    """Print one line on stderr, unless `silence`d."""
    if not _silent:
        errors.print(text, markup=False, highlight=False, soft_wrap=True)


class Task:
    """Progress of one job: `task(done, total, what)` updates it, `line()` returns it with the time left."""

    def __init__(self, name: str, total: int = 0) -> None:
        self.name, self.done, self.total, self.what = name, 0, total, ""
        self.begin = self.last = time.monotonic()
        self._took = list[float]()
        self._left: float | None = None

    def __call__(self, done: int, total: int = 0, what: str = "", left: float | None = None) -> None:
        """Update the progress; `left` overrides the estimated seconds, and is infinite where nobody knows them."""
        now = time.monotonic()
        if done < self.done or (self.total and total not in (0, self.total)):  # another kind of pieces
            self._took.clear()
            self.done, self.last, self._left = done, now, None
        if (more := done - self.done) > 0:
            self._took += [(now - self.last) / more] * more
        if more > 0 or left is not None or not (done or self.total):  # the first call ends the preparation
            self.last, self._left = now, left
        self.done, self.total, self.what = done, total or self.total, what

    def left(self) -> float | None:
        """Return the estimated seconds left, or None if they are unknown or have passed."""
        seconds = self._left if self._left is not None else time_left(self._took, self.total - self.done)
        left = math.inf if seconds is None else seconds - (time.monotonic() - self.last)
        return left if 0 < left < math.inf else None

    def words(self) -> list[str]:
        """Return the words after the name: pieces done, time left, present piece."""
        left = self.left() if self.done < self.total else None
        parts = [f"{self.done} of {self.total}"] if self.total else []
        parts += [f"about {left:.0f} s left"] if left is not None else []
        return [*parts, self.what] if self.what else parts

    def line(self) -> str:
        """Return one line, with the elapsed time while the time left is unknown."""
        words = self.words()
        if self.left() is None and not 0 < self.total <= self.done:
            words.insert(1 if self.total else 0, f"{time.monotonic() - self.begin:.0f} s so far")
        return f"{self.name}: {', '.join(words)}"


@contextmanager
def progress(name: str, total: int = 0) -> Iterator[Task]:
    """Show progress on stderr, through a task called like `Progress`: a bar on a terminal, else a line every few seconds."""
    terminal = errors.is_terminal and not errors.is_dumb_terminal
    task = Task(name, total)
    with contextlib.nullcontext() if _silent else _bar(task) if terminal else _lines(task):
        yield task


@contextmanager
def _lines(task: Task) -> Iterator[None]:
    """Print a line every few seconds, and a last one if there was any."""
    over, said = threading.Event(), list[str]()

    def beat() -> None:
        while not over.wait(EVERY):
            said.append(task.line())
            print(said[-1], file=sys.stderr, flush=True)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if said:
        of = f"{task.done} of {task.total} " if task.total else ""
        print(f"{task.name}: {of}in {time.monotonic() - task.begin:.0f} s", file=sys.stderr, flush=True)


class _Row(ProgressColumn):
    """The words of a task, updated whenever the bar is drawn."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task

    def render(self, task: Any) -> Text:
        task.total, task.completed = self.task.total or None, self.task.done
        return Text(", ".join(self.task.words()))


@contextmanager
def _bar(task: Task) -> Iterator[None]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), _Row(task), TimeElapsedColumn())
    with Bars(*columns, console=errors) as bars:
        bars.add_task(escape(task.name), total=None)
        yield


def time_left(took: Sequence[float], more: int) -> float | None:
    """Estimate the seconds of `more` pieces from the durations so far; pieces without a duration existed already.

    Only the latest eight count, as the first pieces include the loading of libraries and models.
    """
    later = (took[1:] or took)[-8:]
    real = [seconds for seconds in later if seconds >= max(later) / 10]
    return more * sum(real) / len(real) if real and more else None
