"""What every view draws of the same few small runs: kept, so that a changed number, word or line style is noticed.

    python tests/figure_outputs.py        # both files anew: git shows what has changed

`pages.json` has the elements of each page in order (`app_pages.elements`). `figures.json` holds for each link and view the
sentence, the alt text, and a row for each trace, axis and shape and for the table: its words, and of each of its arrays how
many numbers it has, how many are finite, their mean and their mean with weights 1, 2, 3, ... Sizes in pixels, margins,
opacities and places of legends are nobody's numbers and left out.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import app_pages
import dashboard
import numpy as np
import torch

from workbench import plots, views
from workbench.errors import WorkbenchError
from workbench.views import Link, Source
from workbench.views.registered_views import View, views_of

FRACTION = re.compile(r"(?<![\w.])-?\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]\d+)")  # also 5e-10
GOLDEN = Path(__file__).parent / "golden"
ANEW = "where this was meant: `python tests/figure_outputs.py`, and look at what git shows"
FIGURES, PAGES = GOLDEN / "figures.json", GOLDEN / "pages.json"
A, BOTH = "a=text-resformer-s1", "compare=1&a=text-resformer-s0&b=text-transformer-s1&step=20&step_b=20"
TEXT = "prompt=return%20sum(values)"
EDIT = "edits=values:layer=1,how=zero"
LINKS = {
    f"start?{A}": "identity replaced concentration sinks token_share residual",
    f"start?{A}&compare=1&b=text-transformer-s0": "sinks",
    "training?x=tokens&smooth=5": "loss relative train_loss coefficients pace",
    f"training?{BOTH}&log=1": "loss gradients gradients_over_time",
    "training?compare=1&a=text-denseformer-s0&b=text-transformer-s0": "coefficients",
    "training?models=denseformer,svformer&at=8": "loss gradients coefficients",
    "training?set=repeated-2x16-6e60": "copy_loss",
    "depth?metric=token_identity_share&site=own_v&models=svformer,resformer&depth=1": "",
    f"depth?metric=token_identity_share&site=own_v&{BOTH}": "",
    "depth?metric=sink_mass&step=20": "",
    f"depth?metric=sink_mass&{BOTH}": "",
    "depth?metric=token_importance": "",
    "depth?metric=value_ablation&variant=zero": "",
    f"attention?{BOTH}&layer=1&head=0&queries=1-5&scale=root&{TEXT}": "",
    f"attention?{A}&layer=1&head=0&lock=5&key=2&against=0&parts=value_path&{TEXT}": "score",
    "heads?metric=sink_mass&end=lowest&layer=1&head=0": "",
    "heads?a=race-svformer-s0&layer=1&head=0": "sink",
    f"heads?{BOTH}&metric=sink_mass": "",
    f"prompt?{A}&{TEXT}&position=3&layer=1&target=65&against=66": "",
    f"prompt?{BOTH}&{TEXT}&quantity=rank": "",
    f"intervene?{A}&{TEXT}&{EDIT}&sweep=remove:part=mlp&other=return%20max(values)&target=65&against=66": "",
    f"intervene?{BOTH}&{TEXT}&{EDIT}": "",
}
"""Each page alone, compared and with other choices: together they reach every view; some draw a few of their page's."""


def drawn(source: Source, link: str) -> dict[str, Any]:
    """What the views of a link draw, by view: [words, numbers] of each part; what a view refuses, in its words."""
    asked = Link.parse(link)
    only = LINKS[link].split() or views_of(asked.page)
    return {name: _outcome(views_of(asked.page)[name], source, asked) for name in only}


def _outcome(function: View, source: Source, link: Link) -> Any:
    try:
        drawing = function(source, link)
    except WorkbenchError as reason:
        return _plain(str(reason), source)
    table, figure = drawing.table, drawing.figure
    words = [drawing.sentence, plots.alt_text(figure), " ".join(map(str, table.columns))]
    rows = [[*_said(words, source), [len(table), *_numbers(table.select_dtypes("number").to_numpy(float))]]]
    rows += [_trace(trace) for trace in figure.data]
    layout = figure.layout
    words = [a.text for a in layout.annotations] + [layout.title.text, layout.title.subtitle.text]
    rows.append(_said(words, source))
    rows += [_axis(axis) for axis in (*figure.select_xaxes(), *figure.select_yaxes(), *figure.select_coloraxes())]
    rows += [[f"{s.type} {s.line.dash}", _numbers([s.x0, s.x1, s.y0, s.y1])] for s in layout.shapes]
    return rows


def _plain(text: str, source: Source) -> str:
    return _short(text.replace(str(source.folder), "RUNS"))


def _short(text: str) -> str:
    """Two lines at most, and of the rest what tells it from another."""
    return text if len(text) < 160 else f"{text[:120]}... {zlib.crc32(text.encode()):08x}"


def _said(texts: Iterable[Any], source: Source) -> list[Any]:
    """Words, without their broken numbers, which machines may round differently, and these."""
    text = " | ".join(map(str, texts))
    return [_plain(FRACTION.sub("#", text), source), _numbers([float(x) for x in FRACTION.findall(text)])]


def _trace(trace: Any) -> list[Any]:
    own = trace.to_plotly_json()
    line, marker = own.get("line") or {}, own.get("marker") or {}
    words = [
        trace.type,
        trace.name,
        *(own.get(key) for key in ("mode", "xaxis", "yaxis", "coloraxis", "visible", "showlegend")),
    ]
    words += [line.get("dash"), line.get("color"), marker.get("symbol"), own.get("hovertemplate"), own.get("fillcolor")]
    numbers: list[float | None] = []
    for name in ("x", "y", "z", "customdata", "text"):
        values = np.asarray(own[name]) if own.get(name) is not None else np.empty(0)
        try:
            numbers += _numbers(values.astype(float)) if values.size else []
        except ValueError:
            words.append(f"{name} {' '.join(map(str, values.ravel()))}")
    numbers += [x for side in ("array", "arrayminus") for x in _numbers((own.get("error_y") or {}).get(side, []))]
    text = "; ".join("" if isinstance(w, np.ndarray) or w is None else str(w) for w in words)
    return [_short(FRACTION.sub("#", text)), numbers]


def _axis(axis: Any) -> list[Any]:
    own = axis.to_plotly_json()
    words = [
        own.get("title", {}).get("text"),
        *(own.get(key) for key in ("type", "matches", "autorange", "dtick", "ticktext")),
    ]
    ends = own.get("range") or [own.get("cmin"), own.get("cmax")]
    return ["; ".join("" if w is None else str(w) for w in words)[:200], _numbers([x for x in ends if x is not None])]


def _numbers(values: Any) -> list[float | None]:
    """[how many, how many are finite, their mean, their mean with weights 1, 2, 3, ...], to six digits."""
    flat = np.asarray([np.nan if isinstance(v, str) or v is None else v for v in np.ravel(values)], dtype=float)
    if not flat.size:
        return []
    there = np.isfinite(flat)
    ramp = np.arange(1, flat.size + 1)[there]
    means = (flat[there].mean(), (flat[there] * ramp).sum() / ramp.sum()) if there.any() else ()
    return [flat.size, int(there.sum()), *(float(f"{x:.6g}") for x in means)]


def kept(file: Path = FIGURES) -> dict[str, Any]:
    """What a file holds, by link or page."""
    return json.loads(file.read_text(encoding="utf-8"))


def shown(runs: Path) -> dict[str, list[str]]:
    """The elements of each page at its deep link, outside a test."""
    from streamlit.testing.v1 import AppTest

    from app import background_tasks, streamlit_settings

    streamlit_settings.apply()
    background_tasks.POLL_S = 20.0
    os.environ["WORKBENCH_RUNS"], sys.argv = str(runs), ["main.py"]
    found = {}
    for name, address in app_pages.DEEP.items():
        at = AppTest.from_file(str(dashboard.MAIN), default_timeout=60)
        if name != "start":
            at.switch_page(f"screens/{name}.py")
        for key, value in address.items():
            at.query_params[key] = value
        found[name] = app_pages.elements(dashboard.settled(at.run()), runs)
    return found


def main() -> None:
    """Draw everything and write it down, a line for each view and each element."""
    with tempfile.TemporaryDirectory() as folder:
        views.source.EVIDENCE = views.source.MODELS = Path(folder) / "nothing-shipped"
        runs = dashboard.populate(Path(folder) / "runs")
        source = dashboard.kept(runs)
        figures = {link: drawn(source, link) for link in LINKS}
        PAGES.write_text(json.dumps(shown(runs), indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
    lines = []
    for link, found in figures.items():
        of_link = (f"  {json.dumps(name)}: {json.dumps(rows, ensure_ascii=False)}" for name, rows in found.items())
        lines.append(f"{json.dumps(link)}: {{\n" + ",\n".join(of_link) + "\n }")
    FIGURES.write_text("{\n " + ",\n ".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
