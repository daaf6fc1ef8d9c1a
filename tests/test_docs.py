"""Generated pages are up to date, and the repository speaks of itself alone."""

from pathlib import Path

import generate
import pytest

ROOT = Path(__file__).parent.parent


def test_generated_files_are_current():
    stale = [path.name for path, content in generate.pages().items() if path.read_text(encoding="utf-8") != content]
    assert not stale, "run `make docs`"


@pytest.mark.slow
def test_the_page_of_evidence_says_what_the_shipped_runs_say():
    ((path, content),) = generate.of_evidence().items()
    assert path.read_text(encoding="utf-8") == content, "run `make docs`"
    assert content.count("\n- Here: ") >= 20, "claims with a verdict"


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
