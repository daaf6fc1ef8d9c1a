"""How much memory a measurement will need, before it runs.

The real thing is run on a few documents of random tokens while its storages are counted, and continued in a straight line,
since what a metric does may depend on the numbers; what the process takes beside its tensors is seen there too. The tensors
of a CPU are counted; kernels of other devices keep other things, by a few per cent of the activations.
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
    "code read in on first use, and memory freed and not given back, as on a few documents; on many it may keep as much as the "
    "activations"
)


class _Resident(LiveBytes):
    """Live bytes, and the most that the process held beside them: code read in on first use, memory freed and not given back."""

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__(held)
        self.max_rss = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.max_rss = max(self.max_rss, PROCESS.memory_info().rss)
        return out


@dataclass(frozen=True)
class _Random:
    """Where experiments that read training sequences find some."""

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
    """Bytes of `measure` at its peak for n documents of T tokens, `batch` at a time; see `training_memory`.

    Runs the metrics on four documents, on some twenty where they keep sums in groups of documents, and takes their time. What
    the process holds beside tensors is seen whole only in one that has not measured before, as on the command line.
    """
    if min(n, batch) < 1 or T < 2 or model.n_ctx < T:
        raise BadData(f"n={n}, batch={batch}, T={T}: at least one document of 2 to n_ctx={model.n_ctx} tokens")
    names = [metrics] if isinstance(metrics, str) else metrics
    # each group of documents has sums of its own, and the next batch is there before the last one is gone: from there on the
    # line is straight
    summed = [METRICS[name].folds for name in names if name in METRICS and METRICS[name].form == "accumulated"]
    groups = max(2, min(n, max(summed, default=1)))
    peaks, beside, start = list[int](), 0, PROCESS.memory_info().rss
    for documents, at_once in ((groups, 1), (2 * groups, 1), (2 * groups, 2)):
        if progress:
            progress(len(peaks), 3, f"{documents} documents, {at_once} at a time")
        built = build(architecture, model, **options)  # anew: what was measured of a model is not measured again
        weights = sum(p.numel() * p.element_size() for p in built.parameters())
        live = _trial(built, metrics, documents, at_once, T)
        peaks.append(live.peak - weights)
        beside = max(beside, live.max_rss - start - live.peak)
        parameters = sum(p.numel() for p in built.parameters())
        del built, live
        _free()  # what one trial leaves behind is not the next one's
    passing, statistics = on_a_line(peaks, groups, n)
    rows = [
        ("weights", weights, f"{parameters:,} parameters of 4 bytes"),
        ("activations", passing * min(batch, n), f"of {min(batch, n)} x {T} tokens at a time"),
        ("statistics", statistics, f"sums and values of {n} documents, and what does not depend on them"),
        ("allocator", beside, ALLOCATOR),
    ]
    return memory_table(rows, LIBRARIES)


def on_a_line(peaks: Sequence[int], groups: int, n: int) -> tuple[int, int]:
    """Bytes that one document takes while it passes, and what `n` documents leave behind.

    `peaks`: of `groups` documents one at a time, of twice as many, and of these two at a time.
    """
    one, more, two = peaks
    kept, passing = max(more - one, 0) / groups, max(two - more, 0)
    return passing, round(max(one - passing - kept * groups, 0) + kept * n)


def _trial(model: Any, metrics: str | Sequence[str], documents: int, batch: int, T: int) -> _Resident:
    """Measure random tokens while the bytes are counted."""
    data = _Random(model.config.d_vocab)
    sample = Sample(data.batch(0, documents, T, documents + batch), range(documents), "random", "tokens", data)
    with _Resident(model.parameters()) as live:
        measure(model, metrics, sample, batch=batch)
    return live


def _free() -> None:
    """Free what refers to itself, as models do, and where the C library can, return freed memory to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
