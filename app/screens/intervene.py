"""Intervene: set a coefficient, drop, swap or average values, cut sinks, remove a sublayer, patch between two prompts."""

from __future__ import annotations

import streamlit as st

from app import widgets
from app.cached_source import cached_source
from app.figures import show
from app.page_frame import page
from app.prompt_box import prompt_box
from app.screens.edit_builder import edit_builder, kinds_of
from workbench import prompts
from workbench.views import Link, intervene

ABOUT = (
    "Change something inside the model while it reads one text, and see what follows: which tokens it now predicts worse, what it "
    "says next, and in which layers and heads it matters. Nothing is trained and nothing is kept: the model is as before."
)

GRAMMAR = (
    "For instance values:layer=2..3,how=zero or coefficient:layer=1,value=0;sink:layer=2,head=0/1. "
    "Layers and heads count from 0; none means all."
)


def _body(link: Link) -> None:
    link = prompt_box(link)
    other = widgets.text_line(
        "Second text, for what is taken from another prompt", "other", rows=2,
        help="Needed to patch, and to swap values between prompts; as many tokens as the first.", placeholder="of equal length",
    )  # fmt: skip
    link = link.but(other=other or None)
    st.header("Change it")
    edit_builder(link)
    link = link.but(
        edits=widgets.text_line("The changes, as text; several are joined by ;", "edits", intervene.EDITS, help=GRAMMAR)
    )
    show(intervene.effect, link)
    show(intervene.next_token, link)
    _sweep(link)
    _patching(link)


def _sweep(link: Link) -> None:
    st.header("Where does it matter?")
    st.markdown("The same kind of change, made in one place at a time: a forward pass for each cell.")
    first, second, third, fourth = st.columns(4)
    with first:
        kinds = kinds_of(cached_source().subjects(link)[0].entry, intervene.sweeps())
        kind = widgets.choose("Change", "sweep", kinds, intervene.EDITS, show=intervene.sweeps().__getitem__)
    with second:
        choices = list(intervene.OVER) if intervene.has_heads(kind) else [intervene.OVER[0]]
        over = widgets.choose("In turn", "over", choices, show=lambda o: o.replace("x", "and"))
    with third:
        of = widgets.choose("Effect on", "of", list(intervene.OF), show=_of_words)
    link = link.but(sweep=kind, over=over, of=of)
    if of != "loss":
        with fourth:
            link = _token(link, "Token", "target")
    show(intervene.sweep, link, long="Changing one place at a time")


def _patching(link: Link) -> None:
    st.header("Patching between two texts")
    if not link.text("other"):
        st.caption(
            "Give a second text above, with as many tokens as the first and another answer, to see which activations carry it."
        )
        return
    st.markdown(
        "One activation at a time is taken from the run on the first text and put into the run on the second. Where the first text's "
        "answer comes back, that activation carries what tells the two texts apart."
    )
    source = cached_source()
    subject = source.subjects(link)[0]
    first, second = (len(source.tokens(subject, text)) for text in (source.prompt(link), link.text("other")))
    st.caption(f"{first} tokens in the first text, {second} in the second.")
    if first != second:
        st.warning("Patching needs as many tokens in both: cut or lengthen one of them.")
        return
    left, middle, right = st.columns(3)
    with left:
        site = widgets.choose("What is patched", "site", list(intervene.PATCHED), show=lambda s: s.replace("_", " "))
    with middle:
        link = _token(link, "Answer of the first text", "target")
    with right:
        link = _token(link.but(site=site), "Answer of the second text", "against", of_second=True)
    show(intervene.patching, link, long="Patching one activation at a time")


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


if __name__ == "__main__":
    page("intervene", ABOUT, _body)
