"""One forward pass over sequences: hooks reduce the activations, and every number gets an error bar.

Per-sequence metrics have a mean, a standard error and n over documents. Accumulated metrics have a jackknife error over
groups of documents. Several processes divide the batches among themselves and exchange their results.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench import distributed
from workbench.data.data_sources import Sample
from workbench.errors import WorkbenchError
from workbench.hook_names import ACTIVATIONS, STATISTICS, stream_hook
from workbench.metrics import Metric
from workbench.metrics.base import AXES
from workbench.models.hook_points import read_only
from workbench.models.transformer import Transformer
from workbench.observing.interception.documents_and_labels import Segments, weighted_mean

WHOLE = ("logits", "tokens", "counted", "window")
"""Inputs of metrics that belong to a sequence or a mask, not to a hook point."""

LAYER_WEIGHTS = ("W_O",)
"""Weights of a layer that a metric of activations may also read."""

RELATIVE = ("concentration_parts", "received_ratio", "found_sinks", "column_excess")
"""Metrics relative to uniform attention in each variant."""

HELD = 1 << 29
"""Maximum bytes of sums in one pass over an observed model; further sites are measured in separate passes."""


@dataclass
class Reduction:
    """A metric at one site, variant or control, with its results per layer."""

    metric: Metric
    site: str | None
    variant: str | None = None
    control: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    parts: dict[Any, Any] = field(default_factory=dict)  # layer -> list of tensors, or accumulators per fold
    rows: list[dict[str, Any]] | None = None  # its records, if they are made before another pass
    rows_read: Counter[Any] = field(default_factory=Counter)  # layer -> sequences
    windows: dict[Any, int | None] = field(default_factory=dict)  # layer -> `attention_window` of the model

    def hooks(self, layer: Any, model: Transformer) -> dict[str, str]:
        """Return the hook points of the activations that the metric reads at a layer; empty if the model lacks one."""
        aliases = [a for a in self.metric.reads(self.site) if a not in WHOLE]
        points = {alias: _hook_of(alias, layer, model) for alias in aliases}
        if (layer is None) is any(ACTIVATIONS[a].per_layer for a in aliases):
            return {}
        if not set(self.metric.arguments).isdisjoint(LAYER_WEIGHTS) and not _weights_of(layer, model):
            return {}
        if not all(points.values()):
            return {}
        points |= {a: _hook_of(a, layer, model) for a in self.metric.optional if a not in WHOLE}
        return {a: hook for a, hook in points.items() if hook is not None}

    @property
    def is_of_logits(self) -> bool:
        """True if the metric reads no hook point."""
        return set(self.metric.reads(self.site)) <= set(WHOLE)

    def feed(self, layer: Any, inputs: Mapping[str, Any], rows: range, segments: Segments | None = None) -> None:
        """Reduce one batch: `inputs` by name, `rows` the indices of its sequences in the sample.

        With `segments`, each document is reduced separately and without padding. A row's value is the mean over its documents,
        weighted by their tokens, of a metric of logits by their predicted tokens.
        """
        aliases = {a: self.site if a == "vectors" else a for a in (*self.metric.arguments, *self.metric.optional)}
        given = {a: inputs[str(alias)] for a, alias in aliases.items() if alias in inputs or a in self.metric.arguments}
        function, options = self.metric.function, self.options
        self.rows_read[layer] += len(rows)
        window = self.windows[layer] = inputs.get("window")
        if window == 0 and self.needs_window:
            return
        if segments is None and self.metric.form == "per_sequence":
            self.parts.setdefault(layer, []).append(function(**given, **options).double().cpu())
            return
        if layer not in self.parts:
            per_sequence = self.metric.form == "per_sequence"
            self.parts[layer] = [] if per_sequence else [function(**options) for _ in range(self.metric.folds)]
        for row, place in enumerate(rows):
            if segments is None:
                documents = [{a: x[row : row + 1] if isinstance(x, Tensor) else x for a, x in given.items()}]
            else:
                positions = self.documents(segments, row)
                documents = [{a: cut(x, str(aliases[a]), row, at) for a, x in given.items()} for at in positions]
            if self.metric.form == "per_sequence" and documents:
                values = [function(**one, **options).double().cpu() for one in documents]
                counted = [i for i, value in enumerate(values) if self.has_number(value)] or range(len(values))
                sizes = [1 if segments is None else self.size(segments, row, positions[i]) for i in counted]
                self.parts[layer].append(weighted_mean([values[i] for i in counted], sizes))
            else:
                for one in documents:
                    self.parts[layer][place % self.metric.folds].update(**one)

    @property
    def needs_window(self) -> bool:
        """True if its numbers are relative to uniform attention, which a mask of unknown kind leaves unknown."""
        relative = self.variant not in (None, "per_head") or self.metric.name in RELATIVE
        return self.metric.found or (relative and "window" in self.metric.optional)

    def has_number(self, value: Tensor) -> Tensor:
        """Return which sequences have a number: without a found position, a measure of one vector has NaN."""
        may_lack = self.metric.found and value.ndim == 1
        return ~value.isnan() if may_lack else torch.ones(len(value), dtype=torch.bool)

    def size(self, segments: Segments, row: int, positions: Tensor) -> int:
        """Return the weight of a document in its row: its tokens, or those that are predicted and count in the loss."""
        if not self.is_of_logits:
            return len(positions)
        counted, later = segments.counted if "counted" in self.metric.optional else None, positions[1:]
        return len(later) if counted is None else int(counted[row, later].sum())

    def documents(self, segments: Segments, row: int) -> list[Tensor]:
        """Return the positions of a row's documents that are long enough and, for a loss, have labelled tokens."""
        counted = segments.counted if "counted" in self.metric.optional else None
        return [
            at
            for at in segments.documents_in(row)
            if len(at) >= self.metric.min_length and (counted is None or bool(counted[row, at[1:]].any()))
        ]


Entries = Sequence[tuple[Reduction, dict[str, str]]]  # with the hook points that each reads at a layer


def cut(value: Tensor, alias: str, row: int, positions: Tensor) -> Tensor:
    """Return one row of an activation [batch, ...] at these positions; tensors without a batch axis stay unchanged."""
    axes = ["batch", "pos"] if alias == "counted" else ACTIVATIONS[alias].axes.split() if alias in ACTIVATIONS else []
    if "batch" not in axes:
        return value
    value = value[row : row + 1]
    for axis, name in enumerate(axes):
        value = value.index_select(axis, positions.to(value.device)) if name in ("pos", "query", "key") else value
    return value


def mean_and_error(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, standard error and n of values [batch, ...]; if second axes differ, each entry uses the rows that reach it."""
    if len({part.shape[1:2] for part in parts}) == 1:
        values = torch.cat(list(parts))
        se = values.std(0) / math.sqrt(len(values)) if len(values) > 1 else torch.full_like(values[0], math.nan)
        return values.mean(0), se, torch.full_like(values[0], len(values))
    rows = [row for part in parts for row in part]
    longest = max(rows, key=len)
    values, reached = (longest.new_zeros(len(rows), *longest.shape) for _ in range(2))
    for value, mask, row in zip(values, reached, rows, strict=True):
        value[: len(row)], mask[: len(row)] = row, 1
    n = reached.sum(0)
    mean = values.sum(0) / n
    return mean, ((values - mean).square().mul(reached).sum(0) / (n - 1) / n).sqrt(), n


def reductions_of(metric: Metric, tokens: Tensor, sites: Sequence[str] | None = None) -> list[Reduction]:
    """Return the reductions of a metric: each site (or only `sites`), with its variants, or with controls if it is accumulated."""
    at: Sequence[str | None] = (sites or metric.sites) or (None,)
    if metric.found:
        variants = [("found", {}), *((f"{name}_found", options) for name, options in metric.variants.items())]
        return [Reduction(metric, site, n, None, {"positions": "found", **o}) for site in at for n, o in variants]
    known, reductions = metric.ahead(tokens) if metric.ahead else {}, []
    for site in at:
        reductions.append(Reduction(metric, site, options=known))
        if metric.form == "per_sequence":
            reductions += [Reduction(metric, site, name, None, options) for name, options in metric.variants.items()]
        else:
            both = {name: {**known, **options} for name, options in metric.controls.items()}
            reductions += [Reduction(metric, site, None, name, options) for name, options in both.items()]
    return reductions


def passes_of(model: Transformer, sample: Sample, reductions: Sequence[Reduction]) -> list[list[Reduction]]:
    """Group reductions into passes over the sample: one pass, or several limited by `HELD` for an observed model.

    A site's sums are estimated at the size of all its vectors, or of one vector per stored token and fold.
    """
    if model.foreign is None:
        return [list(reductions)]
    config = model.config
    widths = dict.fromkeys(("own_v", "v", "k"), config.n_key_value_heads) | dict.fromkeys(("q", "z"), config.n_heads)
    passes, left = [[r for r in reductions if r.metric.form == "per_sequence"]], HELD
    summed = [r for r in reductions if r.metric.form != "per_sequence"]
    for (_, site), group in itertools.groupby(summed, lambda r: (r.metric.name, r.site)):
        together, width = list(group), widths[site] * config.d_head if site in widths else config.d_model
        vectors = sample.ids.numel()
        if (among := together[0].options.get("among")) is not None:
            folds = [sample.ids[fold :: together[0].metric.folds] for fold in range(together[0].metric.folds)]
            vectors = sum(int(torch.isin(ids.unique(), among).sum()) for ids in folds)
        size = 4 * vectors * config.n_layers * len(together) * width
        size = 0 if set(together[0].metric.arguments) <= {*STATISTICS, "tokens"} else size
        if size > left and passes[-1]:
            passes, left = [*passes, []], HELD
        passes[-1] += together
        left -= size
    return passes


def _hook_of(alias: str, layer: Any, model: Transformer) -> str | None:
    """Return the hook point of an activation at a layer (None: of the model); None if the model lacks it."""
    n_layers = model.config.n_layers
    if not ACTIVATIONS[alias].per_layer:
        return ACTIVATIONS[alias].hook
    name = stream_hook(layer, n_layers) if alias == "stream" else ACTIVATIONS[alias].hook.format(layer=layer)
    return name if name in model.hook_dict else None


def _weights_of(layer: Any, model: Transformer) -> dict[str, Tensor]:
    """Return the entries of `LAYER_WEIGHTS` that the model has at this layer."""
    if layer is None or layer in (model.config.n_layers, "final") or not hasattr(model, "blocks"):
        return {}
    attn = getattr(model.blocks[layer], "attn", None)
    return {name: getattr(attn, name).detach() for name in LAYER_WEIGHTS if hasattr(attn, name)}


def read_segments(model: Any, sample: Sample, reductions: Sequence[Reduction], batch: int) -> Segments | None:
    """Return the documents of all rows as an observed module sees them; None if no row has padding, and for our models.

    This needs a separate pass, since the masks of all layers are known only at its end. It also measures metrics of logits.
    """
    if model.foreign is None:
        return None
    of_logits, parts = [r for r in reductions if r.is_of_logits], list[tuple[int, Segments]]()
    for start in distributed.shard(range(0, len(sample.ids), batch)):
        ids = sample.ids[start : start + batch].to(model.embed.weight.device)
        logits, segments = model.run_with_segments(ids, everywhere=bool(of_logits))
        for reduction in of_logits:
            given = {"logits": logits, "tokens": ids}
            given |= {} if segments.counted is None else {"counted": segments.counted}
            reduction.feed(None, given, range(start, start + len(ids)), None if segments.is_whole else segments)
        parts.append((start, segments.to("cpu")))
        del logits
    everything = itertools.chain.from_iterable(distributed.all_gather(parts))
    together = Segments.cat([segments for _, segments in sorted(everything, key=lambda part: part[0])])
    return None if together.is_whole else together


def run_pass(model: Transformer, sample: Sample, reductions: Sequence[Reduction], batch: int) -> None:
    """Run the model over the sample once; a layer's activations are freed as soon as its metrics have read them.

    `read_segments` has already measured the metrics of an observed module's logits.
    """
    layers = [None, *range(model.config.n_layers + 1), "final"]
    plan = {layer: [(r, hooks) for r in reductions if (hooks := r.hooks(layer, model))] for layer in layers}
    weights = {layer: _weights_of(layer, model) for layer in layers}
    foreign = model.foreign is not None
    of_logits = [] if foreign else [reduction for reduction in reductions if reduction.is_of_logits]
    starts = range(0, len(sample.ids), batch) if of_logits or any(plan.values()) else range(0)
    for start in distributed.shard(starts):
        ids = sample.ids[start : start + batch].to(model.embed.weight.device)
        documents = range(start, start + len(ids))
        here = None if sample.segments is None else sample.segments.rows(start, start + batch).to(ids.device)
        reducers = [
            hook
            for layer, entries in plan.items()
            for hook in _reducers(
                layer, entries, {"tokens": ids} | weights[layer], documents, here, model.attention_window
            )
        ]
        with torch.no_grad(), model.hooks(reducers), model.by_document(here) if foreign else nullcontext():
            logits = model(ids)
        for reduction in of_logits:
            reduction.feed(None, {"logits": logits, "tokens": ids}, documents)
        del logits  # often the largest tensor: freed before the next batch
    exchange(reductions)
    n = len(sample.ids)
    for reduction in reductions:
        for layer, count in reduction.rows_read.items():
            if count != n:
                raise WorkbenchError(
                    f"layer {layer} ran on {count} of {n} sequences, so {reduction.metric.name} would be a mean over these only: "
                    "measure sequences on which the same layers run"
                )


def exchange(reductions: Sequence[Reduction]) -> None:
    """Combine the results of all processes: batches in order, accumulators merged fold by fold."""
    parts = distributed.all_gather([reduction.parts for reduction in reductions])
    if len(parts) == 1:
        return
    facts = distributed.all_gather([(reduction.rows_read, reduction.windows) for reduction in reductions])
    for number, reduction in enumerate(reductions):
        reduction.rows_read = sum((of[number][0] for of in facts), Counter())
        for of in facts:
            reduction.windows |= of[number][1]
        each = [part[number] for part in parts]
        layers = {layer: None for part in each for layer in part}
        if reduction.metric.form == "per_sequence":
            turns = {layer: itertools.zip_longest(*(part.get(layer, ()) for part in each)) for layer in layers}
            reduction.parts = {layer: [t for turn in turns[layer] for t in turn if t is not None] for layer in layers}
            continue
        function, folds_ = reduction.metric.function, range(reduction.metric.folds)
        merged = {layer: [function(**reduction.options) for _ in folds_] for layer in layers}
        for part in each:
            for layer, folds in part.items():
                for fold, more in zip(merged[layer], folds, strict=True):
                    fold.merge(more)
        reduction.parts = merged


def _reducers(
    layer: Any,
    entries: Entries,
    given: Mapping[str, Tensor],
    documents: range,
    segments: Segments | None,
    window: Callable[[Any], int | None],
) -> list[tuple[str, Callable[..., None]]]:
    """Return hooks that hold a layer's activations and the given inputs until every metric has been updated."""
    alias_of = {hook: alias for _, hooks in entries for alias, hook in hooks.items()}
    waiting = {id(reduction): set(hooks.values()) for reduction, hooks in entries}
    held: dict[str, Any] = dict(given)

    @read_only
    def arrive(tensor: Tensor, hook: Any) -> None:
        held[alias_of[hook.name]] = tensor
        held["window"] = window(layer)
        for reduction, _ in entries:
            missing = waiting[id(reduction)]
            if hook.name in missing:
                missing.discard(hook.name)
                if not missing:
                    reduction.feed(layer, held, documents, segments)
        if not any(waiting.values()):
            held.clear()

    return [(hook, arrive) for hook in alias_of]


def record_rows(reduction: Reduction, sample: Sample, n_layers: int) -> Iterator[dict[str, Any]]:
    """Yield the records of a reduction."""
    yield from reduction.rows or ()
    for layer, parts in reduction.parts.items():
        unit = reduction.metric.units.get(reduction.variant or "", reduction.metric.unit)
        axes = _axes(reduction, layer, n_layers) | {"control": reduction.control, "unit": unit}
        if reduction.metric.form == "accumulated":
            used = parts[: len(sample.ids)]
            total, own, held_out = _result(reduction, used)
            groups = [[f for f in used if f is not fold] for fold in used] if len(used) > 2 else []
            left_out = [_result(reduction, group)[0] for group in groups]
            for key, numbers in total.items():
                value = torch.tensor(numbers, dtype=torch.double)
                error = torch.full_like(value, own.get(key, math.nan))
                if left_out and not math.isnan(own.get(key, 0.0)):  # NaN: the accumulator has no error
                    others = torch.tensor([one.get(key, (0 * value).tolist()) for one in left_out], dtype=torch.double)
                    error = ((len(used) - 1) / len(used) * (others - others.mean(0)).square().sum(0)).sqrt()
                unit = reduction.metric.units.get(key, reduction.metric.unit)
                named = getattr(reduction.metric.function, "axes", ["index"] * value.ndim)
                facts = {"variant": key or None, "unit": unit, "n": held_out or len(sample.ids)}
                yield from _spread(axes | facts, named, value, error)
            continue
        parts = [part[reduction.has_number(part)] for part in parts] if reduction.metric.found else parts
        if not any(len(part) for part in parts):
            continue
        mean, se, n = mean_and_error(parts)
        named = (*reduction.metric.axes, "head") if reduction.variant == "per_head" else reduction.metric.axes
        yield from _spread(axes, named, mean, se, n)
        if reduction.variant is None:
            yield from _control_rows(reduction, sample, axes)


def sample_rows(reduction: Reduction, sample: Sample, n_layers: int) -> Iterator[dict[str, Any]]:
    """Yield one value per document for a metric without a position axis."""
    if reduction.metric.form != "per_sequence" or set(reduction.metric.axes) - {"head"}:
        return
    for layer, parts in reduction.parts.items():
        axes, values = _axes(reduction, layer, n_layers), torch.cat(parts)
        for document, row in zip(sample.documents, values, strict=True):
            heads = [{}] if values.ndim == 1 else [{"head": head} for head in range(values.shape[1])]
            for head, value in zip(heads, row.reshape(-1).tolist(), strict=True):
                yield axes | head | {"document": document, "value": value}


def _axes(reduction: Reduction, layer: Any, n_layers: int) -> dict[str, Any]:
    """Return the axes of a record; stream layers are numbered by their readers, and the final norm's output is site `final`."""
    where = {"site": "final", "layer": n_layers} if layer == "final" else {"site": reduction.site, "layer": layer}
    return where | {"variant": reduction.variant}


def _spread(
    axes: dict[str, Any], named: Sequence[str], mean: Tensor, se: Tensor, n: Tensor | None = None
) -> Iterator[dict[str, Any]]:
    """Yield one row per entry of `mean`, with its indices along the `named` axes; `n` counts documents per entry."""
    columns = [AXES[axis] for axis in named]
    places = itertools.product(*map(range, mean.shape))
    counts = [{}] * mean.numel() if n is None else [{"n": int(count)} for count in n.flatten().tolist()]
    for place, value, error, count in zip(places, mean.flatten().tolist(), se.flatten().tolist(), counts, strict=True):
        yield axes | count | dict(zip(columns, place, strict=True)) | {"value": value, "se": error}


def _control_rows(reduction: Reduction, sample: Sample, axes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield theoretical baselines of a per-sequence metric once per layer, without an error."""
    for name, control in reduction.metric.controls.items():
        reads = inspect.signature(control).parameters

        def of(ids: Tensor, control: Any = control, reads: Any = reads) -> Tensor:
            given = {"T": ids.shape[1], "tokens": ids, "window": reduction.windows.get(axes["layer"])}
            value = torch.as_tensor(control(**{a: given[a] for a in reads}), dtype=torch.double)
            return value if "tokens" in reads else value[None]  # one per sequence

        if sample.segments is None:
            value = of(sample.ids).mean(0)
        else:
            rows = list[Tensor]()
            for row, ids in enumerate(sample.ids):
                documents = reduction.documents(sample.segments, row)
                rows.append(weighted_mean([of(ids[None, at]) for at in documents], [len(at) for at in documents]))
            value = mean_and_error(rows)[0]
        if value.isnan().all():  # uniform attention over keys that no window describes
            continue
        named = [axis for axis in reduction.metric.axes if axis != "head"] if value.ndim else []
        yield from _spread(axes | {"control": name}, named, value, torch.full_like(value, math.nan))


def _result(
    reduction: Reduction, parts: Iterable[Any]
) -> tuple[Mapping[str, float | list[float]], Mapping[str, float], int | None]:
    """Return (values, errors that the accumulator computes itself, its number of held-out documents)."""
    total = reduction.metric.function(**reduction.options)
    for part in parts:
        total.merge(part)
    result = total.result()
    return (
        result if isinstance(result, Mapping) else {"": result},
        getattr(total, "errors", {}),
        getattr(total, "documents_held_out", None),
    )
