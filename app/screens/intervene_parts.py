"""Parts of the Intervene page, what changes, where it matters and patching: of each what is chosen, and what follows."""

from __future__ import annotations

import streamlit as st

from workbench import prompts
from workbench.data.examples import examples
from workbench.views import Link, intervene, patches

from .. import widgets
from ..cached_source import cached_source
from ..elements import token_strip
from ..elements.figure import Point
from ..figures import ready, show
from ..page_frame import figures_side_by_side, toolbar
from ..prompt_box import take
from .edit_builder import edit_builder, kinds_of, unmade

EFFECT_PX, BOTH_PX = 340, 640  # pixels of a figure of one model, of two, beside the column of what is changed
AT = "Patched at"
PATCHING = (
    "One activation at a time is taken from the run on the first text and put into the run on the second. Where the first text's "
    "answer comes back, that activation carries what tells the two texts apart."
)
GRAMMAR = (
    "For instance values:layer=2..3,how=zero or coefficient:layer=1,value=0;sink:layer=2,head=0/1. "
    "Layers and heads count from 0; none means all."
)


def _edits(link: Link) -> Link:
    edit_builder(link)
    edits = widgets.text_line("The changes, as text; several are joined by ;", "edits", "", help=GRAMMAR)
    return _second(link.but(edits=edits), intervene.takes_from_second(edits))


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
    link = _second(link.but(sweep=kind, over=over, of=of), intervene.takes_from_second(kind))
    return _token(link, "Token", "target") if of != "loss" else link


def _sweep(link: Link) -> None:
    show(intervene.sweep, link, long="Changing one place at a time")


def _second(link: Link, asked: bool = True) -> Link:
    """The second text, where something is taken from one."""
    if not asked:
        return link.but(other=None)
    text = widgets.text_line(
        "Second text, for what is taken from another prompt", "other", rows=2,
        help="As many tokens as the first: what is at one place there is put in the same place here.", placeholder="of equal length",
        clears=("against", "position"),
    )  # fmt: skip
    return link.but(other=text or None)


def _pair(link: Link) -> Link:
    """Two texts of as many tokens, what is patched, and the two answers that are compared; without these where they do not fit."""
    link = _second(link)
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
    link = _token(link.but(site=site), "Answer of the first text", "target")
    return _token(link, "Answer of the second text", "against", of_second=True)


def _patching(link: Link) -> None:
    if not link.text("other"):
        st.info(f"Give a second text, with as many tokens as the first and another answer, or take two. {PATCHING}")
        for pair in (e for e in examples() if e.other):
            st.button(f"Take “{pair.phenomenon}”", on_click=take, args=(pair,), icon=":material/lightbulb:")
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


def _token(link: Link, label: str, key: str, of_second: bool = False) -> Link:
    source = cached_source()
    text = link.text("other") if of_second else source.prompt(link)
    top = source.query(prompts.next_tokens, source.subjects(link)[0], text, top=50).top
    if of_second:  # two answers are compared, often one token is the likeliest of both
        top = top[top["id"] != link.whole("target")]
    names = {int(i): f"{t}  ({p:.1%})" for i, t, p in zip(top["id"], top["token"], top["probability"], strict=True)}
    return link.but(**{key: widgets.choose(label, key, list(names), show=names.__getitem__)})


def _of_words(of: str) -> str:
    return {"loss": "loss of the text", "logit": "logit of a token", "probability": "probability of a token"}[of]


PARTS = {
    "effect": ("What changes", _edits, _effect), "sweep": ("Where it matters", _places, _sweep),
    "patching": ("Patching", _pair, _patching),
}  # fmt: skip
"""Of each part: its name, what draws what is changed and adds it to the link, and what draws what follows."""
