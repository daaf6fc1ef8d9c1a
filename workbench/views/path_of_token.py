"""Path of one token: its value's sources and readers, and the path through one reader from the score to a logit."""

from __future__ import annotations

from typing import Any

import pandas as pd

from workbench import plots, prompts
from workbench.errors import WorkbenchError
from workbench.views import attention
from workbench.views.page_links import SELECTION, Link
from workbench.views.registered_views import Drawing, view
from workbench.views.source import RunAtStep, Source
from workbench.views.token_names import number, own_positions, path_in_words, position, quoted

SUMS = ["amount", "total", "even_amount"]
COLUMNS = [
    "model", "kind", "layer", "way", "path", "head", "query", "token", "coefficient", "attention", "norm", "amount", "total",
    "share", "even",
]  # fmt: skip
Row = dict[Any, Any]


def reader(source: Source, link: Link) -> Link:
    """Return the link of the token's cell on the attention page: the named head and query, else model A's largest reader."""
    at, _ = position(source, link)
    subject, asked = source.subjects(link)[0], link.whole("layer")
    layer = default_layer(subject) if asked is None else asked
    rows = source.query(prompts.value_flow, subject, source.prompt(link), position=at, layer=layer).queries
    head, query = link.whole("head"), link.whole("query")
    if head is None or query is None:
        later = rows[rows["query"] > at] if query is None and (rows["query"] > at).any() else rows
        for column, value in (("head", head), ("query", query)):
            later = later if value is None or not (later[column] == value).any() else later[later[column] == value]
        best = later.sort_values("amount", ascending=False, kind="stable").iloc[0]
        head, query = int(best["head"]) if head is None else head, int(best["query"]) if query is None else query
    common = {key: value for key, value in link.options.items() if key in (*SELECTION, "target")}
    return Link("attention", common).but(layer=layer, head=head, lock=query, key=at)


@view("prompt")
def follow(source: Source, link: Link) -> Drawing:
    """Path of a token through one reader: its score, its weight, and what its value adds to a logit."""
    cell = reader(source, link)
    layer, drawing, refusal, flows = int(cell.options["layer"]), None, "", list[plots.DrawnPath]()
    try:
        drawing = attention.path(source, cell)
    except WorkbenchError as reason:  # sources and readers are drawn instead
        refusal = f"The path to a logit is left out: {reason}."
    subjects, left_out = own_positions(source, link)
    sentences = list(filter(None, (drawing.sentence if drawing else refusal, left_out)))
    tables = list[pd.DataFrame]()
    for subject, own in subjects:
        try:
            flow = source.query(prompts.value_flow, subject, source.prompt(link), position=own, layer=layer)
        except WorkbenchError as error:
            sentences.append(f"The value's sources and readers in {subject.title} are left out: {error}.")
            continue
        # a source's `amount` is its projection, its `total` the value's norm
        parts = flow.parts.rename(columns={"projection": "amount"}).assign(
            kind="source", layer=flow.layer, total=flow.norm, even=float("nan")
        )
        readers = flow.readers.assign(kind=["reader" if n == flow.layer else "later" for n in flow.readers["layer"]])
        queries = flow.queries.assign(kind="query", layer=flow.layer, way="attention", path="value")
        queries["token"] = [flow.tokens[int(q)] for q in queries["query"]]
        tables.append(pd.concat([parts, readers, queries]).reindex(columns=COLUMNS).assign(model=subject.title))
        sentences.append(_sentence(subject, flow))
        flows.append(_drawn(subject, flow))
    if drawing is None:
        if not flows:
            raise WorkbenchError(" ".join(sentences))
        under = "left: sources of the value, by projection on it; right: heads that read it, by attention times norm after W_O"
        figure = plots.value_path(flows, "Sources and readers of a value", under)
        return Drawing(figure, pd.concat(tables, ignore_index=True), " ".join(sentences))
    place = {"layer": layer, "head": int(cell.options["head"]), "query": int(cell.options["lock"])}
    path = drawing.table.rename(columns={"side": "kind", "part": "path"}).assign(**place)
    return Drawing(drawing.figure, pd.concat([path, *tables], ignore_index=True), " ".join(sentences))


def default_layer(subject: RunAtStep) -> int:
    """The first layer that may mix values."""
    return min(1, subject.entry.n_layers - 1)


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


def _drawn(subject: RunAtStep, flow: prompts.ValueFlow) -> plots.DrawnPath:
    """The value's sources and its readers by head, as bands."""
    own, other = plots.colour(subject.series), plots.colour(plots.MINUS)
    sources = flow.parts.groupby("path", sort=False)["projection"].sum()
    heads = _groups(flow)[0].query("not added")
    sides = (
        [(path_in_words(str(p)), x, own if p == "own" else other) for p, x in sources.items()],
        [(f"head {int(h)}", x, own) for h, x in zip(heads["head"], heads["amount"], strict=True)],
    )
    left, right = ([plots.Strand(name=n, size=x, says=number(x), colour=c) for n, x, c in side] for side in sides)
    return plots.DrawnPath(
        title=subject.title, centre=f"{quoted(flow.tokens[flow.position])}: norm {number(flow.norm)}", colour=own,
        sources=("sources", left), readers=(f"readers in layer {flow.layer}", right),
    )  # fmt: skip


def _largest(rows: pd.DataFrame) -> Row:
    records: list[Row] = rows.to_dict("records")
    return max(records, key=lambda row: row["amount"])


def _sentence(subject: RunAtStep, flow: prompts.ValueFlow) -> str:
    paths = flow.parts.groupby("path", sort=False)[["projection", "share"]].sum().reset_index()
    sources = ", ".join(
        f"{path_in_words(p)} {number(x)} ({s:.1%})" for p, x, s in paths.itertuples(index=False) if x or p == "own"
    )
    heads, later = _groups(flow)
    heads = heads[~heads["added"]]
    read, best, queries = heads[SUMS].sum(), _largest(heads), len(flow.tokens) - flow.position
    sentences = [
        f"{subject.title}: the value of “{flow.tokens[flow.position]}” in layer {flow.layer} has norm {number(flow.norm)}: {sources} "
        f"(sum off by {flow.error:.0e}).",
        f"The queries from it on ({queries}) receive from it, by attention times norm after W_O: "
        f"{number(read['amount'])} of {number(read['total'])} ({read['amount'] / read['total']:.1%}; uniform attention "
        f"{read['even_amount'] / read['total']:.1%}), most through head "
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
