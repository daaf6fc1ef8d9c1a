"""Any measure over layers, for the runs of an experiment or for models A and B, and the documents behind a number."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from workbench import plots, prompts
from workbench.claims.verdict import interval_table, with_adjusted
from workbench.claims.verdict_wording import listed
from workbench.errors import WorkbenchError
from workbench.models.architecture_names_and_colours import architecture_label
from workbench.plots.head_rankings import documents
from workbench.plots.style import PANEL, at_least, plain
from workbench.plots.token_map_figures import separation_figure
from workbench.runs.catalogue import Entry
from workbench.runs.records import SAMPLE_COLUMNS, facts, one_sample, read_parquet
from workbench.runs.run import Run
from workbench.statistics.intervals import MIN_SEEDS, confidence, paired_seeds
from workbench.statistics.multiple_testing import holm_factors
from workbench.views import depth_weights  # noqa: F401  (a view of this page)
from workbench.views.measure_selection import PLAIN, Measure, of_site, of_variant, select, unmeasured
from workbench.views.page_links import Link
from workbench.views.path_of_token import number as digits
from workbench.views.registered_views import ONE_SEED, Drawing, view
from workbench.views.source import LETTERS, RunAtStep, Source
from workbench.views.training import VANILLA

FORMS = {
    "auto": "automatic", "profile": "lines over layers", "positions": "map: layer by position", "heads": "map: layer by head",
    "ranks": "curves over ranks", "pairs": "map: layer by layer", "steps": "lines over training",
}  # fmt: skip
AXES = {
    "profile": "layer", "positions": "position", "heads": "head", "ranks": "index", "pairs": "source", "steps": "step",
}  # fmt: skip
MAPS = ("positions", "heads", "pairs")
NO_MEAN = ("source", "index", "part")
"""Axes whose mean has no meaning: the other layer, ranks, and matrices or terms of a sum."""
RELATIVE = "relative depth: 0 the first layer, 1 the last"
METRIC = "token_identity_share"
FIRST = ("importance_entropy", METRIC, "sink_mass", "loss")
"""Measures that are shown by default, the first that is stored."""
DOCUMENTS = 64  # that a page measures on
ORDERS = {
    "furthest": "furthest from the mean",
    "highest": "with the highest values",
    "lowest": "with the lowest values",
}
ORDERS_OF_TWO = {"furthest": "largest difference", "lowest": "lowest A − B", "highest": "highest A − B"}
"""The same for the difference of two models, where the furthest is the largest of either sign."""
MOST, OPENING = 10, 48  # documents that are shown; tokens of an excerpt, roughly


@dataclass(frozen=True)
class DepthOptions(Measure):
    """The selected measure, and how and where it is drawn."""

    forms: list[str]
    form: str
    seeds: list[str]
    seed: str
    steps: list[int]
    step: int | None
    at_step: str
    """`, step 300`; nothing without a step, and for imported models whose step is unknown."""
    spread: str

    @property
    def is_paired(self) -> bool:
        """True if the models can be subtracted by layer: layers vary, no other axis needs a mean, and several runs are selected."""
        one = (self.rows[list(NO_MEAN)].nunique() < 2).all()
        return "profile" in self.forms and bool(one) and self.rows["run"].nunique() > 1

    @property
    def has_course(self) -> bool:
        """True if the mean over layers makes sense over training; ranks and pairs of layers have no mean."""
        return "steps" in self.forms and self.form != "steps" and not {"ranks", "pairs"} & set(self.forms)

    @property
    def has_panels(self) -> bool:
        """True if it is drawn as several panels of lines: one for each part, or over training for each layer or head."""
        axes = ["part", *(("layer", "head") if self.form == "steps" else ())]
        return bool((self.rows[axes].nunique() > 1).any())

    @property
    def is_map(self) -> bool:
        """True if it is drawn as maps, one panel each."""
        return self.form in MAPS or (self.form == "auto" and not {*MAPS}.isdisjoint(self.forms))


def depth_options(source: Source, link: Link) -> DepthOptions:
    """Return the options of a link, absent ones at their defaults; raises `WorkbenchError` for unknown ones."""
    runs = [s.entry for s in source.subjects(link)] if link.on("compare") else source.chosen(link)
    metrics = sorted({m for e in runs for m in e.measured})
    if not metrics:
        raise WorkbenchError(unmeasured(runs, "records", METRIC))
    metric = link.choice("metric", metrics, next((m for m in FIRST if m in metrics), None), "measure")
    rows = source.records(runs, [metric])
    if rows.empty:
        raise WorkbenchError(f"the records of {metric.replace('_', ' ')} cannot be read")
    measure = select(link, metrics, metric, rows, rows)
    rows = measure.rows
    forms = ["auto", *(form for form, axis in AXES.items() if rows[axis].nunique() > 1)]
    # heads of several runs are averaged over their layer: their numbers are unrelated
    averaged = rows["run"].nunique() > 1 and "profile" in forms and not {"positions", "ranks", "pairs"} & set(forms)
    form = link.choice("view", forms, "profile" if averaged else None)
    seeds = ["all", *(str(s) for s in sorted(rows["seed"].dropna().unique()))]
    seed = link.choice("seed", seeds)
    steps = sorted(int(s) for s in rows["step"].dropna().unique())
    step = None
    if steps:
        asked = link.whole("step")
        step = asked if asked in steps else max((s for s in steps if asked is None or s <= asked), default=steps[0])
    at_step = "" if step is None else next(filter(None, (e.at_step(step) for e in runs)), "")
    return DepthOptions(**vars(measure), forms=forms, form=form, seeds=seeds, seed=seed, steps=steps, step=step, at_step=at_step,
                        spread=link.choice("spread", plots.SPREADS, kind="error bars"))  # fmt: skip


def measures_by_layer() -> list[str]:
    """Names of all measures and experiments."""
    from workbench.interventions import INTERVENTIONS
    from workbench.metrics import METRICS

    return sorted({*METRICS, *INTERVENTIONS})


def about(metric: str) -> str:
    """The docstring of a measure or an intervention."""
    import inspect

    from workbench.interventions import INTERVENTIONS
    from workbench.metrics import METRICS

    item = METRICS.get(metric) or INTERVENTIONS.get(metric)
    return inspect.getdoc(item.function) or "" if item else ""


@view("depth")
def layers(source: Source, link: Link) -> Drawing:
    """The measure over layers (or heads, positions, steps), with its value at random init and under its baseline."""
    selected, compare = depth_options(source, link), link.on("compare")
    form = None if selected.form == "auto" else selected.form
    parts, sentences = _parts(source, link, selected, form), list[str]()
    subjects = source.subjects(link) if compare else []
    more_seeds = _more_seeds(source, selected, link, form) if compare else []
    if not more_seeds and len({s.entry.architecture for s in subjects}) > 1:
        sentences.append(f"{ONE_SEED}.")
    if absent := [architecture_label(name) for name, part in parts.items() if part.empty]:
        sentences.append(f"No records of {', '.join(absent)}.")
    stored = [part for part in parts.values() if len(part)] or list(parts.values())[:1]
    relative = link.on("depth") and (form or plots.form_of(pd.concat(stored))) == "profile"
    if relative:
        stored = [_relative(part) for part in stored]
        more_seeds = [(_relative(a), _relative(b)) for a, b in more_seeds]
    elif link.on("depth"):
        sentences.append("Relative depth applies to lines over layers only.")
    everything = pd.concat(stored, ignore_index=True)
    if form == "steps" and everything["head"].nunique() > 1 and everything["run"].nunique() > 1:
        sentences.append("Heads of different runs with equal numbers are unrelated.")
    title = _title(selected) + (" over training" if form == "steps" else "" if compare else selected.at_step)
    look: dict[str, Any] = {"form": form, "title": title, "spread": selected.spread}
    once = more_seeds and (form or plots.form_of(everything)) == "profile" and has_pairs(source, link, selected)
    minus = compare and not once  # the paired difference is a figure of its own, with adjusted intervals
    figure = plots.compared(stored, more_seeds, **look) if minus else plots.plot(everything, **look)
    if relative:  # in all panels, also where only the ends, 0 and 1, are left
        figure.for_each_xaxis(lambda a: a.update(title_text=RELATIVE if a.title.text else "", dtick=None))
    return Drawing(figure, everything, " ".join(sentences))


@view("depth")
def course(source: Source, link: Link) -> Drawing:
    """The measure over training: the link's layer, else the mean over layers."""
    selected, layer = depth_options(source, link), link.whole("layer")
    if not selected.has_course:
        raise WorkbenchError("this measure has no course over training: one step only, or an axis without a mean")
    rows = pd.concat(_parts(source, link, selected, "steps").values(), ignore_index=True)
    of_layer = rows[rows["layer"] == layer] if layer is not None else rows[:0]
    means_of = "mean over layers, " if rows["layer"].nunique() > 1 else ""
    rows, of = (of_layer, f"layer {layer}, ") if len(of_layer) else (rows, means_of)
    within = ["layer", "head", "position", "value", "se"]
    means = rows.groupby([c for c in rows if c not in within], dropna=False, observed=True, as_index=False)["value"]
    rows = means.mean().assign(**dict.fromkeys(("layer", "head", "position", "se")))[list(rows)]
    title = f"{_title(selected)}{f': {of}' if of else ' '}over training"
    return Drawing(plots.plot(rows, form="steps", title=title, spread=selected.spread), rows)


@view("depth")
def differences(source: Source, link: Link) -> Drawing:
    """Draw the paired difference by layer over seeds with its interval. Each model is compared with the Transformer, or A with B."""
    selected = depth_options(source, link)
    if not selected.is_paired:
        raise WorkbenchError(
            "a difference by layer needs two models and one number per layer, or a mean over heads or positions"
        )
    models: dict[str, tuple[list[Entry], int | None]] = {}
    if link.on("compare"):
        a, b = source.subjects(link)
        base = "B"
        for key, subject in ((a.entry.series, a), (base, b)):
            alike = (subject.entry.group, subject.entry.series)
            models[key] = [e for e in source.catalogue().entries if (e.group, e.series) == alike], subject.step
        if models[a.entry.series][0] == models[base][0] and a.step == b.step:
            raise WorkbenchError("A and B are two seeds of one model at one step: their difference is chance")
        at = ["" if a.step == b.step else s.entry.at_step(s.step) for s in (a, b)]
        words = f", {plots.label(a.entry.series)}{at[0]} minus {plots.label(b.entry.series)}{at[1]}"
        words += a.entry.at_step(a.step) if a.step == b.step else ""
    else:
        base, words = VANILLA, f": difference from the Transformer{selected.at_step}"
        for entry in source.chosen(link):
            models.setdefault(entry.series, ([], selected.step))[0].append(entry)
        if base not in models:
            raise WorkbenchError("no Transformer among these models to subtract; select one, or compare two models")
    measured = {name: _by_layer(source, selected, *of) for name, of in models.items()}
    values = {name: of for name, (of, _) in measured.items()}
    if len(texts := set[str]().union(*(texts for _, texts in measured.values()))) > 1:
        raise WorkbenchError(f"a difference needs one text and length; runs are measured on {listed(sorted(texts))}")
    rows = []
    for name in plots.ordered(n for n in values if n != base):
        for layer in values[name].columns.intersection(values[base].columns):
            interval = paired_seeds(values[name][layer].dropna(), values[base][layer].dropna())
            rows += [(name, int(layer), interval)] if interval.n else []
    if not rows:
        raise WorkbenchError(f"no seed and layer has {selected.metric.replace('_', ' ')} in both models at this step")
    tested = [i for i, (*_, interval) in enumerate(rows) if interval.n >= MIN_SEEDS]
    factors = dict(zip(tested, holm_factors([rows[i][2].p for i in tested]), strict=True))
    wide = [interval.widened(factors.get(i, 1.0)) for i, (*_, interval) in enumerate(rows)]
    table = interval_table({f"{name}, layer {layer}": i for name, layer, i in rows})
    table = with_adjusted(table, wide).drop(columns="unit").assign(
        architecture=[name for name, *_ in rows], layer=[layer for _, layer, _ in rows], metric=selected.metric,
        significant=[bool(i in factors and interval.sign) for i, interval in enumerate(wide)],
    )  # fmt: skip
    few, most = int(table["n"].min()), int(table["n"].max())
    if most < 2 and link.on("compare"):
        raise WorkbenchError("one pair of runs, which A − B shows already")
    seeds = f"{few}{f' to {most}' if most > few else ''} paired seed{'s' * (most > 1)}"
    shown = table if most >= MIN_SEEDS else table.assign(low_adjusted=float("nan"), high_adjusted=float("nan"))
    whisker = f"whisker: {confidence()} interval, Holm-adjusted over {len(tested)} comparisons; hollow: includes 0"
    whisker = whisker if tested else f"hollow: not tested, which takes {MIN_SEEDS} seeds"
    axes = [f"{axis}s" for axis in ("head", "position") if selected.rows[axis].nunique() > 1]
    control = selected.rows["control"].isna()
    unit = str(selected.rows["unit"].dropna().iloc[0]) if selected.rows["unit"].notna().any() else ""
    over = [*([seeds] if most > 1 else []), *axes]
    under = "; ".join(filter(None, ("" if most > 1 else seeds, f"mean over {listed(over)}" if over else "", whisker)))
    axis = f"{unit}, difference", plots.reading_direction(selected.rows[control])
    figure = plots.layer_differences(shown, f"{_title(selected)}{words}", under, axis)
    if compare := link.on("compare"):
        figure.for_each_trace(lambda trace: trace.update(name=plots.MINUS))
    sentences = []
    for model, part in table.groupby("architecture", sort=False):
        layers_of = part.loc[part["significant"], "layer"].astype(str).tolist()
        where = f"differs in layer{'s' * (len(layers_of) > 1)} {listed(layers_of)}" if layers_of else "no layer differs"
        sentences.append(f"{plots.MINUS if compare else plain(plots.label(str(model)))}: {where}")
    few_seeds = f"{seeds.capitalize()}: a verdict needs {MIN_SEEDS}."
    sentence = f"{'. '.join(sentences)} ({seeds}, Holm-adjusted)." if tested else few_seeds
    return Drawing(figure, table, sentence)


def has_pairs(source: Source, link: Link, selected: DepthOptions) -> bool:
    """Return True if `differences` shows more than A - B of one pair of runs: models that share two seeds, or a Transformer."""
    if not selected.is_paired:
        return False
    if not link.on("compare"):
        rows = selected.rows if selected.step is None else selected.rows[selected.rows["step"] == selected.step]
        stored = set(rows.loc[rows["control"].isna(), "architecture"])
        series = {e.series for e in source.chosen(link)} & stored
        return VANILLA in series and len(series) > 1
    a, b = source.subjects(link)
    of = [(s.entry.group, s.entry.series) for s in (a, b)]
    seeds = [{e.seed for e in source.catalogue().entries if (e.group, e.series) == key} for key in of]
    return (of[0] != of[1] or a.step != b.step) and len(seeds[0] & seeds[1]) > 1


def _by_layer(
    source: Source, selected: DepthOptions, entries: Sequence[Entry], step: int | None
) -> tuple[pd.DataFrame, set[str]]:
    """The measure [seed, layer] at a step, the mean over heads, positions and runs of a seed, and the texts it was measured on."""
    rows = of_variant(of_site(source.records(entries, [selected.metric]), selected.site), selected.variant)
    rows = rows[rows["control"].isna() & rows["layer"].notna()]
    rows = one_sample(rows if step is None else rows[rows["step"] == step])
    texts = {f"{data}, T = {T}" for data, T in rows[["data", "T"]].dropna().drop_duplicates().itertuples(index=False)}
    return rows.pivot_table(index="seed", columns="layer", values="value", aggfunc="mean").astype(float), texts


def _parts(source: Source, link: Link, selected: DepthOptions, form: str | None) -> dict[str, pd.DataFrame]:
    """The rows of A and B, or the rows per selected model over its seeds, by name."""
    if link.on("compare"):
        return {s.title: _of(selected.rows, s, form) for s in source.subjects(link)}
    rows = selected.rows if selected.seed == "all" else selected.rows[selected.rows["seed"] == int(selected.seed)]
    rows = one_sample(rows if selected.step is None else _at(rows, selected.step, form))
    return {name: rows[rows["architecture"] == name] for name in dict.fromkeys(e.series for e in source.chosen(link))}


def _more_seeds(
    source: Source, selected: DepthOptions, link: Link, form: str | None
) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """Records of A's and B's models under every further common seed that was measured at these steps."""
    pairs = []
    for subjects in source.pairs(link)[1:]:
        rows = source.records([s.entry for s in subjects], [selected.metric])
        rows = of_variant(of_site(rows, selected.site), selected.variant)
        try:
            one, other = (_of(rows, s, form) for s in subjects)
        except WorkbenchError:  # not measured at this step
            continue
        pairs += [(one, other)] if len(one) and len(other) else []
    return pairs


def _of(rows: pd.DataFrame, subject: RunAtStep, form: str | None) -> pd.DataFrame:
    every = subject.entry.at_step(subject.step) if form == "steps" else ""  # all steps are drawn
    series = subject.series.removesuffix(every)
    own = rows[rows["run"] == subject.entry.name].assign(architecture=series)
    own = one_sample(_at(own, subject.step, form)) if len(own) else own
    is_known = form == "steps" or subject.entry.at_step(subject.step)
    return own if is_known else own.assign(step=pd.array([None] * len(own), dtype="Int64"))  # 0 would be random init


def _title(selected: DepthOptions) -> str:
    """Measure, site and variant, so that a figure can be read without its page."""
    title = selected.metric.replace("_", " ").capitalize() + (
        f" of {plots.site(selected.site)}" if selected.site else ""
    )
    title += plots.positions_of(selected.rows)
    return title + ("" if selected.variant == PLAIN else f", {plots.site(selected.variant)}")


def _relative(rows: pd.DataFrame) -> pd.DataFrame:
    deepest = rows.groupby("run")["layer"].transform("max").clip(lower=1)
    return rows.assign(layer=rows["layer"].astype("float64") / deepest.astype("float64"))


def _at(rows: pd.DataFrame, step: int, form: str | None) -> pd.DataFrame:
    """Rows of a step; for lines over layers also the rows of step 0."""
    if form == "steps" or rows["step"].isna().all():
        return rows
    here = rows[rows["step"] == step]
    if here.empty:
        raise WorkbenchError(
            f"not measured at step {step}; steps with records: {sorted(int(s) for s in rows['step'].dropna().unique())}"
        )
    maps = form in MAPS or (form is None and plots.form_of(here) in MAPS)
    return here if maps else rows[rows["step"].isin([0, step])]


# ---- documents behind a number ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Behind:
    """The values of single documents behind a number: of a layer and a head, of a layer's mean, or of the model (both None)."""

    entry: Entry
    step: int
    layers: list[int]
    """Layers with values of single documents."""
    heads: list[int]
    layer: int | None
    head: int | None
    values: pd.Series
    """One value per document, by its number in the data."""
    T: int
    """Tokens per document."""
    provenance: str
    unit: str


def number_behind(source: Source, link: Link) -> Behind:
    """Return the values of single documents behind model A's number at the link's `layer` and `head`.

    Without them the last layer, and all heads. Raises `WorkbenchError` if no values of single documents are stored.
    """
    selected, asked = depth_options(source, link), link.text("a")
    runs = source.chosen(link) if asked is None else [source.catalogue().entry(asked)]
    entry = next((e for e in runs if selected.rows["run"].eq(e.name).any()), None)
    name = selected.metric.replace("_", " ")
    if entry is None:
        raise WorkbenchError(f"no records of {name} for {asked or 'these runs'}")
    shown = selected.rows[(selected.rows["run"] == entry.name) & selected.rows["control"].isna()]
    shown = one_sample(shown if selected.step is None else shown[shown["step"] == selected.step])
    rows = _samples(source, entry)
    rows = of_variant(of_site(rows[rows["metric"] == selected.metric], selected.site), selected.variant)
    rows = rows[rows["provenance"].isin(set(shown["provenance"].astype("str")))]
    if rows.empty or rows["document"].isna().all():
        stored = [metric.replace("_", " ") for metric in measures_by_document(source, link)]
        others = f". Measures with values of single documents: {listed(stored)}" if stored else ""
        again = f". To store them: workbench measure {shlex.quote(entry.path)} -m {selected.metric}"
        raise WorkbenchError(
            f"no values of single documents of {name} in {entry.name}{others}{'' if entry.shipped else again}"
        )
    layers, layer = _index(rows, "layer", link.whole("layer"))
    layer = layers[-1] if layer is None and layers else layer
    rows = rows if layer is None else rows[rows["layer"] == layer]
    heads, head = _index(rows, "head", link.whole("head"))
    rows = rows if head is None else rows[rows["head"] == head]
    unit = str(shown["unit"].dropna().iloc[0]) if shown["unit"].notna().any() else ""
    return Behind(
        entry, int(rows["step"].iloc[0]), layers, heads, layer, head, rows.groupby("document")["value"].mean(),
        int(shown["T"].dropna().iloc[0]), str(rows["provenance"].iloc[0]), unit,
    )  # fmt: skip


def _samples(source: Source, entry: Entry) -> pd.DataFrame:
    """The values of single documents of a run: all measures and steps."""
    rows: pd.DataFrame = source.keep(
        ("documents", entry.path, entry.stamp),
        lambda: read_parquet(sorted(Path(entry.path).glob("records/*.samples.parquet")), SAMPLE_COLUMNS),
    )
    return rows


def measures_by_document(source: Source, link: Link) -> list[str]:
    """Return the measures with values of single documents: of model A, or of A and B at their steps if the link compares."""
    if link.on("compare"):
        each = [(_samples(source, s.entry), s.step) for s in source.subjects(link)]
        return sorted(set.intersection(*(set(rows.loc[rows["step"] == step, "metric"]) for rows, step in each)))
    asked = link.text("a")
    runs = source.chosen(link) if asked is None else [source.catalogue().entry(asked)]
    return sorted(set(_samples(source, runs[0])["metric"]))


def _index(rows: pd.DataFrame, axis: str, asked: int | None) -> tuple[list[int], int | None]:
    values = sorted(int(n) for n in rows[axis].dropna().unique())
    if asked is not None and values and asked not in values:
        raise WorkbenchError(f"{axis} {asked} has no values of single documents; choose from {values}")
    return values, asked if values else None


@view("depth")
def behind(source: Source, link: Link) -> Drawing:
    """The documents with the largest effect on a number of model A, with their distance from the mean and first words."""
    if not link.on("behind"):
        raise WorkbenchError("drawn with behind=1")
    number, selected = number_behind(source, link), depth_options(source, link)
    values, order, minus = number.values, link.choice("order", ORDERS), link.on("minus") and link.on("compare")
    if minus:
        b = source.subjects(link)[1]
        other = number_behind(source, link.but(a=b.entry.name, step=b.step, layer=number.layer, head=number.head))
        if facts(other.provenance).get("data") != facts(number.provenance).get("data"):
            raise WorkbenchError("A and B were measured on different documents, so they have no difference by document")
        values = (values - other.values).dropna()
    effect = (values - values.mean()) / len(values)
    # a difference is large or small by itself
    by = (values if minus else effect).abs() if order == "furthest" else values
    top = by.sort_values(ascending=order == "lowest", kind="stable").head(MOST).index
    texts = source.keep(
        ("texts of documents", number.entry.path, number.entry.stamp, number.provenance), lambda: _texts(source, number)
    )
    table = pd.DataFrame(
        [(int(n), float(values[n]), float(effect[n]), texts.get(int(n))) for n in top],
        columns=["document", "value", "effect_on_mean", "prompt"],
    ).assign(run=number.entry.name, step=number.step, layer=number.layer, head=number.head, unit=number.unit)
    at = "".join(f", {kind} {n}" for kind, n in (("layer", number.layer), ("head", number.head)) if n is not None)
    of = f"{architecture_label(number.entry.series)}, seed {number.entry.seed}{number.entry.at_step(number.step)}"
    of = f"{plots.MINUS}: {' minus '.join(s.name for s in source.subjects(link))}" if minus else of
    ordered = f", {ORDERS_OF_TWO[order]} first" if minus else f" {ORDERS[order]}"
    under = f"{of}; {len(table)} of {len(values)} documents{ordered}; tick: {'0' if minus else 'mean of all'}"
    own = selected.rows[selected.rows["run"] == number.entry.name]
    what = "difference by document" if minus else "documents"
    figure = documents(
        table, 0.0 if minus else values.mean(), plots.colour(plots.MINUS if minus else number.entry.series),
        f"{_title(selected)}{at}: {what}", under,
        (f"{number.unit}, difference", "") if minus else (number.unit, plots.reading_direction(own)),
    )  # fmt: skip
    without = values.drop(table["document"]).mean() if len(values) > len(table) else float("nan")
    sentence = f"Mean {digits(values.mean())}; without these {len(table)} documents {digits(without)}."
    if table["prompt"].isna().all():
        sentence += " No texts: the documents are not those of the run's own data."
    if minus and len({s.entry.architecture for s in source.subjects(link)}) > 1:
        sentence += f" Only these two runs are read here. {ONE_SEED}."
    return Drawing(figure, table, sentence)


def _texts(source: Source, number: Behind) -> dict[int, str]:
    """The beginnings of the documents as prompts; empty if the hash differs from the run's own text."""
    entry, run = number.entry, Run.open(number.entry.path)
    if entry.imported:
        return {}
    try:
        sample = run.data.sample(len(number.values), number.T)
    except WorkbenchError:  # the text is not on this machine
        return {}
    if sample.hash != facts(number.provenance).get("data"):
        return {}
    rows = dict(zip(map(int, sample.documents), sample.ids.tolist(), strict=True))
    if not entry.steps:  # shipped without weights
        tokenizer = run.tokenizer
        return {} if tokenizer is None else {n: str(tokenizer.decode(ids[:OPENING])) for n, ids in rows.items()}
    step, letters = number.step if number.step in entry.steps else entry.steps[-1], LETTERS.get(entry.kind, 0)
    model = source.model(RunAtStep(entry, step))
    return {
        n: prompts.excerpt(model, ids, min(OPENING, len(ids) - 1), 0, letters=letters).text for n, ids in rows.items()
    }


# ---- routers of mixtures of experts ----------------------------------------------------------------------------------

ROUTING = ("expert_load", "router_entropy", "first_token_experts")
LINES = (
    ("router entropy (share of ln E)", "router_entropy", None, None),
    ("experts shared with the first token", "first_token_experts", None, "later_tokens"),
    ("experts shared with found sinks", "first_token_experts", "found", "later_tokens_found"),
)  # fmt: skip
"""Panels: title, metric, variant, and the variant that is its baseline (None: 1, all experts equally likely)."""


def _routing_rows(source: Source, link: Link, subject: RunAtStep, metric: str) -> pd.DataFrame:
    """Return a subject's records of a router measure at its step, without controls; empty if it has none."""
    if link.text("metric") not in ROUTING:
        raise WorkbenchError(f"no measure of a router is selected; choose from {', '.join(ROUTING)}")
    rows = source.records([subject.entry], [metric])
    rows = rows[rows["layer"].notna() & rows["control"].isna() & (rows["step"].fillna(subject.step) == subject.step)]
    return one_sample(rows)


@view("depth")
def experts(source: Source, link: Link) -> Drawing:
    """Load of every expert by layer, relative to an even one, for model A, or A and B."""
    parts, tables, sentences = list[tuple[str, plots.Grid]](), list[pd.DataFrame](), list[str]()
    for subject in source.subjects(link):
        rows = _routing_rows(source, link, subject, "expert_load")
        rows = rows[rows["variant"].isna()]
        if rows.empty:
            sentences.append(f"{subject.title} has no load of experts.")
            continue
        cells = rows.pivot_table("value", "layer", "index")  # NaN where a layer has fewer experts
        largest = float(cells.max().max())
        parts.append((subject.title, plots.Grid(
            cells.to_numpy(), [str(n) for n in cells.index], [str(e) for e in cells.columns], "times the even load", "layer", "expert",
            span=(0.0, max(2.0, largest)),
        )))  # fmt: skip
        tables.append(rows.assign(model=subject.title))
        place: Any = cells.stack().idxmax()
        layer, expert = place
        sentences.append(
            f"{subject.title}: the largest load is {largest:.3g} (expert {int(expert)} of layer {int(layer)}), "
            f"{int((cells == 0).to_numpy().sum())} of {cells.count().sum()} experts take no token."
        )
    if not parts:
        raise WorkbenchError(" ".join(sentences))
    first = tables[0].iloc[0]
    under = "share of tokens that take the expert, over that of an even load (1: even)"
    figure = plots.grids(
        parts, "Load of the experts", f"{under}; {first['data']}; n = {first['n']} documents of {first['T']} tokens"
    )
    return Drawing(at_least(figure, PANEL * len(parts)), pd.concat(tables, ignore_index=True), " ".join(sentences))


@view("depth")
def routers(source: Source, link: Link) -> Drawing:
    """Entropy of the routers, and the experts that sinks share with other tokens, by layer and beside their baselines."""
    tables, sentences = list[pd.DataFrame](), list[str]()
    for subject in source.subjects(link):
        each = {metric: _routing_rows(source, link, subject, metric) for metric in ROUTING[1:]}
        for measure, metric, variant, baseline in LINES:
            values, chance = (
                of_variant(each[metric], name or PLAIN).groupby("layer")["value"].mean() for name in (variant, baseline)
            )
            table = pd.DataFrame({"value": values, "chance": chance if baseline else 1.0}).dropna().astype(float)
            tables.append(table.rename_axis("layer").reset_index().astype({"layer": int}).assign(
                measure=measure, architecture=subject.series, run=subject.entry.name, step=subject.step,
            ))  # fmt: skip
            if variant and table.empty and len(each[metric]):
                sentences.append(
                    f"{subject.title}: to compare sinks on any token, workbench measure {subject.entry.path} -m {metric} --positions found."
                )
    table = pd.concat(tables, ignore_index=True)
    if table.empty:
        raise WorkbenchError(f"no entropy and no shared experts are stored; measure {' and '.join(ROUTING[1:])}")
    under = "share: of a sink's experts, taken by another token too; dotted: all experts equally likely, or two other tokens"
    return Drawing(separation_figure(table, "Routers by layer", under), table, " ".join(sentences))
