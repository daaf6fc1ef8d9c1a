"""Attention Residuals: what a sublayer reads is a softmax over all earlier outputs, by a learned query of the sublayer's own.

x_s = sum over j of a_sj v_j,  a_s = softmax over j of w_s . (g_s v_j / rms(v_j)): v_0 the embedding, v_j what sublayer j - 1
(attention or MLP) put out, as it is, and nothing passes by the sublayers. Before each sublayer and once before the final norm;
the first has the embedding alone. `depth_blocks` = N: outputs are summed in N runs of sublayers, as even as can be, the longer
ones first; what is read are the embedding, the finished sums and the running one. `depth_heads` = H: w_s, v_j / rms(v_j) and
v_j in H chunks of d_model, a softmax for each. `depth_form` = delta: x_s = sum over j of (1 + a_sj) v_j, the residual stream and
what is picked out of it, and the final norm reads the stream.

Source: Kimi Team (2026), Attention Residuals, arXiv 2603.15031, published as pseudocode; the average before the final norm
and the sizes of unequal blocks are those of reproductions. Heads: Multi-Head Attention Residuals (2026), arXiv 2607.27230; whether
v_j is normed whole or by chunk is unconfirmed (whole, as in others' code). Delta: Luo, Cai and Hu (2026), Delta Attention
Residuals, arXiv 2605.18855, for single sublayers, without its null source, the embedding a source as in the authors' code.
Seam: stream, between the sublayers too; `queries.<s>` and `gains.<s>` [d_model] of sublayer s start at 0 and 1.
Parameters: 4 L d, whatever the blocks and heads; delta 2 (2 L - 1) d.
Cache: 2 L T D; the averages need the new token's outputs only.
Degenerate case: at the start all weights are equal, which is the vanilla decoder up to eps, since the norms take the common
factor away (of the delta form too, as the embedding is among its sources); one block for each sublayer is no block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.errors import WorkbenchError
from workbench.models.shortcut import Memory, Shortcut, Skip, Weight, one_of


class AttentionResiduals(Shortcut):
    """Depth attention before every sublayer."""

    prefix = "attention_residuals"
    weighs_tokens = True

    def __init__(
        self, config: ModelConfig, *, depth_form: str = "replace", depth_blocks: int | None = None, depth_heads: int = 1
    ) -> None:
        super().__init__(config)
        self.last = 2 * config.n_layers  # the final norm
        self.depth_form = one_of("depth_form", depth_form, ("replace", "delta"))
        self.depth_blocks, self.depth_heads = self._blocks(depth_blocks), self._heads(depth_heads)
        size, longer = divmod(self.last, self.depth_blocks or self.last)
        starts = [n * size + min(n, longer) for n in range(self.depth_blocks or self.last)]
        self.begins = set(starts)  # sublayers whose output begins a sum
        weighed = range(1, self.last + (self.depth_form == "replace"))
        self.queries = nn.ParameterDict({str(s): nn.Parameter(torch.zeros(config.d_model)) for s in weighed})
        self.gains = nn.ParameterDict({str(s): nn.Parameter(torch.ones(config.d_model)) for s in weighed})

    def _blocks(self, blocks: int | None) -> int | None:
        if blocks is None:
            return None
        if self.depth_form == "delta":
            raise WorkbenchError(
                f"depth_blocks={blocks!r}: depth_form=delta is of single sublayers; leave depth_blocks out"
            )
        if isinstance(blocks, bool) or not isinstance(blocks, int) or not 1 <= blocks <= self.last:
            near = f"; nearest {min(max(blocks, 1), self.last)}" if isinstance(blocks, int) else ""
            raise WorkbenchError(f"depth_blocks={blocks!r}: None, or from 1 to {self.last} sublayers{near}")
        return blocks

    def _heads(self, heads: int) -> int:
        width = self.config.d_model
        if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1 or width % heads:
            fit = [h for h in range(1, min(width, 64) + 1) if width % h == 0]
            near = f", nearest {min(fit, key=lambda h: abs(h - heads))}" if isinstance(heads, int) else ""
            raise WorkbenchError(f"depth_heads={heads!r} does not divide d_model={width}: choose from {fit}{near}")
        return heads

    def initialise(self, draw: Any) -> None:
        """Nothing is random."""

    def skip(self, sublayer: int) -> Skip:
        return "" if sublayer in self.begins else "sum"

    def stream_sources(self, sublayer: int) -> tuple[int, ...]:
        finished = [s for s in sorted(self.begins) if s < sublayer]  # where one block begins the one before has ended
        return (*finished, sublayer)

    def prepare(self, tokens: Tensor) -> Memory:
        """g_s w_s of all sublayers [sublayer, head, channel]; scores of the sources as they are asked for."""
        keys = torch.stack(list(self.queries.values())) * torch.stack(list(self.gains.values()))
        return {"depth_queries": keys.unflatten(-1, (self.depth_heads, -1)), "depth_scores": {}}

    def stream_weights(self, sublayer: int, sources: Sequence[Tensor], memory: Memory) -> Sequence[Weight] | Tensor:
        if str(sublayer) not in self.queries:
            return [1.0] * len(sources)
        scores = memory["depth_scores"]
        for j, source in zip(self.stream_sources(sublayer), sources, strict=True):
            if j not in scores:
                scores[j] = self._scores(source, memory["depth_queries"][sublayer - 1 :])
        logits = [scores[j][..., sublayer - max(j, 1)] for j in self.stream_sources(sublayer)]
        weights = torch.stack(logits, -1).softmax(-1)
        weights = weights + 1 if self.depth_form == "delta" else weights
        return weights.to(sources[-1].dtype)

    def _scores(self, source: Tensor, queries: Tensor) -> Tensor:
        """w_s . (g_s v / rms(v)) of a source for the sublayers from the first that reads it on: [batch, pos, head, sublayer]."""
        wide = source.float() if source.dtype in (torch.float16, torch.bfloat16) else source
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        queries = queries.to(wide.dtype)
        if self.depth_heads == 1:
            return (F.linear(wide, queries.flatten(1)) * scale).unsqueeze(-2)
        return torch.einsum("bphc,shc->bphs", wide.unflatten(-1, queries.shape[1:]), queries) * scale[..., None]

    def coefficients(self) -> dict[str, list[float]]:
        """`depth_query`: length of the query of what the MLP reads and of what follows the block, their mean."""
        norms = {int(s): float(w.norm()) for s, w in self.queries.items()}
        pairs = [[norms[s] for s in (2 * n + 1, 2 * n + 2) if s in norms] for n in range(self.config.n_layers)]
        return {"depth_query": [sum(pair) / len(pair) for pair in pairs]}

    @classmethod
    def options_for(cls, shapes: Mapping[str, Sequence[int]], config: ModelConfig) -> list[dict[str, Any]]:
        """The form shows in whether the final norm's input has a query; blocks and heads do not show."""
        return [{"depth_form": "replace" if f"queries.{2 * config.n_layers}" in shapes else "delta"}] if shapes else []
