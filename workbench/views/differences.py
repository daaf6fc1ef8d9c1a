"""Differences of models A and B: settings, weights by matrix and layer, and stored measures over seeds."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from workbench import plots
from workbench.errors import WorkbenchError
from workbench.models.architecture_names_and_colours import OPTION_LABELS, architecture_label
from workbench.plots.heat_maps import safe
from workbench.plots.style import GREY, MINUS_COLOUR, SITES, at_least, dressed, true_minus, wrapped
from workbench.reports.diff_of_checkpoints import (
    measure_differences,
    run_description,
    setting_differences,
    stored_documents,
    stored_rows,
    weight_changes,
)
from workbench.runs.catalogue import Entry
from workbench.runs.run import Run
from workbench.statistics.intervals import MIN_SEEDS, confidence
from workbench.views.page_links import Link
from workbench.views.registered_views import Drawing, view
from workbench.views.source import PREFERRED, RunAtStep, Source, checkpoint_key, run_name
from workbench.views.token_names import short

QUANTITIES = {
    "relative": "size of the difference / size of A's matrix",
    "top_share": "share of the difference along its first direction",
    "overlap_out": "overlap with A's directions, output side",
    "overlap_in": "overlap with A's directions, input side",
}
"""Columns of the table of weights, in words."""
UNITS = {"relative": "ratio", "top_share": "share", "overlap_out": "overlap", "overlap_in": "overlap"}
SETTINGS = {
    "architecture": "architecture", "seed": "seed", "model.n_layers": "layers", "model.d_model": "width", "model.n_heads": "heads",
    "model.d_mlp": "MLP width", "model.d_vocab": "vocabulary size", "model.n_ctx": "longest context (tokens)",
    "model.n_key_value_heads": "key-value heads", "model.rms_norm_eps": "epsilon of the norms", "model.rope_theta": "rotary base",
    "model.init_std": "standard deviation at init", "train.steps": "training steps", "train.batch": "sequences per step",
    "train.T": "sequence length (tokens)", "train.lr": "learning rate", "train.lr_final": "final learning rate (share)",
    "train.warmup": "warm-up steps", "train.weight_decay": "weight decay", "train.beta1": "Adam beta 1", "train.beta2": "Adam beta 2",
    "train.eps": "Adam epsilon", "train.clip": "gradient clipping", "train.log_every": "steps between logs",
    "train.validate_every": "steps between validations", "train.validation_sequences": "validation sequences",
    "train.save_every": "steps between checkpoints", "train.checkpoints": "checkpoints kept", "train.bf16": "bfloat16",
    "data.kind": "kind of data", "data.hash": "data (checksum)", "data.bos": "start token", "data.domains": "domains",
    "data.vocabulary": "symbols", "data.shortest": "shortest distance", "data.triggers": "triggers",
    "machine.device": "device", "machine.float32_matmul": "precision of float32 products",
    "versions.python": "Python version", "versions.torch": "PyTorch version", "versions.workbench": "workbench version",
}  # fmt: skip
"""Settings of a run in words; options are in the registry."""
PLAIN = {"null": "none", "true": "yes", "false": "no"}
ROW, LONGEST = 24, 28  # pixels of a measure's row, characters of a setting's value


def both_models(source: Source, link: Link) -> list[RunAtStep]:
    """Models A and B of a link, also if it does not name B."""
    return source.subjects(link.but(compare=1))


def partner(source: Source, link: Link) -> Entry | None:
    """Return the run to compare model A with: of its experiment and seed if there is one, a Transformer first; None without any."""
    (a,) = source.subjects(link.but(compare=None))
    others = [e for e in source.catalogue().groups[a.entry.group] if e.steps and e.series != a.entry.series]

    def rank(entry: Entry) -> tuple[bool, ...]:
        return entry.seed == a.entry.seed, *(entry.architecture == name for name in reversed(PREFERRED))

    return max(others, key=rank, default=None)


def setting_label(key: str) -> str:
    """Return a setting such as `options.lambda_v1` in words; unknown ones keep their name, with spaces."""
    section, _, name = key.partition(".")
    if section == "options" and name in OPTION_LABELS:
        return OPTION_LABELS[name]
    return SETTINGS.get(key) or f"{name or section} ({section})".replace("_", " ")


@view("differences")
def settings(source: Source, link: Link) -> Drawing:
    """Settings in which the runs of A and B differ: options, shape, recipe, data and versions."""
    a, b = both_models(source, link)
    table = setting_differences({s.title: run_description(Run.open(s.entry.path)) for s in (a, b)})
    if table.empty:
        raise WorkbenchError("A and B have equal settings.")
    figure = go.Figure()
    keys = [str(key) for key in table["setting"]]
    rows = plots.unique([wrapped(safe(setting_label(key)), LONGEST) for key in keys])
    for column in table.columns[1:]:
        values = [PLAIN.get(value, architecture_label(value)) or "–" for value in table[column]]
        name = safe(column).replace(plots.DETAIL, "<br>").replace(", step", "<br>step")
        figure.add_scatter(
            x=[name] * len(table), y=rows, mode="text", name=safe(column), showlegend=False,
            text=[safe(short(value, LONGEST)) for value in values],
            customdata=[[safe(key), safe(value)] for key, value in zip(keys, values, strict=True)],
            hovertemplate="%{y}<br>%{customdata[0]} = %{customdata[1]}<extra></extra>",
        )  # fmt: skip
    figure.update_yaxes(type="category", range=[len(table) - 0.5, -0.9], showgrid=False)
    figure.update_xaxes(type="category", side="top", showgrid=False, range=[-0.5, 1.5], tickangle=0)
    figure = dressed(figure, "Settings that differ", "", 70 + ROW * (len(table) + 1)).update_layout(margin_b=4)
    return Drawing(figure, table)


def may_be_related(a: RunAtStep, b: RunAtStep) -> bool:
    """Return True if one model may have been trained from the other: two steps of one run, or an imported model."""
    return a.entry.path == b.entry.path or bool(a.entry.imported or b.entry.imported)


@view("differences", "weights")
def moved_weights(source: Source, link: Link) -> Drawing:
    """How far each matrix of B is from A's, and in which directions, by layer."""
    a, b = both_models(source, link)
    quantity = link.choice("quantity", QUANTITIES)

    def read() -> pd.DataFrame:
        models = [source.model(s) for s in (a, b)]
        return weight_changes(*(dict(m.named_parameters()) for m in models))

    changes: pd.DataFrame = source.keep(("weight changes", checkpoint_key(a), checkpoint_key(b)), read)
    if not changes["relative"].any():
        raise WorkbenchError("A and B have equal weights.")
    rows = changes[changes["layer"].notna() & changes[quantity].notna()]
    if rows.empty:
        raise WorkbenchError("no matrix is in a layer; the table of `workbench diff` has all tensors")
    cells = rows.pivot_table(index="matrix", columns="layer", values=quantity, sort=False)
    cells = cells[sorted(cells.columns)]
    grid = plots.Grid(
        cells.to_numpy(dtype=float), [str(name).removesuffix(".weight") for name in cells.index], [str(n) for n in cells.columns],
        UNITS[quantity], "matrix", "layer", texts=np.vectorize("{:.2g}".format)(cells.to_numpy(dtype=float)), upward=False,
    )  # fmt: skip
    under = f"{QUANTITIES[quantity]}; A: {a.name}; B: {b.name}"
    if quantity.startswith("overlap"):
        chance = rows[quantity.replace("overlap", "chance")]
        under += f"; random directions: {chance.min():.2g} to {chance.max():.2g}"
    largest = changes.sort_values("relative", kind="stable").iloc[-1]
    sentence = f"Largest difference: {largest['tensor']}, {largest['relative']:.3g} of A's size."
    one_run = a.entry.path == b.entry.path
    if not one_run:
        trained = "" if may_be_related(a, b) else "A and B were not trained from one another. "
        sentence += f" {trained}Two unrelated matrices of equal size differ by 1.41 (√2)."
    figure = plots.grids([("", grid)], "Weights that moved" if one_run else "Weights that differ", under)
    figure.update_coloraxes(showscale=False)  # the cells have their numbers
    return Drawing(at_least(figure, 140 + 34 * min(len(cells.columns), 12)), changes, sentence)


@view("differences", "measures")
def moved_measures(source: Source, link: Link) -> Drawing:
    """Stored measures of A minus B over shared seeds, or documents; beyond ±1 the difference exceeds their noise."""
    sides, (one, other) = [], both_models(source, link)
    if (one.entry.group, one.entry.series, one.step) == (other.entry.group, other.entry.series, other.step):
        raise WorkbenchError("A and B are two seeds of one model at one step: their difference is chance")
    for subject in (one, other):
        entry = subject.entry
        alike = [e for e in source.catalogue().entries if (e.group, e.series) == (entry.group, entry.series)]
        sides.append(stored_rows(alike, subject.step, source.cache.records, source.cache.telemetry))
    documents = [stored_documents(s.entry, s.step) for s in both_models(source, link)]
    table, sentence = measure_differences(sides[1], sides[0], documents[::-1])  # of `workbench diff B A`
    if table.empty or "low" not in table:
        raise WorkbenchError(sentence)
    a, b = (run_name(s.entry) for s in both_models(source, link))
    table = table.rename(columns={"a": "b", "b": "a"}).assign(
        relative=table["difference"] / ((table["high"] - table["low"]) / 2)
    )
    shown = table[np.isfinite(table["relative"])].sort_values("relative")
    if shown.empty:
        raise WorkbenchError(f"{sentence} No difference varies over seeds, so there is no interval to draw.")
    if left_out := len(table) - len(shown):
        sentence += (
            f" {left_out} without an interval {'is' if left_out == 1 else 'are'} in the numbers of this figure only."
        )
    names = []
    for row in shown.to_dict("records"):
        of = [row[k] for k in ("site", "variant", "part") if row[k] is not None]
        parts = [str(row["metric"]).replace("_", " "), *(SITES.get(x, str(x).replace("_", " ")) for x in of)]
        names.append(", ".join([*parts, str(row["data"])] if row["metric"] == "validation_loss" else parts))
    hollow = ["circle" if moved else "circle-open" for moved in shown["moved"]]
    ends = shown[["difference", "low", "high"]].to_numpy(float)
    intervals = [true_minus(f"{value:.3g} [{low:.3g}, {high:.3g}]") for value, low, high in ends]
    figure = go.Figure(go.Scatter(
        x=shown["relative"], y=plots.unique([safe(n) for n in names]), mode="markers", showlegend=False,
        marker={"color": MINUS_COLOUR, "size": 9, "symbol": hollow}, customdata=[[interval] for interval in intervals],
        hovertemplate="%{y}<br>%{customdata[0]}<extra></extra>",
    ))  # fmt: skip
    for x in (-1, 0, 1):
        figure.add_vline(x=x, line={"color": GREY, "dash": "dot" if x else "solid", "width": 1})
    end = 1.08 * max(1.0, float(shown["relative"].abs().max()))
    figure.update_xaxes(title_text="(A − B) / half its interval", range=[-end, end], zeroline=False)
    seeds = int(shown["seeds"].max())
    noise = f"{seeds} seeds" if seeds >= MIN_SEEDS else "over documents of 1 seed"
    under = (
        f"A: {a}; B: {b}; {noise}; dotted: end of the {confidence()} interval, Holm-adjusted; hollow: not significant"
    )
    return Drawing(dressed(figure, "Differences of stored measures", under, 120 + ROW * len(shown)), table, sentence)
