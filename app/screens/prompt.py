"""Prompt: one text, one model or two: what each layer would say, what it carries, what comes next, and who said so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import streamlit as st

from app import widgets
from app.cached_source import cached_source
from app.elements import token_strip
from app.figures import show
from app.page_frame import figures_side_by_side, page, toolbar
from app.prompt_box import prompt_box
from workbench import prompts
from workbench.views import Link, prompt

ABOUT = (
    "One text through the chosen model, token by token. Compare it with a second model, or with another step, above."
)
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
ALL, AFTER, NARROW_PX = "all", "After which token", 440
Draw = Callable[[], object]
"""What draws a part, once its controls stand above it."""


def _body(link: Link) -> None:
    left, right = st.columns([2, 3])
    with left:
        link = prompt_box(link)
    source = cached_source()
    tokens = source.tokens(source.subjects(link)[0], source.prompt(link))  # refused here, once, where it cannot be read
    with right:
        link = _position(link, tokens)
    with toolbar("controls"):
        shown = widgets.segments("Part", "show", list(PARTS), show=lambda name: PARTS[name][0])
        draw = PARTS[shown][1](link.but(show=shown))
    draw()


def _next(link: Link) -> Draw:
    def draw() -> None:
        with figures_side_by_side(NARROW_PX):
            show(prompt.predictions, link)
            show(prompt.surprise, link)

    return draw


def _layers(link: Link) -> Draw:
    quantity = widgets.choose(
        "Colour", "quantity", list(prompt.LENS), "probability", show=lambda name: prompt.LENS[name][0], width=230
    )
    return partial(show, prompt.lens, link.but(quantity=quantity), about=EARLY)


def _carries(link: Link) -> Draw:
    site = widgets.choose(
        "Of what", "site", list(prompt.VALUES), "effective", show=lambda name: prompt.VALUES[name][0], width=260
    )

    def draw() -> None:
        with figures_side_by_side(NARROW_PX):
            show(prompt.values, link.but(site=site), about=CARRIED)
            show(prompt.identity, link.but(site=site), about=CARRIED)

    return draw


def _position(link: Link, tokens: list[str]) -> Link:
    """The token after which everything is asked; the strip shows how surprising each one was."""
    source, last = cached_source(), len(tokens) - 1
    at = token_strip.asked("position", AFTER, len(tokens), default=last)
    subject, text = source.subjects(link)[0], source.prompt(link)
    found = source.query(prompts.next_tokens, subject, text, position=last, top=prompt.TOP)  # once for all positions
    token_strip.draw(
        tokens, key="position", label=AFTER, colours=found.loss, unit="nats", chosen=at, clears=("target", "against")
    )
    return link.but(position=at)


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
    return partial(show, prompt.attribution, link.but(target=token, **chosen), about=SAID)


PARTS = {
    "next": ("What comes next", _next), "layers": ("What each layer would say", _layers), "who": ("Who says so", _who),
    "carries": ("What it carries", _carries),
}  # fmt: skip


if __name__ == "__main__":
    page("prompt", ABOUT, _body)
