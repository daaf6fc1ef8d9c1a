"""Pinned views with their notes, redrawn; as one offline page, a notebook or a list of notes."""

from __future__ import annotations

import streamlit as st

from workbench.errors import WorkbenchError
from workbench.places import module
from workbench.views import Drawing, Link, pins

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import background_tasks
from .. import url_widgets as widgets
from ..cached_source import cached_source
from ..figure_menu import chart
from ..model_selection import choose_link
from ..page_layout import controls, title_row, toolbar

ABOUT = "Kept views with their notes, in a file beside the runs. Each is redrawn from the runs as they are now."
NONE = "No kept views. The menu of any figure keeps it, with a note."


def main() -> None:
    """All pinned views of the folder, the newest first."""
    source = cached_source()
    kept: list[pins.Pin] = []
    widgets.navigation(Link("kept", {"set": group} if (group := st.query_params.get("set")) else {}))
    with toolbar("header"):
        choose_link("kept", uses="nothing")
    title_row("Kept", ABOUT)
    with controls():
        try:
            kept = pins.pins(source.folder)
        except WorkbenchError as error:
            st.warning(widgets.escaped(error))
        if kept:
            files = (
                ("Page (HTML)", lambda: pins.as_html(cached_source(), kept), "kept.html", "text/html"),
                ("Notebook", pins.notebook(source.folder, kept), "kept.ipynb", "application/json"),
                ("Notes (Markdown)", pins.markdown(source.folder, kept), "kept.md", "text/markdown"),
            )
            for label, data, name, kind in files:
                st.download_button(label, data, name, kind, on_click="ignore")
    if not kept:
        st.info(NONE)
    if every := sorted(set().union(*map(pins.tags_of, kept))):
        wanted = set(st.pills("Tags", every, selection_mode="multi", key="w_tags") or ())
        kept = [pin for pin in kept if wanted <= pins.tags_of(pin)]
    for pin in reversed(kept):
        with st.container(border=True):
            _pin(pin)
    for run, why in source.problems.items():
        st.warning(f"{widgets.escaped(run)} is left out: {widgets.escaped(why)}")


def _pin(pin: pins.Pin) -> None:
    key, name = f"{pin.view}_{abs(hash(pin))}", widgets.escaped(widgets.spaced(pin.view))
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown(f"**{widgets.escaped(pin.note)}**" if pin.note else name, width="stretch")
        st.caption(widgets.escaped(pin.kept[:16].replace("T", " ")), width="content")
        try:
            link = Link.parse(pin.link)
        except WorkbenchError as error:
            st.caption(widgets.escaped(error))
        else:
            target = f"screens/{link.page}.py"
            st.page_link(target, label="Open", icon=":material/open_in_new:", query_params=dict(link.options))
        if st.button("Remove", key=f"let_go_{key}", type="tertiary"):
            try:
                pins.remove(cached_source().folder, pin)
            except WorkbenchError as error:
                st.toast(widgets.escaped(error))
            else:
                st.rerun()

    def work(progress: background_tasks.Progress) -> Drawing:
        source = cached_source()
        source.progress = progress
        return pin.draw(source)

    try:
        drawing = background_tasks.run(("pin", pin, cached_source().catalogue().stamp), f"Drawing {name}", work)
    except WorkbenchError as error:
        st.info(f"This view can no longer be drawn: {widgets.escaped(error)}")
        return
    except background_tasks.Running:
        return
    chart(drawing, f"pin_{key}")
    if drawing.sentence:
        st.markdown(widgets.typeset(drawing.sentence))


if __name__ == "__main__":
    main()
