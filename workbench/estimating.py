"""How much memory a training or a measurement will need, before it runs.

Training: one step of the real model is run on fake tensors, which have shapes and no numbers, while every storage that comes
and goes is counted. Measuring: the real thing on a few documents of random tokens, counted the same way, and
continued in a straight line, since what a metric does may depend on the numbers; what the process takes beside its tensors
is seen there too. Both count the tensors of a CPU; kernels of other devices keep other things, by a few per cent of the activations.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import psutil
import torch
import torch._dynamo  # as an optimiser's first step does: 70 MiB of code
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from workbench.config import ModelConfig, TrainConfig
from workbench.data import Sample
from workbench.errors import BadData
from workbench.measuring import measure
from workbench.memory import LiveBytes
from workbench.metrics import METRICS
from workbench.models import build, compose
from workbench.models.transformer import Transformer
from workbench.recipe import rate_factors

OUTPUT_SEQUENCES = 4  # of which validation differentiates the output


# ---- training --------------------------------------------------------------------------------------------------------


def training_memory(architecture: str, model: ModelConfig, train: TrainConfig, **options: Any) -> pd.DataFrame:
    """Bytes of a training at its peak, on one process: columns `part`, `bytes`, what each is; the last row is the total.

    The corpus is not in it. Raises what training would raise for names, options and shapes.
    """
    with FakeTensorMode():
        built = compose(architecture, model, **options).train()
        rate_factors((name for name, _ in built.named_parameters()), train)
        weights = sum(p.numel() * p.element_size() for p in built.parameters())
        with LiveBytes(built.parameters()) as live:
            passing = _step(built, train, live)
            passing = max(passing, _output_gradient(built, train, live))
    state = 2 * weights
    return _table(
        [
            ("weights", weights, f"{sum(p.numel() for p in built.parameters()):,} parameters of 4 bytes"),
            ("optimiser", state, "two moments of AdamW"),
            ("gradients", weights, "of the step before, kept during the forward pass"),
            ("activations", max(passing - weights, 0), f"at the worst moment of {train.batch} x {train.T} tokens"),
        ]
    )


def _step(model: Transformer, train: TrainConfig, live: LiveBytes) -> int:
    """Most bytes beside weights and moments in a step; the gradients of the step before live until its backward pass."""
    weights = live.now
    ids = torch.zeros(train.batch, train.T, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=train.bf16):
        loss = model(ids, return_type="loss", loss_per_token=True).mean()
    forward = live.peak
    live.peak = live.now
    loss.backward()
    found = max(forward, live.peak - weights)  # forward and gradients: the weights count as the gradients' size
    model.zero_grad(set_to_none=True)
    return found


def _output_gradient(model: Transformer, train: TrainConfig, live: LiveBytes) -> int:
    """The same of the output's gradient on a few sequences, which validation notes beside the gradients of the last step."""
    live.peak = live.now
    ids = torch.zeros(min(OUTPUT_SEQUENCES, train.validation_sequences), train.T, dtype=torch.long)
    torch.autograd.grad(model(ids).max(-1).values.mean(), list(model.parameters()))
    return live.peak


# ---- measuring -------------------------------------------------------------------------------------------------------


class _Resident(LiveBytes):
    """Live bytes, and the most that the process held beside them: code read in on first use, memory freed and not given back."""

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__(held)
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, PROCESS.memory_info().rss)
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
    progress: Callable[[str], None] | None = None,
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
    held: dict[tuple[int, int], int] = {}
    weights = parameters = beside = 0
    start = PROCESS.memory_info().rss
    for documents, at_once in ((groups, 1), (2 * groups, 1), (2 * groups, 2)):
        if progress:
            progress(f"{documents} documents, {at_once} at a time")
        built = build(architecture, model, **options)  # anew: what was measured of a model is not measured again
        weights = sum(p.numel() * p.element_size() for p in built.parameters())
        ids = _Random(model.d_vocab).batch(0, documents, T, documents + at_once)
        sample = Sample(ids, range(documents), "random", "tokens", _Random(model.d_vocab))
        with _Resident(built.parameters()) as live:
            measure(built, metrics, sample, batch=at_once)
        held[documents, at_once] = live.peak - weights
        beside = max(beside, live.most - start - live.peak)
        parameters = sum(p.numel() for p in built.parameters())
        del built, live
        _give_back()  # what one trial leaves behind is not the next one's
    one, more, two = held.values()
    kept, passing = max(more - one, 0) / groups, max(two - more, 0)
    statistics = max(one - passing - kept * groups, 0) + kept * n
    return _table(
        [
            ("weights", weights, f"{parameters:,} parameters of 4 bytes"),
            ("activations", passing * min(batch, n), f"of {min(batch, n)} x {T} tokens at a time"),
            ("statistics", round(statistics), f"sums and values of {n} documents, and what does not depend on them"),
            (
                "allocator",
                beside,
                "code read in on first use, and memory freed and not given back, as on a few documents; on many it may keep "
                "as much as the activations",
            ),
        ]
    )


def _give_back() -> None:
    """Free what refers to itself, as models do, and where the C library can, return freed memory to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


# ---- tables ----------------------------------------------------------------------------------------------------------


PROCESS = psutil.Process()
LIBRARIES = PROCESS.memory_info().rss  # at import


def _table(parts: Sequence[tuple[str, int, str]]) -> pd.DataFrame:
    parts = [*parts, ("libraries", LIBRARIES, "interpreter and imported code, before any tensor")]
    whole = ("total", sum(size for _, size, _ in parts), "without the corpus")
    frame = pd.DataFrame([*parts, whole], columns=["part", "bytes", "what"])
    frame.insert(2, "MiB", (frame["bytes"] / 2**20).round(1))
    return frame
