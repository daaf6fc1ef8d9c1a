"""Intervene: set a coefficient, drop, swap or average values, cut sinks, remove a sublayer, patch between two prompts."""

from __future__ import annotations

import streamlit as st

from workbench.places import module
from workbench.views import Link, intervene

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import widgets
from ..page_frame import page
from ..prompt_box import prompt_box
from .edit_builder import edit_builder
from .intervene_parts import PARTS

ABOUT = (
    "Change something inside the model while it reads one text, and see what follows: which tokens it now predicts worse, what it "
    "says next, and in which layers and heads it matters. Nothing is trained and nothing is kept: the model is as before."
)
GRAMMAR = (
    "For instance values:layer=2..3,how=zero or coefficient:layer=1,value=0;sink:layer=2,head=0/1. "
    "Layers and heads count from 0; none means all."
)


def _body(link: Link) -> None:
    shown = widgets.segments("Part", "show", list(PARTS), show=lambda name: PARTS[name][0])
    left, right = st.columns([2, 5], gap="medium")
    with left:
        link = _changes(prompt_box(link).but(show=shown), shown)
    with right:
        PARTS[shown][1](link)


def _changes(link: Link, shown: str) -> Link:
    """What the shown part changes, as far as it is not one place at a time, and the second text where it takes something from one."""
    edits = ""
    if shown == "effect":
        edit_builder(link)
        edits = widgets.text_line("The changes, as text; several are joined by ;", "edits", "", help=GRAMMAR)
    made = {"effect": edits, "sweep": st.query_params.get("sweep", "")}
    other = None
    if shown == "patching" or intervene.takes_from_second(made[shown]):
        other = widgets.text_line(
            "Second text, for what is taken from another prompt", "other", rows=2,
            help="As many tokens as the first: what is at one place there is put in the same place here.", placeholder="of equal length",
            clears=("against", "position"),
        )  # fmt: skip
    return link.but(edits=edits, other=other or None)


if __name__ == "__main__":
    page("intervene", ABOUT, _body)
