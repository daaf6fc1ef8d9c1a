"""The attention element: small maps of all heads, one head's map and strips; click, hover, drag and keys.

Data is sent as deflated bytes: a length, a JSON header, then arrays that the header names as [offset, count]. Token text is in the
header and enters the page as text. The selected head, window and query are written into the address.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
import streamlit as st

from workbench import plots
from workbench.plots.style import DIVERGING, SEQUENTIAL
from workbench.views.attention import Choice, Seen, brightest, cell_words
from workbench.views.token_names import short

from .. import url_widgets as widgets
from .common import colour_table, element

KEY = "attention_element"
LONGEST, FAST = 24, 1
"""Characters of a token that are sent; compression level: 5 ms for 600 kB, which become 240."""
_element = element("attention")


def draw_attention(choice: Choice, patterns: list[Seen], caption: str) -> None:
    """Draw the element."""
    _element(key=KEY, data=packed_attention(choice, patterns, caption), on_asked_change=write_selection)


def write_selection() -> None:
    """Write the head, window or query that a visitor selected into the address, where the page checks it."""
    match (st.session_state.get(KEY) or {}).get("asked"):
        case {"head": [layer, head]}:
            widgets.update_url(layer=layer, head=head)
        case {"window": [top, bottom, left, right]}:
            widgets.update_url(queries=f"{top}-{bottom}", keys=f"{left}-{right}")
        case {"whole": True}:
            widgets.update_url(queries=None, keys=None)
        case {"lock": query, **key}:
            widgets.update_url(lock=query, key=None if query is None else key.get("key"), against=None, target=None)


def packed_attention(choice: Choice, patterns: list[Seen], caption: str) -> bytes:
    """Return everything the element shows as bytes: small maps in 8 bits of their largest weight, the map in 16."""
    room = Room()
    header = {
        "layer": choice.layer, "head": choice.head, "layers": choice.layers, "heads": choice.heads,
        "whole": choice.scale == "one", "root": choice.scale == "root", "own": choice.scale == "head",
        "lock": choice.lock, "key": choice.key,
        "mean": choice.pool == "mean", "minus": len(patterns) == 2 and choice.alike, "cell": cell_words(choice, patterns), "said": caption,
        "colours": {"sequential": room.add(colour_table(SEQUENTIAL)), "diverging": room.add(colour_table(DIVERGING)),
                    "minus": plots.colour(plots.MINUS)},
        "held": "" if choice.lock is None else short(choice.tokens[0][choice.lock], LONGEST),
        "panels": [_panel(s, room) for s in patterns],
    }  # fmt: skip
    text = json.dumps(header, allow_nan=False).encode()
    text += b" " * (-(len(text) + 4) % 4)
    return zlib.compress(len(text).to_bytes(4, "little") + text + b"".join(room.parts), FAST)


class Room:
    """Arrays one after another, aligned to four bytes."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def add(self, array: np.ndarray) -> list[int]:
        raw = np.ascontiguousarray(array).tobytes()
        raw += b"\0" * (-len(raw) % 4)
        place = [self.size, array.size]
        self.parts.append(raw)
        self.size += len(raw)
        return place


def _panel(seen: Seen, room: Room) -> dict[str, Any]:
    window, overview = seen.window, seen.overview
    tiles, rows = overview.tiles, overview.statistics
    past = np.tril(np.ones(tiles.shape[-2:], dtype=bool))
    lightest, top = _most(tiles), _most(window.weights)
    shown = np.isfinite(window.weights)
    return {
        "title": seen.subject.title, "tag": seen.subject.tag, "colour": plots.colour(seen.subject.series),
        "shape": list(tiles.shape), "brightest": lightest,
        "tiles": room.add(np.round(tiles[..., past] * (255 / lightest)).astype(np.uint8)),
        "entropy": [round(float(v), 4) for v in rows["normalised_entropy"]],
        "keys_used": [round(float(v), 4) for v in rows["effective_keys"]],
        "sink": [round(float(v), 4) for v in rows["sink_mass"]],
        "evenly": {name: None if np.isnan(v) else round(float(v), 4) for name, v in overview.uniform.items()},
        "queries": window.queries, "keys": window.keys, "exact": window.exact, "top": top,
        "scale": [brightest(tiles), brightest(window.weights, window.queries[0])],
        "query_tokens": [short(seen.tokens[i], LONGEST) for i in window.queries[:-1]],
        "key_tokens": [short(seen.tokens[i], LONGEST) for i in window.keys[:-1]],
        "weights": room.add(np.round(window.weights[shown] * (65535 / top)).astype(np.uint16)),
        "received": room.add(seen.received.astype(np.float32)), "received_evenly": room.add(seen.evenly.astype(np.float32)),
        "row": None if seen.row is None else room.add(np.nan_to_num(seen.row, nan=-1.0).astype(np.float32)),
    }  # fmt: skip


def _most(weights: np.ndarray) -> float:
    shown = weights[np.isfinite(weights)]
    return float(shown.max()) or 1.0 if shown.size else 1.0
