"""The token strip: a prompt's tokens as coloured chips, one of them selected; click, arrow keys and hover.

    at = token_strip.selected_position("position", "Position", len(tokens), default=len(tokens) - 1)
    token_strip.draw_token_strip(tokens, key="position", label="Position", colours=loss, unit="nats", chosen=at)

The address holds the selected position. Other elements of the page mark the token under the mouse.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import streamlit as st

from workbench.errors import BadData
from workbench.plots.style import SEQUENTIAL
from workbench.views.token_names import short

from .. import url_widgets as widgets
from .common import colour_table, element, ink

LONGEST = 24
"""Characters of a token on its chip; the tooltip has the full token."""
COLOURS = 64
TOP = 95  # percentile of the values at the end of the colour scale
_element = element("token_strip")


def draw_token_strip(
    tokens: Sequence[str], *, key: str, label: str, colours: Sequence[float] | np.ndarray | None = None, unit: str = "",
    chosen: int | None = None, first: int = 0, clears: Sequence[str] = (), none: bool = False,
    own: str = "",
) -> None:  # fmt: skip
    """Draw a prompt's tokens [T]; the selected position is written into the address.

    Args:
        key: The address's key of the position.
        colours: A number >= 0 for each token [T] in `unit`; tokens without a finite number have no colour.
        chosen: The selected position.
        first: The position of the first token shown.
        clears: Keys that leave the address with the old position.
        none: Whether a click on the selected token deselects it.
        own: Words after the number of the selected token.

    Raises:
        BadData: No tokens, a wrong number of colours, or a selected position that is not shown.
    """
    data = packed_token_strip(
        tokens, key=key, label=label, colours=colours, unit=unit, chosen=chosen, first=first, none=none, own=own
    )
    write = functools.partial(write_position, key, range(first, first + len(tokens)), tuple(clears), none)
    _element(key=_name(key), data=data, on_asked_change=write)


def selected_position(key: str, label: str, count: int, *, first: int = 0, default: int | None = None) -> int | None:
    """Return the position in the address, of `count` positions from `first`; else the default, with a warning for a wrong one."""
    text = st.query_params.get(key)
    positions = {str(i): i for i in range(first, first + count)}
    if text is not None and text not in positions:
        widgets.warn_ignored(label, text, range(first, first + count))
    return positions.get(text or "", default)


def packed_token_strip(
    tokens: Sequence[str], *, key: str, label: str, colours: Sequence[float] | np.ndarray | None = None, unit: str = "",
    chosen: int | None = None, first: int = 0, none: bool = False, own: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Return everything the strip shows as plain values; arguments and errors as for `draw_token_strip`."""
    if not tokens:
        raise BadData("a strip of no tokens; give at least one")
    if chosen is not None and chosen not in range(first, first + len(tokens)):
        raise BadData(f"position {chosen} is not on the strip, which has {first} to {first + len(tokens) - 1}")
    values = np.full(len(tokens), np.nan) if colours is None else np.asarray(colours, dtype=float)
    if values.shape != (len(tokens),):
        raise BadData(f"colours of shape {list(values.shape)} for {len(tokens)} tokens; give one number for each")
    texts = [short(token, LONGEST) for token in tokens]
    finite = np.isfinite(values)
    most = float(f"{values[finite].max():.3g}") if finite.any() else None
    top = most  # the end of the colour scale, robust to a few large values
    if most is not None:
        end = np.percentile(values[finite], TOP)
        top = float(f"{end if end > 0 else max(most, 0.0) or 1.0:.2g}")
    return {
        "key": key, "label": label, "unit": unit, "first": first, "chosen": chosen, "none": none, "own": own, "tokens": texts,
        "cut": {str(i): tokens[i] for i, text in enumerate(texts) if text != tokens[i]},
        "values": [float(f"{v:.5g}") if ok else None for v, ok in zip(values, finite, strict=True)],
        "top": top, "most": most, "colours": [["#{:02x}{:02x}{:02x}".format(*c), ink(c)] for c in colour_table(SEQUENTIAL, COLOURS)],
    }  # fmt: skip


def write_position(key: str, positions: range, clears: tuple[str, ...], none: bool) -> None:
    """Write the position that a visitor selected into the address, if the strip has it; `none`: it may be deselected."""
    match (st.session_state.get(_name(key)) or {}).get("asked"):
        case {"token": None} if none:
            widgets.update_url(**dict.fromkeys((*clears, key)))
        case {"token": int(position)} if position in positions:
            widgets.update_url(**dict.fromkeys(clears), **{key: position})


def _name(key: str) -> str:
    return f"strip_{key}"
