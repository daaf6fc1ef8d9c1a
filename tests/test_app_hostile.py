"""Prompts and addresses of every kind, hostile ones too: text stays text, and models come from the folder alone."""

from __future__ import annotations

import re
from pathlib import Path

import dashboard
import pytest
from app_pages import address, charts, ignored, said

from workbench.runs.run import Run
from workbench.views.page_links import PAGES, SELECTION

HOSTILE = {
    "markup": "<script>alert(1)</script>",
    "path": "../../etc/passwd",
    "long": "x" * 10_000,
    "nan": "NaN",
    "negative": "-1",
    "huge": "9" * 400,
    "empty": "",
    "control": "a\x00\x1b[31m\u202e\u200b;=,:-",
}


@pytest.fixture
def page(browse):
    return browse


# ---- prompts ----


@pytest.mark.slow
@pytest.mark.parametrize("name", ["intervene"])
def test_prompts_that_cannot_be_read_are_explained(page, populated, tmp_path, name):
    at = page(dashboard.copied(populated, tmp_path / "runs"), name)
    assert charts(at)
    for text, word in (("   ", "empty"), ("x" * 100_000, "tokens"), ("def " * 2000, "tokens")):
        at.text_area(key="w_prompt").set_value(text).run()
        assert not at.exception
        assert any(word in i.value for i in at.info), text[:9]
        assert not charts(at)


TEXTS = {
    "markup": "<script>alert(1)</script> [x](javascript:alert(1)) $\\alpha$ :red[a] <b>",
    "control": "שלום \u202eabc\u202c عربى 👩‍👩‍👧 🏳️‍🌈 é a\x00\x07\x1b[31mb\r\nc\u200b",
}


@pytest.mark.parametrize(
    ("name", "part", "kind"),
    [("prompt", "next", "markup"), ("prompt", "layers", "control"), ("prompt", "who", "markup"), ("intervene", "effect", "control")],
)  # fmt: skip
def test_hostile_text_stays_text(page, populated, name, part, kind):
    text = TEXTS[kind]
    at = page(populated, name, prompt=text, other=text, target="0", show=part)
    assert len(charts(at)) == {"next": 2, "layers": 1, "who": 1, "effect": 2}[part]
    specs = " ".join(c.spec for c in charts(at))
    shown = [m.value for m in (*at.markdown, *at.info, *at.caption)]
    assert "<script" not in specs + " ".join(shown)
    assert not re.search(r"\d:<b|&lt;<|\]\(javascript", specs)
    assert not any(re.search(r"(?<!\\):red\[|\]\(javascript", m) for m in shown)


def test_repeated_token_models_read_letters_twice(page, populated):
    at = page(populated, "prompt", a="race-svformer-s0", prompt="abc")
    assert "5:c" in charts(at)[1].spec
    assert "6:" not in charts(at)[1].spec
    at.text_area(key="w_prompt").set_value("a€b").run()
    assert any("€" in i.value for i in at.info)


def test_long_prompts_are_stored_and_linked_by_hash(page, populated, tmp_path):
    folder = dashboard.copied(populated, tmp_path / "runs")
    text = "def f(x): return x\n" * 12
    at = page(folder, "prompt")
    at.text_area(key="w_prompt").set_value(text).run()
    name = address(at, "stored")
    assert "prompt" not in at.query_params
    assert (folder / ".prompts" / f"{name}.txt").read_text() == text
    assert page(folder, "prompt", stored=name).text_area(key="w_prompt").value == text


# ---- hostile addresses ----


def keys(name):
    return (*SELECTION, *PAGES[name].keys)


def turned(name, turn):
    """Every key of a page with a hostile value, another one for each; `len(HOSTILE)` turns give each key each value."""
    values = list(HOSTILE.values())
    return {key: values[(turn + i) % len(values)] for i, key in enumerate((*keys(name), "unknown"))}


BOTH, MARKUP = {"compare": "1"}, {"prompt": HOSTILE["markup"]}
LOOKS = [
    ("start", {"show": "verdicts"}), ("start", {"show": "demo"}), ("start", {"show": "model"} | BOTH),
    ("training", {"show": "gradients"}), ("training", {"show": "coefficients"}), ("training", {"show": "loss"} | BOTH),
    ("depth", BOTH), ("attention", BOTH | MARKUP), ("heads", BOTH),
    ("prompt", {"show": "layers"} | MARKUP), ("prompt", {"show": "who"} | MARKUP), ("prompt", {"show": "carries"} | BOTH | MARKUP),
    ("intervene", BOTH | MARKUP),
]  # fmt: skip
"""Pages, and what must be right there for the keys of one part to be read at all; comparisons read those of both models."""


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("name", "right", "turn"),
    [
        *(
            pytest.param(
                name, right, turn, marks=[] if right.keys() >= BOTH.keys() and name != "intervene" else pytest.mark.slow
            )
            for turn, (name, right) in enumerate(LOOKS)
        )
    ],
)
def test_hostile_values_of_every_key_change_nothing(page, populated, name, right, turn):
    at = page(populated, name, **turned(name, turn) | right)
    shown = said(at) + " ".join(c.spec for c in charts(at))
    assert "Traceback" not in shown
    assert not re.search(r"(?<!\\)<script", shown)
    assert "root:" not in shown
    assert any("unknown options" in i.value for i in at.info)


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_every_kind_of_widget_falls_back_to_its_default_with_a_word(value, scanned_once):
    from streamlit.testing.v1 import AppTest

    def script():
        import streamlit as st

        from app import url_widgets

        st.session_state["found"] = [
            url_widgets.choose("Box", "layer", [0, 1], 1), url_widgets.choose("Slider", "step", [0, 8, 20], 20, slider=True),
            url_widgets.segments("Part", "show", ["one", "two"], "two"), url_widgets.choose_many("Models", "models", ["a", "b"]),
            url_widgets.range_slider("Window", "keys", 9), url_widgets.toggle("Compare", "compare"),
            url_widgets.text_line("Other", "other"),
        ]  # fmt: skip

    at = AppTest.from_function(script, default_timeout=20)
    for key in ("layer", "step", "show", "models", "keys", "compare", "other"):
        at.query_params[key] = value
    at.run()
    assert not at.exception
    *chosen, text = at.session_state["found"]
    assert chosen == [1, 20, "two", ["a", "b"] if value else [], (0, 8), False]
    assert text == value[:2000]
    words = {told.partition("“")[2].partition("”")[0] for told in at.session_state["told"]}
    assert words == {"box", "slider", "part", "window", *(["models"] if value else [])}


def test_models_come_from_the_listing_of_the_folder_alone(page, populated, tmp_path, monkeypatch):
    secret = dashboard.copied(populated / "text-resformer-s0", tmp_path / "elsewhere" / "secret")
    folder = dashboard.copied(populated, tmp_path / "runs")
    opened = []
    monkeypatch.setattr(
        Run, "open", classmethod(lambda cls, p, real=Run.open.__func__: opened.append(str(p)) or real(cls, p))
    )
    paths = ["../elsewhere/secret", "elsewhere/secret", str(secret), "..%2Felsewhere%2Fsecret"]
    for turn in range(len(paths)):
        a, b, group, stored = paths[turn:] + paths[:turn]
        at = page(folder, "prompt", a=a, b=b, compare="1", set=group, stored=stored)
        assert len(ignored(at)) == 4
    assert opened
    assert all(Path(p).resolve().parent == folder.resolve() for p in opened)
