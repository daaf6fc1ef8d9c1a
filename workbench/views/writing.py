"""Files of a link's views: an offline page, a figure for a paper, or the table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import plotly.graph_objects as go

from workbench import plots
from workbench.errors import BadData, UnknownName, WorkbenchError, refuse_unknown
from workbench.plots.html_page import Page, numbers_html, paragraph
from workbench.plots.image_export import FONT, font_face, save_figure
from workbench.runs.catalogue import Entry
from workbench.runs.run import Run
from workbench.runs.tables import write_table_as
from workbench.views.main_result import finding
from workbench.views.registered_views import Drawing, timelapse, views_of
from workbench.views.source import run_name
from workbench.views.token_names import short

if TYPE_CHECKING:
    from workbench.views.page_links import Link
    from workbench.views.source import Source

WIDTH, PROMPT = 1000, 60  # pixels, characters of a prompt
COLUMN, PAGE = 85, 175  # millimetres of a column of a journal, and of both
PROMPTED = ("attention", "prompt", "intervene")
"""Pages about one prompt."""


def write(
    source: Source, link: Link, out: Path, *, only: str | None = None, play: bool = False, command: str = ""
) -> tuple[Path, dict[str, str]]:
    """Write the views of a link to a file.

    Args:
        out: The file; its ending gives the format: .html, .svg, .png, .csv, .tex, .md, .parquet, .arrow, .json.
        only: One view of the page; pictures hold one.
        play: Animate over the checkpoints of model A (.html).

    Returns:
        The file, and by view why it is left out.

    Raises:
        UnknownName: Another ending or view.
        WorkbenchError: Nothing can be drawn.
    """
    refuse_unknown("file ending", out.suffix, WRITERS)
    if play and out.suffix != ".html":
        raise WorkbenchError(f"a time-lapse is written as .html, not {out.suffix}")
    made, reasons = {}, {}
    for name, function in views_of(link.page, only).items():
        try:
            made[name] = timelapse(function, source, link) if play else function(source, link)
        except UnknownName:
            raise
        except WorkbenchError as reason:
            reasons[name] = str(reason)
    if not made:
        raise WorkbenchError("; ".join(f"{name}: {why}" for name, why in reasons.items()))
    WRITERS[out.suffix](made, out, f"{link}", command, caption_of(source, link))
    return out, reasons


def _table(made: dict[str, Drawing]) -> pd.DataFrame:
    tables = [d.table.assign(view=name) if len(made) > 1 else d.table for name, d in made.items()]
    return pd.concat(tables, ignore_index=True) if len(tables) > 1 else tables[0]


def _html(made: dict[str, Drawing], out: Path, title: str, command: str, caption: str) -> None:
    page = Page(title, wide=True)
    page.add(paragraph(caption, "small") if caption else "")
    for drawing in made.values():
        words = paragraph(drawing.sentence) if drawing.sentence else ""
        page.add(page.figure(drawing.figure), words, numbers_html(drawing.table))
    page.write(out, command)


def caption_of(source: Source, link: Link) -> str:
    """Return the models, steps, prompt and recipe behind the figures of a link, for a file that leaves its page."""
    words, entries = list[str](), list[Entry]()
    if link.page == "start" and link.text("show", "finding") == "finding":
        with contextlib.suppress(WorkbenchError):  # without a main result, or another view
            if (result := finding(source, link)).tuning:  # models at rates of their own, not that of one experiment
                return f"{result.title}; {result.tuning}"
    if link.page in PROMPTED:
        subjects = source.subjects(link)
        words, entries = [s.title for s in subjects], [s.entry for s in subjects]
        words.append(f"prompt “{short(' '.join(source.prompt(link).split()), PROMPT)}”")
    elif link.on("compare") and link.page != "start":
        try:
            subjects = source.subjects(link)
            words, entries = [s.title for s in subjects], [s.entry for s in subjects]
        except BadData:  # runs without checkpoints have no step
            named = {tag: source.catalogue().entry(name) for tag in "AB" if (name := link.text(tag.lower()))}
            words, entries = [f"{tag}: {run_name(e)}" for tag, e in named.items()], list(named.values())
    if not entries and link.text("set") is None:
        return ""
    entries = entries or source.group(link)[:1]
    for entry in {e.group: e for e in entries}.values():
        rate = "" if entry.imported or entry.numbers_only else f", rate {Run.open(entry.path).train.lr:g}"
        words.append(f"{entry.title}{rate}")
    return "; ".join(words)


def fits(figure: go.Figure, mm: int) -> bool:
    """Return True if the panels of a figure fit into a width on paper; the widest takes all figures."""
    return mm >= PAGE or (figure.layout.meta or {}).get("least", 0) <= mm * plots.PX_PER_MM


def picture(
    drawn: go.Figure, out: Path, *, background: str = "white", caption: str = "", mm: int | None = None
) -> Path:
    """Write a figure as .svg or .png in the light theme on `background` (CSS), without words of `caption` that it has.

    `mm`: width on paper, with texts of 7 pt; raises `WorkbenchError` if the figure needs more. None: `WIDTH` pixels.
    """
    said, face, width = plots.alt_text(drawn), font_face(), WIDTH if mm is None else round(mm * plots.PX_PER_MM)
    if mm is not None and not fits(drawn, mm):
        raise WorkbenchError(f"the panels of this figure do not fit into {mm} mm; choose {PAGE} mm")
    words = []
    for part in caption.split("; "):
        title, _, rate = part.partition(", rate ")
        words.append(part if title not in said else f"rate {rate}" if rate else "")
    caption = "; ".join(filter(None, words))
    figure = plots.paper(drawn, background, caption, letters=width // 8 if mm is None else min(120, int(width / 5.6)))
    if mm is not None:
        figure = plots.printed(figure, width)
    if face:
        figure.update_layout(font_family=f"'{FONT}', sans-serif")
    figure = plots.fitted_maps(figure, width)
    height = int(figure.layout.height or 500)
    return save_figure(plots.paper_page(figure), out, width=width, height=height, face=face, mm=mm)


def _picture(made: dict[str, Drawing], out: Path, _: str, __: str, caption: str) -> None:
    if len(made) > 1:
        raise WorkbenchError(
            f"{out.name} holds one figure and this page has {len(made)}: choose with --only {' | '.join(made)}"
        )
    picture(next(iter(made.values())).figure, out, caption=caption, mm=PAGE)


def _text(made: dict[str, Drawing], out: Path, *_: str) -> None:
    write_table_as(plots.table(_table(made)), out)


def _columns(made: dict[str, Drawing], out: Path, *_: str) -> None:
    write_table_as(_table(made), out)


WRITERS: dict[str, Callable[..., None]] = {
    ".html": _html, ".svg": _picture, ".png": _picture, ".csv": _text, ".json": _text,
    ".tex": _text, ".md": _text, ".parquet": _columns, ".arrow": _columns,
}  # fmt: skip
