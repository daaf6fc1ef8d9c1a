"""Norms, and where those of a block stand.

| placement | attention and MLP, f |
|---|---|
| `pre` | x + f(norm x) |
| `sandwich` | x + norm f(norm x) |
| `post` | x + norm f(x), queries and keys normed over their full width before the rotation |
| `dyt` | x + f(DyT x), DyT x = g tanh(a x) + b |

Each block has them as TransformerLens names them: `ln1` and `ln2` before attention and MLP (one that changes nothing under `post`),
`ln1_post` and `ln2_post` of what they put out; those of queries and keys stand in their projections, `attn.q_proj.norm`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.models.hook_points import HookedModule, is_hooked
from workbench.models.undrawn import Linear

PLACEMENTS = ("pre", "sandwich", "post", "dyt")
NORMS = ("ln1", "ln2", "ln1_post", "ln2_post")
ALPHA = {"ln1": 0.8, "ln2": 0.2}
"""What `a` of DyT starts with, before attention and before the MLP."""


class RMSNorm(HookedModule):
    """g x / sqrt(mean(x^2) + eps), statistics in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        # the divisor [batch, pos, 1]; before the gain [batch, pos, d_model]
        self.add_hook_points("scale", "normalized")

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        if not (self.hook_state.enabled and (is_hooked(self.hook_scale) or is_hooked(self.hook_normalized))):
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        scale = self.run_hook("hook_scale", (wide.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())
        return self.gained(self.run_hook("hook_normalized", (wide / scale).to(x.dtype)))

    def gained(self, normalized: Tensor) -> Tensor:
        """What it puts out, of what `hook_normalized` shows."""
        return normalized * self.weight

    def share(self, scale: Tensor) -> Tensor:
        """What it puts out of each part of x [..., width], by the divisor [..., 1] that it had for the whole."""
        return self.weight.detach().to(scale.dtype) / scale


class OutputNorm(RMSNorm):
    """RMSNorm of what a matrix put out, which autocast leaves in another type than the stream's."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return super().forward(x.to(self.weight.dtype))


class DyT(HookedModule):
    """g tanh(a x) + b: no statistics, each element by itself."""

    def __init__(self, width: int, alpha: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.alpha = nn.Parameter(torch.tensor(alpha))
        self.add_hook_points("normalized")  # tanh(a x)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return self.gained(self.run_hook("hook_normalized", (self.alpha * x).tanh()))

    def gained(self, normalized: Tensor) -> Tensor:
        """What it puts out, of what `hook_normalized` shows."""
        return torch.addcmul(self.bias, normalized, self.weight)


class Unnormed(HookedModule):
    """x as it is, where attention or MLP read the stream itself."""

    def __init__(self) -> None:
        super().__init__()
        self.add_hook_points("normalized")  # what is read

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return self.run_hook("hook_normalized", x)

    def gained(self, normalized: Tensor) -> Tensor:
        """The same."""
        return normalized


class NormedLinear(Linear):
    """A projection whose output is normed over its full width."""

    def __init__(self, linear: nn.Linear, eps: float) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.norm = OutputNorm(linear.out_features, eps)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d_model] -> [..., head * d_head]."""
        out = super().forward(x)
        normed: Tensor = self.norm(out)
        return normed.to(out.dtype)


def block_norms(config: ModelConfig, placement: str) -> dict[str, nn.Module | None]:
    """The norms of a block by name, None where it has none."""
    width, eps, norms = config.d_model, config.rms_norm_eps, dict[str, nn.Module | None]()
    for name, alpha in ALPHA.items():
        if placement == "post":
            norms[name] = Unnormed()
        else:
            norms[name] = DyT(width, alpha) if placement == "dyt" else RMSNorm(width, eps)
    for name in ALPHA:
        norms[f"{name}_post"] = OutputNorm(width, eps) if placement in ("sandwich", "post") else None
    return norms


def norm_queries_and_keys(attn: Any, eps: float) -> None:
    """Norm what an attention projects of them; a layer that shares another's projects none."""
    for name in ("q_proj", "k_proj"):
        if hasattr(attn, name):
            setattr(attn, name, NormedLinear(getattr(attn, name), eps))
