"""Control: the first position's value has a fixed norm or is zero from the first step on, so training cannot shrink it.

V_n[0] = start_norm V_n^own[0] / |V_n^own[0]| for each key-value head, 0 for start_norm = 0. Other positions are unchanged, or have the
norm `others_norm`; then the ratio of the two norms is constant, too.

Source: this project. It tests the causal link between attention sinks and small values of the first token, which grow together in Guo et
al. (2024), arXiv 2410.13835. A sink with a non-zero value adds it to every output; a sink with a zero value costs nothing.
Seam: `own_value`.
Parameters: none.
Cache: 2 L T D.
Degenerate case: start_norm = others_norm = free is the vanilla decoder.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.config import ModelConfig
from workbench.errors import WorkbenchError
from workbench.models.options import number_option
from workbench.models.shortcut import Shortcut

TINY = 1e-12  # below this norm a direction is rounding


class HeldStart(Shortcut):
    """A fixed norm of the first position's value, and optionally of the others."""

    prefix = "held_start"

    def __init__(
        self, config: ModelConfig, *, start_norm: float | str = 0.0, others_norm: float | str = "free"
    ) -> None:
        super().__init__(config)
        self.start_norm, self.others_norm = _norm("start_norm", start_norm), _norm("others_norm", others_norm)

    def own_value(self, layer: int, v: Tensor, x: Tensor, past: int) -> Tensor:
        starts = 0 if past else 1
        return torch.cat((_held(v[:, :starts], self.start_norm), _held(v[:, starts:], self.others_norm)), dim=1)


def _norm(name: str, value: float | str) -> float | str:
    if isinstance(value, str) and value != "free":
        raise WorkbenchError(f"{name}={value!r}: choose 'free' or a norm, as 0.0 or 1.0")
    return value if isinstance(value, str) else number_option(name, value, minimum=0.0)


def _held(v: Tensor, norm: float | str) -> Tensor:
    return v if isinstance(norm, str) else v * (norm / v.norm(dim=-1, keepdim=True).clamp_min(TINY))
