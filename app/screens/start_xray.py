"""One model at a glance on the Start page: four questions, each with its sentence and its picture."""

from __future__ import annotations

import streamlit as st

from workbench.errors import WorkbenchError
from workbench.views import Link, Subject, start

from .. import background, widgets
from ..cached_source import cached_source
from ..figures import show
from ..page_frame import FIGURE_PX, figures_side_by_side

WHOLE_PX = 900  # a figure of two models
READ = "Each answer has its number, what the number would be without learning or structure, and its standard error over documents (±)."


def glance(link: Link) -> None:
    """The X-ray of model A, or of A beside B; what is not measured yet can be measured here."""
    source = cached_source()
    subjects = source.subjects(link)
    ready = [_ready(subject) for subject in subjects]
    if not all(ready):
        return
    with figures_side_by_side(WHOLE_PX if len(subjects) > 1 else FIGURE_PX):
        for answer in start.xray.ANSWERS.values():
            with st.container(border=True):
                show(answer, link, about=READ)


def _ready(subject: Subject) -> bool:
    """Whether everything an X-ray needs is stored; else a button that measures it, and the command."""
    absent = start.xray.missing(cached_source(), subject)
    if not absent:
        return True
    entry, place = subject.entry, (subject.entry.path, subject.step)
    names = ", ".join(name.replace("_", " ") for name in absent)
    st.info(f"{widgets.escaped(subject.name)} is not measured yet: {names}.", icon=":material/radiology:")
    if entry.imported or entry.shipped:
        st.caption(
            "Nothing says what an imported model was trained on, so it is measured on a text of yours:"
            if entry.imported
            else "Nothing is written to what ships with the project; a terminal measures it:"
        )
        st.code(start.xray.command(entry, subject.step), language=None, wrap_lines=True)
        return False
    asked = st.session_state.setdefault("measuring", {})
    if st.button("Measure it here", key=f"measure_{subject.tag}", icon=":material/play_arrow:"):
        asked[place] = entry.stamp
    st.caption("Or from a terminal; either way the numbers are stored beside the run and not measured again.")
    st.code(start.xray.command(entry, subject.step), language=None, wrap_lines=True)
    if place not in asked:
        return False
    try:  # people who asked before anything changed wait for one job
        job = ("xray", *place, asked[place])
        background.run(
            job, f"Measuring {entry.name}", lambda progress: start.xray.measure(entry, subject.step, progress)
        )
    except background.Running:
        return False
    except WorkbenchError as error:
        st.warning(widgets.escaped(error))
        del asked[place]
        return False
    del asked[place]
    st.rerun()
    return True
