"""A researcher's tasks on the models that ship, in a real browser: what is asked for is there in three clicks at most."""

from __future__ import annotations

import shutil
from urllib.parse import parse_qs, quote, urlsplit

import browsing
import pytest
from browsing import settled
from own_loop import GPT, PLAIN, loop

from workbench import Recorder

pytestmark = pytest.mark.slow
PROMPT = "def mean(values):\n    return sum(values) / len(values)"
ON = f"prompt={quote(PROMPT)}"
MOST = 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """An empty folder, which shows what ships."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def server(runs):
    with browsing.served(runs) as url:
        yield url


@pytest.fixture
def at(new_page, server):
    """`at(address)`: the page, and what clicks there and counts."""
    page, clicks = new_page(height=800), []
    page.set_default_timeout(120_000)  # the sharpest passages are looked for in a whole sample of text

    def go(address, figures=1):
        page.goto(f"{server}/{address}")
        settled(page, figures)

        def click(found, **how):
            clicks.append(found)
            assert len(clicks) <= MOST, "too many clicks"
            found.click(**how)
            page.wait_for_timeout(300)
            settled(page, 0)

        return page, click

    return go


def _cell(page, box, share):
    """A place on a map's highest row, right of a share of its width."""
    whole = page.locator(".st-key-figure_patching .wb-figure").bounding_box()
    return {"x": box["x"] - whole["x"] + share * box["width"] + 4, "y": box["y"] - whole["y"] + 4}


def state(page):
    return {key: values[0] for key, values in parse_qs(urlsplit(page.url).query).items()}


def test_what_a_head_reads_is_one_click_on_a_token(at):
    page, click = at(f"attention?{ON}", 0)
    click(page.locator(".tokens [role=option]").nth(12))
    assert state(page)["lock"] == "12"
    page.locator(".attention .held").wait_for()


def test_how_a_head_came_to_be_is_one_click_on_its_point(at):
    page, click = at("heads", 3)
    click(
        page.locator(".st-key-figure_ranking .scatterlayer .points path").nth(3), force=True
    )  # the figure catches it above the point
    head = state(page)
    assert {"a", "layer", "head"} <= head.keys()
    words = f"L{head['layer']} H{head['head']}: "
    page.locator(".st-key-whole_history h2", has_text=words).wait_for()


def test_a_path_is_cut_in_three_clicks(at):
    page, click = at(f"intervene?{ON}")
    click(page.locator('[data-testid="stSelectbox"]:has-text("Edit") input').first)
    click(page.get_by_role("option", name="cut attention to the first token", exact=True))
    click(page.get_by_role("button", name="Apply"))
    assert state(page)["edits"] == "sink"
    page.locator("h2", has_text="Loss change per token").wait_for()


def test_the_shortcut_of_all_layers_is_set_in_one_click(at):
    page, click = at(f"intervene?a=models-resformer-s0&{ON}")
    slider = page.locator(".st-key-edit_value")
    box, thumb = slider.bounding_box(), slider.get_by_role("slider").bounding_box()
    click(slider, position={"x": box["width"] / 2, "y": thumb["y"] + thumb["height"] / 2 - box["y"]})
    assert state(page)["kind"] == "coefficient:value=0"
    page.locator("h2", has_text="Loss change per token").wait_for()


def test_names_of_tokens_have_room_and_rows_keep_theirs_on_a_phone(at):
    page, _ = at(f"prompt?{ON}")
    page.set_viewport_size({"width": 390, "height": 900})
    axis = "document.querySelector('.st-key-figure_surprise .js-plotly-plot')._fullLayout.xaxis"
    page.wait_for_function(f"{axis}._length < 300 && 10 * {axis}.tickvals.length < {axis}._length")
    page, _ = at(f"prompt?{ON}&show=layers")
    names = page.locator(".st-key-figure_lens .names span")
    names.filter(has_text="embedding").wait_for()  # the last position is in sight, the axis is not
    assert names.count() == 7
    margin = page.locator(".st-key-figure_lens .names div").bounding_box()
    left, right = margin["x"], margin["x"] + margin["width"]
    boxes = [name.bounding_box() for name in names.all()]
    assert all(left <= box["x"] and box["x"] + box["width"] <= right for box in boxes), "no name lies over a cell"
    assert page.locator(".st-key-figure_lens .names b", has_text="after layer").count() == 1
    begins = """() => {
      const plot = document.querySelector('.st-key-figure_lens .js-plotly-plot'), { xaxis: x } = plot._fullLayout;
      const right = document.querySelector('.st-key-figure_lens .names div')?.getBoundingClientRect().right;
      const from = x.p2r(right - plot.getBoundingClientRect().left - x._offset) + 0.5;
      return Math.abs(from - Math.round(from)) < 0.05;
    }"""
    page.wait_for_function(begins)  # the first cell beside the names is in sight whole
    for width in (1280, 768):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(f"document.querySelector('.st-key-figure_lens .wb-figure').clientWidth > {width - 300}")
    page.wait_for_function(begins)


def test_two_prompts_are_patched_in_one_click_and_one_of_the_cells_in_another(at):
    first, second = quote("self.name = name\nself."), quote("self.path = path\nself.")
    page, click = at(f"intervene?prompt={first}&other={second}")
    click(page.get_by_role("radio", name="Patching"))
    settled(page)
    assert page.locator(".st-key-whole_patching", has_text="fully restored").count() == 1
    box = page.locator(".st-key-figure_patching .nsewdrag").bounding_box()
    tokens = page.locator(".tokens [role=option]")
    click(page.locator(".st-key-figure_patching .wb-figure"), force=True, position=_cell(page, box, 2 / tokens.count()))
    assert {"layer": "6", "position": "2"}.items() <= state(page).items(), "the highest row, the third token"
    assert tokens.nth(2).get_attribute("aria-selected") == "true"
    page.locator(".st-key-whole_patched", has_text="layer 6 at token 2").wait_for()


def test_a_recording_grows_on_its_page_while_a_loop_goes_on(at, runs):
    model = GPT()
    recorder = Recorder(model, 1, runs / "mine", quantities=PLAIN)
    try:
        loop(model, recorder, 3)
        recorder.folder.flush()
        page, _ = at("training?set=recorded")
        page.evaluate("window.same = true")
        page.get_by_text("Being written: mine").wait_for()
        loop(model, recorder, 7, first=3)
        recorder.folder.flush()
        curve = "document.querySelector('.st-key-figure_train_loss .js-plotly-plot')._fullData.find((t) => t.mode === 'lines+markers')"
        page.wait_for_function(f"{curve}.x.length >= 7")
        recorder.close()
        page.get_by_text("Being written").wait_for(state="hidden")
        assert page.evaluate("window.same"), "the page is the one that was opened"
    finally:
        recorder.close()
        shutil.rmtree(runs / "mine")


def test_a_value_is_followed_in_two_clicks(at):
    page, click = at(f"prompt?{ON}", 2)
    click(page.get_by_role("radio", name="From score to logit"))
    click(page.locator(".tokens [role=option]").nth(3))
    page.locator("h2", has_text="From the score of").wait_for()
    assert state(page)["position"] == "3"


def test_a_document_behind_a_number_is_read_in_three_clicks(at):
    page, click = at("depth?metric=loss&a=models-resformer-s0")
    click(page.get_by_text("Documents behind a number"))
    page.locator("h2", has_text=": documents").wait_for()
    click(page.locator(".st-key-documents .dvn-scroller"), position={"x": 15, "y": 60})  # the first row
    click(page.get_by_text("Selected document in Attention"))
    assert urlsplit(page.url).path == "/attention"
    assert len(state(page)["prompt"]) > 50
    page.locator(".attention .map canvas").first.wait_for()


def test_a_figure_for_a_paper_takes_two_clicks(at, tmp_path):
    page, click = at("depth?metric=token_identity_share&site=own_v")
    click(page.get_by_role("button", name="Figure").first)
    with page.expect_download() as file:
        click(page.get_by_role("button", name="SVG"))
    file.value.save_as(tmp_path / "figure.svg")
    drawn = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert "Token identity share" in drawn
    assert "rgb(255, 255, 255)" in drawn, "on white"


def test_the_view_is_sent_in_one_click_with_every_choice(at, server):
    page, click = at("depth")
    click(page.get_by_role("button", name="Share"))
    link = page.locator('[data-testid="stPopoverBody"] [data-testid="stCode"]').first.inner_text()
    assert link.startswith(f"{server}/depth?")
    assert {"set", "a", "step", "metric", "models", "view"} <= set(parse_qs(urlsplit(link).query))
