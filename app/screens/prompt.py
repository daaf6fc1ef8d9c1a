"""Prompt: one text, one model or two: what each layer would say, what it carries, what comes next, and who said so."""

from __future__ import annotations

import streamlit as st

from workbench import prompts
from workbench.places import module
from workbench.views import Link, prompt

__package__ = module("app.screens")  # Streamlit runs this file as a script

from .. import widgets
from ..cached_source import cached_source
from ..elements import token_strip
from ..page_frame import page, toolbar
from ..prompt_box import prompt_box
from .prompt_parts import PARTS

ABOUT = (
    "One text through the chosen model, token by token. Compare it with a second model, or with another step, above."
)
AFTER = "After which token"


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


def _position(link: Link, tokens: list[str]) -> Link:
    """The token after which everything is asked; the strip shows how surprising each one was."""
    source, last = cached_source(), len(tokens) - 1
    early = st.query_params.get("show") == "follow"  # what the last token hands on, only it can read
    at = token_strip.asked("position", AFTER, len(tokens), default=last // 3 if early else last)
    subject, text = source.subjects(link)[0], source.prompt(link)
    found = source.query(prompts.next_tokens, subject, text, position=last, top=prompt.TOP)  # once for all positions
    token_strip.draw(
        tokens, key="position", label=AFTER, colours=found.loss, unit="nats", chosen=at, clears=("target", "against")
    )
    return link.but(position=at)


if __name__ == "__main__":
    page("prompt", ABOUT, _body)
