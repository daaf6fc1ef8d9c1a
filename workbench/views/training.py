"""Logged quantities of training: losses, gradients, coefficients, throughput, and recorded quantities."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from workbench import plots
from workbench.claims.published_numbers import (
    differences_by_budget,
    published,
    published_differences,
    with_published,
)
from workbench.errors import WorkbenchError
from workbench.models.architecture_names_and_colours import architecture_label
from workbench.plots import training_and_gradient_figures as drawn
from workbench.plots.style import GREY, ordered
from workbench.runs.catalogue import Entry
from workbench.runs.run import Run
from workbench.statistics.intervals import MIN_SEEDS, confidence, over_seeds
from workbench.views.page_links import Link
from workbench.views.registered_views import ONE_SEED, Drawing, view
from workbench.views.source import RunAtStep, Source

SHOWN = {
    "loss": ("validation_loss", "train_loss", "copy_loss"), "gradients": ("gradient_norm",), "coefficients": ("coefficient",),
    "inside": (), "pace": ("learning_rate", "tokens_per_second", "seconds_per_step", "recorder_share"),
}  # fmt: skip
"""Quantities of each part of the page; `inside` has all others."""
ELSEWHERE = {name for names in SHOWN.values() for name in names}
SMOOTH, VANILLA, TOTAL, EACH = 15, "transformer", "total", "each"
MAX_LAYERS = 12
CLIPPED = "Norms after clipping, as this Trainer clips before they are recorded."


def runs(source: Source, link: Link) -> list[Entry]:
    """The runs whose training is drawn: A and B if they are compared, else the selected ones."""
    if link.on("compare"):
        return list({s.entry.name: s.entry for s in source.subjects(link)}.values())
    return source.chosen(link)


def logged_quantities(source: Source, link: Link) -> set[str]:
    """Names of everything these runs logged."""
    return source.quantities(runs(source, link))


def present(logged: set[str]) -> list[str]:
    """Parts of the page that have something to draw."""
    return [name for name, of in SHOWN.items() if (logged & set(of) if of else logged - ELSEWHERE)]


def inside(logged: set[str]) -> list[str]:
    """Quantities that a recorder measured inside the model."""
    return sorted(logged - ELSEWHERE)


def _rows(source: Source, link: Link, metric: str, *, seeds: bool = False) -> list[pd.DataFrame]:
    """Rows of a quantity: in one part, or of A and of B (`seeds`: of all common seeds); raises `WorkbenchError` if not logged."""
    if link.on("compare"):
        pairs = source.pairs(link)[: None if seeds else 1]
        subjects = {of[0].entry.name: of for of in reversed(list(zip(*pairs, strict=True)))}  # of one run A stays
        parts = []
        for of in reversed(subjects.values()):
            name = of[0].series.removesuffix(of[0].entry.at_step(of[0].step))
            parts.append(source.telemetry([s.entry for s in of], [metric]).assign(architecture=name))
    else:
        parts = [source.telemetry(source.chosen(link), [metric])]
    parts = [p for p in parts if len(p)]
    if not parts:
        raise WorkbenchError(f"these runs did not log {metric.replace('_', ' ')}")
    return parts


def _plain(source: Source, link: Link, metric: str) -> list[pd.DataFrame]:
    """Rows of a quantity without variants and controls, of A and B with their common seeds. A part without any is not copied."""
    parts = _rows(source, link, metric, seeds=True)
    plain = [part["variant"].isna() & part["control"].isna() for part in parts]
    return [part if rows.all() else part[rows] for part, rows in zip(parts, plain, strict=True)]


def _curves(
    source: Source, link: Link, parts: Sequence[pd.DataFrame], title: str, smooth: int = 1, sentence: str = ""
) -> Drawing:
    """Curves of the parts over steps or tokens; of A and B with their difference, over all seeds of the parts."""
    axis, log = link.choice("x", ("step", "tokens"), kind="x axis"), link.on("log")
    if axis == "tokens":
        of_seeds = [s.entry for pair in source.pairs(link) for s in pair] if link.on("compare") else []
        per_step = {e.name: e.tokens for e in of_seeds or runs(source, link)}
        for name, tokens in per_step.items():
            if not tokens and any((part["run"] == name).any() for part in parts):
                raise WorkbenchError(f"the tokens per step of {name} are unknown; draw it over steps")
        parts = [p.assign(step=p["step"] * p["run"].map(per_step).astype("Int64")) for p in parts]
    spread = link.choice("spread", plots.SPREADS, kind="error bars")
    if len(parts) == 2:
        own, minus = source.subjects(link), drawn.curve_difference(*parts)
        texts = [Run.open(s.entry.path).info.get("data") for s in own]
        if texts[0] != texts[1] and str(parts[0]["metric"].iloc[0]).endswith("loss"):
            minus = minus.head(0)
        parts = [*(p[p["run"] == s.entry.name] for p, s in zip(parts, own, strict=True)), minus]
        sentence = _paired(minus, own, axis)
    elif parts[0]["run"].nunique() == 1:
        only, seed = parts[0], plots.DETAIL + "s" + parts[0]["seed"].astype("Int64").astype(str)
        parts = [only.assign(architecture=only["architecture"].astype(str) + seed.where(only["seed"].notna(), ""))]
    figure = drawn.curves(parts, title=title, smooth=smooth, log_x=log, spread=spread)
    table = parts[0] if len(parts) == 1 else pd.concat(parts, ignore_index=True)
    if axis == "tokens":
        drawn.on_tokens(figure, log)
        shared = next(iter(per_step.values())) if len(set(per_step.values())) == 1 else None  # of A - B
        each = table["run"].map({run: per_step.get(run, shared) for run in table["run"].unique()}).astype("Int64")
        table = table.assign(tokens=table["step"], step=table["step"] // each)
    return Drawing(figure, table, sentence)


def _paired(minus: pd.DataFrame, own: Sequence[RunAtStep], axis: str) -> str:
    """How A - B is paired, and its value at the last step, or number of tokens, that all pairs logged."""
    if minus.empty:
        return f"No {plots.MINUS}: nothing of one step, text and length was logged by both."
    n, models = minus["run"].nunique(), {s.entry.architecture for s in own}
    if own[0].entry.seed != own[1].entry.seed:
        return f"{plots.MINUS}: unpaired, as A and B have different seeds."
    if n < 2:
        few = f" {ONE_SEED}." if len(models) > 1 else ""
        band = "; its band is the standard error over documents, as if they were independent"
        band = band if minus["se"].notna().any() else ""
        return f"{plots.MINUS}: one pair of runs{band}.{few}"
    steps = minus.groupby("step")["run"].nunique()
    if not str(minus["metric"].iloc[0]).endswith("loss") or not (steps == n).any():
        return f"{plots.MINUS}: mean over {n} paired seeds."
    last = minus[minus["step"] == steps.index[steps == n][-1]]
    interval = over_seeds(last.groupby("seed")["value"].mean().astype(float))
    numbers = f"{interval.value:.3g} nats, mean over {n} paired seeds"
    if n >= MIN_SEEDS:
        numbers += f"; {confidence()} interval {interval.low:.3g} to {interval.high:.3g}"
    at = last["step"].iloc[0]
    return f"{plots.MINUS} at {f'step {at}' if axis == 'step' else f'{at:,} tokens'}: {numbers}."


# ---- losses ----------------------------------------------------------------------------------------------------------


@view("training", "loss")
def validation_loss(source: Source, link: Link) -> Drawing:
    """Validation loss, the mean over domains or each domain; A, B and A - B if they are compared."""
    parts = _domains(_plain(source, link, "validation_loss"), link)
    return _curves(source, link, parts, "Validation loss")


def domains(source: Source, link: Link) -> list[str]:
    """Names of the domains that have a validation loss."""
    return sorted(source.telemetry(runs(source, link), ["validation_loss"])["data"].dropna().unique())


def _domains(parts: Sequence[pd.DataFrame], link: Link) -> list[pd.DataFrame]:
    asked = link.choice("domain", (TOTAL, EACH))
    return list(parts) if asked == EACH else [mean_of_domains(part) for part in parts]


def mean_of_domains(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per step in place of one per domain: mean value, standard error of a mean of independent means, all documents.

    Steps without a loss of every domain of the run are left out.
    """
    if rows["data"].nunique() < 2:
        return rows
    keys = [c for c in rows.columns if c not in ("data", "value", "se", "n", "provenance")]
    squared = rows.assign(se=rows["se"] ** 2)
    means = squared.groupby(keys, dropna=False, as_index=False, sort=False).agg(
        value=("value", "mean"), se=("se", "sum"), n=("n", "sum"), count=("value", "count"), errors=("se", "count"),
        provenance=("provenance", "first"),
    )  # fmt: skip
    own = {str(run): sorted(of.dropna().unique()) for run, of in rows.groupby("run", observed=True)["data"]}
    names = means["run"].astype("str").map(own)
    se = (means["se"] ** 0.5 / means["count"]).where(means["errors"] == means["count"])
    words = names.map(lambda of: "mean of " * (len(of) > 1) + ", ".join(of))
    means = means.assign(se=se, data=words, n=means["n"].where(means["n"] > 0))[means["count"] >= names.map(len)]
    if means.empty:
        raise WorkbenchError("no step has a loss of every domain; choose the losses of each domain")
    return means[rows.columns]


@view("training")
def relative(source: Source, link: Link) -> Drawing:
    """Validation loss minus the loss of the Transformer with the same seed, else minus model B's."""
    if link.on("compare"):
        raise WorkbenchError("A − B stands beside the losses")
    (rows,) = _domains(_plain(source, link, "validation_loss"), link)
    base, named = VANILLA, "the Transformer's"
    if VANILLA not in set(rows["architecture"]):
        group = source.group(link)
        if (other := link.text("b")) in {e.name for e in group}:
            base = source.catalogue().entry(str(other)).series
            named = f"{architecture_label(base)}'s (model B)"
        elif not any(e.series == VANILLA for e in group):
            raise WorkbenchError("no Transformer here to subtract; select a model B")
        if base not in set(rows["architecture"]):
            more = source.telemetry([e for e in group if e.series == base], ["validation_loss"])
            plain = more[more["variant"].isna() & more["control"].isna()]
            rows = pd.concat([rows, *_domains([plain], link)], ignore_index=True)
    differences = plots.relative_to_baseline(rows, base).assign(unit=f"nats above {named}")
    pairs = "better than the baseline of the same seed, on the same batches"
    if any(e.kind == "log" for e in source.group(link)):
        pairs = "better than the baseline; logs are paired in the order of their names, whatever their seeds and batches were"
    sentence = f"Below 0: {pairs}."
    sentence += f" {ONE_SEED}." if rows["seed"].nunique() == 1 else ""
    drawing = _curves(source, link, [differences], f"Validation loss minus {named}", sentence=sentence)
    drawing.figure.add_hline(y=0, line={"color": GREY, "dash": "dot", "width": 1.6})
    return drawing


@view("training")
def by_budget(source: Source, link: Link) -> Drawing:
    """Validation loss minus the Transformer's over training tokens per parameter, with published curves behind."""
    from workbench.claims.collect_evidence import run_facts  # imports torch

    if link.on("compare"):
        raise WorkbenchError("A − B stands beside the losses")
    (losses,) = _domains(_plain(source, link, "validation_loss"), Link("training"))
    entries = runs(source, link)
    key = ("facts", *((e.path, e.stamp) for e in entries))
    known = source.keep(key, lambda: [run_facts(Run.open(e.path)) for e in entries if e.tokens])
    series = {e.name: e.series for e in entries}
    facts = pd.DataFrame(known, columns=["run", "seed", "tokens", "steps", "parameters"])
    facts = facts.assign(model=facts["run"].map(series))
    curves = {str(run): rows.groupby("step")["value"].mean().astype(float) for run, rows in losses.groupby("run")}
    rows = differences_by_budget(facts, curves, VANILLA)
    shown = {name: published_differences(name) for name in ("resformer", "resformer_learnable")}
    return Drawing(plots.budget_figure(rows, shown), with_published(rows, shown))


@view("training")
def train_loss(source: Source, link: Link) -> Drawing:
    """Loss of the training batches, smoothed over at most a fifth of the steps."""
    parts = _plain(source, link, "train_loss")
    most = max(part["step"].nunique() for part in parts) // 5
    return _curves(source, link, parts, "Training loss", smooth=max(1, min(link.whole("smooth", SMOOTH) or 1, most)))


@view("training")
def copy_loss(source: Source, link: Link) -> Drawing:
    """Loss of the tokens that repeat earlier ones, and the step at which each run copies."""
    parts = _plain(source, link, "copy_loss")
    if link.on("compare") or link.text("x", "step") == "tokens":
        return _curves(source, link, parts, "Copy loss")
    return Drawing(plots.race_figure(parts[0], log_x=link.on("log")), parts[0])


# ---- gradients -------------------------------------------------------------------------------------------------------


def logged(source: Source, link: Link) -> list[int]:
    """Steps with gradient norms, cached, as the rows of many runs take time to read."""
    selected = runs(source, link)
    key = ("steps of gradients", *((e.path, e.stamp) for e in selected))
    return source.keep(key, lambda: drawn.steps_of_matrices(source.telemetry(selected, ["gradient_norm"])))


@view("training")
def gradients(source: Source, link: Link) -> Drawing:
    """Gradient norm by weight matrix by layer at one step: of every model, or of A, B and A - B."""
    parts, compare = _rows(source, link, "gradient_norm"), link.on("compare")
    rows = [drawn.matrices_at(part, link.whole("at", link.whole("step"))) for part in parts]
    models = rows if compare else [rows[0][rows[0]["architecture"] == n] for n in ordered(rows[0]["architecture"])]
    figure = drawn.gradient_layers(_named(models), compare=compare and len(models) == 2)
    return Drawing(figure, pd.concat(rows, ignore_index=True), _clipped(parts))


@view("training")
def gradients_over_time(source: Source, link: Link) -> Drawing:
    """Gradient norm by weight matrix and layer over training."""
    parts = _rows(source, link, "gradient_norm")
    if len(parts) == 1:
        return Drawing(drawn.gradient_map(parts[0]), drawn.means_of_matrices(parts[0]), _clipped(parts))
    rows = [drawn.matrices(part) for part in parts]
    return Drawing(drawn.gradient_maps(_named(rows), compare=True), pd.concat(rows, ignore_index=True), _clipped(parts))


def _named(parts: Sequence[pd.DataFrame]) -> list[tuple[str, pd.DataFrame]]:
    return [(plots.label(part["architecture"].iloc[0]), part) for part in parts]


def _clipped(parts: Sequence[pd.DataFrame]) -> str:
    return CLIPPED if any(drawn.clipped(part) for part in parts) else ""


# ---- coefficients and recorded quantities ----------------------------------------------------------------------------


def learning(source: Source, link: Link) -> list[str]:
    """Series with logged coefficients, in the order of their colours."""
    return ordered(source.telemetry(source.chosen(link), ["coefficient"])["architecture"].dropna())


@view("training", "coefficients")
def learned_coefficients(source: Source, link: Link) -> Drawing:
    """Learned coefficients over training, of one series (`of`), or of A, B and A - B."""
    parts = _rows(source, link, "coefficient")
    if link.on("compare"):
        figures = [(name, plots.coefficients_figure(part)) for name, part in _named(parts)]
        if len(parts) == 1:
            return Drawing(figures[0][1], parts[0])
        minus = drawn.curve_difference(*parts)
        if len(minus):
            figures.append((plots.MINUS, plots.coefficients_figure(minus)))
        return Drawing(plots.beside(figures, "Learned coefficients"), pd.concat([*parts, minus], ignore_index=True))
    asked = link.choice("of", ordered(parts[0]["architecture"]), kind="model with coefficients")
    rows = parts[0][parts[0]["architecture"] == asked]
    return Drawing(plots.coefficients_figure(rows), rows)


@view("training")
def beside_published_coefficients(source: Source, link: Link) -> Drawing:
    """Learned coefficients at the last logged step by layer, of one series (`of`), beside published ones."""
    (rows,) = _rows(source, link.but(compare=None), "coefficient")
    asked = link.choice("of", ordered(rows["architecture"]), kind="model with coefficients")
    rows = rows[rows["architecture"] == asked]
    return Drawing(plots.coefficients_by_layer(rows, published("block_coefficients")), rows)


def places(source: Source, link: Link, quantity: str) -> list[str]:
    """The matrices or activations for which a quantity was recorded."""
    rows = source.telemetry(runs(source, link), [quantity])
    return sorted(rows[_place(rows)].dropna().unique())


def _place(rows: pd.DataFrame) -> str:
    return "part" if rows["part"].notna().any() else "site"


@view("training")
def recorded(source: Source, link: Link) -> Drawing:
    """A quantity that a recorder measured, a panel for each layer; the mean over heads where there are several."""
    names = inside(logged_quantities(source, link))
    if not names:
        raise WorkbenchError(
            "nothing was recorded inside these models; `workbench.Recorder` does so in any training loop"
        )
    quantity = link.choice("quantity", names, "update_ratio")
    parts = _rows(source, link, quantity)
    sites = sorted({p for part in parts for p in part[_place(part)].dropna().unique()})
    site = link.choice("where", sites, kind="place") if sites else link.text("where")
    rows = [part[part[_place(part)] == site] if sites else part for part in parts]
    layers = sorted({n for part in rows for n in part["layer"].dropna().unique()})
    shown = layers[:: -(-len(layers) // (MAX_LAYERS // len(rows)))] if layers else []
    rows = [(p[p["layer"].isin(shown)] if shown else p).assign(head=float("nan")) for p in rows]
    title = quantity.replace("_", " ").capitalize() + (f" in {plots.site(site)}" if site else "")
    return _curves(source, link, rows, title)


# ---- learning rate and throughput ------------------------------------------------------------------------------------


@view("training", "learning_rate")
def learning_rate_schedule(source: Source, link: Link) -> Drawing:
    """Learning rate over training."""
    return _curves(source, link, _plain(source, link, "learning_rate"), "Learning rate")


@view("training")
def pace(source: Source, link: Link) -> Drawing:
    """Tokens per second, the median over each run's steps."""
    rows = pd.concat(_rows(source, link, "tokens_per_second"), ignore_index=True)
    entry = source.catalogue().entry
    device = rows["run"].map({name: Run.open(entry(name).path).device for name in rows["run"].unique()})
    if device.nunique() > 1:  # speeds of several devices have no mean
        rows = rows.assign(architecture=rows["architecture"].astype(str) + plots.DETAIL + device)
    return Drawing(plots.pace_figure(rows), rows, "Depends on what else ran on the machine.")


@view("training")
def seconds(source: Source, link: Link) -> Drawing:
    """Seconds per optimiser step of a recorded loop."""
    return _curves(source, link, _rows(source, link, "seconds_per_step"), "Seconds per step")


@view("training")
def recording_share(source: Source, link: Link) -> Drawing:
    """Share of the loop's time that recording takes, writing included."""
    return _curves(source, link, _rows(source, link, "recorder_share"), "Recording overhead")
