"""Learnable ResFormers: the coefficients of the value residual are trained, one pair for each layer.

V_n = lambda_n1 V_1 + lambda_n2 V_n^own for n >= 2. Learnable: both are unconstrained and start at `lambda_v1` and `lambda_own`.
Learnable-Plus: lambda_n1 = scale * softmax over n = 2..L of logits, with one scale for all layers; lambda_n2 as in Learnable.

Source: Zhou et al. (2025), Value Residual Learning, as reported by others: starts 0.5 and 0.5; for Plus own 0.5 and
scale L. Reports disagree on the start of the logits: `plus_logit_init` is `zeros` (lambda_n1 = L / (L - 1)), `randn:<sd>`, or
`ramp:<slope>` (slope * (n - 2)). The papers do not say whether weight decay applies to the coefficients: `decay_lambda`, off.
Seam: `weights` of the values, as in the fixed form; V_1 is not detached. Layers whose values have a shared source mix nothing, so a
combination that would leave coefficients without effect is refused.
Parameters: 2 (L - 1); Plus 2 (L - 1) + 1.
Cache: 2 L T D.
Degenerate case: lambda_n1 = 0, lambda_n2 = 1 (Plus: scale 0) is the vanilla decoder. At the start Learnable is the
identity form and Plus the constant form (L / (L - 1), 0.5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.errors import WorkbenchError
from workbench.models.options import number_option
from workbench.models.shortcut import Memory, Projection, Shortcut, Source, Weight


class LearnableResFormer(Shortcut):
    """Value residual with a trained pair of coefficients for each layer after the first."""

    prefix = "resformer_learnable"

    def __init__(
        self, config: ModelConfig, *, lambda_v1: float = 0.5, lambda_own: float = 0.5, decay_lambda: bool = False
    ) -> None:
        super().__init__(config)
        self.lambda_v1, self.lambda_own = number_option("lambda_v1", lambda_v1), number_option("lambda_own", lambda_own)
        self.decays = self.decay_lambda = bool(decay_lambda)
        self.first = nn.Parameter(torch.full((config.n_layers - 1,), self.lambda_v1))
        self.own = nn.Parameter(torch.full((config.n_layers - 1,), self.lambda_own))

    def first_weights(self) -> Tensor:
        """Return lambda_n1 of the layers n = 2..L."""
        return self.first

    def sources(self, tensor: str, layer: int) -> tuple[Source, ...]:
        return (0,) if tensor == "v" and layer > 0 else ()

    def prepare(self, tokens: Tensor) -> Memory:
        return {self.prefix: list(zip(self.first_weights().unbind(), self.own.unbind(), strict=True))}

    def weights(self, projection: Projection, layer: int, memory: Memory, x: Tensor) -> Sequence[Weight]:
        return memory[self.prefix][layer - 1]

    def coefficients(self) -> dict[str, list[float]]:
        missing = [math.nan]
        return {"lambda_v1": missing + self.first_weights().tolist(), "lambda_own": missing + self.own.tolist()}


class PlusResFormer(LearnableResFormer):
    """Learnable-Plus: the coefficients of V_1 share a trained total."""

    prefix = "resformer_learnable_plus"

    def __init__(
        self,
        config: ModelConfig,
        *,
        lambda_own: float = 0.5,
        plus_logit_init: str = "zeros",
        plus_scale_init: float | None = None,
        decay_lambda: bool = False,
    ) -> None:
        super().__init__(config, lambda_own=lambda_own, decay_lambda=decay_lambda)
        self.plus_logit_init = plus_logit_init
        scale = config.n_layers if plus_scale_init is None else plus_scale_init
        self.plus_scale_init = number_option("plus_scale_init", scale)
        kind, _, size = str(plus_logit_init).partition(":")
        try:
            self.start = kind, float(size or (0 if kind == "zeros" else "nan"))
        except ValueError:
            self.start = kind, math.nan
        if kind not in ("zeros", "randn", "ramp") or not math.isfinite(self.start[1]):
            choices = "zeros, randn:<sd> or ramp:<slope>, as randn:0.1"
            raise WorkbenchError(f"plus_logit_init={plus_logit_init!r}: choose {choices}")
        del self.first
        slope = self.start[1] if kind == "ramp" else 0.0
        self.logits = nn.Parameter(slope * torch.arange(config.n_layers - 1, dtype=torch.get_default_dtype()))
        self.scale = nn.Parameter(torch.tensor(self.plus_scale_init))

    def initialise(self, draw: Callable[[str, Tensor], None]) -> None:
        if self.start[0] == "randn":
            draw("logits", self.logits)
            self.logits.mul_(self.start[1] / self.config.init_std)

    def first_weights(self) -> Tensor:
        return self.scale * self.logits.softmax(-1)
