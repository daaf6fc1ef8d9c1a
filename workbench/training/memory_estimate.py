"""How much memory a training will need, before it runs.

One step of the real model is run on fake tensors, which have shapes and no numbers, while every storage that comes and goes
is counted. The tensors of a CPU are counted; kernels of other devices keep other things, by a few per cent of the activations.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import psutil
import torch
import torch._dynamo  # as an optimiser's first step does: 70 MiB of code
from torch._subclasses.fake_tensor import FakeTensorMode

from workbench.config import ModelConfig, TrainConfig
from workbench.models import compose
from workbench.models.live_bytes import LiveBytes, memory_table
from workbench.models.transformer import Transformer
from workbench.training.recipe import rate_factors

OUTPUT_SEQUENCES = 4  # of which validation differentiates the output
LIBRARIES = psutil.Process().memory_info().rss  # at import


def training_memory(architecture: str, model: ModelConfig, train: TrainConfig, **options: Any) -> pd.DataFrame:
    """Bytes of a training at its peak, on one process: columns `part`, `bytes`, what each is; the last row is the total.

    The corpus is not in it. Raises what training would raise for names, options and shapes.
    """
    with FakeTensorMode():
        built = compose(architecture, model, **options).train()
        rate_factors((name for name, _ in built.named_parameters()), train)
        weights = sum(p.numel() * p.element_size() for p in built.parameters())
        with LiveBytes(built.parameters()) as live:
            passing = max(_step(built, train, live), _output_gradient(built, train, live))
    parts = [
        ("weights", weights, f"{sum(p.numel() for p in built.parameters()):,} parameters of 4 bytes"),
        ("optimiser", 2 * weights, "two moments of AdamW"),
        ("gradients", weights, "of the step before, kept during the forward pass"),
        ("activations", passing - weights, f"at the worst moment of {train.batch} x {train.T} tokens"),
    ]
    return memory_table(parts, LIBRARIES)


def _step(model: Transformer, train: TrainConfig, live: LiveBytes) -> int:
    """Most bytes beside weights and moments in a step; the gradients of the step before live until its backward pass."""
    weights = live.now
    ids = torch.zeros(train.batch, train.T, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=train.bf16):
        loss = model(ids, return_type="loss", loss_per_token=True).mean()
    forward = live.peak
    live.peak = live.now
    loss.backward()
    peak = max(forward, live.peak - weights)  # forward and gradients: the weights count as the gradients' size
    model.zero_grad(set_to_none=True)
    return peak


def _output_gradient(model: Transformer, train: TrainConfig, live: LiveBytes) -> int:
    """The same of the output's gradient on a few sequences, which validation notes beside the gradients of the last step."""
    live.peak = live.now
    ids = torch.zeros(min(OUTPUT_SEQUENCES, train.validation_sequences), train.T, dtype=torch.long)
    torch.autograd.grad(model(ids).max(-1).values.mean(), list(model.parameters()))
    return live.peak
