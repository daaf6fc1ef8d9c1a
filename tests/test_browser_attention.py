"""The attention picture in a real browser: click, hover, hold, drag, keys, three panels, dark mode, hostile tokens."""

from __future__ import annotations

import re

import browsing
import pytest

pytestmark = pytest.mark.slow
A = "a=text-resformer-s0"
BOTH = f"{A}&compare=1&b=text-resformer-s1"


@pytest.fixture
def at(new_page, server):
    """`at("layer=1")`: the page at that address with its picture drawn; nothing may go wrong in it until the test ends."""
    wrong = []

    def go(query=A, scheme="light", **more):
        page = browsing.watched(new_page(scheme, **more), server, wrong, wrong)
        page.goto(f"{server}/attention?{query}")
        drawn(page)
        return page

    yield go
    assert not wrong


def drawn(page):
    """Wait until the script has run and the picture stands."""
    page.locator(".attention .map canvas").first.wait_for(timeout=60_000)
    page.wait_for_function("!document.querySelector('[data-testid=\"stStatusWidget\"]')", timeout=60_000)
    page.wait_for_timeout(400)


def pointed(page, row, column, rows, columns, panel=0):
    """Where a cell lies in a map, after it has been scrolled to."""
    box = page.locator(".map").nth(panel)
    box.hover(trial=True)  # which scrolls to it, again where it is drawn anew meanwhile
    side = box.bounding_box()["width"]
    return box, {"x": (column + 0.5) * side / columns, "y": (row + 0.5) * side / rows}


def count(page):
    """Tokens of the prompt: those of the strip."""
    return page.locator(".tokens [role=option]").count()


def test_a_click_on_a_head_enlarges_it_and_changes_the_address_and_back_undoes_it(at):
    page = at(f"{A}&layer=1&head=0")
    page.locator('[data-place="head-0-0-1"]').click()
    page.wait_for_url(re.compile("layer=0&head=1"))
    page.get_by_role("heading", name="Layer 0, head 1").wait_for()
    assert page.locator('[data-place="head-0-0-1"]').get_attribute("aria-pressed") == "true"
    page.go_back()
    page.wait_for_url(re.compile("layer=1&head=0"))
    page.get_by_role("heading", name="Layer 1, head 0").wait_for()


def test_hover_reads_tokens_and_weight_and_the_future_is_told(at):
    page = at(f"{A}&layer=0&head=0")
    n = count(page)
    box, where = pointed(page, 0, 0, n, n)
    box.hover(position=where)
    assert page.locator(".attention .readout").inner_text() == "query 0 de → key 0 de: 1.00"
    box, where = pointed(page, 2, 5, n, n)
    box.hover(position=where)
    assert "the future" in page.locator(".attention .readout").inner_text()
    page.mouse.move(5, 5)
    assert "Hover over a cell" in page.locator(".attention .readout").inner_text()


def test_a_held_query_shows_its_row_and_stays_while_the_head_changes(at):
    page = at(f"{A}&layer=0&head=0")
    n = count(page)
    box, where = pointed(page, 6, 2, n, n)
    box.click(position=where)
    page.wait_for_url(re.compile("lock=6"))
    page.get_by_role("heading", name="Query 6").wait_for()
    assert page.locator(".chip").count() == 7
    weights = [float(re.search(r": ([\d.]+)", c.get_attribute("title"))[1]) for c in page.locator(".chip").all()]
    assert sum(weights) == pytest.approx(1, abs=0.005)
    page.locator('[data-place="head-0-1-1"]').click()
    page.get_by_role("heading", name="Layer 1, head 1", exact=True).wait_for()
    assert "lock=6" in page.url
    drawn(page)
    page.get_by_role("button", name="Deselect").click()
    page.wait_for_url(lambda url: "lock=" not in url)
    page.locator(".chip").first.wait_for(state="detached")


def test_a_drag_refines_a_window_and_a_double_click_leaves_it(at):
    page = at(A)
    n = count(page)
    box, start = pointed(page, 6, 1, n, n)
    _, end = pointed(page, 9, 4, n, n)
    corner = box.bounding_box()
    page.mouse.move(corner["x"] + start["x"], corner["y"] + start["y"])
    page.mouse.down()
    page.mouse.move(corner["x"] + 0.5 * (start["x"] + end["x"]), corner["y"] + 0.5 * (start["y"] + end["y"]))
    page.mouse.move(corner["x"] + end["x"], corner["y"] + end["y"])
    assert page.locator(".rectangle").first.is_visible()
    page.mouse.up()
    page.wait_for_url(re.compile("queries=6-9&keys=1-4"))
    drawn(page)
    box, where = pointed(page, 0, 0, 4, 4)
    box.hover(position=where)
    assert page.locator(".attention .readout").inner_text().startswith("query 6 ")
    box.dblclick(position=where)
    page.wait_for_url(lambda url: "queries=" not in url and "keys=" not in url and "lock=" not in url)


def test_keys_alone_choose_a_head_read_cells_hold_and_zoom(at):
    page = at(f"{A}&layer=0&head=0")
    n = count(page)
    page.locator('[data-place="head-0-0-0"]').focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("layer=1&head=1"))
    drawn(page)
    page.locator(".map").first.focus()
    page.keyboard.press("ArrowDown")  # the last row's first cell
    assert page.locator(".attention .readout").inner_text().startswith(f"query {n - 1} ")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    assert re.match(rf"query {n - 2} .* → key 1 ", page.locator(".attention .readout").inner_text())
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(f"lock={n - 2}"))
    drawn(page)
    assert page.evaluate("document.activeElement.shadowRoot.activeElement.className") == "map"  # goes on where it was
    page.keyboard.press("Escape")
    page.wait_for_url(lambda url: "lock=" not in url)
    drawn(page)
    page.keyboard.press("+")
    page.wait_for_url(re.compile("queries="))
    drawn(page)
    page.keyboard.press("0")
    page.wait_for_url(lambda url: "queries=" not in url)


def test_two_models_and_their_difference_share_the_pointer(at):
    page = at(f"{BOTH}&layer=1&head=0&lock=5")
    assert page.locator(".map").count() == 3
    assert page.locator(".heads .grid").count() == 3
    n = count(page)
    box, where = pointed(page, 5, 2, n, n, panel=2)
    box.hover(position=where)
    found = re.search(r"A (\S+) B (\S+) A − B (\S+)", page.locator(".attention .readout").inner_text())
    a, b, minus = (float(v) for v in found.groups())
    assert minus == pytest.approx(a - b, abs=0.0015)
    assert page.locator(".lock:visible").count() == 3
    assert page.locator(".maps .legend").nth(2).inner_text().startswith("−0.")
    page.locator('[data-place="head-2-0-1"]').click()  # a head may be chosen in the difference too
    page.wait_for_url(re.compile("layer=0&head=1"))


def test_models_with_other_tokens_are_read_each_in_its_own(at):
    page = at("a=race-svformer-s0&compare=1&b=text-resformer-s0&prompt=qvz&layer=1&head=0")
    assert page.locator(".map").count() == 2
    box, where = pointed(page, 2, 1, 3, 3, panel=1)  # B reads q, v, z; A reads them twice
    box.hover(position=where)
    assert re.fullmatch(r"query 2 z → key 1 v: B [0-9.]+", page.locator(".attention .readout").inner_text().strip())
    box.click(position=where)
    page.wait_for_timeout(1000)
    assert "lock=" not in page.url
    box, where = pointed(page, 4, 0, 6, 6, panel=0)
    box.click(position=where)
    page.wait_for_url(re.compile("lock=4"))
    page.get_by_role("heading", name="Query 4").wait_for()
    assert page.locator(".chip").count() == 5
    assert all(" and " not in chip.get_attribute("title") for chip in page.locator(".chip").all())
    assert page.locator(".lock:visible").count() == 1


def test_hostile_tokens_are_only_text(at):
    page = at(f"{A}&prompt=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E%3Cb%3E%E2%80%AE%F0%9F%98%80&lock=9")
    assert page.locator(".attention img, .attention b:not(.readout b)").count() == 0
    n = count(page)
    box, where = pointed(page, n - 1, 0, n, n)
    box.hover(position=where)
    assert "key 0 <" in page.locator(".attention .readout").inner_text()
    assert page.locator(".attention script").count() == 0
