"""The part Runs of the Start page: a row for each run, and means over seeds of runs that agree in some columns."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from workbench import plots
from workbench.errors import WorkbenchError, refuse_unknown
from workbench.models.architecture_names_and_colours import architecture_label
from workbench.plots.heat_maps import safe
from workbench.plots.style import GREY, dressed, wrapped
from workbench.runs.catalogue import differing_settings
from workbench.runs.run import Run
from workbench.statistics.intervals import confidence, group_intervals
from workbench.views.main_result import check_part
from workbench.views.page_links import Link
from workbench.views.registered_views import Drawing, view
from workbench.views.source import Source
from workbench.views.token_names import short
from workbench.views.training import mean_of_domains

KINDS = {"recorded": "recorded", "log": "training log, no weights"}


def runs_table(source: Source) -> pd.DataFrame:
    """A row for each run of the folder, in the catalogue's order."""
    columns = [
        "run", "model", "seed", "final loss", "rate", "options", "seeds", "state", "trained to step", "checkpoints", "measures",
        "experiment", "group",
    ]  # fmt: skip
    rows, entries = [], source.listed()
    seeds: dict[tuple[str, str], set[int]] = {}
    for e in entries:
        seeds.setdefault((e.group, e.series), set()).add(e.seed)

    def read() -> tuple[dict[str, float], dict[str, float]]:
        rows = source.telemetry(entries, ["validation_loss"])
        each, rows = rows[rows["control"].isna() & rows["variant"].isna()], rows[:0]
        with contextlib.suppress(WorkbenchError):  # no step of any run has every domain
            rows = mean_of_domains(each)
        last = rows[rows["step"] == rows.groupby("run")["step"].transform("max")]
        losses = {str(run): float(value) for run, value in last.groupby("run", observed=True)["value"].mean().items()}
        for e in (e for e in entries if e.kind == "log" and e.name in losses):
            steps = rows.loc[rows["run"] == e.name, "step"]
            if steps.max() * (1 + 1 / max(steps.nunique() - 1, 1)) <= e.last:  # an interval or more before the end
                del losses[e.name]
        rates = {e.name: Run.open(e.path).train.lr for e in entries if not (e.imported or e.numbers_only)}
        return losses, rates

    groups = {e.group: source.catalogue().groups[e.group] for e in entries}
    titles = {group: runs[0].title for group, runs in groups.items()}
    if len(set(titles.values())) < len(titles):  # some differ in other settings
        apart = source.keep(("apart", *((e.path, e.stamp) for e in entries)), lambda: differing_settings(groups))
        titles = {group: ", ".join(filter(None, (title, apart[group]))) for group, title in titles.items()}
    losses, rates = source.keep(("losses and rates", *((e.path, e.stamp) for e in entries)), read)
    for e in entries:
        ended = "finished" if e.finished else f"stopped before step {e.last}"
        state = KINDS.get(e.kind) or ("shipped, read-only" if e.shipped else ended)
        state = "being written now" if e.being_written else state
        step = e.last if e.shipped or e.kind == "log" else e.steps[-1] if e.steps else None
        step = None if e.imported and not step else step  # one checkpoint, of unknown training
        options = ", ".join(f"{name}={value}" for name, value in e.options.items() if value is not None)
        rows.append((
            e.name, architecture_label(e.series), e.seed, losses.get(e.name, math.nan), rates.get(e.name, math.nan), options,
            len(seeds[e.group, e.series]), state,
            step, len(e.steps), len(e.measured), titles[e.group], e.group,
        ))  # fmt: skip
    return pd.DataFrame(rows, columns=columns).astype({"trained to step": "Int64"})


GROUPABLE = ("model", "rate", "options", "seed", "state", "trained to step")
"""Columns of the table of runs by which runs of one experiment can be grouped."""
MOST_GROUPS, LABEL = 40, 48  # groups that are drawn, characters of a group's name


def grouped_runs(table: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return the mean final loss and its interval over seeds for runs of one experiment that agree in some columns.

    Losses of different experiments are of different data, so they are never averaged. A run that stopped early has no final loss,
    except where `by` names steps or states. Raises `UnknownName` for another column.
    """
    for name in by:
        refuse_unknown("column that groups runs", name, GROUPABLE)
    if not {"state", "trained to step"} & set(by):
        early = (table["trained to step"] < table.groupby("group")["trained to step"].transform("max")).fillna(False)
        early |= table["state"].str.startswith(("stopped", "being written"))
        table = table.assign(**{"final loss": table["final loss"].mask(early.astype(bool))})
    return group_intervals(table, ["experiment", "group", *by], ["final loss"])


@view("start")
def grouped(source: Source, link: Link) -> Drawing:
    """Mean final loss of runs that agree in the columns `group=`, with its interval over seeds; the table has all experiments."""
    check_part(link, "here")
    by = link.many("group")
    if not by:
        raise WorkbenchError(f"drawn with group=model; the columns are {', '.join(GROUPABLE)}")
    table = grouped_runs(runs_table(source), by)
    entry = source.group(link)[0]
    shown = table[(table["group"] == entry.group) & table["final loss"].notna()]
    if shown.empty:
        raise WorkbenchError(f"no final loss is stored for {entry.title}; name another experiment with set=")
    table, shown = table.rename(columns={"group": "set"}), shown.head(MOST_GROUPS)
    names = [
        short(", ".join(f"{row[c]:g}" if isinstance(row[c], float) else str(row[c] or "–") for c in by), LABEL)
        for _, row in shown.iterrows()
    ]
    half, seeds = f"final loss ± {confidence()}", shown["final loss, seeds"]
    figure = go.Figure(go.Scatter(
        x=shown["final loss"], y=plots.unique([safe(name) for name in names]), mode="markers", showlegend=False, customdata=seeds,
        error_x={"array": shown[half], "thickness": 1.6}, marker={"color": GREY, "size": 9},
        hovertemplate="%{y}<br>%{x:.4g} nats, %{customdata} seeds<extra></extra>",
    ))  # fmt: skip
    figure.update_xaxes(title_text="final validation loss (nats)")
    figure.update_yaxes(type="category", autorange="reversed")
    count = f"{seeds.min()} to {seeds.max()}" if seeds.min() < seeds.max() else str(seeds.max())
    whisker = f"; whisker: {confidence()} interval over seeds" if shown[half].notna().any() else ""
    under = f"{entry.title}; {count} seed{'s' * bool(seeds.max() > 1)}{whisker}; lower is better"
    sentences = []
    if left_out := int((table["set"] == entry.group).sum()) - len(shown):
        sentences.append(
            f"{left_out} group{'s' * (left_out > 1)} of this experiment {'is' if left_out == 1 else 'are'} in its numbers only."
        )
    if others := table["set"].nunique() - 1:
        sentences.append(
            f"The table also has {others} other experiment{'s' * (others > 1)}, whose losses are of other data or settings."
        )
    title = f"Final loss by {', '.join(by)}"
    return Drawing(dressed(figure, title, wrapped(under, 125), 110 + 26 * len(shown)), table, " ".join(sentences))
