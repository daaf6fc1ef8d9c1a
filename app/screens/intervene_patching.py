"""Patching on the Intervene page: two texts and what is taken from one into the other, and what it brings back."""

from __future__ import annotations

import streamlit as st

from workbench import prompts
from workbench.data.examples import examples
from workbench.views import Link, patches

from .. import widgets
from ..cached_source import cached_source
from ..elements import token_strip
from ..elements.figure import Point
from ..figures import ready, show
from ..page_frame import toolbar
from ..prompt_box import take

AT = "Patched at"
PATCHING = (
    "One activation at a time is taken from the run on the first text and put into the run on the second. Where the first text's "
    "answer comes back, that activation carries what tells the two texts apart."
)


def second_text(link: Link, asked: bool = True) -> Link:
    """The second text, where something is taken from one."""
    if not asked:
        return link.but(other=None)
    text = widgets.text_line(
        "Second text, for what is taken from another prompt", "other", rows=2,
        help="As many tokens as the first: what is at one place there is put in the same place here.", placeholder="of equal length",
        clears=("against", "position"),
    )  # fmt: skip
    return link.but(other=text or None)


def pair(link: Link) -> Link:
    """Two texts of as many tokens, what is patched, and the two answers that are compared; without these where they do not fit."""
    link = second_text(link)
    if not link.text("other"):
        return link
    source = cached_source()
    subject = source.subjects(link)[0]
    first, second = (len(source.tokens(subject, text)) for text in (source.prompt(link), link.text("other")))
    st.caption(f"{first} tokens in the first text, {second} in the second.")
    if first != second:
        st.warning("Patching needs as many tokens in both: cut or lengthen one of them.")
        return link.but(against=None)
    site = widgets.choose("What is patched", "site", list(patches.PATCHED), show=lambda s: s.replace("_", " "))
    link = answer(link.but(site=site), "Answer of the first text", "target")
    return answer(link, "Answer of the second text", "against", of_second=True)


def patching(link: Link) -> None:
    """What every activation brings back, and what comes next once the chosen one is put in."""
    if not link.text("other"):
        st.info(f"Give a second text, with as many tokens as the first and another answer, or take two. {PATCHING}")
        for two in (e for e in examples() if e.other):
            st.button(f"Take “{two.phenomenon}”", on_click=take, args=(two,), icon=":material/lightbulb:")
        return
    if link.text("against") is None:
        return  # why is told beside the texts
    link = _cell(link.but(layer=None, position=None))
    show(patches.patching, link, about=PATCHING, take=_take_cell)
    show(patches.patched, link, about=PATCHING)


def _cell(bare: Link) -> Link:
    """The one activation whose patch is drawn beside the map: the address's, as far as it is there, else the strongest."""
    ready(bare, "Patching one activation at a time", patches.cell)
    source = cached_source()
    best, tokens = patches.cell(source, bare), source.tokens(source.subjects(bare)[0], bare.text("other"))
    at = token_strip.asked("position", AT, len(tokens), default=best.position)
    with toolbar("cell"):
        layer = widgets.choose("Layer", "layer", list(range(best.layers)), best.layer, elsewhere=("all",), width=80)
        with st.container():
            token_strip.draw(
                tokens, key="position", label=AT, colours=best.restored, unit="brought back at most", chosen=at
            )
    return bare.but(layer=layer, position=at)


def _take_cell(point: Point) -> None:
    """A click on a cell of the map chooses its layer and token."""
    if point.token is not None and str(point.y).isdigit():
        widgets.update_url(layer=point.y, position=point.token)


def answer(link: Link, label: str, key: str, of_second: bool = False) -> Link:
    """The token that is asked about, of those likeliest after a text."""
    source = cached_source()
    text = link.text("other") if of_second else source.prompt(link)
    top = source.query(prompts.next_tokens, source.subjects(link)[0], text, top=50).top
    if of_second:  # two answers are compared, often one token is the likeliest of both
        top = top[top["id"] != link.whole("target")]
    names = {int(i): f"{t}  ({p:.1%})" for i, t, p in zip(top["id"], top["token"], top["probability"], strict=True)}
    return link.but(**{key: widgets.choose(label, key, list(names), show=names.__getitem__)})
