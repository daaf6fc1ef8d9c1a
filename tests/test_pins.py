"""Kept views: a file beside the runs, redrawn from their links, and taken along as a page or a notebook."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex

import pytest
from app_pages import charts, said

from workbench.errors import WorkbenchError
from workbench.views import Link, Source, pins

DEPTH = Link.parse("depth?metric=importance_entropy&models=resformer&seed=0")


@pytest.fixture
def folder(populated, tmp_path):
    """A folder of its own: pins are written beside the runs."""
    (tmp_path / "runs").mkdir()
    for run in populated.iterdir():
        (tmp_path / "runs" / run.name).symlink_to(run)
    return tmp_path / "runs"


def test_a_pin_is_kept_once_redrawn_and_let_go(folder):
    assert pins.pins(folder) == []
    pins.add(folder, DEPTH, "layers", "first")
    pins.add(folder, DEPTH, "layers", "it falls with depth")
    (pin,) = pins.pins(folder)
    assert (pin.link, pin.view, pin.note) == (str(DEPTH), "layers", "it falls with depth")
    assert len(pin.draw(Source(folder)).table)
    pins.remove(folder, pin)
    assert pins.pins(folder) == []


def test_tags_of_runs_and_of_notes_are_kept_beside_one_another(tmp_path):
    pins.tag_run(tmp_path, "one", "#baseline  seed baseline")
    pins.add(tmp_path, DEPTH, "layers", "for the #paper, not the #talk-2")
    pins.tag_run(tmp_path, "two", "odd")
    assert pins.run_tags(tmp_path) == {"one": "baseline seed", "two": "odd"}
    pins.tag_run(tmp_path, "two", " ")
    assert pins.run_tags(tmp_path) == {"one": "baseline seed"}
    (pin,) = pins.pins(tmp_path)
    assert pins.tags_of(pin) == {"paper", "talk-2"}


def test_what_cannot_be_drawn_any_more_is_said_and_the_rest_stands(folder):
    pins.add(folder, DEPTH, "layers", "<b>bold</b> claim")
    pins.add(folder, Link.parse("depth?metric=gone"), "layers")
    page = pins.as_html(Source(folder), pins.pins(folder))
    assert page.count("<figure") == 1
    assert "&lt;b&gt;bold&lt;/b&gt; claim" in page
    assert "Not drawn" in page


@pytest.mark.parametrize("text", ['{"pins": 3}', '{"pins": [{"link": 1, "view": "x"}]}', "{"])
def test_a_damaged_file_of_pins_is_refused_by_name(folder, text):
    (folder / pins.FILE).write_text(text)
    with pytest.raises(WorkbenchError, match="pins"):
        pins.pins(folder)
    with pytest.raises(WorkbenchError, match="pins"):
        pins.add(folder, DEPTH, "layers")
    assert (folder / pins.FILE).read_text() == text


@pytest.mark.slow
def test_the_menu_of_a_figure_keeps_it_and_the_page_shows_it(folder, browse):
    at = browse(folder, "depth", metric="importance_entropy")
    at.session_state["open_layers"] = True
    at.run()
    at.text_input(key="note_layers").set_value("look here")
    at.button(key="keep_layers").click().run()
    assert not at.exception
    (pin,) = pins.pins(folder)
    assert pin.note == "look here"
    assert "metric=importance_entropy" in pin.link
    at = browse(folder, "kept")
    assert not at.exception
    assert "look here" in said(at)
    assert len(charts(at)) == 1
    pins.add(folder, Link.parse("start?show=model&a=text-resformer-s0"), "concentration", "")
    assert re.search(r"\d\s% on ", said(browse(folder, "kept"))), "sentences are typeset as beside their figures"
    (folder / pins.FILE).write_text("{")
    assert "cannot be read" in said(browse(folder, "kept"))


HOSTILE = (
    pins.Pin("start", "![leak](http://127.0.0.1:9/x.png) [click](http://example.org)", "", "[k](http://example.org)"),
    pins.Pin('prompt?prompt=x" ; touch x ; echo "$(id)`id`', "lens", "<img src=x>\n# heading\n`code`"),
    pins.Pin("--help", "lens\n\n# heading", "$x$"),
)


def test_what_pins_hold_is_text_in_notes_pages_and_shells(tmp_path):
    notes = pins.markdown(tmp_path, HOSTILE)
    outside = [line for line in notes.splitlines() if not line.startswith("      ")]
    assert not [line for line in outside if re.search(r"(?<!\\)[\[<`$]", line)]
    assert [line for line in outside if line.startswith("#")] == ["# Kept views"]
    commands = [shlex.split(line) for line in notes.splitlines() if line.startswith("      ")]
    assert [command[:2] for command in commands] == [["workbench", "view"]] * 3
    assert HOSTILE[1].link in commands[1]
    assert all(f"--runs={tmp_path}" in command for command in commands), "not the runs of the working directory"
    assert commands[2][-2:] == ["--", "--help"]
    cells = [c["source"] for c in json.loads(pins.notebook(tmp_path, HOSTILE))["cells"] if c["cell_type"] == "markdown"]
    assert not [cell for cell in cells if re.search(r"(?<!\\)[\[<`$]", cell)]
    page = pins.as_html(Source(tmp_path), HOSTILE)
    assert "<img src=x>" not in page


def test_the_page_of_pins_shows_hostile_ones_as_text(folder, browse):
    (folder / pins.FILE).write_text(json.dumps({"pins": [dataclasses.asdict(pin) for pin in HOSTILE]}))
    at = browse(folder, "kept")
    assert not at.exception
    told = [element.value for element in (*at.markdown, *at.caption, *at.info)]
    assert any("leak" in text for text in told)
    assert not [text for text in told if re.search(r"(?<!\\)\]\(|(?<!\\)<img", text)]
