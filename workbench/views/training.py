"""Training as it was written down: losses, gradients, coefficients, pace, and what a recorder took inside the model."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from workbench import plots
from workbench.errors import UnknownName, WorkbenchError
from workbench.models.registry import label
from workbench.plots import training as drawn
from workbench.plots.style import ordered
from workbench.runs.catalogue import Entry
from workbench.views.base import Drawing, view
from workbench.views.link import Link
from workbench.views.source import Source

ELSEWHERE = (
    "train_loss", "validation_loss", "copy_loss", "gradient_norm", "coefficient", "learning_rate", "tokens_per_second",
    "seconds_per_step", "recorder_share",
)  # fmt: skip
SHOWN = {
    "loss": ("validation_loss", "train_loss", "copy_loss"), "gradients": ("gradient_norm",), "coefficients": ("coefficient",),
    "inside": (), "pace": ("learning_rate", "tokens_per_second", "seconds_per_step", "recorder_share"),
}  # fmt: skip
"""Parts of the page, and the quantities that each is about; `inside` has all others."""
SMOOTH, VANILLA, TOTAL, EACH = 15, "transformer", "total", "each"
MAX_LAYERS = 12


def runs(source: Source, link: Link) -> list[Entry]:
    """The runs whose training is drawn: model A and B where they are compared (once where they are one run), else the chosen."""
    if link.on("compare"):
        return list({s.entry.name: s.entry for s in source.subjects(link)}.values())
    return source.chosen(link)


def quantities(source: Source, link: Link) -> set[str]:
    """Names of everything these runs wrote down."""
    return source.quantities(runs(source, link))


def present(found: set[str]) -> list[str]:
    """Parts of the page that there is something to draw for."""
    return [name for name, about in SHOWN.items() if (found & set(about) if about else found - set(ELSEWHERE))]


def inside(found: set[str]) -> list[str]:
    """Quantities that a recorder took in the loop."""
    return sorted(found - set(ELSEWHERE))


def _rows(source: Source, link: Link, metric: str) -> list[pd.DataFrame]:
    """Rows of a quantity: in one part, or of A and of B; raises `WorkbenchError` where it was not written down."""
    if link.on("compare"):
        subjects = {s.entry.name: s for s in reversed(source.subjects(link))}  # of one run at two steps A stays
        parts = [
            source.telemetry([s.entry], [metric]).assign(architecture=s.series.rpartition(", step ")[0])
            for s in reversed(subjects.values())
        ]
    else:
        parts = [source.telemetry(source.chosen(link), [metric])]
    parts = [p for p in parts if len(p)]
    if not parts:
        raise WorkbenchError(f"{metric.replace('_', ' ')} was not written down by these runs")
    return parts


def _plain(parts: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
    """The parts without variants and controls; one that has none is itself, so that figures of one table share it."""
    plain = [part["variant"].isna() & part["control"].isna() for part in parts]
    return [part if mine.all() else part[mine] for part, mine in zip(parts, plain, strict=True)]


def _curves(
    source: Source, link: Link, parts: Sequence[pd.DataFrame], title: str, smooth: int = 1, sentence: str = ""
) -> Drawing:
    """Curves of the parts, over steps or over tokens; with two parts their difference too."""
    tokens, log = link.text("x", "step") == "tokens", link.on("log")
    if link.text("x", "step") not in ("step", "tokens"):
        raise UnknownName("x axis", str(link.text("x")), ("step", "tokens"))
    if tokens:
        parts = [_over_tokens(part, runs(source, link)) for part in parts]
    figure = drawn.curves(parts, title=title, smooth=smooth, log_x=log)
    if tokens:
        drawn.on_tokens(figure, log)
    return Drawing(figure, parts[0] if len(parts) == 1 else pd.concat(parts, ignore_index=True), sentence)


def _over_tokens(rows: pd.DataFrame, entries: Sequence[Entry]) -> pd.DataFrame:
    """The rows at the tokens that were read before each step, in place of the step."""
    per_step = {e.name: e.tokens for e in entries}
    if unknown := [name for name, tokens in per_step.items() if not tokens and name in set(rows["run"])]:
        raise WorkbenchError(f"how many tokens a step of {unknown[0]} reads is not known; draw it over steps")
    return rows.assign(step=rows["step"] * rows["run"].map(per_step).astype("Int64"))


@view("training")
def loss(source: Source, link: Link) -> Drawing:
    """Validation loss: the mean over its domains, or each domain; A, B and A - B where they are compared."""
    parts = _domains(_plain(_rows(source, link, "validation_loss")), link)
    return _curves(source, link, parts, "Validation loss")


def domains(source: Source, link: Link) -> list[str]:
    """Names of the domains that a validation loss was written down for."""
    return sorted(source.telemetry(runs(source, link), ["validation_loss"])["data"].dropna().unique())


def _domains(parts: Sequence[pd.DataFrame], link: Link) -> list[pd.DataFrame]:
    """Rows of each domain, or their plain mean over domains at each step."""
    asked = link.text("domain", TOTAL)
    if asked not in (TOTAL, EACH):
        raise UnknownName("domain", str(asked), (TOTAL, EACH))
    if asked == EACH:
        return list(parts)
    return [mean_of_domains(part) for part in parts]


def mean_of_domains(rows: pd.DataFrame) -> pd.DataFrame:
    """One row in place of the domains' at a step: mean value, error of a mean of independent means, all documents."""
    names = sorted(rows["data"].dropna().unique())
    if len(names) < 2:
        return rows
    keys = [c for c in rows.columns if c not in ("data", "value", "se", "n", "provenance")]
    squared = rows.assign(se=rows["se"] ** 2)
    found = squared.groupby(keys, dropna=False, as_index=False, sort=False).agg(
        value=("value", "mean"), se=("se", "sum"), n=("n", "sum"), count=("value", "size"),
        provenance=("provenance", "first"),
    )  # fmt: skip
    found = found.assign(se=found["se"] ** 0.5 / found["count"], data=f"mean of {', '.join(names)}")
    return found.assign(n=found["n"].where(found["n"] > 0))[rows.columns]


@view("training")
def relative(source: Source, link: Link) -> Drawing:
    """Validation loss minus the vanilla model's of the same seed; minus model B's where there is no vanilla model."""
    if link.on("compare"):
        raise WorkbenchError("the difference of A and B stands beside their losses")
    (rows,) = _domains(_plain(_rows(source, link, "validation_loss")), link)
    base, named = VANILLA, "the Transformer's"
    if VANILLA not in set(rows["architecture"]):
        group = source.group(link)
        if (other := link.text("b")) in {e.name for e in group}:
            base = source.catalogue().entry(str(other)).series
            named = f"{label(base)}'s (model B)"
        elif not any(e.series == VANILLA for e in group):
            raise WorkbenchError("no Transformer without a shortcut here to subtract; choose a model B to compare with")
        if base not in set(rows["architecture"]):
            more = source.telemetry([e for e in group if e.series == base], ["validation_loss"])
            rows = pd.concat([rows, *_domains(_plain([more]), link)], ignore_index=True)
    found = plots.relative(rows, base).assign(unit=f"nats above {named}")
    sentence = "Below zero: better than the baseline of the same seed, which saw the same batches."
    return _curves(source, link, [found], f"Validation loss minus {named}", sentence=sentence)


@view("training")
def train_loss(source: Source, link: Link) -> Drawing:
    """Loss of the batches that were trained on, smoothed over at most a fifth of the steps."""
    parts = _plain(_rows(source, link, "train_loss"))
    most = max(part["step"].nunique() for part in parts) // 5
    return _curves(source, link, parts, "Training loss", smooth=max(1, min(link.whole("smooth", SMOOTH) or 1, most)))


@view("training")
def copy_loss(source: Source, link: Link) -> Drawing:
    """Loss of the tokens that can be copied; where whole runs are drawn, with the step at which each learned it."""
    parts = _plain(_rows(source, link, "copy_loss"))
    if link.on("compare") or link.text("x", "step") == "tokens":
        return _curves(source, link, parts, "Loss where copying works")
    return Drawing(plots.race(parts[0], log_x=link.on("log")), parts[0])


CLIPPED = "Recorded inside a Trainer that clips first: these are the norms after clipping."


def logged(source: Source, link: Link) -> list[int]:
    """Steps at which gradients were written down; kept, for the rows of many runs take a while to gather."""
    chosen = runs(source, link)
    key = ("steps of gradients", *((e.path, e.stamp) for e in chosen))
    return source.keep(key, lambda: drawn.steps_of_matrices(source.telemetry(chosen, ["gradient_norm"])))


@view("training")
def gradients(source: Source, link: Link) -> Drawing:
    """Norm of each matrix's gradient in each layer at one step: of every model, or of A, of B, and A - B."""
    parts = _rows(source, link, "gradient_norm")
    wanted = link.whole("at", link.whole("step"))
    rows = [drawn.matrices_at(part, wanted) for part in parts]
    named = _named(rows) if link.on("compare") else _by_series(rows[0])
    figure = drawn.gradient_layers(named, compare=link.on("compare") and len(named) == 2)
    return Drawing(figure, pd.concat(rows, ignore_index=True), _clipped(parts))


@view("training")
def gradients_over_time(source: Source, link: Link) -> Drawing:
    """The same over all steps: a row for each matrix of each layer."""
    parts = _rows(source, link, "gradient_norm")
    if len(parts) == 1:
        return Drawing(drawn.gradient_map(parts[0]), drawn.means_of_matrices(parts[0]), _clipped(parts))
    rows = [drawn.matrices(part) for part in parts]
    return Drawing(drawn.gradient_maps(_named(rows), compare=True), pd.concat(rows, ignore_index=True), _clipped(parts))


def _named(parts: Sequence[pd.DataFrame]) -> list[tuple[str, pd.DataFrame]]:
    return [(plots.label(part["architecture"].iloc[0]), part) for part in parts]


def _by_series(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(plots.label(name), rows[rows["architecture"] == name]) for name in ordered(rows["architecture"])]


def _clipped(parts: Sequence[pd.DataFrame]) -> str:
    return CLIPPED if any(drawn.clipped(part) for part in parts) else ""


def learning(source: Source, link: Link) -> list[str]:
    """Series whose shortcut has coefficients that were written down, in the order of their colours."""
    return ordered(source.telemetry(source.chosen(link), ["coefficient"])["architecture"].dropna())


@view("training")
def coefficients(source: Source, link: Link) -> Drawing:
    """Learned coefficients over training, of one series (`of`), or of A and B."""
    parts = _rows(source, link, "coefficient")
    if link.on("compare"):
        figures = [(plots.label(p["architecture"].iloc[0]), plots.coefficients(p)) for p in parts]
        if len(parts) == 1:
            return Drawing(figures[0][1], parts[0])
        minus = drawn.curve_difference(*parts)
        if len(minus):
            figures.append((plots.MINUS, plots.coefficients(minus)))
        return Drawing(plots.beside(figures, "Learned coefficients"), pd.concat([*parts, minus], ignore_index=True))
    found = ordered(parts[0]["architecture"])
    chosen = link.text("of", found[0])
    if chosen not in found:
        raise UnknownName("model with coefficients", str(chosen), found)
    rows = parts[0][parts[0]["architecture"] == chosen]
    return Drawing(plots.coefficients(rows), rows)


def places(source: Source, link: Link, quantity: str) -> list[str]:
    """Where a quantity was taken: matrices or activations."""
    rows = source.telemetry(runs(source, link), [quantity])
    return sorted(rows[_place(rows)].dropna().unique())


def _place(rows: pd.DataFrame) -> str:
    return "part" if rows["part"].notna().any() else "site"


@view("training")
def recorded(source: Source, link: Link) -> Drawing:
    """A quantity that a recorder took in the loop, a panel for each layer; mean over heads where there are several."""
    found = inside(quantities(source, link))
    if not found:
        raise WorkbenchError("nothing was recorded inside these models; `workbench.Recorder` does in any training loop")
    quantity = link.text("quantity", "update_ratio" if "update_ratio" in found else found[0])
    if quantity not in found:
        raise UnknownName("quantity", str(quantity), found)
    parts = _rows(source, link, str(quantity))
    there = sorted({p for part in parts for p in part[_place(part)].dropna().unique()})
    place = link.text("where", there[0] if there else None)
    if there and place not in there:
        raise UnknownName("place", str(place), there)
    rows = [part[part[_place(part)] == place] if there else part for part in parts]
    layers = sorted({n for part in rows for n in part["layer"].dropna().unique()})
    kept = layers[:: -(-len(layers) // (MAX_LAYERS // len(rows)))] if layers else []
    rows = [(p[p["layer"].isin(kept)] if kept else p).assign(head=float("nan")) for p in rows]
    sentence = f" in {plots.site(place)}" if place else ""
    return _curves(source, link, rows, f"{str(quantity).replace('_', ' ').capitalize()}{sentence}")


@view("training")
def learning_rate(source: Source, link: Link) -> Drawing:
    """The learning rate's schedule."""
    return _curves(source, link, _plain(_rows(source, link, "learning_rate")), "Learning rate")


@view("training")
def pace(source: Source, link: Link) -> Drawing:
    """Tokens per second, the median over each run's steps."""
    rows = pd.concat(_rows(source, link, "tokens_per_second"), ignore_index=True)
    sentence = "On this machine, with whatever else ran beside it; for a fair comparison train alone."
    return Drawing(plots.pace(rows), rows, sentence)


@view("training")
def seconds(source: Source, link: Link) -> Drawing:
    """Seconds of an optimiser step of a recorded loop."""
    return _curves(source, link, _rows(source, link, "seconds_per_step"), "Seconds per step")


@view("training")
def recording_share(source: Source, link: Link) -> Drawing:
    """The part of the loop's time that recording itself took, writing included: 0.01 is one per cent."""
    return _curves(source, link, _rows(source, link, "recorder_share"), "What recording costs")
