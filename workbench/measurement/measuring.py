"""Checkpoint + metrics + data -> records, each number with its error bar.

What is stored already under the same weights, data, metric and options is not run again. Under `accelerate launch` the
processes share the work and all return the same records; the first one keeps them.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from workbench import distributed
from workbench.console import Progress
from workbench.data.sources import Sample
from workbench.errors import BadData, NotMeasured, PaddingLeftOut, UnknownName, WorkbenchError, warn_caller
from workbench.files import digest
from workbench.interventions import INTERVENTIONS, Intervention
from workbench.interventions.base import mean_row, trainable
from workbench.jobs.running import Job, Workers, results
from workbench.kernels import attention_form
from workbench.measurement.forward_pass import (
    LAYER_WEIGHTS,
    Reduction,
    collect,
    passes_of,
    read_segments,
    reductions_of,
    rows_of,
    samples_of,
)  # fmt: skip
from workbench.measurement.subjects import Subject, Tables, opened_run, refuse_unfit, sample_of, subjects
from workbench.metrics import METRICS, Metric
from workbench.models.cache import KeyValueCache
from workbench.models.transformer import Transformer
from workbench.names import ACTIVATIONS, STATISTICS
from workbench.runs.records import SAMPLE_COLUMNS, left_out, provenance, records, typed

Measure = Metric | Intervention
CACHED = 16  # tokens behind the bytes of a key-value cache, which grow in proportion


def measure(
    models_or_runs: Any,
    metrics: str | Sequence[str],
    data: Any = None,
    *,
    steps: str | int | list[int] = "last",
    n: int = 64,
    T: int | None = None,
    batch: int = 8,
    seed: int = 0,
    device: str | None = None,
    progress: Progress | None = None,
    sites: Mapping[str, Sequence[str]] | None = None,
    workers: Workers = 1,
) -> pd.DataFrame:
    """Measure models or runs and return records, one tidy row per number.

    Args:
        models_or_runs: a model, run, path, or a list of them.
        metrics: names from `METRICS` and `INTERVENTIONS`, or one name.
        data: ids [n, T], text, a path or a corpus; default the run's validation split, one window per document.
        steps: for runs: `last`, `first`, `ends`, `all`, a step or a list.
        n: documents at most; ids and text are taken whole. T: tokens of each (default the run's training length; ids and
            text: all of theirs). batch: sequences at a time; results do not depend on it. seed: which windows.
        sites: of a metric named here only these of its sites, where the others would cost memory for nothing.
        workers: 1 measures in this process; else each step of each run is a job, see `workbench.jobs.running.run_jobs`.

    Of an observed module's batches padding is left out, and documents that stand in one row are measured each by itself: what the
    attention hides and the masks given to the module say which. A row's value is the mean over its documents, weighted by their
    tokens, and tokens whose label is -100 do not count in the loss. `PaddingLeftOut` says the share, `NotMeasured` what has no numbers.

    Records of a run are kept under `<run>/records`, not measured twice. Raises `UnknownName`, `BadData`, `WorkbenchError`, and
    `OnlyHere`, which has the records, where all is measured and cannot be put up.
    """
    wanted = [_find(name) for name in ([metrics] if isinstance(metrics, str) else metrics)]
    only = {name: _sites(_find(name), chosen) for name, chosen in (sites or {}).items()}
    if not wanted or batch < 1 or n < 1:
        raise WorkbenchError(f"{len(wanted)} metrics, batch={batch}, n={n}: each must be at least 1")
    if workers != 1:
        how = partial(measure, n=n, T=T, batch=batch, seed=seed, device=device, sites=sites)
        return _by_jobs(models_or_runs, metrics, data, steps, workers, progress, how)
    chosen, samples = subjects(models_or_runs, steps, distributed.join(device)), dict[Any, Sample]()
    for subject in chosen:
        if (shared := _sharing(subject)) not in samples:
            samples[shared] = sample_of(data, subject, n, T, seed)
            refuse_short(samples[shared].ids.shape[1], [item.name for item in wanted])
        refuse_unfit(samples[shared], subject)
    frames, absent = list[pd.DataFrame](), list[str]()
    for subject in _told(chosen, progress):
        with distributed.alone(getattr(subject.in_hand, "is_sharded", False)):
            frames.append(_measure_one(subject, wanted, samples[_sharing(subject)], batch, only))
        names = set(frames[-1]["metric"])
        absent += [_why_absent(subject, item) for item in wanted if item.name not in names]
        subject.forget()
        subject.send()
    frame = pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0]
    if frame.empty:
        raise WorkbenchError(absent[0])
    for words in dict.fromkeys(absent):
        warn_caller(words, NotMeasured)
    for words in dict.fromkeys(filter(None, map(left_out, frame["provenance"].unique()))):
        warn_caller(words, PaddingLeftOut)
    return _sent(frame, chosen)


def _why_absent(subject: Subject, item: Measure) -> str:
    """Why a measurement has no rows."""
    model = subject.model
    if item.name in subject.absent:
        return subject.absent[item.name]
    if isinstance(item, Intervention):
        return f"{item.name} has no numbers: {model.architecture} has no path or module that it changes"
    for site in item.sites or (None,):
        for alias in item.reads(site):
            points = [ACTIVATIONS[alias].hook.format(layer=layer) for layer in range(model.config.n_layers)]
            if point := next((p for p in points if p not in model.hook_dict), None):
                why = model.absent.get(point, f"{model.architecture} has none")
                return f"{item.name} has no numbers: {point} does not exist: {why}"
    weights = ", ".join(name for name in item.arguments if name in LAYER_WEIGHTS)
    return f"{item.name} has no numbers: {model.architecture} shows no {weights or 'layer with all that it reads'}"


def _sent(frame: pd.DataFrame, subjects: Sequence[Subject]) -> pd.DataFrame:
    """The records of all; raises `OnlyHere` with them where those of one could not be put up."""
    if failed := [subject.only_here for subject in subjects if subject.only_here is not None]:
        failed[0].made = frame
        raise failed[0]
    return frame


def _told(chosen: Sequence[Subject], progress: Progress | None) -> Iterator[Subject]:
    """Each subject, told before it is measured, and the end of all."""
    heard: Progress = progress if progress and distributed.rank() == 0 else lambda *_: None
    for done, subject in enumerate(chosen):
        heard(done, len(chosen), f"{subject.axes['run']} step {subject.axes['step']}")
        yield subject
    heard(len(chosen), len(chosen), "")


def _by_jobs(
    things: Any,
    metrics: Any,
    data: Any,
    steps: Any,
    workers: Workers,
    progress: Progress | None,
    how: Callable[..., Any],
) -> pd.DataFrame:
    """The same rows in the same order, of a job for each step of each run."""
    opened = [opened_run(thing) for thing in (things if isinstance(things, list | tuple) else [things])]
    jobs = [
        Job(f"{run.path} step {step}", partial(how, run, metrics, data, steps=[step]))
        for run in opened
        for step in run.resolve(steps)
    ]
    return pd.concat(
        results(jobs, workers, progress, list(dict.fromkeys(run.path.parent for run in opened))), ignore_index=True
    )


def refuse_short(T: int, metrics: Iterable[str]) -> None:
    """Raise `WorkbenchError` where a metric needs longer sequences than T tokens."""
    for item in map(_find, metrics):
        if item.min_length > T:
            raise WorkbenchError(f"{item.name} needs sequences of {item.min_length} tokens; these have {T}")


def _find(name: str) -> Measure:
    measures: dict[str, Measure] = {**METRICS, **INTERVENTIONS}
    if name not in measures:
        raise UnknownName("metric", name, measures)
    return measures[name]


def _sites(item: Measure, sites: Sequence[str]) -> tuple[str, ...]:
    known = item.sites if isinstance(item, Metric) else ()
    if strange := [site for site in sites if site not in known]:
        raise UnknownName(f"site of {item.name}", strange[0], known)
    return tuple(sites)


def _sharing(subject: Subject) -> Any:
    """Subjects for which this is equal read the same sequences: runs on one corpus, or anything on given ids."""
    if subject.run is None:
        return id(subject)
    return str(subject.run.path.parent), str(subject.run.info["data"]), subject.run.train.T


def _measure_one(
    subject: Subject, wanted: Sequence[Measure], sample: Sample, batch: int, only: Mapping[str, Sequence[str]]
) -> pd.DataFrame:
    whole = {item.name: _key(subject, sample, item) for item in wanted}
    there = list(subject.get(sample, [whole[name] for name in only if name in whole]))  # of all sites: will do too
    there = distributed.all_gather(there)[0] if only else there
    only = {name: sites for name, sites in only.items() if whole.get(name) not in there}
    keys = {_key(subject, sample, item, only.get(item.name, ())): item for item in wanted}
    stored = subject.get(sample, list(keys))
    if distributed.world_size() > 1:  # what the first one knew: it may have stored more since the others read
        stored = subject.get(sample, distributed.all_gather(list(stored))[0])
    missing = {key: item for key, item in keys.items() if key not in stored}
    if missing:
        fresh = _compute(subject, missing, sample, batch, only)
        if subject.run is None or distributed.rank() == 0:
            subject.put(sample, fresh)
        distributed.all_gather(None)  # all processes wait until they are kept
        stored |= {key: frame for key, (frame, _) in fresh.items()}
    frame = pd.concat([stored[key] for key in keys], ignore_index=True)
    return typed(frame.assign(**subject.axes, data=sample.label))  # a renamed run, or file, keeps its numbers


def _key(subject: Subject, sample: Sample, item: Measure, sites: Sequence[str] = ()) -> str:
    """What one measurement is kept under."""
    machine = item.machine if isinstance(item, Intervention) else ()
    return digest(subject.weights, sample.hash, item.name, item.version, *machine, *sites)


def _training(subject: Subject, sample: Sample) -> Any:
    """Where training sequences come from: the run's own data, or what was given where its training data are unknown."""
    if subject.run is None or subject.run.info["data"]["kind"] == "imported":
        return sample.source
    return subject.run.data


def _compute(
    subject: Subject, missing: Mapping[str, Measure], sample: Sample, batch: int, only: Mapping[str, Sequence[str]]
) -> dict[str, Tables]:
    model = subject.model
    if model.foreign is None:  # an observed module stays in its mode, and is refused where dropout is active
        model.eval()
    for item in missing.values():
        if model.foreign is not None and isinstance(item, Metric) and item.form == "derived":
            raise WorkbenchError(
                f"{item.name} reads weights by our names, which an observed module does not have; leave it out"
            )
    metrics = {k: m for k, m in missing.items() if isinstance(m, Metric) and m.form != "derived"}
    streamed = {k: reductions_of(m, sample.ids, only.get(m.name)) for k, m in metrics.items()}
    together = [r for reductions in streamed.values() for r in reductions]
    sample = replace(sample, segments=read_segments(model, sample, together, batch))
    _refuse_packed(missing.values(), sample)
    for key, metric in metrics.items():
        if why := _too_short(metric, streamed[key][0], sample):
            subject.absent[metric.name], streamed[key] = why, []
    together = [r for reductions in streamed.values() for r in reductions]
    *before, last = passes_of(model, sample, together)
    for reductions in before:
        collect(model, sample, reductions, batch)
        for reduction in (r for r in reductions if r.metric.form != "per_sequence"):
            reduction.rows = list(rows_of(reduction, sample, model.config.n_layers))
            reduction.parts.clear()
    collect(model, sample, last, batch)

    def results(key: str, item: Measure) -> Tables:
        rows: Iterable[dict[str, Any]]
        samples: Iterable[dict[str, Any]] = ()
        if key in streamed:
            rows = (row for reduction in streamed[key] for row in rows_of(reduction, sample, model.config.n_layers))
            samples = (
                row for reduction in streamed[key] for row in samples_of(reduction, sample, model.config.n_layers)
            )
        elif isinstance(item, Intervention):
            rows = item.function(model, sample, _training(subject, sample), batch)
        else:
            rows = _derived_rows(model, item, sample)
        common = _common(subject, key, item, sample)
        found = records(common | row for row in rows), records((common | r for r in samples), SAMPLE_COLUMNS)
        for reduction in streamed.get(key, ()):
            reduction.parts.clear()  # before an experiment needs the room
        return found

    return distributed.scatter({key: partial(results, key, item) for key, item in missing.items()})


def _common(subject: Subject, key: str, item: Measure, sample: Sample) -> dict[str, Any]:
    """What all rows of one measurement share."""
    weight, segments = subject.model.embed.weight, sample.segments
    lengths = [sample.ids.shape[1]] if segments is None else [len(at) for _, at in segments.documents()]
    covered = {} if segments is None else {"left_out": round(segments.left_out, 6), "documents": len(lengths)}
    origin = provenance(
        reading=item.reading, key=key, weights=subject.weights, data=sample.hash, version=item.version,
        assumed=subject.model.assumed, torch=torch.__version__.split("+")[0], python=platform.python_version(),
        device=str(weight.device.type), dtype=str(weight.dtype).removeprefix("torch."), **_streaming(subject.model, item),
        **_doubt(item, sample), **covered,
    )  # fmt: skip
    shared = {"metric": item.name, "data": sample.label, "T": max(lengths), "provenance": origin}
    return subject.axes | shared


def _doubt(item: Measure, sample: Sample) -> dict[str, str]:
    """Why the numbers say nothing on these tokens, where that is so."""
    if not isinstance(item, Metric) or not item.doubt:
        return {}
    texts = (
        [sample.ids]
        if sample.segments is None
        else [sample.ids[row, at][None] for row, at in sample.segments.documents()]
    )
    doubts = [doubt for doubt in map(item.doubt, texts) if doubt]
    return {"doubt": doubts[0]} if 2 * len(doubts) > len(texts) else {}


def _too_short(metric: Metric, reduction: Reduction, sample: Sample) -> str:
    """Why a metric has no numbers where a row has no document that is long enough, in words; else empty."""
    if sample.segments is None:
        return ""
    row = next((row for row in range(len(sample.ids)) if not reduction.documents(sample.segments, row)), None)
    if row is None:
        return ""
    longest = max(len(at) for at in sample.segments.documents_in(row))
    counts = " that count" if sample.segments.counted is not None and "counted" in metric.optional else ""
    return f"{metric.name} needs documents of {metric.min_length} tokens{counts}; the longest of row {row} has {longest} without padding"


def _refuse_packed(items: Iterable[Measure], sample: Sample) -> None:
    """Raise `BadData` where an experiment reads whole rows, and some of these are not one document without padding."""
    for item in items:
        if sample.segments is not None and isinstance(item, Intervention) and not item.by_document:
            raise BadData(
                f"{item.name} reads whole rows, and {100 * sample.segments.left_out:.3g} % of these positions are padding or rows hold "
                "several documents: give documents of one length, one in a row"
            )


def _streaming(model: Transformer, item: Measure) -> dict[str, str]:
    """How the attention statistics that a measure reads are taken here, where it reads any."""
    if isinstance(item, Metric) and set(STATISTICS).isdisjoint(item.arguments):
        return {}  # an experiment may read them too
    weight, joint = model.embed.weight, [getattr(block.attn, "joint", None) for block in model.blocks]
    form = attention_form(weight.device, weight.dtype, model.config.d_head)
    return {"attention": "+".join(sorted({form if one is None else "strips" for one in joint}))}


def _derived_rows(model: Transformer, metric: Metric, sample: Sample) -> Iterator[dict[str, Any]]:
    """Rows of a metric of weights or a cache (exact), or of gradients (one document at a time: mean, se, n over documents)."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    if "gradients" not in metric.arguments:
        given: dict[str, Any] = {"weights": weights}
        if "cache" in metric.arguments:
            given["cache"] = _decoded(model, sample.ids[:1, :CACHED])
        given = {name: given[name] for name in metric.arguments}
        settings: list[tuple[str | None, Mapping[str, Any]]] = [(None, {}), *metric.controls.items()]
        for control, options in settings:
            for row in metric.function(**given, **options):
                axes = {"part": row.part, "layer": row.layer, "control": control, "unit": metric.unit}
                yield axes | {"value": row.value}
        return
    variants: list[tuple[str | None, Mapping[str, Any]]] = [(None, {}), *metric.variants.items()]
    results: dict[tuple[str | None, str, int | None], list[float]] = {}
    for ids in sample.ids[:, None]:
        gradients = {output: _gradients(model, ids, output=output) for output in {v == "output" for v, _ in variants}}
        for variant, options in variants:
            for row in metric.function(gradients[variant == "output"], weights, **options):
                results.setdefault((variant, row.part, row.layer), []).append(row.value)
    for (variant, part, layer), values in results.items():
        unit = metric.units.get(variant or "", metric.unit)
        yield mean_row(torch.tensor(values, dtype=torch.double), part=part, layer=layer, variant=variant, unit=unit)


def _decoded(model: Transformer, ids: Tensor) -> KeyValueCache:
    """The 16-bit cache of a sequence, its last token read by itself as decoding does."""
    cache = model.new_cache(len(ids), dtype=torch.bfloat16)
    for part in (ids[:, :-1], ids[:, -1:]):
        model(part, return_type=None, past_kv_cache=cache)
    return cache


def _gradients(model: Transformer, ids: Tensor, *, output: bool) -> dict[str, Tensor]:
    """Gradients of the mean loss (or of the mean largest logit) with respect to every matrix; none is kept on the model."""
    named = {name: p for name, p in model.named_parameters() if p.ndim == 2}
    ids = ids.to(model.embed.weight.device)
    with torch.enable_grad(), model.lock, trainable(named.values()):
        scalar = model(ids).max(-1).values.mean() if output else model(ids, return_type="loss")
        gradients = torch.autograd.grad(scalar, list(named.values()))
    return dict(zip(named, gradients, strict=True))
