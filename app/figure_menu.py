"""The menu of a figure: its files, its link, its command and notebook cell, what it measures, its numbers, its course over training."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import streamlit as st

from workbench import plots
from workbench.errors import WorkbenchError
from workbench.plots.browser import find_browser
from workbench.views import Drawing, Link, depth, pins
from workbench.views.base import View, timelapse
from workbench.views.writing import picture

from . import background, widgets
from .cached_source import cached_source
from .links import address, command

NO_BROWSER = "Pictures are drawn by a Chrome, Chromium or Edge on the machine that serves this page, and it has none"
TABLE_PX = 300


def menu(
    view: View, link: Link, drawing: Drawing, about: str, key: tuple[object, ...], draw: Callable[..., None]
) -> None:
    """Everything one may want of a figure, behind one button; made only while it is open.

    `about`: how it is read. `key`: names the drawing's state, for work that takes longer. `draw`: puts a figure on the page under a name.
    """
    name = view.__name__
    panel = st.popover("Figure", icon=":material/more_vert:", type="tertiary", on_change="rerun", key=f"open_{name}",
                       help="Files, link, command, definition, numbers, time-lapse")  # fmt: skip
    if panel.open:
        with panel:
            if about:
                st.markdown(about)
            _files(drawing, name)
            _keep(view, link)
            _again(view, link)
            _definition(drawing, name)
            if st.toggle("Play over checkpoints", key=f"play_{name}"):
                _play(view, link, key, draw)
            st.dataframe(
                plots.table(drawing.table), width="stretch", height=TABLE_PX, hide_index=True, key=f"table_{name}",
                alt=f"Table of: {plots.alt_text(drawing.figure)[:300]}",
            )  # fmt: skip


def _files(drawing: Drawing, name: str) -> None:
    """Buttons first: what arrives later, such as the table, would move them from under a visitor's click."""
    drawn_here = find_browser() is not None
    with st.container(horizontal=True, gap="xsmall"):
        for label, ending, kind, background_colour in (
            ("SVG", "svg", "image/svg+xml", "white"), ("PNG", "png", "image/png", "white"),
            ("PNG, transparent", "png", "image/png", "rgba(0,0,0,0)"),
        ):  # fmt: skip
            st.download_button(
                label, functools.partial(_picture, drawing, ending, background_colour), f"{name}.{ending}", kind,
                key=f"{label}_{name}", on_click="ignore", disabled=not drawn_here,
                help=None if drawn_here else NO_BROWSER,
            )  # fmt: skip
        st.download_button(
            "Numbers (CSV)", lambda: plots.table(drawing.table).to_csv(index=False), f"{name}.csv", "text/csv",
            key=f"csv_{name}", on_click="ignore",
        )  # fmt: skip
        st.download_button(
            "Figure (HTML)", lambda: plots.html(drawing.figure, whole=True), f"{name}.html", "text/html",
            key=f"html_{name}", on_click="ignore",
        )  # fmt: skip


def _picture(drawing: Drawing, ending: str, background_colour: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return picture(drawing.figure, Path(folder) / f"figure.{ending}", background=background_colour).read_bytes()


def _keep(view: View, link: Link) -> None:
    """Pin the view with a note; the page of kept views redraws it."""
    name, folder = view.__name__, cached_source().folder
    left, right = st.columns([4, 1], vertical_alignment="bottom")
    note = left.text_input("Note", key=f"note_{name}", max_chars=pins.MAX_NOTE, placeholder="why this is worth keeping")
    if right.button("Keep", icon=":material/push_pin:", key=f"keep_{name}", width="stretch"):
        try:
            pins.keep(folder, link, name, note)
        except WorkbenchError as error:
            st.warning(widgets.escaped(error))
        else:
            st.toast("Kept; see the page Kept.", icon=":material/push_pin:")


def _again(view: View, link: Link) -> None:
    """The same figure elsewhere: as a link, from a terminal, in a notebook."""
    name = view.__name__
    st.caption("Link to this page as it is now")
    st.code(address(link), language=None, wrap_lines=True)
    st.caption("Command; the ending of the file decides: .svg and .png for papers, .parquet, .csv, .html")
    st.code(command(link, f"--only {name} --out {name}.svg"), language=None, wrap_lines=True)
    st.caption("Notebook cell")
    st.code(
        "from pathlib import Path\n\nfrom workbench.views import Link, Source, drawings\n\n"
        f"source, link = Source(Path({str(cached_source().folder)!r})), Link.parse({str(link)!r})\n"
        f"[(_, drawing)] = drawings(source, link, {name!r})\n"
        "drawing.figure  # and drawing.table",
        language="python", wrap_lines=True,
    )  # fmt: skip


def _definition(drawing: Drawing, name: str) -> None:
    """What the figure's measures are; opened on demand, since the registry needs the numerical libraries."""
    measures = list(drawing.table["metric"].dropna().unique()[:4]) if "metric" in drawing.table else []
    if not measures:
        return
    about = st.expander("Definition, baseline, caution", on_change="rerun", key=f"about_{name}")
    if about.open:
        with about:
            for measure in measures:
                st.markdown(f"**{widgets.escaped(measure)}**")
                st.text(depth.about(str(measure)) or "Written down by training; it has no description of its own.")


def _play(view: View, link: Link, key: tuple[object, ...], draw: Callable[..., None]) -> None:
    name = view.__name__
    work = functools.partial(_lapse, view, link)
    try:
        played = background.run(("timelapse", *key), "Drawing every checkpoint", work)
    except WorkbenchError as error:
        st.info(widgets.escaped(error))
        return
    except background.Running:
        return
    draw(played, f"lapse_{name}")
    st.download_button(
        "Time-lapse (HTML)", lambda: plots.html(played.figure, whole=True), f"{name}-steps.html", "text/html",
        key=f"lapse_html_{name}", on_click="ignore",
    )  # fmt: skip
    st.code(command(link, f"--only {name} --play --out {name}.html"), language=None, wrap_lines=True)


def _lapse(view: View, link: Link, progress: background.Progress) -> Drawing:
    return timelapse(view, cached_source(), link, progress)
