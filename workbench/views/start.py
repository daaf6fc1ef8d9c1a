"""The Start page: one model at a glance, the runs, verdicts on claims, the demo's figures; `main_result` has the main result."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workbench import plots, prompts
from workbench.claims import DECIDED, Claim, Verdict, stored_verdicts
from workbench.claims.evidence import TELEMETRY, at_last_step
from workbench.claims.judging import chosen, claim_figure
from workbench.claims.stored_verdicts import Verdicts
from workbench.claims.verdict import expected_by_chance
from workbench.errors import BadData, WorkbenchError
from workbench.file_io import read_json
from workbench.models.architecture_names_and_colours import architecture_label
from workbench.reports import xray as xrays
from workbench.runs.catalogue import Entry
from workbench.runs.records import one_sample
from workbench.runs.run import Run
from workbench.statistics.copying_and_sink_steps import SINK, formation_steps, sink_steps
from workbench.statistics.intervals import paired_seeds
from workbench.statistics.multiple_testing import holm_factors
from workbench.views import start_runs  # noqa: F401  (a view of this page)
from workbench.views.main_result import HALF_PAGE, check_part, logged_rows
from workbench.views.page_links import Link
from workbench.views.registered_views import Drawing, view
from workbench.views.source import RunAtStep, Source, example
from workbench.views.training import VANILLA, mean_of_domains

RATE = "0.002"  # of the three that the study of losses tried, for both models

# ---- one model -------------------------------------------------------------------------------------------------------


def xray_records(source: Source, subject: RunAtStep) -> pd.DataFrame:
    """Records of an X-ray at the subject's step and at step 0, each measure on one sample."""
    frame = source.records([subject.entry], (*xrays.METRICS, xrays.BY_LAYER))
    return one_sample(frame[frame["step"].isin([0, subject.step])])


def missing(source: Source, subject: RunAtStep) -> list[str]:
    """Measures that an X-ray of this model at this step needs and that are not stored."""
    frame = xray_records(source, subject)
    stored = set(frame.loc[frame["step"] == subject.step, "metric"])
    stored |= {xrays.TOGETHER} if xrays.BY_LAYER in stored else set()
    return [name for name in xrays.NEEDED if name not in stored]


def xray_plan(entry: Entry, step: int) -> list[tuple[int, str]]:
    """Return the (step, measure) of an X-ray, at the step and at random init."""
    names = xrays.measurable(Run.open(entry.path).train.T)
    at_init = [n for n in names if n != xrays.TOGETHER] if step and 0 in entry.steps else []
    return [(step, n) for n in names] + [(0, n) for n in at_init]


def xray_command(entry: Entry, step: int) -> str:
    """Return the command that measures the same; an imported run needs a text `FILE`."""
    data = " --text FILE" if entry.imported else ""
    if step == entry.steps[-1]:
        return f"workbench xray {shlex.quote(entry.path)}{data}"
    metrics = " ".join(f"-m {name}" for name in xrays.METRICS)
    return f"workbench measure {shlex.quote(entry.path)} {metrics} --steps 0,{step} --documents {xrays.DOCUMENTS}{data}"


def _answer(source: Source, link: Link, name: str) -> Drawing:
    """One X-ray figure with its sentence: of A, or of A, B and A - B."""
    check_part(link, "model")
    subjects = source.subjects(link)
    for subject in subjects:
        if absent := missing(source, subject):
            raise WorkbenchError(f"{subject.title}: not measured yet: {', '.join(n.replace('_', ' ') for n in absent)}")
    frames = xrays.comparable([xray_records(source, s).assign(architecture=s.entry.series) for s in subjects])
    sentences = []
    for s, frame in zip(subjects, frames, strict=True):
        if name == "sinks" and (frame["metric"] == "found_sinks").any():  # with the run's own names of tokens
            words = xrays.sinks_text(frame, xrays.token_name(Run.open(s.entry.path)))
        else:
            words = xrays.SENTENCES[name](frame)
        sentences.append(f"{s.tag}: {words}" if s.tag else words)
    sentence = " ".join(sentences)
    parts = [xrays.rows_of(name, frame) for frame in frames]
    figures = [(s.title, xrays.drawn(name, rows)) for s, rows in zip(subjects, parts, strict=True)]
    if len(parts) == 1:
        return Drawing(plots.narrow(figures[0][1], HALF_PAGE), parts[0], sentence)
    minus = plots.difference(parts[0], parts[1])
    if len(minus):
        figures.append((plots.MINUS, xrays.drawn(name, minus)))
    else:
        sentence += f" No {plots.MINUS}: no layer in common."
    named = [p.assign(architecture=s.series) for s, p in zip(subjects, parts, strict=True)]
    table = pd.concat([*named, minus], ignore_index=True)
    return Drawing(plots.beside(figures, str(figures[0][1].layout.title.text)), table, sentence)


@view("start")
def concentration(source: Source, link: Link) -> Drawing:
    """Concentration of attention by layer, and on what: the first position, nearness, or particular tokens."""
    return _answer(source, link, "concentration")


@view("start")
def sinks(source: Source, link: Link) -> Drawing:
    """Attention of every head to the first token, and the norm of that token's value."""
    return _answer(source, link, "sinks")


@view("start")
def token_share(source: Source, link: Link) -> Drawing:
    """Share of the variance of values that the token explains."""
    return _answer(source, link, "token_share")


@view("start")
def residual(source: Source, link: Link) -> Drawing:
    """Loss change when deep values are replaced by their token's mean, and by zero."""
    return _answer(source, link, "residual")


XRAY = {"concentration": concentration, "sinks": sinks, "token_share": token_share, "residual": residual}


# ---- verdicts on claims ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judgement:
    """A claim, its verdict from the stored records, and the measures that it needs and that are not stored."""

    claim: Claim
    verdict: Verdict
    missing: tuple[str, ...]

    @property
    def decided(self) -> bool:
        """True if the runs could test the claim, also without a clear result."""
        return self.verdict.status in DECIDED


def verdicts_key(source: Source, link: Link) -> tuple[Any, ...]:
    """Key of the verdicts: the finished runs and when they last changed."""
    return ("verdicts", *((e.path, e.stamp) for e in _finished(source, link)))


def _judged_runs(source: Source, link: Link) -> Sequence[Entry]:
    """All runs of the folder, of one experiment (`alone=1`), or of the shipped studies (`shipped=1`)."""
    if link.on("alone"):
        return source.group(link)
    runs = source.shipped() if link.on("shipped") else source.catalogue()
    return [e for e in runs.entries if Path(runs.folder) in Path(e.path).parents]


def _finished(source: Source, link: Link) -> list[Entry]:
    finished = [e for e in _judged_runs(source, link) if e.finished]
    if not finished:
        raise BadData("no finished run: there is nothing to judge yet")
    return finished


def judgements(source: Source, link: Link) -> tuple[Judgement, ...]:
    """Return the judgement of every claim from the records of the finished runs; nothing is measured."""
    verdicts: Verdicts = source.keep(verdicts_key(source, link), lambda: load_or_judge(source, link))
    source.problems.update(verdicts.problems)
    return _judgements_of(verdicts)


def shipped_verdict(source: Source, claim: str) -> Judgement | None:
    """Return the stored judgement of a claim on the shipped studies; None if it is not stored for these claims and runs."""
    link = Link("start", {"shipped": "1"})
    if not any(e.finished for e in _judged_runs(source, link)):
        return None

    def load() -> Verdicts | None:
        folder, marked = Path(source.shipped().folder), stored_verdicts.mark(_finished(source, link))
        return stored_verdicts.load_verdicts(folder, marked)

    stored = source.keep(("stored", *verdicts_key(source, link)), load)
    return None if stored is None else next((j for j in _judgements_of(stored) if j.claim.name == claim), None)


def _judgements_of(verdicts: Verdicts) -> tuple[Judgement, ...]:
    return tuple(
        Judgement(c, verdicts.of[c.name], tuple(m for m in c.metrics if m not in verdicts.metrics)) for c in chosen()
    )


def load_or_judge(source: Source, link: Link) -> Verdicts:
    """Load the verdicts stored beside the runs, or judge; new verdicts are stored in a folder of the user."""
    entries, of_user = _finished(source, link), source.own() and not link.on("shipped")
    folder = Path((source.catalogue() if of_user else source.shipped()).folder)
    marked = "" if link.on("alone") else stored_verdicts.mark(entries)
    if marked and (stored := stored_verdicts.load_verdicts(folder, marked)) is not None:
        return stored
    result = source.judge(entries)
    if marked and of_user:
        with contextlib.suppress(WorkbenchError):  # a read-only folder
            stored_verdicts.save_verdicts(folder, marked, result)
    return result


def analyze_command(source: Source, link: Link, question: str | None = None) -> str:
    """Return the command that measures and judges the claims."""
    entries, runs = _judged_runs(source, link), source.shipped() if link.on("shipped") else source.catalogue()
    folder, stem = Path(entries[0].path).parent, re.match(r"^[\w+.-]*?[-_]", entries[0].name)
    alike = [e.name for e in source.listed() if stem and e.name.startswith(stem[0])]
    if not link.on("alone") or len(entries) == len(source.listed()):
        paths = shlex.quote(runs.folder)
    elif stem and alike == [e.name for e in entries]:
        paths = f"{shlex.quote(str(folder / stem[0]))}*"
    else:
        paths = " ".join(shlex.quote(e.path) for e in entries)
    return f"workbench analyze {paths}{f' --question {question}' if question else ''} --out results"


TOPICS = {
    "loss": "Loss and its cost", "place": "Place of the residual", "optimisation": "Ease of optimisation",
    "concentration": "Concentration of attention", "sinks": "Attention sinks", "gates": "Gates, scales and norms",
    "smoothing": "Similarity of tokens", "tokens": "Identity of the token", "depth": "Values of deep layers",
    "cross_layer": "Cross-layer attention", "sharing": "Shared values", "averages": "Averages over depth",
    "induction": "Speed of induction", "downstream": "Downstream tasks",
}  # fmt: skip
"""Each question of the claims as the label of a bar."""


def verdicts_table(judged: Sequence[Judgement]) -> pd.DataFrame:
    """A row for each claim."""
    return pd.DataFrame([
        {"question": j.claim.question, "claim": j.claim.name, "says": j.claim.text,
         "verdict": j.verdict.words, "because": j.verdict.details, "runs": len(j.verdict.runs),
         "not measured": ", ".join(j.missing), "published": j.claim.published, "source": j.claim.source}
        for j in judged
    ])  # fmt: skip


@view("start")
def verdicts(source: Source, link: Link) -> Drawing:
    """Claims that these runs support, refute or leave open, by question."""
    check_part(link, "verdicts")
    judged = judgements(source, link)
    tested = [j for j in judged if j.verdict.status != "not_checkable"] or judged
    statuses = [(TOPICS[j.claim.question], j.claim.name, j.verdict.status) for j in tested]
    folded = f"; {len(judged) - len(tested)} claims that these runs cannot check are left out"
    folded = folded if len(tested) < len(judged) else ""
    under = f"{len(_finished(source, link))} finished runs; stored records only; click a claim to read it{folded}"
    chance = expected_by_chance([j.verdict for j in judged])
    return Drawing(plots.verdicts_figure(statuses, under), verdicts_table(judged), chance)


@view("start")
def verdict(source: Source, link: Link) -> Drawing:
    """The numbers behind one claim's verdict: the intervals that decide it, or the claim's figure."""
    check_part(link, "verdicts")
    all_judged = judgements(source, link)
    judged = judged_claim(all_judged, link)
    numbers, sentence = judged.verdict.adjusted(), judged.verdict.details
    if len(numbers) and {"comparison", "value", "low", "high"} <= set(numbers.columns):
        title = judged.claim.name.replace("_", " ").capitalize()
        tested = [j.verdict for j in all_judged if math.isfinite(j.verdict.p)]
        tests = sum(len(v.tests) for v in tested)
        adjusted = f"{tests} tests of {len(tested)} claims"
        adjusted = adjusted if judged.verdict.alone is not None and tests > 1 else ""
        sentence += " Intervals in this sentence are those before Holm's correction." if adjusted else ""
        return Drawing(plots.intervals(numbers, title, judged.verdict.setting, adjusted=adjusted), numbers, sentence)
    from workbench.claims.collect_evidence import stored  # imports torch

    runs = [e for e in _finished(source, link) if e.name in set(judged.verdict.runs)]
    evidence, _ = stored(runs, record_cache=source.cache.records, telemetry_cache=source.cache.telemetry)
    drawn, rows = claim_figure(judged.claim, judged.verdict, evidence)
    if drawn is None:
        raise WorkbenchError("this claim has no figure here; its sentence says why")
    return Drawing(drawn, rows, sentence)


def runs_behind(source: Source, judged: Judgement) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a row for each run that a verdict compares, with its judged quantities, and the records behind it.

    These are the step of its sink or of learning to copy, its final loss and the difference from the Transformer of its seed, and the
    last value of the claim's measure. `address` of a row is a link that shows the run on the Training page.
    """
    entries = [e for e in source.catalogue().entries if e.name in set(judged.verdict.runs)]
    models = plots.ordered(e.series for e in entries)  # the Transformer first, with what is compared with it
    entries.sort(key=lambda e: (models.index(e.series), e.seed))
    shows = dict(judged.claim.shows)
    metric = str(shows.pop("metric", None) or next(iter(judged.claim.metrics), "loss"))
    metric = metric if metric != "against_loss" else judged.claim.metrics[0]
    logged = metric in TELEMETRY or not any(metric in e.measured for e in entries)
    name = "validation_loss" if metric == "loss" and logged else metric
    rows = source.telemetry(entries, [name]) if logged else one_sample(source.records(entries, [name]))
    for axis, value in {"variant": None, **shows}.items():
        if value is not Ellipsis:
            rows = rows[rows[axis].isna() if value is None else rows[axis] == value]
    rows = rows[rows["control"].isna()]
    columns = dict[str, Any]()
    if len(rows) and (metric == "copy_loss" or (metric == "sink_mass" and judged.claim.steps == "series")):
        formed = (formation_steps if logged else sink_steps)(rows).set_index("run")
        late = "not formed by step " + formed["last_step"].astype(str)
        words = formed["formed"].mask(formed["formation_step"].isna(), late)
        columns["step of learning to copy" if logged else f"step of sink onset (strongest head above {SINK})"] = words
    if judged.claim.final_loss:
        columns |= final_losses(source, entries)
    last = at_last_step(rows)
    if metric == "sink_mass":
        heads = last.groupby(["run", "layer", "head"])["value"].mean()
        columns["last sink mass, strongest head"] = heads.groupby("run").max()
    elif metric == "tokens_per_second":
        columns["tokens per second, median over training"] = rows.groupby("run")["value"].median()
    elif len(last) and not (judged.claim.final_loss and metric in ("validation_loss", "loss_difference")):
        columns[f"last {metric.replace('_', ' ')}, mean"] = last.groupby("run")["value"].mean()
    table = pd.DataFrame([
        {"run": e.name, "model": architecture_label(e.series), "seed": e.seed,
         **{column: values.get(e.name) for column, values in columns.items()},
         "address": str(Link("training", {"set": e.group, "find": e.name}))}
        for e in entries
    ])  # fmt: skip
    both, final = dict.fromkeys((metric, "validation_loss")), judged.claim.final_loss
    written = logged_rows(source, entries, [m for m in both if (logged if m == metric else final)])
    return table, pd.concat([one_sample(source.records(entries, judged.claim.metrics)), written], ignore_index=True)


def final_losses(source: Source, entries: Sequence[Entry]) -> dict[str, dict[str, float]]:
    """Final validation loss by run, and minus the loss of the Transformer of its seed at its rate, or at its only rate."""
    rows, group = source.telemetry(entries, ["validation_loss"]), {e.name: e.group for e in entries}
    rows = at_last_step(mean_of_domains(rows[rows["variant"].isna() & rows["control"].isna()]))
    complete = rows["step"] == rows.groupby(rows["run"].map(group))["step"].transform("max")
    losses = {str(run): float(loss) for run, loss in rows[complete].set_index("run")["value"].items()}
    bases = [e for e in entries if e.series == VANILLA and e.name in losses]
    paired = dict[str, float]()
    for entry in (e for e in entries if e.name in losses):
        of_seed = {e.group: losses[e.name] for e in bases if (e.seed, e.title) == (entry.seed, entry.title)}
        if (base := of_seed.get(entry.group) if len(of_seed) > 1 else next(iter(of_seed.values()), None)) is not None:
            paired[entry.name] = losses[entry.name] - base
    return {"final validation loss": losses} | ({"minus Transformer, same seed": paired} if paired else {})


def judged_claim(judged: Sequence[Judgement], link: Link) -> Judgement:
    """The link's claim, else the first one that is decided, one with a clear result if there is any."""
    names = {j.claim.name: j for j in judged}
    decided = sorted((j for j in judged if j.decided), key=lambda j: j.verdict.status == "unresolved")
    return names[link.choice("claim", names, decided[0].claim.name if decided else None)]


# ---- the demo --------------------------------------------------------------------------------------------------------

DEMO = ("sinks", "sinks_without_start", "race", "text")
DEMO_CLAIMS = (
    "sharing_values_delays_the_sink", "value_paths_speed_up_induction", "lower_loss", "sinks_drains_and_peaks_vanish_together",
    "fewer_parameters",
)  # fmt: skip
SINK_PANELS = ("sink_mass", "value_drain", "importance_entropy")
STATUS_FILE, MAX_QUIET_S = ".demo.json", 180  # seconds without a new file, after which a demo has stopped
NO_TEXT = "no trained text model yet; `workbench demo --all` trains some"


@dataclass(frozen=True)
class DemoStatus:
    """Progress of a demo; `running` is False after its end or if it has stopped."""

    finished: bool
    running: bool
    ready: int
    planned: int
    left_s: float | None
    failed: dict[str, str]


def demo_status(folder: Path) -> DemoStatus | None:
    """Return the progress of the demo in a folder; None without a demo or with a damaged status file."""
    path = folder / STATUS_FILE
    try:
        saved = read_json(path)
        newest = max([path.stat().st_mtime, *(p.stat().st_mtime for p in folder.glob("*/telemetry"))])
        left = saved.get("left_s")
        return DemoStatus(
            bool(saved["finished"]), not saved["finished"] and time.time() - newest <= MAX_QUIET_S, len(saved["ready"]),
            len(saved["models"]), None if left is None else float(left),
            {str(k): str(v) for k, v in dict(saved["failed"]).items()},
        )  # fmt: skip
    except (WorkbenchError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def demo_runs(source: Source, *experiments: str) -> list[Entry]:
    """The demo's runs of some experiments, by the names it gives them."""
    names = re.compile(rf"({'|'.join(experiments)})-.+-s\d+")
    return [e for e in source.listed() if names.fullmatch(e.name)]


def only_demo(source: Source) -> bool:
    """Return True if a demo was started in the folder and no other runs were trained in it; imported models do not count."""
    trained = [e for e in source.listed() if not e.imported]
    return demo_status(source.folder) is not None and len(demo_runs(source, *DEMO)) == len(trained)


def _shipped(source: Source, names: str) -> list[Entry]:
    return [
        dataclasses.replace(e, series=e.architecture) for e in source.shipped().entries if re.fullmatch(names, e.name)
    ]


def race_models(source: Source) -> list[Entry]:
    """The demo's models of the race to copying; without any, the models of the shipped study at its lowest rate."""
    shipped = r"induction-(svformer|resformer|transformer|residual_k)-lr=0\.003-s\d+"
    return demo_runs(source, "race") or _shipped(source, shipped)


def text_models(source: Source) -> list[Entry]:
    """The demo's text models; with fewer than two seeds, the models of a shipped study."""
    own = demo_runs(source, "text")
    if len({e.seed for e in own}) > 1:
        return own
    return _shipped(source, r"value_paths-(transformer|resformer|svformer|neutreno|denseformer)-s\d+") or own


def sink_records(source: Source) -> pd.DataFrame:
    """Records of the models on the task with an idle head; without a start token they are a separate series."""
    parts = [source.records(demo_runs(source, name), SINK_PANELS) for name in ("sinks", "sinks_without_start")]
    bare = parts[1].assign(architecture=parts[1]["architecture"].astype("str") + f"{plots.DETAIL}without start token")
    return one_sample(pd.concat([parts[0], bare], ignore_index=True))


@view("start")
def forming(source: Source, link: Link) -> Drawing:
    """The strongest head per run over training: attention to the start token, its value's norm, and concentration."""
    check_part(link, "demo")
    frame = sink_records(source)
    mass = frame[(frame["metric"] == "sink_mass") & frame["control"].isna() & frame["variant"].isna()]
    if mass.empty:
        raise WorkbenchError("no checkpoint is measured yet; the first appears within a minute of `make demo`")
    last = mass[mass["step"] == mass.groupby("run")["step"].transform("max")]
    top = last.loc[last.groupby("run")["value"].idxmax(), ["run", "layer"]]
    rows = frame.merge(top, on=["run", "layer"])  # one head a layer
    rows = rows[rows["variant"].isna() & (rows["site"].isna() | (rows["site"] == "v"))]
    rows = rows.assign(layer=None, head=None, metric=pd.Categorical(rows["metric"], SINK_PANELS, ordered=True))
    rows = rows.sort_values("metric", kind="stable").astype({"metric": "str"})
    return Drawing(
        plots.plot(rows, form="steps", title="Attention sink on the start token, strongest head of each run"), rows
    )


@view("start")
def race(source: Source, link: Link) -> Drawing:
    """Copy loss per model over training, and its copying step by run."""
    check_part(link, "demo")
    frame = source.telemetry(race_models(source), ["copy_loss"])
    frame = frame[frame["variant"].isna()]
    if frame.empty:
        raise WorkbenchError("no copy loss yet; `workbench demo --full` trains models that copy")
    return Drawing(plots.race_figure(frame), frame)


def concentration_models(source: Source) -> list[Entry]:
    """The Transformers and ResFormers of a shipped study on text."""
    return _shipped(source, rf"losses-(transformer|resformer)-lr={re.escape(RATE)}-s\d+")


@view("start", "concentrated")
def concentration_by_layer(source: Source, link: Link) -> Drawing:
    """Importance entropy by layer of a Transformer and a ResFormer trained on text."""
    check_part(link, "demo")
    rows = one_sample(source.records(concentration_models(source), ["importance_entropy"]))
    rows = rows[rows["variant"].isna() & rows["step"].isin([0, rows["step"].max()])]
    if rows.empty:
        raise WorkbenchError(NO_TEXT)
    last = rows[(rows["step"] == rows["step"].max()) & rows["control"].isna()]
    seeds = {
        str(name): part.pivot_table(index="seed", columns="layer", values="value", aggfunc="mean").astype(float)
        for name, part in last.groupby("architecture", observed=True)
    }
    sentence = ""
    if len(seeds) == 2:
        layers = seeds["resformer"].columns.intersection(seeds["transformer"].columns)
        each = [paired_seeds(seeds["resformer"][n].dropna(), seeds["transformer"][n].dropna()) for n in layers]
        each = [one.widened(factor) for one, factor in zip(each, holm_factors([one.p for one in each]), strict=True)]
        differ = [f"layer {n:.0f}: {one}" for n, one in zip(layers, each, strict=True) if one.sign]
        means = [one.value for one in each]
        about = f"{min(one.n for one in each)} paired seeds; intervals as wide as Holm's correction over {len(each)} layers demands"
        listed = "; ".join(differ) or f"{min(means):+.3g} to {max(means):+.3g}, every interval includes 0"
        sentence = (
            f"At a learning rate of {RATE}, {len(differ) or 'none'} of {len(each)} layers differ: ResFormer − Transformer in nats "
            f"{listed} ({about})."
        )
    return Drawing(plots.plot(rows, form="profile", title="Importance entropy by layer"), rows, sentence)


@view("start", "identity")
def identity_share(source: Source, link: Link) -> Drawing:
    """Share of a layer's values that the token explains, before and after training."""
    check_part(link, "demo")
    frame = one_sample(source.records(text_models(source), ["token_identity_share"]))
    rows = frame[frame["site"].isin(["own_v", "v"]) & frame["control"].isna()]
    if rows.empty:
        raise WorkbenchError(NO_TEXT)
    return Drawing(plots.plot(rows, form="profile", title="Token information in values"), rows)


@view("start", "replaced")
def replaced_values(source: Source, link: Link) -> Drawing:
    """Loss change when deep values are replaced by their token's mean, or by zero."""
    check_part(link, "demo")
    rows = one_sample(source.records(text_models(source), ["value_ablation"]))
    if rows.empty:
        raise WorkbenchError(NO_TEXT)
    return Drawing(plots.ablation(rows), rows)


def demo_models(source: Source, experiment: str) -> list[Entry]:
    """The demo's models of an experiment that have several checkpoints."""
    return [e for e in demo_runs(source, experiment) if len(e.steps) > 1]


def copying_models(source: Source, link: Link) -> tuple[list[Entry], list[int], int]:
    """Two models of the race, their common steps and the chosen step."""
    models = {e.name: e for e in demo_models(source, "race")}
    if not models:
        raise WorkbenchError("no model of the race has a checkpoint yet")
    pair = []
    for side, architecture in (("left", "svformer"), ("right", "transformer")):
        default = next((name for name, e in models.items() if e.architecture == architecture), next(iter(models)))
        pair.append(models[link.choice(side, models, default, "model of the race")])
    return pair, *_common_step(pair, link.whole("at"), 2)


def sink_models(source: Source, link: Link) -> tuple[list[Entry], list[int], int]:
    """Return a model per architecture on the task with an idle head, their common steps and the selected step."""
    first: dict[str, Entry] = {}
    for entry in demo_models(source, "sinks"):
        first.setdefault(entry.architecture, entry)
    if not first:
        raise WorkbenchError("no model of this experiment has a checkpoint yet")
    models = [first[name] for name in plots.ordered(first)]
    return models, *_common_step(models, link.whole("when"), 3)


def _common_step(models: Sequence[Entry], asked: int | None, thirds: int) -> tuple[list[int], int]:
    """The steps that all models have, and the chosen one; by default the one after so many thirds of them."""
    common = sorted(set.intersection(*(set(e.steps) for e in models)))
    step = common[min(thirds * len(common) // 3, len(common) - 1)] if asked is None and common else asked
    if step not in common:
        raise WorkbenchError(f"these models have no common checkpoint at step {step}; choose from {common}")
    return common, int(step)


@view("start")
def resting_heads(source: Source, link: Link) -> Drawing:
    """Attention map of the head with the strongest sink after training, in each architecture at one step."""
    check_part(link, "demo")
    models, _, step = sink_models(source, link)
    which = "most attention to the start token at the last measured step"
    return _maps(source, models, step, "sink_mass", "Strongest sink head", which)


@view("start")
def copying_heads(source: Source, link: Link) -> Drawing:
    """Attention map of the head with the highest induction score after training, in two models at one step."""
    check_part(link, "demo")
    models, _, step = copying_models(source, link)
    which = "highest induction score at the last measured step"
    return _maps(source, models, step, "induction_score", "Best copying head", which)


def _maps(source: Source, models: Sequence[Entry], step: int, metric: str, title: str, which: str) -> Drawing:
    """Attention maps at one step of the head that is highest by a measure at each run's last measured step."""
    maps, tables = [], []
    for entry in models:
        frame = one_sample(source.records([entry], [metric]))
        rows = frame[frame["head"].notna() & frame["variant"].isna() & frame["control"].isna()]
        if rows.empty:
            raise WorkbenchError(f"{metric.replace('_', ' ')} of {entry.name} is not measured yet")
        rows = rows[rows["step"] == rows["step"].max()]
        layer, head = map(int, rows.sort_values("value").iloc[-1][["layer", "head"]])
        subject, text = RunAtStep(entry, step), example(entry)
        window = source.derive(prompts.attention_map, prompts.attention_inputs, subject, text, layer, head, most=256)
        name = f"{plots.label(entry.series)} s{entry.seed}: layer {layer}, head {head}"
        maps.append((name, window.weights, source.tokens(subject, text)))
        query, key = np.tril_indices(len(window.weights))
        where = {"run": entry.name, "step": step, "layer": layer, "head": head, "query": query, "key": key}
        tables.append(pd.DataFrame({**where, "attention": window.weights[query, key]}))
    drawn = plots.attention_pair(maps, title, f"{which}; one fixed sequence; training step {step}")
    return Drawing(drawn, pd.concat(tables, ignore_index=True))
