"""Attention of every head in one prompt: all heads at once, one head's map and strips, statistics per head."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from workbench import plots, prompts
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.plots import attention_maps as figures
from workbench.plots.heat_maps import safe, signed
from workbench.plots.style import at_least
from workbench.statistics.sink_thresholds import SINK_MASS
from workbench.views.page_links import Link
from workbench.views.registered_views import Drawing, view
from workbench.views.source import RunAtStep, Source
from workbench.views.token_names import number, path_in_words, quoted, short, signed_number

SCALES = {
    "brightest": "up to the largest weight", "head": "up to each head's largest weight", "root": "square root, for small weights",
    "one": "from 0 to 1",
}  # fmt: skip
"""The largest weight after the first query, which attends to itself alone."""
POOLS = {"mean": "sum over its keys", "max": "largest weight"}
LINEAR = 32
"""Tokens up to which the colour scale is linear by default; in longer prompts most weights are small."""
CELLS, CELLS_BESIDE = 512, 384
"""Most cells along an axis of a map: of one model, and of two side by side if the prompt is longer."""
TILES = 300_000
"""Cells of all small pictures together; with more heads each picture is coarser."""
BUCKETS = (64, 32, 16, 8)
MAX_ROWS = 100_000  # of a table of small pictures
STATISTICS = {
    "normalised_entropy": "normalised entropy", "row_entropy": "entropy (nats)", "effective_keys": "effective keys",
    "sink_mass": "attention to the first token",
}  # fmt: skip
UNRELATED = "A − B subtracts equal head numbers of two runs, which are unrelated heads."
UNIFORM = "spread evenly"  # as CSV files name uniform attention
MEANS = "means over queries; normalised entropy and sink without the first query, which attends to itself alone"


@dataclass(frozen=True)
class Choice:
    """The options of the page, and the selected ones."""

    subjects: list[RunAtStep]
    text: str
    tokens: list[list[str]]  # of each subject
    layers: int  # that all subjects have
    heads: int
    layer: int
    head: int
    queries: tuple[int, int]  # first and last
    keys: tuple[int, int]
    lock: int | None  # the query token, if one is selected
    key: int | None  # the key token
    scale: str
    pool: prompts.Pool
    branch: str | None  # set of keys; None: all keys of the layer
    branches: list[str]

    @property
    def length(self) -> int:
        """T, tokens of A's prompt."""
        return len(self.tokens[0])

    @property
    def alike(self) -> bool:
        """True if all subjects have the same tokens, so that their difference exists."""
        return all(t == self.tokens[0] for t in self.tokens)


@dataclass(frozen=True)
class Seen:
    """One subject's attention: all heads and the selected one."""

    subject: RunAtStep
    tokens: list[str]
    overview: prompts.Overview
    window: prompts.Window
    """Of the selected head."""
    received: np.ndarray
    """Attention that the positions of each column receive from all queries, mean over positions [column], in queries."""
    evenly: np.ndarray
    """The same under uniform attention [column]."""
    row: np.ndarray | None
    """Weights of the query token [column], NaN for later keys; None for a B with other tokens."""


def attention_options(source: Source, link: Link) -> Choice:
    """Return the options of a link, absent ones at their defaults; raises `WorkbenchError` for unknown ones."""
    subjects, text = source.subjects(link), source.prompt(link)
    tokens = [source.tokens(s, text) for s in subjects]
    T = len(tokens[0])
    layers, heads = min(s.entry.n_layers for s in subjects), min(s.entry.n_heads for s in subjects)
    pool: prompts.Pool = "max" if link.choice("pool", POOLS) == "max" else "mean"
    layer = None if link.whole("layer") is None else _index("layer", link.whole("layer"), layers)
    head = None if link.whole("head") is None else _index("head", link.whole("head"), heads)
    if layer is None or head is None:
        layer, head = _most_to_the_first(source, subjects, text, pool, (range(layers), range(heads)), (layer, head))
    branches = _branches(source, subjects[0], text, layer)
    branch = None if link.text("branch") is None else link.choice("branch", branches, kind="set of keys")
    lock, key, scale = link.whole("lock"), link.whole("key"), "root" if T > LINEAR else "brightest"
    return Choice(
        subjects=subjects, text=text, tokens=tokens, layers=layers, heads=heads, layer=layer, head=head,
        queries=positions(link.text("queries"), T), keys=positions(link.text("keys"), T),
        lock=None if lock is None else _index("position", lock, T),
        key=None if key is None else _index("key", key, T if lock is None else lock + 1),
        scale=link.choice("scale", SCALES, scale),
        pool=pool, branch=branch, branches=branches,
    )  # fmt: skip


def positions(text: str | None, T: int) -> tuple[int, int]:
    """First and last position of `12-80`, all for None; raises `BadData` for others and outside the prompt."""
    if text is None:
        return 0, T - 1
    match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text)
    first, last = (int(match[1]), int(match[2])) if match else (1, 0)
    if not first <= last < T:
        raise BadData(f"positions {text!r}: give the first and the last, like 0-{T - 1}, of this prompt's {T} tokens")
    return first, last


def _index(kind: str, value: int | None, count: int) -> int:
    if value not in range(count):
        raise UnknownName(kind, str(value), map(str, range(count)))
    return int(value)  # type: ignore[arg-type]


def seen(source: Source, link: Link) -> tuple[Choice, list[Seen]]:
    """Return the options and the attention patterns that the page and its figures show."""
    choice = attention_options(source, link)
    patterns = []
    for i, (subject, tokens) in enumerate(zip(choice.subjects, choice.tokens, strict=True)):
        overview = _overview(source, choice.subjects, choice.text, choice.pool, i)
        # first and last + 1 of the shown spans; B's prompt may be shorter than A's
        starts = [min(span[0], len(tokens) - 1) for span in (choice.queries, choice.keys)]
        spans = zip(starts, (choice.queries, choice.keys), strict=True)
        ends = [max(first, min(span[1], len(tokens) - 1)) + 1 for first, span in spans]
        queries, keys = zip(starts, ends, strict=True)
        window = _window(source, choice, i, queries, keys, choice.pool)
        column = _window(source, choice, i, (0, len(tokens)), keys, "mean")
        _report(source, len(choice.subjects), 2 * i + 1, 1, 2)
        row = None
        if choice.lock is not None and (i == 0 or choice.alike):
            row = _window(source, choice, i, (choice.lock, choice.lock + 1), keys, choice.pool).weights[0]
        # sums over queries, means over the keys of a column
        received = np.nansum(column.weights * np.diff(column.queries)[:, None], 0) / np.diff(column.keys)
        from workbench.metrics.attention_patterns import uniform_importance  # imports torch

        uniform = uniform_importance(len(tokens), overview.windows[choice.layer]).numpy() * len(tokens)
        uniform = uniform[column.keys[0] : column.keys[-1]]
        evenly = np.add.reduceat(uniform, np.array(column.keys[:-1]) - column.keys[0]) / np.diff(column.keys)
        patterns.append(Seen(subject, tokens, overview, window, received, evenly, row))
    return choice, patterns


def _overview(source: Source, subjects: list[RunAtStep], text: str, pool: prompts.Pool, i: int) -> prompts.Overview:
    """The overview of a subject, with the finest pictures that `TILES` allows."""
    pictures = sum(s.entry.n_layers * s.entry.n_heads for s in subjects)
    fits = [b for b in BUCKETS if pictures * b * (b + 1) // 2 <= TILES]
    return source.query(
        prompts.attention_overview, subjects[i], text, buckets=fits[0] if fits else BUCKETS[-1], pool=pool,
        progress=lambda done, total: _report(source, len(subjects), 2 * i, done, total),
    )  # fmt: skip


def _most_to_the_first(
    source: Source, subjects: list[RunAtStep], text: str, pool: prompts.Pool, there: tuple[range, range],
    asked: tuple[int | None, int | None],
) -> tuple[int, int]:  # fmt: skip
    """The head with the most attention to the first token of the prompt, of the layer or head that is asked for.

    It is read off model A's last checkpoint, so that the default is one head at all steps.
    """
    a = subjects[0]
    try:
        overview = _overview(source, [replace(a, step=a.entry.steps[-1]), *subjects[1:]], text, pool, 0)
    except WorkbenchError:  # the last checkpoint cannot be opened; the selected one may
        overview = _overview(source, subjects, text, pool, 0)
    heads = overview.statistics.sort_values(["sink_mass", "layer", "head"], ascending=[False, True, True])
    for name, count, given in zip(("layer", "head"), there, asked, strict=True):
        heads = heads[heads[name].isin(count if given is None else [given])]
    return int(heads["layer"].iloc[0]), int(heads["head"].iloc[0])


def _branches(source: Source, subject: RunAtStep, text: str, layer: int) -> list[str]:
    return source.derive(prompts.AttentionInputs.branches, prompts.attention_inputs, subject, text, layer)


def _report(source: Source, models: int, part: int, done: int, total: int) -> None:
    if source.progress is not None:
        source.progress(round(100 * (part + done / total) / (2 * models)), 100)


def _window(
    source: Source, choice: Choice, i: int, queries: tuple[int, int], keys: tuple[int, int], pool: prompts.Pool
) -> prompts.Window:
    subject = choice.subjects[i]
    branch = choice.branch
    if branch is not None and i > 0:  # B may lack these keys
        branch = branch if branch in _branches(source, subject, choice.text, choice.layer) else None
    most = CELLS if len(choice.subjects) == 1 or max(map(len, choice.tokens)) <= CELLS else CELLS_BESIDE
    return source.derive(
        prompts.attention_map, prompts.attention_inputs, subject, choice.text, choice.layer, choice.head,
        slice(*queries), slice(*keys), most=most, pool=pool, branch=branch,
    )  # fmt: skip


def per_token(seen: Seen) -> np.ndarray:
    """Weights of the query token, else the attention that each token receives [T]; NaN outside the shown keys."""
    edges = seen.window.keys
    shown = seen.received if seen.row is None else seen.row
    values = np.full(len(seen.tokens), np.nan)
    values[edges[0] : edges[-1]] = np.repeat(shown, np.diff(edges))
    return values


# ---- words -----------------------------------------------------------------------------------------------------------


def cells(edges: list[int], tokens: list[str]) -> list[str]:
    """`12:·the` for a cell of one token, `12–43` for more."""
    pairs = itertools.pairwise(edges)
    return [f"{a}:{short(tokens[a])}" if b == a + 1 else f"{a}–{b - 1}" for a, b in pairs]


def where(choice: Choice, patterns: list[Seen]) -> str:
    """The selected head, and the meaning of a cell of its map."""
    of = "" if choice.branch is None else f", keys of {whose(choice.branch)} only"
    alone = f"{patterns[0].subject.title}; " if len(patterns) == 1 else ""  # two name their panels
    return f"{alone}layer {choice.layer}, head {choice.head}{of}; {cell_words(choice, patterns)}"


def strongest_sink(seen: Seen) -> str:
    """The head with the most attention to the first token, and whether it is a sink."""
    rows, even = seen.overview.statistics, seen.overview.uniform["sink_mass"]
    first = rows.sort_values("sink_mass").iloc[-1]
    mass = first["sink_mass"]
    kind = f"a sink (above {SINK_MASS})" if mass > SINK_MASS else f"no sink, which needs more than {SINK_MASS}"
    kind = "no statement on a sink in so few tokens" if even >= SINK_MASS else kind
    beside = f"; uniform attention {number(even)}" if even == even else ""
    return (
        f"{seen.subject.title}: most attention to the first token in layer {int(first['layer'])}, head {int(first['head'])}: "
        f"{number(mass)}, {kind}{beside}"
    )


def unrelated(choice: Choice) -> str:
    """A warning if heads of two runs are subtracted by their numbers; empty otherwise."""
    return UNRELATED if len({s.entry.path for s in choice.subjects}) > 1 and choice.alike else ""


def whose(branch: str) -> str:
    """The layer that a set of keys comes from, in words: `own`, `first`, `cross`, `cross.2`."""
    layer = branch.partition(".")[2]
    return "the layer itself" if branch == "own" else f"layer {layer}" if layer else "the first layer"


def cell_words(choice: Choice, patterns: list[Seen]) -> str:
    """The meaning of a cell of the map."""
    window = patterns[0].window
    if window.exact:
        return "cell: one weight"
    sizes = [int(np.diff(edges).max()) for edges in (window.queries, window.keys)]
    return f"cell: up to {sizes[0]} queries by {sizes[1]} keys, {POOLS[choice.pool]}"


# ---- the views -------------------------------------------------------------------------------------------------------


@view("attention")
def overview(source: Source, link: Link) -> Drawing:
    """A small attention map of every head: queries downwards, keys to the right."""
    choice, patterns = seen(source, link)
    parts = [(s.subject.title, s.overview.tiles) for s in patterns]
    if choice.scale == "head":
        parts = [(name, maps / np.nanmax(maps, axis=(-2, -1), keepdims=True)) for name, maps in parts]
    alike = choice.alike and len({p[1].shape for p in parts}) == 1
    top = 1.0 if choice.scale == "one" else max(brightest(tiles) for _, tiles in parts)
    figure = figures.tiles(parts, top, root=choice.scale == "root", minus=alike)
    if choice.scale == "head":
        figure.update_layout(coloraxis_colorbar_title_text="of the head's largest")
    strongest = [strongest_sink(s) for s in patterns]
    frames = []  # a row for each cell on and below the diagonal of a head's map
    for title, tiles in parts:
        row, column = np.tril_indices(tiles.shape[-1])
        layer, head, cell = np.indices((*tiles.shape[:2], len(row))).reshape(3, -1)
        names = {"layer": layer, "head": head, "row": row[cell], "column": column[cell]}
        frames.append(pd.DataFrame({"model": title, **names, "attention": tiles[..., row, column].ravel()}))
    table = pd.concat(frames, ignore_index=True).head(MAX_ROWS)
    return Drawing(figure, table, f"{'. '.join(strongest)}. {unrelated(choice)}".strip())


@view("attention")
def weights(source: Source, link: Link) -> Drawing:
    """Attention map of one head: from each query token (row) to each key token (column)."""
    choice, patterns = seen(source, link)
    parts: list[tuple[str, plots.Grid]] = []
    top = 1.0 if choice.scale == "one" else max(brightest(s.window.weights, s.window.queries[0]) for s in patterns)
    for s in patterns:
        rows, columns = cells(s.window.queries, s.tokens), cells(s.window.keys, s.tokens)
        if not choice.alike:  # other names: maps of different tokens are not subtracted
            columns[0] += "\u200b" * len(parts)
        grid = plots.Grid(
            s.window.weights, rows, columns, "attention", "query: who attends", "key: where attention goes",
            span=(0.0, top), upward=False, square=True,
        )  # fmt: skip
        parts.append((s.subject.title, grid))
    figure = plots.grids(parts, "Attention", where(choice, patterns))  # whose titles name the columns of the CSV file
    figure.for_each_xaxis(lambda axis: axis.update(title_text="key token" if axis.title.text else ""))
    figure.for_each_yaxis(lambda axis: axis.update(title_text="query token" if axis.title.text else ""))
    if choice.scale == "root":
        figures.lifted(figure)
    return Drawing(figure, plots.grid_table(parts), unrelated(choice))


@view("attention")
def received(source: Source, link: Link) -> Drawing:
    """Attention that each token receives from itself and all later ones, beside uniform attention."""
    choice, patterns = seen(source, link)
    lines = [(s.subject.series, cells(s.window.keys, s.tokens), s.received, s.evenly) for s in patterns]
    figure = figures.received_figure(
        lines, f"{where(choice, patterns).rpartition('; ')[0]}; all queries", minus=choice.alike
    )
    names = ("key", "received, queries", f"{UNIFORM}, queries")
    frames = (pd.DataFrame(dict(zip(names, line[1:], strict=True))) for line in lines)
    table = [frame.assign(model=s.subject.title) for frame, s in zip(frames, patterns, strict=True)]
    return Drawing(figure, pd.concat(table, ignore_index=True)[["model", *names]])


@view("attention")
def query(source: Source, link: Link) -> Drawing:
    """Attention of one query: the selected one, else the last of the window."""
    link = link if link.text("lock") is not None else link.but(lock=attention_options(source, link).queries[1])
    choice, patterns = seen(source, link)
    held = [(s, s.row) for s in patterns if s.row is not None]
    bars = [(s.subject.series, cells(s.window.keys, s.tokens), row) for s, row in held]
    at = int(choice.lock or 0)
    under = f"query {at}: {short(choice.tokens[0][at])}; {where(choice, patterns).rpartition('; ')[0]}"
    figure = figures.row(bars, under, minus=choice.alike)
    table = [
        pd.DataFrame({"model": s.subject.title, "query": cells([at, at + 1], s.tokens)[0], "key": b[1], "attention": b[2]})
        for (s, _), b in zip(held, bars, strict=True)
    ]  # fmt: skip
    return Drawing(figure, pd.concat(table, ignore_index=True).dropna(subset=["attention"]))


PARTS = {"layer": "layers", "head": "heads", "value_path": "value paths"}
PANEL_PX = 300  # least width of a map of parts beside others
MOST_PARTS = 12  # rows and columns of a map of parts; the smaller ones are one


def cell(source: Source, link: Link) -> tuple[int, int]:
    """Positions of the selected cell: the query token, else the last shown, and the key token, else its largest weight."""
    choice = attention_options(source, link)
    query = choice.queries[1] if choice.lock is None else choice.lock
    if choice.key is not None:
        return query, _index("key", choice.key, query + 1)
    row = _window(source, replace(choice, branch=None), 0, (query, query + 1), (0, query + 1), "max")
    return query, row.keys[int(row.weights[0].argmax())]


def query_of_the_first(source: Source, link: Link) -> int:
    """The query after the first whose weight on the first token is largest."""
    choice = attention_options(source, link)
    column = _window(source, replace(choice, branch=None), 0, (0, choice.length), (0, 1), "max")
    return column.queries[1 + int(column.weights[1:, 0].argmax())] if len(column.weights) > 1 else 0


OTHERS, NONE = "others", "none"
AGAINST = {OTHERS: "mean of the other keys", NONE: "nothing"}
"""What is subtracted from a score, besides another key."""


@view("attention")
def score(source: Source, link: Link) -> Drawing:
    """Score attribution: parts of the query's stream times parts of the key's stream, which sum to one attention score."""
    choice, (query, key) = attention_options(source, link), cell(source, link)
    by: Any = link.choice("parts", PARTS)
    asked: Any = link.text("against", OTHERS if query else NONE)
    against = None if asked == NONE else asked if asked == OTHERS else link.whole("against")
    matrices, tables, sentences = list[tuple[str, pd.DataFrame]](), list[pd.DataFrame](), list[str]()
    capped = ""
    for i, (subject, tokens) in enumerate(zip(choice.subjects, choice.tokens, strict=True)):
        if tokens != choice.tokens[0]:
            sentences.append(f"{subject.title} is left out: it has other tokens.")
            continue
        result = source.query(
            prompts.score_attribution, subject, choice.text, layer=choice.layer, head=choice.head, query=query, key=key,
            against=against, by=by,
        )  # fmt: skip
        weight = _window(source, replace(choice, branch=None), i, (query, query + 1), (key, key + 1), "max").weights[
            0, 0
        ]
        matrices.append((subject.title, _folded(_folded(result.matrix).T).T))
        rows = result.matrix.rename_axis("query part").reset_index()
        tables.append(rows.melt("query part", var_name="key part", value_name="score").assign(model=subject.title))
        capped = "" if result.capped is None else " before the soft cap"
        sentences += [
            f"{subject.title}: {result.sentence} Attention weight {weight:.3g}. Sum off by {result.error:.0e}.", *result.notes,
        ]  # fmt: skip
    keys = [key] if against is None or against == OTHERS else [key, against]
    names = [f"“{safe(short(choice.tokens[0][i]))}” ({i})" for i in (query, *keys)]
    less = AGAINST[asked] if asked in AGAINST else f"key {names[-1]}"
    what = f"score{capped} of query {names[0]}, key {names[1]}" + ("" if against is None else f" minus {less}")
    top = max(float(matrix.abs().to_numpy().max()) for _, matrix in matrices) or 1.0
    alone = len(matrices) == 1
    parts = [(title, _parts_grid(matrix, top, written=alone)) for title, matrix in matrices]
    figure = plots.grids(
        parts, "Score attribution",
        f"layer {choice.layer}, head {choice.head}: {what}; cell: part of the query (row) times part of the key (column); norms fixed; "
        "unit: logits of the softmax over keys", height=min(420, 120 + 60 * len(parts[0][1].rows)),
    )  # fmt: skip
    if not alone:  # a narrow window stacks the maps, whose titles follow one another closely
        figure = at_least(figure.update_xaxes(title_text=""), PANEL_PX * (len(parts) + 1))
    return Drawing(figure, pd.concat(tables, ignore_index=True), " ".join(sentences))


def _folded(matrix: pd.DataFrame) -> pd.DataFrame:
    """The largest rows, and the sum of the others as one."""
    sizes = matrix.abs().sum(axis=1)
    if len(sizes) <= MOST_PARTS + 1:
        return matrix
    largest = matrix.index.isin(sizes.nlargest(MOST_PARTS).index)
    rows = matrix[largest].copy()
    rows.loc[f"{len(sizes) - MOST_PARTS} others"] = matrix[~largest].sum()
    return rows


def _parts_grid(matrix: pd.DataFrame, top: float, *, written: bool) -> plots.Grid:
    """A map of parts, colours from -top to top, with the sums of rows and columns; numbers are written into the only map."""
    cells = np.vstack([matrix.to_numpy(), matrix.sum()])
    cells = np.hstack([cells, cells.sum(1, keepdims=True)])
    colours = cells.copy()
    if written:  # sums exceed the colours of the parts
        colours[-1], colours[:, -1] = np.nan, np.nan
    rows, columns = ([*map(prompts.part_in_words, axis), "sum"] for axis in matrix.axes)
    return plots.Grid(
        colours, rows, columns, "score (logits)", "part of the query", "part of the key", span=(-top, top), upward=False,
        texts=signed(cells) if written else None,
    )  # fmt: skip


PART_COLOURS = dict(zip(("attention", "MLP", "embedding"), plots.HEADS, strict=False))  # by a part's first word


@view("attention")
def path(source: Source, link: Link) -> Drawing:
    """Path of a token: the parts of its score at the left; at the right what its value adds to a logit at the query."""
    choice, (query, key), token = attention_options(source, link), cell(source, link), link.whole("target")
    names = [quoted(short(choice.tokens[0][i])) for i in (key, query)]
    if token is None:
        top = source.query(prompts.next_tokens, choice.subjects[0], choice.text, position=query, top=1).top
        token = int(top["id"][0])
    paths, tables, sentences = list[plots.DrawnPath](), list[pd.DataFrame](), list[str]()
    less, capped = " minus the others' mean" if query else "", ""
    for subject, tokens in zip(choice.subjects, choice.tokens, strict=True):
        if tokens != choice.tokens[0]:
            sentences.append(f"{subject.title} is left out: it has other tokens.")
            continue
        asked: dict[str, Any] = {"layer": choice.layer, "head": choice.head, "query": query, "key": key, "token": token}
        asked |= {"against": "others" if query else None}
        found = source.query(prompts.token_path, subject, choice.text, **asked)
        own, parts = plots.colour(subject.series), _folded(found.score.keys.to_frame())[0]
        weight, score, added = number(found.weight), signed_number(found.score.score), signed_number(found.logits)
        sources, readers = list[plots.Strand](), list[plots.Strand]()
        for name, size in zip(map(prompts.part_in_words, parts.index), parts, strict=True):
            colour = PART_COLOURS.get(name.split()[0], plots.GREY)
            sources.append(plots.Strand(name=name, size=size, says=signed_number(size), colour=colour))
        rows = found.frame.to_dict("records")
        for row in rows:
            product = (
                f"{weight} × {signed_number(row['per_weight'])} = " if row["per_weight"] == row["per_weight"] else ""
            )
            row["says"] = f"{product}{signed_number(row['logits'])}"
            colour = own if row["path"] == "own" else plots.colour(plots.MINUS)
            readers.append(
                plots.Strand(name=path_in_words(row["path"]), size=row["logits"], says=row["says"], colour=colour)
            )
        paths.append(plots.DrawnPath(
            title=subject.title, centre=f"{names[0]} → {names[1]}: weight {weight}", colour=own,
            sources=(f"score{' − mean' if less else ''}: {score}", sources),
            readers=(f"logit of {quoted(found.token)}: {added}", readers),
        ))  # fmt: skip
        scores = pd.DataFrame({"side": "score", "part": parts.index, "amount": parts.to_numpy()})
        logits = found.frame.rename(columns={"path": "part", "logits": "amount"}).assign(side="logit")
        tables += [table.assign(model=subject.title) for table in (scores, logits)]
        words = "; ".join(f"{path_in_words(row['path'])} {row['says']}" for row in rows)
        sentences.append(
            f"{subject.title}: weight {weight}, score{less} {score}. Through head {choice.layer}.{choice.head} the value adds {added} "
            f"to the logit of “{found.token}”: {words}. All keys of the head add {signed_number(found.head_logits)}."
        )
        sentences += found.score.notes
        capped = "" if found.score.capped is None else " before the soft cap"
    figure = plots.value_path(
        paths, f"From the score of {names[0]} to a logit",
        f"layer {choice.layer}, head {choice.head}: token {key} to token {query}; left: parts of the key's score{capped}{less}; right: "
        "attention weight × logit per unit of weight = logits added at the query, by value path; norms fixed; hatched: negative",
    )  # fmt: skip
    return Drawing(figure, pd.concat(tables, ignore_index=True), " ".join(sentences))


@view("attention")
def numbers(source: Source, link: Link) -> Drawing:
    """Entropy, effective keys and sink mass per head, beside uniform attention."""
    choice, patterns = seen(source, link)
    parts = [(s.subject.series, s.overview.statistics, s.overview.uniform) for s in patterns]
    named = f"{patterns[0].subject.title}; " if len(patterns) == 1 else ""
    figure = figures.per_head(parts, STATISTICS, f"{named}one prompt of {choice.length} tokens, {MEANS}")
    return Drawing(figure, statistics(patterns), unrelated(choice))


def statistics(patterns: list[Seen]) -> pd.DataFrame:
    """A row for each head and for uniform attention, by subject; with two subjects also A minus B."""
    columns = ["model", "layer", "head", *STATISTICS]
    rows = []
    for s in patterns:
        rows.append(s.overview.statistics.assign(model=s.subject.title))
        rows.append(pd.DataFrame([s.overview.uniform | {"model": f"{s.subject.title}, {UNIFORM}"}]))
    if len(patterns) == 2:
        a, b = (s.overview.statistics.set_index(["layer", "head"])[list(STATISTICS)] for s in patterns)
        rows.append((a - b).dropna(how="all").reset_index().assign(model=plots.MINUS))
    table = pd.concat(rows, ignore_index=True)[columns]
    return table.astype({"layer": "Int64", "head": "Int64"})


def brightest(weights: np.ndarray, first: int = 0) -> float:
    """The largest weight [..., query, key] after the first query of a prompt, which attends to itself alone."""
    rest = weights[..., 1:, :] if first == 0 and weights.shape[-2] > 1 else weights
    finite = rest[np.isfinite(rest)]
    return float(finite.max()) or 1.0 if finite.size else 1.0
