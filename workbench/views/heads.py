"""Single heads: a ranking over all models by any measure, one head over training, and the passages where it attends most."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workbench import plots, prompts
from workbench.errors import UnknownName, WorkbenchError
from workbench.plots import head_rankings as figures
from workbench.plots.heat_maps import signed
from workbench.plots.style import at_least
from workbench.runs.catalogue import Entry
from workbench.runs.records import one_sample
from workbench.runs.run import Run
from workbench.statistics.sink_thresholds import SINK_MASS
from workbench.views.measure_selection import PLAIN, Measure, select, unmeasured
from workbench.views.page_links import Link
from workbench.views.path_of_token import number as digits
from workbench.views.registered_views import Drawing, view
from workbench.views.source import LETTERS, RunAtStep, Source, run_name
from workbench.views.token_names import short

METRICS, TOP = ("row_entropy", "sink_mass"), 20
"""Default measures, the first that is stored; number of heads in the figure."""
ENDS = {"highest": "highest first", "lowest": "lowest first", "type": "by type"}
OF_TYPE = 6  # heads of each type in the figure
DOCUMENTS, MAX_T, PASSAGES = 32, 256, 10
"""Validation documents that are read, most tokens of each, passages that are shown."""
SINK_DOCUMENTS, AROUND, CELL = 4, 130, 40  # that are read at each checkpoint; pixels around their map, of a cell
TYPES = {
    "sink": ("sink_mass", None, SINK_MASS), "previous token": ("induction_score", "previous", 0.4),
    "induction": ("induction_score", None, 0.4),
}  # fmt: skip
"""Metric, variant and least value of a head's type; the last two thresholds are this project's own."""
INIT = "random init, mean over the run's heads"
PLACE = ["run", "step", "layer", "head"]
ALONE = ("position", "index", "source", "part")
"""Axes that numbers of single heads do not have."""


@dataclass(frozen=True)
class HeadOptions(Measure):
    """The selected measure and order; `rows` has heads and controls."""

    end: str


@dataclass(frozen=True)
class RunHead:
    """A head of a run."""

    entry: Entry
    layer: int
    head: int
    step: int | None
    """The step that the link asks for, measured or with a checkpoint; None: the last."""

    @property
    def name(self) -> str:
        """`ResFormer · s0 · L3 H2`."""
        return f"{run_name(self.entry)}{plots.DETAIL}L{self.layer} H{self.head}"


# ---- choices ---------------------------------------------------------------------------------------------------------


def head_options(source: Source, link: Link) -> HeadOptions:
    """Return the options of a link, absent ones at their defaults; raises `WorkbenchError` for unknown ones."""
    runs = _runs(source, link)

    def read() -> list[str]:
        return [m for m in sorted({m for e in runs for m in e.measured}) if of_heads(source.records(runs, [m])).any()]

    metrics = source.keep(("heads", tuple((e.path, e.stamp) for e in runs)), read)
    if not metrics:
        raise WorkbenchError(unmeasured(runs, "numbers of single heads", METRICS[0]))
    default = next((m for m in METRICS if m in metrics), None)
    metric = link.choice("metric", metrics, default, "measure of single heads")
    rows = source.records(runs, [metric])
    measure = select(link, metrics, metric, rows, rows[of_heads(rows)])
    rows = measure.rows[of_heads(measure.rows) | measure.rows["control"].notna()]
    end = link.choice("end", ENDS, "lowest" if _lower_is_more(rows) else "highest")
    return HeadOptions(**vars(replace(measure, rows=rows)), end=end)


def _lower_is_more(rows: pd.DataFrame) -> bool:
    return plots.reading_direction(rows).startswith("lower")


def of_layers(source: Source, link: Link, selected: HeadOptions) -> list[str]:
    """Stored measures of these runs that have no numbers of single heads."""
    return sorted({m for e in _runs(source, link) for m in e.measured} - {*selected.metrics})


def of_heads(rows: pd.DataFrame) -> pd.Series:
    """Which rows are a number of one head."""
    alone = rows[[*ALONE, "control"]].isna().all(axis=1)
    return alone & rows["layer"].notna() & rows["head"].notna() & rows["value"].notna()


def _baselines(rows: pd.DataFrame) -> pd.Series:
    """Which rows are the measure of a layer under a baseline."""
    return rows["control"].notna() & rows["layer"].notna() & rows[list(ALONE)].isna().all(axis=1)


def _runs(source: Source, link: Link) -> list[Entry]:
    """The runs whose heads are ranked: A and B if they are compared, else the selected runs of the experiment."""
    return [s.entry for s in source.subjects(link)] if link.on("compare") else source.chosen(link)


def head_types(source: Source, runs: Sequence[Entry]) -> dict[tuple[str, int, int, int], str]:
    """Return the type of heads (run, step, layer, head) by their measures stored at that step: the first of `TYPES`.

    Heads without any of these measures have no type; heads with one, and none of the types, are `other`.
    """
    rows = source.records(runs, sorted({metric for metric, *_ in TYPES.values()}))
    rows = rows[rows["control"].isna() & rows["layer"].notna() & rows["head"].notna()]
    rows = one_sample(rows.assign(step=rows["step"].fillna(0)))
    types: dict[tuple[str, int, int, int], str] = {}
    for name, (metric, variant, least) in reversed(TYPES.items()):
        of = rows[
            (rows["metric"] == metric) & (rows["variant"].isna() if variant is None else rows["variant"] == variant)
        ]
        for run, step, layer, head, value in of[[*PLACE, "value"]].itertuples(index=False):
            place = str(run), int(step), int(layer), int(head)
            types[place] = name if value > least else types.get(place, "other")
    return types


# ---- the ranking -----------------------------------------------------------------------------------------------------


def ranked(source: Source, link: Link, selected: HeadOptions | None = None) -> pd.DataFrame:
    """A row for each head in order of the ranking; equal ones by run, layer and head.

    The columns of records, and: rank (from 1), name, tag (A or B if two are compared), init (value at step 0), baseline, baseline_of
    (name of the baseline). Raises `WorkbenchError` if nothing is stored at the selected steps.
    """
    selected = selected or head_options(source, link)
    asked = tuple((key, link.text(key)) for key in ("set", "models", "by", "compare", "a", "b", "step", "step_b"))
    runs = tuple((e.path, e.stamp) for e in _runs(source, link))
    key = "ranked", runs, asked, selected.metric, selected.site, selected.variant, selected.end

    def rank() -> pd.DataFrame:
        if link.on("compare"):
            parts = []
            for s in source.subjects(link):
                part = _at(selected.rows[selected.rows["run"] == s.entry.name], s.step, strict=True)
                parts.append(part.assign(tag=s.tag, architecture=s.series, whose=f"{s.tag}: {run_name(s.entry)}"))
            table = pd.concat(parts)
        else:
            table = _at(selected.rows, link.whole("step")).assign(tag="")
            table["whose"] = table["run"].map({e.name: run_name(e) for e in source.chosen(link)})
        if table.empty:
            raise WorkbenchError(f"no numbers of single heads are stored of {_words(selected)}")
        heads = zip(table["whose"], table["layer"], table["head"], strict=True)
        table = table.assign(name=[f"{whose}{plots.DETAIL}L{n} H{h}" for whose, n, h in heads]).drop(columns="whose")
        table = table.sort_values(["run", "tag", "layer", "head"], kind="stable")
        lowest = selected.end == "lowest" or (selected.end == "type" and _lower_is_more(table))
        table = table.sort_values("value", ascending=lowest, kind="stable")
        types = head_types(source, _runs(source, link))
        table["type"] = [types.get(place, "") for place in table[PLACE].itertuples(index=False, name=None)]
        if selected.end == "type":
            order = [*TYPES, "other", ""]
            table = table.sort_values("type", key=lambda kinds: kinds.map(order.index), kind="stable")
            table["name"] = table["type"].where(table["type"] != "", "no type") + ": " + table["name"]
        table = table.reset_index(drop=True)
        return table.assign(rank=table.index + 1)

    table: pd.DataFrame = source.keep(key, rank)
    return table


def _at(rows: pd.DataFrame, step: int | None, *, strict: bool = False) -> pd.DataFrame:
    """Return the heads of each run at its last measured step up to `step` (else its first), with values at step 0 and the baseline.

    `strict`: at that step itself; raises `WorkbenchError` if it was not measured.
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
    controls = now[_baselines(now)]
    controls = controls[controls["control"] == min(controls["control"], default="")]
    means = controls.groupby(["run", "layer"], as_index=False).agg(baseline=("value", "mean"))
    table = table.merge(means, on=["run", "layer"], how="left")
    name = np.where(table["baseline"].notna(), min(controls["control"], default="").replace("_", " "), INIT)
    table["baseline"] = table["baseline"].fillna(table["run"].map(before.groupby("run")["init"].mean()))
    return table.assign(baseline_of=pd.Series(name, table.index).where(table["baseline"].notna())).drop(columns="at")


@view("heads")
def ranking(source: Source, link: Link) -> Drawing:
    """The heads of all models with the highest or lowest values of a stored measure, beside random init and the baseline."""
    selected = head_options(source, link)
    table = ranked(source, link, selected)
    top = table.groupby("type", sort=False).head(OF_TYPE) if selected.end == "type" else table.head(TOP)
    bold = is_picked(top, head_of(source, link, table))
    steps = sorted(int(n) for n in table["step"].unique())
    when = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    of = f" {len(top)} of {len(table)} heads" if len(table) > len(top) else ""
    spread = "bars: ± standard error over documents" if top["se"].notna().any() else ""
    under = plots.subtitle(table, when, spread, "bold: the selected head" if bold.any() else "")
    axis = str(table["unit"].iloc[0]), plots.reading_direction(table)
    end = "by type," if selected.end == "type" and of else ENDS["type"] if selected.end == "type" else selected.end
    title = f"{_words(selected).capitalize()}: {end}{of}"
    return Drawing(
        figures.ranking_figure(top, title, under, axis, list(bold)), table, _sentence(source, link, table, selected)
    )


def _words(selected: HeadOptions) -> str:
    """Measure, site, variant, and whether it leaves a sink at another position out."""
    words = selected.metric.replace("_", " ") + (f" of {plots.site(selected.site)}" if selected.site else "")
    words += plots.positions_of(selected.rows)
    return words + ("" if selected.variant == PLAIN else f", {plots.site(selected.variant)}")


def _sentence(source: Source, link: Link, table: pd.DataFrame, selected: HeadOptions) -> str:
    """The first head, its ties, its baselines, and how many runs have no records."""
    first = table.iloc[0]
    ties = int((table["value"] == first["value"]).sum()) - 1
    even = f", tied with {ties} other{'s' if ties > 1 else ''}" if ties else ""
    under = "" if pd.isna(first["baseline"]) else f"; baseline ({first['baseline_of']}): {first['baseline']:.3g}"
    init = "" if pd.isna(first["init"]) else f"; the same head at random init: {first['init']:.3g}"
    runs, models = table["run"].nunique(), table["architecture"].nunique()
    of = f"{models} model{'s' if models > 1 else ''}" + (f" in {runs} runs" if runs > models else "")
    value = f"{first['name']} with {first['value']:.3g} {first['unit']}"
    if selected.metric == "sink_mass" and selected.end == "highest" and first["value"] <= SINK_MASS:
        value += f" (no sink, which needs more than {SINK_MASS})"
    asked = len(_runs(source, link))
    absent = 0 if link.on("compare") else asked - runs
    left = f" No records of {absent} of the {asked} runs." if absent else ""
    if selected.end == "type":
        counts = ", ".join(
            f"{n} {kind or 'without a stored type'}" for kind, n in table["type"].value_counts(sort=False).items()
        )
        return f"Types of {len(table)} heads of {of}: {counts}.{left}"
    return f"{selected.end.capitalize()} of {len(table)} heads of {of}: {value}{even}{under}{init}.{left}"


def head_of(source: Source, link: Link, table: pd.DataFrame | None = None) -> RunHead:
    """The head of a link; if it does not name one, the first in the ranking of the run, layer or head it names."""
    run, step, layer, head = link.text("a"), link.whole("step"), link.whole("layer"), link.whole("head")
    if link.on("compare"):
        a = source.subjects(link)[0]
        run, step = a.entry.name, a.step
    entry = None if run is None else source.catalogue().entry(run)
    if entry is None or layer is None or head is None:
        rows = ranked(source, link) if table is None else table
        rows = rows[rows["tag"].isin(["", "A"])]
        asked = ("run", entry and entry.name), ("layer", layer), ("head", head)
        for column, value in asked:
            rows = rows if value is None else rows[rows[column] == value]
        if rows.empty:
            names = ", ".join(f"{column} {value}" for column, value in asked if value is not None)
            raise WorkbenchError(f"the ranking has no head of {names}; name a, layer and head")
        entry = source.catalogue().entry(str(rows["run"].iloc[0]))
        layer, head = int(rows["layer"].iloc[0]), int(rows["head"].iloc[0])
    for kind, value, count in (("layer", layer, entry.n_layers), ("head", head, entry.n_heads)):
        if value not in range(count):
            raise UnknownName(f"{kind} of {entry.name}", str(value), map(str, range(count)))
    return RunHead(entry, layer, head, step)


def is_picked(table: pd.DataFrame, picked: RunHead) -> pd.Series:
    """Which rows of a ranking are a head's; if two models are compared, A's."""
    rows = (table["run"] == picked.entry.name) & (table["layer"] == picked.layer) & (table["head"] == picked.head)
    return rows & table["tag"].isin(["", "A"])


# ---- one head --------------------------------------------------------------------------------------------------------


@view("heads")
def history(source: Source, link: Link) -> Drawing:
    """The selected head over training (bold), the other heads of its run (thin), and the measure's baseline (dotted)."""
    selected, picked = head_options(source, link), head_of(source, link)
    rows = selected.rows[selected.rows["run"] == picked.entry.name]
    rows = one_sample(rows.assign(step=rows["step"].fillna(0)))
    heads = rows[of_heads(rows)].sort_values(["step", "layer", "head"], kind="stable")
    this = (heads["layer"] == picked.layer) & (heads["head"] == picked.head)
    own, others = heads[this], heads[~this]
    if own.empty:
        raise WorkbenchError(f"{_words(selected)} of {picked.name} is not stored")
    control = rows[_baselines(rows) & (rows["layer"] == picked.layer)]
    means = control.groupby(["control", "step"], as_index=False)["value"].mean()
    means = means.assign(control=means["control"].str.replace("_", " "))
    axis = str(own["unit"].iloc[0]), plots.reading_direction(own)
    under = plots.subtitle(own, "bars: ± standard error over documents" if own["se"].notna().any() else "")
    figure = figures.history_figure(own, others, means, f"{picked.name}: {_words(selected)} over training", under, axis)
    table = pd.concat([own.assign(chosen=True), others.assign(chosen=False), rows[rows["control"].notna()]])
    first, last = own.iloc[0], own.iloc[-1]
    if len(own) == 1:
        more = f"; more: workbench measure {shlex.quote(picked.entry.path)} -m {selected.metric} --steps all"
        sentence = f"{picked.name}: {last['value']:.3g}{picked.entry.at_step(last['step'])}, the only measured step"
        return Drawing(figure, table, sentence + ("" if picked.entry.shipped else more))
    then = others.loc[others["step"] == last["step"], "value"]
    lowest = selected.end == "lowest"
    before = int((then < last["value"]).sum() if lowest else (then > last["value"]).sum())
    rank = f"rank {before + 1} of {len(then) + 1} heads of the run, {ENDS['lowest' if lowest else 'highest']}"
    course = f"{first['value']:.3g} at step {first['step']}, {last['value']:.3g} at step {last['step']}"
    return Drawing(figure, table, f"{course}: {rank}.")


@view("heads")
def passages(source: Source, link: Link) -> Drawing:
    """The largest attention weights of the selected head in validation text, without position 0 and the query itself."""
    picked = head_of(source, link)
    steps = picked.entry.steps
    if not steps:
        why = "is shipped without weights" if picked.entry.shipped else "has no checkpoint"
        raise WorkbenchError(f"{run_name(picked.entry)} {why}, so it cannot read text; its measures are in the ranking")
    at = max((n for n in steps if picked.step is None or n <= picked.step), default=steps[0])
    subject = RunAtStep(picked.entry, at)

    def read() -> tuple[np.ndarray, pd.DataFrame]:
        """Ids [document, pos] of the run's validation data, and every head's largest weight in each document."""
        ids = validation_ids(subject.entry, DOCUMENTS)
        return ids.numpy(), prompts.sharpest_pairs(source.model(subject), ids, progress=source.progress)

    ids, pairs = source.keep(("passages", picked.entry.path, picked.entry.stamp, subject.step, DOCUMENTS), read)
    top = pairs[(pairs["layer"] == picked.layer) & (pairs["head"] == picked.head)]
    top = top.sort_values(["weight", "document"], ascending=[False, True], kind="stable").head(PASSAGES)
    table = _with_tokens(source.model(subject), top, ids, LETTERS.get(picked.entry.kind, 0))
    first_position = float(
        pairs.loc[(pairs["layer"] == picked.layer) & (pairs["head"] == picked.head), "first_position"].mean()
    )
    table = table.assign(run=picked.entry.name, step=subject.step, first_position=first_position)
    first = table.iloc[0]
    under = (
        f"largest weight in each of {len(ids)} documents of {ids.shape[1]} tokens{picked.entry.at_step(subject.step)}; position 0, "
        f"which gets {digits(first_position)} of the attention on average, and the query itself are excluded"
    )
    drawn = table.assign(**{c: table[c].map(short) for c in ("key token", "query token")})
    sentence = (
        f"Largest weight: {digits(first['weight'])} from “{first['query token']}” (token {first['query']}) to “{first['key token']}” "
        f"(token {first['key']}, {first['distance']} back); smallest shown: {digits(table['weight'].iloc[-1])}. "
        f"Mean attention to position 0{', an attention sink' if first_position > SINK_MASS else ''}: {digits(first_position)}."
    )
    figure = figures.pairs_figure(
        drawn, plots.colour(picked.entry.series), f"{picked.name}: largest attention weights", under
    )
    return Drawing(figure, table, sentence)


def validation_ids(entry: Entry, count: int) -> Any:
    """Ids [document, pos] of the run's validation data."""
    if entry.imported:
        raise WorkbenchError(
            f"the training text of {entry.name} (imported) is unknown; the Attention page reads a text of yours"
        )
    run = Run.open(Path(entry.path))
    try:
        return run.data.sample(count, min(MAX_T, run.train.T, entry.n_ctx)).ids
    except WorkbenchError as error:
        raise WorkbenchError(f"the training text of {entry.name} is not on this machine ({error})") from error


@view("heads")
def sink(source: Source, link: Link) -> Drawing:
    """Score of the first token minus the mean score of the other keys, by part of the key's stream, over training."""
    picked = head_of(source, link)
    entry, layer = picked.entry, picked.layer
    if not entry.steps:
        raise WorkbenchError(f"{run_name(entry)} has no checkpoint, so its scores are not known")
    tables: list[pd.DataFrame] = []

    def read(step: int) -> list[prompts.ScoreAttribution]:
        ids = validation_ids(entry, SINK_DOCUMENTS)
        return prompts.sink_attribution(source.model(RunAtStep(entry, step)), ids, layer)

    for i, step in enumerate(entry.steps):
        results = source.keep(("sink score", entry.path, entry.stamp, step, layer), partial(read, step))
        for side, parts in (("key", results[picked.head].keys), ("query", results[picked.head].queries)):
            names = [*map(prompts.part_in_words, parts.index)]
            tables.append(pd.DataFrame({"step": step, "side": side, "part": names, "score": parts.to_numpy()}))
        if source.progress is not None:
            source.progress(i + 1, len(entry.steps))
    table = pd.concat(tables, ignore_index=True).assign(run=entry.name, layer=layer, head=picked.head)
    cells = table[table["side"] == "key"].pivot_table("score", "part", "step", sort=False)
    cells.loc["sum"] = cells.sum()
    top = float(cells.abs().to_numpy().max()) or 1.0
    grid = plots.Grid(
        cells.to_numpy(), list(cells.index), [str(step) for step in cells.columns], "score", "part of the key", "step",
        span=(-top, top), texts=signed(cells.to_numpy()), upward=False,
    )  # fmt: skip
    figure = plots.grids(
        [(picked.name, grid)], f"{picked.name}: sink score by part",
        f"score of the first token minus the mean of the other keys; mean over queries of {SINK_DOCUMENTS} validation documents",
    )  # fmt: skip
    figure.update_coloraxes(showscale=False)  # the cells have their numbers
    at_least(figure, AROUND + CELL * len(cells.columns))
    return Drawing(figure, table, f"Step {entry.steps[-1]}: {results[picked.head].sentence}")


def _with_tokens(model: Any, pairs: pd.DataFrame, ids: np.ndarray, letters: int) -> pd.DataFrame:
    """The pairs with their tokens, their distance, and the text around as a prompt; `lock` is the query's position in it."""
    rows = []
    named = prompts.Prompt(ids=None, tokenizer=model.tokenizer, letters=letters)  # type: ignore[arg-type]
    for pair in pairs.to_dict("records"):
        document = ids[pair["document"]].tolist()
        key, query = named.strings([document[pair["key"]], document[pair["query"]]])
        text = prompts.excerpt(model, document, pair["query"], pair["key"], letters=letters)
        rows.append({
            "weight": pair["weight"], "key token": key, "query token": query, "distance": pair["query"] - pair["key"],
            "prompt": text.text, "lock": text.query, **{k: pair[k] for k in ("layer", "head", "document", "key", "query")},
        })  # fmt: skip
    return pd.DataFrame(rows).astype({"lock": "Int64"})
