"""The token strip without a browser: what travels, what is refused, what a choice writes into the address."""

from __future__ import annotations

import json

import numpy as np
import pytest
import streamlit as st
from app_pages import is_of

from app import url_widgets
from app.elements import token_strip
from app.elements.common import colour_table, ink
from workbench.errors import BadData

TOKENS = ["def", "·mean", "↵", "x" * 60]


def strips(at):
    """What the page's strips were sent."""
    return [json.loads(e.proto.json) for e in at.get("bidi_component") if is_of(e.proto, "token_strip")]


@pytest.mark.parametrize(
    ("tokens", "given", "word"),
    [
        ([], {}, "no tokens"),
        (TOKENS, {"chosen": 4}, "0 to 3"),
        (TOKENS, {"chosen": 0, "first": 1}, "1 to 4"),
        (TOKENS, {"colours": [1.0]}, "for 4 tokens"),
    ],
)
def test_what_cannot_be_shown_is_refused(tokens, given, word):
    with pytest.raises(BadData, match=word):
        token_strip.draw_token_strip(tokens, key="position", label="x", **given)


def test_ink_can_be_read_on_every_colour():
    def light(colour):
        share = np.asarray(colour) / 255
        return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4) @ (0.2126, 0.7152, 0.0722)

    for scale in ("Cividis", "RdBu_r", "Greys"):
        for ground in colour_table(scale):
            a, b = sorted((light(ground), float(ink(ground) == "#ffffff")))
            assert (b + 0.05) / (a + 0.05) >= 4.5


@pytest.mark.parametrize(
    ("told", "none", "written"),
    [
        ({"token": 8}, False, {"target": None, "position": 8}),
        ({"token": None}, True, {"target": None, "position": None}),
        ({"token": None}, False, None),
        ({"token": 11}, False, None),
        ({"token": "8"}, False, None),
        (None, True, None),
    ],
)
def test_a_choice_is_written_into_the_address_and_nothing_else(monkeypatch, told, none, written):
    found = []
    monkeypatch.setattr(st, "session_state", {"strip_position": {"asked": told}})
    monkeypatch.setattr(url_widgets, "update_url", lambda **changes: found.append(changes))
    token_strip.write_position("position", range(7, 11), ("target",), none)
    assert found == ([] if written is None else [written])


@pytest.mark.slow
def test_the_prompt_page_colours_its_tokens_by_surprise(browse, populated):
    at = browse(populated, "prompt", a="text-resformer-s0", prompt="return values now", position="3")
    (strip,) = strips(at)
    assert (strip["chosen"], strip["first"], strip["none"]) == (3, 0, False)
    assert strip["values"][0] is None
    assert all(v > 0 for v in strip["values"][1:])
    for wish in ("99", "-1", "<b>", "03"):
        at = browse(populated, "prompt", a="text-resformer-s0", prompt="return values now", position=wish)
        assert any("position" in i.value for i in at.info)
        assert strips(at)[0]["chosen"] == len(strip["tokens"]) - 1
