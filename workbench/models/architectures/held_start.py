"""Control: the first position's value held at a norm from the first step on, so that it cannot be drained, or is nothing.

V_n[0] = start_norm V_n^own[0] / |V_n^own[0]| for each key-value head, 0 for start_norm = 0; other positions as they are.

Source: this project, the causal arm of attention sinks and drained values, which grow together in Guo et al. (2024), arXiv
2410.13835: a sink whose value is something adds it to every output, one whose value is nothing from the start costs nothing.
Seam: own values.
Parameters: none.
Cache: 2 L T D.
Degenerate case: start_norm = free is the vanilla decoder.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.config import ModelConfig
from workbench.errors import WorkbenchError
from workbench.models.shortcut import Shortcut, number

TINY = 1e-12  # below this norm a direction is rounding


class HeldStart(Shortcut):
    """The first position's value at a set norm."""

    prefix = "held_start"

    def __init__(self, config: ModelConfig, *, start_norm: float | str = 0.0) -> None:
        super().__init__(config)
        if isinstance(start_norm, str) and start_norm != "free":
            raise WorkbenchError(f"start_norm={start_norm!r}: choose 'free' or a norm, as 0.0 or 1.0")
        self.start_norm = start_norm if isinstance(start_norm, str) else number("start_norm", start_norm, minimum=0.0)

    def own_value(self, layer: int, v: Tensor, x: Tensor, past: int) -> Tensor:
        if past or isinstance(self.start_norm, str):
            return v
        norm = v[:, :1].norm(dim=-1, keepdim=True).clamp_min(TINY)
        return torch.cat((v[:, :1] * (self.start_norm / norm), v[:, 1:]), dim=1)
