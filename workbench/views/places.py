"""Which position of a prompt is chosen, in the tokens of each model, and words that several views of a prompt share."""

from __future__ import annotations

import numpy as np

from workbench.errors import BadData
from workbench.plots.grids import safe
from workbench.views.link import Link
from workbench.views.source import Source, Subject


def position(source: Source, link: Link) -> tuple[int, list[str]]:
    """The chosen position of model A's tokens, the last unless the link says, and the tokens."""
    tokens = source.tokens(source.subjects(link)[0], source.prompt(link))
    at = link.whole("position", len(tokens) - 1)
    if at is None or not 0 <= at < len(tokens):
        raise BadData(f"position {at}: the prompt has positions 0 to {len(tokens) - 1}")
    return at, tokens


def place(source: Source, link: Link, subject: Subject) -> int | None:
    """The position in a subject's own tokens up to which it has read the same text as A; None where no token ends there."""
    at, tokens = position(source, link)
    own = source.tokens(subject, source.prompt(link))
    if own[: at + 1] == tokens[: at + 1]:
        return at
    read = "".join(tokens[: at + 1])
    found = int(np.searchsorted(np.cumsum([len(t) for t in own]), len(read)))
    return found if "".join(own[: found + 1]) == read else None


def placed(source: Source, link: Link) -> tuple[list[tuple[Subject, int]], str]:
    """Subjects with their positions, and a sentence about the one that is left out because its tokens end elsewhere."""
    places = [(s, place(source, link, s)) for s in source.subjects(link)]
    remarks = [
        f"{s.title} is left out: none of its tokens ends where A's does here; choose another one."
        for s, at in places
        if at is None
    ]
    return [(s, at) for s, at in places if at is not None], " ".join(remarks)


def path_in_words(path: str) -> str:
    """Whose values these are, in words."""
    kind, _, layer = path.partition(".")
    whose = f"layer {layer}'s" if layer else "the first layer's"
    named = {"own": "own values", "first": "the first layer's values", "source": f"{whose} values",
             "cross": f"{whose} keys and values", "table": "values from a table"}  # fmt: skip
    return named.get(kind, path)


def quoted(token: str) -> str:
    """A token between quotes, safe inside a figure."""
    return f"“{safe(token)}”"
