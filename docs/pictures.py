"""The picture of the README and the first page, drawn by the dashboard's own view from the runs that ship."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from workbench import plots
from workbench.views import Link, Source, start
from workbench.views.source import EVIDENCE
from workbench.views.writing import WIDTH, picture

RESTING = Path(__file__).parent / "pictures" / "resting.svg"
NAMES = re.compile(r"(?<=trace)[0-9a-f]{6}\b")  # which Plotly draws by chance


def resting() -> go.Figure:
    """The first two panels of the demo's sinks over training, on the ten seeds of the study."""
    rows = start.demo.forming(Source(EVIDENCE / "sinks"), Link("start", {"show": "demo"})).table
    rows = rows[rows["metric"].isin(start.demo.SINK_PANELS[:2])]
    figure = plots.plot(rows, form="steps", title="When does attention come to rest on the start token?")
    return figure.update_layout(height=320, margin={"b": 48}, legend={"entrywidth": 110})  # as wide in any font


def drawn(figure: go.Figure) -> str:
    """The picture as SVG with its `numbers`, to the letter the same each time that one browser draws it."""
    with tempfile.TemporaryDirectory() as folder:
        text = picture(figure, Path(folder) / "picture.svg").read_text(encoding="utf-8")
    text = text.replace(f'width="{WIDTH}" height="320"', 'width="860" height="275"', 1)  # the README is one screen
    (own,) = set(re.findall(r'id="defs-([0-9a-f]+)"', text))
    shown = f"<metadata>{json.dumps(numbers(figure))}</metadata>"
    return NAMES.sub("", text.replace(own, "")).replace("<defs", shown + "<defs", 1)


def numbers(figure: go.Figure) -> list[list[float]]:
    """What the lines and bands show, five digits each; how wide they are drawn is up to the fonts of a machine."""
    values = [np.asarray(trace[axis], dtype=float) for trace in figure.data for axis in "xy" if trace[axis] is not None]
    return [[float(f"{value:.5g}") for value in each if np.isfinite(value)] for each in values]


def kept(svg: str) -> list[list[float]]:
    """The `numbers` of a picture that was drawn before."""
    return json.loads(re.findall("<metadata>(.*?)</metadata>", svg)[0])
