"""The parts of the Start page; a link shows one of them."""

from __future__ import annotations

from workbench.errors import UnknownName, WorkbenchError
from workbench.views.link import Link

PARTS = {
    "finding": "What was found", "model": "This model", "here": "What is here", "verdicts": "Verdicts", "demo": "The demo",
}  # fmt: skip


def check_part(link: Link, part: str) -> None:
    """Raise `WorkbenchError` where the link shows another part of the page."""
    shown = link.text("show", part)
    if shown not in PARTS:
        raise UnknownName("part of the page", str(shown), PARTS)
    if shown != part:
        raise WorkbenchError(f"drawn with show={part}")
