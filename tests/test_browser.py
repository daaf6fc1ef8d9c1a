"""The dashboard in a real headless Chromium: links, choices, prompts, files, time-lapse, cancelling, two people.

$WORKBENCH_RUNS shows that folder's runs, and pictures of all pages go to $WORKBENCH_SCREENSHOTS (`test_browser_everyone`).
"""

from __future__ import annotations

import json
import re

import pytest
import torch
from browsing import drawn, files_of, pick, settled, typed

from app.elements import common
from workbench.runs.run import Run

pytestmark = pytest.mark.slow
DRAWING = """
async (script) => {
  const { default: element } = await import(URL.createObjectURL(new Blob([script], { type: 'text/javascript' })));
  const parentElement = document.body.appendChild(document.createElement('div')), drawn = [];
  let done = () => 0;
  const draw = async (_, { title, width }) => { drawn.push([title, width]); await new Promise((free) => (done = free)); };
  window.Plotly = { newPlot: (plot, { layout }) => { plot.on = () => 0; plot._fullLayout = {}; return draw(plot, layout); },
                    react: (plot, _, layout) => draw(plot, layout) };
  const rest = (ms) => new Promise((done) => setTimeout(done, ms));
  const wide = (width) => (parentElement.style.width = `${width}px`);
  const show = (title) => {
    const told = { data: [], layout: { title, height: 100 }, frames: null, alt: '', clicked: false };
    element({ data: new TextEncoder().encode(JSON.stringify(told)), parentElement, setTriggerValue: () => 0 });
  };
  wide(900), show('first'), await rest(200), done(), await rest(200);
  show('second'), await rest(200), wide(500), await rest(200), show('third'), done(), await rest(200), done(), await rest(200);
  wide(700), await rest(200);
  return drawn;
}
"""
"""A figure whose plots take as long as they are wanted to: which were drawn, and how wide."""


def next_probability(runs, name, text, step="last"):
    """What a run's model gives its likeliest next token."""
    model = Run.open(runs / name).load(step)
    with torch.no_grad():
        return float(model(torch.tensor([model.tokenizer.encode(text)]))[0, -1].softmax(-1).max())


# ---- pages and links ----


def test_choices_links_back_and_forward_and_a_fresh_browser(opened, server):
    page = opened()
    page.goto(server)
    settled(page, 0)
    before = page.url
    page.get_by_role("link", name="Open yours").click()  # of the page itself
    page.wait_for_url("**show=here")
    settled(page, 0)
    page.locator('[data-testid="stForm"] input').fill("text-resformer-s0")
    page.locator('[data-testid="stForm"] input').press("Enter")
    page.wait_for_url("**a=text-resformer-s0**")
    settled(page, 0)
    page.go_back()
    page.wait_for_url("**show=here")
    page.go_back()
    page.wait_for_url(before)
    page.goto(f"{server}/depth?metric=importance_entropy")
    settled(page)
    before = drawn(page, "figure_layers")
    pick(page, "Measure", "sink mass")
    page.wait_for_url("**metric=sink_mass**")
    page.locator(".st-key-whole_layers h2", has_text="Sink mass").wait_for()
    settled(page)
    page.go_back()
    page.wait_for_url("**metric=importance_entropy**")
    page.locator(".st-key-whole_layers h2", has_text="Importance entropy").wait_for()
    settled(page)
    assert drawn(page, "figure_layers") == before
    page.go_forward()
    page.wait_for_url("**metric=sink_mass**")
    page.locator(".st-key-whole_layers h2", has_text="Sink mass").wait_for()
    settled(page)
    page.locator('[data-testid="stSidebar"]').get_by_role("link", name="Training").click()
    page.wait_for_url("**/training?**metric=sink_mass**")
    settled(page)
    page.locator('[data-testid="stSidebar"]').get_by_role("link", name="Depth").click()
    page.wait_for_url("**/depth?**metric=sink_mass**")
    settled(page)
    page.get_by_text("Compare", exact=True).click()
    page.wait_for_url("**compare=1**")
    settled(page)
    pick(page, "View", "map: layer by head")
    page.wait_for_url("**view=heads**")
    settled(page)
    other = opened(locale="en-US")  # that of another person, with nothing kept
    other.goto(page.url)
    settled(other)
    for p in (page, other):
        p.locator(".st-key-whole_layers h2", has_text="Sink mass").wait_for()
        settled(p)
    same = "document.querySelector('.js-plotly-plot').data.map((t) => [t.name, JSON.stringify(t.z)])"
    assert page.evaluate(same) == other.evaluate(same)


# ---- prompts and edits ----


def test_a_typed_prompt_reaches_the_model_and_the_address_as_one_step_back(opened, server, shown):
    page = opened()
    page.goto(f"{server}/prompt?a=text-resformer-s0")
    settled(page, 2)
    typed(page, "return values <b>now</b>")
    page.wait_for_url("**prompt=return**")
    settled(page, 2)
    assert page.evaluate("document.activeElement.tagName") == "TEXTAREA"
    assert page.locator(".js-plotly-plot b").count() == 0
    found = drawn(page, "figure_predictions", "x")[0]
    assert found == pytest.approx(next_probability(shown, "text-resformer-s0", "return values <b>now</b>"), abs=1e-5)
    typed(page, "x" * 100_000)
    page.wait_for_url("**stored=**")
    page.locator('[data-testid="stAlert"]').first.wait_for()
    settled(page, 0)
    page.go_back()
    page.wait_for_url("**prompt=return**")
    settled(page, 2)
    assert drawn(page, "figure_predictions", "x")[0] == found
    page.go_back()
    page.wait_for_function("!location.search.includes('prompt')")


def test_two_people_on_one_model_get_their_own_numbers(opened, server, shown):
    texts = ["return values", "def mean of len"]
    pages = [opened(**browser) for browser in ({}, {"locale": "en-US"})]
    for page in pages:
        page.goto(f"{server}/prompt?a=text-resformer-s0")
    for page in pages:
        settled(page, 2)
    for page, text in zip(pages, texts, strict=True):  # both at once
        typed(page, text)
    for page, text in zip(pages, texts, strict=True):
        page.wait_for_url("**prompt=**")
        settled(page, 2)
        found = drawn(page, "figure_predictions", "x")[0]
        assert found == pytest.approx(next_probability(shown, "text-resformer-s0", text), abs=1e-5)
    edits = {
        "remove:part=mlp,layer=1": "blocks.1.hook_mlp_out",
        "remove:part=attention,layer=0": "blocks.0.hook_attn_out",
    }
    for page, edit in zip(pages, edits, strict=True):
        page.goto(f"{server}/intervene?a=text-resformer-s0&prompt=return%20values&edits={edit}")
    model = Run.open(shown / "text-resformer-s0").load()
    ids = torch.tensor([model.tokenizer.encode("return values")])

    def losses(*hooks):
        with torch.no_grad():
            logits = model.run_with_hooks(ids, fwd_hooks=list(hooks))
        return -logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]

    for page, point in zip(pages, edits.values(), strict=True):
        settled(page, 3)
        change = losses((point, lambda out, hook: torch.zeros_like(out))) - losses()
        assert drawn(page, "figure_effect") == pytest.approx(change.tolist(), abs=1e-5)


# ---- files, commands, time-lapse ----


def test_a_figure_whose_place_and_numbers_change_together_is_drawn_once(new_page):
    script = "".join((common.HERE / name).read_text() for name in ("common.js", "figure.js"))
    drawn = new_page().evaluate(DRAWING, script)
    assert drawn == [["first", 900], ["second", 900], ["third", 500], ["third", 700]]


def test_a_time_lapse_plays(opened, server):
    page = opened()
    page.goto(f"{server}/prompt?a=text-resformer-s0&prompt=return%20values&show=layers")
    settled(page, 1)
    panel = files_of(page, "lens")
    panel.get_by_text("Play over checkpoints").click()
    panel.locator(".st-key-lapse_lens .slider-container").wait_for()
    settled(page, 2)
    at = "document.querySelector('.st-key-lapse_lens .js-plotly-plot').layout.sliders[0].active"
    colours = (
        "JSON.stringify(Array.from(document.querySelector('.st-key-lapse_lens .js-plotly-plot')._fullData[0].z[0]))"
    )
    before, last = page.evaluate(colours), page.evaluate(at)
    panel.locator(".st-key-lapse_lens .updatemenu-button").first.click()
    page.wait_for_function(f"{at} !== {last}")
    page.wait_for_function(f"{colours} !== {json.dumps(before)}")
    page.wait_for_function(f"{at} === {last}")  # it has played to its end
    assert page.evaluate(colours) == before


def test_long_work_shows_progress_and_can_be_cancelled(opened, server):
    page = opened()
    page.goto(f"{server}/prompt?a=long&prompt=return%20values&show=who")
    settled(page, 1)
    panel = files_of(page, "attribution")
    panel.get_by_text("Play over checkpoints").click()
    panel.get_by_text(re.compile(r"Drawing every checkpoint: \d+ of 60 after \d+ s, about \d+ s left")).wait_for()
    panel.get_by_role("button", name="Cancel").click()
    panel.get_by_text("Drawing every checkpoint: cancelled").wait_for()
    assert panel.locator(".st-key-lapse_attribution").count() == 0
    panel.get_by_role("button", name="Start again").click()
    panel.get_by_text(re.compile(r"Drawing every checkpoint: \d+ of 60 after \d+ s, about \d+ s left")).wait_for()
    panel.get_by_role("button", name="Cancel").click()
    panel.get_by_text("Drawing every checkpoint: cancelled").wait_for()


@pytest.mark.parametrize("visit", ["first", "second"])
def test_a_test_finds_nothing_that_another_stored_in_the_browser(new_page, server, visit):
    page = new_page()
    page.goto(f"{server}/_stcore/health")
    stored = "[localStorage.length, sessionStorage.length, document.cookie.includes('theme')]"
    assert page.evaluate(stored) == [0, 0, False], visit
    page.evaluate("localStorage.kept = sessionStorage.kept = 'a view'; document.cookie = 'theme=dark'")
    assert page.evaluate(stored) == [1, 1, True]


def test_what_got_into_a_page_could_load_and_tell_nothing_elsewhere(new_page, server):
    page = new_page()
    page.goto(f"{server}/?show=here")
    settled(page, 0)
    refused = page.evaluate(
        """() => new Promise((done) => {
            const seen = [];
            document.addEventListener('securitypolicyviolation', (e) => {
                seen.push(e.effectiveDirective);
                if (seen.length === 2) done(seen.sort());
            });
            document.body.append(Object.assign(new Image(), {src: 'http://localhost:9/x.png'}));
            fetch('http://localhost:9/y').catch(() => null);
            setTimeout(() => done(seen), 10000);
        })"""
    )
    assert refused == ["connect-src", "img-src"]
