"""Start: what was found, one model at a glance, what is in the folder, what its runs decide, and the demo's story."""

from __future__ import annotations

import streamlit as st

from workbench.errors import WorkbenchError
from workbench.places import module
from workbench.views import Link, start

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import widgets
from ..cached_source import cached_source, root
from ..page_frame import page
from ..selection import choose
from .start_demo import story
from .start_finding import finding
from .start_here import here
from .start_verdicts import verdicts
from .start_xray import glance

ABOUT = (
    "How transformers use **values** (what attention carries from word to word) and what a shortcut for them changes. Every page "
    "shows the model that is chosen at its top, or two side by side."
)
LIVE = 2  # seconds between looks at a demo that runs


def _first_run() -> None:
    """Look again until there is a run, where a demo is on its way."""
    found = start.demo.status(root())
    if cached_source().own():
        st.rerun()
    if found and found.running:
        st.caption("The demo has begun; its first model appears here within a minute.")


def _body(link: Link) -> None:
    parts, first = _parts()
    shown = widgets.segments("Part", "show", parts, first, show=start.parts.PARTS.__getitem__)
    {"finding": finding, "model": glance, "here": here, "verdicts": verdicts, "demo": story}[shown](
        link.but(show=shown)
    )


def _choose_for_part(name: str) -> Link | None:
    """The choices that the shown part uses: models for a model at a glance, the experiment for what is found, or judged of it alone."""
    if not cached_source().catalogue().entries:
        return None
    parts, first = _parts()
    asked = st.query_params.get("show")
    shown = asked if asked in parts else first
    if shown in ("here", "demo") or (shown == "verdicts" and st.query_params.get("alone") != "1"):
        return widgets.current_link(name)
    # what is judged is what the headline is about, unless a model is named
    headline = shown == "finding" or (shown == "verdicts" and "a" not in st.query_params)
    found = _finding() if headline else None
    return choose(name, models=shown == "model", experiment=found.group if found else None)


def _parts() -> tuple[list[str], str]:
    """The parts that have something to show, and which is shown first: where there is no finding, a model or the folder."""
    source = cached_source()
    found = start.demo.status(source.folder)
    parts = [p for p in start.parts.PARTS if p != "demo" or found or start.demo.resters(source)]
    if (found and found.running) or start.demo.only_demo(source):
        return parts, "demo"
    if _finding():
        return parts, "finding"
    return parts, "model" if any(e.steps for e in source.catalogue().entries) else "here"


def _finding() -> start.finding.Finding | None:
    """What the chosen experiment says, or the one that the rule gives where none is chosen."""
    try:
        return start.finding.finding(cached_source(), widgets.current_link("start"))
    except WorkbenchError:
        return None


if __name__ == "__main__":
    page("start", ABOUT, _body, _choose_for_part)
    if not cached_source().own():
        st.fragment(_first_run, run_every=LIVE)()
