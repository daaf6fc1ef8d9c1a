"""Parts of the Intervene page: what changes, where it matters, and patching, each with its controls."""

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
from .edit_builder import kinds_of

EFFECT_PX, MAP_PX = 340, 400  # beside the column of what is changed
AT = "Patched at"
PATCHING = (
    "One activation at a time is taken from the run on the first text and put into the run on the second. Where the first text's "
    "answer comes back, that activation carries what tells the two texts apart."
)


def _effect(link: Link) -> None:
    with figures_side_by_side(EFFECT_PX):
        with st.container():
            drawn = show(intervene.effect, link)
        if drawn is not None:  # else why is told once
            with st.container():
                show(intervene.next_token, link)


def _sweep(link: Link) -> None:
    with toolbar("controls"):
        kinds = kinds_of(cached_source().subjects(link)[0].entry, intervene.sweeps())
        kind = widgets.choose(
            "Change, made in one place at a time", "sweep", kinds, intervene.KIND, show=intervene.sweeps().__getitem__, width=230
        )  # fmt: skip
        choices = list(intervene.OVER) if intervene.has_heads(kind) else [intervene.OVER[0]]
        over = widgets.choose("In turn", "over", choices, show=lambda o: o.replace("x", "and"), width=120)
        of = widgets.choose("Effect on", "of", list(intervene.OF), show=_of_words, width=150)
        link = link.but(sweep=kind, over=over, of=of)
        if of != "loss":
            link = _token(link, "Token", "target")
    show(intervene.sweep, link, long="Changing one place at a time")


def _patching(link: Link) -> None:
    if not link.text("other"):
        st.info(f"Give a second text, with as many tokens as the first and another answer, or take two. {PATCHING}")
        for pair in (e for e in examples() if e.other):
            st.button(f"Take “{pair.phenomenon}”", on_click=take, args=(pair,), icon=":material/lightbulb:")
        return
    source = cached_source()
    subject = source.subjects(link)[0]
    first, second = (len(source.tokens(subject, text)) for text in (source.prompt(link), link.text("other")))
    st.caption(f"{first} tokens in the first text, {second} in the second.")
    if first != second:
        st.warning("Patching needs as many tokens in both: cut or lengthen one of them.")
        return
    with toolbar("controls"):
        site = widgets.choose(
            "What is patched", "site", list(patches.PATCHED), show=lambda s: s.replace("_", " "), width=130
        )
        link = _token(link.but(site=site), "Answer of the first text", "target")
        link = _token(link, "Answer of the second text", "against", of_second=True)
    link = _cell(link.but(layer=None, position=None))
    with figures_side_by_side(MAP_PX):
        with st.container():
            show(patches.patching, link, about=PATCHING, take=_take_cell)
        with st.container():
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
    return link.but(**{key: widgets.choose(label, key, list(names), show=names.__getitem__, width=170)})


def _of_words(of: str) -> str:
    return {"loss": "loss of the text", "logit": "logit of a token", "probability": "probability of a token"}[of]


PARTS = {
    "effect": ("What changes", _effect), "sweep": ("Where it matters", _sweep), "patching": ("Patching", _patching),
}  # fmt: skip
"""Of each part: its name, and what draws it with its controls."""
