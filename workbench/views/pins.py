"""Pinned views with their notes, and tags of runs: one file beside the runs; views are redrawn from their links."""

from __future__ import annotations

import json
import re
import shlex
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.errors import BadData, WorkbenchError
from workbench.file_io import read_json, writable, write_json
from workbench.plots.html_page import Page, heading, numbers_html, paragraph
from workbench.views.page_links import Link
from workbench.views.registered_views import Drawing, views_of
from workbench.views.source import Source

FILE = ".pins.json"
TAG = re.compile(r"#([\w-]+)")  # in a note
MAX_NOTE, MAX_PINS = 2000, 200  # characters of a note; pins of a folder
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Pin:
    """A pinned view: a link, the view's name, and a note."""

    link: str
    view: str
    note: str = ""
    kept: str = ""
    """Time in UTC."""

    def draw(self, source: Source) -> Drawing:
        """Draw the view from the current runs."""
        link = Link.parse(self.link)
        return views_of(link.page, self.view)[self.view](source, link)


def pins(folder: Path) -> list[Pin]:
    """Return the pins of a folder of runs, the oldest first; raises `WorkbenchError` for a damaged file."""
    if not (folder / FILE).exists():
        return []
    stored = read_json(folder / FILE).get("pins")
    fields = Pin.__dataclass_fields__
    good = isinstance(stored, list) and all(
        isinstance(p, dict) and {"link", "view"} <= p.keys() <= fields.keys() and all(isinstance(v, str) for v in p.values())
        for p in stored
    )  # fmt: skip
    if not good:
        raise BadData(f"{folder / FILE} holds no kept views; move it away and keep them again")
    return [Pin(**p) for p in stored or ()]


def tags_of(pin: Pin) -> set[str]:
    """Return the tags of a pin: words of its note that begin with #."""
    return set(TAG.findall(pin.note))


def run_tags(folder: Path) -> dict[str, str]:
    """Return the tags of runs by name, separated by spaces."""
    stored = read_json(folder / FILE).get("tags", {}) if (folder / FILE).exists() else {}
    return {str(run): str(tags) for run, tags in stored.items()} if isinstance(stored, dict) else {}


def tag_run(folder: Path, run: str, tags: str) -> None:
    """Set the tags of a run; none remove it. Raises `WorkbenchError` if the folder is read-only."""
    with _LOCK:
        others = {name: old for name, old in run_tags(folder).items() if name != run}
        words = " ".join(dict.fromkeys(tags[:MAX_NOTE].replace("#", " ").split()))
        _write(folder, pins(folder), others | ({run: words} if words else {}))


def add(folder: Path, link: Link, view: str, note: str = "") -> None:
    """Pin a view, or replace the note of its pin. Raises `WorkbenchError` if the folder is read-only."""
    with _LOCK:
        others = [p for p in pins(folder) if (p.link, p.view) != (str(link), view)]
        if len(others) >= MAX_PINS:
            raise WorkbenchError(f"{MAX_PINS} views are kept already; remove one first")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        _write(folder, [*others, Pin(str(link), view, note[:MAX_NOTE], now)])


def remove(folder: Path, pin: Pin) -> None:
    """Remove a pin; nothing happens if it is gone already."""
    with _LOCK:
        _write(folder, [p for p in pins(folder) if p != pin])


def _write(folder: Path, kept: Sequence[Pin], tags: dict[str, str] | None = None) -> None:
    tags = run_tags(folder) if tags is None else tags
    try:
        write_json(writable(folder / FILE), {"pins": [asdict(p) for p in kept]} | ({"tags": tags} if tags else {}))
    except OSError as error:
        raise WorkbenchError(f"cannot write {folder / FILE}: {error.strerror or error}") from error


def redrawn(source: Source, kept: Sequence[Pin]) -> Iterator[tuple[Pin, Drawing | str]]:
    """Yield each pin with its drawing, or with the reason why it can no longer be drawn."""
    for pin in kept:
        try:
            yield pin, pin.draw(source)
        except WorkbenchError as reason:
            yield pin, str(reason)


def as_html(source: Source, kept: Sequence[Pin]) -> str:
    """Return the pins as one offline page: notes, figures, sentences and numbers."""
    page = Page("Kept views", wide=True)
    page.add(heading("Kept views", 1))
    for pin, drawing in redrawn(source, kept):
        page.add(heading(pin.note or pin.view.replace("_", " ")))
        if isinstance(drawing, str):
            page.add(paragraph(f"Not drawn: {drawing}", "small"))
        else:
            page.add(page.figure(drawing.figure), paragraph(drawing.sentence), numbers_html(drawing.table))
        page.add(paragraph(f"{pin.kept}: {_command(source.folder, pin)}", "small"))
    return page.html()


def markdown(folder: Path, kept: Sequence[Pin]) -> str:
    """Return the pins as notes and commands in Markdown, with their text escaped."""
    parts = [
        f"- {escaped(p.note or p.view)} ({escaped(p.kept)})\n\n      {_command(folder, p, out=True)}\n" for p in kept
    ]
    return "# Kept views\n\n" + "\n".join(parts)


def notebook(folder: Path, kept: Sequence[Pin]) -> str:
    """Return the pins as a notebook (nbformat 4.5) that redraws them."""
    begin = (
        "from pathlib import Path\n\nfrom workbench.views import Source\nfrom workbench.views.pins import Pin\n\n"
        f"source = Source(Path({str(folder)!r}))"
    )
    cells = [_cell("code", "begin", begin)]
    for i, pin in enumerate(kept):
        cells.append(_cell("markdown", f"note-{i}", f"## {escaped(pin.view)}\n\n{escaped(pin.note)}"))
        cells.append(_cell("code", f"pin-{i}", f"Pin({pin.link!r}, {pin.view!r}).draw(source).figure"))
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1)


def escaped(text: object) -> str:
    """Return text escaped for Markdown, on one line."""
    return re.sub(r"([\\`*_{}\[\]()#+\-.!|$:<>~&])", r"\\\1", " ".join(str(text).split()))


def _command(folder: Path, pin: Pin, out: bool = False) -> str:
    """The shell command that draws a pin from a folder of runs, on one line; `=` keeps text from becoming another option."""
    name = re.sub(r"[^\w-]+", "_", pin.view)
    words = ["workbench", "view", " ".join(pin.link.split()), f"--only={pin.view}", f"--runs={folder}"]
    words += [f"--out={name}.svg"] if out else []
    if words[2].startswith("-"):
        words = [*words[:2], *words[3:], "--", words[2]]
    return " ".join(shlex.join(words).split())


def _cell(kind: str, name: str, text: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "id": name, "metadata": {}, "source": text}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})
