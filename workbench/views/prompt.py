"""One text through one model or two: what each layer would say, what it carries, what comes next, and who said so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench import plots
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.plots.tokens import token_ticks
from workbench.views.base import Drawing, view
from workbench.views.link import Link
from workbench.views.source import Source, Subject

WINDOW, TOP, SHOWN = 128, 50, 10  # positions drawn at a time, tokens to choose from and those drawn
LENS = {
    "probability": ("share", (0.0, 1.0), "probability of the token that really follows; higher: it is read already"),
    "rank": ("tokens ahead", None, "tokens likelier than the one that follows; 0: it leads; higher: worse"),
    "entropy": ("nats", None, "spread of the reading; lower: surer"),
    "kl": ("nats", None, "distance to the model's own prediction; lower: closer; 0 in the last row"),
}
VALUES = {
    "effective": ("norm", None, "length of what attention sums, after the shortcut"),
    "own": ("norm", None, "length of the layer's own value"),
    "first_part": ("norm", None, "length of the first layer's part in it, with its coefficient"),
    "cosine": ("cosine", (-1.0, 1.0), "angle between own and effective value; 1: the shortcut does not turn it"),
    "stream": ("norm", None, "length of the hidden state; row L is what the final norm reads"),
}
SITES = {"stream": "hidden state", "own_v": "own values", "v": "effective values"}


def position(ask: Source, link: Link) -> tuple[int, list[str]]:
    """The chosen position of model A's tokens, the last unless the link says, and the tokens."""
    tokens = ask.tokens(ask.subjects(link)[0], ask.prompt(link))
    at = link.whole("position", len(tokens) - 1)
    if at is None or not 0 <= at < len(tokens):
        raise BadData(f"position {at}: the prompt has positions 0 to {len(tokens) - 1}")
    return at, tokens


def _window(ask: Source, link: Link) -> tuple[int, int]:
    at, tokens = position(ask, link)
    first = max(0, min(at - WINDOW // 2, len(tokens) - WINDOW))
    return first, min(len(tokens), first + WINDOW)


def _choose(link: Link, key: str, choices: dict[str, Any], default: str) -> str:
    asked = link.text(key, default) or default
    if asked not in choices:
        raise UnknownName(key, asked, choices)
    return asked


def _map(ask: Source, link: Link, title: str, about: str, grid_of: Callable[[Subject], plots.Grid]) -> Drawing:
    """A map over layers and tokens for each subject, and what was left out of a long prompt."""
    parts = [(subject.title, grid_of(subject)) for subject in ask.subjects(link)]
    first, last = _window(ask, link)
    whole = len(position(ask, link)[1])
    under = f"{about}; one text, no averaging"
    if last - first < whole:
        under += f"; positions {first} to {last - 1} of {whole}, around the chosen one"
    figure = plots.grids(parts, title, under)
    return Drawing(figure, plots.grid_table(parts))


@view("prompt")
def lens(ask: Source, link: Link) -> Drawing:
    """What each layer would predict after each token, read off the stream with the model's own head."""
    quantity = _choose(link, "quantity", LENS, "probability")
    unit, span, about = LENS[quantity]
    text, (first, last) = ask.prompt(link), _window(ask, link)

    def grid_of(subject: Subject) -> plots.Grid:
        found = ask.look("lens.lens", subject, text, top=5, positions=slice(first, last))
        values = getattr(found, quantity)
        texts = np.array([[cell[0] for cell in row] for row in found.top_tokens], dtype=object)
        return plots.Grid(
            values, _layers(len(values)), _named(found.tokens, first), unit, "layer", "token", texts, span
        )

    return _map(
        ask,
        link,
        "What each layer would say next",
        f"its likeliest token in the cell or on hover; colour: {about}",
        grid_of,
    )


@view("prompt")
def values(ask: Source, link: Link) -> Drawing:
    """Length of the values and streams at each layer and token."""
    kind = link.text("site", "effective")
    kind = kind if kind in VALUES else "effective"
    unit, span, about = VALUES[kind]
    text, (first, last) = ask.prompt(link), _window(ask, link)

    def grid_of(subject: Subject) -> plots.Grid:
        found = ask.look("prompt.values", subject, text)
        array = getattr(found, kind)[:, first:last]
        return plots.Grid(
            array, _layers(len(array)), _named(found.tokens[first:last], first), unit, "layer", "token", span=span
        )

    return _map(ask, link, f"Values: {kind.replace('_', ' ')}", about, grid_of)


@view("prompt")
def identity(ask: Source, link: Link) -> Drawing:
    """How well each vector still names its own token."""
    site = {"own": "own_v", "effective": "v"}.get(link.text("site", "stream") or "", "stream")
    text, (first, last) = ask.prompt(link), _window(ask, link)
    chance = []

    def grid_of(subject: Subject) -> plots.Grid:
        found = ask.look("lens.identity", subject, text, sites=(site,), positions=slice(first, last))
        chance.append(found.chance)
        array = found.reciprocal_rank[site]
        return plots.Grid(
            array, _layers(len(array)), _named(found.tokens, first), "1 / rank", "layer", "token", span=(0.0, 1.0)
        )

    drawing = _map(
        ask, link, f"Is the token still in the {SITES[site]}?",
        "1: the nearest table row is the token's own; lower: it is buried; nothing is trained", grid_of,
    )  # fmt: skip
    said = f"A token drawn at random would give {chance[0]:.3g}."
    if site == "v" or site == "own_v":
        said += " First-layer values, and all of SVFormer's, are lookups by construction: 1 there is no finding."
    return Drawing(drawing.figure, drawing.table, said)


@view("prompt")
def predictions(ask: Source, link: Link) -> Drawing:
    """The likeliest tokens after the chosen position."""
    at, tokens = position(ask, link)
    text, found = ask.prompt(link), []
    frames = []
    for subject in ask.subjects(link):
        top = ask.look("prompt.predictions", subject, text, position=at, top=TOP).top.head(SHOWN)
        found.append((subject.title, subject.series, top["token"].tolist(), top["probability"].tolist()))
        frames.append(top.assign(model=subject.title))
    figure = plots.next_tokens(found)
    figure.update_layout(title_subtitle_text=f"after {token_ticks(tokens)[at]}; probability, one text")
    return Drawing(figure, pd.concat(frames, ignore_index=True))


@view("prompt")
def surprise(ask: Source, link: Link) -> Drawing:
    """How surprising each token was, given those before it."""
    (first, last), text = _window(ask, link), ask.prompt(link)
    figure, frames = go.Figure(), []
    for subject in ask.subjects(link):
        found = ask.look("prompt.predictions", subject, text, position=position(ask, link)[0], top=TOP)
        ticks = _named(found.tokens[first:last], first)
        loss = found.loss[first:last]
        figure.add_scatter(
            x=ticks, y=loss, mode="lines+markers", marker_size=4, name=subject.title, line_color=plots.colour(subject.series),
            hovertemplate="%{x}: %{y:.3f} nats<extra></extra>",
        )  # fmt: skip
        frames.append(pd.DataFrame({"model": subject.title, "token": ticks, "nats": loss}))
    if len(frames) == 2 and len(frames[0]) == len(frames[1]):
        minus = frames[0]["nats"] - frames[1]["nats"]
        figure.add_bar(x=ticks, y=minus, name=plots.MINUS, marker_color=plots.colour(plots.MINUS), opacity=0.6)
    every = max(1, -(-len(ticks) // 40))
    figure.update_xaxes(tickvals=ticks[::every], type="category", tickangle=-90, tickfont_size=10)
    figure.update_yaxes(title_text="nats")
    plots.dressed(
        figure, "How surprising each token was", "-ln of its probability given those before it; lower: expected", 300
    )
    return Drawing(figure, pd.concat(frames, ignore_index=True))


# ---- who said so -----------------------------------------------------------------------------------------------------


def target(ask: Source, link: Link) -> tuple[int, str]:
    """The token asked after, as id and text: the link's, else model A's likeliest after the position."""
    at, _ = position(ask, link)
    subject = ask.subjects(link)[0]
    top = ask.look("prompt.predictions", subject, ask.prompt(link), position=at, top=TOP).top
    asked = link.whole("target")
    if asked is None:
        return int(top["id"][0]), str(top["token"][0])
    known = top[top["id"] == asked]
    return asked, str(known["token"].iloc[0]) if len(known) else f"#{asked}"


@view("prompt")
def attribution(ask: Source, link: Link) -> Drawing:
    """What each layer, head and value path adds to the logit of a token: exact, and checked to sum up."""
    at, tokens = position(ask, link)
    token, named = target(ask, link)
    against, layer, head = link.whole("against"), link.whole("layer"), link.whole("head")
    found, frames = [], []
    for subject in ask.subjects(link):
        whole = ask.look("attribution.attribute", subject, ask.prompt(link), position=at, token=token, against=against)
        rows = _level(whole.frame, layer, head)
        found.append((subject, whole, rows))
        frames.append(rows.assign(model=subject.title, logit=whole.logit, error=whole.error))
    where = "" if layer is None else f", layer {layer}" + ("" if head is None else f", head {head}")
    figure = _bars([(s.title, plots.colour(s.series), rows) for s, _, rows in found])
    asked = f"logit of {_quoted(named)}" + ("" if against is None else f" minus that of #{against}")
    plots.dressed(
        figure, f"Who says {_quoted(named)}{where}",
        f"{asked} after {token_ticks(tokens)[at]}; direct effect in logits, final scale frozen; right: pushes it up", 340,
    )  # fmt: skip
    said = "; ".join(
        f"{s.title}: the parts of each level sum to {w.totals['layer']:.4f}, the model computed {w.logit:.4f} (off by {w.error:.1e})"
        for s, w, _ in found
    )
    return Drawing(figure, pd.concat(frames, ignore_index=True), said + ".")


def _level(frame: pd.DataFrame, layer: int | None, head: int | None) -> pd.DataFrame:
    """Rows of the level asked for: layers; a layer's heads and MLP; a head's value paths."""
    if layer is None:
        return frame[frame["level"] == "layer"]
    inside = frame[frame["layer"] == layer]
    rows = (
        inside[(inside["level"] == "value_path") & (inside["head"] == head)]
        if head is not None
        else inside[inside["level"] == "head"]
    )
    if rows.empty:
        raise WorkbenchError(
            f"there is no layer {layer}" + ("" if head is None else f", head {head}") + " with parts of its own"
        )
    return rows


def _bars(parts: Sequence[tuple[str, str, pd.DataFrame]]) -> go.Figure:
    figure = make_subplots(1, 1)
    for title, colour, rows in parts:
        names = [_part(row) for row in rows.to_dict("records")]
        figure.add_bar(
            y=names, x=rows["value"], orientation="h", name=title, marker_color=colour,
            hovertemplate="%{y}: %{x:.4f} logits<extra></extra>",
        )  # fmt: skip
    if len(parts) == 2:
        both = parts[0][2].assign(name=[_part(r) for r in parts[0][2].to_dict("records")]).merge(
            parts[1][2].assign(name=[_part(r) for r in parts[1][2].to_dict("records")]), on="name", suffixes=("", "_b")
        )  # fmt: skip
        figure.add_bar(
            y=both["name"], x=both["value"] - both["value_b"], orientation="h", name=plots.MINUS,
            marker_color=plots.colour(plots.MINUS),
        )  # fmt: skip
    figure.update_xaxes(title_text="logits")
    return figure.update_yaxes(autorange="reversed", type="category")


def _part(row: dict[Any, Any]) -> str:
    """A part in words: `embedding`, `attention 2`, `MLP 3`, `layer 2 head 1, first`."""
    at = "" if pd.isna(row["layer"]) else f" {int(row['layer'])}"
    if row["part"] == "embed":
        return "embedding"
    if pd.isna(row["head"]):
        return f"{ {'attn': 'attention', 'mlp': 'MLP'}.get(row['part'], row['part']) }{at}"
    path = "" if pd.isna(row["path"]) else f", {row['path'].replace('.', ' ')} values"
    return f"layer{at} head {int(row['head'])}{path}"


def _layers(rows: int) -> list[str]:
    return [str(n) for n in range(rows)]


def _named(tokens: Sequence[str], first: int) -> list[str]:
    return [f"{first + i}:{t if len(t) <= 12 else t[:11] + '…'}" for i, t in enumerate(tokens)]


def _quoted(token: str) -> str:
    import html

    return f"“{html.escape(token)}”"
