"""Shared style of all figures: names, colours, marks, titles and subtitles."""

from __future__ import annotations

import colorsys
import html as markup
import math
import re
import textwrap
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from workbench.models import architecture_names_and_colours as registry
from workbench.runs.records import facts, left_out

SITES = {
    "v": "effective values", "own_v": "own values", "stream": "hidden state", "final": "after the final norm",
    "z": "attention output", "q": "queries", "k": "keys", "rot_k": "rotated keys",
}  # fmt: skip
READINGS = {
    "train_loss": "lower: better prediction", "validation_loss": "lower: better prediction", "copy_loss": "lower: copies better",
    "chain_loss": "lower: better on tokens not copied",
    "gradient_norm": "higher: larger gradient", "tokens_per_second": "higher: faster",
}  # fmt: skip
VARIANT_READINGS: dict[tuple[str, str | None], str] = {
    ("importance_entropy", None): "lower: more concentrated", ("importance_entropy", "per_head"): "lower: more concentrated",
    ("importance_entropy", "deficit"): "higher: more concentrated",
    ("effective_rank", "top_share"): "higher: fewer directions in use", ("effective_rank", "trace"): "higher: longer vectors",
    ("head_rank", "top_share"): "higher: the head's vectors use fewer directions",
    ("induction_score", "previous"): "higher: the head looks at the token before", ("throughput", "peak"): "higher: more memory",
    ("sink_output", "mass"): "higher: stronger sink", ("sink_output", "spread"): "lower: alike at all positions",
    ("sink_output", "no_op"): "higher: a sink that writes nothing, in more documents",
    ("sink_output", "broadcast"): "higher: a sink that writes everywhere, in more documents",
    ("gradient_flow", "compress"): "lower: the norm shields more", ("massive_emergence", "invariance"): "1: the state stays as it is",
    ("gradient_flow", "compress_first_position"): "lower: the norm shields the first token more",
    ("massive_emergence", "layer"): "which layer; neither high nor low", ("value_bias", "other_token"): "the baseline of another token",
    ("massive_emergence", "dimension_layer"): "which layer; neither high nor low",
    ("coefficient_share", "coefficient"): "a scale that other weights may absorb; compare the shares",
    ("massive_dimensions", "dimension"): "which dimension; neither high nor low",
    ("massive_dimensions", "first_position"): "higher: the dimension peaks at the first token, in more documents",
    ("value_ablation", "token_mean"): "lower: less context is needed", ("value_ablation", "mean"): "higher: these values matter more",
    ("value_ablation", "zero"): "higher: these values matter more", ("value_ablation", "kept"): "higher: less context is needed",
}  # fmt: skip
"""Of measures whose variants are not read the same way."""
MINUS, MINUS_COLOUR = "A − B", "#8B6FC0"  # a difference of two subjects
DETAIL, WITHOUT = " · ", "without "  # between a series and one run of it, or what it lacks
GREY, GRID, SEQUENTIAL, DIVERGING = "#808080", "rgba(128,128,128,0.25)", "Cividis", "RdBu_r"
NOISE = 1e-6  # differences below this share of the values are rounding
TURN, FULL, BRIGHT = 0.055, 0.5, 0.2
"""Of shades: how far the hue turns, least saturation, luminance from which a second colour is darker and not lighter."""
MARKS = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "cross",
    "x",
    "star",
    "triangle-down",
    "hexagon",
    "pentagon",
    "bowtie",
)
LONG = re.compile(r"(?<![\w./])\d{1,3}\.\d+(?![\d.]*[\w/])")
"""A decimal that may have more than three significant digits; arXiv numbers and versions are none."""
BETWEEN = re.compile(r"(?<=[\w)\]]) - (?=[\w(])")
"""The minus of a difference of two names."""
TAGGED = re.compile(f"{DETAIL}([AB]′?: |{WITHOUT})")
NUMBERS = re.compile(r"(\d+(?:\.\d+)?)")
PANEL, BARS = 290, 200  # pixels that a panel beside another needs, and one of a few bars
AIR, ROOM, LINE = 12, 32, 17  # pixels above a figure's marks, of its title, of a line of its subtitle
INK = (
    ".infolayer text, .menulayer text, .bartext-outside, .textpoint text, .xaxislayer-above text, .yaxislayer-above text, "
    ".xaxislayer-below text, .yaxislayer-below text"
)
"""Words around a figure: in a page of HTML they take the page's ink, dark on light and light on dark."""


def colour(architecture: str, among: Sequence[str] = ()) -> str:
    """Return the architecture's colour; an unregistered name gets one from its hash.

    `among`: the series of the figure, in order; several settings of one architecture get shades of its colour, the first the
    darkest. `resformer · A: s1, step 300`, one run at one step, has its architecture's; `B′:`, the second of two that are alike,
    and `transformer · without ...`, which lacks something of the others, a much lighter or darker one. All have 3:1 contrast on light
    and dark pages.
    """
    if architecture == MINUS:
        return MINUS_COLOUR
    series, _, detail = architecture.partition(DETAIL)
    name = series.split(" ")[0]
    plain = registry.architecture_colour(name if name in registry.ARCHITECTURES else series)
    if detail.startswith(("B′", WITHOUT)):
        return _shade(plain, 1.0 if registry.luminance(plain) < BRIGHT else 0.0)
    kin = _settings(architecture, among)
    return _shade(plain, kin.index(architecture) / (len(kin) - 1)) if len(kin) > 1 else plain


def symbol(architecture: str, among: Sequence[str] = ()) -> str:
    """Return the marker of the architecture's curves; `among`: settings of one architecture get different markers."""
    kin = _settings(architecture, among)
    if len(kin) > 1:
        return MARKS[kin.index(architecture) % len(MARKS)]
    return registry.architecture_symbol(architecture.partition(DETAIL)[0].split(" ")[0])


def _settings(architecture: str, among: Sequence[str]) -> list[str]:
    """Series of a figure that are settings or seeds of the given one's architecture; none for A and B."""
    if TAGGED.search(architecture):
        return []
    name = re.split(r"[ ·]", architecture)[0]
    return [other for other in among if re.split(r"[ ·]", other)[0] == name and not TAGGED.search(other)]


@cache
def _shade(plain: str, place: float) -> str:
    """Shade of a colour from dark (0) to light (1), in perceptually equal steps and with a slightly turning hue."""
    hue, _, full = colorsys.rgb_to_hls(*(int(plain[i : i + 2], 16) / 255 for i in (1, 3, 5)))
    dark, light = map(math.sqrt, registry.LUMINANCES)
    return registry.colour_of(hue + TURN * (2 * place - 1), (dark + (light - dark) * place) ** 2, max(full, FULL))


def label(architecture: str) -> str:
    """The architecture's name as its paper writes it, safe inside a figure."""
    series, _, detail = architecture.partition(DETAIL)
    tag, _, rest = detail.rpartition(": ")
    named = registry.architecture_label(series) + (DETAIL + rest if rest else "")
    return markup.escape(f"{tag.rstrip('′')}: {named}" if tag else named)


def ordered(names: Any) -> list[str]:
    """Architectures in the order of the registry, the others after them; settings by their numbers; A before B, their difference last."""
    known = list(registry.ARCHITECTURES)

    def place(name: str) -> tuple[Any, ...]:
        series, _, detail = name.partition(DETAIL)
        tag, registered = detail.rpartition(": ")[0], series.split(" ")[0]
        at = known.index(registered) if registered in known else len(known)
        numbers = [(float(n), "") if n[:1].isdigit() else (0.0, n) for n in NUMBERS.split(name)]
        return name == MINUS, tag, at, numbers

    return sorted({str(n) for n in (names.unique() if isinstance(names, pd.Series) else names)}, key=place)


def pale(architecture: str, alpha: float = 0.18, among: Sequence[str] = ()) -> str:
    """The architecture's colour, transparent; `among` as of `colour`."""
    c = colour(architecture, among)
    return f"rgba({int(c[1:3], 16)},{int(c[3:5], 16)},{int(c[5:], 16)},{alpha})"


def site(name: Any) -> str:
    """A site in words."""
    return SITES.get(str(name), words(name))


def words(name: Any) -> str:
    """A name in words, safe inside a figure; nothing for null."""
    return "" if pd.isna(name) else markup.escape(str(name)).replace("_", " ")


def part(name: Any) -> str:
    """A matrix or a term of a sum in words: `W_V`, `embedding`, `MLP 0`, `attention 2 to MLP 2`."""
    if str(name).startswith("W_"):
        return markup.escape(str(name))
    terms = [re.fullmatch(r"(\d+)_(attn|mlp)_out", term) for term in str(name).split(":")]
    named = [f"{'MLP' if term[2] == 'mlp' else 'attention'} {term[1]}" for term in terms if term]
    return " to ".join(named) if len(named) == len(terms) else "embedding" if name == "embed" else words(name)


def wrapped(text: str, width: int) -> str:
    """Lines of at most `width` characters."""
    return "<br>".join(textwrap.wrap(text, width, break_on_hyphens=False))


def reading_direction(frame: pd.DataFrame) -> str:
    """Return a metric's reading direction from its records or the registry."""
    metric = str(frame["metric"].iloc[0])
    variants = {None if pd.isna(v) else str(v) for v in frame["variant"].unique()}
    alone = len(variants) == 1 and not (frame["architecture"] == MINUS).any()
    if alone and (metric, variant := variants.pop()) in VARIANT_READINGS:
        return VARIANT_READINGS[metric, variant]
    recorded = (facts(text).get("reading") for text in frame["provenance"].dropna().unique()[:200])
    says = next((str(reading) for reading in recorded if reading), READINGS.get(metric))
    if says is None and len(frame["provenance"].dropna()):
        from workbench.metrics import METRICS

        says = METRICS[metric].reading if metric in METRICS else ""
    return says or ""


def subtitle(frame: pd.DataFrame, *extra: str) -> str:
    """Return a figure's caption: data, T, documents, seeds, and architectures that were assumed."""
    measured = frame[frame["control"].isna()]
    say = [", ".join(words(d) for d in measured["data"].dropna().unique()[:4])]
    lengths = ", ".join(str(t) for t in sorted(measured["T"].dropna().unique()))
    n = sorted(measured["n"].dropna().unique())
    runs = measured[["architecture", "seed", "run"]].drop_duplicates()  # of hundreds of thousands of rows a few hundred
    names = runs["seed"].astype("str").fillna(runs["run"].astype("str"))
    seeds = names.groupby(runs["architecture"], dropna=False).nunique()
    say.append(f"T = {lengths}" if lengths else "")
    say.append(f"n = {n[0]}{f' to {n[-1]}' if len(n) > 1 else ''} documents" if n else "")
    few, many = int(seeds.min()), int(seeds.max())
    say.append(f"{few}{f' to {many}' if many > few else ''} seed{'s' if many > 1 else ''} per model")
    guessed = [text for text in measured["provenance"].dropna().unique() if '"assumed":true' in text]
    assumed = set(measured.loc[measured["provenance"].isin(guessed), "architecture"]) if guessed else set()
    if assumed:
        say.append(f"architecture assumed: {', '.join(map(label, ordered(assumed)))}")
    doubts = dict.fromkeys(
        facts(text)["doubt"] for text in measured["provenance"].dropna().unique() if '"doubt":' in text
    )
    partial = dict.fromkeys(
        map(left_out, (text for text in measured["provenance"].dropna().unique() if '"left_out":' in text))
    )
    texts = (text for text in measured["provenance"].dropna().unique() if '"coverage":' in text)
    shown = dict.fromkeys(facts(text)["coverage"].rstrip(".") for text in texts)
    return wrapped("; ".join(s for s in (*doubts, *say, *partial, *extra, *shown) if s), 125)


def beyond_range(unit: object, value: pd.Series, low: pd.Series, high: pd.Series, *, difference: bool) -> str:
    """Return a caption's note if the interval of a share, or of a difference of shares, passes its range and no value does; else empty."""
    least = -1.0 if difference else 0.0
    bounded = str(unit).startswith("share") and value.min() >= least and value.max() <= 1.0
    if not bounded or not (low.min() < least or high.max() > 1.0):  # NaN: no interval
        return ""
    return f"intervals beyond {least:g} or 1 come from the small number of seeds".replace("-", "−")


def positions_of(rows: pd.DataFrame) -> str:
    """Return words for a title if a measure of position 0 has a head that attends more to another position; else empty."""
    texts = rows["provenance"].dropna().unique() if "provenance" in rows else ()
    return ", first position only" if any('"doubt":"of the first position only' in text for text in texts) else ""


def dressed(figure: go.Figure, title: str, under: str, height: int) -> go.Figure:
    """Set title, subtitle, margins and greys that are legible on light and dark pages."""
    title, under = _tame(title), _tame(under)
    lines = under.count("<br>") + 1 if under else 0
    top = AIR + ROOM + LINE * lines + (26 if any(a.yref == "paper" for a in figure.layout.annotations) else 0)
    # properties are set one by one: `update` compares what it nests, which takes ten times as long
    layout = figure.layout
    layout.title = {
        "text": title, "x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top",
        "pad": {"t": 8, "l": 4}, "font": {"size": 16}, "subtitle": {"text": under, "font": {"size": 12, "color": GREY}},
    }  # fmt: skip
    layout.height, layout.margin = height + top, {"l": 76, "r": 20, "t": top, "b": 56}
    layout.font = {"color": GREY, "size": 12}
    layout.legend = {"orientation": "v", "x": 1.02, "y": 1, "tracegroupgap": 2}
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)"
    layout.hovermode, layout.bargap = "closest", 0.25
    for axis in (*figure.select_xaxes(), *figure.select_yaxes()):
        axis.gridcolor = axis.zerolinecolor = GRID
        axis.automargin = True
        upright = axis.plotly_name.startswith("y")
        axis.title.standoff = 14 + 10 * str(axis.title.text or "").count("<br>") if upright else 12
    # values that differ by rounding alone are one line, on an axis from 0
    for name, values in values_by_axis(figure).items():
        axis, low, high = figure.layout[name], float(values.min()), float(values.max())
        if axis.range is None and axis.type != "log" and high - low <= NOISE * max(-low, high):
            axis.range = [min(0.0, 2 * low), max(0.0, 2 * high)]
    for note in layout.annotations:
        note.font.size = 13
    for trace in figure.data:
        if "<" in str(trace.name):
            trace.name = _tame(trace.name)
    return figure


def values_by_axis(figure: go.Figure, skip: str = "") -> dict[str, np.ndarray]:
    """Return all finite values drawn along each numeric axis of curves and bars: points, error bars, bars from zero, stacked sums.

    Axes that match another are counted there. `skip`: `meta` of traces that are left out.
    """
    values, stacks = dict[str, list[np.ndarray]](), dict[Any, float]()
    for trace in figure.data:
        if trace.type not in ("scatter", "bar") or (skip and trace.meta == skip):
            continue
        if trace.type == "scatter" and trace.mode == "text":
            continue
        letter = "x" if trace.orientation == "h" else "y"
        axis = str(trace[f"{letter}axis"] or letter)
        axis = str(figure.layout[f"{letter}axis{axis[1:]}"].matches or axis)
        name, numbers = f"{letter}axis{axis[1:]}", trace[letter]
        if numbers is None or not len(numbers) or figure.layout[name].type == "category":
            continue
        if any(isinstance(v, str) for v in numbers):
            continue
        drawn, error = np.asarray(numbers, dtype=float), trace[f"error_{letter}"]
        up = np.zeros(len(drawn)) if error.array is None else np.nan_to_num(np.asarray(error.array, dtype=float))
        down = up if error.arrayminus is None else np.nan_to_num(np.asarray(error.arrayminus, dtype=float))
        values.setdefault(name, []).extend([drawn + up, drawn - down])
        if trace.type == "bar":
            values[name].append(np.zeros(1))
            if figure.layout.barmode in ("stack", "relative"):
                places = trace["y" if letter == "x" else "x"]
                for place, value in zip(places if places is not None else range(len(drawn)), drawn, strict=True):
                    key = name, trace.xaxis, trace.yaxis, trace.offsetgroup, place, value >= 0
                    stacks[key] = stacks.get(key, 0.0) + float(np.nan_to_num(value))
    for key, total in stacks.items():
        values[key[0]].append(np.array([total]))
    together = {name: np.concatenate(parts) for name, parts in values.items()}
    return {name: finite for name, all_ in together.items() if len(finite := all_[np.isfinite(all_)])}


def at_least(figure: go.Figure, pixels: int) -> go.Figure:
    """The figure, which a narrow window scrolls sideways: it is never drawn narrower than this."""
    figure.layout.meta = (figure.layout.meta or {}) | {"least": pixels}
    return figure


def untitled(figure: go.Figure) -> tuple[str, str]:
    """A figure's title and subtitle in plain words, for a page that sets them; they and their room are taken off the figure."""
    layout, known = figure.layout, dict(figure.layout.meta or {})
    if "title" not in known and layout.title.text and not figure.frames:
        under = str(layout.title.subtitle.text or "")
        room = ROOM + LINE * (under.count("<br>") + 1 if under else 0)
        layout.meta = known | {"title": layout.title.to_plotly_json(), "room": room}
        layout.title, layout.height, layout.margin.t = None, layout.height - room, layout.margin.t - room
    title = (layout.meta or {}).get("title", {})
    return plain(title.get("text")), plain(title.get("subtitle", {}).get("text"))


def titled(figure: go.Figure) -> go.Figure:
    """A copy of a figure that has its words again, where a page took them off."""
    copy = go.Figure(figure)
    meta = copy.layout.meta or {}
    if "title" in meta:
        copy.layout.title, copy.layout.meta = meta["title"], None
        copy.layout.height += meta["room"]
        copy.layout.margin.t += meta["room"]
    return copy


def _tame(text: str) -> str:
    """Text without markup but line ends: names of runs and metrics hold anything, and figures draw links."""
    return re.sub(r"<(?!br>)", "&lt;", text)


def true_minus(text: str) -> str:
    """Return a text with true minus signs before its numbers."""
    return re.sub(r"(?<![\w.)%])-(?=[\d.])", "−", text)


def with_signs(text: str) -> str:
    """Return a sentence with at most three significant digits, true minus signs and fixed spaces before `%` and in `p = 0.01`."""

    def rounded(found: re.Match[str]) -> str:
        digits = found[0].replace(".", "").lstrip("0")
        return found[0] if len(digits) < 4 else f"{float(found[0]):{'.3g' if float(found[0]) < 999.5 else '.0f'}}"

    text = re.sub(r"\bp = (?=\d)", "p\u00a0=\u00a0", text)
    return re.sub(r"(?<=\d) ?%", "\u00a0%", BETWEEN.sub(" − ", true_minus(LONG.sub(rounded, text))))


def plain(text: Any) -> str:
    """Text of a figure without its markup."""
    return markup.unescape(str(text or "").replace("<br>", " "))


def narrow(figure: go.Figure, width: int = 88) -> go.Figure:
    """The figure for a column of half a page: its subtitle in shorter lines, its legend under it."""
    under = _tame(wrapped(plain(figure.layout.title.subtitle.text), width))
    more = LINE * (under.count("<br>") - str(figure.layout.title.subtitle.text or "").count("<br>"))
    figure.update_layout(
        title_subtitle_text=under, height=figure.layout.height + more, margin_t=figure.layout.margin.t + more
    )
    named = {str(t.name) for t in figure.data if t.showlegend is not False}
    if figure.layout.showlegend is not False and len(named) > 1:
        figure.update_layout(
            legend={"orientation": "h", "x": 0, "xref": "container", "y": 0, "yref": "container", "yanchor": "bottom"},
            height=figure.layout.height + 30, margin_b=figure.layout.margin.b + 30,
        )  # fmt: skip
    return figure


def axis_title(unit: str, says: str, width: int = 46) -> str:
    """A unit and, under it, which way to read it."""
    lines_of_text = "<br>".join(markup.escape(line) for line in textwrap.wrap(says, width))
    return (
        f'{markup.escape(unit)}<br><span style="font-size:11px">{lines_of_text}</span>' if says else markup.escape(unit)
    )


def outer_titles(figure: go.Figure, panels: int, columns: int) -> None:
    """Keep x titles on the columns' bottom panels only."""
    for i in range(panels - columns):
        figure.update_xaxes(title_text="", row=i // columns + 1, col=i % columns + 1)


def colour_axis(scale: str, low: float, high: float, title: str, **bar: Any) -> dict[str, Any]:
    """Return a colour axis with the title of its bar."""
    bar = {"title": {"text": title}, "thickness": 12, "x": 1.01} | bar
    return {"colorscale": scale, "cmin": low, "cmax": high, "colorbar": bar}
