"""Generated pages are up to date, and the repository speaks of itself alone."""

from pathlib import Path

import pytest

from workbench.docs import PAGES

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", PAGES)
def test_generated_page_is_current(name):
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs`"


def test_constraints_record_no_addresses_and_one_torch():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in lines
    assert not [line for line in lines if "/" in line or "@" in line]
