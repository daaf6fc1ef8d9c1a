"""Report of a runs folder as one offline HTML page: figures with alt texts and tables, verdicts and provenance."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from workbench import plots
from workbench.claims import DECIDED
from workbench.claims.analysis import article
from workbench.claims.collect_evidence import samples_of
from workbench.claims.judging import Judged, chosen
from workbench.claims.stored_verdicts import judge_all
from workbench.claims.verdict import expected_by_chance
from workbench.errors import BadCheckpoint, BadData
from workbench.models.architecture_names_and_colours import architecture_label
from workbench.plots.html_page import Page, folded, heading, numbers_html, paragraph
from workbench.runs.catalogue import Entry, catalogue, differing_settings, named_series
from workbench.runs.records import load_records, one_sample
from workbench.runs.run import Run, list_runs
from workbench.statistics.copying_and_sink_steps import formation_steps

RACE, VALUES = "value_paths_speed_up_induction", "deep_values_need_little_context"
BESIDE = {
    "importance_entropy": ("Concentration of attention, by layer", None),
    "token_similarity": ("Similarity of the tokens' states, by layer", "stream"),
    "sink_mass": ("Attention to the first token, mean of heads", None),
    "value_drain": (
        "Norm of the first token's own value over the others'; layers without own values have no point",
        "own_v",
    ),
    "hidden_peak": ("Norm of the first token's state over the others'", "stream"),
}


def up_to_date(page: Path, runs: Path) -> bool:
    """Return whether a page is newer than the folder's runs, their records and this code."""
    if not page.exists():
        return False
    code = Path(__file__).parents[1].rglob("*.py")
    kept = (file for run in list_runs(runs)[0] for file in (run.path, *run.path.rglob("*")))
    return page.stat().st_mtime > max(file.stat().st_mtime for file in (*code, *kept))


DISTANCES = {
    True: "In training each sequence has its own distance to the copy, so a head has to match tokens; a fixed offset is not enough.",
    False: "The copy always begins at the same distance, so a head with a fixed offset copies as well as one that matches tokens.",
    None: "In some of these runs the copy always begins at the same distance, so a head with a fixed offset can copy there.",
}
"""What the race asks of a head, by whether the distance is drawn; None where runs differ."""


def write_report(runs: Path, out: Path) -> Path:
    """Write the page from stored records of the finished runs, and return its path; raises `BadData` without a readable run."""
    listed, problems = list_runs(runs)
    tables = dict[Run, tuple[pd.DataFrame, pd.DataFrame]]()
    for run in listed:
        try:
            records = load_records([run.path])
            samples_of(run, records)
            tables[run] = one_sample(records), run.telemetry()
        except BadCheckpoint as error:
            problems[run.name] = str(error)
    if not (readable := list(tables)):
        why = "".join(f"; {name}: {reason}" for name, reason in problems.items())
        raise BadData(f"no readable runs under {runs}; make some with `workbench demo` or `workbench train`{why}")
    places = {run.path.resolve() for run in readable}
    entries = [e for e in catalogue(runs).entries if Path(e.path) in places]
    series = series_by_run(entries)
    frame, telemetry = (pd.concat(parts, ignore_index=True) for parts in zip(*tables.values(), strict=True))
    frame, telemetry = (rows.assign(architecture=rows["run"].map(series)) for rows in (frame, telemetry))
    unknown = [e.name for e in entries if not e.at_step(0)]  # imported; their step 0 is no random init
    frame["step"] = frame["step"].mask(frame["run"].isin(unknown))
    of = judge_all(entries).of
    judged = {claim.name: Judged(claim, of[claim.name]) for claim in chosen()}
    page = Page("workbench report")
    names = ", ".join(map(architecture_label, plots.ordered(run.architecture for run in readable)))
    opening = (
        f"{len(readable)} run{'s' * (len(readable) > 1)}: {names}. Bands are the range over seeds; dashed lines are random init (step 0), "
        "dotted ones the metric's own baseline. A value-residual model gives later layers a direct path to the first layer's "
        "values, which depend on the token alone."
    )
    page.add(heading("Report of the runs", 1), paragraph(opening))
    page.add(paragraph(expected_by_chance([j.verdict for j in judged.values()]), "small"))
    losses = telemetry[(telemetry["metric"] == "copy_loss") & telemetry["variant"].isna()]
    kinds = {entry.name: entry.kind for entry in entries}
    for kind, rows in losses.groupby(losses["run"].map(kinds)):
        page.add(heading("Copying" if kind == "repeated" else f"Copying ({kind})"))
        if kind == "repeated":
            data = (run.info["data"] for run in readable if kinds[run.name] == kind)
            drawn = {each.get("shortest") is not None for each in data}
            page.add(article(judged[RACE]), paragraph(DISTANCES[drawn.pop() if len(drawn) == 1 else None]))
        caption = "Loss of the tokens that can be copied; below half of its start a run copies."
        page.add(page.figure(plots.narrow(plots.race_figure(rows)), caption), numbers_html(formation_steps(rows)))
    share = frame[(frame["metric"] == "token_identity_share") & (frame["site"] == "own_v")]
    if len(share):
        caption = "Share of the variance of each layer's own values that the token's identity explains."
        page.add(heading("Token information in deep values"), article(judged[VALUES]))
        page.add(page.figure(plots.plot(share), caption), numbers_html(share))
        if len(ablated := frame[frame["metric"] == "value_ablation"]):
            caption = "Validation loss when values are replaced by their mean per token, or by zero."
            page.add(page.figure(plots.ablation(ablated), caption), numbers_html(ablated))
    _beside(page, frame, telemetry, telemetry[~telemetry["run"].map(kinds).isin(["repeated", "backcopy"])])
    shown = {RACE} if "repeated" in set(losses["run"].map(kinds)) else set()
    shown |= {VALUES} if len(share) else set()
    others = [j for name, j in judged.items() if name not in shown]
    if decided := [article(j) for j in others if j.verdict.status in DECIDED]:
        page.add(heading("Verdicts on published claims"), *decided)
    if rest := [article(j) for j in others if j.verdict.status not in DECIDED]:
        needs = folded(f"{len(rest)} claims, and what each would need", "".join(rest))
        page.add(heading("Claims without a verdict"), needs)
    _provenance(page, readable, frame, problems)
    return page.write(out)


def series_by_run(entries: Sequence[Entry]) -> dict[str, str]:
    """Return the series of every run by name; it names the settings of training in which experiments differ, so their runs have no mean."""
    # options of a model that are equal within its experiment may differ from those in another
    own = {e.name: e.series for e in named_series([e if e.imported else replace(e, group="") for e in entries])}
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        if plots.DETAIL not in own[entry.name]:  # an imported run's series has its name
            groups.setdefault(entry.group, []).append(entry)
    differs, kinds = differing_settings(groups), {runs[0].kind for runs in groups.values()}

    def named(entry: Entry) -> str:
        detail = (entry.kind if len(kinds) > 1 else "", differs[entry.group]) if entry.group in groups else ()
        return plots.DETAIL.join(filter(None, (own[entry.name], *detail)))

    return {entry.name: named(entry) for entry in entries}


def _beside(page: Page, frame: pd.DataFrame, telemetry: pd.DataFrame, text: pd.DataFrame) -> None:
    page.add(heading("Other measures"))
    for domain, rows in text[text["metric"] == "validation_loss"].groupby("data"):
        page.add(page.figure(plots.plot(rows), f"Validation loss, {domain}."), numbers_html(rows))
    for metric, (caption, site) in BESIDE.items():
        rows = frame[(frame["metric"] == metric) & frame["variant"].isna()]
        rows = rows[rows["site"] == site] if site else rows
        last = rows.groupby("architecture")["step"].transform("max")
        # all steps would hide one another
        rows = rows[rows["step"].isna() | (rows["step"] == 0) | (rows["step"] == last)]
        if len(rows):
            page.add(page.figure(plots.narrow(plots.plot(rows, form="profile")), caption), numbers_html(rows))
    parts = [(text[text["metric"] == "gradient_norm"], plots.gradient_map, "Gradient norms by matrix and layer")]
    learned = telemetry[telemetry["metric"] == "coefficient"]
    for name in plots.ordered(learned["architecture"]):
        part = learned[learned["architecture"] == name]
        parts.append((part, plots.coefficients_figure, f"Learned coefficients, {architecture_label(name)}"))
    for table, draw, caption in parts:
        if len(table):
            ends = table[table["step"] == table.groupby("run")["step"].transform("max")]
            page.add(page.figure(draw(table), f"{caption} (table: the last step)."), numbers_html(ends))


def _provenance(page: Page, runs: list[Run], frame: pd.DataFrame, problems: dict[str, str]) -> None:
    rows = [
        {
            "run": run.name, "architecture": run.architecture, "options": json.dumps(run.options), "seed": run.seed,
            "steps": run.progress, "rate": None if "imported" in run.info else run.info.get("train", {}).get("lr"),
            "data": run.info["data"].get("hash"),
            **run.info.get("versions", {}), "created": run.info.get("created"),
        }
        for run in runs
    ]  # fmt: skip
    page.add(heading("Provenance"))
    if len(frame) and frame["provenance"].str.contains('"assumed":true').any():
        marked = "Some architectures were assumed, as their checkpoints do not say: they are marked in the figures."
        page.add(paragraph(marked))
    page.add(*(paragraph(f"{name} was left out: {problem}") for name, problem in problems.items()))
    page.add(paragraph(f"Reproduce: workbench report --runs {shlex.quote(str(runs[0].path.parent))}"))
    page.add(numbers_html(pd.DataFrame(rows), "the runs"))
