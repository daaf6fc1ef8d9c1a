"""Generated pages are up to date, and the repository speaks of itself alone."""

from pathlib import Path

import generate

ROOT = Path(__file__).parent.parent


def test_generated_files_are_current():
    stale = [path.name for path, content in generate.pages().items() if path.read_text(encoding="utf-8") != content]
    assert not stale, "run `make docs`"


def test_constraints_record_no_addresses_and_one_torch():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in lines
    assert not [line for line in lines if "/" in line or "@" in line]


def test_the_readme_shows_an_effect_with_its_control():
    """Queries and keys are a matter of the token as much as deep values are."""
    text = " ".join((ROOT / "README.md").read_text().split())
    effect = text.partition("3. **What deep values carry.**")[2].partition("What such models cannot show")[0]
    assert "The control: queries and keys are 93 to 94 % token identity too" in effect
    assert "stays unresolved" in effect
