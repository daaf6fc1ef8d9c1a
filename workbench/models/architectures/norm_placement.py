"""Norm placement: norms after attention and MLP, or DyT instead of the norms.

`norms` = sandwich: x + norm f(norm x). `norms` = post: x + norm f(x), with Q and K normed over their full width before the rotation.
`norms` = dyt: x + f(g tanh(a x) + b) for each element, where a is one number per norm. The final norm is unchanged.

Source: arXiv 2603.05498 (2026), in which the norms decide whether massive activations and sinks appear together. Gemma 2 has sandwich
norms, OLMo 2 output norms. DyT: Zhu et al. (2025), Transformers without Normalization. Gains start at 1, a at 0.8 before
attention and at 0.2 before the MLP, b at 0.
Seam: `norms` (`layers.py`); the parameters are in the blocks: `ln1_post`, `ln2_post`, `attn.q_proj.norm`, `attn.k_proj.norm`.
Parameters: sandwich 2 L d. post L (d + D) if each layer projects queries and keys, because its input norms go. dyt 2 L (d + 1).
Cache: 2 L T D.
Degenerate case: pre is the vanilla decoder. post: W_O c and W_down c are the same model for every c > 0, up to eps.
"""

from __future__ import annotations

from workbench.config import ModelConfig
from workbench.models.layers import PLACEMENTS
from workbench.models.options import choice_option
from workbench.models.shortcut import Shortcut


class NormPlacement(Shortcut):
    """Placement of the norms in the blocks."""

    prefix = "norm_placement"

    def __init__(self, config: ModelConfig, *, norms: str = "sandwich") -> None:
        super().__init__(config)
        self.norms = choice_option("norms", norms, PLACEMENTS)
