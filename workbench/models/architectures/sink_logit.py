"""Sink logits: each head's softmax has one additional column that is no key, so a head can attend to nothing.

A_ij = e^{s_ij} / (sum over k <= i of e^{s_ik} + e^{b_{n,h}}), U_n = A_n V_n. b is one number per layer and head, learned
(`logit` = learned) or 0 (`logit` = zero, off by one). `attn.hook_null` shows the column's probability, 1 - sum_j A_ij.

Source: gpt-oss (OpenAI 2025), b from N(0, init_std) as in its implementation in transformers. Off by one: Miller (2023),
Attention Is Off By One.
Seam: `softmaxes`; `logits.<layer>` [head]. Rows sum to less than 1: entropy and importance count the rest as one more column.
Parameters: L H; none for `zero`.
Cache: 2 L T D.
Degenerate case: b -> -infinity is the vanilla decoder; b -> infinity sets every head output to 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.kernels.joint_and_null_softmax import Softmax
from workbench.models.options import choice_option
from workbench.models.shortcut import Reads, Shortcut, SoftmaxForm, Weights


class SinkLogit(Shortcut):
    """One additional column in each softmax."""

    prefix = "sink_logit"
    random = "all"

    def __init__(self, config: ModelConfig, *, logit: str = "learned") -> None:
        super().__init__(config)
        self.logit = choice_option("logit", logit, ("learned", "zero"))
        learned = (nn.Parameter(torch.zeros(config.n_heads)) for _ in range(config.n_layers))
        self.logits = nn.ParameterList(learned if logit == "learned" else ())

    def attends(self, layer: int) -> SoftmaxForm:
        return "null"

    def softmaxes(self, layer: int, q: Tensor, k: Tensor, read: Reads, weights: Weights) -> list[Softmax]:
        null = self.logits[layer] if self.logit == "learned" else q.new_zeros(q.shape[2])
        return [Softmax(1.0, q, [k], null)]

    def coefficients(self) -> dict[str, list[float]]:
        return {"sink_logit": [float(logits.mean()) for logits in self.logits]} if self.logit == "learned" else {}

    @classmethod
    def options_for(cls, shapes: Mapping[str, Sequence[int]], config: ModelConfig) -> list[dict[str, Any]]:
        return [{"logit": "learned" if shapes else "zero"}]
