"""Estimate of a training's memory, before it runs.

The real model runs one step on fake tensors, which have shapes but no numbers, while all storages are counted. Kernels of
other devices than the CPU differ by a few per cent of the activations. The code of a first step is measured on a small model.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch
import torch._dynamo  # as an optimiser's first step does: 70 MiB of code
from torch._subclasses.fake_tensor import FakeTensorMode

from workbench.config import ModelConfig, TrainConfig
from workbench.models import build, compose
from workbench.models.tensor_memory import LiveBytes, memory_table
from workbench.runs.records import read_parquet, records, write_parquet
from workbench.training.loop import optimiser, rate_factors

OUTPUT_SEQUENCES = 4  # sequences on which validation differentiates the output
PROCESS = psutil.Process()
LIBRARIES = PROCESS.memory_info().rss  # at import


def training_memory(architecture: str, model: ModelConfig, train: TrainConfig, **options: Any) -> pd.DataFrame:
    """Return the peak memory of a training in one process, without the corpus: one row per part, then the total.

    The memory of code is complete only in a process that has not trained before, as on the command line.
    Raises the errors of `train` for wrong names, options and shapes.
    """
    code = code_of_a_step()  # before the fake step, which loads a part of it
    with FakeTensorMode():
        built = compose(architecture, model, **options).train()
        rate_factors((name for name, _ in built.named_parameters()), train)
        weights = sum(p.numel() * p.element_size() for p in built.parameters())
        with LiveBytes(built.parameters()) as live:
            held = live.now
            ids = torch.zeros(train.batch, train.T, dtype=torch.long)
            with torch.autocast("cpu", torch.bfloat16, enabled=train.bf16):
                loss = built(ids, return_type="loss", loss_per_token=True).mean()
            forward = live.peak
            live.peak = live.now
            loss.backward()
            # forward, with the gradients of the previous step: the weights count as their size
            step = max(forward, live.peak - held)
            built.zero_grad(set_to_none=True)
            del ids, loss
            live.peak = live.now
            # validation differentiates the output beside the gradients of the last step
            few = torch.zeros(min(OUTPUT_SEQUENCES, train.validation_sequences), train.T, dtype=torch.long)
            torch.autograd.grad(built(few).max(-1).values.mean(), list(built.parameters()))
            passing = max(step, live.peak)
    parts = [
        ("weights", weights, f"{sum(p.numel() for p in built.parameters()):,} parameters of 4 bytes"),
        ("optimiser", 2 * weights, "two moments of AdamW"),
        ("gradients", weights, "of the previous step, during the forward pass"),
        ("activations", passing - weights, f"at the worst moment of {train.batch} x {train.T} tokens"),
        ("code", code, "loaded by the first step and the first file, measured on a small model"),
    ]
    return memory_table(parts, LIBRARIES)


@cache
def code_of_a_step() -> int:
    """Return the bytes by which a first training step and a first table on disk make this process grow, from a model of 4 KiB."""
    before, recipe = PROCESS.memory_info().rss, TrainConfig(steps=1, batch=1, T=4)
    small = build("transformer", ModelConfig(n_layers=1, d_model=8, n_heads=1, d_mlp=8, d_vocab=32, n_ctx=4)).train()
    step = optimiser(small, recipe)
    small(torch.zeros(1, 4, dtype=torch.long), return_type="loss", loss_per_token=True).mean().backward()
    torch.nn.utils.clip_grad_norm_(small.parameters(), recipe.clip)
    step.step()
    with tempfile.TemporaryDirectory() as folder:
        write_parquet(records([{"step": 0, "metric": "loss", "value": 0.0}]), table := Path(folder) / "table.parquet")
        read_parquet([table])
    return max(PROCESS.memory_info().rss - before, 0)
