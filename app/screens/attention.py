"""Attention: where every head attends in one prompt; a click enlarges a head, a drag selects a window of it."""

from __future__ import annotations

import streamlit as st

from workbench.places import module
from workbench.views import Link, attention, heads, prompt
from workbench.views.page_links import SELECTION

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import url_widgets as widgets
from ..cached_source import cached_source
from ..elements import attention as element
from ..elements import token_strip
from ..figure_menu import files, ready, show
from ..page_layout import figures_side_by_side, page, toolbar
from ..prompt_box import choose_token, prompt_box
from ..tables import row_table

ABOUT = (
    "Each row of a map is a query token, each column an earlier key token; a row sums to 1. A bright first column is an attention "
    "*sink*, a bright diagonal a head that attends to its own or the previous token. *Effective keys*: over how many tokens a head "
    "spreads its attention. Neither few keys nor a sink is a fault."
)
SCORE = (
    "The score of a query and a key is a logit: the number before the softmax over keys. It is a sum: each part of the query's stream "
    "(rows) times each part of the key's stream (columns). A large positive cell raises this attention weight. The softmax reads only "
    "differences of scores, so the mean score of the query's other keys is subtracted. The difference of two keys is the log ratio of "
    "their weights."
)
PATH = (
    "One token's way through this head. Left: the parts of its key that make the score. Right: what its value adds to the logit of a token "
    "at the query, by the source of the value; each is the attention weight times the logit per unit of weight. Direct effects only."
)
QUERY, KEY = "Query token", "Key token"
CELL = ("key", "against", "parts", "target")
FIGURES = {
    "Map of this head": attention.weights, "All heads": attention.overview, "Received attention": attention.received,
    "Attention of one query": attention.query, "Statistics per head": attention.numbers, "Score attribution": attention.score,
    "From score to logit": attention.path,
}  # fmt: skip


def attention_page(link: Link) -> None:
    source = cached_source()
    left, right = st.columns([2, 3])
    with left:
        link = prompt_box(link)
    bare = link.but(**dict.fromkeys(("layer", "head", "queries", "keys", "lock", "scale", "pool", "branch", *CELL)))
    ready(bare, "Running the model", attention.attention_options)
    with right:
        with toolbar("options"):
            link = _choices(bare)
        strip = st.container()
    ready(link, "Reading the attention of every head", attention.seen)
    choice, patterns = attention.seen(source, link)
    with strip:
        token_strip.draw_token_strip(
            choice.tokens[0], key="lock", label=QUERY, chosen=choice.lock, none=True, clears=("key", "against", "target"),
            colours=attention.per_token(patterns[0]),
            unit="attention" + " received" * (choice.lock is None) + " in A" * (len(patterns) > 1),
            own="" if choice.lock is None else "to itself",
        )  # fmt: skip
    caption = f"{attention.where(choice, patterns)}; {', '.join(s.subject.title for s in patterns)}"
    element.draw_attention(choice, patterns, f"Attention: {caption}")
    _chosen_head(choice, patterns)
    if note := attention.unrelated(choice):
        st.caption(note)
    if choice.lock is not None:
        _score(link, choice)
    else:
        looks = attention.query_of_the_first(source, link)
        cells = {attention.cell(source, link): "its largest weight", (looks, 0): "the first token"}
        for (query, key), what in cells.items():
            why = f"Parts of the score from token {query} to token {key}, {what}"
            widgets.page_link("attention", why, ":material/functions:", lock=str(query), key=str(key))
    panel = st.expander("This head: logit attribution and history", on_change="rerun", key="open_head")
    if panel.open:  # its value paths at the query token (else the last token), and its measures over training
        head = {"layer": choice.layer, "head": choice.head}
        at = choice.length - 1 if choice.lock is None else choice.lock
        common = {k: v for k, v in link.options.items() if k in SELECTION}
        with panel, figures_side_by_side():
            with st.container():
                show(prompt.attribution, Link("prompt", common).but(position=at, **head))
            with st.container():
                show(heads.history, Link("heads", common).but(**head))
    table = attention.statistics(patterns)
    rows = table[table["head"].notna()].reset_index(drop=True)
    st.header("Statistics per head", anchor=False)
    uniform = "; ".join(
        f"{words} {patterns[0].overview.uniform[name]:.3g}" for name, words in attention.STATISTICS.items()
    )
    tokens = f"{choice.length}" if choice.alike else f"A's {choice.length}"
    st.caption(
        f"Uniform attention over {tokens} tokens: {uniform}. {attention.MEANS.capitalize()}. Click a row to enlarge a head."
    )
    selected = (rows["layer"] == choice.layer) & (rows["head"] == choice.head)
    row_table(
        "heads", rows.drop(columns=["model"] * (len(patterns) == 1)).rename(columns=attention.STATISTICS), selected, rows,
        lambda row: widgets.update_url(layer=int(row["layer"]), head=int(row["head"])), "Attention statistics of every head",
    )  # fmt: skip
    files(FIGURES, link)


def _chosen_head(choice: attention.Choice, patterns: list[attention.Seen]) -> None:
    """Say whether a head is a sink, by which rule the page chose its head, and when a new text has changed it."""
    words, head = [attention.strongest_sink(s) for s in patterns], f"layer {choice.layer}, head {choice.head}"
    if not {"layer", "head"} & set(st.query_params):
        place, before = (choice.subjects[0].entry.path, choice.text), st.session_state.get("opened_head")
        words.append("The page opens on the head with the most attention to the first token at the last checkpoint")
        if before and before[0][0] == place[0] and before[0][1] != place[1] and before[1] != head:
            words.append(f"With the new text this is {head}, no longer {before[1]}")
            st.session_state["new_head"] = place, words[-1]
        elif st.session_state.get("new_head", (None, ""))[0] == place:
            words.append(st.session_state["new_head"][1])
        st.session_state["opened_head"] = place, head
    st.caption(widgets.typeset(". ".join(words) + "."))


def _score(link: Link, choice: attention.Choice) -> None:
    """Draw the parts of the score of the selected query and a key token."""
    query, key = attention.cell(cached_source(), link)
    names = {i: f"{i}: {choice.tokens[0][i]}" for i in range(query + 1)}
    if key:
        words = f"From token {query} to the first token"
        widgets.page_link("attention", words, ":material/first_page:", lock=str(query), key="0", against=None)
    with toolbar("score"):
        key = widgets.choose(KEY, "key", list(names), key, show=names.__getitem__, width=150)
        others = attention.AGAINST | {str(i): name for i, name in names.items() if i != key}
        first = attention.OTHERS if query else attention.NONE
        against = widgets.choose("Score minus", "against", list(others), first, show=others.__getitem__, width=190)
        parts = widgets.choose("Parts by", "parts", list(attention.PARTS), show=attention.PARTS.__getitem__, width=150)
        link = choose_token(link.but(key=key), choice.text, "Predicted token", "target", position=query, width=130)
    show(attention.score, link.but(against=against, parts=parts), about=SCORE)
    show(attention.path, link, about=PATH)


def _choices(bare: Link) -> Link:
    source = cached_source()
    options = attention.attention_options(source, bare)
    layer = widgets.choose("Layer", "layer", list(range(options.layers)), options.layer, width=70)
    default = attention.attention_options(source, bare.but(layer=layer))
    head = widgets.choose("Head", "head", list(range(options.heads)), default.head, width=70)
    with st.popover("More", icon=":material/tune:"):
        queries = widgets.range_slider("Queries (rows)", "queries", options.length)
        keys = widgets.range_slider("Keys (columns)", "keys", options.length)
        scale = widgets.choose(
            "Colour scale", "scale", list(attention.SCALES), options.scale, show=attention.SCALES.__getitem__
        )
        pool = "mean"
        if options.length > attention.BUCKETS[0]:
            pool = widgets.choose("Pooling", "pool", list(attention.POOLS), show=attention.POOLS.__getitem__)
        branch = "all"
        if len(default.branches) > 1:
            words = {"all": "all layers"} | {b: attention.whose(b) for b in default.branches}
            branch = widgets.choose("Keys of", "branch", list(words), show=words.__getitem__)
    lock = token_strip.selected_position("lock", QUERY, options.length)
    key = None if lock is None else token_strip.selected_position("key", KEY, lock + 1)
    return bare.but(layer=layer, head=head, scale=scale, pool=pool, lock=lock, key=key, branch=None if branch == "all" else branch,
                    queries="{}-{}".format(*queries), keys="{}-{}".format(*keys))  # fmt: skip


if __name__ == "__main__":
    page("attention", ABOUT, attention_page)
