"""The page Attention on every kind of folder: its boxes and sliders do what the picture does, and the address says it all."""

from __future__ import annotations

import json
from pathlib import Path

import dashboard
import pytest
from app_pages import charts, is_of, pictures, said

APP = Path(__file__).parent.parent / "app"
A = {"a": "text-resformer-s0"}
BOTH = A | {"compare": "1", "b": "text-transformer-s0"}


@pytest.fixture
def page(browse):
    return lambda folder, **address: browse(folder, "attention", **address)


def element(at):
    """The header of what the picture was sent; None where there is no picture."""
    for data in pictures(at):
        return json.loads(data[4 : 4 + int.from_bytes(data[:4], "little")])
    return None


def test_the_picture_shows_what_the_address_says(page, populated):
    header = element(page(populated, **BOTH, layer="0", head="1", queries="4-9", keys="1-6", lock="7", scale="one"))
    assert (header["layer"], header["head"], header["lock"], header["whole"]) == (0, 1, 7, True)
    assert [p["title"] for p in header["panels"]] == ["A: ResFormer · s0, step 20", "B: Transformer · s0, step 20"]
    assert header["panels"][0]["queries"] == list(range(4, 11))
    assert header["panels"][1]["keys"] == list(range(1, 8))
    assert header["minus"]


@pytest.mark.slow
def test_strips_of_two_models_say_that_their_numbers_are_of_a_and_which_weight_the_query_has(browse, populated):
    def strip(screen, **options):
        at = browse(populated, screen, **options)
        (proto,) = (e.proto for e in at.get("bidi_component") if is_of(e.proto, "token_strip"))
        return at, json.loads(proto.json)

    for parts, unit in ((A, "nats of loss"), (BOTH, "nats of loss in A")):
        at, data = strip("prompt", **parts, show="who")
        assert data["unit"] == unit
        options = at.selectbox(key="w_target").options
        assert all(("(A: " in option) == (parts is BOTH) for option in options)
        assert not any("0.0%" in option and "00.0%" not in option for option in options)
    for lock, own in ({}, ""), ({"lock": "3"}, "to itself"):
        assert strip("attention", **A, **lock)[1]["own"] == own


def test_hostile_text_reaches_the_page_as_data_alone(page, populated):
    text = "<img src=x onerror=alert(1)> **b** $x$ \u202e:red[a]"
    at = page(populated, **A, prompt=text, lock="3")
    assert element(at) is not None
    assert "<img" not in said(at)
    (proto,) = (e.proto for e in at.get("bidi_component") if is_of(e.proto, "attention"))
    assert text[:4] not in proto.html_content + proto.css_content + proto.js_content


def test_every_figure_can_be_had_with_its_table_and_command(page, populated):
    at = page(populated, **A, layer="0")
    at.session_state["open_files"] = True
    dashboard.settled(at.run())
    for title in at.selectbox(key="w_files").options:
        at.selectbox(key="w_files").set_value(title)
        dashboard.settled(at.run())
        (chart,) = charts(at)
        assert len(chart.alt) > 20
        command = " ".join(c.value for c in at.code)
        assert 'workbench view "attention?' in command
        assert "layer=0" in command


@pytest.mark.parametrize("name", ["attention", "token_strip"])
def test_the_scripts_of_the_elements_make_no_markup_and_call_nobody(name):
    script = "".join((APP / "elements" / f"{part}.js").read_text() for part in ("common", name))
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(", "fetch(", "XMLHttp",
                 "import(", "http", "localStorage", "DOMParser"):  # fmt: skip
        assert word not in script
    style = (APP / "elements" / f"{name}.css").read_text()
    assert "url(" not in style
    assert "@import" not in style
