"""Where every head of a model looks in one prompt: all heads at once, one head's map and strips, numbers per head."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from workbench import plots, prompts
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.plots import attention as figures
from workbench.views.base import Drawing, view
from workbench.views.link import Link
from workbench.views.source import Source, Subject

SCALES = {"brightest": "up to the brightest", "root": "faint ones lifted (root)", "one": "from 0 to 1"}
"""The brightest after the first query, which sees nothing but itself."""
POOLS = {"mean": "what goes to all its keys", "max": "its largest weight"}
LINEAR = 32
"""Tokens up to which colours are in proportion unless told otherwise; in longer prompts most weights are faint."""
CELLS, CELLS_BESIDE = 512, 384
"""Most cells along an axis of a map: of one model, and of two beside each other where the prompt is longer."""
TILES = 300_000
"""Cells of all small pictures together; more heads get coarser ones."""
BUCKETS = (64, 32, 16, 8)
STATISTICS = {
    "normalised_entropy": "evenness", "row_entropy": "entropy, nats", "effective_keys": "effective keys",
    "sink_mass": "attention to the first token",
}  # fmt: skip
EVENLY = "spread evenly"
MEANS = "means over its queries; evenness (entropy over its maximum) and first token without the first, which sees only itself"


@dataclass(frozen=True)
class Choice:
    """What there is to choose from, and what is chosen."""

    subjects: list[Subject]
    text: str
    tokens: list[list[str]]  # of each subject
    layers: int  # that all subjects have
    heads: int
    layer: int
    head: int
    queries: tuple[int, int]  # first and last
    keys: tuple[int, int]
    lock: int | None  # the query whose row is held
    scale: str
    pool: prompts.Pool
    branch: str | None  # whose keys alone; None: all that the layer sees
    branches: list[str]

    @property
    def length(self) -> int:
        """T, tokens of A's prompt."""
        return len(self.tokens[0])

    @property
    def alike(self) -> bool:
        """Whether all subjects read the same tokens, so that they can be subtracted."""
        return all(t == self.tokens[0] for t in self.tokens)


@dataclass(frozen=True)
class Seen:
    """One subject's attention, all heads and the chosen one."""

    subject: Subject
    tokens: list[str]
    overview: prompts.Overview
    window: prompts.Window
    """Of the chosen head."""
    received: np.ndarray
    """Attention that the positions of each column receive from all queries, mean over them [column], in queries."""
    evenly: np.ndarray
    """The same where every query spreads its attention evenly [column]."""
    row: np.ndarray | None
    """The held query's weights [column], NaN for its future; of B where it reads the same tokens."""


def options(source: Source, link: Link) -> Choice:
    """The choices of a link, the absent ones at their defaults; raises `WorkbenchError` for what is not there."""
    subjects, text = source.subjects(link), source.prompt(link)
    tokens = [source.tokens(s, text) for s in subjects]
    T = len(tokens[0])
    layers, heads = min(s.entry.n_layers for s in subjects), min(s.entry.n_heads for s in subjects)
    pool: prompts.Pool = "max" if _known("pool", link.text("pool", "mean"), POOLS) == "max" else "mean"
    layer, head = (
        None if link.whole(key) is None else _index(key, link.whole(key), count)
        for key, count in (("layer", layers), ("head", heads))
    )
    if layer is None or head is None:
        layer, head = _most_concentrated(source, subjects, text, pool, (range(layers), range(heads)), (layer, head))
    branches = _branches(source, subjects[0], text, layer)
    branch = link.text("branch")
    if branch is not None:
        _known("set of keys", branch, branches)
    lock, scale = link.whole("lock"), "root" if T > LINEAR else "brightest"
    return Choice(
        subjects=subjects, text=text, tokens=tokens, layers=layers, heads=heads, layer=layer, head=head,
        queries=positions(link.text("queries"), T), keys=positions(link.text("keys"), T),
        lock=None if lock is None else _index("position", lock, T),
        scale=_known("scale", link.text("scale", scale), SCALES),
        pool=pool, branch=branch, branches=branches,
    )  # fmt: skip


def positions(text: str | None, T: int) -> tuple[int, int]:
    """First and last position of `12-80`; all of them for None. Raises `BadData` for others and outside the prompt."""
    if text is None:
        return 0, T - 1
    found = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text)
    first, last = (int(found[1]), int(found[2])) if found else (1, 0)
    if not first <= last < T:
        raise BadData(f"positions {text!r}: give the first and the last, like 0-{T - 1}, of this prompt's {T} tokens")
    return first, last


def _index(kind: str, value: int | None, count: int) -> int:
    if value not in range(count):
        raise UnknownName(kind, str(value), map(str, range(count)))
    return int(value)  # type: ignore[arg-type]


def _known(kind: str, name: str | None, choices: Any) -> str:
    if name not in choices:
        raise UnknownName(kind, str(name), choices)
    return str(name)


def seen(source: Source, link: Link) -> tuple[Choice, list[Seen]]:
    """What the page and all its figures show."""
    choice = options(source, link)
    found = []
    for i, (subject, tokens) in enumerate(zip(choice.subjects, choice.tokens, strict=True)):
        overview = _overview(source, choice.subjects, choice.text, choice.pool, i)
        queries, keys = (_within(span, len(tokens)) for span in (choice.queries, choice.keys))
        window = _window(source, choice, i, queries, keys, choice.pool)
        column = _window(source, choice, i, (0, len(tokens)), keys, "mean")
        _report(source, len(choice.subjects), 2 * i + 1, 1, 2)
        row = None
        if choice.lock is not None and (i == 0 or choice.alike):
            row = _window(source, choice, i, (choice.lock, choice.lock + 1), keys, choice.pool).weights[0]
        found.append(Seen(subject, tokens, overview, window, _received(column), _evenly(column, len(tokens)), row))
    return choice, found


def _overview(source: Source, subjects: list[Subject], text: str, pool: prompts.Pool, i: int) -> prompts.Overview:
    """The overview of a subject, its pictures as fine as all of them together allow."""
    pictures = sum(s.entry.n_layers * s.entry.n_heads for s in subjects)
    fits = [b for b in BUCKETS if pictures * b * (b + 1) // 2 <= TILES]
    return source.query(
        prompts.attention_overview, subjects[i], text, buckets=fits[0] if fits else BUCKETS[-1], pool=pool,
        progress=lambda done, total: _report(source, len(subjects), 2 * i, done, total),
    )  # fmt: skip


def _most_concentrated(
    source: Source, subjects: list[Subject], text: str, pool: prompts.Pool, there: tuple[range, range],
    asked: tuple[int | None, int | None],
) -> tuple[int, int]:  # fmt: skip
    """Layer and head whose attention is least even in the prompt, then with the weaker sink; of what is `asked`, if anything.

    Of model A after training, so that one head is seen at all its steps.
    """
    a = subjects[0]
    try:
        found = _overview(source, [replace(a, step=a.entry.steps[-1]), *subjects[1:]], text, pool, 0)
    except WorkbenchError:  # the last checkpoint cannot be opened; the chosen one may be
        found = _overview(source, subjects, text, pool, 0)
    heads = found.statistics.sort_values(["normalised_entropy", "sink_mass", "layer", "head"])
    for name, count, given in zip(("layer", "head"), there, asked, strict=True):
        heads = heads[heads[name].isin(count if given is None else [given])]
    return int(heads["layer"].iloc[0]), int(heads["head"].iloc[0])


def _branches(source: Source, subject: Subject, text: str, layer: int) -> list[str]:
    return source.derive(prompts.AttentionInputs.branches, prompts.attention_inputs, subject, text, layer)


def _report(source: Source, models: int, part: int, done: int, total: int) -> None:
    """Report how far the work is, of 100; each model has two parts, all heads and the chosen one."""
    if source.progress is not None:
        source.progress(round(100 * (part + done / total) / (2 * models)), 100)


def _within(span: tuple[int, int], T: int) -> tuple[int, int]:
    """First and behind the last of a span, of a prompt that may be shorter than A's."""
    first = min(span[0], T - 1)
    return first, max(first, min(span[1], T - 1)) + 1


def _window(
    source: Source, choice: Choice, i: int, queries: tuple[int, int], keys: tuple[int, int], pool: prompts.Pool
) -> prompts.Window:
    subject = choice.subjects[i]
    branch = choice.branch
    if branch is not None and i > 0:  # of the other model, where it has such keys
        branch = branch if branch in _branches(source, subject, choice.text, choice.layer) else None
    most = CELLS if len(choice.subjects) == 1 or max(map(len, choice.tokens)) <= CELLS else CELLS_BESIDE
    return source.derive(
        prompts.attention_map, prompts.attention_inputs, subject, choice.text, choice.layer, choice.head,
        slice(*queries), slice(*keys), most=most, pool=pool, branch=branch,
    )  # fmt: skip


def _received(window: prompts.Window) -> np.ndarray:
    """Column sums of a window of all queries, over the keys of each column."""
    return np.nansum(window.weights * np.diff(window.queries)[:, None], 0) / np.diff(window.keys)


def _evenly(window: prompts.Window, T: int) -> np.ndarray:
    """The same under uniform causal attention: position j receives the sum over i >= j of 1 / (i + 1)."""
    received = np.cumsum((1.0 / np.arange(1, T + 1))[::-1])[::-1]
    first, last = window.keys[0], window.keys[-1]
    return np.add.reduceat(received[first:last], np.array(window.keys[:-1]) - first) / np.diff(window.keys)


def per_token(seen: Seen) -> np.ndarray:
    """What the held query gives each token, else what each receives in the chosen head [T]; NaN outside the keys that are shown."""
    edges = seen.window.keys
    shown = seen.received if seen.row is None else seen.row
    found = np.full(len(seen.tokens), np.nan)
    found[edges[0] : edges[-1]] = np.repeat(shown, np.diff(edges))
    return found


# ---- words -----------------------------------------------------------------------------------------------------------


def cells(edges: list[int], tokens: list[str]) -> list[str]:
    """`12:·the` for a cell of one token, `12–43` for more."""
    pairs = itertools.pairwise(edges)
    return [f"{a}:{short(tokens[a])}" if b == a + 1 else f"{a}–{b - 1}" for a, b in pairs]


def short(token: str, most: int = 12) -> str:
    """A token, cut where it is long."""
    return token if len(token) <= most else token[: most - 1] + "…"


def where(choice: Choice, found: list[Seen]) -> str:
    """Which head, and what a cell of its map is."""
    of = "" if choice.branch is None else f", keys of {whose(choice.branch)} alone"
    return f"layer {choice.layer}, head {choice.head}{of}; {cell(choice, found)}"


def whose(branch: str) -> str:
    """Whose keys a set of them is, in words: `own`, `first`, `cross`, `cross.2`."""
    layer = branch.partition(".")[2]
    return "the layer itself" if branch == "own" else f"layer {layer}" if layer else "the first layer"


def cell(choice: Choice, found: list[Seen]) -> str:
    """What a cell of the map is."""
    window = found[0].window
    if window.exact:
        return "each cell is one weight"
    sizes = [int(np.diff(edges).max()) for edges in (window.queries, window.keys)]
    return f"a cell is up to {sizes[0]} queries by {sizes[1]} keys and shows {POOLS[choice.pool]}"


def _named(choice: Choice, found: list[Seen]) -> list[tuple[str, Seen]]:
    return [(s.subject.title, s) for s in found]


# ---- the views -------------------------------------------------------------------------------------------------------


MAX_ROWS = 100_000  # of a table of pictures


@view("attention")
def overview(source: Source, link: Link) -> Drawing:
    """All layers and heads: a small picture of each head's attention, queries downwards, keys to the right."""
    choice, found = seen(source, link)
    parts = [(title, s.overview.tiles) for title, s in _named(choice, found)]
    alike = choice.alike and len({p[1].shape for p in parts}) == 1
    top = 1.0 if choice.scale == "one" else max(brightest(tiles) for _, tiles in parts)
    figure = figures.tiles(parts, top, root=choice.scale == "root", minus=alike)
    strongest = []
    for title, s in _named(choice, found):
        sinkiest = s.overview.statistics.sort_values("sink_mass").iloc[-1]
        strongest.append(
            f"{title}: most attention to the first token in layer {int(sinkiest['layer'])}, head {int(sinkiest['head'])} "
            f"({sinkiest['sink_mass']:.2f} of it; {s.overview.uniform['sink_mass']:.2f} if spread evenly)"
        )
    return Drawing(figure, _tile_table(parts), ". ".join(strongest) + ".")


def _tile_table(parts: list[tuple[str, np.ndarray]]) -> pd.DataFrame:
    """A row for each cell on and below the diagonal of each head's picture [layer, head, query, key]."""
    frames = []
    for title, tiles in parts:
        row, column = np.tril_indices(tiles.shape[-1])
        layer, head, cell = np.indices((*tiles.shape[:2], len(row))).reshape(3, -1)
        names = {"layer": layer, "head": head, "row": row[cell], "column": column[cell]}
        frames.append(pd.DataFrame({"model": title, **names, "attention": tiles[..., row, column].ravel()}))
    return pd.concat(frames, ignore_index=True).head(MAX_ROWS)


@view("attention")
def weights(source: Source, link: Link) -> Drawing:
    """The map of one head: how much each token (row) attends to each earlier one (column)."""
    choice, found = seen(source, link)
    parts: list[tuple[str, plots.Grid]] = []
    top = 1.0 if choice.scale == "one" else max(brightest(s.window.weights, s.window.queries[0]) for s in found)
    for title, s in _named(choice, found):
        rows, columns = cells(s.window.queries, s.tokens), cells(s.window.keys, s.tokens)
        if not choice.alike:  # told apart: other prompts are not subtracted, even where they begin alike
            columns[0] += "\u200b" * len(parts)
        grid = plots.Grid(
            s.window.weights, rows, columns, "attention", "query: who attends", "key: where attention goes",
            span=(0.0, top), upward=False,
        )  # fmt: skip
        parts.append((title, grid))
    figure = plots.grids(parts, "Attention", where(choice, found))
    if choice.scale == "root":
        figures.lifted(figure)
    return Drawing(figure, plots.grid_table(parts))


@view("attention")
def received(source: Source, link: Link) -> Drawing:
    """How much attention each token receives from all that follow, beside attention that is spread evenly."""
    choice, found = seen(source, link)
    lines = [(s.subject.series, cells(s.window.keys, s.tokens), s.received, s.evenly) for s in found]
    figure = figures.received(
        lines, f"layer {choice.layer}, head {choice.head}; all queries of the prompt", minus=choice.alike
    )
    names = ("key", "received, queries", f"{EVENLY}, queries")
    table = [
        pd.DataFrame(dict(zip(names, line[1:], strict=True))).assign(model=s.subject.title)
        for line, s in zip(lines, found, strict=True)
    ]
    return Drawing(figure, pd.concat(table, ignore_index=True)[["model", *names]])


@view("attention")
def query(source: Source, link: Link) -> Drawing:
    """Where one query looks: the held one, else the last of the window."""
    link = link if link.text("lock") is not None else link.but(lock=options(source, link).queries[1])
    choice, found = seen(source, link)
    held = [(s, s.row) for s in found if s.row is not None]
    bars = [(s.subject.series, cells(s.window.keys, s.tokens), row) for s, row in held]
    at = int(choice.lock or 0)
    under = f"query {at}: {short(choice.tokens[0][at])}; layer {choice.layer}, head {choice.head}"
    figure = figures.row(bars, under, minus=choice.alike)
    table = [
        pd.DataFrame({"model": s.subject.title, "query": cells([at, at + 1], s.tokens)[0], "key": b[1], "attention": b[2]})
        for (s, _), b in zip(held, bars, strict=True)
    ]  # fmt: skip
    return Drawing(figure, pd.concat(table, ignore_index=True).dropna(subset=["attention"]))


@view("attention")
def numbers(source: Source, link: Link) -> Drawing:
    """Entropy, effective keys and attention to the first token, of each head, beside attention that is spread evenly."""
    choice, found = seen(source, link)
    parts = [(s.subject.series, s.overview.statistics, s.overview.uniform) for s in found]
    figure = figures.per_head(parts, STATISTICS, f"one prompt of {choice.length} tokens, {MEANS}")
    return Drawing(figure, statistics(found))


def statistics(found: list[Seen]) -> pd.DataFrame:
    """A row for each head of each subject, and how it were with attention spread evenly; with two, A minus B."""
    columns = ["model", "layer", "head", *STATISTICS]
    rows = []
    for s in found:
        rows.append(s.overview.statistics.assign(model=s.subject.title))
        rows.append(pd.DataFrame([s.overview.uniform | {"model": f"{s.subject.title}, {EVENLY}"}]))
    if len(found) == 2:
        a, b = (s.overview.statistics.set_index(["layer", "head"])[list(STATISTICS)] for s in found)
        rows.append((a - b).dropna(how="all").reset_index().assign(model=plots.MINUS))
    table = pd.concat(rows, ignore_index=True)[columns]
    return table.astype({"layer": "Int64", "head": "Int64"})


def brightest(weights: np.ndarray, first: int = 0) -> float:
    """The largest weight [..., query, key] behind the first query of a prompt, which sees nothing but itself."""
    rest = weights[..., 1:, :] if first == 0 and weights.shape[-2] > 1 else weights
    seen = rest[np.isfinite(rest)]
    return float(seen.max()) or 1.0 if seen.size else 1.0
