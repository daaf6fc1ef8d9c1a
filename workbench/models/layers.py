"""Layers without attention: linear maps that start empty, norms and their placement, rotary positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.models.hook_points import HookedModule, is_hooked


class Linear(nn.Linear):
    """A linear layer without initial weights."""

    def reset_parameters(self) -> None:
        """Leave the memory uninitialised."""


class Embedding(nn.Embedding):
    """An embedding without initial weights."""

    def reset_parameters(self) -> None:
        """Leave the memory uninitialised."""


PLACEMENTS = ("pre", "sandwich", "post", "dyt")
NORMS = ("ln1", "ln2", "ln1_post", "ln2_post")
ALPHA = {"ln1": 0.8, "ln2": 0.2}  # start of DyT's a, before attention and before the MLP


class RMSNorm(HookedModule):
    """g x / sqrt(mean(x^2) + eps), statistics in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        # the divisor [batch, pos, 1]; the output before the gain [batch, pos, d_model]
        self.add_hook_points("scale", "normalized")

    def forward(self, x: Tensor) -> Tensor:
        if not (self.hook_state.enabled and (is_hooked(self.hook_scale) or is_hooked(self.hook_normalized))):
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        scale = self.run_hook("hook_scale", (wide.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())
        return self.gained(self.run_hook("hook_normalized", (wide / scale).to(x.dtype)))

    def gained(self, normalized: Tensor) -> Tensor:
        """Return the output from the value at `hook_normalized`."""
        return normalized * self.weight

    def share(self, scale: Tensor) -> Tensor:
        """Return the factor [..., width] from a part of x to its part of the output, for the divisor [..., 1] of x."""
        return self.weight.detach().to(scale.dtype) / scale


class OutputNorm(RMSNorm):
    """RMSNorm of a projection's output, which autocast leaves in another type than the stream's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class DyT(HookedModule):
    """g tanh(a x) + b for each element, without statistics."""

    def __init__(self, width: int, alpha: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.alpha = nn.Parameter(torch.tensor(alpha))
        self.add_hook_points("normalized")  # tanh(a x)

    def forward(self, x: Tensor) -> Tensor:
        return self.gained(self.run_hook("hook_normalized", (self.alpha * x).tanh()))

    def gained(self, normalized: Tensor) -> Tensor:
        return torch.addcmul(self.bias, normalized, self.weight)


class Unnormed(HookedModule):
    """The identity, for attention and MLP that read the stream itself."""

    def __init__(self) -> None:
        super().__init__()
        self.add_hook_points("normalized")  # x

    def forward(self, x: Tensor) -> Tensor:
        return self.run_hook("hook_normalized", x)

    def gained(self, normalized: Tensor) -> Tensor:
        return normalized


class NormedLinear(Linear):
    """A projection with a norm over its full output."""

    def __init__(self, linear: nn.Linear, eps: float) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.norm = OutputNorm(linear.out_features, eps)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d_model] -> [..., head * d_head]."""
        out = super().forward(x)
        normed: Tensor = self.norm(out)
        return normed.to(out.dtype)


def block_norms(config: ModelConfig, placement: str) -> dict[str, nn.Module | None]:
    """Return the norms of a block by name, None for one that it lacks."""
    width, eps, norms = config.d_model, config.rms_norm_eps, dict[str, nn.Module | None]()
    for name, alpha in ALPHA.items():
        plain = DyT(width, alpha) if placement == "dyt" else RMSNorm(width, eps)
        norms[name] = Unnormed() if placement == "post" else plain
    for name in ALPHA:
        norms[f"{name}_post"] = OutputNorm(width, eps) if placement in ("sandwich", "post") else None
    return norms


ROWS = 256  # of the smallest table; larger ones have a power of two
Rotation = tuple[Tensor, Tensor]  # cosines and signed sines of some positions, each [length, 1, d_head]


class Rotary(nn.Module):
    """Tables of cosines and sines for each device and dtype, as long as the longest sequence so far."""

    def __init__(self, d_head: int, n_ctx: int, theta: float) -> None:
        super().__init__()
        self.d_head, self.n_ctx, self.theta = d_head, n_ctx, theta
        self.tables: dict[tuple[torch.device, torch.dtype], Rotation] = {}

    def forward(self, length: int, like: Tensor, start: int = 0) -> Rotation:
        """Return cosines and signed sines of `length` positions from `start`, on the device and in the dtype of `like`."""
        key = (like.device, like.dtype)
        if torch.compiler.is_compiling():  # a table that grows would recompile the graph
            cos, sin = self._table(like, self.n_ctx)
            return cos[start : start + length], sin[start : start + length]
        if key not in self.tables or len(self.tables[key][0]) < start + length:
            self.tables[key] = self._table(like, max(ROWS, 1 << (start + length - 1).bit_length()))
        cos, sin = self.tables[key]
        return cos[start : start + length], sin[start : start + length]

    @torch.inference_mode(False)  # a table of inference mode could not be used in training
    def _table(self, like: Tensor, rows: int) -> Rotation:
        wide = torch.promote_types(like.dtype, torch.float32)
        exponent = torch.arange(0, self.d_head, 2, device=like.device, dtype=wide) / self.d_head
        position = torch.arange(rows, device=like.device, dtype=wide)
        angle = torch.outer(position, 1.0 / self.theta**exponent)
        cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((-angle.sin(), angle.sin()), -1)
        return cos[:, None].to(like.dtype), sin[:, None].to(like.dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate [batch, pos, head, d_head] by position; the signed sines include the sign of rot()."""
    # unfused, for the rounding of the published code
    return x * rotation[0] + x.roll(x.shape[-1] // 2, -1) * rotation[1]
