"""Single heads: which stand out in all models by any measure, how one came about, and where in the text it looks hardest."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workbench import plots, prompts
from workbench.errors import UnknownName, WorkbenchError
from workbench.models.registry import label
from workbench.plots import heads as figures
from workbench.runs.catalogue import Entry
from workbench.runs.records import one_sample
from workbench.runs.run import Run
from workbench.views.attention import short
from workbench.views.base import Drawing, view
from workbench.views.link import Link
from workbench.views.measures import PLAIN, Measure, pick, placed, varied
from workbench.views.source import LETTERS, Source, Subject

METRICS, TOP = ("row_entropy", "sink_mass"), 20
"""The measure where the link names none, the first of these that is stored; and how many heads are drawn."""
ENDS = {"highest": "highest first", "lowest": "lowest first"}
DOCUMENTS, MAX_T, PASSAGES = 32, 256, 10
"""Validation documents that are read, the most tokens of each, and how many passages are shown."""
INIT = "random init, mean over the run's heads"
ALONE = ("position", "index", "source", "part")
"""Axes that numbers of single heads do not have."""


@dataclass(frozen=True)
class Options(Measure):
    """What there is to choose from, and what is chosen; `rows` has heads and controls."""

    end: str


@dataclass(frozen=True)
class Head:
    """A head of a run, and the step at which it is looked at."""

    entry: Entry
    layer: int
    head: int
    step: int | None
    """A measured step or one with a checkpoint, asked for by the link; None: the last."""

    @property
    def name(self) -> str:
        """`ResFormer s0 · L3 H2`."""
        return f"{run_name(self.entry)}{plots.DETAIL}L{self.layer} H{self.head}"


def run_name(entry: Entry) -> str:
    """`ResFormer s0`; an imported run's own name."""
    return entry.name if entry.imported else f"{label(entry.series)} s{entry.seed}"


# ---- choices ---------------------------------------------------------------------------------------------------------


def options(source: Source, link: Link) -> Options:
    """The choices of a link, the absent ones at their defaults; raises `WorkbenchError` for what is not there."""
    runs = _runs(source, link)
    metrics = source.keep(("heads", tuple((e.path, e.stamp) for e in runs)), lambda: _metrics(source, runs))
    if not metrics:
        raise WorkbenchError(_unmeasured(runs))
    metric = pick(
        "measure of single heads", link.text("metric"), metrics, next((m for m in METRICS if m in metrics), "")
    )
    rows = source.records(runs, [metric])
    heads = rows[of_heads(rows)]
    sites = sorted(heads["site"].dropna().unique())
    site = pick("place", link.text("site"), sites, "own_v") if sites else None
    heads, rows = placed(heads, site), placed(rows, site)
    variants = [PLAIN] * bool(heads["variant"].isna().any()) + sorted(heads["variant"].dropna().unique())
    variant = pick("variant", link.text("variant"), variants, PLAIN)
    rows = varied(rows, variant)
    rows = rows[of_heads(rows) | rows["control"].notna()]
    sensible = "lowest" if plots.reading(rows).startswith("lower") else "highest"
    end = pick("end", link.text("end"), list(ENDS), sensible)
    return Options(metrics, metric, sites, site, variants, variant, rows, end)


def of_layers(source: Source, link: Link, found: Options) -> list[str]:
    """Measures that are stored for these runs, but not of single heads: what Depth shows and this page cannot."""
    return sorted({m for e in _runs(source, link) for m in e.measured} - {*found.metrics})


def of_heads(rows: pd.DataFrame) -> pd.Series:
    """Which rows are one number of one head."""
    alone = rows[[*ALONE, "control"]].isna().all(axis=1)
    return alone & rows["layer"].notna() & rows["head"].notna() & rows["value"].notna()


def _runs(source: Source, link: Link) -> list[Entry]:
    """The runs whose heads are ranked: A and B where they are compared, else the chosen ones of the experiment."""
    return [s.entry for s in source.subjects(link)] if link.on("compare") else source.chosen(link)


def _metrics(source: Source, runs: Sequence[Entry]) -> list[str]:
    names = sorted({m for e in runs for m in e.measured})
    return [name for name in names if of_heads(source.records(runs, [name])).any()]


def _unmeasured(runs: Sequence[Entry]) -> str:
    if all(e.kind == "recorded" for e in runs):
        return "a recording holds no checkpoints, so its heads cannot be measured: what was recorded is on the Training page"
    if all(e.shipped for e in runs):
        return "of these runs, which ship with the project, no numbers of single heads are stored"
    given = " --text FILE" if runs[0].imported else ""
    return (
        "no measure of single heads is stored for these runs yet. In a terminal: "
        f"workbench measure {shlex.quote(runs[0].path)} -m {METRICS[0]} --steps all{given}"
    )


# ---- the ranking -----------------------------------------------------------------------------------------------------


def ranked(source: Source, link: Link, chosen: Options | None = None) -> pd.DataFrame:
    """A row for each head, the first in the ranking first; equal ones by run, layer and head.

    The columns of records, and: rank (from 1), name, tag (A or B, where two are compared), init (its value at step 0), baseline,
    baseline_of (what that is). Raises `WorkbenchError` where nothing is stored at the chosen steps.
    """
    chosen = chosen or options(source, link)
    asked = tuple((key, link.text(key)) for key in ("set", "models", "compare", "a", "b", "step", "step_b"))
    runs = tuple((e.path, e.stamp) for e in _runs(source, link))
    key = "ranked", runs, asked, chosen.metric, chosen.site, chosen.variant, chosen.end
    table: pd.DataFrame = source.keep(key, lambda: _ranked(source, link, chosen))
    return table


def _ranked(source: Source, link: Link, chosen: Options) -> pd.DataFrame:
    if link.on("compare"):
        parts = []
        for s in source.subjects(link):
            found = _at(chosen.rows[chosen.rows["run"] == s.entry.name], s.step, strict=True)
            parts.append(found.assign(tag=s.tag, architecture=s.series, whose=f"{s.tag}: {run_name(s.entry)}"))
        table = pd.concat(parts)
    else:
        table = _at(chosen.rows, link.whole("step")).assign(tag="")
        table["whose"] = table["run"].map({e.name: run_name(e) for e in source.chosen(link)})
    if table.empty:
        raise WorkbenchError(f"no numbers of single heads are stored of {_words(chosen)}")
    heads = zip(table["whose"], table["layer"], table["head"], strict=True)
    table = table.assign(name=[f"{whose}{plots.DETAIL}L{n} H{h}" for whose, n, h in heads]).drop(columns="whose")
    table = table.sort_values(["run", "tag", "layer", "head"], kind="stable")
    table = table.sort_values("value", ascending=chosen.end == "lowest", kind="stable").reset_index(drop=True)
    return table.assign(rank=table.index + 1)


def _at(rows: pd.DataFrame, step: int | None, *, strict: bool = False) -> pd.DataFrame:
    """The heads of runs at each one's last measured step up to `step` (else its first), their values at step 0, the baseline.

    `strict`: at that step itself; raises `WorkbenchError` where it was not measured.
    """
    rows = rows.assign(step=rows["step"].fillna(0))
    heads = rows[of_heads(rows)]
    if strict and not (heads["step"] == step).any():
        steps = sorted(int(n) for n in heads["step"].unique())
        raise WorkbenchError(f"not measured at step {step}; steps with records: {steps}")
    upto = heads if step is None else heads[heads["step"] <= step]
    last = heads.groupby("run")["step"].min().to_dict() | upto.groupby("run")["step"].max().to_dict()
    rows = rows.assign(at=rows["run"].map(last).astype("Int64"))
    rows = one_sample(rows[(rows["step"] == rows["at"]) | (rows["step"] == 0)])
    place, now = ["run", "layer", "head"], rows[rows["step"] == rows["at"]]
    heads, before = (f[of_heads(f)].drop_duplicates(place) for f in (now, rows[rows["step"] < rows["at"]]))
    before = before.assign(init=before["value"])[[*place, "init"]]
    table = heads.merge(before, on=place, how="left")
    controls = now[_of_layers(now)]
    controls = controls[controls["control"] == min(controls["control"], default="")]
    means = controls.groupby(["run", "layer"], as_index=False).agg(baseline=("value", "mean"))
    table = table.merge(means, on=["run", "layer"], how="left")
    name = np.where(table["baseline"].notna(), min(controls["control"], default="").replace("_", " "), INIT)
    table["baseline"] = table["baseline"].fillna(table["run"].map(before.groupby("run")["init"].mean()))
    return table.assign(baseline_of=pd.Series(name, table.index).where(table["baseline"].notna())).drop(columns="at")


def _of_layers(rows: pd.DataFrame) -> pd.Series:
    """Which rows are what the measure gives under a baseline."""
    return rows["control"].notna() & rows["layer"].notna() & rows[list(ALONE)].isna().all(axis=1)


@view("heads")
def ranking(source: Source, link: Link) -> Drawing:
    """The heads that stand out most among all of all models, by any stored measure, beside random init and the baseline."""
    chosen = options(source, link)
    table = ranked(source, link, chosen)
    top = table.head(TOP)
    bold = is_picked(top, head_of(source, link, table))
    steps = sorted(int(n) for n in table["step"].unique())
    when = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    title = f"{_words(chosen).capitalize()}: the {chosen.end}" + (
        f" {TOP} of {len(table)} heads" if len(table) > TOP else ""
    )
    spread = "bars: ± standard error over documents" if top["se"].notna().any() else ""
    under = plots.subtitle(table, when, spread, "bold: the chosen head" if bold.any() else "")
    axis = str(table["unit"].iloc[0]), plots.reading(table)
    return Drawing(figures.ranking(top, title, under, axis, list(bold)), table, _sentence(source, link, table, chosen))


def _words(chosen: Options) -> str:
    """The measure, where it was taken, and its variant."""
    at = f" of {plots.site(chosen.site)}" if chosen.site else ""
    return chosen.metric.replace("_", " ") + at + ("" if chosen.variant == PLAIN else f", {plots.site(chosen.variant)}")


def _sentence(source: Source, link: Link, table: pd.DataFrame, chosen: Options) -> str:
    first = table.iloc[0]
    ties = int((table["value"] == first["value"]).sum()) - 1
    even = f", as {ties} other{'s' if ties > 1 else ''}" if ties else ""
    under = "" if pd.isna(first["baseline"]) else f"; baseline ({first['baseline_of']}): {first['baseline']:.3g}"
    init = "" if pd.isna(first["init"]) else f"; the same head at random init: {first['init']:.3g}"
    runs, models = table["run"].nunique(), table["architecture"].nunique()
    of = f"{models} model{'s' if models > 1 else ''}" + (f" in {runs} runs" if runs > models else "")
    says = f"{chosen.end.capitalize()} of {len(table)} heads of {of}: {first['name']} with {first['value']:.3g} {first['unit']}"
    asked = len(_runs(source, link))
    gone = 0 if link.on("compare") else asked - runs
    left = f" Nothing of this is stored for {gone} of the {asked} runs." if gone else ""
    return f"{says}{even}{under}{init}.{left}"


def head_of(source: Source, link: Link, table: pd.DataFrame | None = None) -> Head:
    """The head of a link; where it names none, the first in the ranking of what it does name (run, layer or head)."""
    run, step, layer, head = link.text("a"), link.whole("step"), link.whole("layer"), link.whole("head")
    if link.on("compare"):
        a = source.subjects(link)[0]
        run, step = a.entry.name, a.step
    entry = None if run is None else source.catalogue().entry(run)
    if entry is None or layer is None or head is None:
        found = ranked(source, link) if table is None else table
        found = found[found["tag"].isin(["", "A"])]
        asked = ("run", entry and entry.name), ("layer", layer), ("head", head)
        for column, value in asked:
            found = found if value is None else found[found[column] == value]
        if found.empty:
            told = ", ".join(f"{column} {value}" for column, value in asked if value is not None)
            raise WorkbenchError(f"no head of {told} is in the ranking; name a, layer and head")
        entry = source.catalogue().entry(str(found["run"].iloc[0]))
        layer, head = int(found["layer"].iloc[0]), int(found["head"].iloc[0])
    for kind, value, count in (("layer", layer, entry.n_layers), ("head", head, entry.n_heads)):
        if value not in range(count):
            raise UnknownName(f"{kind} of {entry.name}", str(value), map(str, range(count)))
    return Head(entry, layer, head, step)


def is_picked(table: pd.DataFrame, picked: Head) -> pd.Series:
    """Which rows of a ranking are a head's; where two are compared, A's."""
    mine = (table["run"] == picked.entry.name) & (table["layer"] == picked.layer) & (table["head"] == picked.head)
    return mine & table["tag"].isin(["", "A"])


# ---- one head --------------------------------------------------------------------------------------------------------


@view("heads")
def history(source: Source, link: Link) -> Drawing:
    """The chosen head over training, bold, among the other heads of its run, thin, and the measure's baseline, dotted."""
    chosen, picked = options(source, link), head_of(source, link)
    rows = chosen.rows[chosen.rows["run"] == picked.entry.name]
    rows = one_sample(rows.assign(step=rows["step"].fillna(0)))
    heads = rows[of_heads(rows)].sort_values(["step", "layer", "head"], kind="stable")
    this = (heads["layer"] == picked.layer) & (heads["head"] == picked.head)
    mine, others = heads[this], heads[~this]
    if mine.empty:
        raise WorkbenchError(f"{_words(chosen)} of {picked.name} is not stored")
    control = rows[_of_layers(rows) & (rows["layer"] == picked.layer)]
    means = control.groupby(["control", "step"], as_index=False)["value"].mean()
    means = means.assign(control=means["control"].str.replace("_", " "))
    axis = str(mine["unit"].iloc[0]), plots.reading(mine)
    under = plots.subtitle(mine, "bars: ± standard error over documents" if mine["se"].notna().any() else "")
    figure = figures.history(mine, others, means, f"{picked.name}: {_words(chosen)} over training", under, axis)
    table = pd.concat([mine.assign(chosen=True), others.assign(chosen=False), rows[rows["control"].notna()]])
    return Drawing(figure, table.reset_index(drop=True), _story(picked, mine, others, chosen))


def _story(picked: Head, mine: pd.DataFrame, others: pd.DataFrame, chosen: Options) -> str:
    """Where the head began and ended, and its place among its run's heads."""
    first, last = mine.iloc[0], mine.iloc[-1]
    if len(mine) == 1:
        more = (
            ""
            if picked.entry.shipped
            else f"; more: workbench measure {shlex.quote(picked.entry.path)} -m {chosen.metric} --steps all"
        )
        return f"{picked.name}: {last['value']:.3g} at step {last['step']}, the only one measured{more}"
    then = others.loc[others["step"] == last["step"], "value"]
    before = int((then > last["value"]).sum() if chosen.end == "highest" else (then < last["value"]).sum())
    nth = "the" if not before else f"number {before + 1} from the"
    place = f"{nth} {chosen.end} of the run's {len(then) + 1} heads"
    return f"From {first['value']:.3g} at step {first['step']} to {last['value']:.3g} at step {last['step']}, {place}."


@view("heads")
def passages(source: Source, link: Link) -> Drawing:
    """The pairs of tokens to which the chosen head gives most, in the run's validation text; the first position and itself left out."""
    picked = head_of(source, link)
    subject = _with_weights(picked)
    ids, pairs = source.keep(
        ("passages", picked.entry.path, picked.entry.stamp, subject.step, DOCUMENTS), lambda: _sharpest(source, subject)
    )
    mine = pairs[(pairs["layer"] == picked.layer) & (pairs["head"] == picked.head)]
    mine = mine.sort_values(["weight", "document"], ascending=[False, True], kind="stable").head(PASSAGES)
    table = _told(source.model(subject), mine, ids, LETTERS.get(picked.entry.kind, 0)).assign(
        run=picked.entry.name, step=subject.step
    )
    first, read = table.iloc[0], f"{len(ids)} validation documents of {ids.shape[1]} tokens"
    under = f"step {subject.step}; the sharpest pair of each of {len(ids)} documents; position 0 and the query itself left out"
    title = f"{picked.name}: where it looks hardest"
    drawn = table.assign(**{c: table[c].map(short) for c in ("key token", "query token")})
    sentence = (
        f"Sharpest in {read}: “{first['query token']}” (token {first['query']}) gives {first['weight']:.2f} to “{first['key token']}” "
        f"(token {first['key']}, {first['distance']} back); the last one shown gives {table['weight'].iloc[-1]:.2f}."
    )
    return Drawing(figures.pairs(drawn, plots.colour(picked.entry.series), title, under), table, sentence)


def _with_weights(picked: Head) -> Subject:
    """The head's run at a step with weights; raises `WorkbenchError` for one that has none."""
    steps = picked.entry.steps
    if not steps:
        why = "is shipped without weights" if picked.entry.shipped else "has no checkpoint"
        raise WorkbenchError(
            f"{run_name(picked.entry)} {why}, so no text can be read with it; its measures are in the ranking"
        )
    return Subject(picked.entry, max((n for n in steps if picked.step is None or n <= picked.step), default=steps[0]))


def _sharpest(source: Source, subject: Subject) -> tuple[np.ndarray, pd.DataFrame]:
    """Ids [document, pos] of the run's validation data, and the sharpest pair of every head in each."""
    run = Run.open(Path(subject.entry.path))
    if subject.entry.imported:
        raise WorkbenchError(
            f"nothing says what {subject.entry.name}, which was imported, was trained on, so there is no text to look for passages "
            "in: the Attention page shows its heads on a text of yours"
        )
    try:
        sample = run.data.sample(DOCUMENTS, min(MAX_T, run.train.T, subject.entry.n_ctx))
    except WorkbenchError as error:
        raise WorkbenchError(
            f"no passages: the text that {subject.entry.name} was trained on is not here ({error})"
        ) from error
    pairs = prompts.sharpest_pairs(source.model(subject), sample.ids, progress=source.progress)
    return sample.ids.numpy(), pairs


def _told(model: Any, pairs: pd.DataFrame, ids: np.ndarray, letters: int) -> pd.DataFrame:
    """The pairs with their tokens, their distance, and the text around as a prompt; `lock` is the query's place in it."""
    rows = []
    named = prompts.Prompt(ids=None, tokenizer=model.tokenizer, letters=letters)  # type: ignore[arg-type]
    for pair in pairs.to_dict("records"):
        document = ids[pair["document"]].tolist()
        key, query = named.strings([document[pair["key"]], document[pair["query"]]])
        text = prompts.excerpt(model, document, pair["query"], pair["key"], letters=letters)
        told = {
            "weight": pair["weight"],
            "key token": key,
            "query token": query,
            "distance": pair["query"] - pair["key"],
        }
        rows.append(
            told
            | {"prompt": text.text, "lock": text.query}
            | {k: pair[k] for k in ("layer", "head", "document", "key", "query")}
        )
    return pd.DataFrame(rows).astype({"lock": "Int64"})
