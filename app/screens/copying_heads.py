"""The copying heads of the demo's story on the Start page."""

from __future__ import annotations

import streamlit as st

from app import widgets
from app.cached_source import cached_source
from app.figures import show
from workbench.views import Link, start


def copying_heads(link: Link) -> None:
    """The copying head in two architectures, step by step."""
    source = cached_source()
    names = [e.name for e in start.demo.racers(source)]
    if not names:
        return
    entries, _, _ = start.demo.pair(source, Link("start"))
    st.subheader("Watch the copying head appear")
    st.markdown(
        "Each row is a token that attends, each column an earlier one it attends to. Drag the step: the bright diagonal that "
        "appears in the lower half is a head that looks back to the symbol that followed last time."
    )
    left, right = st.columns(2)
    with left:
        link = link.but(left=widgets.choose("Left model", "left", names, entries[0].name))
    with right:
        link = link.but(right=widgets.choose("Right model", "right", names, entries[1].name))
    _, common, step = start.demo.pair(source, link.but(at=None))
    link = link.but(at=widgets.choose("Training step", "at", common, step, slider=True))
    show(start.demo.copying_heads, link, long="Looking at two heads")
