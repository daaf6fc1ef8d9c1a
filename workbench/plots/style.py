"""What all figures share: names, colours, subtitles, dress, alt texts, tables and offline HTML."""

from __future__ import annotations

import hashlib
import html as markup
import re
import textwrap
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from workbench.names import LABELS
from workbench.results import facts

COLOURS = {
    "transformer": "#0072B2", "resformer": "#D55E00", "svformer": "#009E73", "neutreno": "#56B4E9", "denseformer": "#E69F00",
    "resformer+neutreno": "#8F8500", "residual_k": "#CC79A7",
    # relatives are shades of one family
    "resformer_constant": "#B03A00", "resformer_learnable": "#F0793A", "resformer_learnable_plus": "#8D2F07",
    "resformer_sparse": "#E59B7A", "resformer_dense": "#E8443A", "svformer+gqa": "#63BC9F", "svformer+cla": "#05593F",
    "resformer+denseformer": "#B8860B", "gqa": "#1F9E9E", "mqa": "#0B6B75", "cla": "#5AA469", "share_q": "#99AEC9",
    "share_k": "#74A9CF", "share_v": "#2B8CBE", "cross_layer": "#7B5EA7", "cross_layer_all": "#54447F", "same_key": "#A98BD4",
    "identity_map": "#B7A3D1", "residual_q": "#D79ABA", "residual_attention": "#AA4488", "residual_hidden": "#852966",
    "value_embedding": "#B5651D", "bank_of_values": "#7A4A1E", "gated_attention": "#6F7F8F", "cut_skip": "#454F5A", "A − B": "#8B6FC0",
}  # fmt: skip
SYMBOLS = {
    "circle": "transformer resformer_learnable resformer_learnable_plus share_k",
    "square": "resformer svformer+gqa identity_map gated_attention",
    "diamond": "svformer svformer+cla cross_layer residual_q",
    "triangle-up": "neutreno resformer_sparse residual_attention",
    "triangle-down": "denseformer share_q cross_layer_all value_embedding",
    "x": "residual_k resformer_dense residual_hidden",
    "cross": "resformer_constant cla same_key cut_skip",
    "star": "resformer+denseformer share_v bank_of_values",
    "bowtie": "resformer+neutreno gqa mqa",
}
"""Marks on curves: those of one mark have colours that the colour-blind tell apart too."""
SITES = {
    "v": "effective values",
    "own_v": "own values",
    "stream": "hidden state",
    "final": "after the final norm",
    "z": "attention output",
    "q": "queries",
    "k": "keys",
}
READINGS = {
    "train_loss": "lower: better prediction", "validation_loss": "lower: better prediction", "copy_loss": "lower: copies better",
    "gradient_norm": "higher: stronger pull", "tokens_per_second": "higher: faster",
}  # fmt: skip
VARIANT_READINGS: dict[tuple[str, str | None], str] = {
    ("importance_entropy", "per_head"): "lower: more concentrated", ("importance_entropy", "deficit"): "higher: more concentrated",
    ("effective_rank", "top_share"): "higher: fewer directions in use", ("effective_rank", "trace"): "higher: longer vectors",
    ("head_rank", "top_share"): "higher: the head's vectors use fewer directions",
    ("induction_score", "previous"): "higher: the head looks at the token before", ("throughput", "peak"): "higher: more memory",
    ("sink_output", "mass"): "higher: stronger sink", ("sink_output", "spread"): "lower: alike at all positions",
    ("sink_output", "no_op"): "higher: a sink that writes nothing, in more documents",
    ("sink_output", "broadcast"): "higher: a sink that writes everywhere, in more documents",
    ("value_ablation", "token_mean"): "lower: less context is needed", ("value_ablation", "mean"): "higher: these values matter more",
    ("value_ablation", "zero"): "higher: these values matter more", ("value_ablation", "kept"): "higher: less context is needed",
}  # fmt: skip
"""Of measures whose variants are not read the same way."""
MINUS = "A − B"  # a difference of two subjects
DETAIL = " · "  # between a series and one run of it
GREY, GRID, SEQUENTIAL, DIVERGING = "#808080", "rgba(128,128,128,0.25)", "Cividis", "RdBu_r"
INK = (
    ".infolayer text, .menulayer text, .bartext-outside, .textpoint text, .xaxislayer-above text, .yaxislayer-above text, "
    ".xaxislayer-below text, .yaxislayer-below text"
)
"""Words around a figure: in a page of HTML they take the page's ink, dark on light and light on dark."""
CONFIG = {"showSendToCloud": False, "displaylogo": False, "responsive": True}


def colour(architecture: str) -> str:
    """The architecture's colour; an unregistered name gets one of its own from its hash.

    `resformer · A: s1, step 300`, one run at one step, has its architecture's; `B′:`, the second of two that are alike, a
    lighter one.
    """
    series, _, detail = architecture.partition(DETAIL)
    if detail:
        plain = colour(series.split(" ")[0])
        return _lighter(plain) if detail.startswith("B′") else plain
    hue = int(hashlib.sha256(architecture.encode()).hexdigest()[:4], 16) % 360
    return COLOURS.get(architecture, f"hsl({hue},55%,48%)")


def symbol(architecture: str) -> str:
    """The mark on the architecture's curves; an unregistered name gets one from its hash."""
    series = architecture.partition(DETAIL)[0].split(" ")[0]
    named = next((mark for mark, names in SYMBOLS.items() if series in names.split()), None)
    return named or list(SYMBOLS)[int(hashlib.sha256(series.encode()).hexdigest()[:4], 16) % len(SYMBOLS)]


def _lighter(plain: str) -> str:
    """A colour half way to white."""
    if not plain.startswith("#"):
        return plain
    return "#" + "".join(f"{(int(plain[i : i + 2], 16) + 255) // 2:02X}" for i in (1, 3, 5))


def label(architecture: str) -> str:
    """The architecture's name as its paper writes it, safe inside a figure."""
    series, _, detail = architecture.partition(DETAIL)
    tag, _, rest = detail.rpartition(": ")
    named = LABELS.get(series, series) + (DETAIL + rest if rest else "")
    return markup.escape(f"{tag.rstrip('′')}: {named}" if tag else named)


def ordered(names: Any) -> list[str]:
    """Architectures in the order of their colours, the others after them; A before B, their difference last."""
    known = list(COLOURS)

    def place(name: str) -> tuple[bool, str, int, str]:
        series, _, detail = name.partition(DETAIL)
        tag, registered = detail.rpartition(": ")[0], series.split(" ")[0]
        return name == MINUS, tag, known.index(registered) if registered in known else len(known), name

    return sorted({str(n) for n in names}, key=place)


def pale(architecture: str, alpha: float = 0.18) -> str:
    """The architecture's colour, transparent."""
    c = colour(architecture)
    if c.startswith("#"):
        return f"rgba({int(c[1:3], 16)},{int(c[3:5], 16)},{int(c[5:], 16)},{alpha})"
    return c.replace("hsl", "hsla").replace(")", f",{alpha})")


def site(name: Any) -> str:
    """A site in words."""
    return SITES.get(str(name), words(name))


def words(name: Any) -> str:
    """A name in words, safe inside a figure; nothing for null."""
    return "" if pd.isna(name) else markup.escape(str(name)).replace("_", " ")


def wrapped(text: str, width: int) -> str:
    """Lines of at most `width` characters."""
    return "<br>".join(textwrap.wrap(text, width))


def _facts(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [facts(p) for p in frame["provenance"].dropna().unique()[:200]]


def reading(frame: pd.DataFrame) -> str:
    """Which way a metric's numbers are to be read, as its records or the registry say."""
    metric = str(frame["metric"].iloc[0])
    variants = {None if pd.isna(v) else str(v) for v in frame["variant"].unique()}
    alone = len(variants) == 1 and not (frame["architecture"] == MINUS).any()
    if alone and (metric, variant := variants.pop()) in VARIANT_READINGS:
        return VARIANT_READINGS[metric, variant]
    found = next((str(fact["reading"]) for fact in _facts(frame) if fact.get("reading")), READINGS.get(metric))
    if found is None and len(frame["provenance"].dropna()):
        from workbench.metrics import METRICS

        found = METRICS[metric].reading if metric in METRICS else ""
    return found or ""


def subtitle(frame: pd.DataFrame, *extra: str) -> str:
    """What a figure must say of itself: data, T, documents, seeds, and whether an architecture was only assumed."""
    measured = frame[frame["control"].isna()]
    say = [", ".join(words(d) for d in measured["data"].dropna().unique()[:4])]
    lengths = ", ".join(str(t) for t in sorted(measured["T"].dropna().unique()))
    n = sorted(measured["n"].dropna().unique())
    seeds = (
        measured["seed"].astype("str").fillna(measured["run"]).groupby(measured["architecture"], dropna=False).nunique()
    )
    say.append(f"T = {lengths}" if lengths else "")
    say.append(f"n = {n[0]}{f' to {n[-1]}' if len(n) > 1 else ''} documents" if n else "")
    few, many = int(seeds.min()), int(seeds.max())
    say.append(f"{few}{f' to {many}' if many > few else ''} seed{'s' if many > 1 else ''} per model")
    assumed = set(measured.loc[measured["provenance"].str.contains('"assumed":true', na=False), "architecture"])
    if assumed:
        say.append(f"architecture assumed: {', '.join(map(label, ordered(assumed)))}")
    return wrapped("; ".join(s for s in (*say, *extra) if s), 125)


def dressed(figure: go.Figure, title: str, under: str, height: int) -> go.Figure:
    """Title, subtitle and transparent paper; greys that read on light and on dark."""
    title, under = _tame(title), _tame(under)
    lines = under.count("<br>") + 1 if under else 0
    top = 44 + 17 * lines + (26 if figure.layout.annotations else 0)
    figure.update_layout(
        title={"text": title, "x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top",
               "pad": {"t": 8, "l": 4}, "font": {"size": 16}, "subtitle": {"text": under, "font": {"size": 12, "color": GREY}}},
        height=height + top, margin={"l": 76, "r": 20, "t": top, "b": 56}, font={"color": GREY, "size": 12},
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", hovermode="closest", bargap=0.25,
        legend={"orientation": "v", "x": 1.02, "y": 1, "tracegroupgap": 2},
    )  # fmt: skip
    figure.update_xaxes(gridcolor=GRID, zerolinecolor=GRID, title_standoff=12, automargin=True)
    figure.update_yaxes(gridcolor=GRID, zerolinecolor=GRID, automargin=True)
    figure.for_each_yaxis(lambda a: a.update(title_standoff=14 + 10 * str(a.title.text or "").count("<br>")))
    figure.for_each_annotation(lambda a: a.update(font_size=13))
    for trace in figure.data:
        if "<" in str(trace.name):
            trace.name = _tame(trace.name)
    return figure


def _tame(text: str) -> str:
    """Text without markup but line ends: names of runs and metrics hold anything, and figures draw links."""
    return re.sub(r"<(?!br>)", "&lt;", text)


def narrow(figure: go.Figure, width: int = 88) -> go.Figure:
    """The figure for a column of half a page: its subtitle in shorter lines, its legend under it."""
    under = _tame(wrapped(_plain(figure.layout.title.subtitle.text), width))
    more = 17 * (under.count("<br>") - str(figure.layout.title.subtitle.text or "").count("<br>"))
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
    said = "<br>".join(markup.escape(line) for line in textwrap.wrap(says, width))
    return f'{markup.escape(unit)}<br><span style="font-size:11px">{said}</span>' if says else markup.escape(unit)


def outer_titles(figure: go.Figure, panels: int, columns: int) -> None:
    """Keep x titles on the lowest panel of each column only, so that rows of panels do not collide."""
    for i in range(panels - columns):
        figure.update_xaxes(title_text="", row=i // columns + 1, col=i % columns + 1)


def alt_text(shown: go.Figure | pd.DataFrame) -> str:
    """What a figure shows, in words: its title and subtitle, then each curve's ends or each map's extremes."""
    if isinstance(shown, pd.DataFrame):
        from workbench.plots.records import plot

        shown = plot(shown)
    said = [_plain(shown.layout.title.text), _plain(shown.layout.title.subtitle.text)]
    for trace in shown.data:
        if trace.type == "heatmap":
            z = np.asarray(trace.z, dtype=float)
            if np.isfinite(z).any():
                said.append(f"{_plain(trace.name) or 'map'}: {np.nanmin(z):.3g} to {np.nanmax(z):.3g}")
        elif trace.x is not None and len(trace.x) and trace.x[0] is not None and trace.hoverinfo != "skip":
            said.append(f"{_plain(trace.name)}: {_ends(trace)}")
    return "; ".join(s for s in said if s)[:1500]


def _ends(trace: Any) -> str:
    y, x = list(trace.y), list(trace.x)
    if trace.type == "bar" and trace.orientation != "h":
        return ", ".join(f"{_plain(a)} {b:.3g}" for a, b in zip(x, y, strict=True))
    if trace.type == "bar":
        return ", ".join(f"{_plain(b)} {a:.3g}" for a, b in zip(x[:5], y[:5], strict=True))
    if isinstance(y[0], str):  # named rows
        return ", ".join(f"{_plain(b)} {a:.3g}" for a, b in zip(x[:12], y[:12], strict=True))
    ends = [
        f"{float(v):.3g} at {_plain(at) if isinstance(at, str) else f'{float(at):g}'}"
        for v, at in ((y[0], x[0]), (y[-1], x[-1]))
    ]
    return f"from {ends[0]} to {ends[1]}" if len(y) > 1 else ends[0]


def _plain(text: Any) -> str:
    return markup.unescape(str(text or "").replace("<br>", " "))


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """The numbers behind a figure: columns that say something, in the order of the axes."""
    kept = frame.drop(columns=[c for c in ("provenance",) if c in frame]).dropna(axis=1, how="all")
    axes = [c for c in ("metric", "architecture", "seed", "step", "layer", "head", "position") if c in kept]
    return kept.sort_values(axes, kind="stable").reset_index(drop=True)


def html(figure: go.Figure, *, script: bool = True, whole: bool = False) -> str:
    """The figure as HTML that works offline and uploads nothing; `script=False` for all but the first of a page."""
    body = figure.to_html(include_plotlyjs=script, full_html=False, config=CONFIG, auto_play=False)
    said = markup.escape(alt_text(figure), quote=True)
    ink = f"<style>{INK} {{ fill: CanvasText !important }}</style>" if script else ""
    inside = f'{ink}<figure role="img" aria-label="{said}">{body}</figure>'
    if not whole:
        return inside
    title = markup.escape(_plain(figure.layout.title.text))
    return f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title></head><body>{inside}</body></html>'


def paper(figure: go.Figure) -> str:
    """The figure as an HTML page for pictures: dark on white, without buttons."""
    drawn = go.Figure(figure).update_layout(font_color="#222", title_subtitle_font_color="#444", paper_bgcolor="white")
    return drawn.to_html(
        include_plotlyjs=True, full_html=True, config=CONFIG | {"displayModeBar": False}, auto_play=False
    )
