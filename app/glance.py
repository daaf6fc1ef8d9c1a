"""One model at a glance on the Start page: four questions, each with its sentence and its picture."""

from __future__ import annotations

import streamlit as st

from app import jobs, url
from app.shell import show
from app.source import source
from workbench.errors import WorkbenchError
from workbench.views import Link, Subject, start
from workbench.xrays import QUESTIONS


def glance(link: Link) -> None:
    """The X-ray of model A, or of A beside B; what is not measured yet can be measured here."""
    ask = source()
    subjects = ask.subjects(link)
    titles = " and ".join(f"**{url.plain(s.title)}**" for s in subjects)
    st.markdown(
        f"An X-ray of {titles}: four questions. Each answer has its number, what the number would be without learning or "
        "structure, and its standard error over documents (±)."
    )
    ready = [_ready(subject) for subject in subjects]
    if not all(ready):
        return
    if len(subjects) > 1:
        for name, question in QUESTIONS.items():
            with st.container(border=True):
                st.subheader(question)
                show(start.XRAY[name], link)
    else:
        names = list(QUESTIONS)
        for row in (names[:2], names[2:]):
            for column, name in zip(st.columns(2, border=True), row, strict=True):
                with column:
                    st.subheader(QUESTIONS[name])
                    show(start.XRAY[name], link)


def _ready(subject: Subject) -> bool:
    """Whether everything an X-ray needs is stored; else a button that measures it, and the command."""
    absent = start.missing(source(), subject)
    if not absent:
        return True
    entry, place = subject.entry, (subject.entry.path, subject.step)
    told = ", ".join(name.replace("_", " ") for name in absent)
    st.info(f"{url.plain(subject.name)} is not measured yet: {told}.", icon=":material/radiology:")
    if entry.imported:
        st.caption("Nothing says what an imported model was trained on, so it is measured on a text of yours:")
        st.code(start.command(entry, subject.step), language=None, wrap_lines=True)
        return False
    asked = st.session_state.setdefault("measuring", {})
    if st.button("Measure it here", key=f"measure_{subject.tag}", icon=":material/play_arrow:", type="primary"):
        asked[place] = entry.stamp
    st.caption("Or from a terminal; either way the numbers are stored beside the run and not measured again.")
    st.code(start.command(entry, subject.step), language=None, wrap_lines=True)
    if place not in asked:
        return False
    try:  # people who asked before anything changed wait for one job
        job = ("xray", *place, asked[place])
        jobs.run(job, f"Measuring {entry.name}", lambda progress: start.measure(entry, subject.step, progress))
    except jobs.Running:
        return False
    except WorkbenchError as error:
        st.warning(url.plain(error))
        del asked[place]
        return False
    del asked[place]
    st.rerun()
    return True
