"""The logit lens: what each stream of one prompt predicts through the model's own final norm and head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import BadData, WorkbenchError
from workbench.models import Transformer
from workbench.models.hooked import HookedModel
from workbench.prompts.single_pass import (
    array,
    by_layer,
    chosen_positions,
    float32_or_better,
    log_probabilities,
    streams,
)
from workbench.prompts.tokens import Prompt, PromptLike, single_prompt

NONE = -1  # stands for the token that follows the last
MAX_ERROR = 1e-3
"""Largest difference in log-probability between the last stream's reading and the output, in float32."""


@dataclass(frozen=True, kw_only=True)
class Lens:
    """Predictions from each residual stream; row n is the input of block n, row L the input of the final norm."""

    positions: np.ndarray
    """int64 [pos], the positions that were read."""
    tokens: list[str]
    """[pos], the prompt's tokens there."""
    top_ids: np.ndarray
    """int32 [layer + 1, pos, top], likeliest first."""
    top_tokens: list[list[list[str]]]
    top_probability: np.ndarray
    """float32 [layer + 1, pos, top]."""
    probability: np.ndarray
    """Of the token that follows, float32 [layer + 1, pos]; NaN at the last position, as in `rank`."""
    rank: np.ndarray
    """Tokens ahead of the one that follows [layer + 1, pos], 0 where it leads."""
    entropy: np.ndarray
    """Of the reading, nats [layer + 1, pos]."""
    kl: np.ndarray
    """KL(output || reading), nats [layer + 1, pos]; 0 in the last row."""


@torch.no_grad()
def logit_lens(model: HookedModel, prompt: PromptLike, top: int = 5, *, positions: slice | None = None) -> Lens:
    """Logit lens: softmax(W_U norm(x_n)) of every stream x_n with the model's own final norm, at all positions or some.

    Costs one run and L + 1 times the head at each position; memory is the streams of the chosen positions and a few positions'
    logits. An observed model does not expose its norm and head, so it runs L + 4 times with each layer's stream patched in
    as the last one. Memory holds the logits of all positions. Raises `BadData` for an observed model whose last stream cannot
    be replaced, and `WorkbenchError` where the last row is not the model's prediction, as after a hook changed a stream.
    Source: nostalgebraist 2020. Caution: early layers need not speak the head's language.
    """
    prompt = single_prompt(model, prompt)
    ids, where = prompt.ids, chosen_positions(prompt.ids.shape[1], positions)
    top = max(1, min(top, model.config.d_vocab))
    following = torch.cat([ids[0, 1:], ids.new_full((1,), NONE)])[where.start : where.stop]
    if isinstance(model, Transformer):
        outputs, read = _by_parts(model, ids, where)
    else:
        outputs, read = _by_runs(model, ids, where)
    n_rows, n_pos, off = model.config.n_layers + 1, len(where), 0.0
    numbers = {n: np.full((n_rows, n_pos), np.nan, np.float32) for n in ("probability", "rank", "entropy", "kl")}
    top_ids = np.zeros((n_rows, n_pos, top), np.int32)
    top_probability = np.zeros((n_rows, n_pos, top), np.float32)
    for chunk, output in outputs:
        probabilities = output.exp()
        for layer in range(n_rows):
            log_p = read(layer, chunk)
            for name, values in _reading(log_p, output, probabilities, following[chunk]).items():
                numbers[name][layer, chunk] = values
            best = log_p.topk(top)
            top_ids[layer, chunk], top_probability[layer, chunk] = best.indices.cpu(), array(best.values.exp())
        off = max(off, float((log_p - output).abs().max()))
    if not off <= MAX_ERROR * (50 if model.embed.weight.dtype in (torch.float16, torch.bfloat16) else 1):
        raise WorkbenchError(
            f"the last stream's reading misses the output by {off:.1e} nats: a hook changed one of them"
        )
    named = _named(prompt, top_ids)
    return Lens(
        positions=np.arange(where.start, where.stop), tokens=prompt.strings(ids[0, where.start : where.stop].tolist()),
        top_ids=top_ids, top_tokens=[[[named[i] for i in cell] for cell in row] for row in top_ids.tolist()],
        top_probability=top_probability, **numbers,
    )  # fmt: skip


Readings = tuple[Iterable[tuple[slice, Tensor]], Callable[[int, slice], Tensor]]
"""The output's log-probabilities by chunks of positions, and those that a layer's stream gives at a chunk."""


def _by_parts(model: Transformer, ids: Tensor, where: range) -> Readings:
    """Logit lens of our models: norm and unembedding applied to each stream."""
    read: dict[Any, Tensor] = {}

    def reduce(key: Any, tensors: dict[str, Tensor]) -> None:
        read[key] = next(iter(tensors.values()))[0, where.start : where.stop].clone()

    names = {n: [name] for n, name in streams(model).items()}
    by_layer(model, ids, {**names, "head": ["unembed.hook_in"]}, reduce)
    return log_probabilities(model, read["head"], normed=True), lambda layer, chunk: next(
        log_probabilities(model, read[layer][chunk])
    )[1]


def _by_runs(model: HookedModel, ids: Tensor, where: range) -> Readings:
    """Logit lens of an observed model: one run for each stream, patched in as the last one."""
    names, last = streams(model), model.config.n_layers
    if len(names) <= last or model.is_read_only(names[last]):
        raise BadData(f"this {type(model.foreign).__name__} shows no stream that its head could be asked to read")
    _, cache = model.run_with_cache(ids, names_filter=list(names.values()))

    def read(stream: Tensor | None) -> Tensor:
        instead: Any = [] if stream is None else [(names[last], lambda x, hook: stream)]
        with model.hooks(instead):
            return float32_or_better(model.everywhere(ids)[0, where.start : where.stop]).log_softmax(-1)

    output = read(None)
    if output.std() > 0 and torch.equal(read(cache[names[last]].flip(-1)), output):
        raise BadData(f"this {type(model.foreign).__name__} reads its output from elsewhere than its last stream")
    return [(slice(0, len(where)), output)], lambda layer, chunk: read(cache[names[layer]])[chunk]


def _reading(log_p: Tensor, output: Tensor, probabilities: Tensor, targets: Tensor) -> dict[str, np.ndarray]:
    """Numbers of log-probabilities [pos, d_vocab] beside the output's, which are given as probabilities too."""
    mine = log_p.gather(-1, targets.clamp(min=0)[:, None])
    rank = (log_p > mine).sum(-1).float()
    none = targets == NONE
    return {
        "probability": array(mine[:, 0].exp().masked_fill(none, torch.nan)),
        "rank": array(rank.masked_fill(none, torch.nan)),
        "entropy": array(-torch.linalg.vecdot(log_p.exp(), log_p)),
        "kl": array(torch.linalg.vecdot(probabilities, output - log_p).clamp(min=0)),
    }


def _named(prompt: Prompt, ids: np.ndarray) -> dict[int, str]:
    known: Sequence[int] = np.unique(ids).tolist()
    return dict(zip(known, prompt.strings(known), strict=True))
