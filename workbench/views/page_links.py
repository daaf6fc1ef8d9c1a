"""Links: a page and its options as text, `depth?metric=sink_mass&a=text-resformer-s0&step=1000`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from workbench.errors import BadData, UnknownName, refuse_unknown

SELECTION = ("set", "a", "step", "compare", "b", "step_b", "by", "find", "models", "prompt", "stored")
"""Keys of every page: experiment, models A and B with their steps, the models that are drawn, the prompt."""
SWITCHES = {"alone", "shipped", "compare", "log", "depth", "behind", "minus", "weights"}
"""Keys that are on (1) or off (0)."""


@dataclass(frozen=True)
class PageInfo:
    """A page of the dashboard: title, icon (Material Symbols), purpose, keys of its links."""

    title: str
    icon: str
    about: str
    keys: tuple[str, ...] = ()
    """Besides those of every page."""


PAGES = {
    "start": PageInfo(
        "Start", "flag", "Main result, one model, runs, verdicts",
        ("show", "claim", "alone", "shipped", "group", "when", "left", "right", "at"),
    ),
    "training": PageInfo(
        "Training", "trending_down", "Losses, gradients and coefficients over training",
        ("show", "x", "spread", "log", "domain", "smooth", "at", "of", "quantity", "where"),
    ),
    "depth": PageInfo(
        "Depth", "layers", "Any measure over layers",
        ("metric", "site", "variant", "view", "seed", "spread", "depth", "behind", "order", "minus", "layer", "head", "weights", "path"),
    ),
    "attention": PageInfo(
        "Attention", "grid_on", "Attention of every head",
        ("layer", "head", "queries", "keys", "lock", "scale", "pool", "branch", "key", "against", "parts", "target"),
    ),
    "heads": PageInfo(
        "Heads", "target", "Ranking of single heads", ("metric", "site", "variant", "end", "layer", "head")
    ),
    "prompt": PageInfo(
        "Prompt", "chat", "Predictions, values and attribution on your text",
        ("show", "site", "layer", "head", "position", "query", "target", "against", "quantity", "lens", "fit", "other"),
    ),
    "maps": PageInfo(
        "Token maps", "scatter_plot", "Tokens as points, and heads in groups", ("site", "layer", "method", "colour", "groups")
    ),
    "differences": PageInfo(
        "Differences", "difference", "What differs between two models: settings, weights, measures, documents",
        ("quantity", "metric", "order", "layer", "head"),
    ),
    "intervene": PageInfo(
        "Intervene", "build", "Edits and patching inside the model",
        ("show", "edits", "kind", "documents", "sweep", "over", "of", "other", "target", "against", "site", "layer", "position"),
    ),
}  # fmt: skip
"""`workbench/views/NAME.py` has the views of a page. A page without `app/screens/NAME.py` shows them one below the other."""


@dataclass(frozen=True)
class Link:
    """A page and its options, all text. Absent options take the page's defaults."""

    page: str
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Link:
        """Parse an address (`http://127.0.0.1:8501/depth?metric=loss`) or its end (`depth?metric=loss`).

        Raises `UnknownName` for unknown pages and keys, `BadData` for a repeated key.
        """
        parts = urlsplit(text.strip())
        page = parts.path.strip("/") or "start"
        refuse_unknown("page", page, PAGES)
        pairs, known = parse_qsl(parts.query, keep_blank_values=True), (*SELECTION, *PAGES[page].keys)
        options = dict(pairs)
        for key in options:
            refuse_unknown(f"key of page {page}", key, known)
        if len(options) < len(pairs):
            raise BadData(f"{text}: a key is given twice")
        for key in SWITCHES & options.keys():
            if options[key] not in ("0", "1"):
                raise UnknownName(f"{key} in the link", options[key], ("0", "1"))
        return cls(page, options)

    def __str__(self) -> str:
        known = (*SELECTION, *(PAGES[self.page].keys if self.page in PAGES else ()))
        asked = [(key, self.options[key]) for key in known if self.options.get(key) is not None]
        return self.page + (f"?{urlencode(asked, quote_via=quote, safe='/:,;=')}" if asked else "")

    def but(self, **changes: Any) -> Link:
        """Return the link with some options changed; None removes one."""
        options = {**self.options, **{k: v if v is None else str(v) for k, v in changes.items()}}
        return Link(self.page, {k: v for k, v in options.items() if v is not None})

    def text(self, key: str, default: str | None = None) -> str | None:
        """Return an option as text."""
        return self.options.get(key, default)

    def choice(self, key: str, choices: Iterable[str], default: str | None = None, kind: str | None = None) -> str:
        """Return an option that is one of some choices; absent, the default, or the first choice.

        Raises `UnknownName` for another value; `kind` names it in the message, in place of the key.
        """
        names, asked = list(choices), self.options.get(key)
        if asked is not None and asked not in names:
            raise UnknownName(kind or key, asked, names)
        return asked or (default if default in names else names[0])

    def whole(self, key: str, default: int | None = None) -> int | None:
        """Return an option as an integer; raises `BadData` for other text."""
        value = self.options.get(key)
        if value is None:
            return default
        try:
            return int(value)
        except ValueError:
            raise BadData(f"{key}={value!r} in the link is not an integer") from None

    def on(self, key: str) -> bool:
        """Return whether a switch is on."""
        return self.options.get(key) == "1"

    def many(self, key: str) -> list[str] | None:
        """Return an option `a,b` as a list; None if it is absent."""
        value = self.options.get(key)
        return None if value is None else split_list(value)


def split_list(text: str) -> list[str]:
    """Return the parts of `a,b`."""
    return [part for part in text.split(",") if part]
