"""Intervene: set a coefficient, drop, swap or average values, cut sinks, remove a sublayer, patch between two prompts."""

from __future__ import annotations

from collections.abc import Iterable

import streamlit as st

from app import url
from app.shell import page, prompt_box, show
from app.source import source
from workbench.catalogue import Entry
from workbench.views import Link, intervene

ABOUT = (
    "Change something inside the model while it reads one text, and see what follows: which tokens it now predicts worse, what it "
    "says next, and in which layers and heads it matters. Nothing is trained and nothing is kept: the model is as before."
)


def draw() -> None:
    page("intervene", "Intervene", ABOUT, _body)


def _body(link: Link) -> None:
    link = prompt_box(link)
    other = url.line(
        "Second text, for what is taken from another prompt", "other", rows=2,
        help="Needed to patch, and to swap values between prompts; as many tokens as the first.", placeholder="of equal length",
    )  # fmt: skip
    link = link.but(other=other or None)
    st.header("Change it")
    _builder(link)
    link = link.but(
        edits=url.line("The changes, as text; several are joined by ;", "edits", intervene.EDITS, help=GRAMMAR)
    )
    show(intervene.effect, link)
    show(intervene.next_token, link)
    _sweep(link)
    _patching(link)


UNTOUCHED = 0.0  # the coefficient, until somebody moves its slider
GRAMMAR = (
    "For instance values:layer=2..3,how=zero or coefficient:layer=1,value=0;sink:layer=2,head=0/1. "
    "Layers and heads count from 0; none means all."
)


def _builder(link: Link) -> None:
    """What to change, where, in plain words; adds to the text below."""
    entry = source().subjects(link)[0].entry
    first, second, third, fourth, fifth = st.columns([6, 4, 4, 2, 2], vertical_alignment="bottom")
    with first:
        kind = url.choose(
            "What", "kind", _kinds(entry, intervene.KINDS), intervene.EDITS, show=intervene.KINDS.__getitem__
        )
    layers = second.multiselect("Layers (none: all)", list(range(entry.n_layers)), key="edit_layers")
    heads = third.multiselect(
        "Heads (none: all)", list(range(entry.n_heads)), key="edit_heads", disabled=not intervene.has_heads(kind)
    )
    value = (
        st.slider("The coefficient becomes", -2.0, 2.0, UNTOUCHED, 0.1, key="edit_value")
        if kind.startswith("coefficient")
        else None
    )
    made = intervene.compose(kind, layers, heads if intervene.has_heads(kind) else [], value)
    fourth.button("Try", key="edit_set", help=f"Make just this change: {made}", on_click=_make, width="stretch")
    fifth.button(
        "Add", key="edit_add", help=f"Make it beside the others: {made}", on_click=_make, args=(True,), width="stretch"
    )


def _kinds(entry: Entry, kinds: Iterable[str]) -> list[str]:
    """Changes that can be made: the coefficients of an observed model are its own code's."""
    return [kind for kind in kinds if not (entry.observed and kind.startswith("coefficient"))]


def _make(add: bool = False) -> None:
    """Put the change that is chosen now into the address; a click may come before the page has drawn what was chosen."""
    now = st.session_state
    kind = now["w_kind"]
    heads = now["edit_heads"] if intervene.has_heads(kind) else []
    value = now.get("edit_value", UNTOUCHED) if kind.startswith("coefficient") else None
    made = intervene.compose(kind, now["edit_layers"], heads, value)
    before = st.query_params.get("edits", intervene.EDITS) if add else ""
    st.query_params["edits"] = f"{before};{made}" if before else made


def _sweep(link: Link) -> None:
    st.header("Where does it matter?")
    st.markdown("The same kind of change, made in one place at a time: a forward pass for each cell.")
    first, second, third, fourth = st.columns(4)
    with first:
        kinds = _kinds(source().subjects(link)[0].entry, intervene.SWEEPS)
        kind = url.choose("Change", "sweep", kinds, intervene.EDITS, show=intervene.SWEEPS.__getitem__)
    with second:
        choices = list(intervene.OVER) if intervene.has_heads(kind) else [intervene.OVER[0]]
        over = url.choose("In turn", "over", choices, show=lambda o: o.replace("x", "and"))
    with third:
        of = url.choose("Effect on", "of", list(intervene.OF), show=_of_words)
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
    first, second, third = st.columns(3)
    with first:
        site = url.choose("What is patched", "site", list(intervene.PATCHED), show=lambda s: s.replace("_", " "))
    with second:
        link = _token(link, "Answer of the first text", "target")
    with third:
        link = _token(link.but(site=site), "Answer of the second text", "against", of_second=True)
    show(intervene.patching, link, long="Patching one activation at a time")


def _token(link: Link, label: str, key: str, of_second: bool = False) -> Link:
    """One of the likeliest next tokens of a text."""
    ask = source()
    text = link.text("other") if of_second else ask.prompt(link)
    top = ask.look("prompt.predictions", ask.subjects(link)[0], text, top=50).top
    if of_second:  # two answers are compared, often one token is the likeliest of both
        top = top[top["id"] != link.whole("target")]
    names = {int(i): f"{t}  ({p:.1%})" for i, t, p in zip(top["id"], top["token"], top["probability"], strict=True)}
    return link.but(**{key: url.choose(label, key, list(names), show=names.__getitem__)})


def _of_words(of: str) -> str:
    return {"loss": "loss of the text", "logit": "logit of a token", "probability": "probability of a token"}[of]


if __name__ == "__main__":
    draw()
