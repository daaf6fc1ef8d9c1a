"""Attention Residuals: each sublayer's input is a softmax-weighted sum of all earlier outputs, with a learned query per sublayer.

x_s = sum over j of a_sj v_j,  a_s = softmax over j of w_s . (g_s v_j / rms(v_j)). v_0 is the embedding and v_j the output of
sublayer j - 1 (attention or MLP). There are no skip connections. Every sublayer and the final norm read such a sum; the first sublayer
reads the embedding alone.

Options: with `depth_blocks` = N, outputs are summed in N runs of sublayers, whose lengths differ by at most one, the longer ones
first. The sources are the embedding, the finished sums and the running sum. With `depth_heads` = H, w_s, v_j / rms(v_j) and v_j are
split into H chunks of d_model with one softmax each. With `depth_form` = delta, x_s = sum over j of (1 + a_sj) v_j, the residual
stream plus the weighted sum, and the final norm reads the residual stream.

Source: Kimi Team (2026), Attention Residuals, arXiv 2603.15031, published as pseudocode; the sum before the final norm and the sizes
of unequal blocks follow reproductions. Heads: Multi-Head Attention Residuals (2026), arXiv 2607.27230; the paper does not say whether
v_j is normed over its full width (as here and in others' code) or by chunk. Delta: Luo, Cai and Hu (2026), Delta Attention
Residuals, arXiv 2605.18855, for single sublayers and without its null source; the embedding is a source, as in the authors' code.
Seam: stream, also between the sublayers; `queries.<s>` and `gains.<s>` [d_model] of sublayer s start at 0 and 1.
Parameters: 4 L d, for any number of blocks and heads; delta 2 (2 L - 1) d.
Cache: 2 L T D; the sums need only the new token's outputs.
Degenerate case: all weights are equal at the start, which is the vanilla decoder up to eps, because the norms remove the common
factor. This includes the delta form, whose sources include the embedding. One block per sublayer is the form without blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.errors import WorkbenchError
from workbench.models.options import choice_option, integer_option
from workbench.models.shortcut import Memory, Shortcut, Skip, Weight


class AttentionResiduals(Shortcut):
    """Softmax over earlier outputs before every sublayer."""

    prefix = "attention_residuals"
    weighs_tokens = True

    def __init__(
        self, config: ModelConfig, *, depth_form: str = "replace", depth_blocks: int | None = None, depth_heads: int = 1
    ) -> None:
        super().__init__(config)
        self.last = 2 * config.n_layers  # the final norm
        self.depth_form = choice_option("depth_form", depth_form, ("replace", "delta"))
        if depth_blocks is not None:
            if depth_form == "delta":
                raise WorkbenchError(
                    f"depth_blocks={depth_blocks!r}: depth_form=delta has no blocks of sublayers; leave depth_blocks out"
                )
            integer_option("depth_blocks", depth_blocks, range(1, self.last + 1), "sublayers")
        divisors = [h for h in range(1, min(config.d_model, 64) + 1) if config.d_model % h == 0]
        self.depth_blocks = depth_blocks
        self.depth_heads = integer_option("depth_heads", depth_heads, divisors, f"divisors of d_model={config.d_model}")
        size, longer = divmod(self.last, self.depth_blocks or self.last)
        starts = [n * size + min(n, longer) for n in range(self.depth_blocks or self.last)]
        self.begins = set(starts)  # sublayers whose output starts a sum
        weighed = range(1, self.last + (self.depth_form == "replace"))
        self.queries = nn.ParameterDict({str(s): nn.Parameter(torch.zeros(config.d_model)) for s in weighed})
        self.gains = nn.ParameterDict({str(s): nn.Parameter(torch.ones(config.d_model)) for s in weighed})

    def skip(self, sublayer: int) -> Skip:
        return "" if sublayer in self.begins else "sum"

    def stream_sources(self, sublayer: int) -> tuple[int, ...]:
        finished = [s for s in sorted(self.begins) if s < sublayer]  # the previous block ends before these
        return (*finished, sublayer)

    def prepare(self, tokens: Tensor) -> Memory:
        """Return g_s w_s of all sublayers [sublayer, head, channel], and an empty cache for the sources' scores."""
        keys = torch.stack(list(self.queries.values())) * torch.stack(list(self.gains.values()))
        return {"depth_queries": keys.unflatten(-1, (self.depth_heads, -1)), "depth_scores": {}}

    def stream_weights(self, sublayer: int, sources: Sequence[Tensor], memory: Memory) -> Sequence[Weight] | Tensor:
        if str(sublayer) not in self.queries:
            return [1.0] * len(sources)
        scores = memory["depth_scores"]
        for j, source in zip(self.stream_sources(sublayer), sources, strict=True):
            if j not in scores:
                # w_s . (g_s v / rms(v)) [batch, pos, head, sublayer], for all sublayers that may read the source
                wide = source.float() if source.dtype in (torch.float16, torch.bfloat16) else source
                scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
                queries = memory["depth_queries"][sublayer - 1 :].to(wide.dtype)
                if self.depth_heads == 1:
                    scores[j] = (F.linear(wide, queries.flatten(1)) * scale).unsqueeze(-2)
                else:
                    chunks = wide.unflatten(-1, queries.shape[1:])
                    scores[j] = torch.einsum("bphc,shc->bphs", chunks, queries) * scale[..., None]
        logits = [scores[j][..., sublayer - max(j, 1)] for j in self.stream_sources(sublayer)]
        weights = torch.stack(logits, -1).softmax(-1)
        weights = weights + 1 if self.depth_form == "delta" else weights
        return weights.to(sources[-1].dtype)

    def coefficients(self) -> dict[str, list[float]]:
        """Return `depth_query`: the mean norm of the queries of the block's MLP and of the next block's attention."""
        norms = {int(s): float(w.norm()) for s, w in self.queries.items()}
        pairs = [[norms[s] for s in (2 * n + 1, 2 * n + 2) if s in norms] for n in range(self.config.n_layers)]
        return {"depth_query": [sum(pair) / len(pair) for pair in pairs]}

    @classmethod
    def options_for(cls, shapes: Mapping[str, Sequence[int]], config: ModelConfig) -> list[dict[str, Any]]:
        """Infer the form: only `replace` has a query for the final norm. Blocks and heads leave no trace in the tensors."""
        return [{"depth_form": "replace" if f"queries.{2 * config.n_layers}" in shapes else "delta"}] if shapes else []
