"""Figures as alt texts and tables, and offline HTML pages with one style sheet for light and dark themes."""

from __future__ import annotations

import html as markup
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from workbench.file_io import write_text
from workbench.plots.heat_maps import safe
from workbench.plots.record_figures import plot
from workbench.plots.style import INK, LINE, narrow, plain, titled, untitled, with_signs, wrapped

COLOUR_BAR, AROUND_MAP = 70, 90  # pixels beside square maps, and around each row of them
LETTERS = 125  # of a line of a subtitle in a figure of full width
PX_PER_MM = 4.44  # of a printed figure: 11 pixels are 7 pt
TEXT, TITLE, THINNER = 11, 13, 0.75  # of a printed figure: pixels of texts and of the title, share of lines and markers
CONFIG = {"showSendToCloud": False, "displaylogo": False, "responsive": True}
MAX_ROWS = 500  # of a table in a page
STYLE = f"""
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }}
body.wide {{ max-width: 1340px; margin: 1.2rem auto }}
h1 {{ margin: 0 0 .6rem }} h2 {{ margin: 2.2rem 0 .6rem }} h3 {{ margin: .2rem 0; font-size: 1.05rem }} p {{ margin: .5rem 0 }}
.wide h1 {{ font-size: 1.5rem; margin: 0 }} section h2 {{ font-size: 1.05rem; margin: 0 0 .4rem }}
article, section {{ border: 1px solid #8884; border-radius: 8px; padding: .6rem 1rem; margin: 1rem 0; min-width: 0 }}
.four {{ display: grid; grid-template-columns: 1fr 1fr; gap: 1.2rem }} .four section, .four figure {{ margin: 0 }}
.status {{ display: inline-block; border-radius: 4px; padding: 0 .5rem; font-size: 13px; font-weight: 600; border: 1px solid #8886 }}
.supported {{ border-left: 6px solid #009E73 }} .refuted {{ border-left: 6px solid #D55E00 }}
.unresolved {{ border-left: 6px solid #C18A00 }} .gated, .not_checkable {{ border-left: 6px solid #808080 }}
figure {{ margin: .8rem 0 }} figcaption {{ font-size: 14px; opacity: .8 }}
.modebar {{ opacity: 0 }} figure:hover .modebar {{ opacity: 1 }}
table {{ border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto }}
td, th {{ padding: .15rem .6rem; text-align: right; border-bottom: 1px solid #8884 }}
th:first-child, td:first-child {{ text-align: left }}
dl {{ font-size: 14px; display: grid; grid-template-columns: max-content 1fr; gap: .1rem .8rem; margin: .6rem 0 }}
dt {{ opacity: .7 }} dd {{ margin: 0 }}
summary {{ cursor: pointer; font-size: 14px }} code {{ font-size: 13px }} .small {{ font-size: 14px; opacity: .8 }}
{INK} {{ fill: CanvasText !important }}
@media (max-width: 900px) {{ .four {{ grid-template-columns: 1fr }} }}
"""


def html(figure: go.Figure, *, script: bool = True, whole: bool = False) -> str:
    """The figure as HTML that works offline: a piece of a page, whose first one has the plotting `script`, or a `whole` page."""
    if whole:
        page = Page(untitled(figure)[0])
        page.add(page.figure(figure))
        return page.html()
    ink = f"<style>{INK} {{ fill: CanvasText !important }}</style>" if script else ""
    return ink + _figure(figure, script, "")


def _figure(figure: go.Figure, script: bool, caption: str) -> str:
    alt = markup.escape(alt_text(figure), quote=True)
    title, words = untitled(figure := titled(figure))
    figure.layout.meta = None
    above = f"<h3>{markup.escape(title)}</h3>" if title else ""
    above += f'<p class="small">{markup.escape(words)}</p>' if words else ""
    body = figure.to_html(include_plotlyjs=script, full_html=False, config=CONFIG, auto_play=False)
    under = f"<figcaption>{markup.escape(caption)}</figcaption>" if caption else ""
    return f'<figure role="group" aria-label="{alt}">{above}{body}{under}</figure>'


class Page:
    """An offline page. `add` appends HTML; the functions that make parts escape their text."""

    def __init__(self, title: str, *, wide: bool = False) -> None:
        self.title, self.wide = title, wide
        self.parts, self.drawn = list[str](), 0

    def add(self, *parts: str) -> None:
        self.parts += parts

    def figure(self, figure: go.Figure, caption: str = "") -> str:
        """Return the figure as HTML with its alt text; keep the order of calls, because the first carries plotly's code."""
        self.drawn += 1
        return _figure(figure, self.drawn == 1, caption)

    def html(self, command: str = "") -> str:
        """Return the page as HTML; `command` reproduces it."""
        title = markup.escape(self.title)
        foot = f'<p class="small">Reproduce: <code>{markup.escape(command)}</code></p>' if command else ""
        head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title><style>{STYLE}</style>'
        kind = "wide" if self.wide else "page"
        return f'<!doctype html><html lang="en"><head>{head}</head><body class="{kind}">{"".join(self.parts)}{foot}</body></html>'

    def write(self, out: Path, command: str = "") -> Path:
        write_text(out, self.html(command))
        return out


def heading(text: str, level: int = 2) -> str:
    """A heading."""
    return f"<h{level}>{markup.escape(text)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph, typeset; `kind` is a class of the style sheet."""
    opening = f'<p class="{kind}">' if kind else "<p>"
    return f"{opening}{markup.escape(with_signs(text))}</p>"


def folded(label: str, inside: str) -> str:
    """HTML behind a line that unfolds it on a click."""
    return f"<details><summary>{markup.escape(label)}</summary>{inside}</details>"


def numbers_html(frame: pd.DataFrame, label: str = "the numbers") -> str:
    """A folded table with its number of rows; empty for no rows."""
    if frame.empty:
        return ""
    shown = table(frame)
    more = "" if len(shown) <= MAX_ROWS else f", the first {MAX_ROWS} here"
    rows = shown.head(MAX_ROWS).to_html(index=False, border=0, na_rep="", float_format="{:.6g}".format)
    return folded(f"{label} ({len(shown)} row{'s' * (len(shown) != 1)}{more})", rows)


def facts_html(given: Mapping[str, str]) -> str:
    """Names and their values in two columns."""
    return f"<dl>{''.join(f'<dt>{markup.escape(k)}</dt><dd>{markup.escape(with_signs(v))}</dd>' for k, v in given.items())}</dl>"


def alt_text(shown: go.Figure | pd.DataFrame) -> str:
    """Describe a figure in words: title, subtitle, the ends of each curve, the extremes of each map, named texts."""
    if isinstance(shown, pd.DataFrame):
        shown = plot(shown)
    taken = (shown.layout.meta or {}).get("title")  # by a page that sets the words itself
    title = go.layout.Title(taken) if taken else shown.layout.title
    words = [plain(title.text), plain(title.subtitle.text)]
    for trace in shown.data:
        if trace.type == "heatmap":
            z = np.asarray(trace.z, dtype=float)
            if np.isfinite(z).any():
                words.append(f"{plain(trace.name) or 'map'}: {np.nanmin(z):.3g} to {np.nanmax(z):.3g}")
        elif trace.type == "scatter" and trace.mode == "text" and trace.name:
            words.append(f"{plain(trace.name)}: {', '.join(plain(text) for text in trace.text)}")
        elif trace.type == "scatter" and trace.fill == "toself":
            continue  # an area around or between numbers that others say
        elif trace.x is not None and len(trace.x) and trace.x[0] is not None and trace.hoverinfo != "skip":
            words.append(f"{plain(trace.name)}: {_ends(trace)}")
    return "; ".join(s for s in words if s)[:1500]


def _ends(trace: Any) -> str:
    """First and last number of a curve with their places, or the numbers of named bars and rows."""
    y, x = list(trace.y), list(trace.x)
    if trace.type == "bar" and trace.orientation != "h":
        return ", ".join(f"{plain(a)} {b:.3g}" for a, b in zip(x, y, strict=True))
    if trace.type == "bar" or isinstance(y[0], str):
        most = 5 if trace.type == "bar" else 12
        return ", ".join(f"{plain(b)} {a:.3g}" for a, b in zip(x[:most], y[:most], strict=True))
    ends = [f"{float(y[i]):.3g} at {plain(x[i]) if isinstance(x[i], str) else f'{float(x[i]):g}'}" for i in (0, -1)]
    return f"from {ends[0]} to {ends[1]}" if len(y) > 1 else ends[0]


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the numbers of a figure: non-empty columns without provenance, sorted by the axes."""
    kept = frame.drop(columns=[c for c in ("provenance",) if c in frame]).dropna(axis=1, how="all")
    axes = [c for c in ("metric", "architecture", "seed", "step", "layer", "head", "position") if c in kept]
    return kept.sort_values(axes, kind="stable").reset_index(drop=True)


def paper(figure: go.Figure, background: str = "white", caption: str = "", letters: int = LETTERS) -> go.Figure:
    """Return a figure for a picture: dark text on a background (CSS colour), and `caption` under the subtitle.

    `letters`: characters of a line of the subtitle; fewer than `LETTERS` also move the legend under the figure.
    """
    drawn = titled(figure).update_layout(font_color="#222", title_subtitle_font_color="#444", paper_bgcolor=background)
    if letters < LETTERS:
        drawn = narrow(drawn, letters)
    if caption:
        before = str(drawn.layout.title.subtitle.text or "")
        under = "<br>".join(filter(None, (before, wrapped(safe(caption), letters))))
        room = LINE * (under.count("<br>") - before.count("<br>"))
        margin, height = drawn.layout.margin.t + room, drawn.layout.height + room
        drawn.update_layout(title_subtitle_text=under, height=height, margin_t=margin)
    return drawn


def printed(figure: go.Figure, width: int) -> go.Figure:
    """Return a figure for `width` pixels on paper: texts of one size, thinner lines, smaller markers, the legend under the figure."""

    def resize(part: Any) -> None:
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            if isinstance(value, (dict, list, tuple)):
                resize(value)
            if key in ("font", "tickfont", "textfont") and isinstance(value, dict):
                value["size"] = TEXT

    content = figure.to_plotly_json()
    resize(content)
    drawn = go.Figure(content)
    layout, lines = drawn.layout, wrapped(str(drawn.layout.title.text or ""), int(width / 6.6))
    layout.height += LINE * lines.count("<br>")
    layout.margin.t += LINE * lines.count("<br>")
    layout.title.text, layout.title.font.size, layout.font.size = lines, TITLE, TEXT
    layout.margin.l, layout.margin.r = 50, 12
    drawn.update_xaxes(title_font_size=TEXT, tickfont_size=TEXT).update_yaxes(title_font_size=TEXT, tickfont_size=TEXT)
    drawn.update_coloraxes(colorbar_title_font_size=TEXT)
    for trace in drawn.select_traces("scatter"):
        trace.line.width = THINNER * (2 if trace.line.width is None else trace.line.width)
        trace.marker.size = np.multiply(THINNER, 6 if trace.marker.size is None else trace.marker.size)
    for shape in layout.shapes:
        shape.line.width = THINNER * (2 if shape.line.width is None else shape.line.width)
    return drawn


def fitted_maps(figure: go.Figure, width: int) -> go.Figure:
    """Shorten a picture of square maps to their height at `width` pixels, and thin out ticks that overlap."""
    across, upright = list(figure.select_xaxes()), list(figure.select_yaxes())
    if not upright or not all(axis.scaleanchor for axis in upright):
        return figure
    margin, room = figure.layout.margin, width - figure.layout.margin.l - figure.layout.margin.r - COLOUR_BAR
    side = room * min((axis.domain or (0, 1))[1] - (axis.domain or (0, 1))[0] for axis in across)
    rows = len({(axis.domain or (0, 1))[0] for axis in upright})
    figure.layout.height = int(min(figure.layout.height, margin.t + margin.b + rows * (side + AROUND_MAP)))
    for axis in (*across, *upright):
        if axis.tickvals is not None:
            step = math.ceil(len(axis.tickvals) * LINE / side)
            axis.tickvals = axis.tickvals[::step]
            axis.ticktext = None if axis.ticktext is None else axis.ticktext[::step]
    return figure


def paper_page(drawn: go.Figure) -> str:
    """Return an HTML page of a figure for taking its picture, without buttons."""
    return drawn.to_html(div_id="figure", config=CONFIG | {"displayModeBar": False}, auto_play=False)
