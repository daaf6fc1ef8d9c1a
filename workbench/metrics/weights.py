"""What weights and their gradients say by themselves: gradient norms per matrix, bytes of the key-value cache."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.metrics.base import metric


class Row(NamedTuple):
    """One number of a derived measure: which matrix (`part`), which layer (None outside the blocks)."""

    part: str
    layer: int | None
    value: float


PARTS = {
    "q_proj": "W_Q",
    "k_proj": "W_K",
    "v_proj": "W_V",
    "o_proj": "W_O",
    "gate_proj": "W_gate",
    "up_proj": "W_up",
    "down_proj": "W_down",
}


def part_of(name: str) -> tuple[str, int | None]:
    """(matrix, layer) of a parameter name: `blocks.2.attn.q_proj.weight` -> (`W_Q`, 2)."""
    match = re.match(r"blocks\.(\d+)\.(.+)\.weight$", name)
    stem = match[2].rsplit(".", 1)[-1] if match else name.removesuffix(".weight")
    return PARTS.get(stem, {"embed": "W_E", "unembed": "W_U"}.get(stem, stem)), int(match[1]) if match else None


@metric(
    unit="loss per weight", range=">= 0", reading="higher: stronger pull on the matrix",
    source="Zhou et al. 2025 (figure; scalar ours)", variants={"relative": {"relative": True}, "output": {}}, min_length=2,
    units={"relative": "loss per relative weight change", "output": "logit per weight"},
)  # fmt: skip
def gradient_norm(
    gradients: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, relative: bool = False
) -> list[Row]:
    """Frobenius norm of the gradient per matrix and layer, one document at a time, unclipped.

    ||dloss/dW||_F of the mean next-token loss; `relative`: times ||W||_F. `output`: of the mean largest logit instead of the
    loss (Zhou et al. speak of model outputs without naming the scalar). Caution: a larger gradient of the first layer's
    W_V in value-residual models is close to a tautology, since each shortcut adds a term.
    """
    names = list(gradients)
    norms = _norms(gradients[n] for n in names)
    if relative:
        norms = [a * b for a, b in zip(norms, _norms(weights[n] for n in names), strict=True)]
    values = torch.stack(list(norms)).tolist()
    return [Row(*part_of(name), value) for name, value in zip(names, values, strict=True)]


def _norms(tensors: Iterable[Tensor]) -> Sequence[Tensor]:
    """Frobenius norms in one launch; float32 also where the tensors are narrower."""
    found = list(tensors)
    return torch._foreach_norm(found, 2, torch.promote_types(found[0].dtype, torch.float32))


@metric(
    unit="bytes per token", range="> 0", reading="higher: a larger cache",
    source="by formula, 2 bytes an element: keys and values of the layers that project them",
)  # fmt: skip
def cache_bytes(weights: Mapping[str, Tensor]) -> list[Row]:
    """Bytes of key-value cache a token needs at 16 bits, by formula: each layer's own keys and values, counted once.

    2 (sum over layers of the widths of W_K and W_V that exist). Shared values are held once: SVFormer's cache is
    (L + 1) / (2 L) of the decoder's. Caution: capacity; traffic falls only where the shared values stay in a nearer cache.
    """
    widths = sum(t.shape[0] for n, t in weights.items() if n.endswith(("k_proj.weight", "v_proj.weight")))
    return [Row("formula", None, 2.0 * widths)]
