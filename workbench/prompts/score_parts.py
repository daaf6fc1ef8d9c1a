"""Parts of a layer's rotated queries and keys in a model of `build`: linear maps of the parts of its streams, norms frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench.errors import BadData, WorkbenchError
from workbench.models import Transformer
from workbench.models.attention import Attention, JointAttention
from workbench.models.decomposition import By, anatomy_of, decompose
from workbench.models.hook_points import has_hooks
from workbench.models.hooked import slice_positions
from workbench.models.layers import NormedLinear, RMSNorm, Unnormed, rotate
from workbench.observing.interception.masks import visible_keys
from workbench.observing.recognition.fits import EXACT
from workbench.prompts.prompt import cached_run


@dataclass(frozen=True, kw_only=True)
class ScoreParts:
    """Parts of rotated queries and keys of one layer, in float64; a score is their product / sqrt(d_head)."""

    labels: dict[str, list[str]]  # of q and k
    parts: dict[str, Tensor]  # of q and k, [part, batch, pos, head, d_head], keys once for each query head
    whole: dict[str, Tensor]  # the model's own, [batch, pos, head, d_head]
    dtype: torch.dtype  # coarsest type of the run
    slopes: Tensor | None = None  # of ALiBi, [head, 3]: what a key's, a query's position and 1 add to a score
    visible: Tensor | None = None  # bool [query, key] of all positions; None for the causal mask
    cap: float | None = None  # soft cap: the softmax reads cap * tanh(score / cap)
    notes: list[str] = field(default_factory=list)


NULL_NOTE = "The softmax has one more column, a sink logit, which is no key."


def own_score_parts(
    model: Transformer, ids: Tensor, layer: int, by: By, pos: Sequence[int] | None, head: int | None = None
) -> ScoreParts:
    """Return the parts of rotated queries and keys of ids [batch, T] at some positions, from one run.

    Return one head's query at the first of the positions, and its keys at all of them.
    """
    notes = softmax_notes(model, layer)
    terms = {name: list(_terms(model, layer, name)) for name in ("q", "k")}
    layers = sorted({j for each in terms.values() for j, _ in each})
    anatomy, stem = anatomy_of(model), f"blocks.{layer}.attn.hook_rot_"
    square = f"blocks.{layer}.attn.hook_attn_scores" if has_edited_scores(model.blocks[layer].attn) else ""
    points = (point for each in terms.values() for _, factors in each for point, _ in factors)
    names = [*filter(None, [square]), f"{stem}q", f"{stem}k", *points]
    for j in layers:
        names += anatomy.needed(by, j)
        scales = ("ln1.hook_scale", "attn.q_proj.norm.hook_scale", "attn.k_proj.norm.hook_scale")
        names += [p for scale in scales if (p := f"blocks.{j}.{scale}") in model.hook_dict]
    _, cache = cached_run(model, ids, names)
    tensors = cache.cache_dict
    at = list(range(ids.shape[1]) if pos is None else pos)

    def cut(name: str) -> Tensor:
        return slice_positions(tensors[name], at, 1).double()

    rotation = [x.double()[at] for x in model.rotary(ids.shape[1], tensors[f"{stem}q"])]
    group = model.config.n_heads // tensors[f"{stem}k"].shape[-2]
    heads = {
        x: slice(None) if head is None else slice(h, h + 1) for x, h in (("q", head or 0), ("k", (head or 0) // group))
    }
    # of one head: queries of the first position
    places = {"q": slice(0, 1 if head is not None else None), "k": slice(None)}
    stream_labels = dict[int, list[str]]()
    own = dict[tuple[str, int], Tensor]()  # parts of each layer's own queries and keys, by name and layer
    for j in layers:
        matrices = {n: _matrix(model.blocks[j], n, heads[n]) for n, each in terms.items() if j in dict(each)}
        together = torch.cat([x.flatten(0, 1) for x in matrices.values()]).T
        stream = decompose(model, cache, to=j, by=by, pos=at, through=together, anatomy=anatomy)
        stream_labels[j] = stream.labels
        columns = stream.parts.unflatten(-1, (-1, model.config.d_head)).split([len(x) for x in matrices.values()], -2)
        own |= {(name, j): x[:, :, places[name]] for name, x in zip(matrices, columns, strict=True)}
    labels, parts = dict[str, list[str]](), dict[str, Tensor]()
    for name, each in terms.items():
        sums: dict[str, Tensor] = {}
        for j, factors in each:
            made = own[name, j] * _share(model.blocks[j], name, heads[name], cut)[:, places[name]]
            for point, i in factors:
                weight = tensors[point] if tensors[point].ndim == 1 else cut(point)[:, places[name]]
                by_head = weight[..., heads[name], :] if weight.ndim > 1 and weight.shape[-2] > 1 else weight
                made = made * (weight[i] if weight.ndim == 1 else by_head[..., i, None])
            for label, part in zip(stream_labels[j], made, strict=True):
                sums[label] = sums[label] + part if label in sums else part
        labels[name], here = list(sums), (rotation[0][places[name]], rotation[1][places[name]])
        parts[name] = rotate(torch.stack(list(sums.values())), here)
    whole = {name: cut(f"{stem}{name}")[:, places[name], heads[name]] for name in terms}
    repeats = 1 if head is not None else group
    parts["k"], whole["k"] = (x["k"].repeat_interleave(repeats, -2) for x in (parts, whole))
    dtype = max((t.dtype for t in tensors.values()), key=EXACT.__getitem__)
    visible = None
    if square:
        one = slice(None) if head is None else slice(head, head + 1)
        q, k = tensors[f"{stem}q"][:, :, one], tensors[f"{stem}k"].repeat_interleave(group, -2)[:, :, one]
        visible = visible_under_edits(tensors[square][:, one], q, k, layer, dtype)
    return ScoreParts(labels=labels, parts=parts, whole=whole, dtype=dtype, notes=notes, visible=visible)


def softmax_notes(model: Transformer, layer: int) -> list[str]:
    """Return in words what else a layer's softmax covers, beside its own keys. Raises `BadData` for patterns of several softmaxes."""
    notes = []
    for recipe in (r for r in model.recipes() if r.layer == layer):
        if len(recipe.paths) > 1:
            raise BadData(
                f"layer {layer} mixes the patterns of several softmaxes: a weight follows from no single score"
            )
        if len(recipe.paths[0]) > 1:
            notes.append(f"Scores of layer {layer}'s own keys; its softmax also covers keys of other layers.")
        if recipe.joint.attends(layer) == "null":
            notes.append(NULL_NOTE)
    return notes


def visible_under_edits(scores: Tensor, q: Tensor, k: Tensor, layer: int, dtype: torch.dtype) -> Tensor:
    """Return the keys [query, key] that edited scores [batch, head, query, key] leave visible; raise if they differ from q . k there."""
    q, k, scores = (x.double() for x in (q, k, scores))
    made = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scale = float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) * q.shape[-1] ** -0.5
    by_head = visible_keys(scores).flatten(0, 1).tril()
    if not torch.equal(by_head.any(0), by_head.all(0)):
        raise BadData(f"an edit hides keys of layer {layer} from some heads or documents alone: select one head")
    if not float((scores - made).flatten(0, 1)[by_head].abs().max()) <= EXACT[dtype] * scale:
        raise WorkbenchError(f"a hook changed the scores of layer {layer} after q . k; run the model without it")
    return by_head.all(0)


def has_edited_scores(attn: Attention) -> bool:
    """Return whether a hook, or an edit that replaces the layer's attention, may change scores after q . k."""
    replaced = "attend" in vars(attn) or (isinstance(attn, JointAttention) and "softmaxes" in vars(attn.joint))
    return replaced or has_hooks(attn.hook_attn_scores)


Factors = tuple[tuple[str, int], ...]


def _terms(
    model: Transformer, layer: int, name: Any, factors: Factors = (), own: bool = False
) -> Iterator[tuple[int, Factors]]:
    """Yield the layers whose projections make a layer's queries or keys, with hook points and indices of their coefficients."""
    attn: Attention = model.blocks[layer].attn
    wiring = attn.projections[name]
    if wiring.shared_source is not None and wiring.own_heads:
        raise BadData(f"layer {layer} shares some heads of its {name} with another layer: they have no single stream")
    if wiring.projects and (own or wiring.mixer is None):
        yield layer, factors
        return
    mixed = [wiring.shared_source] if wiring.mixer is None else [*wiring.mixed, *([layer] if wiring.projects else [])]
    for i, j in enumerate(mixed):
        if not isinstance(j, int):
            raise BadData(f"layer {layer} reads its {name} from a table, not from a stream")
        more = factors if wiring.mixer is None else (*factors, (f"blocks.{layer}.attn.{attn.weight_points[name]}", i))
        yield from _terms(model, j, name, more, own=j == layer or wiring.sources[j] == "own")


def _matrix(block: Any, name: str, heads: slice) -> Tensor:
    """Return some heads' rows of a layer's matrix of queries or keys [head, d_head, d_model], the gain of its norm in it, in float64."""
    linear, norm = getattr(block.attn, f"{name}_proj"), block.ln1
    matrix: Tensor = linear.weight.detach().unflatten(0, (-1, block.attn.config.d_head))[heads].double()
    if isinstance(norm, RMSNorm):
        return matrix * norm.weight.detach().double()
    if isinstance(norm, Unnormed):
        return matrix
    what = type(norm).__name__
    raise BadData(f"layer {block.attn.layer}'s norm is a {what}, which has no divisor that could be frozen")


def _share(block: Any, name: str, heads: slice, cut: Callable[[str], Tensor]) -> Tensor:
    """Return the factors of some heads' queries or keys [1 or batch, pos, 1 or head, 1 or d_head] by the norms, frozen."""
    linear, layer = getattr(block.attn, f"{name}_proj"), block.attn.layer
    share = torch.ones(1, 1, 1, 1, dtype=torch.float64, device=linear.weight.device)
    if isinstance(block.ln1, RMSNorm):
        share = share / cut(f"blocks.{layer}.ln1.hook_scale")[..., None]
    if isinstance(linear, NormedLinear):
        of_norm = linear.norm.share(cut(f"blocks.{layer}.attn.{name}_proj.norm.hook_scale"))
        share = share * of_norm.unflatten(-1, (-1, block.attn.config.d_head))[..., heads, :]
    return share
