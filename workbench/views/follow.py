"""Flow of one token's value: its sources, the heads that read it, and the later layers that read a part of it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from workbench import plots, prompts
from workbench.errors import WorkbenchError
from workbench.views.base import Drawing, view
from workbench.views.link import Link
from workbench.views.positions import own_positions, path_in_words, position, quoted
from workbench.views.source import RunAtStep, Source

MOST = 8
"""Strands of a group that are drawn; the smaller ones are drawn as one."""
SUMS = ["amount", "total", "even_amount"]
COLUMNS = [
    "model", "kind", "layer", "way", "path", "head", "query", "token", "coefficient", "attention", "norm", "amount", "total",
    "share", "even",
]  # fmt: skip
Row = dict[Any, Any]


@view("prompt")
def follow(source: Source, link: Link) -> Drawing:
    """Sources and readers of a token's value in a layer."""
    at, tokens = position(source, link)
    asked = link.whole("layer")
    layer = default_layer(source.subjects(link)[0]) if asked is None else asked
    subjects, left_out = own_positions(source, link)
    sentences, paths, tables = [left_out] if left_out else [], list[plots.DrawnPath](), list[pd.DataFrame]()
    for subject, own in subjects:
        try:
            flow = source.query(prompts.value_flow, subject, source.prompt(link), position=own, layer=layer)
        except WorkbenchError as error:
            if not tables:  # A itself
                raise
            sentences.append(f"{subject.title} is left out: {error}.")
            continue
        paths.append(_path(subject, flow))
        # a source's `amount` is its projection, its `total` the value's norm
        parts = flow.parts.rename(columns={"projection": "amount"}).assign(
            kind="source", layer=flow.layer, total=flow.norm, even=float("nan")
        )
        readers = flow.readers.assign(kind=["reader" if n == flow.layer else "later" for n in flow.readers["layer"]])
        queries = flow.queries.assign(kind="query", layer=flow.layer, way="attention", path="value")
        queries["token"] = [flow.tokens[int(q)] for q in queries["query"]]
        tables.append(pd.concat([parts, readers, queries]).reindex(columns=COLUMNS).assign(model=subject.title))
        sentences.append(_sentence(subject, flow))
    figure = plots.value_path(
        paths, f"Value flow of {quoted(tokens[at])}",
        f"token {at}, layer {layer}; left: share of each source in the value; right: share of each reader in all attention to it "
        "(weight times norm after W_O); in brackets: its share of what the reader gets, and that under uniform attention; one text",
    )  # fmt: skip
    return Drawing(figure, pd.concat(tables, ignore_index=True)[COLUMNS], " ".join(sentences))


def default_layer(subject: RunAtStep) -> int:
    """The first layer that may mix values."""
    return min(1, subject.entry.n_layers - 1)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _groups(flow: prompts.ValueFlow) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Readers in the value's own layer by head, and in later layers; values added beside the attention are separate.

    Amounts are sums over paths. The total of a layer, way and head, all that its queries get, counts once.
    """
    rows = flow.readers.assign(added=flow.readers["way"] == "added")
    together = rows["path"] == "together"
    rows = rows[together | ~together.groupby([rows["layer"], rows["way"]]).transform("any")]
    rows = rows.assign(even_amount=rows["even"].fillna(0.0) * rows["total"])

    def summed(part: pd.DataFrame, by: list[str]) -> pd.DataFrame:
        amounts = part.groupby(by, sort=False)["amount"].sum()
        once = part.drop_duplicates(["layer", "added", "head"])
        sums = once.groupby(by, sort=False)[["total", "even_amount"]].sum().assign(amount=amounts).reset_index()
        return sums.assign(share=sums["amount"] / sums["total"], even=sums["even_amount"] / sums["total"])

    own = summed(rows[rows["layer"] == flow.layer], ["added", "head"])
    return own, summed(rows[rows["layer"] > flow.layer], ["layer", "added"])


def _sources(flow: prompts.ValueFlow) -> pd.DataFrame:
    return flow.parts.groupby("path", sort=False)[["projection", "share"]].sum().reset_index()


def _largest(rows: pd.DataFrame) -> Row:
    records: list[Row] = rows.to_dict("records")
    return max(records, key=lambda row: row["amount"])


# ---- words -----------------------------------------------------------------------------------------------------------


def number(x: float) -> str:
    """Three digits, zeros too: `2.00`, `278`; whole numbers from a thousand on."""
    if abs(x) >= 1000:
        return f"{x:,.0f}"
    return f"{x:.3g}" if abs(x) >= 100 or not x else f"{x:#.3g}"


def _sentence(subject: RunAtStep, flow: prompts.ValueFlow) -> str:
    sources = ", ".join(
        f"{path_in_words(p)} {number(x)} ({s:.1%})"
        for p, x, s in _sources(flow).itertuples(index=False)
        if x or p == "own"
    )
    heads, later = _groups(flow)
    heads = heads[~heads["added"]]
    read, best, queries = heads[SUMS].sum(), _largest(heads), len(flow.tokens) - flow.position
    sentences = [
        f"{subject.title}: the value of “{flow.tokens[flow.position]}” in layer {flow.layer} has norm {number(flow.norm)}: {sources} "
        f"(sum off by {flow.error:.0e}).",
        f"{queries} {'queries read' if queries > 1 else 'query reads'} it: {number(read['amount'])} of {number(read['total'])} "
        f"({read['amount'] / read['total']:.1%}; uniform attention {read['even_amount'] / read['total']:.1%}), most through head "
        f"{int(best['head'])} ({number(best['amount'])}, {best['share']:.1%} of that head).",
    ]
    rows = flow.queries[flow.queries["query"] > flow.position]
    if len(rows):
        most = _largest(rows)
        sentences.append(
            f"Later token with the largest amount: “{flow.tokens[int(most['query'])]}” (token {int(most['query'])}), "
            f"{number(most['amount'])} through head {int(most['head'])}, {most['share']:.1%} of its input there "
            f"(uniform {most['even']:.1%})."
        )
    elif queries > 1:
        sentences.append("No later token is among its largest readers.")
    if later.empty:
        sentences.append("No later layer reads a part of it again.")
    else:
        most, layers = _largest(later), later["layer"].nunique()
        even = "added at its own position" if most["added"] else f"uniform {most['even']:.1%}"
        sentences.append(
            f"{layers} later layer{'s read' if layers > 1 else ' reads'} a part of it again, most layer {int(most['layer'])}: "
            f"{number(most['amount'])} {'against' if most['added'] else 'of'} {number(most['total'])} ({most['share']:.1%}; {even})."
        )
    return " ".join([*sentences, *flow.notes])


# ---- the figure ------------------------------------------------------------------------------------------------------


def _path(subject: RunAtStep, flow: prompts.ValueFlow) -> plots.DrawnPath:
    own, others = plots.colour(subject.series), plots.colour(plots.MINUS)
    heads, later = _groups(flow)
    everything = float(heads["amount"].abs().sum() + later["amount"].abs().sum()) or 1.0
    sources = []
    for path, projection, share in _sources(flow).itertuples(index=False):
        if share:
            rows = flow.parts[flow.parts["path"] == path]
            pieces = [(f"head {h}", x) for h, x in zip(rows["head"].astype(int), rows["projection"], strict=True)]
            sources.append(plots.Strand(
                name=path_in_words(path), size=share, says=f"{number(projection)} ({share:.0%})",
                colour=own if path == "own" else others, pieces=pieces,
            ))  # fmt: skip
    readers = dict[str, list[plots.Strand]]()  # from the last layer downwards to its own
    vectors = flow.readers.loc[flow.readers["layer"] > flow.layer, "path"].unique()
    what = path_in_words(vectors[0]) if len(vectors) == 1 else "parts of it"
    again = own if list(vectors) == ["own"] else others
    for added, how in ((False, "read again later"), (True, "added later, beside attention")):
        rows = later[later["added"] == added].to_dict("records")
        if rows:
            strands = _strands([(f"layer {int(r['layer'])}", r, again) for r in rows], "layers", everything)
            readers[f"{what}, {how}"] = strands[::-1]
    attended = heads[~heads["added"]].to_dict("records")
    colours = [plots.HEADS[int(r["head"]) % len(plots.HEADS)] for r in attended]
    here = _strands(
        [(f"head {int(r['head'])}", r, c) for r, c in zip(attended, colours, strict=True)], "heads", everything
    )
    if len(beside := heads[heads["added"]].to_dict("records")):
        here += _strands([("beside attention", _sum(beside, added=True), plots.GREY)], "", everything)
    readers[f"read in layer {flow.layer}"] = here
    token = quoted(flow.tokens[flow.position])
    return plots.DrawnPath(
        title=subject.title, centre=f"{token}, layer {flow.layer}: norm {number(flow.norm)}", colour=own,
        sources={"sources": sources}, readers=readers,
    )  # fmt: skip


def _sum(rows: Sequence[Row], *, added: bool) -> Row:
    sums: Row = {key: sum(row[key] for row in rows) for key in SUMS}
    return sums | {"share": sums["amount"] / sums["total"], "even": sums["even_amount"] / sums["total"], "added": added}


def _strands(rows: Sequence[tuple[str, Row, str]], kind: str, everything: float) -> list[plots.Strand]:
    """The largest, in their own order, and the others as one; each with its share of `everything` that is read."""
    largest = sorted(range(len(rows)), key=lambda i: -rows[i][1]["amount"])[
        : MOST if len(rows) > MOST + 1 else len(rows)
    ]
    shown = [rows[i] for i in sorted(largest)]
    rest = [row for i, (_, row, _) in enumerate(rows) if i not in largest]
    if rest:
        shown.append((f"{len(rest)} other {kind}", _sum(rest, added=rest[0]["added"]), plots.GREY))
    strands = []
    for name, row, colour in shown:
        even = "" if row["added"] else f", uniform {row['even']:.0%}"
        says = f"{row['amount'] / everything:.0%} ({row['share']:.0%} of what it gets{even})"
        strands.append(plots.Strand(name=name, size=row["amount"], says=says, colour=colour))
    return strands
