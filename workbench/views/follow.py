"""One token's value in one layer, followed: what it is made of, which queries read it, which later layers read it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from workbench import plots, prompts
from workbench.errors import WorkbenchError
from workbench.views.base import Drawing, view
from workbench.views.link import Link
from workbench.views.places import path_in_words, placed, position, quoted
from workbench.views.source import Source, Subject

MOST = 8
"""Strands of a group drawn by themselves; the smaller ones are one together."""
SUMS = ["amount", "total", "even_amount"]
COLUMNS = [
    "model", "kind", "layer", "way", "path", "head", "query", "token", "coefficient", "attention", "norm", "amount", "total",
    "share", "even",
]  # fmt: skip


@view("prompt")
def follow(source: Source, link: Link) -> Drawing:
    """What a token's value in a layer is made of, who reads it there, and which later layers read it again."""
    at, tokens = position(source, link)
    subjects = source.subjects(link)
    asked = link.whole("layer")
    layer = default_layer(subjects[0]) if asked is None else asked
    places, left_out = placed(source, link)
    sentences, paths, tables = [left_out] if left_out else [], list[plots.ValuePath](), list[pd.DataFrame]()
    for subject, own in places:
        try:
            flow = source.query(prompts.value_flow, subject, source.prompt(link), position=own, layer=layer)
        except WorkbenchError as error:
            if not tables:  # A itself
                raise
            sentences.append(f"{subject.title} is left out: {error}.")
            continue
        paths.append(_path(subject, flow))
        tables.append(_table(subject, flow))
        sentences.append(_sentence(subject, flow))
    figure = plots.value_path(
        paths, f"The value of {quoted(tokens[at])}, followed",
        f"token {at}, layer {layer}; left: how far each source reaches along the value, together its length; right: attention to it times "
        "its length after the output matrix; even: if every reader spread the same over all that it sees; one text",
    )  # fmt: skip
    return Drawing(figure, pd.concat(tables, ignore_index=True)[COLUMNS], " ".join(sentences))


def default_layer(subject: Subject) -> int:
    """The first layer that may mix values."""
    return min(1, subject.entry.n_layers - 1)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _table(subject: Subject, flow: prompts.ValueFlow) -> pd.DataFrame:
    """All numbers as rows; `amount` of a source is its projection, its `total` the value's length."""
    parts = flow.parts.rename(columns={"projection": "amount"}).assign(
        kind="source", layer=flow.layer, total=flow.norm, even=float("nan")
    )
    readers = flow.readers.assign(kind=["reader" if n == flow.layer else "later" for n in flow.readers["layer"]])
    queries = flow.queries.assign(kind="query", layer=flow.layer, way="attention", path="value")
    queries["token"] = [flow.tokens[int(q)] for q in queries["query"]]
    return pd.concat([parts, readers, queries], ignore_index=True).reindex(columns=COLUMNS).assign(model=subject.title)


def _summed(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Amounts of readers in groups, against what the same queries get in all: of each layer, way and head once."""
    rows = rows.assign(even_amount=rows["even"].fillna(0.0) * rows["total"])
    amounts = rows.groupby(list(by), sort=False)["amount"].sum()
    once = rows.assign(added=rows["way"] == "added").drop_duplicates(["layer", "added", "head"])
    found = once.groupby(list(by), sort=False)[["total", "even_amount"]].sum().assign(amount=amounts).reset_index()
    return found.assign(share=found["amount"] / found["total"], even=found["even_amount"] / found["total"])


def _groups(flow: prompts.ValueFlow) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Readers in the value's own layer by head, and later layers; what is added beside the attention is apart."""
    rows = flow.readers.assign(added=flow.readers["way"] == "added")
    whole = rows["path"] == "together"
    rows = rows[whole | ~whole.groupby([rows["layer"], rows["way"]]).transform("any")]
    here, later = rows[rows["layer"] == flow.layer], rows[rows["layer"] > flow.layer]
    return _summed(here, ["added", "head"]), _summed(later, ["layer", "added"])


def _sources(flow: prompts.ValueFlow) -> pd.DataFrame:
    """Projection and share of each source, heads together."""
    return flow.parts.groupby("path", sort=False)[["projection", "share"]].sum().reset_index()


# ---- words -----------------------------------------------------------------------------------------------------------


def _sentence(subject: Subject, flow: prompts.ValueFlow) -> str:
    """The drawing's main numbers, each beside what it is compared with."""
    token = f"“{flow.tokens[flow.position]}”"
    parts = [
        f"{path_in_words(p)} {number(x)} ({s:.1%})"
        for p, x, s in _sources(flow).itertuples(index=False)
        if x or p == "own"
    ]
    said = [
        f"{subject.title}: in layer {flow.layer} the value of {token} is {number(flow.norm)} long, made of {', '.join(parts)}; these "
        f"sum to its length (off by {flow.error:.0e})."
    ]
    heads, later = _groups(flow)
    heads = heads[~heads["added"]]
    whole, best = heads[["amount", "total", "even_amount"]].sum(), _largest(heads)
    queries = len(flow.tokens) - flow.position
    who = (
        "Only the token itself can read it" if queries == 1 else f"It is read by itself and the {queries - 1} after it"
    )
    said.append(
        f"{who}: {number(whole['amount'])} of the {number(whole['total'])} that they get in this layer "
        f"({whole['amount'] / whole['total']:.1%}; spread evenly {whole['even_amount'] / whole['total']:.1%}), most through head "
        f"{int(best['head'])} ({number(best['amount'])}, {best['share']:.1%} of what that head brings)."
    )
    said += [_of_query(flow)] if queries > 1 else []
    said.append(_of_later(later))
    return " ".join([*said, *flow.notes])


def number(x: float) -> str:
    """Three digits, zeros too: `2.00`, `278`; whole numbers from a thousand on."""
    if abs(x) >= 1000:
        return f"{x:,.0f}"
    return f"{x:.3g}" if abs(x) >= 100 or not x else f"{x:#.3g}"


def _largest(rows: pd.DataFrame) -> dict[Any, Any]:
    """The row with the largest amount."""
    found: list[dict[Any, Any]] = rows.to_dict("records")
    return max(found, key=lambda row: row["amount"])


def _of_query(flow: prompts.ValueFlow) -> str:
    """The later query that gets most."""
    rows = flow.queries[flow.queries["query"] > flow.position]
    if rows.empty:
        return "No later token is among the queries that get most of it."
    best = _largest(rows)
    token = f"“{flow.tokens[int(best['query'])]}” (token {int(best['query'])})"
    return (
        f"Of later tokens {token} gets most, {number(best['amount'])} through head {int(best['head'])}: {best['share']:.1%} of what it "
        f"gets there (evenly {best['even']:.1%})."
    )


def _of_later(later: pd.DataFrame) -> str:
    if later.empty:
        return "No later layer reads any part of it again: what they see of it went through the hidden state."
    best, count = _largest(later), later["layer"].nunique()
    which = f"{count} later layers read a part of it again" if count > 1 else "One later layer reads a part of it again"
    if best["added"]:
        how, even = "added at its own place, {} set against {}", ""
    else:
        how, even = "{} of {}", f"; spread evenly {best['even']:.1%}"
    amounts = how.format(number(best["amount"]), number(best["total"]))
    return f"{which}, most layer {int(best['layer'])}: {amounts} ({best['share']:.1%}{even})."


# ---- the drawing -----------------------------------------------------------------------------------------------------


def _path(subject: Subject, flow: prompts.ValueFlow) -> plots.ValuePath:
    own, others = plots.colour(subject.series), plots.colour(plots.MINUS)
    heads, later = _groups(flow)
    looks, token = plots.HEADS, quoted(flow.tokens[flow.position])
    sources = [
        plots.Strand(
            name=path_in_words(path), size=share, says=f"{number(projection)} ({share:.0%})", colour=own if path == "own" else others,
            pieces=[(f"head {h}", x) for h, x in _by_head(flow, path)],
        )
        for path, projection, share in _sources(flow).itertuples(index=False) if share
    ]  # fmt: skip
    attended = heads[~heads["added"]].to_dict("records")
    here = _strands([(f"head {int(r['head'])}", r, looks[int(r["head"]) % len(looks)]) for r in attended], "heads")
    readers = dict[str, list[plots.Strand]]()  # from the last layer downwards to its own
    vectors = flow.readers.loc[flow.readers["layer"] > flow.layer, "path"].unique()
    what = path_in_words(vectors[0]) if len(vectors) == 1 else "parts of it"
    again = own if list(vectors) == ["own"] else others
    for added, how in ((False, "read again later"), (True, "added later, beside attention")):
        rows = later[later["added"] == added].to_dict("records")
        if rows:
            strands = _strands([(f"layer {int(r['layer'])}", r, again) for r in rows], "layers")
            readers[f"{what}, {how}"] = strands[::-1]
    readers[f"read in layer {flow.layer}; % of all its readers get"] = here + _beside(heads)
    return plots.ValuePath(
        title=subject.title, centre=f"{token}, layer {flow.layer}: length {number(flow.norm)}", colour=own,
        sources={"made of": sources}, readers=readers,
    )  # fmt: skip


def _by_head(flow: prompts.ValueFlow, path: str) -> list[tuple[int, float]]:
    rows = flow.parts[flow.parts["path"] == path]
    return list(zip(rows["head"].astype(int), rows["projection"], strict=True))


def _beside(heads: pd.DataFrame) -> list[plots.Strand]:
    """What the value's own layer adds of it beside the attention, all heads as one."""
    rows = heads[heads["added"]]
    if rows.empty:
        return []
    row = _sum(rows.to_dict("records"), added=True)
    return [plots.Strand(name="beside attention", size=row["amount"], says=_says(row), colour=plots.GREY)]


def _sum(rows: Sequence[dict[Any, Any]], *, added: bool) -> dict[Any, Any]:
    sums: dict[Any, Any] = {key: sum(row[key] for row in rows) for key in SUMS}
    return sums | {"share": sums["amount"] / sums["total"], "even": sums["even_amount"] / sums["total"], "added": added}


def _strands(rows: Sequence[tuple[str, dict[Any, Any], str]], kind: str) -> list[plots.Strand]:
    """The largest, in their own order, and the others as one."""
    kept = sorted(range(len(rows)), key=lambda i: -rows[i][1]["amount"])[: MOST if len(rows) > MOST + 1 else len(rows)]
    shown = [rows[i] for i in sorted(kept)]
    rest = [row for i, (_, row, _) in enumerate(rows) if i not in kept]
    if rest:
        shown.append((f"{len(rest)} other {kind}", _sum(rest, added=rest[0]["added"]), plots.GREY))
    return [plots.Strand(name=name, size=row["amount"], says=_says(row), colour=look) for name, row, look in shown]


def _says(row: dict[Any, Any]) -> str:
    even = "" if row["added"] else f" (even: {row['even']:.0%})"
    return f"{number(row['amount'])} = {row['share']:.0%}{even}"
