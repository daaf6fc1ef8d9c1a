"""Checkpoint + metrics + data -> records: activations are reduced inside the hooks, every number gets its error bar.

Per-sequence metrics: mean, standard error and n over documents. Accumulated ones: the error by deleting one of eight groups
of documents at a time (jackknife). What is stored already under the same weights, data, metric and options is not run again.
"""

from __future__ import annotations

import inspect
import math
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from workbench.data import Data, Sample, TextData, prepare
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.files import digest
from workbench.interventions import INTERVENTIONS, Intervention
from workbench.metrics import METRICS, Metric
from workbench.models.transformer import Transformer
from workbench.names import ACTIVATIONS, STATISTICS, stream_hook
from workbench.results import SAMPLE_COLUMNS, Store, provenance, records
from workbench.runs import Run, load

Measure = Metric | Intervention
_memory: dict[str, tuple[pd.DataFrame, pd.DataFrame]] = {}
"""Records of models that live in this process only, by content address; bounded in `_Subject.put`."""


# ---- what is measured ------------------------------------------------------------------------------------------------


@dataclass
class _Subject:
    """One set of weights: a run at a step, or a model in memory."""

    run: Run | None
    model_in_hand: Transformer | None
    step: int | None
    device: str | None = None

    @cached_property
    def model(self) -> Transformer:
        if self.model_in_hand is not None:
            return self.model_in_hand
        assert self.run is not None
        return self.run.load(self.step if self.step is not None else "last", device=self.device)

    @cached_property
    def weights(self) -> str:
        if self.run is not None:
            return self.run.weights_hash(int(self.step or 0))
        from workbench.checkpoints import weights_hash

        return weights_hash(self.model)

    @property
    def axes(self) -> dict[str, Any]:
        if self.run is not None:
            return {
                "run": self.run.name,
                "architecture": self.run.architecture,
                "seed": self.run.seed,
                "step": self.step,
            }
        source, name = self.model.source, self.model.architecture
        named = {"run": source.get("run") or source.get("path") or "in memory", "architecture": name}
        return named | {"seed": source.get("seed"), "step": source.get("step")}

    def get(self, sample: Sample, keys: Sequence[str]) -> dict[str, pd.DataFrame]:
        if self.run is not None:
            return self.run.store.get(self.weights, sample.hash, keys)
        found = {key: _memory.get(f"{self.weights}-{sample.hash}-{key}") for key in keys}
        return {key: pair[0] for key, pair in found.items() if pair is not None}

    def put(self, sample: Sample, key: str, frame: pd.DataFrame, samples: pd.DataFrame) -> None:
        if self.run is not None:
            self.run.store.put(self.weights, sample.hash, frame, samples)
            return
        while len(_memory) >= 256:
            del _memory[next(iter(_memory))]
        _memory[f"{self.weights}-{sample.hash}-{key}"] = (frame, samples)


def _subjects(things: Any, steps: str | int | list[int], device: str | None) -> list[_Subject]:
    many = things if isinstance(things, list | tuple) else [things]
    found: list[_Subject] = []
    for thing in many:
        if isinstance(thing, Transformer):
            found.append(_Subject(None, thing, None))
        elif isinstance(thing, Run) or (isinstance(thing, str | Path) and (Path(thing) / "run.json").exists()):
            run = thing if isinstance(thing, Run) else Run.open(thing)
            found += [_Subject(run, None, step, device) for step in run.resolve(steps)]
        elif isinstance(thing, str | Path):
            found.append(_Subject(None, load(thing, device=device), None))
        else:
            raise WorkbenchError(f"cannot measure a {type(thing).__name__}; give a model, a run or a path")
    if not found:
        raise WorkbenchError("nothing to measure: no models or runs were given")
    return found


def sample_of(data: Any, subject: Any, n: int, T: int | None, seed: int) -> Sample:
    """Sequences from ids [n, T], text, a path, a corpus, or (None) the run's own validation split."""
    if isinstance(data, Sample):
        return data
    run, model = subject.run, None if subject.run is not None else subject.model
    config = run.model if run is not None else model.config
    length = T or (run.train.T if run is not None else min(128, config.n_ctx))
    if length > config.n_ctx:
        raise BadData(f"T={length} exceeds the model's context n_ctx={config.n_ctx}")
    if data is None:
        if run is None:
            raise WorkbenchError("a model in memory has no data of its own: give data= ids, text, a path or a corpus")
        return run.data.sample(n, length, seed=seed)
    if isinstance(data, Tensor):
        ids = data[None] if data.ndim == 1 else data
        if ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
            raise BadData(f"data of shape {tuple(ids.shape)}, {ids.dtype}: needs token ids [n, T]")
        return Sample(ids.to("cpu", torch.long), range(len(ids)), "ids")
    tokenizer = run.tokenizer if run is not None else model.tokenizer  # type: ignore[union-attr]
    if isinstance(data, str) and not Path(data).exists():
        if tokenizer is None:
            raise BadData("this model has no tokenizer: give token ids instead of text")
        ids = torch.tensor([tokenizer.encode(data)[:length]])
        if ids.shape[1] < 2:
            raise BadData(f"the text is {ids.shape[1]} tokens long; at least 2 are needed")
        return Sample(ids, [0], "text")
    if isinstance(data, str | Path):
        from workbench.corpus import from_files

        if tokenizer is None:
            raise BadData("this model has no tokenizer: give token ids instead of a file")
        return TextData(from_files([Path(data)], validation=1.0), tokenizer).sample(n, length, seed=seed)
    if hasattr(data, "sample"):
        return data.sample(n, length, seed=seed)  # type: ignore[no-any-return]
    raise BadData(f"cannot read data from a {type(data).__name__}; give ids [n, T], text, a path or a corpus")


# ---- one pass over a model -------------------------------------------------------------------------------------------


@dataclass
class _Job:
    """A metric with one choice of site, variant or control: what it reads and what it has found per layer."""

    metric: Metric
    site: str | None
    variant: str | None = None
    control: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    found: dict[Any, Any] = field(default_factory=dict)  # layer -> list of tensors, or accumulators per fold

    def wants(self) -> tuple[str, ...]:
        return self.metric.reads(self.site)

    def feed(self, layer: Any, inputs: Mapping[str, Tensor], documents: range) -> None:
        given = {a: inputs[self.site if a == "vectors" else a] for a in self.metric.arguments if a != "T"}  # type: ignore[index]
        if self.metric.form == "accumulated":
            folds = self.found.setdefault(
                layer, [self.metric.function(**self.options) for _ in range(self.metric.folds)]
            )
            for row, document in enumerate(documents):
                one = {name: value[row : row + 1] for name, value in given.items()}
                folds[document % self.metric.folds].update(**one)
        else:
            self.found.setdefault(layer, []).append(self.metric.function(**given, **self.options).double().cpu())


def _jobs(metric: Metric) -> list[_Job]:
    jobs = []
    for site in metric.sites or (None,):
        jobs.append(_Job(metric, site))
        if metric.form == "per_sequence":
            jobs += [_Job(metric, site, variant, None, options) for variant, options in metric.variants.items()]
        else:
            jobs += [_Job(metric, site, None, control, options) for control, options in metric.controls.items()]
    return jobs


def _hook_of(alias: str, layer: Any, model: Transformer) -> str | None:
    """Hook point of an activation at a layer, None where this model has none there."""
    n_layers = model.config.n_layers
    if alias == "stream":
        return stream_hook(layer, n_layers)
    if layer == n_layers or layer == "final":
        return None
    name = ACTIVATIONS[alias].hook.format(layer=layer)
    return name if name in model.hook_dict else None


def _collect(model: Transformer, sample: Sample, jobs: list[_Job], batch: int) -> None:
    """Run the model over the sample once; a layer's activations are dropped as soon as its metrics have read them."""
    n_layers = model.config.n_layers
    layers: list[Any] = [*range(n_layers), n_layers, "final"]
    plan: dict[Any, list[tuple[_Job, dict[str, str]]]] = {}
    for layer in layers:
        for job in jobs:
            aliases = [a for a in job.wants() if a not in ("logits", "tokens")]
            hooks = {a: _hook_of(a, layer, model) for a in aliases}
            if aliases and all(hooks.values()):
                plan.setdefault(layer, []).append((job, hooks))  # type: ignore[arg-type]
    whole = [job for job in jobs if job.wants() and set(job.wants()) <= {"logits", "tokens"}]
    for start in range(0, len(sample.ids), batch):
        ids = sample.ids[start : start + batch]
        documents = range(start, start + len(ids))
        ids = ids.to(model.embed.weight.device)
        with torch.no_grad(), model.hooks(list(_reducers(plan, ids, documents))):
            logits = model(ids)
        for job in whole:
            job.feed(None, {"logits": logits, "tokens": ids}, documents)


def _reducers(
    plan: Mapping[Any, list[tuple[_Job, dict[str, str]]]], ids: Tensor, documents: range
) -> Iterator[tuple[str, Callable[..., None]]]:
    for layer, entries in plan.items():
        needed = {hook: alias for _, hooks in entries for alias, hook in hooks.items()}
        held: dict[str, Tensor] = {"tokens": ids}
        waiting = {id(job): set(hooks.values()) for job, hooks in entries}

        def arrive(
            tensor: Tensor,
            hook: Any,
            layer: Any = layer,
            entries: Any = entries,
            needed: Any = needed,
            held: Any = held,
            waiting: Any = waiting,
        ) -> None:
            held[needed[hook.name]] = tensor
            for job, hooks in entries:
                missing = waiting[id(job)]
                if hook.name in missing:
                    missing.discard(hook.name)
                    if not missing:
                        job.feed(layer, held, documents)
            if not any(waiting.values()):
                held.clear()

        yield from ((hook, arrive) for hook in needed)


# ---- rows ------------------------------------------------------------------------------------------------------------


def _layer_axes(layer: Any, n_layers: int) -> dict[str, Any]:
    """Stream layers are numbered by their readers; the final norm's output is site `final`."""
    return {"layer": n_layers, "site": "final"} if layer == "final" else {"layer": layer}


def _rows(job: _Job, sample: Sample, n_layers: int) -> Iterator[dict[str, Any]]:
    unit = job.metric.units.get(job.variant or "", job.metric.unit)
    for layer, found in job.found.items():
        base = {
            "site": job.site,
            **_layer_axes(layer, n_layers),
            "variant": job.variant,
            "control": job.control,
            "unit": unit,
        }
        if job.metric.form == "accumulated":
            yield from _accumulated_rows(job, found, base, len(sample.ids))
            continue
        values = torch.cat(found)
        axes = (*job.metric.axes, "head") if job.variant == "per_head" else job.metric.axes
        mean, n = values.mean(0), len(values)
        se = values.std(0) / math.sqrt(n) if n > 1 else torch.full_like(mean, math.nan)
        yield from _spread(base | {"n": n}, axes, mean, se)
        if job.variant is None or job.variant == "deficit" or job.variant == "excl0":
            yield from _control_rows(job, sample, base, axes, values.shape[1:])


def _spread(base: dict[str, Any], axes: Sequence[str], mean: Tensor, se: Tensor) -> Iterator[dict[str, Any]]:
    names = ["position" if axis == "pos" else axis for axis in axes]
    for index, (value, error) in enumerate(zip(mean.flatten().tolist(), se.flatten().tolist(), strict=True)):
        where = torch.unravel_index(torch.tensor(index), mean.shape) if mean.ndim else ()
        yield base | {name: int(i) for name, i in zip(names, where, strict=True)} | {"value": value, "se": error}


def _control_rows(
    job: _Job, sample: Sample, base: dict[str, Any], axes: Sequence[str], shape: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Theoretical baselines of a per-sequence metric, written once per layer."""
    if job.variant is not None:
        return
    T = sample.ids.shape[1]
    for name, control in job.metric.controls.items():
        given = {"T": T, "tokens": sample.ids}
        value = control(**{a: given[a] for a in inspect.signature(control).parameters})
        value = torch.as_tensor(value, dtype=torch.double)
        if value.ndim and "tokens" in inspect.signature(control).parameters:
            value = value.mean(0)
        kept = [a for a in axes if a == "pos"] if value.ndim else []
        yield from _spread(base | {"control": name}, kept, value, torch.full_like(value, math.nan))


def _accumulated_rows(job: _Job, folds: list[Any], base: dict[str, Any], n: int) -> Iterator[dict[str, Any]]:
    used = [fold for i, fold in enumerate(folds) if i < n]
    whole = _as_mapping(_merged(job, used).result())
    errors = dict.fromkeys(whole, math.nan)
    if len(used) > 2:
        left_out = [_as_mapping(_merged(job, [f for f in used if f is not fold]).result()) for fold in used]
        for key in whole:
            values = torch.tensor([found[key] for found in left_out], dtype=torch.double)
            errors[key] = float(((len(used) - 1) / len(used) * (values - values.mean()).square().sum()).sqrt())
    for key, value in whole.items():
        unit = job.metric.units.get(key, job.metric.unit)
        yield base | {"variant": key or None, "unit": unit, "value": value, "se": errors[key], "n": n}


def _merged(job: _Job, parts: Iterable[Any]) -> Any:
    total = job.metric.function(**job.options)
    for part in parts:
        total.merge(part)
    return total


def _as_mapping(result: Any) -> Mapping[str, float]:
    return result if isinstance(result, Mapping) else {"": result}


def _samples(job: _Job, sample: Sample, n_layers: int) -> Iterator[dict[str, Any]]:
    """One value per document, where a metric has no position axis."""
    if job.metric.form != "per_sequence" or "pos" in job.metric.axes or job.control:
        return
    for layer, found in job.found.items():
        values = torch.cat(found).double()
        base = {"site": job.site, **_layer_axes(layer, n_layers), "variant": job.variant}
        for row, document in zip(values.reshape(len(values), -1).tolist(), sample.documents, strict=True):
            for head, value in enumerate(row):
                yield base | {"document": document, "value": value} | ({"head": head} if values.ndim > 1 else {})


# ---- derived ---------------------------------------------------------------------------------------------------------


def _derived_rows(model: Transformer, metric: Metric, sample: Sample) -> Iterator[dict[str, Any]]:
    """Rows of a metric of weights (exact) or of gradients (one document at a time: mean, se and n over documents)."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    if "gradients" not in metric.arguments:
        for row in metric.function(weights):
            yield {"part": row.part, "layer": row.layer, "value": row.value, "unit": metric.unit}
        return
    for variant, options in {None: {}, **metric.variants}.items():
        values: dict[tuple[str, int | None], list[float]] = {}
        for ids in sample.ids[:, None]:
            for row in metric.function(_gradients(model, ids, output=variant == "output"), weights, **options):
                values.setdefault((row.part, row.layer), []).append(row.value)
        for (part, layer), found in values.items():
            tensor = torch.tensor(found, dtype=torch.double)
            se = float(tensor.std() / math.sqrt(len(found))) if len(found) > 1 else math.nan
            axes = {
                "part": part,
                "layer": layer,
                "variant": variant,
                "unit": metric.units.get(variant or "", metric.unit),
            }
            yield axes | {"value": float(tensor.mean()), "se": se, "n": len(found)}


def _gradients(model: Transformer, ids: Tensor, *, output: bool) -> dict[str, Tensor]:
    """Gradients of the mean loss (or of the mean largest logit) with respect to every matrix; none is kept on the model."""
    named = {name: p for name, p in model.named_parameters() if p.ndim == 2}
    ids = ids.to(model.embed.weight.device)
    frozen = [p for p in named.values() if not p.requires_grad]
    try:
        for p in frozen:
            p.requires_grad_(True)
        with torch.enable_grad(), model.lock:
            scalar = model(ids).max(-1).values.mean() if output else model(ids, return_type="loss")
            found = torch.autograd.grad(scalar, list(named.values()))
    finally:
        for p in frozen:
            p.requires_grad_(False)
    return dict(zip(named, found, strict=True))


# ---- the call --------------------------------------------------------------------------------------------------------


def _find(name: str) -> Measure:
    if name in METRICS:
        return METRICS[name]
    if name in INTERVENTIONS:
        return INTERVENTIONS[name]
    raise UnknownName("metric", name, [*METRICS, *INTERVENTIONS])


def _key(subject: _Subject, measure: Measure, sample: Sample) -> str:
    return digest(subject.weights, sample.hash, measure.name, measure.version())


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
    progress: Callable[[str], None] | None = None,
) -> pd.DataFrame:
    """Measure models or runs and return records, one tidy row per number.

    Args:
        models_or_runs: a model, run, path, or a list of them.
        metrics: names from `METRICS` and `INTERVENTIONS`, or one name.
        data: ids [n, T], text, a path or a corpus; default the run's validation split, one window per document.
        steps: for runs: `last`, `first`, `ends`, `all`, a step or a list.
        n: documents at most. T: tokens of each (default the run's training length). batch: sequences at a time; results do not
            depend on it. seed: which windows.

    Records of a run are kept under `<run>/records` and not measured twice. Raises `UnknownName` for a metric, `BadData` for
    data that cannot be used, `WorkbenchError` where a metric needs longer sequences.
    """
    wanted = [_find(name) for name in ([metrics] if isinstance(metrics, str) else metrics)]
    if not wanted or batch < 1 or n < 1:
        raise WorkbenchError(f"{len(wanted)} metrics, batch={batch}, n={n}: each must be at least 1")
    frames, samples = [], {}
    for subject in _subjects(models_or_runs, steps, device):
        shared = (
            (str(subject.run.path.parent), str(subject.run.info["data"]), subject.run.train.T)
            if subject.run
            else id(subject)
        )
        sample = samples.setdefault(shared, None) or sample_of(data, subject, n, T, seed)
        samples[shared] = sample
        if progress:
            progress(f"{subject.axes['run']} step {subject.axes['step']}")
        frames.append(_measure_one(subject, wanted, sample, batch))
    return pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0]


def _measure_one(subject: _Subject, wanted: Sequence[Measure], sample: Sample, batch: int) -> pd.DataFrame:
    T = sample.ids.shape[1]
    for item in wanted:
        if item.min_length > T:
            raise WorkbenchError(f"{item.name} needs sequences of {item.min_length} tokens; these have {T}")
    keys = {_key(subject, item, sample): item for item in wanted}
    stored = subject.get(sample, list(keys))
    missing = {key: item for key, item in keys.items() if key not in stored}
    fresh = _compute(subject, missing, sample, batch) if missing else {}
    for key, (frame, samples) in fresh.items():
        subject.put(sample, key, frame, samples)
    frame = pd.concat([stored.get(key, fresh[key][0] if key in fresh else None) for key in keys], ignore_index=True)
    for name, value in subject.axes.items():  # a renamed run keeps its numbers
        frame[name] = value
    return records(frame.to_dict("records")) if frame["seed"].dtype != "Int64" else frame


def _compute(
    subject: _Subject, missing: Mapping[str, Measure], sample: Sample, batch: int
) -> dict[str, tuple[pd.DataFrame, pd.DataFrame]]:
    model = subject.model
    model.eval()
    streamed = {
        key: _jobs(item) for key, item in missing.items() if isinstance(item, Metric) and item.form != "derived"
    }
    if streamed:
        _collect(model, sample, [job for jobs in streamed.values() for job in jobs], batch)
    results = {}
    for key, item in missing.items():
        common = subject.axes | {"metric": item.name, "data": sample.label, "T": sample.ids.shape[1]}
        common["provenance"] = provenance(
            key=key, weights=subject.weights, data=sample.hash, metric=f"{item.name}@{item.version()}", assumed=model.assumed,
            torch=torch.__version__.split("+")[0], python=platform.python_version(), device=str(model.embed.weight.device.type),
            dtype=str(model.embed.weight.dtype).removeprefix("torch."),
        )  # fmt: skip
        rows: Iterable[dict[str, Any]]
        samples: Iterable[dict[str, Any]] = ()
        if key in streamed:
            rows = [row for job in streamed[key] for row in _rows(job, sample, model.config.n_layers)]
            samples = [row for job in streamed[key] for row in _samples(job, sample, model.config.n_layers)]
        elif isinstance(item, Intervention):
            rows = item.function(model, sample, subject.run.data if subject.run else None, batch)
        else:
            rows = _derived_rows(model, item, sample)
        table = records(common | row for row in rows)
        results[key] = (table, records(({**common, **row} for row in samples), SAMPLE_COLUMNS))
    return results


__all__ = ["Data", "STATISTICS", "Sample", "measure", "prepare", "sample_of"]
