"""Any measure over layers: for the runs of an experiment, or for model A and model B."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from workbench import plots
from workbench.errors import WorkbenchError
from workbench.models.registry import label
from workbench.plots import documents as drawn
from workbench.runs.catalogue import Entry
from workbench.runs.records import one_sample
from workbench.views import documents
from workbench.views.base import Drawing, view
from workbench.views.link import Link
from workbench.views.measures import PLAIN, Measure, pick, placed, varied
from workbench.views.source import Source, Subject

FORMS = {
    "auto": "as its axes suggest", "profile": "lines over layers", "positions": "map: layer by position",
    "heads": "map: layer by head", "ranks": "curves over ranks, for each layer", "pairs": "map: layer by layer",
    "steps": "lines over training steps",
}  # fmt: skip
AXES = {
    "profile": "layer", "positions": "position", "heads": "head", "ranks": "index", "pairs": "source", "steps": "step",
}  # fmt: skip
MAPS = ("positions", "heads", "pairs")
RELATIVE = "relative depth: 0 the first layer, 1 the last"
METRIC = "token_identity_share"
FIRST = (METRIC, "sink_mass", "loss")
"""Measures that are shown first, as far as they are stored."""


@dataclass(frozen=True)
class Options(Measure):
    """What there is to choose from, and what is chosen."""

    forms: list[str]
    form: str
    seeds: list[str]
    seed: str
    steps: list[int]
    step: int | None

    @property
    def has_course(self) -> bool:
        """Whether a mean over layers says something at each of several steps: ranks and pairs of layers have none."""
        return "steps" in self.forms and self.form != "steps" and not {"ranks", "pairs"} & set(self.forms)

    @property
    def is_map(self) -> bool:
        """Whether it is drawn as maps, each a panel of its own."""
        return self.form in MAPS or (self.form == "auto" and not {*MAPS}.isdisjoint(self.forms))


def _unmeasured(runs: Sequence[Entry]) -> str:
    if all(e.kind == "recorded" for e in runs):
        return "a recording holds no checkpoints to measure: what was recorded is on the Training page"
    if all(e.shipped for e in runs):
        return "these runs are shipped without weights, and nothing was measured on them: the Training page shows them"
    given = " --text FILE" if runs[0].imported else ""
    return (
        "nothing has been measured on these runs yet. In a terminal: "
        f"workbench measure {shlex.quote(runs[0].path)} -m {METRIC} --steps all{given}"
    )


def options(source: Source, link: Link) -> Options:
    """The choices of a link, the absent ones at their defaults; raises `WorkbenchError` for what is not there."""
    runs = [s.entry for s in source.subjects(link)] if link.on("compare") else source.chosen(link)
    metrics = sorted({m for e in runs for m in e.measured})
    if not metrics:
        raise WorkbenchError(_unmeasured(runs))
    metric = pick("measure", link.text("metric"), metrics, next((m for m in FIRST if m in metrics), metrics[0]))
    rows = source.records(runs, [metric])
    if rows.empty:
        raise WorkbenchError(f"the records of {metric.replace('_', ' ')} cannot be read")
    sites = sorted(rows["site"].dropna().unique())
    site = pick("place", link.text("site"), sites, "own_v") if sites else None
    rows = placed(rows, site)
    variants = [PLAIN] * bool((rows["variant"].isna() & rows["control"].isna()).any()) + sorted(
        rows["variant"].dropna().unique()
    )
    variant = pick("variant", link.text("variant"), variants, PLAIN)
    rows = varied(rows, variant)
    forms = ["auto", *(form for form, axis in AXES.items() if rows[axis].nunique() > 1)]
    form = pick("view", link.text("view"), forms, "auto")
    seeds = ["all", *(str(s) for s in sorted(rows["seed"].dropna().unique()))]
    seed = pick("seed", link.text("seed"), seeds, "all")
    steps = sorted(int(s) for s in rows["step"].dropna().unique())
    step = None
    if steps and form != "steps":
        asked = link.whole("step")
        step = asked if asked in steps else max((s for s in steps if asked is None or s <= asked), default=steps[0])
    return Options(metrics, metric, sites, site, variants, variant, rows, forms, form, seeds, seed, steps, step)


def about(metric: str) -> str:
    """What a measure or an experiment is, as its docstring says."""
    import inspect

    from workbench.interventions import INTERVENTIONS
    from workbench.metrics import METRICS

    item = METRICS.get(metric) or INTERVENTIONS.get(metric)
    return inspect.getdoc(item.function) or "" if item else ""


@view("depth")
def layers(source: Source, link: Link) -> Drawing:
    """The measure over layers (or heads, positions, steps), with its value at random init and under its baseline."""
    chosen, compare = options(source, link), link.on("compare")
    form = None if chosen.form == "auto" else chosen.form
    parts, sentences = _parts(source, link, chosen, form), list[str]()
    more_seeds = _more_seeds(source, chosen, source.subjects(link), form) if compare else []
    if gone := [label(name) for name, part in parts.items() if part.empty]:
        sentences.append(f"Nothing of this is stored for {', '.join(gone)}.")
    found = [part for part in parts.values() if len(part)] or list(parts.values())[:1]
    relative = link.on("depth") and (form or plots.form_of(pd.concat(found))) == "profile"
    if relative:
        found = [_relative(part) for part in found]
        more_seeds = [(_relative(a), _relative(b)) for a, b in more_seeds]
    elif link.on("depth"):
        sentences.append("Relative depth is for lines over layers.")
    title = _title(chosen, None if compare else chosen.step)
    everything = pd.concat(found, ignore_index=True)
    figure = (
        plots.compared(found, more_seeds, form=form, title=title)
        if compare
        else plots.plot(everything, form=form, title=title)
    )
    if relative:  # in all panels, also where only the ends, 0 and 1, are left
        figure.for_each_xaxis(lambda a: a.update(title_text=RELATIVE if a.title.text else "", dtick=None))
    return Drawing(figure, everything, " ".join(sentences))


@view("depth")
def course(source: Source, link: Link) -> Drawing:
    """How the measure came about: at every step it was measured at, the layer of the link or the mean over layers."""
    chosen, layer = options(source, link), link.whole("layer")
    if not chosen.has_course:
        raise WorkbenchError("this measure has no course over training: one step, or an axis that has no mean")
    rows = pd.concat(_parts(source, link, chosen, "steps").values(), ignore_index=True)
    mine = rows[rows["layer"] == layer] if layer is not None else rows[:0]
    means_of = "mean over layers, " if rows["layer"].nunique() > 1 else ""
    rows, of = (mine, f"layer {layer}, ") if len(mine) else (rows, means_of)
    within = ["layer", "head", "position", "value", "se"]
    means = rows.groupby([c for c in rows if c not in within], dropna=False, observed=True, as_index=False)["value"]
    rows = means.mean().assign(**dict.fromkeys(("layer", "head", "position", "se")))[list(rows)]
    title = f"{_title(chosen, None)}{f': {of}' if of else ' '}over training"
    return Drawing(plots.plot(rows, form="steps", title=title), rows)


def _parts(source: Source, link: Link, chosen: Options, form: str | None) -> dict[str, pd.DataFrame]:
    """The rows of A and B, or of each chosen model over its seeds, by name."""
    if link.on("compare"):
        return {s.title: _of(chosen.rows, s, form) for s in source.subjects(link)}
    rows = chosen.rows if chosen.seed == "all" else chosen.rows[chosen.rows["seed"] == int(chosen.seed)]
    rows = one_sample(rows if chosen.step is None else _at(rows, chosen.step, form))
    return {name: rows[rows["architecture"] == name] for name in dict.fromkeys(e.series for e in source.chosen(link))}


def _more_seeds(
    source: Source, chosen: Options, subjects: Sequence[Subject], form: str | None
) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """The records of the same two, at the same steps, under every other seed that both have; none where A and B differ in seed."""
    a, b = subjects
    if a.entry.seed != b.entry.seed:
        return []
    kin = [
        {e.seed: e for e in source.catalogue().entries if (e.group, e.series) == (s.entry.group, s.entry.series)}
        for s in subjects
    ]
    found = []
    for seed in sorted((kin[0].keys() & kin[1].keys()) - {a.entry.seed}):
        entries = [entries[seed] for entries in kin]
        rows = varied(placed(source.records(entries, [chosen.metric]), chosen.site), chosen.variant)
        try:
            pair = [_of(rows, replace(s, entry=e), form) for s, e in zip(subjects, entries, strict=True)]
        except WorkbenchError:  # not measured at this step
            continue
        if all(map(len, pair)):
            found.append((pair[0], pair[1]))
    return found


def _of(rows: pd.DataFrame, subject: Subject, form: str | None) -> pd.DataFrame:
    """Rows of a subject, under its name; none where its run has none."""
    mine = rows[rows["run"] == subject.entry.name].assign(architecture=subject.series)
    return one_sample(_at(mine, subject.step, form)) if len(mine) else mine


def _title(chosen: Options, step: int | None) -> str:
    """The measure, where it was taken, its variant, and the step: a figure is read without its page."""
    title = chosen.metric.replace("_", " ").capitalize() + (f" of {plots.site(chosen.site)}" if chosen.site else "")
    title += "" if chosen.variant == PLAIN else f", {plots.site(chosen.variant)}"
    return title if step is None else f"{title}, step {step}"


def _relative(rows: pd.DataFrame) -> pd.DataFrame:
    """Layers as a share of their run's depth, so that models of different depths lie over each other."""
    deepest = rows.groupby("run")["layer"].transform("max").clip(lower=1)
    return rows.assign(layer=rows["layer"].astype("float64") / deepest.astype("float64"))


def _at(rows: pd.DataFrame, step: int, form: str | None) -> pd.DataFrame:
    """Rows of a step; in lines over layers those of step 0 beside them."""
    if form == "steps" or rows["step"].isna().all():
        return rows
    here = rows[rows["step"] == step]
    if here.empty:
        raise WorkbenchError(
            f"not measured at step {step}; steps with records: {sorted(int(s) for s in rows['step'].dropna().unique())}"
        )
    maps = form in MAPS or (form is None and plots.form_of(here) in MAPS)
    return here if maps else rows[rows["step"].isin([0, step])]


# ---- the documents behind a number -----------------------------------------------------------------------------------


def cell(source: Source, link: Link) -> documents.Cell:
    """The number of model A that the link's `layer` and `head` mean, with the value of each document behind it."""
    chosen = options(source, link)
    asked = link.text("a")
    runs = source.chosen(link) if asked is None else [source.catalogue().entry(asked)]
    mine = [e for e in runs if chosen.rows["run"].eq(e.name).any()]
    if not mine:
        raise WorkbenchError(f"nothing of {chosen.metric.replace('_', ' ')} is stored for {asked or 'these runs'}")
    return documents.cell(source, link, chosen, mine[0], chosen.step)


@view("depth")
def behind(source: Source, link: Link) -> Drawing:
    """The documents that pull a number of model A most, as far as each is from the mean, with how it begins."""
    if not link.on("behind"):
        raise WorkbenchError("drawn with behind=1")
    found, chosen = cell(source, link), options(source, link)
    table, values = documents.pulling(source, found), found.values
    at = "".join(f", {kind} {n}" for kind, n in (("layer", found.layer), ("head", found.head)) if n is not None)
    measure = _title(chosen, None)
    under = (
        f"{label(found.entry.series)}, seed {found.entry.seed}, step {found.step}; the {len(table)} of {len(values)} documents that are "
        "furthest from the mean, dotted"
    )
    mine = chosen.rows[chosen.rows["run"] == found.entry.name]
    figure = drawn.documents(
        table, values.mean(), plots.colour(found.entry.series), f"{measure}{at}: documents behind it", under,
        (found.unit, plots.reading(mine)),
    )  # fmt: skip
    without = values.drop(table["document"]).mean() if len(values) > len(table) else float("nan")
    sentence = f"Mean {values.mean():.4g}; without these {len(table)} documents {without:.4g}."
    if table["prompt"].isna().all():
        sentence += " Their texts are not here: they were measured on another sample than the run's own."
    return Drawing(figure, table, sentence)
