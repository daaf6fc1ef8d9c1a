"""The path of a token through one head: its readers, the values that are moved, and their effect on a logit.

The value of one key passes the head with the attention weight of the run. Pattern, gates and final norm are frozen. The key's part of a
logit is then the weight times the logit per unit of weight. Summed over keys, it is the head's part of `logit_attribution`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import pandas as pd
import torch

from workbench.errors import BadData, WorkbenchError
from workbench.models.activation_cache import Cache
from workbench.models.activations import RebuiltPatterns
from workbench.models.decomposition import Reader, anatomy_of, decompose, label_parts
from workbench.models.hooked import HookedModel
from workbench.prompts.attention_maps import attention_inputs, attention_map
from workbench.prompts.prompt import PromptLike, cached_run, single_prompt
from workbench.prompts.scores import ScoreAttribution, score_attribution


@dataclass(frozen=True, kw_only=True)
class TokenPath:
    """One cell of an attention map: its score, its weight, and what its value adds to a logit at the query."""

    score: ScoreAttribution
    weight: float  # attention of the query to the key
    token: str  # whose logit is meant
    frame: pd.DataFrame
    """A row for each value path: path; norm of the moved value in the stream; logits that it adds; per_weight = logits / weight, NaN if the
    part is no multiple of the weight: values that are added beside the attention, or keys of several layers in one softmax."""
    head_logits: float  # of the head, all keys together

    @property
    def logits(self) -> float:
        """Sum of the value paths: what this key adds to the logit through this head."""
        return float(self.frame["logits"].sum())


@torch.no_grad()
def token_path(
    model: HookedModel, prompt: PromptLike, layer: int, head: int, query: int, key: int, token: int, *,
    against: int | Literal["others"] | None = None,
) -> TokenPath:  # fmt: skip
    """Follow a token from one cell of an attention map to a logit.

    Costs three runs and twice the attention of every layer for each value path.

    Args:
        model: A model of `build`, or an observed one.
        prompt: Text, ids or `Prompt`.
        layer: Layer of the head.
        head: Query head.
        query: Position of the query token, negative from the end.
        key: Position of the key token, not after the query.
        token: Id of the token whose logit at the query position is divided.
        against: The part that is subtracted from the score, as in `score_attribution`.

    Returns:
        The parts of the score, the attention weight, and the logits that the key's value adds, by value path.

    Raises:
        BadData: As `score_attribution` and `decompose`; an id outside the vocabulary; a gate that depends on the values.
        WorkbenchError: Parts do not sum to the score or the logit.
    """
    prompt = single_prompt(model, prompt, least=1)
    score = score_attribution(model, prompt, layer, head, query, key, against=against)
    T, n_layers = prompt.ids.shape[1], model.config.n_layers
    query, key = query % T, key % T
    if isinstance(token, bool) or token not in range(model.config.d_vocab):
        raise BadData(f"token id {token!r} leaves the vocabulary 0..{model.config.d_vocab - 1}")
    anatomy = anatomy_of(model)
    names = list(dict.fromkeys(anatomy.needed("value_path", n_layers, frozen=True)))
    _, cache = cached_run(model, prompt.ids, names, slice(query, query + 1))
    tensors = cache.cache_dict
    at = query, query + 1
    whole = decompose(model, cache, to="logits", by="value_path", tokens=token, pos=at, anatomy=anatomy)
    masked = RebuiltPatterns(tensors).with_recipes(model.recipes())
    own = rf"blocks\.{layer}\.attn\.\w.*\.hook_v" if model.foreign is None else r".*(own|attn|table)\.hook_v"
    for name in filter(re.compile(own).fullmatch, names):  # of the values that the layer's paths read
        kept = torch.zeros_like(tensors[name])
        kept[:, key] = tensors[name][:, key]
        masked[name] = kept
    read, read.gates = (
        Reader(anatomy, given, "value_path", n_layers, frozen=True, pos=at)
        for given in (Cache(masked, model, has_batch_dim=True), cache)
    )
    end, rows = anatomy.ending(read), list[dict[str, float | str]]()
    window = attention_map(attention_inputs(model, prompt), layer, head, slice(query, query + 1), slice(key, key + 1))
    weight, total = float(window.weights[0, 0]), 0.0
    recipes = [recipe for recipe in model.recipes() if recipe.layer == layer]
    is_multiple = not (key == query and anatomy.adds_values(layer)) and all(len(r.paths[0]) == 1 for r in recipes)
    for label, part in anatomy.parts(read, "value_path", n_layers):
        _, of_layer, of_head, path = label_parts(label)
        if (of_layer, of_head) != (layer, head) or path is None:
            continue
        logits = float((end.normed(part[None])[0, 0, 0] * end.gain * end.head[token]).sum())
        per_weight = logits / weight if weight and is_multiple else float("nan")
        rows.append({"path": path, "norm": float(part[0, 0].norm()), "logits": logits, "per_weight": per_weight})
        total += float(whole[label][0, 0])
    if not rows:
        raise WorkbenchError(f"head {layer}.{head} shows no value paths")
    (word,) = prompt.strings([token])
    return TokenPath(score=score, weight=weight, token=word, frame=pd.DataFrame(rows), head_logits=total)
