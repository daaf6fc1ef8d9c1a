"""The page Attention on every kind of folder: its boxes and sliders do what the picture does, and the address says it all."""

from __future__ import annotations

import json
from pathlib import Path

import dashboard
import pytest
from app_pages import charts, is_of, pictures

from workbench.views import Link, Source, attention

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


def address(at, key):
    value = at.query_params[key]
    return value if isinstance(value, str) else value[0]


def said(at):
    return " ".join(e.value for kind in ("markdown", "info", "warning", "caption") for e in at.get(kind))


def test_the_picture_shows_what_the_address_says(page, populated):
    header = element(page(populated, **BOTH, layer="0", head="1", queries="4-9", keys="1-6", lock="7", scale="one"))
    assert (header["layer"], header["head"], header["lock"], header["whole"]) == (0, 1, 7, True)
    assert [p["title"] for p in header["panels"]] == ["A: ResFormer · s0, step 20", "B: Transformer · s0, step 20"]
    assert header["panels"][0]["queries"] == list(range(4, 11))
    assert header["panels"][1]["keys"] == list(range(1, 8))
    assert header["minus"]


def test_boxes_and_sliders_do_what_the_picture_does(page, populated):
    at = page(populated, **A, layer="1", head="0")
    at.selectbox(key="w_layer").set_value(0)
    at.selectbox(key="w_head").set_value(1)
    at.slider(key="w_queries").set_value((3, 8))
    at.slider(key="w_keys").set_value((0, 5))
    at.query_params["lock"] = "6"
    header = element(dashboard.settled(at.run()))
    assert (header["layer"], header["head"], header["lock"]) == (0, 1, 6)
    assert (header["panels"][0]["queries"][0], header["panels"][0]["queries"][-1]) == (3, 9)
    asked = {key: address(at, key) for key in ("layer", "head", "queries", "keys", "lock")}
    assert asked == {"layer": "0", "head": "1", "queries": "3-8", "keys": "0-5", "lock": "6"}


def test_a_held_query_stays_while_layer_and_step_change(page, populated):
    at = page(populated, **A, lock="5")
    at.selectbox(key="w_layer").set_value(0)
    dashboard.settled(at.run())
    at.select_slider(key="w_step").set_value(8)
    header = element(dashboard.settled(at.run()))
    assert (header["lock"], header["layer"]) == (5, 0)
    assert header["panels"][0]["title"].endswith("step 8")
    assert header["panels"][0]["row"]


@pytest.mark.parametrize(
    "wish",
    [
        {"layer": "99"},
        {"head": "-1"},
        {"queries": "9-2"},
        {"keys": "0-5000"},
        {"keys": "<script>"},
        {"lock": "4711"},
        {"lock": "1e9"},
        {"scale": "<b>"},
        {"stored": "../../etc/passwd"},
        {"stored": "0" * 16},
    ],
)
def test_what_a_link_asks_in_vain_is_ignored_with_a_word(page, populated, wish):
    at = page(populated, **A, **wish)
    assert any("ignored" in i.value for i in at.info)
    first = attention.attention_options(Source(populated), Link("attention", A))
    assert (element(at)["layer"], element(at)["head"]) == (first.layer, first.head)
    assert "<script>" not in said(at)


def test_prompts_that_cannot_be_read_are_explained(page, populated, tmp_path):
    at = page(dashboard.copied(populated, tmp_path / "runs"), **A)
    for text, word in (("", "empty"), ("  ", "empty"), ("a", "1 token long"), ("x y " * 500, "tokens")):
        at.text_area(key="w_prompt").set_value(text)
        dashboard.settled(at.run())
        assert any(word in i.value for i in at.info), text[:9]
        assert element(at) is None


def test_a_model_of_letters_says_that_it_reads_them_twice(page, populated):
    at = page(populated, a="race-svformer-s0", prompt="abc")
    assert "twice" in at.text_area(key="w_prompt").label
    assert len(element(at)["panels"][0]["queries"]) == 7


def test_experiments_that_read_alike_are_told_apart(page, populated, tmp_path):
    folder = dashboard.copied(populated, tmp_path / "runs")
    for name, length in (("short", 64), ("long", 256)):
        dashboard.run(folder, name, "resformer", 0, "text")
        path = folder / name / "run.json"
        known = json.loads(path.read_text())
        path.write_text(json.dumps(known | {"model": known["model"] | {"n_ctx": length}}))
    at = page(folder, a="long")
    shown = at.selectbox(key="w_set").options
    assert len(set(shown)) == len(shown) >= 3  # a browser answers with the words it shows
    at.selectbox(key="w_scale").set_value("one")
    dashboard.settled(at.run())
    assert at.selectbox(key="w_a").value == "long"


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


def test_the_numbers_of_every_head_stand_on_the_page(page, populated):
    at = page(populated, **A, layer="1", head="0")
    table = at.dataframe[0].value
    assert list(table["layer"]) == [0, 0, 1, 1]
    assert "Uniform attention over" in said(at)
    sinks = element(at)["panels"][0]["sink"]
    assert sinks == pytest.approx(table["attention to the first token"].tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", ["empty", "damaged", "half_written", "foreign"])
def test_no_folder_breaks_the_page(page, populated, tmp_path, kind):
    if kind == "damaged":
        folder = dashboard.damage(dashboard.copied(populated, tmp_path / "runs"))
    else:
        folder = tmp_path / "runs"
        folder.mkdir()
        {"half_written": dashboard.half_write, "foreign": dashboard.foreign}.get(kind, Path)(folder)
    at = page(folder)
    assert "Traceback" not in said(at)
    if kind == "empty":
        assert "make demo" in said(at)
    if kind == "foreign":
        assert element(at)["layers"] == 2
    if kind == "damaged":
        at = page(folder, a="text-transformer-s1")
        assert "model.safetensors" in said(at).replace("\\", "")
        assert element(at) is None
        assert element(page(folder, a="text-transformer-s1", step="0"))["layers"] == 2


@pytest.mark.parametrize("name", ["attention", "token_strip"])
def test_the_scripts_of_the_elements_make_no_markup_and_call_nobody(name):
    script = "".join((APP / "elements" / f"{part}.js").read_text() for part in ("common", name))
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(", "fetch(", "XMLHttp",
                 "import(", "http", "localStorage", "DOMParser"):  # fmt: skip
        assert word not in script
    style = (APP / "elements" / f"{name}.css").read_text()
    assert "url(" not in style
    assert "@import" not in style
