"""Metrics of weights, gradients and the key-value cache: gradient norms per matrix, bytes held and bytes read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from workbench.metrics.base import metric


class Row(NamedTuple):
    """One number of a derived metric, with its matrix (`part`) and layer (None outside the blocks)."""

    part: str
    layer: int | None
    value: float


PARTS = {
    "q_proj": "W_Q", "k_proj": "W_K", "v_proj": "W_V", "o_proj": "W_O", "gate_proj": "W_gate", "up_proj": "W_up",
    "down_proj": "W_down",
}  # fmt: skip


def part_of(name: str) -> tuple[str, int | None]:
    """Return matrix and layer of a parameter name: `blocks.2.attn.q_proj.weight` -> (`W_Q`, 2)."""
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

    ||dloss/dW||_F of the mean next-token loss. `relative`: times ||W||_F. `output`: gradient of the mean largest logit
    instead, as Zhou et al. name model outputs without a scalar. Caution: a larger gradient of the first layer's W_V in
    value-residual models is close to a tautology, since every shortcut adds a term.
    """
    names = list(gradients)
    norms = _norms(gradients[n] for n in names)
    if relative:
        norms = [a * b for a, b in zip(norms, _norms(weights[n] for n in names), strict=True)]
    values = torch.stack(list(norms)).tolist()
    return [Row(*part_of(name), value) for name, value in zip(names, values, strict=True)]


def _norms(tensors: Iterable[Tensor]) -> Sequence[Tensor]:
    """Return Frobenius norms in one launch, in float32 or better."""
    together = list(tensors)
    return torch._foreach_norm(together, 2, torch.promote_types(together[0].dtype, torch.float32))


class Decoded(Protocol):
    """A 16-bit key-value cache after a pass over all tokens but the last, and one over the last token."""

    batch: int
    length: int

    def nbytes(self) -> int:
        """Return the bytes of the stored keys and values, each tensor once."""

    def traffic(self) -> int:
        """Return the bytes of keys and values that the last pass read, shared ones once per reader."""


LOOKED_UP = "bank_of_values.tables."  # tables [d_vocab, width] whose rows are cached like projected values


@metric(
    unit="bytes per token", range="> 0", reading="higher: a larger cache",
    source="counted from the tensors held, in 16 bits", controls={"formula": {"formula": True}}, min_length=2,
)  # fmt: skip
def cache_bytes(cache: Decoded, weights: Mapping[str, Tensor], *, formula: bool = False) -> list[Row]:
    """Capacity: bytes of key-value cache per token, counted from the tensors that a cached pass stores.

    The control `formula` is 2 bytes times the sum over layers of the widths of existing W_K and W_V, and of tables looked up
    instead. Shared keys and values are stored once: SVFormer's cache is (L + 1) / (2 L) of the decoder's. Caution: capacity is
    not speed; see `cache_traffic`.
    """
    widths = [t.shape[0] for n, t in weights.items() if n.endswith((".k_proj.weight", ".v_proj.weight"))]
    widths += [t.shape[1] for n, t in weights.items() if n.startswith(LOOKED_UP)]
    return [Row("all", None, 2.0 * sum(widths) if formula else cache.nbytes() / (cache.batch * cache.length))]


@metric(
    unit="bytes per token", range="> 0", reading="higher: decoding moves more",
    source="counted from the tensors read, in 16 bits", controls={"capacity": {"capacity": True}}, min_length=2,
)  # fmt: skip
def cache_traffic(cache: Decoded, *, capacity: bool = False) -> list[Row]:
    """Traffic: bytes of cached keys and values that decoding one token reads, per token in the cache.

    Shared keys and values count once per reading layer: SVFormer and CLA read as much as the decoder, GQA less, cross-layer
    attention more. The control `capacity` is the bytes stored. Caution: shared values that stay in a GPU's L2 cache between
    layers are read from its memory only once, which reduces SVFormer's traffic to its capacity.
    """
    total = cache.nbytes() if capacity else cache.traffic()
    return [Row("all", None, total / (cache.batch * cache.length))]
