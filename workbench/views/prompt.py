"""One text through one model or two: what each layer would say, what it carries, what comes next, and who said so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench import plots, prompts
from workbench.errors import UnknownName, WorkbenchError
from workbench.plots.grids import safe
from workbench.views import follow  # noqa: F401  (a view of this page)
from workbench.views.base import Drawing, view
from workbench.views.link import Link
from workbench.views.places import path_in_words, place, placed, position, quoted
from workbench.views.source import Source, Subject, read_alike

WINDOW, WORDS, TOP, SHOWN = 128, 24, 50, 10
"""Positions drawn at a time, and where each has a word in it; tokens to choose from and those drawn."""
LENS = {
    "probability": ("probability of what follows", "probability", (0.0, 1.0), "higher: it is read already"),
    "rank": (
        "rank of what follows", "tokens ahead", None,
        "tokens likelier than the one that follows; 0: it leads; higher: worse",
    ),
    "entropy": ("how unsure it is", "nats", None, "entropy of the reading; lower: surer"),
    "kl": ("distance to the real prediction", "nats", None, "KL divergence; lower: closer; 0 in the last row"),
}  # fmt: skip
VALUES = {
    "effective": ("Length of the effective values", "norm", None, "what attention sums, after the shortcut"),
    "own": ("Length of the own values", "norm", None, "what the layer computes itself"),
    "first_part": (
        "Length of the first layer's part in the values", "norm", None, "the first layer's values times their coefficient",
    ),
    "cosine": (
        "Own against effective values", "cosine", (-1.0, 1.0),
        "cosine of the angle between them; 1: the shortcut does not turn the value; lower: it does",
    ),
    "stream": ("Length of the hidden state", "norm", None, "what the next layer reads; the last row: what the final norm reads"),
}  # fmt: skip
SITES = {"stream": "hidden state", "own_v": "own values", "v": "effective values"}


def _window(source: Source, link: Link, subject: Subject, most: int) -> tuple[int, int]:
    at, length = place(source, link, subject), len(source.tokens(subject, source.prompt(link)))
    if at is None:
        at = min(position(source, link)[0], length - 1)
    first = max(0, min(at - most // 2, length - most))
    return first, min(length, first + most)


def _choose(link: Link, key: str, choices: dict[str, Any], default: str) -> str:
    asked = link.text(key, default) or default
    if asked not in choices:
        raise UnknownName(key, asked, choices)
    return asked


def _map(
    source: Source, link: Link, title: str, about: str, grid_of: Callable[[Subject, slice], plots.Grid], most: int
) -> Drawing:
    """A map over layers and tokens for each subject, and what was left out of a long prompt."""
    subjects = source.subjects(link)
    windows = [_window(source, link, subject, most) for subject in subjects]
    parts = [
        (s.title, replace(grid_of(s, slice(*window)), mark=_marked(place(source, link, s), *window)))
        for s, window in zip(subjects, windows, strict=True)
    ]
    blank = [name for name, grid in parts if not np.isfinite(grid.values).any()]
    if len(blank) == len(parts):
        raise WorkbenchError(f"nothing to draw: {' and '.join(blank)} without such a number; choose another")
    parts = [(name, grid) for name, grid in parts if name not in blank]
    (first, last), whole = windows[0], len(position(source, link)[1])
    under = f"{about}; one text, no averaging"
    if last - first < whole:
        under += f"; positions {first} to {last - 1} of {whole}, around the chosen one"
    sentence = f"{blank[0]} has no such number." if blank else ""
    return Drawing(plots.grids(parts, title, under), plots.grid_table(parts), sentence)


def _marked(at: int | None, first: int, last: int) -> tuple[None, int] | None:
    """The column of the chosen token, where the map has it."""
    return (None, at - first) if at is not None and first <= at < last else None


@view("prompt")
def lens(source: Source, link: Link) -> Drawing:
    """What each layer would predict after each token, read off the stream with the model's own head."""
    quantity = _choose(link, "quantity", LENS, "probability")
    words, unit, span, about = LENS[quantity]
    text = source.prompt(link)

    def grid_of(subject: Subject, window: slice) -> plots.Grid:
        found = source.query(prompts.logit_lens, subject, text, top=5, positions=window)
        values = getattr(found, quantity)
        texts = np.array([[cell[0] for cell in row] for row in found.top_tokens], dtype=object)
        return plots.Grid(
            values, _after(len(values)), _named(found.tokens, window.start), unit, "after layer", "token", texts, span
        )

    return _map(
        source, link, "What each layer would say next", f"its likeliest token in the cell or on hover; colour: {words}; {about}",
        grid_of, WORDS,
    )  # fmt: skip


@view("prompt")
def values(source: Source, link: Link) -> Drawing:
    """Length of the values and streams at each layer and token."""
    kind = _choose(link, "site", VALUES, "effective")
    title, unit, span, about = VALUES[kind]
    text, rows = source.prompt(link), _rows(kind)

    def grid_of(subject: Subject, window: slice) -> plots.Grid:
        found = source.query(prompts.value_norms, subject, text)
        array = getattr(found, kind)[:, window]
        names, says = rows(len(array))
        return plots.Grid(array, names, _named(found.tokens[window], window.start), unit, says, "token", span=span)

    return _map(source, link, title, about, grid_of, WINDOW)


@view("prompt")
def identity(source: Source, link: Link) -> Drawing:
    """How well each vector still names its own token."""
    site = {"own": "own_v", "stream": "stream"}.get(_choose(link, "site", VALUES, "effective"), "v")
    text, rows, chance = source.prompt(link), _rows(site), []

    def grid_of(subject: Subject, window: slice) -> plots.Grid:
        found = source.query(prompts.token_identity, subject, text, sites=(site,), positions=window)
        chance.append(f"{found.chance:.3g}")
        array = found.reciprocal_rank[site]
        names, says = rows(len(array))
        return plots.Grid(array, names, _named(found.tokens, window.start), "1 / rank", says, "token", span=(0.0, 1.0))

    those = "embeddings" if site == "stream" else "first-layer values"
    drawing = _map(
        source, link, f"Is the token still in the {SITES[site]}?",
        f"rank of the token among the {those} of all tokens, nearest first; 1: it is the nearest; lower: it is hidden; nothing is "
        "trained", grid_of, WINDOW,
    )  # fmt: skip
    known = "The embedding is" if site == "stream" else "First-layer values, and all of SVFormer's, are"
    sentence = f"A token drawn at random would give {' in A, '.join(dict.fromkeys(chance))}{' in B' * (len(set(chance)) > 1)}. "
    sentence += f"{known} the token's own by construction, so a 1 there says nothing. {drawing.sentence}"
    return Drawing(drawing.figure, drawing.table, sentence.strip())


@view("prompt")
def predictions(source: Source, link: Link) -> Drawing:
    """The likeliest tokens after the chosen position: of two models that read alike the same ones, and A - B."""
    at, tokens = position(source, link)
    text = source.prompt(link)
    places, sentence = placed(source, link)
    found = [source.query(prompts.next_tokens, subject, text, position=own, top=TOP) for subject, own in places]
    rows = [f.top.head(SHOWN) for f in found]
    alike = (
        len(places) == 2 and read_alike(*(s.entry for s, _ in places)) and len({len(f.probability) for f in found}) == 1
    )
    if alike:
        both = pd.concat([r.head(SHOWN // 2) for r in rows])[["id", "token"]].drop_duplicates("id")
        rows = [both.assign(probability=f.probability[both["id"]]) for f in found]
    frames = [r.assign(model=s.title, series=s.series) for r, (s, _) in zip(rows, places, strict=True)]
    if alike:
        minus = frames[0]["probability"] - frames[1]["probability"]
        frames.append(frames[0].assign(model=plots.MINUS, series=plots.MINUS, probability=minus))
    figure = plots.next_tokens(
        [(*f[["model", "series"]].iloc[0], f["token"].tolist(), f["probability"].tolist()) for f in frames]
    )
    figure.update_layout(title_subtitle_text=f"after {quoted(tokens[at])}, token {at}; probability, one text")
    return Drawing(figure, pd.concat(frames, ignore_index=True).drop(columns="series"), sentence)


@view("prompt")
def surprise(source: Source, link: Link) -> Drawing:
    """How surprising each token was, given those before it."""
    text, lines = source.prompt(link), []
    for subject in source.subjects(link):
        window, at = slice(*_window(source, link, subject, WINDOW)), place(source, link, subject)
        found = source.query(prompts.next_tokens, subject, text, position=-1 if at is None else at, top=TOP)
        lines.append((subject, _named(found.tokens[window], window.start), found.loss[window]))
    alike = all(names == lines[0][1] for _, names, _ in lines)
    figure = make_subplots(1 if alike else len(lines), 1, vertical_spacing=0.3)
    for i, (subject, names, loss) in enumerate(lines):
        row = 1 if alike else i + 1
        ticks = plots.unique([safe(name) for name in names])
        figure.add_scatter(
            x=ticks, y=loss, mode="lines+markers", marker={"size": 6, "symbol": plots.symbol(subject.series)}, name=subject.title,
            line={"color": plots.colour(subject.series), "dash": "dash" if i else "solid"},
            hovertemplate="%{x}: %{y:.3f} nats<extra></extra>", row=row, col=1,
        )  # fmt: skip
        every = max(1, -(-len(ticks) // 40))
        figure.update_xaxes(tickvals=ticks[::every], type="category", tickangle=-90, tickfont_size=10, row=row, col=1)
    if len(lines) == 2 and alike:
        figure.add_bar(
            x=ticks, y=lines[0][2] - lines[1][2], name=plots.MINUS, marker_color=plots.colour(plots.MINUS), opacity=0.6
        )
    figure.update_yaxes(title_text="nats")
    plots.dressed(
        figure, "How surprising each token was", "-ln of its probability given those before it; lower: expected",
        300 if alike else 460,
    )  # fmt: skip
    table = [pd.DataFrame({"model": s.title, "token": names, "nats": loss}) for s, names, loss in lines]
    sentence = "" if alike else "A and B read this text as different tokens, so A − B is not drawn."
    return Drawing(figure, pd.concat(table, ignore_index=True), sentence)


# ---- who said so -----------------------------------------------------------------------------------------------------


def target(source: Source, link: Link) -> int:
    """Id of the token asked after: the link's, else that of model A's likeliest after the position."""
    at, asked = position(source, link)[0], link.whole("target")
    if asked is not None:
        return asked
    found = source.query(prompts.next_tokens, source.subjects(link)[0], source.prompt(link), position=at, top=TOP)
    return int(found.top["id"][0])


@view("prompt")
def attribution(source: Source, link: Link) -> Drawing:
    """What each layer, head and value path adds to the logit of a token: exact, and checked to sum up."""
    at, tokens = position(source, link)
    token, against = target(source, link), link.whole("against")
    layer, head = link.whole("layer"), link.whole("head")
    found: list[tuple[Subject, Any, pd.DataFrame]] = []
    places, left_out = placed(source, link)
    sentences = [left_out] if left_out else []
    for subject, own in places:
        whole = source.query(
            prompts.logit_attribution, subject, source.prompt(link), position=own, token=token, against=against
        )
        try:
            rows = _level(whole.frame, layer, head)
            if found and (whole.token, whole.against) != (found[0][1].token, found[0][1].against):
                raise WorkbenchError("its tokenizer has other tokens under these numbers")
        except WorkbenchError as error:
            if not found:  # A itself
                raise
            sentences.append(f"{subject.title} is left out: {error}.")
            continue
        shown = "" if layer is None else f"; the bars shown sum to {rows['value'].sum():.4f}"
        sentences.append(
            f"{subject.title}: the parts of each level sum to {whole.totals['layer']:.4f}, the model computed {whole.logit:.4f} "
            f"(off by {whole.error:.1e}){shown}."
        )
        sentences += whole.notes
        found.append((subject, whole, rows))
    first = found[0][1]
    where = "" if layer is None else f", layer {layer}" + ("" if head is None else f", head {head}")
    figure = _bars([(s.title, plots.colour(s.series), rows) for s, _, rows in found])
    asked = f"the score (logit) of {quoted(first.token)}"
    asked += "" if first.against is None else f" minus that of {quoted(first.against)}"
    plots.dressed(
        figure, f"Who says {quoted(first.token)}{where}",
        f"what each part adds to {asked} after {quoted(tokens[at])}, token {at}; right: pushes it up; final norm's scale held", 340,
    )  # fmt: skip
    frames = [rows.assign(model=s.title, logit=whole.logit, error=whole.error) for s, whole, rows in found]
    return Drawing(figure, pd.concat(frames, ignore_index=True), " ".join(sentences))


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
    found = [pd.Series(rows["value"].to_numpy(), [_part(r) for r in rows.to_dict("records")]) for _, _, rows in parts]
    for (title, colour, _), row in zip(parts, found, strict=True):
        _bar(figure, title, colour, row)
    if len(parts) == 2:  # a part that one of them has not adds nothing to it
        names = list(dict.fromkeys([*found[0].index, *found[1].index]))
        a, b = (row.reindex(names, fill_value=0.0) for row in found)
        _bar(figure, plots.MINUS, plots.colour(plots.MINUS), a - b)
    figure.update_xaxes(title_text="logits")
    return figure.update_yaxes(type="category")  # layers upwards, as in maps


def _bar(figure: go.Figure, title: str, colour: str, row: pd.Series) -> None:
    figure.add_bar(
        y=list(row.index), x=row.to_numpy(), orientation="h", name=title, marker_color=colour,
        hovertemplate="%{y}: %{x:.4f} logits<extra></extra>",
    )  # fmt: skip


def _part(row: dict[Any, Any]) -> str:
    """A part in words: `embedding`, `attention 2`, `MLP 3`, `head 1`, `the first layer's values`."""
    at = "" if pd.isna(row["layer"]) else f" {int(row['layer'])}"
    if row["part"] == "embed":
        return "embedding"
    if pd.isna(row["head"]):
        return f"{ {'attn': 'attention', 'mlp': 'MLP'}.get(row['part'], row['part']) }{at}"
    return f"head {int(row['head'])}" if pd.isna(row["path"]) else path_in_words(row["path"])


def _after(rows: int) -> list[str]:
    """Names of L + 1 streams: what the first block reads, and what each layer leaves."""
    return ["embedding", *map(str, range(rows - 1))]


def _rows(kind: str) -> Callable[[int], tuple[list[str], str]]:
    """Names of so many rows, and of their axis."""
    if kind == "stream":
        return lambda rows: (_after(rows), "after layer")
    return lambda rows: ([str(n) for n in range(rows)], "layer")


def _named(tokens: Sequence[str], first: int) -> list[str]:
    return [f"{first + i}:{t if len(t) <= 12 else t[:11] + '…'}" for i, t in enumerate(tokens)]
