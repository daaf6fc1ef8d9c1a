"""The logit lens, next-token probabilities and the loss per token of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from workbench.console import notebook_html
from workbench.errors import BadData, WorkbenchError
from workbench.kernels.cross_entropy import refuse_targets
from workbench.metrics.base import wide
from workbench.models import Transformer
from workbench.models.hooked import HookedModel
from workbench.prompts.prompt import (
    PromptLike,
    array,
    by_layer,
    chosen_positions,
    divergence,
    log_probabilities,
    one_position,
    single_prompt,
    streams,
)
from workbench.prompts.tuned_lens import TunedLens, load_tuned_lens

NONE = -1  # stands for the token that follows the last
COLUMNS = 12  # positions that a notebook shows
MAX_ERROR = 1e-3  # largest difference in log-probability between the last stream's reading and the output, in float32


@dataclass(frozen=True, kw_only=True)
class Lens:
    """Predictions from each residual stream; row n is the input of block n, row L the input of the final norm."""

    positions: np.ndarray  # int64 [pos], the positions that were read
    tokens: list[str]  # [pos], the prompt's tokens there
    top_ids: np.ndarray  # int32 [layer + 1, pos, top], likeliest first
    top_tokens: list[list[list[str]]]
    top_probability: np.ndarray  # float32 [layer + 1, pos, top]
    # of the token that follows, float32 [layer + 1, pos]; NaN at the last position, as in `rank`
    probability: np.ndarray
    rank: np.ndarray  # tokens ahead of the one that follows [layer + 1, pos], 0 where it leads
    entropy: np.ndarray  # of the reading, nats [layer + 1, pos]
    kl: np.ndarray  # KL(output || reading), nats [layer + 1, pos]; 0 in the last row

    def _repr_html_(self) -> str:
        """Show the likeliest token of each stream and position, shaded by its probability, for the last positions."""
        last = slice(-COLUMNS, None)
        head = "".join(f"<th>{escape(token)}</th>" for token in self.tokens[last])
        rows = [
            f"<tr><th>{'output' if row == len(self.top_tokens) - 1 else f'into block {row}'}</th>"
            + "".join(
                f"<td style='background:rgba(68,119,170,{0.7 * p:.2f})' title='probability {p:.3f}'>{escape(tokens[0])}</td>"
                for tokens, p in zip(self.top_tokens[row][last], self.top_probability[row, last, 0], strict=True)
            )
            + "</tr>"
            for row in reversed(range(len(self.top_tokens)))
        ]
        facts = {
            "shows": f"likeliest token of each stream; darker: probability closer to 1; last {len(self.tokens[last])} positions"
        }
        return notebook_html("logit lens", facts, f"<table><tr><th>after</th>{head}</tr>{''.join(rows)}</table>")


@torch.no_grad()
def logit_lens(
    model: HookedModel,
    prompt: PromptLike,
    top: int = 5,
    *,
    positions: slice | None = None,
    tuned: TunedLens | str | Path | None = None,
) -> Lens:
    """Logit lens: softmax(W_U norm(x_n)) of every stream x_n with the model's own final norm, at all positions or some.

    With `tuned`, a lens of `fit_tuned_lens` or its file, each stream is first mapped to a final stream. In an edited run it reads the
    edited streams.

    Costs one run and L + 1 times the head at each position; memory is the streams of the chosen positions and a few positions'
    logits. An observed model does not expose its norm and head, so it runs L + 4 times with each layer's stream patched in
    as the last one. Memory holds the logits of all positions. Raises `BadData` for an observed model whose last stream cannot
    be replaced, and `WorkbenchError` where the last row is not the model's prediction, as after a hook changed a stream.
    Source: nostalgebraist 2020. Caution: early layers need not speak the head's language.
    """
    prompt = single_prompt(model, prompt)
    ids, where = prompt.ids, chosen_positions(prompt.ids.shape[1], positions)
    refuse_targets(ids[:, 1:], model.n_logits)
    top = max(1, min(top, model.n_logits))
    following = torch.cat([ids[0, 1:], ids.new_full((1,), NONE)])[where.start : where.stop]
    lens = load_tuned_lens(tuned, model) if isinstance(tuned, str | Path) else tuned
    if lens is not None:
        lens.check(model)
    mapped: Mapped = (lambda layer, x: x) if lens is None else lens
    if isinstance(model, Transformer):
        outputs, read = _by_parts(model, ids, where, mapped)
    else:
        outputs, read = _by_runs(model, ids, where, mapped)
    n_rows, n_pos, off = model.config.n_layers + 1, len(where), 0.0
    numbers = {n: np.full((n_rows, n_pos), np.nan, np.float32) for n in ("probability", "rank", "entropy", "kl")}
    top_ids = np.zeros((n_rows, n_pos, top), np.int32)
    top_probability = np.zeros((n_rows, n_pos, top), np.float32)
    for chunk, output in outputs:
        unknown = following[chunk] == NONE
        for layer in range(n_rows):
            log_p = read(layer, chunk)
            true = log_p.gather(-1, following[chunk].clamp(min=0)[:, None])
            readings = {
                "probability": true[:, 0].exp().masked_fill(unknown, torch.nan),
                "rank": (log_p > true).sum(-1).float().masked_fill(unknown, torch.nan),
                "entropy": torch.special.entr(log_p.exp()).sum(-1),
                "kl": divergence(output, log_p),
            }
            for name, values in readings.items():
                numbers[name][layer, chunk] = array(values)
            best = log_p.topk(top)
            top_ids[layer, chunk], top_probability[layer, chunk] = best.indices.cpu(), array(best.values.exp())
        off = max(off, float(torch.where(log_p == output, 0, log_p - output).abs().max()))
    if not off <= MAX_ERROR * (50 if model.embed.weight.dtype in (torch.float16, torch.bfloat16) else 1):
        raise WorkbenchError(
            f"the last stream's reading misses the output by {off:.1e} nats: a hook changed one of them"
        )
    known: Sequence[int] = np.unique(top_ids).tolist()
    named = dict(zip(known, prompt.strings(known), strict=True))
    return Lens(
        positions=np.arange(where.start, where.stop), tokens=prompt.strings(ids[0, where.start : where.stop].tolist()),
        top_ids=top_ids, top_tokens=[[[named[i] for i in cell] for cell in row] for row in top_ids.tolist()],
        top_probability=top_probability, **numbers,
    )  # fmt: skip


Readings = tuple[Iterable[tuple[slice, Tensor]], Callable[[int, slice], Tensor]]
"""The output's log-probabilities by chunks of positions, and those that a layer's stream gives at a chunk."""


Mapped = Callable[[int, Tensor], Tensor]
"""Maps a layer's stream before the head reads it."""


def _by_parts(model: Transformer, ids: Tensor, where: range, mapped: Mapped) -> Readings:
    """Logit lens of our models: norm and unembedding applied to each stream."""
    read: dict[Any, Tensor] = {}

    def reduce(key: Any, tensors: dict[str, Tensor]) -> None:
        read[key] = next(iter(tensors.values()))[0, where.start : where.stop].clone()

    names = {n: [name] for n, name in streams(model).items()}
    by_layer(model, ids, {**names, "head": ["unembed.hook_in"]}, reduce)
    return log_probabilities(model, read["head"], normed=True), lambda layer, chunk: next(
        log_probabilities(model, mapped(layer, read[layer][chunk]))
    )[1]


def _by_runs(model: HookedModel, ids: Tensor, where: range, mapped: Mapped) -> Readings:
    """Logit lens of an observed model: one run for each stream, patched in as the last one."""
    names, last = streams(model), model.config.n_layers
    if len(names) <= last or model.is_read_only(names[last]):
        raise BadData(f"this {type(model.foreign).__name__} shows no stream that its head could be asked to read")
    _, cache = model.run_with_cache(ids, names_filter=list(names.values()))

    def read(stream: Tensor | None) -> Tensor:
        instead: Any = [] if stream is None else [(names[last], lambda x, hook: stream)]
        with model.hooks(instead):
            return wide(model.everywhere(ids)[0, where.start : where.stop]).log_softmax(-1)

    output = read(None)
    if output.std() > 0 and torch.equal(read(cache[names[last]].flip(-1)), output):
        raise BadData(f"this {type(model.foreign).__name__} reads its output from elsewhere than its last stream")
    return [(slice(0, len(where)), output)], lambda layer, chunk: read(mapped(layer, cache[names[layer]]))[chunk]


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Next-token probabilities after one position, and the loss per token."""

    position: int
    tokens: list[str]
    top: pd.DataFrame  # likeliest next tokens: rank (from 0), id, token, probability
    probability: np.ndarray  # of every token to come next, float32 [d_vocab]
    loss: np.ndarray  # -ln probability of each token given those before it, nats [T]; NaN at position 0


@torch.no_grad()
def next_tokens(model: HookedModel, prompt: PromptLike, position: int = -1, top: int = 10) -> Predictions:
    """Next-token probabilities at a position, and the loss of every token.

    Costs one run and the head once more; logits are held for a few positions at a time, of an observed model for all.
    Raises `BadData` for a position outside the prompt.
    """
    prompt = single_prompt(model, prompt)
    ids, T = prompt.ids, prompt.ids.shape[1]
    at = one_position(T, position)
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise BadData(f"top={top!r}: how many of the likeliest tokens, at least 1")
    loss = np.full(T, np.nan, dtype=np.float32)
    refuse_targets(ids[:, 1:], model.n_logits)
    probabilities = ids.new_zeros(0, dtype=torch.float32)
    outputs: Iterable[tuple[slice, Tensor]]
    if isinstance(model, Transformer):
        normed: list[Tensor] = []
        by_layer(model, ids, {"head": ["unembed.hook_in"]}, lambda _, tensors: normed.extend(tensors.values()))
        outputs = log_probabilities(model, normed[0][0], normed=True)
    else:
        outputs = [(slice(0, T), wide(model.everywhere(ids)[0]).log_softmax(-1))]
    for where, log_p in outputs:
        if where.start <= at < where.stop:
            probabilities = log_p[at - where.start].exp()
        targets = ids[0, where.start + 1 : where.stop + 1, None]
        mine = log_p[: len(targets)].gather(-1, targets)
        loss[where.start + 1 : where.start + 1 + len(targets)] = array(-mine[:, 0])
    values, indices = probabilities.topk(min(top, model.n_logits))
    frame = pd.DataFrame({"rank": range(len(values)), "id": indices.tolist(), "probability": values.tolist()})
    frame.insert(2, "token", prompt.strings(indices.tolist()))
    return Predictions(position=at, tokens=prompt.tokens, top=frame, probability=array(probabilities), loss=loss)
