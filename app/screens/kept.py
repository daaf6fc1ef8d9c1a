"""Kept: the views that were pinned, redrawn, with their notes; as one offline page, a notebook or a list to take along."""

from __future__ import annotations

from typing import Any

import streamlit as st

from workbench.errors import WorkbenchError
from workbench.places import module
from workbench.views import Drawing, Link, pins

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import background, widgets
from ..cached_source import cached_source
from ..figures import chart
from ..page_frame import toolbar

ABOUT = "Views with their notes, in a file beside the runs; each is redrawn from the runs as they are now."
NONE = "Nothing is kept yet. The menu in the corner of any figure keeps it, with a note."


def main() -> None:
    """All pins of the folder, the newest first."""
    source = cached_source()
    with toolbar("header"):
        st.title("Kept", width="content", anchor=False)
        with st.popover("About", icon=":material/help:", type="tertiary"):
            st.markdown(ABOUT)
        kept = _read()
        if kept:
            _take_along(kept)
    if not kept:
        st.info(NONE)
    for pin in reversed(kept):
        with st.container(border=True):
            _pin(pin)
    for run, why in source.problems.items():
        st.warning(f"{widgets.escaped(run)} is left out: {widgets.escaped(why)}")


def _read() -> list[pins.Pin]:
    try:
        return pins.pins(cached_source().folder)
    except WorkbenchError as error:
        st.warning(widgets.escaped(error))
        return []


def _take_along(kept: list[pins.Pin]) -> None:
    folder = cached_source().folder
    st.download_button(
        "Page (HTML)", lambda: pins.html(cached_source(), kept), "kept.html", "text/html", on_click="ignore"
    )
    st.download_button("Notebook", pins.notebook(folder, kept), "kept.ipynb", "application/json", on_click="ignore")
    st.download_button("Notes (Markdown)", pins.markdown(kept), "kept.md", "text/markdown", on_click="ignore")


def _pin(pin: pins.Pin) -> None:
    key = f"{pin.view}_{abs(hash(pin))}"
    with st.container(horizontal=True, vertical_alignment="center"):
        name = widgets.escaped(pin.view.replace("_", " "))
        st.markdown(f"**{widgets.escaped(pin.note)}**" if pin.note else name, width="stretch")
        st.caption(widgets.escaped(pin.kept[:16].replace("T", " ")), width="content")
        try:
            link = Link.parse(pin.link)
        except WorkbenchError as error:
            st.caption(widgets.escaped(error))
        else:
            target = f"screens/{link.page}.py"
            st.page_link(target, label="Open", icon=":material/open_in_new:", query_params=dict(link.options))
        st.button("Let go", key=f"let_go_{key}", on_click=_let_go, args=(pin,), type="tertiary")

    def work(progress: background.Progress) -> Any:
        source = cached_source()
        source.progress = progress
        return pin.draw(source)

    try:
        drawing: Drawing = background.run(("pin", pin, cached_source().catalogue().stamp), f"Drawing {name}", work)
    except WorkbenchError as error:
        st.info(f"It cannot be drawn any more: {widgets.escaped(error)}")
        return
    except background.Running:
        return
    chart(drawing, f"pin_{key}")
    if drawing.sentence:
        st.markdown(widgets.escaped(drawing.sentence))


def _let_go(pin: pins.Pin) -> None:
    try:
        pins.let_go(cached_source().folder, pin)
    except WorkbenchError as error:
        st.toast(widgets.escaped(error))


if __name__ == "__main__":
    main()
