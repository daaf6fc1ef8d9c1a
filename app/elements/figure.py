"""The figure element: a plotly figure that is updated in place and reports clicks.

A name such as `5:word` on an axis is a token. A token under the mouse is marked in every element of the page.
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
    """A clicked point: its custom data and coordinates, unchecked input of a browser."""

    at: Any
    x: Any
    y: Any

    @property
    def token(self) -> int | None:
        """The position of its token, if an axis has tokens."""
        names = (TOKEN.match(name) for name in (self.x, self.y) if isinstance(name, str))
        return next((int(found[1]) for found in names if found), None)


TOKEN = re.compile(r"(\d{1,9}):")
Take = Callable[[Point], None]


def packed_figure(figure: go.Figure, clicked: bool) -> bytes:
    """Return everything the element shows; `clicked`: whether points react to clicks."""
    spec = figure.to_dict()
    spec["layout"].pop("template", None)  # the page has its own theme
    told = {"alt": plots.alt_text(figure), "clicked": clicked}
    return str(to_json_plotly({k: v for k, v in spec.items() if v} | told)).encode()


def draw_figure(sent: bytes, key: str, take: Take | None = None) -> None:
    """Draw a packed figure; `take` is called with a clicked point."""

    def asked() -> None:
        match (st.session_state.get(key) or {}).get("asked"):
            case {"at": at, "x": x, "y": y} if take is not None:
                take(Point(at, x, y))

    _element(key=key, data=sent, on_asked_change=asked)
