"""Shared by all elements: registering one from its script and style, and colours as numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import streamlit as st
from plotly.colors import sample_colorscale, unlabel_rgb

HERE = Path(__file__).parent


def element(name: str, *, apart: bool = True) -> Callable[..., Any]:
    """Register the component of `<name>.css`, `common.js` and `<name>.js`; `apart`: in a shadow tree without the page's styles."""
    css, common, own = ((HERE / f).read_text(encoding="utf-8") for f in (f"{name}.css", "common.js", f"{name}.js"))
    return st.components.v2.component(f"workbench_{name}", css=css, js=f"{common}\n{own}", isolate_styles=apart)


@functools.cache  # each click draws with the same scales
def colour_table(scale: str, count: int = 256) -> np.ndarray:
    """Return `count` colours of a plotly scale [count, 3], each part 0 to 255; shared, so it cannot be written to."""
    table = np.round([unlabel_rgb(c) for c in sample_colorscale(scale, count)]).astype(np.uint8)
    table.flags.writeable = False
    return table


def ink(ground: np.ndarray) -> str:
    """Return black or white, whichever has the higher contrast on a colour [3]; at least 4.5."""
    share = np.asarray(ground) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return "#000000" if linear @ (0.2126, 0.7152, 0.0722) > 0.179 else "#ffffff"  # where both have 4.58
