"""What was chosen, as text: `depth?metric=sink_mass&a=text-resformer-s0&step=1000`; the page's address and the command's argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from workbench.errors import BadData, UnknownName

SELECTION = ("set", "a", "step", "compare", "b", "step_b", "by", "find", "models", "prompt", "stored")
"""Keys that every page carries along: the experiment, models A and B at their steps, which runs are compared and by what, the prompt."""
SWITCHES = {"alone", "compare", "log", "depth", "behind"}
"""Keys that are on (1) or off (0)."""


@dataclass(frozen=True)
class Page:
    """A page of the dashboard: its title, its icon (of Material Symbols), what it is for, the keys of its links."""

    title: str
    icon: str
    about: str
    keys: tuple[str, ...] = ()
    """Beside the selection's."""


PAGES = {
    "start": Page("Start", "flag", "What is here, and one model at a glance", ("show", "claim", "alone", "when", "left", "right", "at")),
    "training": Page(
        "Training", "trending_down", "Losses, gradients, coefficients over time",
        ("show", "x", "log", "domain", "smooth", "at", "of", "quantity", "where"),
    ),
    "depth": Page(
        "Depth", "layers", "Any measure over layers", ("metric", "site", "variant", "view", "seed", "depth", "behind", "layer", "head"),
    ),
    "attention": Page(
        "Attention", "grid_on", "Where every head looks",
        ("layer", "head", "queries", "keys", "lock", "scale", "pool", "branch"),
    ),
    "heads": Page(
        "Heads", "target", "Which heads stand out, in all models", ("metric", "site", "variant", "end", "layer", "head")
    ),
    "prompt": Page(
        "Prompt", "chat", "Your text: what is read, kept and predicted",
        ("show", "site", "layer", "head", "position", "target", "against", "quantity"),
    ),
    "intervene": Page(
        "Intervene", "build", "Change something, see what follows",
        ("show", "edits", "kind", "sweep", "over", "of", "other", "target", "against", "site", "layer", "position"),
    ),
}  # fmt: skip
"""Views of a page stand in `workbench/views/NAME.py`; a page without a screen of its own shows them one below the other."""


@dataclass(frozen=True)
class Link:
    """A page and its options, all text; absent ones take the page's defaults."""

    page: str
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Link:
        """A link from an address (`http://127.0.0.1:8501/depth?metric=loss`) or its end (`depth?metric=loss`).

        Raises `UnknownName` for pages and keys that are not there, `BadData` for a key that is given twice.
        """
        parts = urlsplit(text.strip())
        page = parts.path.strip("/") or "start"
        if page not in PAGES:
            raise UnknownName("page", page, PAGES)
        found = parse_qsl(parts.query, keep_blank_values=True)
        for key, _ in found:
            if key not in (*SELECTION, *PAGES[page].keys):
                raise UnknownName(f"key of page {page}", key, (*SELECTION, *PAGES[page].keys))
        if len(dict(found)) < len(found):
            raise BadData(f"{text}: a key is given twice")
        for key in SWITCHES & dict(found).keys():
            if dict(found)[key] not in ("0", "1"):
                raise UnknownName(f"{key} in the link", dict(found)[key], ("0", "1"))
        return cls(page, dict(found))

    def __str__(self) -> str:
        known = (*SELECTION, *(PAGES[self.page].keys if self.page in PAGES else ()))
        asked = [(key, self.options[key]) for key in known if self.options.get(key) is not None]
        return self.page + (f"?{urlencode(asked, quote_via=quote, safe='/:,;=')}" if asked else "")

    def but(self, **changes: Any) -> Link:
        """The same link with some options changed; None takes one out."""
        options = {**self.options, **{k: v if v is None else str(v) for k, v in changes.items()}}
        return Link(self.page, {k: v for k, v in options.items() if v is not None})

    def text(self, key: str, default: str | None = None) -> str | None:
        """An option as text."""
        return self.options.get(key, default)

    def whole(self, key: str, default: int | None = None) -> int | None:
        """An option as a whole number; raises `BadData` where it is none."""
        value = self.options.get(key)
        if value is None:
            return default
        try:
            return int(value)
        except ValueError:
            raise BadData(f"{key}={value!r} in the link is no whole number") from None

    def on(self, key: str) -> bool:
        """Whether a switch is on."""
        return self.options.get(key) == "1"

    def many(self, key: str) -> list[str] | None:
        """A list `a,b`; None where the link does not say."""
        value = self.options.get(key)
        return None if value is None else listed(value)


def listed(text: str) -> list[str]:
    """The parts of `a,b`."""
    return [part for part in text.split(",") if part]
