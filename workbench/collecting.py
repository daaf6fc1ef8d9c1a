"""One pass of a model over sequences: activations are reduced inside the hooks, then every number gets its error bar.

Per-sequence metrics: mean, standard error and n over documents. Accumulated ones: the error by deleting one of the metric's
groups of documents at a time (jackknife). Processes of one launch take turns over the batches and exchange what they find.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench import launched
from workbench.data import Sample
from workbench.metrics import Metric
from workbench.metrics.base import AXES
from workbench.models.transformer import Transformer
from workbench.names import ACTIVATIONS, stream_hook

WHOLE = ("logits", "tokens")
"""What is there once for a sequence, not at a hook point."""

LAYER_WEIGHTS = ("W_O",)
"""Weights of a layer that a metric of activations may read too."""


@dataclass
class Job:
    """A metric with one choice of site, variant or control: what it reads and what it has found per layer."""

    metric: Metric
    site: str | None
    variant: str | None = None
    control: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    found: dict[Any, Any] = field(default_factory=dict)  # layer -> list of tensors, or accumulators per fold

    def hooks(self, layer: Any, model: Transformer) -> dict[str, str]:
        """Hook point of each activation it reads at a layer; empty where the model lacks one of them."""
        aliases = [a for a in self.metric.reads(self.site) if a not in WHOLE]
        found = {alias: _hook_of(alias, layer, model) for alias in aliases}
        if (layer is None) is any(ACTIVATIONS[a].per_layer for a in aliases):
            return {}
        if not set(self.metric.arguments).isdisjoint(LAYER_WEIGHTS) and not _weights_of(layer, model):
            return {}
        return {a: hook for a, hook in found.items() if hook is not None} if all(found.values()) else {}

    def feed(self, layer: Any, inputs: Mapping[str, Tensor], documents: range) -> None:
        """Reduce one batch: `inputs` by name, `documents` the row of each sequence in the sample."""
        given = {a: inputs[self.site if a == "vectors" and self.site else a] for a in self.metric.arguments}
        if self.metric.form == "per_sequence":
            self.found.setdefault(layer, []).append(self.metric.function(**given, **self.options).double().cpu())
            return
        folds = self.found.setdefault(layer, [self.metric.function(**self.options) for _ in range(self.metric.folds)])
        for row, document in enumerate(documents):
            one = {name: value[row : row + 1] for name, value in given.items()}
            folds[document % self.metric.folds].update(**one)


def jobs_of(metric: Metric) -> list[Job]:
    """A metric at each of its sites, plain, in its variants, and (accumulated) with its controls."""
    per_sequence = metric.form == "per_sequence"
    jobs = []
    for site in metric.sites or (None,):
        jobs.append(Job(metric, site))
        if per_sequence:
            jobs += [Job(metric, site, variant, None, options) for variant, options in metric.variants.items()]
        else:
            jobs += [Job(metric, site, None, control, options) for control, options in metric.controls.items()]
    return jobs


def _hook_of(alias: str, layer: Any, model: Transformer) -> str | None:
    """Hook point of an activation at a layer (None: of the whole model), None where this model has none there."""
    n_layers = model.config.n_layers
    if not ACTIVATIONS[alias].per_layer:
        return ACTIVATIONS[alias].hook
    if layer is None or (alias != "stream" and layer in (n_layers, "final")):
        return None
    name = stream_hook(layer, n_layers) if alias == "stream" else ACTIVATIONS[alias].hook.format(layer=layer)
    return name if name in model.hook_dict else None


def _weights_of(layer: Any, model: Transformer) -> dict[str, Tensor]:
    """`LAYER_WEIGHTS` by name, where this model has them at this layer."""
    if layer is None or layer in (model.config.n_layers, "final") or not hasattr(model, "blocks"):
        return {}
    attn = getattr(model.blocks[layer], "attn", None)
    return {name: getattr(attn, name).detach() for name in LAYER_WEIGHTS if hasattr(attn, name)}


def collect(model: Transformer, sample: Sample, jobs: Sequence[Job], batch: int) -> None:
    """Run the model over the sample once; a layer's activations are dropped as soon as its metrics have read them."""
    layers = [None, *range(model.config.n_layers + 1), "final"]
    plan = {layer: [(job, hooks) for job in jobs if (hooks := job.hooks(layer, model))] for layer in layers}
    weights = {layer: _weights_of(layer, model) for layer in layers}
    whole = [job for job in jobs if set(job.metric.reads(job.site)) <= set(WHOLE)]
    if not whole and not any(plan.values()):
        return
    for start in launched.share(range(0, len(sample.ids), batch)):
        ids = sample.ids[start : start + batch].to(model.embed.weight.device)
        documents = range(start, start + len(ids))
        reducers = [
            hook
            for layer, entries in plan.items()
            for hook in _reducers(layer, entries, {"tokens": ids} | weights[layer], documents)
        ]
        with torch.no_grad(), model.hooks(reducers):
            logits = (getattr(model, "everywhere", model) if whole else model)(ids)
        for job in whole:
            job.feed(None, {"logits": logits, "tokens": ids}, documents)
    _exchange(jobs)


def _exchange(jobs: Sequence[Job]) -> None:
    """Put together what the processes of one launch found: batches in their order, accumulators merged fold by fold."""
    parts = launched.gathered([job.found for job in jobs])
    if len(parts) == 1:
        return
    for number, job in enumerate(jobs):
        found = [part[number] for part in parts]
        layers = {layer: None for one in found for layer in one}
        if job.metric.form == "per_sequence":
            turns = {layer: itertools.zip_longest(*(one.get(layer, ()) for one in found)) for layer in layers}
            job.found = {layer: [t for turn in turns[layer] for t in turn if t is not None] for layer in layers}
            continue
        whole = {layer: [job.metric.function(**job.options) for _ in range(job.metric.folds)] for layer in layers}
        for one in found:
            for layer, folds in one.items():
                for fold, more in zip(whole[layer], folds, strict=True):
                    fold.merge(more)
        job.found = whole


def _reducers(
    layer: Any, entries: Sequence[tuple[Job, dict[str, str]]], given: Mapping[str, Tensor], documents: range
) -> list[tuple[str, Callable[..., None]]]:
    """Hooks that hold a layer's activations, beside what is given, until the last metric that reads them has them all."""
    alias_of = {hook: alias for _, hooks in entries for alias, hook in hooks.items()}
    waiting = {id(job): set(hooks.values()) for job, hooks in entries}
    held = dict(given)

    def arrive(tensor: Tensor, hook: Any) -> None:
        held[alias_of[hook.name]] = tensor
        for job, _ in entries:
            missing = waiting[id(job)]
            if hook.name in missing:
                missing.discard(hook.name)
                if not missing:
                    job.feed(layer, held, documents)
        if not any(waiting.values()):
            held.clear()

    return [(hook, arrive) for hook in alias_of]


# ---- rows ------------------------------------------------------------------------------------------------------------


def rows_of(job: Job, sample: Sample, n_layers: int) -> Iterator[dict[str, Any]]:
    """Records of what a job has found."""
    for layer, found in job.found.items():
        unit = job.metric.units.get(job.variant or "", job.metric.unit)
        axes = _axes(job, layer, n_layers) | {"control": job.control, "unit": unit}
        if job.metric.form == "accumulated":
            yield from _accumulated_rows(job, found, axes, len(sample.ids))
            continue
        values = torch.cat(found)
        se = values.std(0) / math.sqrt(len(values)) if len(values) > 1 else torch.full_like(values[0], math.nan)
        named = (*job.metric.axes, "head") if job.variant == "per_head" else job.metric.axes
        yield from _spread(axes | {"n": len(values)}, named, values.mean(0), se)
        if job.variant is None:
            yield from _control_rows(job, sample, axes)


def samples_of(job: Job, sample: Sample, n_layers: int) -> Iterator[dict[str, Any]]:
    """One value per document, where a metric has no position axis."""
    if job.metric.form != "per_sequence" or set(job.metric.axes) - {"head"}:
        return
    for layer, found in job.found.items():
        axes, values = _axes(job, layer, n_layers), torch.cat(found)
        for document, row in zip(sample.documents, values, strict=True):
            heads = [{}] if values.ndim == 1 else [{"head": head} for head in range(values.shape[1])]
            for head, value in zip(heads, row.reshape(-1).tolist(), strict=True):
                yield axes | head | {"document": document, "value": value}


def _axes(job: Job, layer: Any, n_layers: int) -> dict[str, Any]:
    """Stream layers are numbered by their readers; the final norm's output is site `final`."""
    where = {"site": "final", "layer": n_layers} if layer == "final" else {"site": job.site, "layer": layer}
    return where | {"variant": job.variant}


def _spread(axes: dict[str, Any], named: Sequence[str], mean: Tensor, se: Tensor) -> Iterator[dict[str, Any]]:
    """One row for each entry of `mean`, its indices under the record's names of the axes."""
    columns = [AXES[axis] for axis in named]
    places = itertools.product(*map(range, mean.shape))
    for place, value, error in zip(places, mean.flatten().tolist(), se.flatten().tolist(), strict=True):
        yield axes | dict(zip(columns, place, strict=True)) | {"value": value, "se": error}


def _control_rows(job: Job, sample: Sample, axes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Theoretical baselines of a per-sequence metric, written once per layer; they have no error."""
    for name, control in job.metric.controls.items():
        reads = inspect.signature(control).parameters
        given = {"T": sample.ids.shape[1], "tokens": sample.ids}
        value = torch.as_tensor(control(**{a: given[a] for a in reads}), dtype=torch.double)
        value = value.mean(0) if "tokens" in reads else value  # one per sequence
        named = [axis for axis in job.metric.axes if axis != "head"] if value.ndim else []
        yield from _spread(axes | {"control": name}, named, value, torch.full_like(value, math.nan))


def _accumulated_rows(job: Job, folds: list[Any], axes: dict[str, Any], n: int) -> Iterator[dict[str, Any]]:
    used = folds[:n]
    whole, own = _result(job, used)
    left_out = [_result(job, [f for f in used if f is not fold])[0] for fold in used] if len(used) > 2 else []
    for key, found in whole.items():
        value = torch.tensor(found, dtype=torch.double)
        error = torch.full_like(value, own.get(key, math.nan))
        if left_out:
            others = torch.tensor([one[key] for one in left_out], dtype=torch.double)
            error = ((len(used) - 1) / len(used) * (others - others.mean(0)).square().sum(0)).sqrt()
        unit = job.metric.units.get(key, job.metric.unit)
        yield from _spread(axes | {"variant": key or None, "unit": unit, "n": n}, ["index"] * value.ndim, value, error)


def _result(job: Job, parts: Iterable[Any]) -> tuple[Mapping[str, float | list[float]], Mapping[str, float]]:
    """(values, their errors where the accumulator knows them by itself)."""
    total = job.metric.function(**job.options)
    for part in parts:
        total.merge(part)
    result = total.result()
    return result if isinstance(result, Mapping) else {"": result}, getattr(total, "errors", {})
