"""The page Heads in a real browser: a row chooses a head and stays selected, a passage opens Attention."""

from __future__ import annotations

import browsing
import pytest

pytestmark = pytest.mark.slow
HEADER, ROW = 35, 35  # pixels of a table


def choose(page, table, row):
    """Click on the box at the beginning of a row, and wait until the page has run."""
    frame = page.locator('[data-testid="stDataFrame"]').nth(table)
    frame.scroll_into_view_if_needed()
    frame.click(position={"x": 18, "y": HEADER + ROW * (row + 0.5)})
    page.wait_for_timeout(500)
    browsing.settled(page, 3)


def test_rows_choose_a_head_and_a_passage_that_attention_opens(new_page, server):
    wrong = []
    page = browsing.watched(new_page(height=1000), server, wrong, wrong)
    page.goto(f"{server}/heads?a=race-svformer-s0")
    browsing.settled(page, 3)
    choose(page, 0, 3)
    assert "layer=" in page.url
    assert "head=" in page.url
    shown = page.url
    choose(page, 1, 1)
    assert "prompt=" in page.url
    assert "lock=" in page.url
    page.get_by_text("in Attention, on the selected passage").click()
    page.locator(".attention .map canvas").first.wait_for(timeout=60_000)
    page.locator(".attention", has_text="Query ").first.wait_for()
    page.go_back()
    browsing.settled(page, 3)
    page.get_by_text("on the selected passage").wait_for()
    page.goto(shown)
    browsing.settled(page, 3)
    page.get_by_text("on the current prompt").wait_for()
    assert not wrong
