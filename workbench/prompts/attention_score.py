"""An attention score taken apart: parts of the query's stream times parts of the key's stream; the parts sum to the score.

    s_ij = q_i . k_j / sqrt(d_head) = sum over a, b of q_i^a . k_j^b / sqrt(d_head),   q_i^a = R_i N_q W_Q (x_i^a / r_i)

x_i^a is a part of the stream at position i, as in `decompose`. r_i is the divisor of the norm before the attention, N_q the norm of
queries, if there is one, and R_i the rotation. All norms are frozen at their values of the run, so every map is linear. Under a soft
cap (Gemma 2) s_ij is the score before the cap. A sliding window hides keys, and a sink logit is one more term of the softmax: neither
changes a score.

Source: Elhage et al. (2021), A Mathematical Framework for Transformer Circuits (the QK circuit).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from workbench.console import notebook_html
from workbench.errors import BadData, WorkbenchError, refuse_unknown
from workbench.models import Transformer
from workbench.models.decomposition import By, label_parts
from workbench.models.hooked import HookedModel
from workbench.observing.observed_model import Observed
from workbench.observing.recognition.least_squares import EXACT
from workbench.prompts.prompt import PromptLike, one_position, single_prompt
from workbench.prompts.score_parts import ScoreParts, observed_score_parts, own_score_parts


@dataclass(frozen=True, kw_only=True)
class ScoreAttribution:
    """Parts of one head's attention score, or of a difference or mean of its scores."""

    layer: int
    head: int
    subject: str  # what is taken apart, in words
    matrix: pd.DataFrame
    """Scores [part of the query's stream, part of the key's stream], labelled as in `decompose`; they sum to the score."""
    position: float  # part of the score that depends on the two positions alone (ALiBi)
    score: float  # what the model computed, before the softmax and a soft cap
    capped: float | None = None  # the same after the soft cap of the model, if it has one
    notes: list[str] = field(default_factory=list)

    @property
    def error(self) -> float:
        """Distance between the sum of the parts and the score."""
        return abs(float(self.matrix.to_numpy().sum()) + self.position - self.score)

    @property
    def queries(self) -> pd.Series:
        """Row sums: the score of each part of the query's stream."""
        return self.matrix.sum(axis=1)

    @property
    def keys(self) -> pd.Series:
        """Column sums: the score of each part of the key's stream."""
        return self.matrix.sum(axis=0)

    @property
    def sentence(self) -> str:
        """The largest part of the key in the direction of the score, and the part of the query that meets it."""
        cells, sign = self.matrix.to_numpy(), -1.0 if self.score < 0 else 1.0
        key = int((sign * cells.sum(0)).argmax())
        query = int((sign * cells[:, key]).argmax())
        rows, columns = (
            list(map(part_in_words, map(str, index))) for index in (self.matrix.index, self.matrix.columns)
        )
        place = f" The positions alone add {self.position:+.3g}." if self.position else ""
        place += "" if self.capped is None else f" Before the soft cap; after it {self.capped:+.3g}."
        return (
            f"{self.subject}: {self.score:+.3g}. The key's largest part is {columns[key]} ({cells[:, key].sum():+.3g}), mostly through the "
            f"query's {rows[query]} ({cells[query, key]:+.3g}).{place}"
        )

    def _repr_html_(self) -> str:
        facts = {
            "score": f"{self.score:.5g}", "after the soft cap": self.capped, "error of the sum": f"{self.error:.1e}",
            "notes": " ".join(self.notes),
        }  # fmt: skip
        return notebook_html(self.subject, facts, self.matrix.to_html(float_format="{:.3g}".format))


def part_in_words(label: str) -> str:
    """Return a part's label in words: `embedding`, `attention 2`, `MLP 3`, `head 1.0`, `head 1.0 (first)`."""
    part, layer, head, path = label_parts(label)
    if head is not None:
        return f"head {layer}.{head}" + (f" ({path})" if path else "")
    words = {"embed": "embedding", "attn": "bias of attention" if label.endswith("bias") else "attention", "mlp": "MLP"}
    return words.get(part, part) + ("" if layer is None else f" {layer}")


@torch.no_grad()
def score_attribution(
    model: HookedModel, prompt: PromptLike, layer: int, head: int, query: int, key: int, *,
    against: int | Literal["others"] | None = None, by: By = "layer",
) -> ScoreAttribution:  # fmt: skip
    """Attribute the attention score of one query and key of a head to the parts of both streams.

    Norms before the attention, of queries and of keys are frozen at their values, so each part maps linearly to a query and a key.
    Biases are parts of their own. Under a soft cap the parts are of the score before the cap. Costs one run and, by value path, each
    earlier layer's attention once more. An observed model whose weights changed is recognised again on its example tokens.

    Args:
        model: A model of `build`, or an observed one.
        prompt: Text, ids or `Prompt`.
        layer: Layer of the head.
        head: Query head; keys may be shared by several (GQA).
        query: Position of the query token, negative from the end.
        key: Position of the key token, not after the query.
        against: Another key, whose score is subtracted: the log ratio of both attention weights. `others`: the mean score of the
            other visible keys is subtracted, which a high weight needs where the score itself may be small.
        by: Parts of the streams: `layer`, `head` or `value_path`, as in `decompose`.

    Returns:
        Parts of the query times parts of the key, whose sum equals the model's score.

    Raises:
        BadData: A layer, head or position is outside the model or prompt, the key follows the query or is hidden from it, or the
            layer has no such score.
        WorkbenchError: The parts do not sum to the score, for example because a hook changed it.
    """
    prompt = single_prompt(model, prompt, least=1)
    named = [query, key, *([] if against is None or against == "others" else [against])]
    at = [one_position(prompt.ids.shape[1], p) for p in named]
    _check_layer(model, layer, by)
    refuse_unknown("head", head, range(model.config.n_heads))
    if max(at[1:]) > at[0]:
        raise BadData(f"key {max(at[1:])} follows query {at[0]}: a query attends to itself and to earlier tokens")
    keys = list(range(at[0] + 1)) if against == "others" else at[1:]
    parts = _score_parts(model, prompt.ids, layer, by, [at[0], *keys], head)
    seen = torch.ones(at[0] + 1, dtype=torch.bool) if parts.visible is None else parts.visible[at[0], : at[0] + 1].cpu()
    if hidden := [j for j in at[1:] if not seen[j]]:
        raise BadData(f"the mask of layer {layer} hides key {hidden[0]} from query {at[0]}: the score is not used")
    weights = torch.tensor([1.0, -1.0][: len(keys)], dtype=torch.float64)
    if against == "others":
        weights = -(seen & (torch.arange(len(seen)) != at[1])).double()
        if not weights.any():
            raise BadData(f"query {at[0]} sees no other key than {at[1]}: it has no mean score of others")
        weights /= -weights.sum()
        weights[at[1]] = 1.0
    weights = weights.to(prompt.ids.device)
    scale = parts.whole["q"].shape[-1] ** -0.5
    q, k = parts.parts["q"][:, 0, 0, 0], torch.einsum("s,psd->pd", weights, parts.parts["k"][:, 0, 1:, 0])
    places = weights.new_zeros(len(keys))
    if parts.slopes is not None:
        places = parts.slopes.new_tensor([[j, at[0], 1.0] for j in keys]) @ parts.slopes[head]
    used_q, used_k = parts.whole["q"][0, 0, 0], parts.whole["k"][0, 1:, 0]
    scores = scale * used_k @ used_q + places
    size = scale * float(used_q.norm() * (weights.abs() @ used_k.norm(dim=-1)))  # before channels and keys cancel
    words = [f"“{token}” ({i})" for token, i in zip(prompt.strings(prompt.ids[0, at].tolist()), at, strict=True)]
    less = "the mean of the other visible keys" if against == "others" else f"that of {words[-1]}"
    subject = f"score of query {words[0]} and key {words[1]}" + ("" if against is None else f" minus {less}")
    return _checked(parts, layer, head, scale * q @ k.T, weights @ scores, weights @ places, subject,
                    None if parts.cap is None else float(weights @ (parts.cap * (scores / parts.cap).tanh())), size)  # fmt: skip


@torch.no_grad()
def sink_attribution(
    model: HookedModel, tokens: Tensor, layer: int, *, by: By = "layer", batch: int = 1
) -> list[ScoreAttribution]:
    """Attribute each head's attention sink on the first token to the parts of queries and keys, over documents.

    The sink score of a query is the score of the first token minus the mean score of its other visible keys. It is averaged over the
    queries that see the first token. Time O(parts^2 T d_model) per document and no T x T array, but for masks other than the causal one.
    To follow a training, call it for each of its checkpoints.

    Args:
        model: A model of `build`, or an observed one.
        tokens: Ids [document, pos] of at least two positions.
        layer: Layer of the heads.
        by: Parts of the streams: `layer`, `head` or `value_path`.
        batch: Documents that run together.

    Returns:
        One result for each head.

    Raises:
        BadData: The layer or the ids are outside the model, or the layer has no such score.
        WorkbenchError: The parts do not sum to the score.
    """
    _check_layer(model, layer, by)
    ids = model.to_tokens(tokens)
    if ids.shape[1] < 2:
        raise BadData("one position: a sink needs later queries")
    total: list[Any] = [0.0, 0.0, 0.0, 0.0]
    for some in ids.split(batch):
        parts = _score_parts(model, some, layer, by, None)
        T, scale = some.shape[1], parts.whole["q"].shape[-1] ** -0.5
        position = torch.arange(T, dtype=torch.float64, device=ids.device)
        # keys [..., pos, head, d_head]: the first minus the mean of the others of each later query
        if parts.visible is None:
            queries = position[1:].long()
            contrast = [x[..., :1, :, :] - x[..., 1:, :, :].cumsum(-3) / position[1:, None, None]
                        for x in (parts.parts["k"], parts.whole["k"])]  # fmt: skip
            mean = (position[1:] + 1) / 2
        else:
            others = parts.visible.double()
            others[:, 0] = 0
            queries = (parts.visible[:, 0] & others.any(1)).nonzero()[:, 0]
            others = others[queries] / others[queries].sum(1, keepdim=True)
            contrast = [x[..., :1, :, :] - torch.einsum("ij,...jhd->...ihd", others, x)
                        for x in (parts.parts["k"], parts.whole["k"])]  # fmt: skip
            mean = others @ position
        if not len(queries):
            raise BadData(f"the mask of layer {layer} hides the first token or all others from every query")
        scale /= len(ids) * len(queries)
        cells = torch.einsum("abqhd,cbqhd->hac", parts.parts["q"][:, :, queries], contrast[0])
        score = torch.einsum("bqhd,bqhd->h", parts.whole["q"][:, queries], contrast[1])
        # of the scores, before they cancel in the mean
        size = (parts.whole["q"][:, queries].norm(dim=-1) * contrast[1].norm(dim=-1)).sum((0, 1))
        place = score.new_zeros(len(score))
        if parts.slopes is not None:
            place = parts.slopes[:, 0] * -mean.mean() * len(some) / len(ids)
        new = scale * cells, scale * score + place, place, scale * size
        total = [x + y for x, y in zip(total, new, strict=True)]
    seen = f"mean over {len(ids) * len(queries)} queries" + (", before the soft cap" if parts.cap is not None else "")
    subject = f"score of the first token minus the mean of the other keys, {seen}"
    cells, scores, places, sizes = total
    heads = range(model.config.n_heads)
    return [_checked(parts, layer, h, cells[h], scores[h], places[h], subject, None, float(sizes[h])) for h in heads]


def _check_layer(model: HookedModel, layer: int, by: str) -> None:
    refuse_unknown("layer", layer, range(model.config.n_layers))
    refuse_unknown("by", by, ("layer", "head", "value_path"))


def _score_parts(
    model: HookedModel, ids: Tensor, layer: int, by: By, pos: Sequence[int] | None, head: int | None = None
) -> ScoreParts:
    if isinstance(model, Transformer):
        return own_score_parts(model, ids, layer, by, pos, head)
    if isinstance(model, Observed):
        return observed_score_parts(model, ids, layer, by, pos, head)
    raise BadData(f"a {type(model).__name__} shows no maps from its stream to its queries and keys")


def _checked(
    parts: ScoreParts, layer: int, head: int, cells: Tensor, score: Tensor, position: Tensor, subject: str,
    capped: float | None, size: float,
) -> ScoreAttribution:  # fmt: skip
    """Return a head's cells [part of the query, part of the key]; raises `WorkbenchError` if they miss the score."""
    result = ScoreAttribution(
        layer=layer, head=head, subject=f"Head {layer}.{head}, {subject}", position=float(position), score=float(score),
        matrix=pd.DataFrame(cells.cpu().numpy(), parts.labels["q"], parts.labels["k"]), notes=parts.notes, capped=capped,
    )  # fmt: skip
    if not result.error <= EXACT[parts.dtype] * max(float(cells.abs().sum()), abs(result.score), size):
        raise WorkbenchError(
            f"{result.subject}: the parts sum to {float(cells.sum() + position):.6g}, the model computed {result.score:.6g}: a hook "
            "changed its queries or keys; run the model without it"
        )
    return result
