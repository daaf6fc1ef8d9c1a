"""Measurement of checkpoints: metrics on data give records with error bars.

Records that exist for the same weights, data, metric and options are reused. Under `accelerate launch`, the processes
share the work and all return the same records, and the first process stores them.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, update_wrapper
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from workbench import distributed
from workbench.console import Progress
from workbench.data.data_sources import Sample
from workbench.errors import BadData, NotMeasured, PaddingLeftOut, WorkbenchError, refuse_unknown, warn_caller
from workbench.file_io import digest
from workbench.hook_names import ACTIVATIONS, STATISTICS
from workbench.interventions import INTERVENTIONS, Intervention
from workbench.interventions.registered_experiments import mean_row, trainable
from workbench.jobs.running import Job, Workers, results
from workbench.kernels import attention_form
from workbench.measurement.forward_pass import (
    LAYER_WEIGHTS,
    Reduction,
    passes_of,
    read_segments,
    record_rows,
    reductions_of,
    run_pass,
    sample_rows,
)  # fmt: skip
from workbench.measurement.models_and_data import Subject, Tables, opened_run, refuse_unfit, sample_of, subjects
from workbench.metrics import METRICS, Metric
from workbench.metrics.base import takes_positions
from workbench.metrics.found_sinks import ColumnExcess
from workbench.models.transformer import Transformer
from workbench.runs.records import SAMPLE_COLUMNS, Records, left_out, provenance, records, typed
from workbench.statistics.sink_thresholds import FOUND_EXCESS, FOUND_LENGTH

Measure = Metric | Intervention
POSITIONS = ("first", "found")
COLUMNS = Metric(ColumnExcess, "accumulated", "share", "-1..1", "higher: attended more", "ours", min_length=2, folds=1)
"""Whether a measure of the first position misses a sink; not registered."""
CACHED = 16  # tokens of a measured key-value cache, whose bytes are proportional to tokens


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
    positions: str = "first",
    workers: Workers = 1,
) -> pd.DataFrame:
    """Measure models or runs and return records, one tidy row per number.

    Args:
        models_or_runs: A model, run, path, or a list of them.
        metrics: Names from `METRICS` and `INTERVENTIONS`, or one name.
        data: Token ids [n, T], text, path or corpus; default the run's validation split, one window per document.
        steps: Checkpoints of runs: `last`, `first`, `ends`, `all`, a step or a list.
        n: Maximum number of documents; ignored for ids and text.
        T: Tokens per document; default the run's training length, and all tokens of ids and text.
        batch: Sequences per forward pass; results do not depend on it.
        seed: Seed of the windows.
        device: Device of loaded models.
        progress: Called with (done, total, description).
        sites: Sites per metric, to save the memory of its other sites.
        positions: "first", or "found": measures of the first position (`sink_mass`, `value_drain`, ...) then use the positions that
            `sink_positions` detects in each document, and rows have the variant `found`.
        workers: 1 measures in this process; otherwise every step of every run is a job, see `workbench.jobs.running.run_jobs`.

    Returns:
        Records, which for runs are stored under `<run>/records`.

    Raises:
        UnknownName: There is no such metric, site, step or path.
        BadData: A model cannot read the data.
        OnlyHere: The records could not be uploaded; the error holds them.
        WorkbenchError: Nothing could be measured.

    Note:
        Padding in an observed module's batches is left out, and packed documents are measured separately; attention masks
        define both. A row's value is the mean over its documents, weighted by tokens, and tokens with the label -100 do not
        count in the loss. The warning `PaddingLeftOut` gives the share, `NotMeasured` lists metrics without numbers.
    """
    wanted = [_find(name, positions) for name in ([metrics] if isinstance(metrics, str) else metrics)]
    only = {name: tuple(selected) for name, selected in (sites or {}).items() if _find(name, sites=selected)}
    if not wanted or batch < 1 or n < 1:
        raise WorkbenchError(f"{len(wanted)} metrics, batch={batch}, n={n}: each must be at least 1")
    if workers != 1:
        how = partial(measure, n=n, T=T, batch=batch, seed=seed, device=device, sites=sites, positions=positions)
        return _by_jobs(models_or_runs, steps, workers, progress, partial(how, metrics=metrics, data=data))
    measured, samples = subjects(models_or_runs, steps, distributed.join(device)), dict[Any, Sample]()
    for subject in measured:
        if (shared := _sharing(subject)) not in samples:
            samples[shared] = sample_of(data, subject, n, T, seed)
            refuse_short(samples[shared].ids.shape[1], [item.name for item in wanted], positions)
        refuse_unfit(samples[shared], subject)
    frames, absent = list[pd.DataFrame](), list[str]()
    for subject in _with_progress(measured, progress):
        with distributed.alone(getattr(subject.in_hand, "is_sharded", False)):
            frames.append(_measure_one(subject, wanted, samples[_sharing(subject)], batch, only))
        names = set(frames[-1]["metric"])
        absent += [_why_absent(subject, item) for item in wanted if item.name not in names]
        subject.forget()
        subject.send()
    frame = Records(pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0])
    if frame.empty:
        raise WorkbenchError(absent[0])
    for words in dict.fromkeys(absent):
        warn_caller(words, NotMeasured)
    for words in dict.fromkeys(filter(None, map(left_out, frame["provenance"].unique()))):
        warn_caller(words, PaddingLeftOut)
    if failed := [subject.only_here for subject in measured if subject.only_here is not None]:
        failed[0].made = frame
        raise failed[0]
    return frame


def _why_absent(subject: Subject, item: Measure) -> str:
    model = subject.model
    if item.name in subject.absent:
        return subject.absent[item.name]
    if isinstance(item, Intervention):
        return f"{item.name} has no numbers: {model.architecture} has no path or module that it changes"
    for site in item.sites or (None,):
        for alias in item.reads(site):
            points = [ACTIVATIONS[alias].hook.format(layer=layer) for layer in range(model.config.n_layers)]
            if points[0] and not any(point in model.hook_dict for point in points):  # ids have none
                why = model.absent.get(points[0], f"{model.architecture} has none")
                return f"{item.name} has no numbers: {points[0]} does not exist: {why}"
    windows = "window" in item.optional or item.found
    if windows and 0 in map(model.attention_window, range(model.config.n_layers)):
        return f"{item.name} has no numbers: uniform attention is unknown where a mask hides some keys and is no sliding window"
    if item.found:
        return f"{item.name} has no numbers: no head rests on a position of these documents"
    weights = ", ".join(name for name in item.arguments if name in LAYER_WEIGHTS)
    return f"{item.name} has no numbers: {model.architecture} shows no {weights or 'layer with all of its inputs'}"


def _with_progress(measured: Sequence[Subject], progress: Progress | None) -> Iterator[Subject]:
    """Yield each subject, and report progress before each and at the end."""
    report: Progress = progress if progress and distributed.rank() == 0 else lambda *_: None
    for done, subject in enumerate(measured):
        report(done, len(measured), f"{subject.axes['run']} step {subject.axes['step']}")
        yield subject
    report(len(measured), len(measured), "")


def _by_jobs(
    things: Any, steps: Any, workers: Workers, progress: Progress | None, how: Callable[..., Any]
) -> pd.DataFrame:
    """Measure every step of every run in a separate job, and return the rows in order."""
    runs = [opened_run(thing) for thing in (things if isinstance(things, list | tuple) else [things])]
    each = [(run, step) for run in runs for step in run.resolve(steps)]
    jobs = [Job(f"{run.path} step {step}", partial(how, run, steps=[step])) for run, step in each]
    folders = list(dict.fromkeys(run.path.parent for run in runs))
    return pd.concat(results(jobs, workers, progress, folders), ignore_index=True)


def refuse_short(T: int, metrics: Iterable[str], positions: str = "first") -> None:
    """Raise `WorkbenchError` if a metric needs sequences of more than T tokens."""
    for name in metrics:
        item = _find(name, positions)
        if item.min_length > T:
            raise WorkbenchError(f"{item.name} needs sequences of {item.min_length} tokens; these have {T}")


def _find(name: str, positions: str = "first", sites: Sequence[str] = ()) -> Measure:
    """Return a metric or experiment by name, at the first position or those found; it needs to have the sites."""
    measures: dict[str, Measure] = {**METRICS, **INTERVENTIONS}
    refuse_unknown("metric", name, measures)
    refuse_unknown("positions", positions, POSITIONS)
    item = measures[name]
    for site in sites:
        refuse_unknown(f"site of {name}", site, getattr(item, "sites", ()))
    if positions == "first":
        return item
    if not takes_positions(item):
        known = ", ".join(n for n, other in measures.items() if takes_positions(other))
        raise WorkbenchError(f"{name} is no measure of sink positions; positions='found' changes {known}")
    least = max(item.min_length, FOUND_LENGTH)
    if isinstance(item, Metric):
        return replace(item, found=True, controls={}, min_length=least)
    function = update_wrapper(partial(item.function, positions=positions), item.function)
    return replace(item, found=True, function=function, min_length=least)


def _sharing(subject: Subject) -> Any:
    """Return a key that is equal for subjects with the same sequences, such as runs on one corpus."""
    if subject.run is None:
        return id(subject)
    return str(subject.run.path.parent), str(subject.run.info["data"]), subject.run.train.T


def _measure_one(
    subject: Subject, wanted: Sequence[Measure], sample: Sample, batch: int, only: Mapping[str, Sequence[str]]
) -> pd.DataFrame:
    all_sites = {item.name: _key(subject, sample, item) for item in wanted}
    present = list(subject.get(sample, [all_sites[name] for name in only if name in all_sites]))
    present = distributed.all_gather(present)[0] if only else present
    only = {name: sites for name, sites in only.items() if all_sites.get(name) not in present}
    keys = {_key(subject, sample, item, only.get(item.name, ())): item for item in wanted}
    stored = subject.get(sample, list(keys))
    if distributed.world_size() > 1:  # only what the first process read: it may have stored more since
        stored = subject.get(sample, distributed.all_gather(list(stored))[0])
    missing = {key: item for key, item in keys.items() if key not in stored}
    if missing:
        fresh = _compute(subject, missing, sample, batch, only)
        if subject.run is None or distributed.rank() == 0:
            subject.put(sample, fresh)
        distributed.all_gather(None)  # all processes wait until they are stored
        stored |= {key: frame for key, (frame, _) in fresh.items()}
    frame = pd.concat([stored[key] for key in keys], ignore_index=True)
    return typed(frame.assign(**subject.axes, data=sample.label))  # a renamed run or file stays valid


def _key(subject: Subject, sample: Sample, item: Measure, sites: Sequence[str] = ()) -> str:
    machine = item.machine if isinstance(item, Intervention) else ()
    if isinstance(item, Intervention) and sample.source is not None:  # tables of means are made of its sequences
        machine += (sample.source.hash,)
    found = ("found within windows",) if item.found else ()
    return digest(subject.weights, sample.hash, item.name, item.version, *machine, *sites, *found)


def _compute(
    subject: Subject, missing: Mapping[str, Measure], sample: Sample, batch: int, only: Mapping[str, Sequence[str]]
) -> dict[str, Tables]:
    model = subject.model
    if model.foreign is None:  # an observed module stays in its mode; active dropout is refused
        model.eval()
    for item in missing.values():
        if model.foreign is not None and isinstance(item, Metric) and item.form == "derived":
            raise WorkbenchError(f"{item.name} reads weights by our names, absent in observed modules; leave it out")
    metrics = {k: m for k, m in missing.items() if isinstance(m, Metric) and m.form != "derived"}
    streamed = {k: reductions_of(m, sample.ids, only.get(m.name)) for k, m in metrics.items()}
    together = [r for reductions in streamed.values() for r in reductions]
    sample = replace(sample, segments=read_segments(model, sample, together, batch))
    for item in missing.values():
        if sample.segments is not None and isinstance(item, Intervention) and not item.by_document:
            raise BadData(
                f"{item.name} reads complete rows, and {100 * sample.segments.left_out:.3g} % of these positions are padding or rows hold "
                "several documents: give documents of one length, one in a row"
            )
    for key, metric in metrics.items():  # a metric has no numbers if a row has no document that is long enough
        reduction, segments = streamed[key][0], sample.segments
        short = [] if segments is None else [n for n in range(len(sample.ids)) if not reduction.documents(segments, n)]
        if segments is not None and short:
            longest = max(len(at) for at in segments.documents_in(short[0]))
            needed = f"{metric.name} needs documents of {metric.min_length} tokens"
            needed += " that count" if segments.counted is not None and "counted" in metric.optional else ""
            why = f"{needed}; the longest of row {short[0]} has {longest} without padding"
            subject.absent[metric.name], streamed[key] = why, []
    together = [r for reductions in streamed.values() for r in reductions]
    *before, last = passes_of(model, sample, together)
    for reductions in before:
        run_pass(model, sample, reductions, batch)
        for reduction in (r for r in reductions if r.metric.form != "per_sequence"):
            reduction.rows = list(record_rows(reduction, sample, model.config.n_layers))
            reduction.parts.clear()
    columns = [Reduction(COLUMNS, None)] if any(takes_positions(m) and not m.found for m in missing.values()) else []
    run_pass(model, sample, [*last, *columns], batch)
    elsewhere = _rests_elsewhere(columns[0]) if columns else ""

    def results(key: str, item: Measure) -> Tables:
        rows: Iterable[dict[str, Any]]
        samples: Iterable[dict[str, Any]] = ()
        if key in streamed:
            rows = (row for one in streamed[key] for row in record_rows(one, sample, model.config.n_layers))
            samples = (row for one in streamed[key] for row in sample_rows(one, sample, model.config.n_layers))
        elif isinstance(item, Intervention):
            run = subject.run  # an imported one's training data are unknown
            training = sample.source if run is None or run.info["data"]["kind"] == "imported" else run.data
            rows = item.function(model, sample, training, batch)
            if item.found:
                rows = (row | {"variant": "_".join(filter(None, (row.get("variant"), "found")))} for row in rows)
        else:
            rows = _derived_rows(model, item, sample)
        common = _common(subject, key, item, sample, elsewhere if takes_positions(item) and not item.found else "")
        tables = records(common | row for row in rows), records((common | r for r in samples), SAMPLE_COLUMNS)
        for reduction in streamed.get(key, ()):
            reduction.parts.clear()  # an experiment may need the memory
        return tables

    return distributed.scatter({key: partial(results, key, item) for key, item in missing.items()})


def _rests_elsewhere(columns: Reduction) -> str:
    """Return the head that attends most to a position other than the first, if it attends less to that; else empty."""
    most = (FOUND_EXCESS, "")
    for layer, folds in columns.parts.items():
        total = ColumnExcess()
        for fold in folds:
            total.merge(fold)
        for head, excess in enumerate(total.result()):
            position = max(range(len(excess)), key=excess.__getitem__, default=0)
            if position and excess[position] > most[0]:
                words = (
                    f"of the first position only: layer {layer}, head {head} attends more to position {position} "
                    f"({excess[position]:.0%} above uniform attention; position 0: {excess[0]:.0%})"
                )
                most = excess[position], words
    return most[1]


def _common(subject: Subject, key: str, item: Measure, sample: Sample, doubt: str = "") -> dict[str, Any]:
    """Return the columns that all rows of one measurement share."""
    model, segments = subject.model, sample.segments
    weight, documents = model.embed.weight, [sample.ids]
    facts: dict[str, Any] = {} if model.foreign is None else {"coverage": model.coverage}
    if segments is not None:
        documents = [sample.ids[row, at][None] for row, at in segments.documents()]
        facts |= {"left_out": round(segments.left_out, 6), "documents": len(documents)}
    # an experiment may read attention statistics too
    if not isinstance(item, Metric) or not set(STATISTICS).isdisjoint(item.arguments):
        joint = [getattr(block.attn, "joint", None) for block in model.blocks]
        form = attention_form(weight.device, weight.dtype, model.config.d_head)
        facts["attention"] = "+".join(sorted({form if one is None else "strips" for one in joint}))
    doubts = list(filter(None, map(item.doubt, documents))) if isinstance(item, Metric) and item.doubt else []
    if doubt or 2 * len(doubts) > len(documents):  # of most documents
        facts["doubt"] = doubt or doubts[0]
    origin = provenance(
        reading=item.reading, key=key, weights=subject.weights, data=sample.hash, version=item.version,
        assumed=model.assumed, torch=torch.__version__.split("+")[0], python=platform.python_version(),
        device=str(weight.device.type), dtype=str(weight.dtype).removeprefix("torch."), **facts,
    )  # fmt: skip
    T = max(ids.shape[1] for ids in documents)
    return subject.axes | {"metric": item.name, "data": sample.label, "T": T, "provenance": origin}


def _derived_rows(model: Transformer, metric: Metric, sample: Sample) -> Iterator[dict[str, Any]]:
    """Yield rows of a metric of weights or a cache (exact), or of gradients (mean, se and n over documents)."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    if "gradients" not in metric.arguments:
        given: dict[str, Any] = {"weights": weights}
        if "cache" in metric.arguments:
            ids = sample.ids[:1, :CACHED]
            given["cache"] = model.new_cache(1, dtype=torch.bfloat16)
            for tokens in (ids[:, :-1], ids[:, -1:]):  # the last token separately, as in decoding
                model(tokens, return_type=None, past_kv_cache=given["cache"])
        given = {name: given[name] for name in metric.arguments}
        settings: list[tuple[str | None, Mapping[str, Any]]] = [(None, {}), *metric.controls.items()]
        for control, options in settings:
            for row in metric.function(**given, **options):
                axes = {"part": row.part, "layer": row.layer, "control": control, "unit": metric.unit}
                yield axes | {"value": row.value}
        return
    variants: list[tuple[str | None, Mapping[str, Any]]] = [(None, {}), *metric.variants.items()]
    results: dict[tuple[str | None, str, int | None], list[float]] = {}
    matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2}
    for ids in sample.ids[:, None].to(model.embed.weight.device):
        gradients = dict[bool, dict[str, Tensor]]()
        for output in {v == "output" for v, _ in variants}:  # of the mean largest logit, or of the mean loss
            with torch.enable_grad(), model.lock, trainable(matrices.values()):
                scalar = model(ids).max(-1).values.mean() if output else model(ids, return_type="loss")
                grads = torch.autograd.grad(scalar, list(matrices.values()))
            gradients[output] = dict(zip(matrices, grads, strict=True))
        for variant, options in variants:
            for row in metric.function(gradients[variant == "output"], weights, **options):
                results.setdefault((variant, row.part, row.layer), []).append(row.value)
    for (variant, part, layer), values in results.items():
        unit = metric.units.get(variant or "", metric.unit)
        yield mean_row(torch.tensor(values, dtype=torch.double), part=part, layer=layer, variant=variant, unit=unit)
