"""Parts of the Intervene page, what changes, where it matters and patching: of each what is chosen, and what follows."""

from __future__ import annotations

import streamlit as st

from workbench.views import Link, intervene

from .. import widgets
from ..cached_source import cached_source
from ..figures import show
from ..page_frame import figures_side_by_side
from .edit_builder import edit_builder, kinds_of, unmade
from .intervene_patching import answer, pair, patching, second_text

EFFECT_PX, BOTH_PX = 340, 640  # pixels of a figure of one model, of two, beside the column of what is changed
GRAMMAR = (
    "For instance values:layer=2..3,how=zero or coefficient:layer=1,value=0;sink:layer=2,head=0/1. "
    "Layers and heads count from 0; none means all."
)


def _edits(link: Link) -> Link:
    edit_builder(link)
    edits = widgets.text_line("The changes, as text; several are joined by ;", "edits", "", help=GRAMMAR)
    return second_text(link.but(edits=edits), intervene.takes_from_second(edits))


def _effect(link: Link) -> None:
    chosen = unmade()
    with st.container(key="stale" if chosen else None):
        if chosen:
            st.warning(
                f"Drawn before **{widgets.escaped(chosen)}** was chosen: Try makes just this change, Add makes it too.",
                icon=":material/history:",
            )
        with figures_side_by_side(BOTH_PX if link.on("compare") else EFFECT_PX):
            with st.container():
                drawn = show(intervene.effect, link)
            if drawn is not None:  # else why is told once
                with st.container():
                    show(intervene.next_token, link)


def _places(link: Link) -> Link:
    kinds = kinds_of(cached_source().subjects(link)[0].entry, intervene.sweeps())
    kind = widgets.choose(
        "Change, made in one place at a time", "sweep", kinds, intervene.KIND, show=intervene.sweeps().__getitem__
    )
    choices = list(intervene.OVER) if intervene.has_heads(kind) else [intervene.OVER[0]]
    over = widgets.choose("In turn", "over", choices, show=lambda o: o.replace("x", "and"))
    of = widgets.choose("Effect on", "of", list(intervene.OF), show=_of_words)
    link = second_text(link.but(sweep=kind, over=over, of=of), intervene.takes_from_second(kind))
    return answer(link, "Token", "target") if of != "loss" else link


def _sweep(link: Link) -> None:
    show(intervene.sweep, link, long="Changing one place at a time")


def _of_words(of: str) -> str:
    return {"loss": "loss of the text", "logit": "logit of a token", "probability": "probability of a token"}[of]


PARTS = {
    "effect": ("What changes", _edits, _effect), "sweep": ("Where it matters", _places, _sweep),
    "patching": ("Patching", pair, patching),
}  # fmt: skip
"""Of each part: its name, what draws what is changed and adds it to the link, and what draws what follows."""
