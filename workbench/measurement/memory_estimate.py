"""Estimate of a measurement's memory, before it runs.

The measurement runs on a few documents of random tokens while its storages are counted, and the counts are extrapolated
linearly, since a metric may depend on the numbers. This also shows the memory of the process besides its tensors. Kernels of
other devices than the CPU differ by a few per cent of the activations.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import psutil
import torch
import torch._dynamo
from torch import Tensor

from workbench.config import ModelConfig
from workbench.console import Progress
from workbench.data.sources import Sample
from workbench.errors import BadData
from workbench.measurement.measuring import measure
from workbench.metrics import METRICS
from workbench.models import build
from workbench.models.live_bytes import LiveBytes, memory_table

PROCESS = psutil.Process()
LIBRARIES = PROCESS.memory_info().rss  # at import
ALLOCATOR = (
    "code loaded on first use, and freed memory that is not returned, measured on a few documents; on many documents it may reach "
    "the size of the activations"
)


class _Resident(LiveBytes):
    """Live bytes, and the maximum resident memory of the process."""

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__(held)
        self.max_rss = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.max_rss = max(self.max_rss, PROCESS.memory_info().rss)
        return out


@dataclass(frozen=True)
class _Random:
    """Random data for experiments that read training sequences."""

    d_vocab: int

    def batch(self, step: int, size: int, T: int, seed: int) -> Tensor:
        return torch.randint(self.d_vocab, (size, T), generator=torch.Generator().manual_seed(step + seed))


def measuring_memory(
    architecture: str,
    model: ModelConfig,
    metrics: str | Sequence[str],
    *,
    n: int = 64,
    T: int = 128,
    batch: int = 8,
    progress: Progress | None = None,
    **options: Any,
) -> pd.DataFrame:
    """Return the peak memory of `measure` for n documents of T tokens, `batch` at a time; see `training_memory`.

    Runs the metrics on four documents, or on about twenty for metrics with sums in groups of documents. Memory besides tensors
    is complete only in a process that has not measured before, as on the command line.
    """
    if min(n, batch) < 1 or T < 2 or model.n_ctx < T:
        raise BadData(f"n={n}, batch={batch}, T={T}: at least one document of 2 to n_ctx={model.n_ctx} tokens")
    names = [metrics] if isinstance(metrics, str) else metrics
    # each group of documents has separate sums, and two batches overlap: memory is linear from there on
    summed = [METRICS[name].folds for name in names if name in METRICS and METRICS[name].form == "accumulated"]
    groups = max(2, min(n, max(summed, default=1)))
    peaks, beside, start = list[int](), 0, PROCESS.memory_info().rss
    for documents, at_once in ((groups, 1), (2 * groups, 1), (2 * groups, 2)):
        if progress:
            progress(len(peaks), 3, f"{documents} documents, {at_once} at a time")
        built = build(architecture, model, **options)  # a new model, since a model is not measured twice
        weights = sum(p.numel() * p.element_size() for p in built.parameters())
        live = _trial(built, metrics, documents, at_once, T)
        peaks.append(live.peak - weights)
        beside = max(beside, live.max_rss - start - live.peak)
        parameters = sum(p.numel() for p in built.parameters())
        del built, live
        _free()  # before the next trial
    passing, statistics = on_a_line(peaks, groups, n)
    rows = [
        ("weights", weights, f"{parameters:,} parameters of 4 bytes"),
        ("activations", passing * min(batch, n), f"of {min(batch, n)} x {T} tokens at a time"),
        ("statistics", statistics, f"sums and values of {n} documents, and constant parts"),
        ("allocator", beside, ALLOCATOR),
    ]
    return memory_table(rows, LIBRARIES)


def on_a_line(peaks: Sequence[int], groups: int, n: int) -> tuple[int, int]:
    """Return the bytes of one document's forward pass, and the bytes stored for `n` documents.

    `peaks` belong to `groups` documents one at a time, to twice as many, and to twice as many two at a time.
    """
    one, more, two = peaks
    stored, passing = max(more - one, 0) / groups, max(two - more, 0)
    return passing, round(max(one - passing - stored * groups, 0) + stored * n)


def _trial(model: Any, metrics: str | Sequence[str], documents: int, batch: int, T: int) -> _Resident:
    """Measure random tokens and count the bytes."""
    data = _Random(model.config.d_vocab)
    sample = Sample(data.batch(0, documents, T, documents + batch), range(documents), "random", "tokens", data)
    with _Resident(model.parameters()) as live:
        measure(model, metrics, sample, batch=batch)
    return live


def _free() -> None:
    """Collect reference cycles such as models, and return freed memory to the system if the C library can."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
