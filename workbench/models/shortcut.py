"""What an architecture may change about the vanilla decoder: four seams, composed, never copied.

| seam | where | who uses it |
|---|---|---|
| `owns` | which projections a layer has, at construction | SVFormer |
| `sources`, `weights` | q, k, v: a weighted sum of earlier layers' and the layer's own | ResFormer, SVFormer, K residual |
| `output` | after pattern x value, before W_O and before `hook_z` | NeuTRENO |
| `stream` | after the block; sees the embedding and the raw block outputs so far | DenseFormer |

A source of a tensor is that tensor as its layer projected it, before any mixing there; layer 0's is what layer 0
attends with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from workbench.config import ModelConfig

Projection = Literal["q", "k", "v"]
Weight = float | Tensor


class Shortcut(nn.Module):
    """A difference from the vanilla decoder, at one or more seams; layers are numbered from 0."""

    prefix: ClassVar[str]
    """Name of the submodule, hence of its tensors in a checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def owns(self, projection: Projection, layer: int) -> bool:
        """Whether `layer` has its own query, key or value projection."""
        return True

    def sources(self, projection: Projection, layer: int) -> tuple[int, ...]:
        """Earlier layers whose query, key or value this shortcut reads at `layer`."""
        return ()

    def mixes(self, projection: Projection, layer: int) -> bool:
        """Whether `weights` defines this tensor at `layer`; at most one shortcut of a model may."""
        return False

    def weights(self, projection: Projection, layer: int) -> Sequence[Weight]:
        """Coefficients of the sources in their order, the layer's own last."""
        raise NotImplementedError

    def output(self, layer: int, z: Tensor, v: Tensor, sources: Mapping[int, Tensor]) -> Tensor:
        """Head outputs [batch, pos, head, d_head] from themselves, the effective and the source values."""
        return z

    def stream(self, layer: int, history: Sequence[Tensor], weights: Tensor) -> Tensor:
        """What the next block reads, from the embedding and the raw block outputs 0..layer."""
        raise NotImplementedError

    def stream_weights(self, layer: int) -> Tensor | None:
        """Coefficients of `stream` at `layer`, None where the block output passes unchanged."""
        return None

    def coefficients(self) -> dict[str, list[float]]:
        """Numbers worth following over training: name -> one per layer (NaN where a layer has none)."""
        return {}

    @classmethod
    def options_for(cls, shapes: Mapping[str, Sequence[int]], config: ModelConfig) -> list[dict[str, Any]]:
        """Every setting under which this shortcut has just the tensors in `shapes` (its names, without prefix).

        Empty where tensors do not tell.
        """
        return []


def overrides(shortcut: Shortcut, method: str) -> bool:
    """Whether a shortcut uses a seam."""
    return getattr(type(shortcut), method) is not getattr(Shortcut, method)


def mix(weights: Sequence[Weight], tensors: Sequence[Tensor | None]) -> Tensor:
    """Weighted sum; absent tensors are skipped, a float weight costs one pass."""
    total: Tensor | None = None
    for weight, tensor in zip(weights, tensors, strict=True):
        if tensor is None:
            continue
        if total is None:
            total = tensor if isinstance(weight, float) and weight == 1.0 else weight * tensor
        elif isinstance(weight, float):
            total = torch.add(total, tensor, alpha=weight)
        else:
            total = total + weight * tensor
    assert total is not None, "a layer without its own projection needs a source"
    return total
