"""Control: the first layer's attention pattern is mixed into every later layer's.

A_n' = lambda_a1 A_1 + lambda_a_own A_n after the softmax (`attn_mix = prob`), or the mixture of the scaled scores before it
(`attn_mix = logit`); U_n = A_n' V_n for layers n >= 2.

Source: Zhou et al. (2025), Value Residual Learning, ablation over residual targets, as reported by others; the published
place and weights are unknown, the defaults keep the rows' sums at 1.
Seam: the attention. With `prob` there is no log-sum-exp of the mixture.
Parameters: none.
Cache: 2 L T D; the first layer's keys are its own entry.
Degenerate case: lambda_a1 = 0, lambda_a_own = 1 is the vanilla decoder.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.config import ModelConfig
from workbench.kernels.joint import Softmax
from workbench.models.shortcut import Path, Reads, Shortcut, SoftmaxForm, Source, Weights, number, one_of


class AttentionResidual(Shortcut):
    """Fixed-coefficient residual of attention patterns."""

    prefix = "residual_attention"
    branch = "source"

    def __init__(
        self, config: ModelConfig, *, lambda_a1: float = 0.5, lambda_a_own: float = 0.5, attn_mix: str = "prob"
    ) -> None:
        super().__init__(config)
        self.lambda_a1, self.lambda_a_own = number("lambda_a1", lambda_a1), number("lambda_a_own", lambda_a_own)
        self.attn_mix = one_of("attn_mix", attn_mix, ("prob", "logit"))

    def sources(self, tensor: str, layer: int) -> tuple[Source, ...]:
        return (0,) if tensor in ("rot_q", "rot_k") and layer > 0 else ()

    def attends(self, layer: int) -> SoftmaxForm:
        return "" if layer == 0 else "mixture" if self.attn_mix == "prob" else "softmax"

    def constants(self, path: Path, layer: int) -> dict[str, float]:
        return {"first": self.lambda_a1, "own": self.lambda_a_own} if path == "pattern" and layer > 0 else {}

    def softmaxes(self, layer: int, q: Tensor, k: Tensor, read: Reads, weights: Weights) -> list[Softmax]:
        first_q, first_k = read["rot_q"][0], read["rot_k"][0]
        if self.attn_mix == "prob":
            return [Softmax(weights["first"], first_q, [first_k]), Softmax(weights["own"], q, [k])]
        # one softmax over heads twice as wide; the kernel divides by sqrt(2 d_head)
        both = torch.cat((weights["first"] * first_q, weights["own"] * q), -1) * 2**0.5
        return [Softmax(1.0, both, [torch.cat((first_k, k), -1)])]
