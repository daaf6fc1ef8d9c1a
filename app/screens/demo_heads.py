"""The heads of the demo's story on the Start page, step by step: those that rest and those that copy."""

from __future__ import annotations

import streamlit as st

from workbench.views import Link, start

from .. import widgets
from ..cached_source import cached_source
from ..figures import show


def resting_heads(link: Link) -> None:
    """The head that gives the start token most, in each architecture."""
    source = cached_source()
    if not start.demo.resters(source):
        return
    _, common, step = start.demo.resting(source, Link("start"))
    st.subheader("Watch the resting head appear", anchor=False)
    st.markdown(
        "Each row is a token that attends, each column an earlier one it attends to. Drag the step: a bright first column is a head "
        "that rests on the start token; where it leaves that column, it copies."
    )
    link = link.but(when=widgets.choose("Training step of the resting heads", "when", common, step, slider=True))
    show(start.demo.resting_heads, link, long="Looking at the heads")


def copying_heads(link: Link) -> None:
    """The copying head in two architectures."""
    source = cached_source()
    names = [e.name for e in start.demo.racers(source)]
    if not names:
        return
    entries, _, _ = start.demo.pair(source, Link("start"))
    st.subheader("Watch the copying head appear", anchor=False)
    st.markdown(
        "Drag the step: the bright diagonal that appears in the lower half is a head that looks back to the symbol that followed last time."
    )
    left, right = st.columns(2)
    with left:
        link = link.but(left=widgets.choose("Left model", "left", names, entries[0].name))
    with right:
        link = link.but(right=widgets.choose("Right model", "right", names, entries[1].name))
    _, common, step = start.demo.pair(source, link.but(at=None))
    link = link.but(at=widgets.choose("Training step", "at", common, step, slider=True))
    show(start.demo.copying_heads, link, long="Looking at two heads")
