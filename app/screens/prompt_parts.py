"""Parts of the Prompt page: the choices of each, and what draws its figures."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import streamlit as st

from workbench import prompts
from workbench.views import Link, follow, prompt

from .. import widgets
from ..cached_source import cached_source
from ..elements.figure import Point
from ..figures import show
from ..page_frame import FIGURE_PX, PANELS_PX, figures_side_by_side

EARLY = (
    "The model's own reading head, applied early: which token would come next if the model stopped after this layer? The top row is "
    "its real prediction. Early layers need not speak the head's language, so an odd word there is no fault."
)
CARRIED = (
    "The value is what a token hands on where others attend to it. **Own** is what a layer computes itself, **effective** what "
    "attention really sums, after the shortcut has added the first layer's part; in an ordinary Transformer the two are the same. "
    "Longer is neither better nor worse."
)
SAID = (
    "A token's score (logit; the higher, the likelier) is a sum: each layer's attention and MLP pushes it up or down. Choose a layer "
    "to see its heads, then a head to see whose values it used. What a part does through later layers is counted there. "
    "The parts add up to the model's own number, and the page says how exactly."
)
HANDED_ON = (
    "A token's **value** is what it hands on where others attend to it. Left: what the value is made of, the layer's own projection "
    "and what comes from earlier layers. Right: the heads that bring it to later tokens, and later layers that read a part of it "
    "again: first how much they bring, then which share that is of all that the same tokens get there, and what it would be "
    "if they attended evenly. Choose an early token: only later ones can read it."
)
ALL, WIDE_PX = "all", 700
Draw = Callable[[], object]
"""What draws a part, once its controls stand above it."""


def _take_token(point: Point) -> None:
    """A click on a token of a figure chooses it, as one on the strip does."""
    if point.token is not None:
        widgets.update_url(position=point.token, target=None, against=None)


def _take_part(point: Point) -> None:
    """A click on a layer's bar shows its heads, one on a head's bar whose values it used."""
    if found := re.fullmatch(r"(attention|MLP|head) (\d{1,4})", str(point.y)):
        widgets.update_url(**{"head" if found[1] == "head" else "layer": found[2]})


def _next(link: Link) -> Draw:
    def draw() -> None:
        with figures_side_by_side(WIDE_PX if link.on("compare") else FIGURE_PX):
            show(prompt.predictions, link)
            show(prompt.surprise, link, take=_take_token)

    return draw


def _layers(link: Link) -> Draw:
    quantity = widgets.choose(
        "Colour", "quantity", list(prompt.LENS), "probability", show=lambda name: prompt.LENS[name][0], width=230
    )
    return partial(show, prompt.lens, link.but(quantity=quantity), about=EARLY, take=_take_token)


def _carries(link: Link) -> Draw:
    site = widgets.choose(
        "Of what", "site", list(prompt.VALUES), "effective", show=lambda name: prompt.VALUES[name][0], width=260
    )

    def draw() -> None:
        with figures_side_by_side(PANELS_PX if link.on("compare") else FIGURE_PX):
            show(prompt.values, link.but(site=site), about=CARRIED, take=_take_token)
            show(prompt.identity, link.but(site=site), about=CARRIED, take=_take_token)

    return draw


def _who(link: Link) -> Draw:
    source = cached_source()
    subject = source.subjects(link)[0]
    at = int(link.options["position"])
    top = source.query(prompts.next_tokens, subject, source.prompt(link), position=at, top=prompt.TOP).top
    names = {int(i): f"{t}  ({p:.1%})" for i, t, p in zip(top["id"], top["token"], top["probability"], strict=True)}
    token = widgets.choose("Token", "target", list(names), show=names.__getitem__, width=130)
    rest = [ALL, *(i for i in names if i != token)]
    against = widgets.choose(
        "Against", "against", rest, ALL, show=lambda i: "no other" if i == ALL else names[i], width=130
    )
    layer = widgets.choose("Layer", "layer", [ALL, *range(subject.entry.n_layers)], ALL, width=80)
    head = widgets.choose("Head", "head", [ALL, *range(subject.entry.n_heads)], ALL, width=80) if layer != ALL else None
    chosen = {"against": against, "layer": layer, "head": head}
    chosen = {k: None if v == ALL else v for k, v in chosen.items()}
    return partial(show, prompt.attribution, link.but(target=token, **chosen), about=SAID, take=_take_part)


def _follow(link: Link) -> Draw:
    if st.query_params.get("layer") == ALL:  # chosen under *Who says so*
        widgets.update_url(layer=None)
    subject = cached_source().subjects(link)[0]
    layers = range(subject.entry.n_layers)
    layer = widgets.choose("Layer", "layer", layers, follow.default_layer(subject), width=80)
    return partial(show, follow.follow, link.but(layer=layer), about=HANDED_ON)


PARTS = {
    "next": ("What comes next", _next), "layers": ("What each layer would say", _layers), "who": ("Who says so", _who),
    "carries": ("What it carries", _carries), "follow": ("Follow a value", _follow),
}  # fmt: skip
"""Of each part: its name, and what draws its controls and returns what draws its figures."""
