"""How an experiment on a whole model is registered: `@intervention` on a generator of record rows."""

from __future__ import annotations

import inspect
import math
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.hook_names import ACTIVATIONS, stream_hook
from workbench.metrics.found_sinks import column_excess, sink_positions
from workbench.metrics.residual import loss
from workbench.observing.interception.documents_and_labels import Segments, weighted_mean

Experiment = Callable[..., Iterator[dict[str, Any]]]


@dataclass(frozen=True)
class Intervention:
    """A registered experiment: `function(model, sample, data, batch)` yields record rows."""

    function: Experiment
    unit: str
    range: str
    reading: str
    source: str
    min_length: int = 2
    timed: bool = False  # its numbers are a clock's: they differ between runs, and another machine measures again
    version: int = 1  # raised whenever the numbers change, as a metric's (`workbench.metrics.metric`)
    by_document: bool = False  # whether it uses `sample.segments` to separate padding and packed documents
    found: bool = False  # whether it is of found sink positions instead of the first one

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (inspect.getdoc(self.function) or "").split("\n", 1)[0]

    @property
    def machine(self) -> tuple[Any, ...]:
        """Machine, device, threads and PyTorch version for timings; empty for other measures."""
        if not self.timed:
            return ()
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        return platform.node(), platform.machine(), gpu, torch.get_num_threads(), torch.__version__


INTERVENTIONS: dict[str, Intervention] = {}


def intervention(*, name: str | None = None, **settings: Any) -> Callable[[Experiment], Experiment]:
    """Register an experiment under its function's name, or a given one; `settings` are the fields of `Intervention`."""

    def register(function: Experiment) -> Experiment:
        function.__name__ = name or function.__name__
        INTERVENTIONS[function.__name__] = Intervention(function, **settings)
        return function

    return register


def batches_of(model: Any, sample: Any, batch: int) -> list[Tensor]:
    """The sample's ids [n, T] in batches on the model's device."""
    return [ids.to(model.embed.weight.device) for ids in sample.ids.split(batch)]


def hook_points(model: Any, site: str) -> dict[int, str]:
    """Hook point of a site at each layer where this model has it; the stream also has layer L, after the last block."""
    n_layers = model.config.n_layers
    if site == "stream":
        names = {n: stream_hook(n, n_layers) for n in range(n_layers + 1)}
    else:
        names = {n: ACTIVATIONS[site].hook.format(layer=n) for n in range(n_layers)}
    return {n: name for n, name in names.items() if name in model.hook_dict}


def sinks_by_layer(model: Any, ids: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """Return detected sink positions and column excess [batch, head, pos] by layer, for layers that show attention of a known mask."""
    hooks = [ACTIVATIONS[name].hook for name in ("received", "row_max")]
    points = {n: [hook.format(layer=n) for hook in hooks] for n in range(model.config.n_layers)}
    points = {n: names for n, names in points.items() if set(names) <= model.hook_dict.keys()}
    with torch.no_grad():
        _, cache = model.run_with_cache(ids, names_filter=[name for names in points.values() for name in names])
    windows = {n: window for n in points if (window := model.attention_window(n)) != 0}
    received, row_max = ({n: cache[points[n][at]] for n in windows} for at in (0, 1))
    return {
        n: (sink_positions(received[n], row_max[n], window), column_excess(received[n], window)[0])
        for n, window in windows.items()
    }


@contextmanager
def trainable(weights: Iterable[Tensor]) -> Iterator[None]:
    """While open, gradients reach weights that are frozen too."""
    frozen = [p for p in weights if not p.requires_grad]
    try:
        for p in frozen:
            p.requires_grad_(True)
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


@torch.no_grad()
def losses(model: Any, batches: Sequence[Tensor], segments: Segments | None = None) -> Tensor:
    """Mean next-token loss (nats) per row [float64, CPU]; with `segments` of the predicted tokens that count, as the metric `loss`."""
    if segments is None:
        parts = [model(ids, return_type="loss", loss_per_token=True).mean(1) for ids in batches]
        return torch.cat(parts).double().cpu()
    rows, each = iter(range(len(segments.ids))), list[Tensor]()
    for ids in batches:
        for logits, tokens in zip(model.everywhere(ids)[:, None], ids[:, None], strict=True):
            row = next(rows)
            counted = torch.ones_like(segments.ids[row]) if segments.counted is None else segments.counted[row]
            documents = [at for at in segments.documents_in(row) if bool(counted[at[1:]].any())]
            counted, documents = counted.bool().to(ids.device)[None], [at.to(ids.device) for at in documents]
            values = [loss(logits[:, at], tokens[:, at], counted[:, at]).double() for at in documents]
            weights = [int(counted[:, at[1:]].sum()) for at in documents]
            each.append(weighted_mean(values, weights) if values else torch.tensor([math.nan]))
    return torch.cat(each).cpu()


def mean_row(values: Tensor, **axes: Any) -> dict[str, Any]:
    """One row: mean over documents, its standard error, n."""
    values = values.double()
    se = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan
    return {**axes, "value": float(values.mean()), "se": se, "n": len(values)}


class ByDocument:
    """Numbers of every document, added batch by batch under the axes of their record row."""

    def __init__(self) -> None:
        self.parts: dict[tuple[tuple[str, Any], ...], list[Tensor]] = {}

    def add(self, values: Tensor, **axes: Any) -> None:
        """Add the values [document] of a batch."""
        self.parts.setdefault(tuple(axes.items()), []).append(values.cpu())

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the mean over documents, its standard error and n, for all axes in the order of their first value."""
        for axes, parts in self.parts.items():
            yield mean_row(torch.cat(parts), **dict(axes))
