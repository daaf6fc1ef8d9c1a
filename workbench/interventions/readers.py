"""Which part of the stream queries, keys and values each need: one of them reads without it, the rest of the layer as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from workbench.interventions.base import batches_of, intervention, losses, mean_row
from workbench.models.decomposition import decompose
from workbench.models.transformer import Transformer

PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}


@intervention(
    unit="nats", range="any", reading="higher: what this projection reads of it matters more",
    source="this project: removal from one reader at a time, of the mean over the document",
)  # fmt: skip
@torch.no_grad()
def reader_ablation(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Change of the loss when one layer's queries, keys or values (site) alone no longer read one part of the stream.

    Part `embed` is the embedding, `latest` the output of the preceding layer (attention and MLP). The part's deviation from
    its document mean, with its weight in the stream, is removed before the norm. Layers after the first with their
    projections. Unit: nats. Caution: parts of a stream may replace each other, so compare projections, not parts. Six runs
    per layer. Models whose modules are not ours have no rows.
    """
    changes: dict[tuple[str, int, str], list[Tensor]] = {}
    for ids in batches_of(model, sample, batch) if isinstance(model, Transformer) else ():
        plain = losses(model, [ids])
        for layer in range(1, model.config.n_layers):
            block = model.blocks[layer]
            readers = {site: name for site, name in PROJECTIONS.items() if hasattr(block.attn, name)}
            for part, without in _streams_without(model, ids, layer).items():
                reads = block.ln1(without)
                for site, name in readers.items():
                    with model.lock:
                        handle = getattr(block.attn, name).register_forward_pre_hook(
                            lambda _, __, reads=reads: (reads,)
                        )
                        try:
                            change = losses(model, [ids]) - plain
                        finally:
                            handle.remove()
                    changes.setdefault((site, layer, part), []).append(change)
    for (site, layer, part), parts in changes.items():
        yield mean_row(torch.cat(parts), site=site, layer=layer, part=part, unit="nats")


def _streams_without(model: Transformer, ids: Tensor, layer: int) -> dict[str, Tensor]:
    """Input of a block [batch, pos, d_model] without the token-dependent contribution of a part."""
    found = decompose(model, ids, layer)
    latest = f"{layer - 1}_"
    arriving = {
        "embed": found.parts[found.labels.index("embed")],
        "latest": sum(p for label, p in zip(found.labels, found.parts, strict=True) if label.startswith(latest)),
    }
    dtype = model.embed.weight.dtype
    return {part: (found.whole - (x - x.mean(1, keepdim=True))).to(dtype) for part, x in arriving.items()}
