"""Control: every later layer mixes its attention pattern with the first layer's pattern.

U_n = A_n' V_n for layers n >= 2, with A_n' = lambda_a1 A_1 + lambda_a_own A_n after the softmax (`attn_mix` = prob), or the softmax
of the same sum of scaled scores (`attn_mix` = logit).

Source: Zhou et al. (2025), Value Residual Learning, ablation over residual targets, as reported by others. Unconfirmed: before or
after the softmax, and the coefficients; with the defaults rows sum to 1.
Seam: `softmaxes`. With `prob` the mixture has no log-sum-exp.
Parameters: none.
Cache: 2 L T D, with the first layer's keys in its own entry.
Degenerate case: lambda_a1 = 0, lambda_a_own = 1 is the vanilla decoder.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.config import ModelConfig
from workbench.kernels.joint_and_null_softmax import Softmax
from workbench.models.options import choice_option, number_option
from workbench.models.shortcut import Path, Reads, Shortcut, SoftmaxForm, Source, Weights


class AttentionResidual(Shortcut):
    """Fixed-coefficient residual of attention patterns."""

    prefix = "residual_attention"
    branch = "source"

    def __init__(
        self, config: ModelConfig, *, lambda_a1: float = 0.5, lambda_a_own: float = 0.5, attn_mix: str = "prob"
    ) -> None:
        super().__init__(config)
        self.lambda_a1 = number_option("lambda_a1", lambda_a1)
        self.lambda_a_own = number_option("lambda_a_own", lambda_a_own)
        self.attn_mix = choice_option("attn_mix", attn_mix, ("prob", "logit"))

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
