"""Attention: where every head looks in one prompt; a click enlarges a head, a drag refines a window of it."""

from __future__ import annotations

import streamlit as st

from workbench.places import module
from workbench.views import Link, attention

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import widgets
from ..cached_source import cached_source
from ..elements import attention as element
from ..elements import token_strip
from ..figures import files, ready
from ..page_frame import page, toolbar
from ..prompt_box import prompt_box
from . import attention_parts

ABOUT = (
    "Each row of a map is a token that attends (query), each column an earlier token it attends to (key); a row sums to 1. A bright "
    "first column is an attention *sink*, a bright diagonal a head that looks at itself or just before. *Effective keys*: over how many "
    "tokens a head really spreads its attention. Few keys or a sink are no fault by themselves."
)
HELD = "Hold the query"
FIGURES = {
    "This head's map": attention.weights, "All heads": attention.overview, "Received attention": attention.received,
    "Where one query looks": attention.query, "Numbers per head": attention.numbers,
}  # fmt: skip


def _body(link: Link) -> None:
    source = cached_source()
    left, right = st.columns([2, 3])
    with left:
        link = prompt_box(link)
    bare = link.but(**dict.fromkeys(("layer", "head", "queries", "keys", "lock", "scale", "pool", "branch")))
    ready(bare, "Running the model on the prompt", attention.options)
    with right:
        with toolbar("controls"):
            link = _choices(bare, link)
        strip = st.container()
    ready(link, "Reading the attention of every head", attention.seen)
    choice, found = attention.seen(source, link)
    with strip:
        token_strip.draw(
            choice.tokens[0], key="lock", label=HELD, chosen=choice.lock, none=True, colours=attention.per_token(found[0]),
            unit="received" if choice.lock is None else "of its attention",
        )  # fmt: skip
    caption = f"{attention.where(choice, found)}; {', '.join(s.subject.title for s in found)}"
    element.draw(choice, found, f"Attention: {caption}")
    attention_parts.this_head(link, choice)
    attention_parts.numbers(choice, found)
    files(FIGURES, link)


def _choices(bare: Link, link: Link) -> Link:
    """What a click, a drag and the keys choose in the element, as boxes and sliders; the rare ones behind a button."""
    found = attention.options(cached_source(), bare)
    layer = widgets.choose("Layer", "layer", list(range(found.layers)), found.layer, width=70)
    sharp = attention.options(cached_source(), bare.but(layer=layer)).head
    head = widgets.choose("Head", "head", list(range(found.heads)), sharp, width=70)
    more = st.popover("More", icon=":material/tune:")
    with more:
        queries = widgets.range_slider("Queries: rows shown", "queries", found.length)
        keys = widgets.range_slider("Keys: columns shown", "keys", found.length)
        scale = widgets.choose(
            "Colours", "scale", list(attention.SCALES), found.scale, show=attention.SCALES.__getitem__
        )
        pool = "mean"
        if found.length > attention.BUCKETS[0]:
            pool = widgets.choose(
                "Cells of many tokens show", "pool", list(attention.POOLS), show=attention.POOLS.__getitem__
            )
    lock = token_strip.asked("lock", HELD, found.length)
    chosen = bare.but(layer=layer, head=head, scale=scale, pool=pool, lock=lock,
                      queries="{}-{}".format(*queries), keys="{}-{}".format(*keys))  # fmt: skip
    branches = attention.options(cached_source(), bare.but(layer=layer)).branches
    if len(branches) > 1:
        words = {"all": "all layers it sees"} | {b: attention.whose(b) for b in branches}
        with more:
            branch = widgets.choose("Keys of", "branch", list(words), show=words.__getitem__)
        chosen = chosen.but(branch=None if branch == "all" else branch)
    return chosen


if __name__ == "__main__":
    page("attention", ABOUT, _body)
