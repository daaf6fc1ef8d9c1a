"""Token maps: vectors of a corpus sample in a plane, how well tokens separate by layer, and heads grouped by their patterns."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from workbench import plots, prompts
from workbench.errors import WorkbenchError
from workbench.plots.style import at_least, wrapped
from workbench.plots.token_map_figures import separation_figure, token_map_figure
from workbench.views.heads import validation_ids
from workbench.views.page_links import Link
from workbench.views.registered_views import Drawing, view
from workbench.views.source import LETTERS, RunAtStep, Source, checkpoint_key, read_alike

if TYPE_CHECKING:
    from workbench.sklearn import HeadGroups, TokenMap

SITES = {
    "v": "effective values", "own_v": "own values", "k": "keys", "q": "queries", "z": "attention output by head",
    "attn_out": "attention output", "stream": "hidden state",
}  # fmt: skip
METHODS = {"pca": "PCA", "lda": "LDA", "umap": "UMAP"}
COLOURS = {"token": "token", "position": "position", "document": "document"}
GROUPS, DOCUMENTS, BAR, ROW, AROUND = 4, 16, 46, 17, 220
"""Groups of heads, documents that are read; pixels of a colour bar above a map, of a head's row, and around the rows."""
AXES = {"pca": "principal component", "lda": "linear discriminant", "umap": "UMAP coordinate"}
FIT = {
    "pca": "principal components of all {n:,} vectors", "lda": "discriminants fitted to the even documents; points of the odd ones",
    "umap": "UMAP of the points",
}  # fmt: skip


def sample(source: Source, link: Link) -> tuple[Any, str]:
    """Return token ids [documents, pos] of the link's prompt, else of model A's validation documents, and their name."""
    a = source.subjects(link)[0]
    if link.text("prompt") or link.text("stored"):
        model, text = source.model(a), source.prompt(link)
        return prompts.tokenise(model, text, letters=LETTERS.get(a.entry.kind, 0)).ids, "the prompt"
    ids = validation_ids(a.entry, DOCUMENTS)
    return ids, f"{len(ids)} validation documents of {ids.shape[1]} tokens"


def layers_of(source: Source, link: Link) -> list[int]:
    """Return the layers of model A that have the link's site."""
    from workbench.sklearn import site_hooks

    return list(site_hooks(source.model(source.subjects(link)[0]), link.choice("site", SITES)))


def _subjects(source: Source, link: Link) -> list[RunAtStep]:
    subjects = source.subjects(link)
    if len(subjects) > 1 and not read_alike(subjects[0].entry, subjects[1].entry):
        raise WorkbenchError("A and B read other tokens, so their maps cannot be compared")
    return subjects


def _key(name: str, subject: RunAtStep, link: Link, *more: Any) -> tuple[Any, ...]:
    text = tuple((key, link.text(key)) for key in ("a", "set", "prompt", "stored"))
    return name, checkpoint_key(subject), text, *more


def maps(source: Source, link: Link) -> list[tuple[RunAtStep, TokenMap]]:
    """Return the token map of A, and B's in A's plane, aligned with it, if two are compared."""
    from workbench.sklearn import aligned, token_map

    site, method = link.choice("site", SITES), link.choice("method", METHODS)
    layers = layers_of(source, link)
    layer = link.whole("layer", layers[-1] if layers else None)
    result: list[tuple[RunAtStep, TokenMap]] = []
    for subject in _subjects(source, link):

        def draw(subject: RunAtStep = subject) -> TokenMap:
            return token_map(source.model(subject), site, sample(source, link)[0], layer=layer, method=method)

        key = _key("token map", subject, link, site, layer, method)
        drawn: TokenMap = source.keep(key, draw)
        if result:
            beside = partial(aligned, drawn, result[0][1])
            drawn = source.keep((*key, "aligned", checkpoint_key(result[0][0])), beside)
        result.append((subject, drawn))
    return result


@view("maps")
def tokens(source: Source, link: Link) -> Drawing:
    """Vectors of one layer in a plane, coloured by token, position or document; B's vectors are turned onto A's."""
    by, site, method = (
        link.choice(key, names) for key, names in (("colour", COLOURS), ("site", SITES), ("method", METHODS))
    )
    drawn = maps(source, link)
    layer = link.whole("layer", layers_of(source, link)[-1])
    ids, of = sample(source, link)
    named = prompts.Prompt(
        ids=ids[:1], tokenizer=source.model(drawn[0][0]).tokenizer, letters=LETTERS.get(drawn[0][0].entry.kind, 0)
    )
    panels, tables, sentences = [], [], []
    for subject, token_map in drawn:
        words = dict(zip(unique_ids := np.unique(token_map.tokens).tolist(), named.strings(unique_ids), strict=True))
        points = pd.DataFrame({
            "x": token_map.points[:, 0], "y": token_map.points[:, 1], "token": [words[t] for t in token_map.tokens.tolist()],
            "document": token_map.documents, "position": token_map.positions,
        })  # fmt: skip
        panels.append((subject.title, points))
        tables.append(points.assign(model=subject.title))
        sentences.append(f"{subject.tag}: {_in_words(token_map)}" if subject.tag else _in_words(token_map))
    first, last = drawn[0][1], drawn[-1][1]
    facts = [f"layer {layer}", of, FIT[method].format(n=ids.numel()), f"{len(first.points)} points whose token repeats"]
    facts = facts if len(drawn) > 1 else [drawn[0][0].name, *facts]
    if method == "pca":
        facts.append(f"the plane holds {' and '.join(f'{m.explained:.0%}' for _, m in drawn)} of the points' variance")
    if len(drawn) > 1:
        facts.append(
            f"B's vectors turned onto A's in all dimensions (Procrustes), in A's plane; {last.disparity:.0%} of the squared distances "
            f"remain, {last.chance:.0%} if paired at random"
        )
    axes = (f"{AXES[method]} 1", f"{AXES[method]} 2")
    title = f"{SITES[site].capitalize()}, one point per token"
    figure = token_map_figure(panels, by, title, wrapped("; ".join(facts), 125), axes)
    return Drawing(figure, pd.concat(tables, ignore_index=True), " ".join(sentences))


def _in_words(token_map: TokenMap) -> str:
    """Return the numbers of a map in a sentence: each measure in all dimensions and in the map, with its chance level."""
    parts = []
    for measure, rows in token_map.numbers.groupby("measure", sort=False):
        full, plane = (
            f"{value:.2f} (by chance {chance:.2f})" for value, chance in zip(rows["value"], rows["chance"], strict=True)
        )
        parts.append(f"{measure} {full}, in the map {plane}".replace("-", "−"))
    return "; ".join(parts).capitalize() + "."


@view("maps", "layers")
def separation_by_layer(source: Source, link: Link) -> Drawing:
    """How well tokens separate at each layer, in all dimensions, with the chance level."""
    from workbench.sklearn import as_matrices
    from workbench.sklearn.token_maps import by_layer_separation

    site, parts = link.choice("site", SITES), []
    for subject in _subjects(source, link):

        def read(subject: RunAtStep = subject) -> pd.DataFrame:
            return by_layer_separation(*as_matrices(source.model(subject), site, sample(source, link)[0]))

        rows: pd.DataFrame = source.keep(_key("separation", subject, link, site), read)
        parts.append(rows.assign(architecture=subject.series, run=subject.entry.name, step=subject.step, site=site))
    table = pd.concat(parts, ignore_index=True)
    under = f"{sample(source, link)[1]}; dotted: chance"
    return Drawing(separation_figure(table, f"Separation of tokens in {SITES[site]}", under), table)


@view("maps")
def groups(source: Source, link: Link) -> Drawing:
    """Heads of model A in the order of a tree of similar attention patterns, with their features."""
    from workbench.sklearn import FEATURES, group_heads, head_features

    subject, count = source.subjects(link)[0], link.whole("groups", GROUPS) or GROUPS

    def read() -> HeadGroups:
        return group_heads(head_features(source.model(subject), sample(source, link)[0]), count)

    grouped: HeadGroups = source.keep(_key("head groups", subject, link, count), read)
    names = [f"{g + 1} · L{n} H{h}" for g, n, h in grouped.table[["group", "layer", "head"]].itertuples(index=False)]
    values = grouped.table[list(FEATURES)].to_numpy(dtype=float)
    top = float(np.abs(grouped.scaled).max()) or 1.0
    grid = plots.Grid(
        grouped.scaled, names, list(FEATURES), "standard deviations", "group · head", "feature of the pattern",
        span=(-top, top), texts=np.vectorize("{:.2f}".format, otypes=[object])(values), upward=False,
    )  # fmt: skip
    under = f"{sample(source, link)[1]}; numbers: shares; colour: standard deviations (SD) from the heads' mean; {count} groups (Ward)"
    figure = plots.grids([("", grid)], f"{subject.name}: heads by pattern", under)
    bar = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "lenmode": "pixels", "len": 200}
    # above the first columns: a phone has no room beside them
    bar |= {"title": {"text": "standard deviations (SD)", "side": "top"}}
    figure.update_xaxes(tickangle=0, title_standoff=26, ticktext=[feature.replace(" ", "<br>") for feature in FEATURES])
    figure.update_layout(
        coloraxis_colorbar=bar, height=ROW * len(names) + AROUND, margin_t=figure.layout.margin.t + BAR
    )
    return Drawing(at_least(figure, 110 + 50 * len(FEATURES)), grouped.table)
