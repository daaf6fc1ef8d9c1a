"""axe-core finds nothing wrong on any page, by day and by night. It is not part of the repository: `$WORKBENCH_AXE` is its file."""

from __future__ import annotations

import os
from pathlib import Path

import browsing
import pytest
from browsing import settled

pytestmark = pytest.mark.slow
AXE = os.environ.get("WORKBENCH_AXE", "")
PAGES = (
    "", "?show=model", "?show=here", "?show=verdicts", "training", "training?show=pace", "depth", "depth?metric=loss&behind=1",
    "attention", "heads", "prompt", "prompt?show=layers", "prompt?show=follow",
    "intervene?edits=sink&kind=values:how=shuffle", "intervene?show=patching&prompt=self.name&other=self.path",
    "maps", "differences?compare=1", "kept",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """What ships, as an empty folder shows it."""
    with browsing.served(tmp_path_factory.mktemp("runs")) as url:
        yield url


@pytest.mark.skipif(not AXE, reason="axe-core is not here: `npm pack axe-core`, then WORKBENCH_AXE=package/axe.min.js")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation_on_any_page(new_page, server, scheme):
    page, script, found = new_page(scheme), Path(AXE).read_text(encoding="utf-8"), []
    page.set_default_timeout(120_000)
    for address in PAGES:
        page.goto(f"{server}/{address}")
        settled(page, 0)
        page.evaluate(script)
        wrong = page.evaluate(
            "axe.run(document).then((r) => r.violations.map((v) => [v.id, v.nodes[0].html.slice(0, 160)]))"
        )
        found += [(address, *violation) for violation in wrong]
    assert found == []
