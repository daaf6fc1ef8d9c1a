"""What each block, its MLP and the final norm read: the stream as it stood last, or a weighted sum of what was made earlier.

Constant weights are of what stood after each block; weights of each token are of every output, the attentions' and the MLPs'.

Sources: Pagliardini et al. (2024), DenseFormer, arXiv 2402.02622 (averages of all outputs so far between blocks); Kimi Team
(2026), Attention Residuals, arXiv 2603.15031 (a softmax over all earlier outputs for each token); Multi-Head Attention
Residuals (2026), arXiv 2607.27230.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from workbench.observing.recognition.least_squares import EXACT, fit, weights_by_token

_FEW = 48  # rows that tell a sum of streams from anything else
_HEADS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class StreamSum:
    """Weights of what is read; plain where it is what stood last."""

    weights: tuple[
        float, ...
    ]  # of the first stream and of what stood after each block; of each output, means, where by token
    residual: float = 0.0
    exact: bool = True
    is_plain: bool = True
    by_token: Tensor | None = field(
        default=None, compare=False
    )  # [row, head, source], of the first stream and each output

    @property
    def spread(self) -> tuple[float, ...]:
        """Standard deviations of weights over tokens, empty where these are constants."""
        return () if self.by_token is None else tuple(self.by_token.flatten(0, 1).std(0, correction=0).tolist())


def depth_weights(rows: Tensor, outputs: Sequence[Tensor]) -> tuple[Tensor, float]:
    """Weights [..., head, source] of outputs [..., d_model] for each token, and what they leave.

    Of as few heads as will do: chunks of the stream with weights of their own (multi-head Attention Residuals). A chunk of n
    numbers has at most n / 2 sources, so that nothing is explained by chance; without a fit the residual is 1.
    """
    for heads in _HEADS:
        if rows.shape[-1] % heads or 2 * len(outputs) > rows.shape[-1] // heads:
            break
        weights, left = weights_by_token(_chunks(rows, heads), [_chunks(x, heads) for x in outputs])
        if left <= EXACT.get(rows.dtype, 1e-2):
            return weights, left
    return rows.new_zeros(*rows.shape[:-1], 1, len(outputs)), 1.0


def _chunks(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1))


def stream_sum(rows: Tensor, stood: Sequence[Tensor], outputs: Sequence[Tensor]) -> StreamSum:
    """What is read [row, d_model], of what stood before it, the first stream first, and of all outputs so far (or none)."""
    last, tolerance = stood[-1], EXACT.get(rows.dtype, 1e-2)
    if float((rows - last).abs().max()) <= tolerance * float(last.abs().max()):
        return StreamSum((*[0.0] * (len(stood) - 1), 1.0))
    few = slice(max(_FEW, 2 * len(stood)))
    weights, residual = fit(rows[few], [s[few] for s in stood])
    if residual > tolerance and outputs:
        by_token, left = depth_weights(rows, outputs)
        if left <= tolerance:
            return StreamSum(tuple(by_token.mean((0, 1)).tolist()), left, is_plain=False, by_token=by_token)
    return StreamSum(tuple(weights), residual, residual <= tolerance, is_plain=False)


def stream_sums(
    reads: Sequence[Tensor], made: Sequence[Tensor], outputs: Sequence[Sequence[Tensor]] = ()
) -> list[StreamSum]:
    """What every block and the final norm read, from these tensors [row, d_model] and what stood after each block.

    `outputs`: of each block what its parts add, where that is known of all.
    """
    found = [StreamSum((1.0,))]
    for i, rows in enumerate(reads[1:], 1):
        known = [reads[0], *(x for some in outputs[:i] for x in some)] if outputs else []
        found.append(stream_sum(rows, [reads[0], *made[:i]], known))
    return found
