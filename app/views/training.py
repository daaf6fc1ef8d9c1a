"""Training: losses, gradients, coefficients and pace, as training wrote them down; live while somebody writes."""

from __future__ import annotations

import streamlit as st

from app import url
from app.selection import choose_models
from app.shell import page
from app.source import source
from app.training import NAMES, PARTS
from workbench.views import Link, training

ABOUT = (
    "How each model got better, step by step. Everything here was written down while training ran: by `workbench train`, or by a "
    "`Recorder` in a loop of your own. Lines are means over seeds; a band around a line spans the seeds, and lines whose bands "
    "overlap are not told apart."
)
LIVE = 3  # seconds between looks at runs that are being written


def draw() -> None:
    page("training", "Training", ABOUT, _body)
    if not source().catalogue().entries:
        st.fragment(_until_a_run, run_every=LIVE)()


def _until_a_run() -> None:
    """Look again until somebody begins a training or a recording here."""
    if source().catalogue().entries:
        st.rerun()


def _body(link: Link) -> None:
    ask = source()
    if not link.on("compare"):
        link = choose_models(link)
    parts = training.present(training.quantities(ask, link))
    live = any(e.being_written for e in training.runs(ask, link))
    if not parts:
        if all(e.imported for e in training.runs(ask, link)):
            st.info(
                "Imported checkpoints bring no log of their training. Depth and the pages after it look at the models."
            )
            return
        st.info("These runs have written nothing yet. The first numbers appear a few seconds after training starts.")
        st.fragment(_until_something, run_every=LIVE if live else None)(link)
        return
    shown = url.segments("Part", "show", parts, show=NAMES.__getitem__)
    link = PARTS[shown][0](link.but(show=shown))
    st.fragment(_figures, run_every=LIVE if live else None)(link, shown, live)


def _until_something(link: Link) -> None:
    if training.quantities(source(), link):
        st.rerun()


def _figures(link: Link, shown: str, was_live: bool) -> None:
    """The figures of a part; drawn anew every few seconds while somebody writes, from what is new."""
    ask = source()
    writing = [e for e in training.runs(ask, link) if e.being_written] if was_live else []
    if was_live:
        st.session_state["drawn"] = []
        if not writing:
            st.rerun()
        names = ", ".join(url.plain(e.name) for e in writing[:4]) + (" and others" if len(writing) > 4 else "")
        st.caption(f":material/fiber_manual_record: Being written now: {names}. Drawn anew every {LIVE} seconds.")
    PARTS[shown][1](link, training.quantities(ask, link))


if __name__ == "__main__":
    draw()
