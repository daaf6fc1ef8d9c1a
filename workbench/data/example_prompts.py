"""Example prompts, one phenomenon each: `data/prompts.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import lru_cache

from workbench.errors import BadData
from workbench.file_io import read_text
from workbench.places import SHIPPED


@dataclass(frozen=True)
class Example:
    """A text, its phenomenon, what to look at, and a second text of as many tokens to patch into."""

    phenomenon: str
    look: str
    text: str
    other: str | None = None


@lru_cache(maxsize=1)
def examples() -> tuple[Example, ...]:
    """Return the example prompts; raises `BadData` for a file that cannot be read or has other keys."""
    path = SHIPPED / "prompts.toml"
    try:
        return tuple(Example(**entry) for entry in tomllib.loads(read_text(path))["prompts"])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise BadData(f"{path} holds no prompts with phenomenon, look and text: {error}") from error
