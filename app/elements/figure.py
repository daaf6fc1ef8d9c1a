"""The figure element: a plotly figure that stays on the page while its numbers change; clicks and the token pointed at are told.

A name such as `5:word` on an axis is that of a token: pointed at anywhere on the page it is marked here, and the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import streamlit as st
from plotly.io.json import to_json_plotly

from workbench import plots

from .common import element

_element = element("figure", apart=False)


@dataclass(frozen=True)
class Point:
    """What was clicked: its custom data, and its places on the axes, all as a browser says, so to be checked."""

    at: Any
    x: Any
    y: Any

    @property
    def token(self) -> int | None:
        """The position of the token along whose axis it lies."""
        names = (TOKEN.match(name) for name in (self.x, self.y) if isinstance(name, str))
        return next((int(found[1]) for found in names if found), None)


TOKEN = re.compile(r"(\d{1,9}):")
Take = Callable[[Point], None]


def packed(figure: go.Figure, clicked: bool) -> bytes:
    """Everything the element shows; `clicked`: whether its points can be."""
    spec = figure.to_dict()
    spec["layout"].pop("template", None)  # the page has its own
    told = {"alt": plots.alt_text(figure), "clicked": clicked}
    return str(to_json_plotly({k: v for k, v in spec.items() if v} | told)).encode()


def draw(sent: bytes, key: str, take: Take | None = None) -> None:
    """Draw what was packed; `take` is called with a point that is clicked."""

    def asked() -> None:
        match (st.session_state.get(key) or {}).get("asked"):
            case {"at": at, "x": x, "y": y} if take is not None:
                take(Point(at, x, y))

    _element(key=key, data=sent, on_asked_change=asked)
