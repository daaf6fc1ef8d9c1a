"""The demo's story: how far it is, where attention concentrates, the race to copying, what deep values carry."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from workbench import plots, prompts
from workbench.errors import UnknownName, WorkbenchError
from workbench.files import read_json
from workbench.runs.catalogue import Entry
from workbench.runs.records import one_sample
from workbench.views.base import Drawing, view
from workbench.views.link import Link
from workbench.views.source import Source, Subject, example
from workbench.views.start.parts import check_part

if TYPE_CHECKING:
    from workbench.claims.judging import Judged

EXPERIMENTS = ("sinks", "sinks_without_start", "race", "text")
SHOWN = ("transformer", "resformer", "svformer", "neutreno", "denseformer")
SINK_PANELS = ("sink_mass", "value_drain", "importance_entropy")
STATUS_FILE, MAX_QUIET_S = ".demo.json", 180  # seconds without a sign of life, after which a demo has stopped


@dataclass(frozen=True)
class Status:
    """How far a demo is; `running` is False once it is done or has gone quiet."""

    finished: bool
    running: bool
    ready: int
    planned: int
    left_s: float | None
    failed: dict[str, str]


def status(folder: Path) -> Status | None:
    """How far the demo of a folder is; None where none was started there, or its status cannot be read."""
    path = folder / STATUS_FILE
    try:
        saved = read_json(path)
        newest = max([path.stat().st_mtime, *(p.stat().st_mtime for p in folder.glob("*/telemetry"))])
        left = saved.get("left_s")
        return Status(
            bool(saved["finished"]), not saved["finished"] and time.time() - newest <= MAX_QUIET_S, len(saved["ready"]),
            len(saved["models"]), None if left is None else float(left),
            {str(k): str(v) for k, v in dict(saved["failed"]).items()},
        )  # fmt: skip
    except (WorkbenchError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def runs(source: Source, experiment: str) -> list[Entry]:
    """The demo's runs of one experiment, by the names it gives them."""
    return [e for e in source.catalogue().entries if re.fullmatch(rf"{experiment}-.+-s\d+", e.name)]


def only_demo(source: Source) -> bool:
    """Whether a demo was begun in the folder and nothing else is in it."""
    here = source.catalogue().entries
    return status(source.folder) is not None and sum(len(runs(source, name)) for name in EXPERIMENTS) == len(here)


def sink_records(source: Source) -> pd.DataFrame:
    """What is measured so far of the models on the task with a resting head; one without a start token is a series of its own."""
    parts = [source.records(runs(source, name), SINK_PANELS) for name in ("sinks", "sinks_without_start")]
    bare = parts[1].assign(architecture=parts[1]["architecture"].astype("str") + f"{plots.DETAIL}without start token")
    return one_sample(pd.concat([parts[0], bare], ignore_index=True))


@view("start")
def forming(source: Source, link: Link) -> Drawing:
    """The demo's sinks over training, in each run's strongest head: attention to the start token, its value, and concentration."""
    check_part(link, "demo")
    frame = sink_records(source)
    mass = frame[(frame["metric"] == "sink_mass") & frame["control"].isna()]
    if mass.empty:
        raise WorkbenchError("no checkpoint is measured yet; the first appears within a minute of `make demo`")
    last = mass[mass["step"] == mass.groupby("run")["step"].transform("max")]
    top = last.loc[last.groupby("run")["value"].idxmax(), ["run", "layer"]]
    rows = frame.merge(top, on=["run", "layer"])  # one head a layer
    rows = rows[rows["variant"].isna() & (rows["site"].isna() | (rows["site"] == "v"))]
    rows = rows.assign(layer=None, head=None, metric=pd.Categorical(rows["metric"], SINK_PANELS, ordered=True))
    rows = rows.sort_values("metric", kind="stable").astype({"metric": "str"})
    return Drawing(plots.plot(rows, form="steps", title="When does attention come to rest on the start token?"), rows)


def race_models(source: Source) -> list[Entry]:
    """Models of the race to induction: those trained here, otherwise the shipped study's at its lowest rate."""
    wanted = re.compile(r"induction-(svformer|resformer|transformer|residual_k)-lr=0\.003-s\d+")
    shipped = (e for e in source.shipped().entries if wanted.fullmatch(e.name))
    return runs(source, "race") or [dataclasses.replace(e, series=e.architecture) for e in shipped]


@view("start")
def race(source: Source, link: Link) -> Drawing:
    """The demo's race: when each model learns to copy."""
    check_part(link, "demo")
    frame = source.telemetry(race_models(source), ["copy_loss"])
    frame = frame[frame["variant"].isna()]
    if frame.empty:
        raise WorkbenchError(
            "no training loss is stored yet; the first curve appears within a minute of `workbench demo --full`"
        )
    return Drawing(plots.race(frame), frame)


def text_models(source: Source) -> list[Entry]:
    """The demo's models of text; where there is one seed at most, those of a study that ships with the project."""
    own = runs(source, "text")
    if len({e.seed for e in own}) > 1:
        return own
    wanted = re.compile(rf"value_paths-({'|'.join(SHOWN)})-s\d+")
    shipped = [e for e in source.shipped().entries if wanted.fullmatch(e.name)]
    return [dataclasses.replace(e, series=e.architecture) for e in shipped] or own  # one setting of each alone


def _deep(source: Source, metrics: Sequence[str]) -> pd.DataFrame:
    entries = text_models(source)
    key = ("deep", *metrics, *((e.path, e.series, e.stamp) for e in entries))
    return source.keep(key, lambda: one_sample(source.records(entries, metrics)))


@view("start")
def identity(source: Source, link: Link) -> Drawing:
    """The demo's text models: how much of each layer's values is the token alone, before and after training."""
    check_part(link, "demo")
    frame = _deep(source, ["token_identity_share"])
    rows = frame[frame["site"].isin(["own_v", "v"]) & frame["control"].isna()]
    if rows.empty:
        raise WorkbenchError("measured once the first text model of `workbench demo --all` is trained")
    return Drawing(plots.plot(rows, form="profile"), rows)


@view("start")
def replaced(source: Source, link: Link) -> Drawing:
    """The demo's text models: what is lost when deep values are replaced by their token's mean, or by zero."""
    check_part(link, "demo")
    rows = _deep(source, ["value_ablation"])
    if rows.empty:
        raise WorkbenchError("measured once the first text model of `workbench demo --all` is trained")
    return Drawing(plots.ablation(rows), rows)


def resters(source: Source) -> list[Entry]:
    """Models of the task with a resting head that have checkpoints to look at."""
    return [e for e in runs(source, "sinks") if len(e.steps) > 1]


def racers(source: Source) -> list[Entry]:
    """Models of the race with checkpoints to look at."""
    return [e for e in runs(source, "race") if len(e.steps) > 1]


def pair(source: Source, link: Link) -> tuple[list[Entry], list[int], int]:
    """Two models of the race, their common steps and the chosen one; raises `WorkbenchError` before there are any."""
    ready = racers(source)
    if not ready:
        raise WorkbenchError("no model of the race has a checkpoint yet")
    by_name, chosen = {e.name: e for e in ready}, []
    for side, architecture in (("left", "svformer"), ("right", "transformer")):
        default = next((e.name for e in ready if e.architecture == architecture), ready[0].name)
        name = link.text(side, default)
        if name not in by_name:
            raise UnknownName("model of the race", str(name), by_name)
        chosen.append(by_name[str(name)])
    common = sorted(set(chosen[0].steps) & set(chosen[1].steps))
    step = link.whole("at", common[2 * len(common) // 3])
    if step not in common:
        raise WorkbenchError(f"the two models have no common checkpoint at step {step}; choose from {common}")
    return chosen, common, int(step)


def resting(source: Source, link: Link) -> tuple[list[Entry], list[int], int]:
    """One model of each architecture on that task, their common steps and the chosen one; raises `WorkbenchError` before there are any."""
    first: dict[str, Entry] = {}
    for entry in resters(source):
        first.setdefault(entry.architecture, entry)
    if not first:
        raise WorkbenchError("no model of this experiment has a checkpoint yet")
    common = sorted(set.intersection(*(set(e.steps) for e in first.values())))
    step = link.whole("when", common[-1])
    if step not in common:
        raise WorkbenchError(f"these models have no common checkpoint at step {step}; choose from {common}")
    return [first[name] for name in plots.ordered(first)], common, int(step)


@view("start")
def resting_heads(source: Source, link: Link) -> Drawing:
    """Attention of the head that gives the start token most at the end, in each architecture at one step."""
    check_part(link, "demo")
    entries, _, step = resting(source, link)
    heads = [(entry, *_best_head(source, entry, "sink_mass")) for entry in entries]
    return _maps(
        source, heads, step, "Attention of the resting head", "the head that gives the start token most at the end"
    )


@view("start")
def copying_heads(source: Source, link: Link) -> Drawing:
    """Attention of the head that copies best after training, in two models of the race at one step."""
    check_part(link, "demo")
    entries, _, step = pair(source, link)
    heads = [(entry, *_best_head(source, entry, "induction_score")) for entry in entries]
    return _maps(source, heads, step, "Attention of the copying head", "the head that copies best after training")


def _maps(source: Source, heads: Sequence[tuple[Entry, int, int]], step: int, title: str, which: str) -> Drawing:
    """Attention of (run, layer, head) at one step, on one fixed sequence."""
    maps, rows = [], []
    for entry, layer, head in heads:
        subject, text = Subject(entry, step), example(entry)
        kept = source.derive(prompts.attention_map, prompts.attention_inputs, subject, text, layer, head, most=256)
        name = f"{plots.label(entry.series)}, seed {entry.seed}: layer {layer}, head {head}"
        maps.append((name, kept.weights, source.tokens(subject, text)))
        row, column = np.tril_indices(len(kept.weights))
        where = {"run": entry.name, "step": step, "layer": layer, "head": head, "query": row, "key": column}
        rows.append(pd.DataFrame({**where, "attention": kept.weights[row, column]}))
    under = f"{which}, on one fixed sequence; training step {step}"
    return Drawing(plots.attention_pair(maps, title, under), pd.concat(rows, ignore_index=True))


def _best_head(source: Source, entry: Entry, metric: str) -> tuple[int, int]:
    """(layer, head) with the highest number at the run's last step; the last layer's first where none is stored."""
    frame = source.records([entry], [metric])
    rows = frame[(frame["step"] == entry.steps[-1]) & frame["variant"].isna() & frame["control"].isna()]
    if rows.empty:
        return entry.n_layers - 1, 0
    top = rows.sort_values("value").iloc[-1]
    return int(top["layer"]), int(top["head"])


SINK_CLAIM, RACE_CLAIM = "sharing_values_delays_the_sink", "value_paths_speed_up_induction"
LIMITS = ("lower_loss", "sinks_drains_and_peaks_vanish_together", "fewer_parameters")
"""Claims that models of the demo's size leave open."""


def verdicts(source: Source, experiment: str, claims: Sequence[str]) -> tuple[Judged, ...]:
    """What these claims say of the finished runs of one experiment; nothing is measured."""
    here = {"text": text_models, "race": race_models}.get(experiment, lambda source: runs(source, experiment))(source)
    finished = [e for e in here if e.finished]

    def judged() -> tuple[tuple[Judged, ...], dict[str, str]]:
        from workbench.claims.judging import chosen, judge
        from workbench.claims.stored import stored

        (evidence, problems), asked = stored(finished, **source.caches), chosen(claims=claims)
        return judge(evidence, asked), problems

    found, problems = source.keep(("demo verdicts", *claims, *((e.path, e.stamp) for e in finished)), judged)
    source.problems.update(problems)
    return found
