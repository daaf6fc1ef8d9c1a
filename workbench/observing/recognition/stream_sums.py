"""What each block and the final norm read: the stream as the block before left it, or a weighted sum of earlier ones.

Source: Pagliardini et al. (2024), DenseFormer, arXiv 2402.02622 (averages of all outputs so far between blocks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.observing.recognition.least_squares import EXACT, fit

_FEW = 48  # rows that tell a sum of streams from anything else


@dataclass(frozen=True)
class StreamSum:
    """Weights of what the first block reads and of each block's output so far; plain where it is the last of them."""

    weights: tuple[float, ...]
    residual: float = 0.0
    exact: bool = True
    is_plain: bool = True


def stream_sums(reads: Sequence[Tensor], outs: Sequence[Tensor]) -> list[StreamSum]:
    """What every block and the final norm read, from these tensors [row, d_model] and the blocks' outputs."""
    found = [StreamSum((1.0,))]
    for i, rows in enumerate(reads[1:], 1):
        if torch.equal(rows, outs[i - 1]):
            found.append(StreamSum((*[0.0] * i, 1.0)))
            continue
        sources = [reads[0], *outs[:i]]
        few = slice(max(_FEW, 2 * len(sources)))
        weights, residual = fit(rows[few], [s[few] for s in sources])
        found.append(StreamSum(tuple(weights), residual, residual <= EXACT.get(rows.dtype, 1e-2), is_plain=False))
    return found
