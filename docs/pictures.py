"""The picture of the README and the first page, drawn by a view of the dashboard from the shipped runs."""

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
    """Return the first two panels of the demo's sinks over training, for the ten seeds of the study."""
    rows = start.forming(Source(EVIDENCE / "sinks"), Link("start", {"show": "demo"})).table
    rows = rows[rows["metric"].isin(start.SINK_PANELS[:2])]
    figure = plots.plot(rows, form="steps", title="Attention sink on the start token")
    return figure.update_layout(height=320, margin={"b": 48}, legend={"entrywidth": 110})  # as wide in any font


def drawn(figure: go.Figure) -> str:
    """Return the picture as SVG with its `numbers`. One browser always draws the same text."""
    with tempfile.TemporaryDirectory() as folder:
        text = picture(figure, Path(folder) / "picture.svg").read_text(encoding="utf-8")
    text = text.replace(f'width="{WIDTH}" height="320"', 'width="860" height="275"', 1)  # the README is one screen
    (own,) = set(re.findall(r'id="defs-([0-9a-f]+)"', text))
    shown = f"<metadata>{json.dumps(numbers(figure))}</metadata>"
    return NAMES.sub("", text.replace(own, "")).replace("<defs", shown + "<defs", 1)


def numbers(figure: go.Figure) -> list[list[float]]:
    """Return the numbers of lines and bands with five digits. Their drawn width depends on the machine's fonts."""
    values = [np.asarray(trace[axis], dtype=float) for trace in figure.data for axis in "xy" if trace[axis] is not None]
    return [[float(f"{value:.5g}") for value in each if np.isfinite(value)] for each in values]


def kept(svg: str) -> list[list[float]]:
    """Return the `numbers` of a stored picture."""
    return json.loads(re.findall("<metadata>(.*?)</metadata>", svg)[0])
