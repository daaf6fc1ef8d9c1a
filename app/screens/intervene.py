"""Intervene: edit coefficients, values, sinks or sublayers, sweep one edit over the model, or patch between two prompts."""

from __future__ import annotations

from collections.abc import Iterable

import streamlit as st

from workbench.data.example_prompts import examples
from workbench.places import module
from workbench.runs.catalogue import Entry
from workbench.views import Link, intervene
from workbench.views.source import IDS, LETTERS
from workbench.views.source import example as example_of

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import url_widgets as widgets
from ..cached_source import cached_source
from ..elements import token_strip
from ..elements.figure import Point
from ..figure_menu import ready, show
from ..page_layout import controls, figures_side_by_side, page
from ..prompt_box import choose_token, prompt_box, take_example

ABOUT = (
    "Edit the model while it reads one text: which tokens it then predicts worse, what it predicts next, and in which layers and "
    "heads the edit matters. Nothing is trained or saved."
)
GRAMMAR = (
    "For instance values:layer=2..3,how=zero or coefficient:layer=1,value=0;sink:layer=2,head=0/1. "
    "Layers and heads count from 0. Without layer= an edit acts on all layers."
)
PATCHING = (
    "One activation at a time is copied from the run on the first text into the run on the second. Where the first text's answer "
    "comes back, that activation carries the difference between the two texts."
)
OF = {"loss": "loss of the text", "logit": "logit of a token", "probability": "probability of a token"}
POSITION = "Patched position"
EFFECT_PX, BOTH_PX = 340, 640  # pixels of a figure of one model, of two, beside the column of controls
PARTS = {"effect": "Edits", "sweep": "Sweep", "patching": "Patching"}
MAX_NOW = 6  # trained coefficients that are named
SHORTCUT = "coefficient:value=0"
FORMULAS = {
    "values:site=arriving,how=zero": "A mixed value is w·V + λ·V₁. This edit sets the other layers' values V₁ to 0; w and λ stay.",
    SHORTCUT: "A mixed value is w·V + λ·V₁. This edit sets λ to a number; the own weight w and the values V₁ stay.",
}  # fmt: skip
"""What an edit of the value shortcut does to a mixed value."""
STATE = ("edit_layers", "edit_heads", "edit_value")
UNTOUCHED = 0.0  # the coefficient of an edit that a link names


def intervene_page(link: Link) -> None:
    for key in STATE:  # Streamlit forgets boxes that a part does not draw
        if key in st.session_state:
            st.session_state[key] = st.session_state[key]
    with controls():
        shown = widgets.segments("Part", "show", list(PARTS), show=PARTS.__getitem__)
    left, right = st.columns([2, 5], gap="medium")
    with left:
        link = {"effect": _edit_controls, "sweep": _sweep_controls, "patching": _patch_controls}[shown](
            prompt_box(link).but(show=shown)
        )
    with right:
        if shown == "effect":
            applied = (link.text("edits") or "") == st.query_params.get("edits", "")
            note = "" if applied else "preview, not added yet; "
            with figures_side_by_side(BOTH_PX if link.on("compare") else EFFECT_PX):
                with st.container():
                    drawing = show(intervene.effect, link, note=note)
                if drawing is not None:  # else the reason stands once
                    with st.container():
                        show(intervene.next_token, link, note=note)
            if (edits := link.text("edits")) and drawing is not None and not intervene.takes_from_second(edits):
                label = f"Mean over {intervene.DOCUMENTS} documents"
                if widgets.toggle(label, "documents"):
                    show(intervene.on_documents, link, note=note, long="Reading documents with and without the edit")
        elif shown == "sweep":
            show(intervene.sweep, link, long="Editing one place at a time")
        elif not link.text("other"):
            st.info(f"Enter a second text of as many tokens and another answer. {PATCHING}")
            entry = cached_source().subjects(link)[0].entry
            is_text = not LETTERS.get(entry.kind, 0) and example_of(entry) != IDS
            for example in (e for e in examples() if e.other and is_text):
                name = f"Use “{example.phenomenon}”"
                st.button(name, on_click=take_example, args=(example,), icon=":material/lightbulb:")
        elif link.text("against") is not None:  # else the reason stands beside the texts
            _patching(link.but(layer=None, position=None))


def _kinds(link: Link, kinds: Iterable[str]) -> list[str]:
    """Edits that model A takes: an observed model has no editable coefficients."""
    entry = cached_source().subjects(link)[0].entry
    return [kind for kind in kinds if not (entry.observed and kind.startswith("coefficient"))]


def _second_text(link: Link, needed: bool) -> Link:
    if not needed:
        return link.but(other=None)
    text = widgets.text_line(
        "Second text", "other", rows=2, help="As many tokens as the first; positions correspond.",
        placeholder="of equal length", clears=("against", "position"),
    )  # fmt: skip
    return link.but(other=text or None)


# ---- edits -----------------------------------------------------------------------------------------------------------


def _edit_controls(link: Link) -> Link:
    entry: Entry = cached_source().subjects(link)[0].entry
    names, state = intervene.kinds(), st.session_state
    kinds = _kinds(link, names)
    trained = intervene.trained_coefficients(cached_source(), link, SHORTCUT) if SHORTCUT in kinds else []
    shortcut = [value for of, _, value in trained if of != "own"]
    kind = widgets.choose("Edit", "kind", kinds, SHORTCUT if shortcut else intervene.KIND, show=names.__getitem__)
    if shortcut and "kind" not in st.query_params:  # the slider opens at the trained coefficient, which edits nothing
        state["edit_value"] = float(min(2.0, max(-2.0, round(shortcut[0], 1))))
    if kind in FORMULAS:
        st.caption(FORMULAS[kind])
    first, second = st.columns(2)
    first.multiselect("Layers", list(range(entry.n_layers)), key="edit_layers", placeholder="all layers")
    no_heads = not intervene.has_heads(kind)
    second.multiselect(
        "Heads", list(range(entry.n_heads)), key="edit_heads", disabled=no_heads, placeholder="all heads"
    )
    if kind.startswith("coefficient"):
        state.setdefault("edit_value", UNTOUCHED)
        st.slider(
            "Coefficient", -2.0, 2.0, step=0.1, key="edit_value", on_change=widgets.update_url, kwargs={"kind": kind}
        )
        trained = intervene.trained_coefficients(cached_source(), link, kind)
        layers = state["edit_layers"] or [n for _, n, _ in trained]
        now = {n: f"{value:.3g}" for of, n, value in trained if n in layers and of != "own"}
        words = [f"λ{n} = {value}" for n, value in now.items()][:MAX_NOW] + ["…"] * (len(now) > MAX_NOW)
        if len(now) > 1 and len({*now.values()}) == 1:
            words = [f"λ = {now[min(now)]} in layers {min(now)} to {max(now)}"]
        st.caption(f"Trained: {', '.join(words)}." if now else "No such coefficient in these layers.")
        weights = sorted({value for of, n, value in trained if n in layers and of == "own"})
        if kind == SHORTCUT and weights and weights != [1.0]:  # it scales the values too
            w = f"{weights[0]:.3g}" if len(weights) == 1 else f"{weights[0]:.3g} to {weights[-1]:.3g}"
            scaled = f"The own weight w stays {w}. With λ = 0 the value is also scaled by {w}"
            st.caption(f"{scaled}, which changes the loss by itself.")
            own = intervene.edit_text("coefficient:source=own", state["edit_layers"], [], 1.0)
            help_ = f"Two edits: {_selected()} and {own}"
            st.button("Apply, with own weight 1", key="edit_own", help=help_, on_click=_apply, kwargs={"more": own})
    edit = _selected()
    first, second = st.columns(2)
    first.button("Apply", key="edit_set", help=f"Only this edit: {edit}", on_click=_apply, width="stretch")
    second.button(
        "Add", key="edit_add", help=f"Besides the others: {edit}", on_click=_apply, args=(True,), width="stretch"
    )
    edits = widgets.text_line("Edits as text, joined by ;", "edits", "", help=GRAMMAR)
    touched = "kind" in st.query_params or state["edit_layers"] or state["edit_heads"]
    if touched and edit not in edits.split(";"):
        st.caption(f":material/visibility: Preview of **{widgets.escaped(edit)}**. Apply keeps it in the link.")
        edits = edit
    return _second_text(link.but(edits=edits), intervene.takes_from_second(edits))


def _selected() -> str:
    """The edit in the boxes; a click may come before the page has drawn the new boxes."""
    state = st.session_state
    kind = state["w_kind"]
    heads = state["edit_heads"] if intervene.has_heads(kind) else []
    value = state.get("edit_value", UNTOUCHED) if kind.startswith("coefficient") else None
    return intervene.edit_text(kind, state["edit_layers"], heads, value)


def _apply(add: bool = False, more: str = "") -> None:
    edit, before = _selected() + (f";{more}" if more else ""), st.query_params.get("edits", "") if add else ""
    st.query_params["edits"] = f"{before};{edit}" if before else edit


# ---- sweeps ----------------------------------------------------------------------------------------------------------


def _sweep_controls(link: Link) -> Link:
    names, state = dict(intervene.sweeps()), st.session_state
    edits, preset = st.query_params.get("edits", ""), st.query_params.get("kind")
    value = state.get("edit_value", UNTOUCHED) if (preset or "").startswith("coefficient") else None
    opened = edits.split(";")[0] or (preset and intervene.edit_text(preset, [], [], value)) or intervene.KIND
    for edit in (intervene.everywhere(opened), st.query_params.get("sweep", "")):  # a number that no preset has
        if edit.startswith("coefficient"):
            names.setdefault(edit, f"set a coefficient ({edit.partition(':')[2]})")
    kind = widgets.choose("Edit", "sweep", _kinds(link, names), intervene.everywhere(opened), show=names.__getitem__)
    if kind == intervene.everywhere(opened) != opened:
        st.caption(f"{widgets.escaped(opened)}, in one place at a time.")
    choices = list(intervene.OVER) if intervene.has_heads(kind) else [intervene.OVER[0]]
    over = widgets.choose("Sweep over", "over", choices, show=lambda o: o.replace("x", "and"))
    of = widgets.choose("Effect on", "of", list(OF), show=OF.__getitem__)
    link = _second_text(link.but(sweep=kind, over=over, of=of), intervene.takes_from_second(kind))
    return choose_token(link, cached_source().prompt(link), "Predicted token", "target") if of != "loss" else link


# ---- patching --------------------------------------------------------------------------------------------------------


def _patch_controls(link: Link) -> Link:
    """Two texts of equal length, the patched site, and two answers; without `against` if the lengths differ."""
    link = _second_text(link, True)
    other = link.text("other")
    if not other:
        return link
    source = cached_source()
    subject, text = source.subjects(link)[0], source.prompt(link)
    first, second = (len(source.tokens(subject, t)) for t in (text, other))
    st.caption(f"{first} tokens in the first text, {second} in the second.")
    if first != second:
        st.warning("Patching needs texts of equal length in tokens: shorten or lengthen one.")
        return link.but(against=None)
    site = widgets.choose("Patched site", "site", list(intervene.PATCHED), show=intervene.PATCHED.__getitem__)
    link = choose_token(link.but(site=site), text, "Answer of the first text", "target")
    # one token is often the likeliest of both texts
    return choose_token(link, other, "Answer of the second text", "against", but=link.whole("target"))


def _patching(bare: Link) -> None:
    """The map of patches, and the effect of one of them: the address's, else the strongest."""
    ready(bare, "Patching one activation at a time", intervene.patched_activation)
    source = cached_source()
    best = intervene.patched_activation(source, bare)
    tokens = source.tokens(source.subjects(bare)[0], bare.text("other"))
    at = token_strip.selected_position("position", POSITION, len(tokens), default=best.position)
    token_strip.draw_token_strip(
        tokens, key="position", label=POSITION, colours=best.restored, unit="restored" + " in A" * bare.on("compare"), chosen=at
    )  # fmt: skip
    layer = widgets.choose("Layer", "layer", list(range(best.layers)), best.layer, elsewhere=("all",), width=80)

    def take(point: Point) -> None:
        if point.token is not None and str(point.y).isdigit():
            widgets.update_url(layer=point.y, position=point.token)

    link = bare.but(layer=layer, position=at)
    show(intervene.patching, link, about=PATCHING, take=take)
    show(intervene.patched, link, about=PATCHING)


if __name__ == "__main__":
    page("intervene", ABOUT, intervene_page)
