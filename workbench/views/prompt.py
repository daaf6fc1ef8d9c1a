"""One text through one model or two: next tokens, loss per token, logit lens, value norms, token identity, logit attribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench import plots, prompts
from workbench.errors import WorkbenchError
from workbench.plots.heat_maps import safe
from workbench.views import path_of_token, tuned_lens  # noqa: F401  (views of this page)
from workbench.views.page_links import Link
from workbench.views.registered_views import Drawing, view
from workbench.views.source import RunAtStep, Source, read_alike
from workbench.views.token_names import cell_names, number, own_position, own_positions, path_in_words, position, quoted

WINDOW, WORDS, LINE, TOP, SHOWN = 128, 24, 1024, 50, 10
TEXTS, TEXT_MINUS = ("first text", "second text"), "first − second"
"""Most positions of a map, of a map with a word in each cell, and of a line; tokens to choose from and tokens drawn."""
LENS = {
    "probability": ("next token's probability", "probability", (0.0, 1.0), "higher: predicted already"),
    "rank": ("next token's rank", "tokens ahead", None, "number of likelier tokens; 0: it leads; higher: worse"),
    "entropy": ("entropy", "nats", None, "entropy of the layer's prediction; lower: more certain"),
    "kl": ("distance from the prediction", "nats", None, "KL divergence; lower: closer; 0 in the last row"),
}
VALUES = {
    "effective": ("Norm of effective values", "norm", None, "what attention sums, after the shortcut"),
    "own": ("Norm of own values", "norm", None, "what the layer computes"),
    "first_part": ("Norm of the first layer's part", "norm", None, "the first layer's values times their coefficient"),
    "cosine": ("Own and effective values, cosine", "cosine", (-1.0, 1.0), "1: the shortcut does not turn the value"),
    "stream": ("Norm of the residual stream", "norm", None, "each layer's input; last row: the final norm's input"),
}
SITES = {"stream": "residual stream", "own_v": "own values", "v": "effective values"}


def _window(source: Source, link: Link, subject: RunAtStep, most: int) -> tuple[int, int]:
    """First and last + 1 of at most so many positions around the selected one."""
    at, length = own_position(source, link, subject), len(source.tokens(subject, source.prompt(link)))
    if at is None:
        at = min(position(source, link)[0], length - 1)
    first = max(0, min(at - most // 2, length - most))
    return first, min(length, first + most)


def _map(
    source: Source,
    link: Link,
    title: str,
    about: str,
    grid_of: Callable[[RunAtStep, slice], plots.Grid],
    most: int = WINDOW,
) -> Drawing:
    """A map over layers and tokens for each subject; of a long prompt the positions around the selected one."""
    parts, windows = [], []
    for subject in source.subjects(link):
        first, last = _window(source, link, subject, most)
        at = own_position(source, link, subject)
        mark = (None, at - first) if at is not None and first <= at < last else None
        parts.append((subject.title, replace(grid_of(subject, slice(first, last)), mark=mark)))
        windows.append((first, last))
    blank = [name for name, grid in parts if not np.isfinite(grid.values).any()]
    if len(blank) == len(parts):
        raise WorkbenchError(f"nothing to draw: {' and '.join(blank)} has no such values; choose another site")
    parts = [(name, grid) for name, grid in parts if name not in blank]
    (first, last), length = windows[0], len(position(source, link)[1])
    under = f"{about}; one text"
    if last - first < length:
        under += f"; positions {first} to {last - 1} of {length}, around the selected one"
    return Drawing(
        plots.grids(parts, title, under), plots.grid_table(parts), f"{blank[0]} has no such values." if blank else ""
    )


def _grid(
    values: np.ndarray, tokens: Sequence[str], first: int, unit: str, span: tuple[float, float] | None, *, stream: bool,
    texts: np.ndarray | None = None,
) -> plots.Grid:  # fmt: skip
    """Values [layer, position] as a map; of the residual stream [L + 1, position] the embedding is the first row."""
    rows = [*(["embedding"] if stream else []), *map(str, range(len(values) - stream))]
    return plots.Grid(
        values, rows, cell_names(tokens, first), unit, "after layer" if stream else "layer", "token", texts, span
    )


@view("prompt")
def lens(source: Source, link: Link) -> Drawing:
    """Logit lens: the prediction per layer after each token, by the model's own output head; or the tuned lens."""
    quantity, kind = link.choice("quantity", LENS), link.choice("lens", tuned_lens.KINDS)
    words, unit, span, about = LENS[quantity]
    about += "; blank: no next token" * (quantity in ("probability", "rank"))
    text, fits = source.prompt(link), list[str]()

    def grid_of(subject: RunAtStep, window: slice) -> plots.Grid:
        path = None
        if kind == "tuned":
            path, fitted_on = tuned_lens.lens_file(source, link, subject)
            fits.append(f"{subject.tag}{': ' * bool(subject.tag)}{fitted_on}")
        result = source.query(prompts.logit_lens, subject, text, top=5, positions=window, tuned=path)
        texts = np.array([[cell[0] for cell in row] for row in result.top_tokens], dtype=object)
        return _grid(getattr(result, quantity), result.tokens, window.start, unit, span, stream=True, texts=texts)

    drawing = _map(
        source, link, tuned_lens.KINDS[kind].capitalize(), f"cell: likeliest token; colour: {words}, {about}", grid_of, WORDS,
    )  # fmt: skip
    return (
        replace(drawing, sentence=f"{drawing.sentence} Maps fitted on {'; '.join(fits)}.".strip()) if fits else drawing
    )


@view("prompt")
def values(source: Source, link: Link) -> Drawing:
    """Norm of the values, or of the residual stream, by layer and token."""
    kind = link.choice("site", VALUES)
    title, unit, span, about = VALUES[kind]
    text = source.prompt(link)

    def grid_of(subject: RunAtStep, window: slice) -> plots.Grid:
        result = source.query(prompts.value_norms, subject, text)
        array, tokens = getattr(result, kind)[:, window], result.tokens[window]
        return _grid(array, tokens, window.start, unit, span, stream=kind == "stream")

    return _map(source, link, title, about, grid_of)


@view("prompt")
def identity(source: Source, link: Link) -> Drawing:
    """Rank of the own token of every vector among all tokens."""
    site = {"own": "own_v", "stream": "stream"}.get(link.choice("site", VALUES), "v")
    text, chance = source.prompt(link), []

    def grid_of(subject: RunAtStep, window: slice) -> plots.Grid:
        result = source.query(prompts.token_identity, subject, text, sites=(site,), positions=window)
        chance.append(f"{result.chance:.3g}")
        array = result.reciprocal_rank[site]
        return _grid(array, result.tokens, window.start, "1 / rank", (0.0, 1.0), stream=site == "stream")

    vectors = "embeddings" if site == "stream" else "first-layer values"
    drawing = _map(
        source, link, f"Token identity in {SITES[site]}",
        f"reciprocal rank of the token among the {vectors} of all tokens, nearest first; 1: nearest; nothing is trained", grid_of,
    )  # fmt: skip
    known = "The embedding is" if site == "stream" else "First-layer values, and all of SVFormer's, are"
    random = f"{' in A, '.join(dict.fromkeys(chance))}{' in B' * (len(set(chance)) > 1)}"
    shortcut = (
        "Where a shortcut adds first-layer values, a high number is expected: own values show a layer's own part. "
    )
    sentence = f"A random token has {random} on average. {known} the token's own by construction: 1. "
    sentence += f"{shortcut * (site == 'v')}{drawing.sentence}"
    return replace(drawing, sentence=sentence.strip())


@view("prompt")
def predictions(source: Source, link: Link) -> Drawing:
    """The likeliest tokens after the selected position, for two models with one tokenizer the same tokens, and A - B."""
    at, tokens = position(source, link)
    text = source.prompt(link)
    subjects, sentence = own_positions(source, link)
    results = [source.query(prompts.next_tokens, subject, text, position=own, top=TOP) for subject, own in subjects]
    alike = len(subjects) == 2 and read_alike(*(s.entry for s, _ in subjects))
    frames = _next_tokens(results, [(s.title, s.series) for s, _ in subjects], alike)
    figure = _next_tokens_figure(frames)
    rounding = f"; {plots.MINUS}: before rounding" * alike
    figure.update_layout(title_subtitle_text=f"after {quoted(tokens[at])}, token {at}; probability, one text{rounding}")
    return Drawing(figure, pd.concat(frames, ignore_index=True).drop(columns="series"), sentence)


@view("prompt")
def two_texts(source: Source, link: Link) -> Drawing:
    """The likeliest next tokens of model A after two texts, the same tokens for both, and their difference."""
    if not (other := link.text("other")):
        raise WorkbenchError("enter a second text to compare")
    subject, texts = source.subjects(link)[0], (source.prompt(link), other)
    results = [source.query(prompts.next_tokens, subject, text, position=-1, top=TOP) for text in texts]
    frames = _next_tokens(results, [(name, subject.series) for name in TEXTS], True)
    figure = _next_tokens_figure(frames)
    figure.for_each_annotation(lambda a: a.update(text=TEXT_MINUS) if a.text == plots.MINUS else None)
    figure.for_each_xaxis(
        lambda a: a.update(title_text="probability, difference (points)") if plots.MINUS in str(a.title.text) else None
    )
    ends = " and ".join(quoted(source.tokens(subject, text)[-1]) for text in texts)
    figure.update_layout(
        title_text="Next token after two texts",
        title_subtitle_text=f"{subject.name}; after {ends}; probability; difference: before rounding",
    )
    table = pd.concat(frames, ignore_index=True).drop(columns="series").replace({"model": {plots.MINUS: TEXT_MINUS}})
    return Drawing(figure, table.rename(columns={"model": "text"}))


def _next_tokens(
    results: Sequence[prompts.Predictions], named: Sequence[tuple[str, str]], alike: bool
) -> list[pd.DataFrame]:
    """The likeliest tokens of (name, series); of two that are `alike` the same tokens, and the difference."""
    rows = [r.top.head(SHOWN) for r in results]
    alike = alike and len({len(r.probability) for r in results}) == 1
    if alike:
        both = pd.concat([r.head(SHOWN // 2) for r in rows])[["id", "token"]].drop_duplicates("id")
        rows = [both.assign(probability=r.probability[both["id"]]) for r in results]
    frames = [r.assign(model=name, series=series) for r, (name, series) in zip(rows, named, strict=True)]
    if alike:
        minus = frames[0]["probability"] - frames[1]["probability"]
        frames.append(frames[0].assign(model=plots.MINUS, series=plots.MINUS, probability=minus))
    return frames


def _next_tokens_figure(frames: Sequence[pd.DataFrame]) -> go.Figure:
    return plots.next_tokens_figure(
        [(*f[["model", "series"]].iloc[0], f["token"].tolist(), f["probability"].tolist()) for f in frames]
    )


@view("prompt")
def surprise(source: Source, link: Link) -> Drawing:
    """Loss of every token given the previous ones."""
    text, lines = source.prompt(link), []
    for subject in source.subjects(link):
        window, at = slice(*_window(source, link, subject, LINE)), own_position(source, link, subject)
        result = source.query(prompts.next_tokens, subject, text, position=-1 if at is None else at, top=TOP)
        lines.append((subject, cell_names(result.tokens[window], window.start), result.loss[window]))
    length = len(source.tokens(lines[0][0], text))
    alike = all(names == lines[0][1] for _, names, _ in lines)
    figure = make_subplots(1 if alike else len(lines), 1, vertical_spacing=0.3)
    for i, (subject, names, loss) in enumerate(lines):
        row = 1 if alike else i + 1
        ticks = plots.unique([safe(name) for name in names])
        figure.add_scatter(
            x=ticks, y=loss, mode="lines+markers", marker={"size": 6, "symbol": plots.symbol(subject.series)}, name=subject.title,
            line={"color": plots.colour(subject.series), "dash": "dash" if i else "solid"},
            hovertemplate="%{x}: %{y:.3g} nats<extra></extra>", row=row, col=1,
        )  # fmt: skip
        every = max(1, -(-len(ticks) // 40))
        figure.update_xaxes(tickvals=ticks[::every], type="category", tickangle=-90, tickfont_size=11, row=row, col=1)
    if len(lines) == 2 and alike:
        figure.add_bar(x=ticks, y=lines[0][2] - lines[1][2], name=plots.MINUS, marker_color=plots.colour(plots.MINUS))
    figure.update_yaxes(title_text="loss (nats)")
    drawn, under = len(lines[0][1]), "first text; " if link.text("other") else ""
    under += "−ln of its probability given the tokens before it; lower: more expected; first token: none"
    if drawn < length:
        first = _window(source, link, lines[0][0], LINE)[0]
        under += f"; positions {first} to {first + drawn - 1} of {length}, around the selected one"
    plots.dressed(figure, "Loss per token", under, 300 if alike else 460)
    table = [pd.DataFrame({"model": s.title, "token": names, "nats": loss}) for s, names, loss in lines]
    sentence = "" if alike else "A and B have different tokens in this text, so A − B is not drawn."
    return Drawing(figure, pd.concat(table, ignore_index=True), sentence)


# ---- logit attribution -----------------------------------------------------------------------------------------------


def target(source: Source, link: Link) -> int:
    """Id of the attributed token: the link's, else model A's likeliest after the position."""
    at, asked = position(source, link)[0], link.whole("target")
    if asked is not None:
        return asked
    result = source.query(prompts.next_tokens, source.subjects(link)[0], source.prompt(link), position=at, top=TOP)
    return int(result.top["id"][0])


@view("prompt")
def attribution(source: Source, link: Link) -> Drawing:
    """Contribution of layers, heads or value paths to the logit of a token; the parts sum to the logit."""
    at, tokens = position(source, link)
    token, against = target(source, link), link.whole("against")
    layer, head = link.whole("layer"), link.whole("head")
    results: list[tuple[RunAtStep, Any, pd.DataFrame]] = []
    subjects, left_out = own_positions(source, link)
    sentences = [left_out] if left_out else []
    for subject, own in subjects:
        result = source.query(
            prompts.logit_attribution, subject, source.prompt(link), position=own, token=token, against=against
        )
        try:
            rows = _level(result.frame, layer, head)
            if results and (result.token, result.against) != (results[0][1].token, results[0][1].against):
                raise WorkbenchError("its tokenizer gives these ids to other tokens")
        except WorkbenchError as error:
            if not results:  # A itself
                raise
            sentences.append(f"{subject.title} is left out: {error}.")
            continue
        shown = "" if layer is None else f"; the bars sum to {number(rows['value'].sum())}"
        sentences.append(
            f"{subject.title}: the parts sum to {number(result.totals['layer'])}, the logit is {number(result.logit)} "
            f"(difference {result.error:.1e}){shown}."
        )
        sentences += result.notes
        results.append((subject, result, rows))
    first = results[0][1]
    where = "" if layer is None else f", layer {layer}" + ("" if head is None else f", head {head}")
    logit = f"the logit of {quoted(first.token)}"
    logit += "" if first.against is None else f" minus that of {quoted(first.against)}"
    figure = _bars([(s.title, plots.colour(s.series), rows) for s, _, rows in results])
    plots.dressed(
        figure, f"Logit attribution of {quoted(first.token)}{where}",
        f"what each part adds to {logit} after {quoted(tokens[at])}, token {at}; right: raises it; scale of the final norm fixed",
        340 if len(results) == 1 else 480,
    )  # fmt: skip
    figure.update_layout(legend_traceorder="reversed")
    frames = [rows.assign(model=s.title, logit=r.logit, error=r.error) for s, r, rows in results]
    return Drawing(figure, pd.concat(frames, ignore_index=True), " ".join(sentences))


def _level(frame: pd.DataFrame, layer: int | None, head: int | None) -> pd.DataFrame:
    """Rows of layers; with a layer, of its heads and MLP; with a head, of its value paths."""
    if layer is None:
        return frame[frame["level"] == "layer"]
    inside = frame[(frame["layer"] == layer) & (frame["level"] == ("head" if head is None else "value_path"))]
    rows = inside if head is None else inside[inside["head"] == head]
    if rows.empty:
        raise WorkbenchError(f"no parts in layer {layer}" + ("" if head is None else f", head {head}"))
    return rows


def _bars(parts: Sequence[tuple[str, str, pd.DataFrame]]) -> go.Figure:
    """Horizontal bars by part (title, colour, rows), and A - B."""

    def part(row: dict[Any, Any]) -> str:
        """A part in words: `embedding`, `attention 2`, `MLP 3`, `head 1`, `the first layer's values`."""
        at = "" if pd.isna(row["layer"]) else f" {int(row['layer'])}"
        if row["part"] == "embed":
            return "embedding"
        if pd.isna(row["head"]):
            return f"{ {'attn': 'attention', 'mlp': 'MLP'}.get(row['part'], row['part']) }{at}"
        return f"head {int(row['head'])}" if pd.isna(row["path"]) else path_in_words(row["path"])

    bars = [
        (title, colour, pd.Series(rows["value"].to_numpy(), [part(r) for r in rows.to_dict("records")]))
        for title, colour, rows in parts
    ]
    if len(bars) == 2:  # a part that one model lacks adds nothing to its logit
        names = list(dict.fromkeys([*bars[0][2].index, *bars[1][2].index]))
        a, b = (row.reindex(names, fill_value=0.0) for _, _, row in bars)
        bars.append((plots.MINUS, plots.colour(plots.MINUS), a - b))
    figure = make_subplots(1, 1)
    for title, colour, row in reversed(bars):  # a group is drawn upwards too
        figure.add_bar(
            y=list(row.index), x=row.to_numpy(), orientation="h", name=title, marker_color=colour,
            hovertemplate="%{y}: %{x:.3g} logits<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text="logits")
    return figure.update_yaxes(type="category")  # layers upwards, as in maps
