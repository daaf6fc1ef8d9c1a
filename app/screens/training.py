"""Training: losses, gradients, coefficients and pace, as training wrote them down; live while they are written."""

from __future__ import annotations

import streamlit as st

from workbench.places import module
from workbench.views import Link, training

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import widgets
from ..cached_source import cached_source
from ..page_frame import page, toolbar
from ..run_table import choose_models
from .training_parts import PARTS

ABOUT = (
    "How each model got better, step by step. Everything here was written down while training ran: by `workbench train`, or by a "
    "`Recorder` in a loop of your own. Lines are means over seeds; a band around a line spans the seeds. "
    "Whether models differ is told by differences within seeds, on the Start page's verdicts, not by bands that overlap or do not."
)
LIVE = 3  # seconds between looks at runs that are being written


def _until_a_run() -> None:
    if cached_source().own():
        st.rerun()


def _body(link: Link) -> None:
    source = cached_source()
    with toolbar("controls"):
        if not link.on("compare"):
            link = choose_models(link)
        parts = training.present(training.quantities(source, link))
        if parts:
            shown = widgets.segments("Part", "show", parts, show=lambda name: PARTS[name][0])
            link = PARTS[shown][1](link.but(show=shown))
    live = any(e.being_written for e in training.runs(source, link))
    if parts:
        st.fragment(_figures, run_every=LIVE if live else None)(link, shown, live)
    elif all(e.imported for e in training.runs(source, link)):
        st.info("Imported checkpoints bring no log of their training. Depth and the pages after it look at the models.")
    else:
        st.info("These runs have written nothing yet. The first numbers appear a few seconds after training starts.")
        st.fragment(_until_something, run_every=LIVE if live else None)(link)


def _until_something(link: Link) -> None:
    if training.quantities(cached_source(), link):
        st.rerun()


def _figures(link: Link, shown: str, was_live: bool) -> None:
    """The figures of a part; drawn anew every few seconds while runs are written, from what is new."""
    source = cached_source()
    writing = [e for e in training.runs(source, link) if e.being_written] if was_live else []
    if was_live:
        st.session_state["drawn"] = []
        if not writing:
            st.rerun()
        names = ", ".join(widgets.escaped(e.name) for e in writing[:4]) + (" and others" if len(writing) > 4 else "")
        st.caption(f":material/fiber_manual_record: Being written now: {names}. Drawn anew every {LIVE} seconds.")
    PARTS[shown][2](link, training.quantities(source, link))


if __name__ == "__main__":
    page("training", ABOUT, _body)
    if not cached_source().own():
        st.fragment(_until_a_run, run_every=LIVE)()
