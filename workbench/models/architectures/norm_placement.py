"""Norms elsewhere than before attention and MLP, or another function in their place.

`norms` = sandwich: x + norm f(norm x); post: x + norm f(x), with Q and K normed over their full width before the rotation; dyt:
x + f(g tanh(a x) + b), element by element, a one number for each. The final norm stays.

Source: arXiv 2603.05498 (2026), in which norms decide whether massive activations and sinks come together. Sandwich is also
Gemma 2's, the output norm OLMo 2's, DyT Zhu et al. (2025), Transformers without Normalization. Gains start at 1, a at 0.8 before
attention and 0.2 before the MLP, b at 0.
Seam: the norms of a block (`norms.py`); its tensors stand in the blocks: `ln1_post`, `ln2_post`, `attn.q_proj.norm`.
Parameters: sandwich 2 L d; post L (d + D), for layers with queries and keys of their own, since its input norms go; dyt 2 L (d + 1).
Cache: 2 L T D.
Degenerate case: pre is the vanilla decoder. post: W_O c and W_down c are the same model for every c > 0, up to eps.
"""

from __future__ import annotations

from workbench.config import ModelConfig
from workbench.models.norms import PLACEMENTS
from workbench.models.shortcut import Shortcut, one_of


class NormPlacement(Shortcut):
    """Where the norms of the blocks stand."""

    prefix = "norm_placement"

    def __init__(self, config: ModelConfig, *, norms: str = "sandwich") -> None:
        super().__init__(config)
        self.norms = one_of("norms", norms, PLACEMENTS)
