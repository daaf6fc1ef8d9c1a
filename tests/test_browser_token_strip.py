"""The token strip in a real browser: click, keys, hover across elements, long prompts, hostile tokens, and going away."""

from __future__ import annotations

import re

import browsing
import numpy as np
import pytest

from app.elements import common, token_strip

pytestmark = pytest.mark.slow
A, TEXT = "a=text-resformer-s0", "prompt=return%20sum(values)"
HEARD = "window.heard = []; document.addEventListener('workbench:token', (e) => window.heard.push(e.detail))"
ALONE = """
async ([script, style]) => {
  const { default: element } = await import(URL.createObjectURL(new Blob([script], { type: 'text/javascript' })));
  const place = () => document.body.appendChild(document.createElement('div')).attachShadow({ mode: 'open' });
  const strips = (window.strips = {});
  window.told = [];
  window.show = (data) => {
    if (!strips[data.key]) (strips[data.key] = place()).appendChild(document.createElement('style')).textContent = style;
    const parentElement = strips[data.key];
    const watch = new MutationObserver(() => 0);
    watch.observe(parentElement, { subtree: true, childList: true, attributes: true });
    window.leave = element({ data, parentElement, setTriggerValue: (_, wish) => window.told.push([data.key, wish.token]) });
    return new Set(watch.takeRecords().map((m) => m.target).filter((e) => e.matches?.('.token'))).size;
  };
}
"""
"""The element on an empty page: `show(data)` gives how many tokens it touched; `leave()` is what it left to be called when it goes."""


@pytest.fixture
def at(new_page, server):
    """`at("prompt?...")`: that page, once a token can be chosen or pointed at; nothing may go wrong in it until the test ends."""
    wrong = []

    def go(address):
        page = browsing.watched(new_page(), server, wrong, wrong)
        page.goto(f"{server}/{address}")
        page.locator(".token.chosen, .map canvas").first.wait_for()
        browsing.settled(page, 0)
        return page

    yield go
    assert not wrong


@pytest.fixture
def alone(browser):
    """A page with nothing but strips, as `ALONE` makes them."""
    page, wrong = browser.new_page(viewport={"width": 900, "height": 600}), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    script, style = ((common.HERE / name).read_text() for name in ("token_strip.js", "token_strip.css"))
    page.evaluate(ALONE, [(common.HERE / "common.js").read_text() + script, style])
    yield page
    page.close()
    assert not wrong


def test_clicks_keys_and_cells_of_figures_choose_a_token_and_back_undoes_it(at):
    page = at(f"prompt?{A}&{TEXT}&position=2&show=layers&target=5")
    tokens = page.locator(".token")
    assert tokens.nth(2).get_attribute("aria-selected") == "true"
    tokens.nth(4).click()
    page.wait_for_url(re.compile("position=4"))
    assert "target=" not in page.url, "a likely token after another one"
    browsing.settled(page, 1)
    page.go_back()
    page.wait_for_url(re.compile("position=2.*target=5|target=5.*position=2"))
    page.locator(".token.chosen", has_text=tokens.nth(2).inner_text()).wait_for()
    tokens.nth(2).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "position=2" in page.url, "nothing is asked before the keys rest"
    page.wait_for_url(re.compile("position=5"))
    browsing.settled(page, 1)
    assert page.evaluate("document.activeElement.shadowRoot.activeElement.dataset.i") == "5", "the focus stays"
    assert page.locator('.token[tabindex="0"]').count() == 1
    page.keyboard.press("Home")
    page.wait_for_url(re.compile("position=0"))
    browsing.settled(page, 1)
    page.go_back()
    page.wait_for_url(re.compile("position=5"))  # not the ones that were passed
    browsing.settled(page, 1)
    figure, mark = page.locator(".wb-figure"), page.locator(".wb-figure .mark:visible")
    figure.evaluate("(e) => { e.first = true }")
    for _ in range(60):  # until the strip and the figure have their final width
        page.mouse.move(0, 0)
        tokens.nth(3).hover()
        mark.first.wait_for()
        box = figure.locator(".nsewdrag").bounding_box()
        each, marked = box["width"] / tokens.count(), mark.bounding_box()
        is_marked = marked["x"] == pytest.approx(box["x"] + 3 * each, abs=0.5)
        if is_marked:
            break
        page.wait_for_timeout(200)
    assert is_marked, f"the map marks what the strip points at: {marked} of {tokens.count()} in {box}"
    assert marked["width"] == pytest.approx(each, abs=0.5)
    page.mouse.move(box["x"] + 4.5 * each, box["y"] + 5)
    page.locator(".token.pointed", has_text=tokens.nth(4).inner_text()).wait_for()
    page.mouse.click(box["x"] + 4.5 * each, box["y"] + 5)
    page.wait_for_url(re.compile("position=4"))
    browsing.settled(page, 1)
    assert tokens.nth(4).get_attribute("aria-selected") == "true"
    assert figure.evaluate("(e) => e.first"), "the figure stays while its numbers change"


def test_a_token_pointed_at_elsewhere_is_marked_in_the_attention_map_which_tells_its_own(at):
    page = at(f"attention?{A}&{TEXT}&layer=0&head=0&queries=2-6&keys=0-4")
    page.evaluate(HEARD)
    point = (
        "(index) => document.dispatchEvent(new CustomEvent('workbench:token', { detail: { index, from: 'position' } }))"
    )
    bands, box = page.locator(".map .band"), page.locator(".map").first
    page.evaluate(point, 3)
    side = box.bounding_box()
    row, column = (bands.nth(i).bounding_box() for i in range(2))
    assert row["y"] - side["y"] == pytest.approx(side["height"] * 1 / 5, abs=1), "query 3 is the second row shown"
    assert column["x"] - side["x"] == pytest.approx(side["width"] * 3 / 5, abs=1)
    page.evaluate(point, 5)
    assert (bands.nth(0).is_visible(), bands.nth(1).is_visible()) == (True, False), "no such key is shown"
    page.evaluate(point, None)
    assert page.locator(".map .band:visible").count() == 0
    page.evaluate("window.heard = []")
    box.hover(position={"x": 1.5 * side["width"] / 5, "y": 2.5 * side["height"] / 5})
    assert page.evaluate("window.heard") == [{"index": 4, "other": 1, "from": "attention"}]
    page.evaluate(point, 3)
    page.evaluate(point, None)
    assert page.locator(".map .band:visible").count() == 2, "its own cell again"
    page.mouse.move(5, 5)
    assert page.evaluate("window.heard.at(-1)") == {"index": None, "other": None, "from": "attention"}


def test_a_long_prompt_is_laid_out_once_and_shows_the_chosen_token(alone):
    """A layout for each of 1,700 tokens, or all of them touched for a choice, is slow on any machine."""
    wire = alone.context.new_cdp_session(alone)
    wire.send("Performance.enable")

    def layouts():
        return next(m["value"] for m in wire.send("Performance.getMetrics")["metrics"] if m["name"] == "LayoutCount")

    rng = np.random.default_rng(0)
    tokens = [f"·token{i}" if i % 40 else "↵" for i in range(1700)]
    data = token_strip.packed_token_strip(
        tokens, key="p", label="x", colours=rng.gamma(1.0, 2.0, 1700), unit="nats", chosen=1500
    )
    before = layouts()
    alone.evaluate("show", data)
    assert layouts() - before <= 4
    assert alone.evaluate("show", data | {"chosen": 7}) == 2
    assert alone.locator(".strip").bounding_box()["height"] <= 132
    for i in (7, 1500):
        alone.evaluate("show", data | {"chosen": i})
        chip, box = (alone.locator(place).bounding_box() for place in (".token.chosen", ".tokens"))
        assert box["y"] <= chip["y"] <= chip["y"] + chip["height"] <= box["y"] + box["height"]


def test_strips_hear_each_other_while_they_are_there_and_tokens_are_only_text(alone):
    hostile = ["<img src=x onerror=e()>", "</span><b>", "\u202e\U0001f600", "&lt;", "x" * 60]
    first = token_strip.packed_token_strip(
        hostile, key="a", label="x", colours=[1, 2, 3, np.nan, 5], unit="nats", chosen=4
    )
    other = token_strip.packed_token_strip(hostile[2:], key="b", label="x", chosen=4, first=2, none=True)
    alone.evaluate("show", first)
    alone.evaluate("show", other)
    assert alone.locator(".token").all_inner_texts()[:4] == hostile[:4]
    assert alone.locator("img, b").count() == 0
    assert alone.locator(".token").nth(4).get_attribute("title") == f"position 4\n{'x' * 60}\n5.00 nats"
    alone.evaluate(HEARD)
    alone.locator(".token").nth(3).hover()
    assert alone.locator(".token.pointed").all_inner_texts() == ["&lt;", "&lt;"]
    assert alone.evaluate("window.heard.map((e) => [e.index, e.from])") == [[3, "a"]]
    alone.locator(".token").nth(7).click()  # the chosen one of the second, which may have none
    alone.locator(".token").nth(5).click()
    alone.locator(".token").nth(4).click()  # the chosen one of the first
    assert alone.evaluate("window.told") == [["b", None], ["b", 2]]
    alone.evaluate("window.leave()")  # of a call that another overtook: it stands there still
    alone.locator(".token").nth(2).hover()
    assert alone.locator(".token.pointed").count() == 2
    alone.evaluate("window.strips.b.host.remove(), window.leave()")
    alone.locator(".token").nth(3).hover()
    assert alone.evaluate("window.strips.b.querySelector('.pointed').textContent") != "&lt;", "it hears no more"
