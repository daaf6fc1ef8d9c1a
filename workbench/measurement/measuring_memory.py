"""Estimate of a measurement's memory: run on a few documents, its storages are counted and extrapolated linearly."""

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
from workbench.data.data_sources import Sample
from workbench.errors import BadData
from workbench.measurement.measuring import measure
from workbench.metrics import METRICS
from workbench.models import build
from workbench.models.tensor_memory import LiveBytes, memory_table

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
    hash: str = "random"

    def batch(self, step: int, size: int, T: int, seed: int) -> Tensor:
        return torch.randint(self.d_vocab, (size, T), generator=torch.Generator().manual_seed(step + seed))


def measuring_memory(
    architecture: str, model: ModelConfig, metrics: str | Sequence[str], *, n: int = 64, T: int = 128, batch: int = 8,
    progress: Progress | None = None, **options: Any,
) -> pd.DataFrame:  # fmt: skip
    """Return the peak memory of `measure` for n documents of T tokens, `batch` at a time; see `training_memory`.

    Memory besides tensors is complete only in a process that has not measured before, as on the command line.
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
        data = _Random(built.config.d_vocab)
        ids = data.batch(0, documents, T, documents + at_once)
        with _Resident(built.parameters()) as live:
            measure(built, metrics, Sample(ids, range(documents), "random", "tokens", data), batch=at_once)
        peaks.append(live.peak - weights)
        beside = max(beside, live.max_rss - start - live.peak)
        parameters = sum(p.numel() for p in built.parameters())
        del built, live
        gc.collect()  # reference cycles such as models; freed memory goes back to the system if the C library can do that
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
        if trim is not None:
            trim(0)
    passing, statistics = on_a_line(peaks, groups, n)
    rows = [
        ("weights", weights, f"{parameters:,} parameters of 4 bytes"),
        ("activations", passing * min(batch, n), f"of {min(batch, n)} x {T} tokens at a time"),
        ("statistics", statistics, f"sums and values of {n} documents, and constant parts"),
        ("allocator", beside, ALLOCATOR),
    ]
    return memory_table(rows, LIBRARIES)


def on_a_line(peaks: Sequence[int], groups: int, n: int) -> tuple[int, int]:
    """Return the bytes of one document's pass and those stored for `n`, from `peaks` of `groups`, twice as many, and two at a time."""
    one, more, two = peaks
    stored, passing = max(more - one, 0) / groups, max(two - more, 0)
    return passing, round(max(one - passing - stored * groups, 0) + stored * n)
