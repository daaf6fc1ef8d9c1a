"""Intervene: set a coefficient, drop, swap or average values, cut sinks, remove a sublayer, patch between two prompts."""

from __future__ import annotations

import streamlit as st

from workbench.places import module
from workbench.views import Link

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import widgets
from ..page_frame import page
from ..prompt_box import prompt_box
from .intervene_parts import PARTS

ABOUT = (
    "Change something inside the model while it reads one text, and see what follows: which tokens it now predicts worse, what it "
    "says next, and in which layers and heads it matters. Nothing is trained and nothing is kept: the model is as before."
)


def _body(link: Link) -> None:
    """What is changed on the left, what follows on the right."""
    shown = widgets.segments("Part", "show", list(PARTS), show=lambda name: PARTS[name][0])
    _, change, follows = PARTS[shown]
    left, right = st.columns([2, 5], gap="medium")
    with left:
        link = change(prompt_box(link).but(show=shown))
    with right:
        follows(link)


if __name__ == "__main__":
    page("intervene", ABOUT, _body)
