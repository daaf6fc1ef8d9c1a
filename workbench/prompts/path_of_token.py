"""The path of a token: sources and readers of its value, and its path through one head from the score to a logit.

The value of one key passes the head with the attention weight of the run. Pattern, gates and final norm are frozen. The key's part of a
logit is then the weight times the logit per unit of weight. Summed over keys, it is the head's part of `logit_attribution`.

    v_n = sum over b of c_nb x_b,   b: a layer, whose own projection x_b is, or a table by token id

Mixtures of mixtures (a layer that shares another's mixed values) are resolved to these, for our models from their wiring, for
observed ones from fitted coefficients.
Source: Kobayashi et al. (2020), Attention is Not Only a Weight, arXiv 2004.10102 (norm of the weighted, transformed vector).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from workbench.errors import BadData, WorkbenchError
from workbench.kernels.joint_and_null_softmax import Softmax, joint_attention
from workbench.metrics.base import wide
from workbench.metrics.found_sinks import keys_in_sight
from workbench.models.activation_cache import Cache
from workbench.models.attention_layer import JointAttention
from workbench.models.decomposition import TOLERANCE, Reader, anatomy_of, decompose, label_parts
from workbench.models.hooked import HookedModel, refuse_token
from workbench.models.patterns_and_gradients import RebuiltPatterns
from workbench.observing.observed_model import Observed
from workbench.observing.recognition.value_paths import NEGLIGIBLE
from workbench.observing.stream_and_logit_parts import output_map
from workbench.prompts.attention_maps import attention_hook_points, attention_inputs, attention_map, recipes_of
from workbench.prompts.attention_score import ScoreAttribution, score_attribution
from workbench.prompts.prompt import PromptLike, by_layer, cached_run, one_position, single_prompt


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
    refuse_token(model, token)
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


Base = int | str  # a layer, whose own projection is meant, or a table
Composition = dict[Base, float]  # coefficients of what layers project and tables hold
# stands for the effective values themselves, where something of them is added beside the attention
EFFECTIVE = "effective"


@dataclass(frozen=True, kw_only=True)
class LayerValues:
    """Sources and readers of one layer's values; strings are hook points."""

    layer: int
    vectors: dict[Base, str]  # what it projects itself, and the tables it reads
    sources: tuple[Base, ...]  # what its effective values are a sum of, in the order of the coefficients at `mix`
    expanded: frozenset[Base]  # sources that are read as they attend, after any mixing there
    mix: str | None  # coefficients of `sources`; None: one source, taken `alone` times
    alone: float = 1.0
    values: dict[int, str]  # values that its attention reads, by the layer whose keys go with them; its own first
    scores: list[str]  # what its attention weights are made of
    weights: str | None = None  # coefficients of what is added beside the attention
    added: Callable[[Sequence[float]], Mapping[Base, float]] = field(default=lambda _: {})
    """These coefficients -> how much of `EFFECTIVE` and of the sources is added to the head outputs at the token's own place."""
    changed: bool = False  # whether something else, as a gate, changes the head outputs
    negligible: float = 0.0  # coefficients up to this are none

    @property
    def made_of(self) -> list[str]:
        """Hook points that tell what its values are made of."""
        return [*self.vectors.values(), *([self.mix] if self.mix else [])]

    @property
    def read(self) -> list[str]:
        """Hook points that tell who reads them."""
        return list(dict.fromkeys([*self.values.values(), *self.scores, *([self.weights] if self.weights else [])]))


def layer_values(model: HookedModel) -> list[LayerValues]:
    """Return the value sources of every layer; raises `BadData` if an observed model does not show values or attention."""
    describe = _observed if isinstance(model, Observed) else _ours
    return [describe(model, n) for n in range(model.config.n_layers)]


def resolved(layer: LayerValues, weights: Mapping[Base, float], known: Sequence[Composition]) -> Composition:
    """Expand a weighted sum of a layer's inputs into projections and tables; `known`: sources of earlier layers."""
    total: Composition = {}
    for source, weight in weights.items():
        parts = known[int(source)] if source in layer.expanded else {source: 1.0}
        for base, part in parts.items():
            total[base] = total.get(base, 0.0) + weight * part
    return total


def output_matrix(model: HookedModel, layer: int) -> Tensor:
    """W_O of a layer [head, d_head, d_model]; raises `BadData` where an observed model shows none."""
    if not isinstance(model, Observed):
        matrix: Tensor = model.blocks[layer].attn.W_O
        return matrix.detach()
    structure = model.structure.layers[layer]
    if structure.z is None:
        raise BadData(f"values cannot be followed here: no matrix W_O was found after the attention of layer {layer}")
    return output_map(model.foreign, structure)[0]


def _ours(model: Any, n: int) -> LayerValues:
    stem, attn = f"blocks.{n}.attn", model.blocks[n].attn
    wiring = attn.projections["v"]
    constant = not wiring.own_heads and not (wiring.mixer is not None and wiring.mixer.weighs_tokens)
    crossed = attn.attended.get("v", {}) if isinstance(attn, JointAttention) else {}
    scores = attn.recipe().needs if isinstance(attn, JointAttention) else attention_hook_points(n, ("rot_q", "rot_k"))
    names = attn.coefficients.get("output", ())
    sources = (*wiring.mixed, n) if wiring.shared_source is None else (wiring.shared_source,)

    def attends_with(source: Base, state: str) -> bool:
        """Return whether a source contributes its effective values instead of its projection."""
        if not isinstance(source, int):
            return False
        return state == "effective" or source == 0 or not model.blocks[source].attn.projections["v"].projects

    def added(weights: Sequence[float]) -> Composition:
        """Return the coefficients in what shortcuts add, which is linear in the values, so ones tell."""
        bases, named, terms = (EFFECTIVE, *wiring.sources), dict(zip(names, weights, strict=True)), Composition()
        for base in bases:
            ones = {j: torch.full((1, 1, 1, 1), float(j == base), dtype=torch.double) for j in bases}
            v = ones.pop(EFFECTIVE)
            z = torch.zeros_like(v)
            for shortcut in attn.outputs:
                z = shortcut.output(n, z, v, ones, named)
            if total := float(z):
                terms[base] = total
        return terms

    return LayerValues(
        layer=n,
        vectors=({n: f"{stem}.own.hook_v"} if constant and wiring.projects else {})
        | {j: str(module.hook_v.name) for j, module, _ in attn.reads["v"] if isinstance(j, str)},
        sources=sources if constant else (n,),
        expanded=frozenset(j for j, state in wiring.sources.items() if attends_with(j, state)),
        mix=f"{stem}.hook_v_mix" if wiring.mixer is not None and constant else None,
        values={n: f"{stem}.hook_v"} | {int(j): str(module.hook_v.name) for j, module in crossed.items()},
        scores=sorted(scores), weights=f"{stem}.hook_output_mix" if names else None, added=added,
        changed=bool(attn.gates),
    )  # fmt: skip


def _observed(model: Any, n: int) -> LayerValues:
    stem, block = f"blocks.{n}.attn", model.blocks[n]
    scores = [name for name in attention_hook_points(n, ("rot_q", "rot_k")) if name in model.hook_dict]
    scores = scores or attention_hook_points(n, ("pattern",))
    for name in (f"{stem}.hook_v", *scores):
        if name not in model.hook_dict:
            raise BadData(
                f"values cannot be followed here: layer {n}: {model.absent.get(name, f'{name} is not shown')}"
            )
    own, mixed = f"{stem}.own.hook_v" in model.hook_dict, f"{stem}.hook_v_mix" in model.hook_dict
    vectors: dict[Base, str] = {n: f"{stem}.own.hook_v"} if own else {} if mixed else {n: f"{stem}.hook_v"}
    paths = [p for p in model.fitted_paths if p.layer == n]
    beside = [p for p in paths if p.into == "output"]
    alone = next((p.coefficients.get("own") for p in paths if p.into == "value" and p.exact and own), None)
    one = beside[0] if len(beside) == 1 and beside[0].exact else None
    added = {0 if s == "first" else EFFECTIVE: c for s, c in one.coefficients.items()} if one else {}
    return LayerValues(
        layer=n, vectors=vectors, sources=(*block.source_points, n) if mixed else (n,), expanded=frozenset(),
        mix=f"{stem}.hook_v_mix" if mixed else None, alone=1.0 if alone is None else alone, negligible=NEGLIGIBLE,
        values={n: f"{stem}.hook_v"}, scores=scores, added=lambda _: added,
        changed=bool(model.structure.layers[n].changed) or (bool(beside) and one is None),
    )  # fmt: skip


PARTS = ["path", "head", "coefficient", "norm", "projection", "share"]
READERS = [
    "layer", "way", "path", "head", "coefficient", "attention", "norm", "amount", "total", "share", "even",
]  # fmt: skip
QUERIES = ["head", "query", "attention", "norm", "amount", "total", "share", "even"]
WHOLE = "value"  # the path of the whole effective value, as its own layer reads it
TOGETHER = "together"
"""The path of several vectors of a value as one, where a later layer reads their sum: their norms would not add up."""


@dataclass(frozen=True, kw_only=True)
class ValueFlow:
    """Sources and readers of the value of one layer at one position."""

    tokens: list[str]
    layer: int
    position: int
    norm: float  # length of the effective value over all key-value heads
    parts: pd.DataFrame
    """A row for each source and key-value head: path (`own`, `first`, `source.<j>`, `table`), coefficient, norm of the part,
    its projection on the whole value (in the value's units; negative: it points away), and share, projection / norm of the
    value. Projections sum to the norm over all rows, by algebra; norms of parts do not.
    """
    readers: pd.DataFrame
    """A row for each layer from this one on, way, path and head.

    path: `value` in the chosen layer; in later ones each vector that the value is made of and that is read there again, and,
    of several, their sum as `together`. way:
    `attention`, `cross.<j>` (this layer's queries on layer j's keys) or `added` (beside the attention, at the token's own
    place, as NeuTRENO's pull). coefficient: how much of the vector is in the value read there; attention: sum over queries
    from the position on; norm: ||c x W_O||; amount: attention * norm; total: what the same queries get from all positions
    through attention, sums of norms; share: amount / total (`added` comes on top of the total: a ratio); even: the share if
    each of these queries spread the same total evenly over the positions it sees.
    """
    queries: pd.DataFrame
    """The queries of each head of the chosen layer that get most of the value; columns as of `readers`, even = 1 / positions seen."""
    notes: list[str]  # what is left out, in words

    @property
    def error(self) -> float:
        """Distance between the sum of the parts' projections and the norm."""
        return abs(float(self.parts["projection"].sum()) - self.norm)


@dataclass
class Reading:
    """The value that one layer's attention reads at the position, and the attention that its queries give it."""

    values: dict[int, Tensor]  # by the layer whose keys go with them, [kv_head, d_head]
    columns: dict[int, Tensor]  # attention of every query to the position, [head, T]
    total: Tensor  # norms that every query gets from all positions, summed, [head, T]
    triangle: Tensor  # R of W_O^T = QR by head, [head, d_head, d_head]: ||x W_O|| = ||R x||
    added: Mapping[Base, float] = field(default_factory=dict)
    window: int | None = None  # latest keys that a query sees; None for all, 0 if unknown

    def even(self, at: int) -> Tensor:
        """Weights of the queries from a position on, to this position, if each spread its attention evenly over what it sees [query]."""
        weights = 1 / (keys_in_sight(self.total.shape[1], self.window)[at:] * len(self.columns))
        weights[self.window or len(weights) :] = 0  # later queries do not see it
        return weights


@torch.no_grad()
def value_flow(model: HookedModel, prompt: PromptLike, position: int, layer: int, top: int = 5) -> ValueFlow:
    """Sources and readers of the value that a layer's attention reads at a position (negative: from the end).

    Costs one run and the attention of the selected and all later layers once more. No T x T array, except one pattern at a
    time for observed models that do not show queries and keys. Gates on the head outputs are left out.
    Norms are after W_O, so before anything that follows. `top`: number of queries returned for each head. Raises `BadData` for a layer
    or position that is not there, and for observed models whose values hold more than is known of them.
    """
    prompt = single_prompt(model, prompt)
    at, n_layers = one_position(prompt.ids.shape[1], position), model.config.n_layers
    if isinstance(layer, bool) or layer not in range(n_layers):
        raise BadData(f"layer {layer!r}: the model has layers 0..{n_layers - 1}")
    layers = layer_values(model)
    run = _Run(model, layers, at, layer)
    groups = {n: points.made_of + (points.read if n >= layer else []) for n, points in enumerate(layers)}
    by_layer(model, prompt.ids, {n: list(dict.fromkeys(names)) for n, names in groups.items() if names}, run.reduce)
    made: list[Composition] = []  # sources of every layer's effective values
    for points in layers:
        weights = zip(points.sources, run.mixes.get(points.layer, [points.alone]), strict=True)
        made.append(resolved(points, {j: w for j, w in weights if abs(w) > points.negligible}, made))
    unknown = [n for n in run.readings if not run.explains(n, made[n])]
    if layer in unknown:
        raise BadData(
            f"the values of layer {layer} hold more than what layers project, times one coefficient each, so where they come from "
            "cannot be told"
        )
    whole = run.readings[layer].values[layer]
    parts = _parts(
        layer, whole, {base: (c, run.vectors[base]) for base, c in made[layer].items() if base in run.vectors}
    )
    notes = [f"Layers {', '.join(map(str, unknown))}: unknown what their values hold, left out."] if unknown else []
    if any(points.changed for points in layers[layer:]):
        notes.append("What changes the attention's output before W_O, as a gate, is left out.")
    rows = [row for n in run.readings if n not in unknown for row in run.rows(n, made)]
    readers = pd.DataFrame(rows, columns=READERS).astype({"layer": "Int64", "head": "Int64", "path": "string"})
    return ValueFlow(
        tokens=prompt.tokens, layer=layer, position=at, norm=float(whole.norm()), parts=parts, readers=readers,
        queries=_queries(run.readings[layer], whole, layer, at, top), notes=notes,
    )  # fmt: skip


@dataclass
class _Run:
    """Activations of one run by layer."""

    model: HookedModel
    layers: Sequence[LayerValues]
    at: int
    layer: int
    vectors: dict[Base, Tensor] = field(default_factory=dict)  # [kv_head, d_head], at the position
    mixes: dict[int, list[float]] = field(default_factory=dict)
    readings: dict[int, Reading] = field(default_factory=dict)
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)

    def reduce(self, n: int, tensors: dict[str, Tensor]) -> None:
        points = self.layers[n]
        for base, name in points.vectors.items():
            self.vectors.setdefault(base, wide(tensors[name][0, self.at]))
        if points.mix:
            self.mixes[n] = tensors[points.mix].tolist()
        if n < self.layer:
            return
        self.dtypes[n] = tensors[points.values[n]].dtype
        triangle = torch.linalg.qr(wide(output_matrix(self.model, points.layer)).mT, mode="r").R
        values = {j: wide(tensors[name][0]) for j, name in points.values.items()}
        sizes = [written(v, triangle) for v in values.values()]
        here = torch.zeros(len(values), *sizes[0].shape, device=triangle.device, dtype=sizes[0].dtype)
        here[:, self.at] = 1.0
        # the attention of numbers in place of vectors: first the norms, then for each set of keys a 1 at the position
        sets = [
            torch.stack([size, *(here[i] if i == j else torch.zeros_like(size) for j in range(len(sizes)))], -1)
            for i, size in enumerate(sizes)
        ]
        found = self._attend(points, tensors, sets)
        columns = {j: found[..., i + 1].T for i, j in enumerate(values)}
        weights = tensors[points.weights].tolist() if points.weights else []
        at_position = {j: v[self.at] for j, v in values.items()}
        window = self.model.attention_window(points.layer)
        self.readings[n] = Reading(at_position, columns, found[..., 0].T, triangle, points.added(weights), window)

    def _attend(self, points: LayerValues, tensors: dict[str, Tensor], values: Sequence[Tensor]) -> Tensor:
        """Apply the layer's attention to numbers [T, head, number] by set of keys; returns [T, head, number]."""
        if points.scores[0].endswith("hook_pattern"):
            return torch.einsum("hqk,khn->qhn", wide(tensors[points.scores[0]][0]), values[0])
        recipe = recipes_of(self.model).get(points.layer)
        if recipe is not None:
            softmaxes = recipe.softmaxes(tensors)
        else:
            q, k = (tensors[f"blocks.{points.layer}.attn.hook_{name}"] for name in ("rot_q", "rot_k"))
            softmaxes = [Softmax(1.0, q, [k])]
        heads = values[0].shape[1]
        changed = ([_repeated(wide(k), heads).to(values[0]) for k in s.keys] for s in softmaxes)
        queries = (wide(s.q).to(values[0]) for s in softmaxes)
        many = [replace(s, q=q, keys=keys) for s, q, keys in zip(softmaxes, queries, changed, strict=True)]
        return joint_attention(many, [v[None] for v in values])[0]

    def explains(self, n: int, made: Composition) -> bool:
        """Return whether a layer's effective value equals the sum of its parts up to rounding."""
        found = self.readings[n].values[n]
        parts = [c * self.vectors[base] for base, c in made.items() if base in self.vectors]
        size = max([float(found.norm()), *(float(part.norm()) for part in parts)])
        rounding = TOLERANCE[self.dtypes[n]]
        return float((found - sum(parts)).norm()) <= max(rounding, min(10 * rounding, 1e-2)) * size

    def rows(self, n: int, made: Sequence[Composition]) -> Iterator[dict[str, Any]]:
        """Rows of `ValueFlow.readers` of a layer."""
        reading, chosen = self.readings[n], {base for base, c in made[self.layer].items() if c}
        for j, column in reading.columns.items():
            way = "attention" if j == n else f"cross.{j}"
            if n == self.layer == j:
                yield from self._of_heads(n, way, WHOLE, 1.0, reading.values[n], column)
            else:
                yield from self._of_vectors(n, way, {b: c for b, c in made[j].items() if b in chosen}, column)
        itself = torch.zeros_like(reading.total)
        itself[:, self.at] = 1.0
        added = dict(reading.added)
        if n == self.layer and (c := added.pop(EFFECTIVE, 0.0)):
            yield from self._of_heads(n, "added", WHOLE, c, reading.values[n], itself)
        effective = added.pop(EFFECTIVE, 0.0)
        terms = resolved(self.layers[n], added, made)
        for base, c in made[n].items() if effective else ():
            terms[base] = terms.get(base, 0.0) + effective * c
        yield from self._of_vectors(n, "added", {b: c for b, c in terms.items() if c and b in chosen}, itself)

    def _of_vectors(self, n: int, way: str, terms: Composition, column: Tensor) -> Iterator[dict[str, Any]]:
        for base, c in terms.items():
            yield from self._of_heads(n, way, base, c, self.vectors[base], column)
        if len(terms) > 1:
            total = torch.stack([c * self.vectors[base] for base, c in terms.items()]).sum(0)
            yield from self._of_heads(n, way, TOGETHER, 1.0, total, column)

    def _of_heads(
        self, n: int, way: str, base: Base, coefficient: float, vector: Tensor, column: Tensor
    ) -> Iterator[dict[str, Any]]:
        reading, after = self.readings[n], slice(self.at, self.at + 1 if way == "added" else None)
        even = reading.even(self.at).to(column)
        norms = abs(coefficient) * written(vector, reading.triangle)
        for head, norm in enumerate(norms.tolist()):
            total = reading.total[head, after]
            attention, everything = float(column[head, after].abs().sum()), float(total.sum())
            amount = attention * norm
            yield {
                "layer": n, "way": way, "path": base if base in (WHOLE, TOGETHER) else path_of(base, self.layer), "head": head,
                "coefficient": coefficient, "attention": attention, "norm": norm, "amount": amount, "total": everything,
                "share": amount / everything if everything else float("nan"),
                "even": float((total * even).sum()) / everything if everything and way != "added" else float("nan"),
            }  # fmt: skip


def path_of(base: Base, layer: int) -> str:
    """A vector in a word, seen from a layer: `own`, `first`, `source.<j>`, `table`."""
    if isinstance(base, str):
        return "table"
    return "own" if base == layer else "first" if base == 0 else f"source.{base}"


def written(values: Tensor, triangle: Tensor) -> Tensor:
    """Norms [..., head] of values [..., kv_head, d_head] after W_O, of which `triangle` is the R."""
    return torch.einsum("...hd,hrd->...hr", _repeated(values, len(triangle)), triangle.to(values)).norm(dim=-1)


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[-2], dim=-2)


def _parts(layer: int, whole: Tensor, made: Mapping[Base, tuple[float, Tensor]]) -> pd.DataFrame:
    """Rows of `ValueFlow.parts`; none for a layer without its own value projection."""
    norm, rows = float(whole.norm()), list[dict[str, Any]]()
    all_made = dict(made) if layer in made else {layer: (0.0, torch.zeros_like(whole)), **made}
    for base, (coefficient, vector) in all_made.items():
        part = coefficient * vector
        projections = (part * whole).sum(-1) / norm if norm else torch.zeros(len(whole))
        for head, (length, projection) in enumerate(zip(part.norm(dim=-1).tolist(), projections.tolist(), strict=True)):
            share = projection / norm if norm else float("nan")
            row = path_of(base, layer), head, coefficient, length, projection, share
            rows.append(dict(zip(PARTS, row, strict=True)))
    return pd.DataFrame(rows, columns=PARTS).astype({"head": "Int64", "path": "string"})


def _queries(reading: Reading, whole: Tensor, layer: int, at: int, top: int) -> pd.DataFrame:
    """Rows of `ValueFlow.queries`, for each head the largest amounts first."""
    norms, column = written(whole, reading.triangle), reading.columns[layer].abs()
    even, rows = reading.even(at).tolist(), list[dict[str, Any]]()
    for head, norm in enumerate(norms.tolist()):
        best = column[head, at:].topk(min(top, column.shape[1] - at))
        for weight, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            query, amount = at + place, weight * norm
            total = float(reading.total[head, query])
            row = head, query, weight, norm, amount, total, amount / total if total else float("nan")
            rows.append(dict(zip(QUERIES, (*row, even[place]), strict=True)))
    return pd.DataFrame(rows, columns=QUERIES).astype({"head": "Int64", "query": "Int64"})
