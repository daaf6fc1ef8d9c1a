"""The selected position of a prompt in a model's tokens, and names of tokens and numbers in figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.errors import BadData
from workbench.plots.heat_maps import counted_spaces, safe
from workbench.views.page_links import Link
from workbench.views.source import RunAtStep, Source


def position(source: Source, link: Link) -> tuple[int, list[str]]:
    """Return the selected position in model A's tokens (by default the last) and the tokens."""
    tokens = source.tokens(source.subjects(link)[0], source.prompt(link))
    at = link.whole("position", len(tokens) - 1)
    if at is None or not 0 <= at < len(tokens):
        raise BadData(f"position {at}: the prompt has positions 0 to {len(tokens) - 1}")
    return at, tokens


def own_position(source: Source, link: Link, subject: RunAtStep) -> int | None:
    """The position in a subject's own tokens that ends where A's position ends in the text; None if no token ends there."""
    at, tokens = position(source, link)
    own = source.tokens(subject, source.prompt(link))
    if own[: at + 1] == tokens[: at + 1]:
        return at
    text = "".join(tokens[: at + 1])
    match = int(np.searchsorted(np.cumsum([len(t) for t in own]), len(text)))
    return match if "".join(own[: match + 1]) == text else None


def own_positions(source: Source, link: Link) -> tuple[list[tuple[RunAtStep, int]], str]:
    """Subjects with their positions, and a sentence about a subject that is left out."""
    positions = [(s, own_position(source, link, s)) for s in source.subjects(link)]
    left_out = [f"{s.title} is left out: none of its tokens ends where A's does." for s, at in positions if at is None]
    return [(s, at) for s, at in positions if at is not None], " ".join(left_out)


def path_in_words(path: str) -> str:
    """The source of a value path, in words."""
    kind, _, layer = path.partition(".")
    whose = f"layer {layer}'s" if layer else "the first layer's"
    named = {"own": "own values", "first": "the first layer's values", "source": f"{whose} values",
             "cross": f"{whose} keys and values", "table": "values from a table"}  # fmt: skip
    return named.get(kind, path)


def number(x: float) -> str:
    """Three digits, zeros too: `2.00`, `278`; whole numbers from a thousand on."""
    if abs(x) >= 1000:
        return f"{x:,.0f}"
    return (f"{x:.3g}" if abs(x) >= 100 or not x else f"{x:#.3g}").replace("-", "−")


def signed_number(x: float) -> str:
    """The number with its sign: `+2.00`."""
    return f"+{number(x)}" if x > 0 else number(x)


def quoted(token: str) -> str:
    """A token between quotes, safe inside a figure."""
    return f"“{safe(token)}”"


def short(token: str, most: int = 12) -> str:
    """A token with long runs of spaces counted, cut if it is long."""
    token = counted_spaces(token)
    return token if len(token) <= most else token[: most - 1] + "…"


def cell_names(tokens: Sequence[str], first: int = 0) -> list[str]:
    """`5:word` for each token, counted from `first`."""
    return [f"{first + i}:{short(t)}" for i, t in enumerate(tokens)]
