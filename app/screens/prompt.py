"""Prompt: one text through one model or two: next tokens, logit lens, attribution, values, and one value followed."""

from __future__ import annotations

import re
from typing import Any

import streamlit as st

from workbench import prompts
from workbench.places import module
from workbench.runs.catalogue import Entry
from workbench.views import Link, path_of_token, prompt, tuned_lens

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import url_widgets as widgets
from ..cached_source import cached_source
from ..elements import token_strip
from ..elements.figure import Point
from ..figure_menu import show
from ..page_layout import FIGURE_PX, PANELS_PX, controls, figures_side_by_side, page, toolbar
from ..prompt_box import choose_token, prompt_box

ABOUT = "One text through the selected model, token by token. Select *Compare* for a second model or step."
POSITION = "Position"
LENS = (
    "The model's output head, applied after each layer: the token that would come next if the model stopped there. The top row is its "
    "real prediction. Early layers need not write in the head's basis, so odd tokens there are no fault. The *tuned lens* first maps each "
    "layer's stream to a final stream, by an affine map that was fitted on validation documents."
)
VALUES = (
    "**Own** values are what a layer computes, **effective** values what its attention sums, after the shortcut has added the first "
    "layer's part. In a Transformer the two are equal. A longer value is neither better nor worse."
)
ATTRIBUTION = (
    "A token's logit is a sum over the attention and the MLP of every layer. Select a layer for its heads, then a head for its value "
    "paths. Direct effects only: what a part does through later layers counts there. The parts sum to the model's own logit."
)
FOLLOW = (
    "One token's way through one head of a layer, by default its largest reader. Left: the parts of its key that make the score. Right: "
    "what its **value** adds to the logit of a token at the query, by the source of the value. Below the figure: all sources and "
    "readers of the value. Select an early token: only later ones read it. *Attention* shows every cell of a head."
)
ALL, WIDE_PX = "all", 700
PARTS = {
    "next": "Next token",
    "layers": "Logit lens",
    "who": "Logit attribution",
    "carries": "Values",
    "follow": "From score to logit",
}
PART_VIEWS = {
    "next": (prompt.predictions, prompt.surprise), "layers": (prompt.lens,), "who": (prompt.attribution,),
    "carries": (prompt.values, prompt.identity), "follow": (path_of_token.follow,),
}  # fmt: skip
ABOUTS = {"layers": LENS, "who": ATTRIBUTION, "carries": VALUES, "follow": FOLLOW}
WITHOUT_CLICKS = (prompt.predictions, prompt.two_texts, path_of_token.follow, tuned_lens.lens_loss)


def prompt_page(link: Link) -> None:
    with controls():
        shown = widgets.segments("Part", "show", list(PARTS), show=PARTS.__getitem__)
    left, right = st.columns([2, 3])
    with left:
        link = prompt_box(link)
    source = cached_source()
    subject, text = source.subjects(link)[0], source.prompt(link)
    tokens = source.tokens(subject, text)  # refused here, once, if it cannot be read
    last = len(tokens) - 1
    with right:
        early = st.query_params.get("show") == "follow"  # only later tokens read a value
        at = token_strip.selected_position("position", POSITION, len(tokens), default=last // 3 if early else last)
        losses = source.query(prompts.next_tokens, subject, text, position=last, top=prompt.TOP).loss
        gone = ("target", "against", "query")
        token_strip.draw_token_strip(
            tokens, key="position", label=POSITION, colours=losses, unit="nats of loss" + " in A" * link.on("compare"),
            chosen=at, clears=gone,
        )  # fmt: skip
        if shown == "next":
            about = "The next token after both texts, and the difference"
            other = widgets.text_line("Second text (optional)", "other", rows=2, placeholder="to compare", help=about)
            link = link.but(other=other or None)

    def take_token(point: Point) -> None:
        if point.token is not None:
            widgets.update_url(position=point.token, target=None, against=None)

    def take_part(point: Point) -> None:
        """Show the heads of a clicked layer's bar, and the value paths of a head's."""
        if match := re.fullmatch(r"(attention|MLP|head) (\d{1,4})", str(point.y)):
            widgets.update_url(**{"head" if match[1] == "head" else "layer": match[2]})

    with toolbar("options"):
        link, views, take = link.but(show=shown, position=at), PART_VIEWS[shown], take_token
        if shown == "next" and link.text("other"):
            views = (prompt.two_texts, prompt.surprise)
        if shown == "layers":
            names = {name: row[0] for name, row in prompt.LENS.items()}
            quantity = widgets.choose(
                "Colour", "quantity", list(names), "probability", show=names.__getitem__, width=230
            )
            lens = widgets.choose(
                "Kind of lens", "lens", list(tuned_lens.KINDS), show=tuned_lens.KINDS.__getitem__, width=130
            )
            link = link.but(quantity=quantity, lens=lens)
            if link.text("lens") == "tuned":
                fits = {"auto": "automatic", **tuned_lens.TEXTS}
                fit = widgets.choose("Text of the fit", "fit", list(fits), "auto", show=fits.__getitem__, width=230)
                link = link.but(fit=None if fit == "auto" else fit)
                views = (*views, tuned_lens.lens_loss)
        elif shown == "carries":
            names = {name: row[0] for name, row in prompt.VALUES.items()}
            link = link.but(
                site=widgets.choose("Site", "site", list(names), "effective", show=names.__getitem__, width=260)
            )
        elif shown == "who":
            link, take = _attribution(link, subject.entry, text), take_part
        elif shown == "follow":
            if st.query_params.get("layer") == ALL:  # selected under logit attribution
                widgets.update_url(layer=None)
            layers, default = range(subject.entry.n_layers), path_of_token.default_layer(subject)
            link = link.but(layer=widgets.choose("Layer", "layer", layers, default, width=80))
            for label, key, options in (
                ("Head", "head", range(subject.entry.n_heads)), ("Query", "query", range(int(at or 0), len(tokens))),
            ):  # fmt: skip
                shows: dict[Any, str] = {ALL: "largest reader", **{n: str(n) for n in options}}
                chosen = widgets.choose(label, key, list(shows), ALL, show=shows.__getitem__, width=130)
                link = link.but(**{key: None if chosen == ALL else chosen})
            query = int(path_of_token.reader(source, link).options["lock"])
            link = choose_token(link, text, "Predicted token", "target", position=query, width=130)
    least = (
        (WIDE_PX if shown == "next" else PANELS_PX) if link.on("compare") or prompt.two_texts in views else FIGURE_PX
    )
    with figures_side_by_side(least) if len(views) > 1 and shown != "layers" else st.container():
        for view in views:
            show(view, link, about=ABOUTS.get(shown, ""), take=None if view in WITHOUT_CLICKS else take)


def _attribution(link: Link, entry: Entry, text: str) -> Link:
    """The token whose logit is divided, and the layer and head that are divided further."""
    at = int(link.options["position"])
    link = choose_token(link, text, "Predicted token", "target", position=at, width=130)
    link = choose_token(
        link, text, "Minus token", "against", position=at, width=130, but=link.whole("target"), none=ALL
    )
    layer = widgets.choose("Layer", "layer", [ALL, *range(entry.n_layers)], ALL, width=80)
    head = widgets.choose("Head", "head", [ALL, *range(entry.n_heads)], ALL, width=80) if layer != ALL else None
    return link.but(layer=None if layer == ALL else layer, head=None if head == ALL else head)


if __name__ == "__main__":
    page("prompt", ABOUT, prompt_page)
