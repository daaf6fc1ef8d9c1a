"""Parts of a layer's rotated queries and keys, norms frozen: linear maps of the parts of its streams, ours or observed.

One run records the inputs and outputs of the block's modules. The matrix behind the queries is the module whose output holds them, or
holds the input of their norm. A norm's gain and shift are fitted on fixed random rows, so they do not depend on the prompt. Its divisors
are those of the run. The rotation is fitted to queries and keys before and after it, for half-split and neighbouring pairs of channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.errors import BadData, WorkbenchError
from workbench.models import Transformer
from workbench.models.attention_layer import Attention, JointAttention
from workbench.models.decomposition import BIAS, By, anatomy_of, decompose
from workbench.models.hook_points import has_hooks
from workbench.models.hooked import slice_positions
from workbench.models.layers import NormedLinear, RMSNorm, Unnormed, rotate
from workbench.observing.interception.masks import CAUSAL, visible_keys
from workbench.observing.interception.position_axes import Layout, Positions
from workbench.observing.interception.sharded_weights import apply_module, full_weight, matrix_and_bias
from workbench.observing.interception.tensor_paths import get_at
from workbench.observing.observed_model import Observed
from workbench.observing.recognition.decoder_structure import LayerStructure, Projection
from workbench.observing.recognition.least_squares import EXACT, FrozenNorm, fit_norm
from workbench.observing.recognition.module_runs import MATRIX
from workbench.observing.recognition.projections import matching_columns
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


PROBES = 64  # random rows to which a norm's gain and shift are fitted
LEAST = 4  # tokens of a fit of slopes
OFFSETS = 3  # first rows of a table of positions that tokens may skip (OPT skips two)


@dataclass(frozen=True, eq=False)
class ModuleRun:
    """One run of a module in a block: its name, first input tensor and output."""

    name: str
    module: nn.Module
    input: Tensor
    output: Any


def observed_score_parts(
    model: Observed, ids: Tensor, layer: int, by: By, pos: Sequence[int] | None, head: int | None = None
) -> ScoreParts:
    """Return the parts of rotated queries and keys of ids [1, T] at some positions; of one head as `own_score_parts`."""
    if len(ids) > 1:
        raise BadData("observed models take documents one by one: batch=1")
    anatomy = model.anatomy()
    structure, stem = anatomy.structure.layers[layer], f"blocks.{layer}.attn.hook_"
    if len(structure.parts) != 1 or structure.inline:
        raise BadData(f"layer {layer} shows no single attention in a block of its own: its scores have no known maps")
    part = structure.parts[0]
    point = f"{stem}attn_scores"
    is_edited = point in model.hook_dict and has_hooks(model.hook_dict[point])
    whole_mask = f"{stem}rot_q" in model.hook_dict and part.attention.mask == CAUSAL and not is_edited
    points = [f"{stem}{x}" for x in ("q", "k", *(("rot_q", "rot_k") if whole_mask else ("attn_scores",)))]
    if absent := [name for name in points if name not in model.hook_dict]:
        raise BadData(f"layer {layer} has no {absent[0]}: {model.absent.get(absent[0], 'the module does not show it')}")
    names = [*anatomy.needed(by, layer), *points, *(["hook_embed"] if "hook_embed" in model.hook_dict else [])]
    with module_runs(model, structure) as runs, torch.no_grad():
        cache, attended = model.run_with_attended(ids, names)
    dtype = max((t.dtype for t in cache.cache_dict.values()), key=EXACT.__getitem__)
    before = {x: cache[f"{stem}{x}"][0].double() for x in ("q", "k")}  # [pos, head, d_head]
    after = {x: (cache[f"{stem}rot_{x}"] if whole_mask else attended[layer, x])[0].double() for x in ("q", "k")}
    if (rotation := fitted_rotation(before, after, EXACT[dtype])) is None:
        raise BadData(
            f"layer {layer}'s queries and keys in use are no rotations of its projections, by pairs of channels"
        )
    fitted = ScoreFit(torch.ones(before["q"].shape[1]).to(before["q"]))
    visible = None
    if not whole_mask:
        scores = cache[f"{stem}attn_scores"][0].double()
        visible = visible_keys(scores)
        if not torch.equal(visible.any(0), visible.all(0)):
            raise BadData(f"the mask of layer {layer} differs by head")
        visible = visible.all(0).tril()
        if (fit := fitted_scores(after, scores, visible, EXACT[dtype])) is None:
            why = part.attention.note or part.attention.mask
            raise BadData(
                f"the scores of layer {layer} are no multiple of q . k, plus slopes by position or under a soft cap ({why})"
            )
        fitted = fit
    at = list(range(ids.shape[1])) if pos is None else list(pos)
    read, n_heads, maps = cache[f"blocks.{layer}.hook_resid_pre"][0], before["q"].shape[1], dict[str, StreamMap]()
    for name in ("q", "k"):
        repeats = n_heads // before[name].shape[1]
        maps[name] = stream_map(
            runs, getattr(part, name), layer, name, read, before[name], at[:1] if name == "q" and head is not None else at,
            EXACT[dtype], list(range(n_heads // repeats)) if head is None else [head // repeats], anatomy.structure.layout,
        )  # fmt: skip
    through = torch.cat([m.columns for m in maps.values()], -1)
    stream = decompose(model, cache, to=layer, by=by, pos=at, through=through, anatomy=anatomy)
    labels, mapped = list(stream.labels), stream.parts[:, 0]
    first = cache["blocks.0.hook_resid_pre"][0, at].to(through) @ through
    is_first = float((mapped[0] - first).abs().max()) <= 1e-9 * float(first.abs().max())  # with weight 1
    if is_first and (places := table_of_positions(model, cache)) is not None:
        added = places[at].to(through) @ through
        mapped = torch.cat([mapped[:1] - added, added[None], mapped[1:]])
        labels[:1] = [labels[0], "positions"]
    parts, whole, all_labels = {}, {}, {}
    for (name, m), columns in zip(
        maps.items(), mapped.split([m.columns.shape[1] for m in maps.values()], -1), strict=True
    ):
        made = m.finished(columns[:, : len(m.at)])
        if bool(m.constant.any()):
            made = torch.cat([made, m.constant[None]])
        heads = [h for h in m.heads for _ in range(n_heads // before[name].shape[1] if head is None else 1)]
        made = rotation(name, made, m.at)[:, :, [m.heads.index(h) for h in heads]]
        own, scales = after[name][m.at][:, heads], fitted.factor[slice(None) if head is None else [head], None]
        made, own = (x * scales if name == "q" else x for x in (made, own))
        all_labels[name] = labels + [BIAS] * (len(made) - len(labels))
        parts[name], whole[name] = made[:, None], own[None]
    return ScoreParts(
        labels=all_labels, parts=parts, whole=whole, dtype=dtype, slopes=fitted.slopes, visible=visible, cap=fitted.cap,
        notes=[NULL_NOTE] if part.attention.has_null else [],
    )  # fmt: skip


@contextmanager
def module_runs(model: Observed, structure: LayerStructure) -> Iterator[list[ModuleRun]]:
    """Record the runs of all modules inside a block while open."""
    runs, begun = list[ModuleRun](), 0
    block = model.foreign.get_submodule(structure.block)

    def begin(module: nn.Module, args: Any) -> None:
        nonlocal begun
        begun += 1

    def listener(name: str) -> Callable[..., None]:
        def hear(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
            if begun - 1 == structure.run and tensors:
                kept = output.detach().clone() if isinstance(output, Tensor) else output  # modules may write into both
                runs.append(ModuleRun(name, module, tensors[0].detach().clone(), kept))

        return hear

    with ExitStack() as stack:
        stack.callback(block.register_forward_pre_hook(begin).remove)
        for name, module in block.named_modules(prefix=structure.block):
            if module is not block:
                stack.callback(module.register_forward_hook(listener(name), with_kwargs=True).remove)
        yield runs


def table_of_positions(model: Observed, cache: Any) -> Tensor | None:
    """Return the position embeddings [pos, d_model] if a table's rows make up the first block's input beside the token embedding."""
    if "hook_embed" not in cache.cache_dict:
        return None
    rest = (cache["blocks.0.hook_resid_pre"] - cache["hook_embed"])[0]
    for module in model.foreign.modules() if bool(rest.any()) else ():
        if isinstance(module, nn.Embedding) and module.embedding_dim == rest.shape[1]:
            table, most = full_weight(module), 1e-5 * float(rest.abs().max())
            candidates = [table[skipped : skipped + len(rest)].to(rest) for skipped in range(OFFSETS)]
            if any(x.shape == rest.shape and torch.allclose(x, rest, rtol=1e-4, atol=most) for x in candidates):
                return rest
    return None


@dataclass(frozen=True, kw_only=True)
class StreamMap:
    """The map from a block's input to a layer's queries or keys at some positions, norms frozen: a matrix, then divisions."""

    columns: Tensor  # matrix [d_model, n] in float64, the norm's gain and mean in it
    finished: Callable[[Tensor], Tensor]  # maps products with it [..., pos, n] to [..., pos, head, d_head]
    constant: Tensor  # what the block's input does not change, [pos, head, d_head]
    at: list[int]
    heads: list[int]


def stream_map(
    runs: Sequence[ModuleRun], place: Projection | None, layer: int, name: str, read: Tensor, seen: Tensor, at: list[int],
    tolerance: float, heads: list[int], layout: Layout,
) -> StreamMap:  # fmt: skip
    """Return the map from the block's input `read` [T, d_model] to queries or keys `seen` [T, head, d_head] of some heads."""
    where, T = f"layer {layer}'s {'query' if name == 'q' else 'key'}", len(read)
    if place is None or place.module == MATRIX:
        raise BadData(f"{where} projection is the output of no module, so parts of the stream cannot pass through it")
    of_place = [run for run in runs if run.name == place.module]
    if len(of_place) <= place.run:
        raise BadData(f"{where} projection, {place.module}, did not run on this prompt as on the example tokens")
    last = of_place[place.run]
    output = get_at(last.output, place.path)
    positions = Positions(1, T, layout)
    rows = positions.by_position(output, place.axes)
    if rows is None or not torch.equal(place.heads_in(rows).double(), seen):
        raise BadData(f"{where} differs from the output of {place.module} on this prompt")
    matrix, norm, width, before_norm = last, None, 1, None
    columns: Any = slice(None)
    if not is_affine(last, read.shape[-1]):
        norm, width = probed_norm(last, where), last.input.shape[-1]
        before_norm = positions.by_position(last.input, place.axes) if last.input.shape == output.shape else None
        for matrix in reversed(runs[: runs.index(last)]):
            if before_norm is not None and is_affine(matrix, read.shape[-1]):
                made = matrix.output.reshape(T, -1)
                columns = matching_columns(made, before_norm)
                if columns is not None and torch.equal(made[:, as_index(columns)], before_norm):
                    break
        else:
            raise BadData(f"{where}: no matrix of the block makes the input of {place.module}")
    normed = matrix.input.reshape(T, -1)
    before = input_norm(runs, read, normed, where, tolerance)
    divisor = before.divisor(read.double(), normed.double())[at]
    weight, bias = (x.double()[..., as_index(columns)] for x in matrix_and_bias(matrix.module, normed))
    constant = bias if before.shift is None else bias + before.shift.to(weight) @ weight
    weight = before.gain.to(weight)[:, None] * weight
    weight = weight - weight.mean(0) if before.centred else weight
    # the rows of the selected heads, and all others under the same norms
    of_heads = place.heads_in(torch.arange(rows.shape[1])[None])[0, heads]
    groups = (of_heads // width).unique()
    columns = (groups[:, None] * width + torch.arange(width)).flatten()
    of_heads = torch.searchsorted(groups, of_heads // width) * width + of_heads % width

    frozen = None
    if norm is not None and before_norm is not None:
        x, u = (t.unflatten(-1, (-1, width))[at][:, groups].double() for t in (before_norm, rows))
        frozen = norm.divisor(x, u)

    def normed_heads(x: Tensor) -> Tensor:
        if norm is not None and frozen is not None:
            x = x.unflatten(-1, (-1, width))
            x = divided(norm.gain.to(x) * norm.read(x), frozen).flatten(-2)
        return x[..., of_heads]

    constant = normed_heads(constant[columns].expand(len(at), -1))
    if norm is not None and norm.shift is not None:
        constant = constant + norm.shift.to(constant).repeat(len(groups))[of_heads]
    return StreamMap(
        columns=weight[:, columns], finished=lambda x: normed_heads(divided(x, divisor)), constant=constant, at=at, heads=heads
    )  # fmt: skip


def divided(part: Tensor, divisor: Tensor) -> Tensor:
    """Divide a part by a norm's divisor; 0 stays 0 where the norm of a zero vector (a padding token's) shows no divisor."""
    return torch.where(part == 0, 0.0, part / divisor)


def as_index(columns: slice | tuple[int, ...]) -> Any:
    """Return columns as an index of a tensor."""
    return columns if isinstance(columns, slice) else list(columns)


def is_affine(run: ModuleRun, width: int) -> bool:
    """Return whether a module maps rows of this width affinely, by its outputs on random rows."""
    if (
        run.input.shape[-1] != width
        or not isinstance(run.output, Tensor)
        or not any(True for _ in run.module.parameters())
    ):
        return False
    a, b = probes(2, width, run.input)
    rows = apply_module(run.module, torch.stack([a, b, a + b, torch.zeros_like(a)])).double()
    left = rows[0] + rows[1] - rows[2] - rows[3]
    return float(left.norm()) <= 10 * EXACT[run.input.dtype] * float(rows.norm())


def probes(count: int, width: int, like: Tensor) -> Tensor:
    """Return fixed random rows [count, width]."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(like)


def probed_norm(run: ModuleRun, where: str) -> FrozenNorm:
    """Fit the norm that a module computes, on random rows; raises `BadData` for other functions."""
    rows = probes(PROBES, run.input.shape[-1], run.input)
    try:
        norm = fit_norm(rows, apply_module(run.module, rows))
    except RuntimeError as error:  # a norm with weights for each head reads no rows of one head
        raise BadData(f"{where}: {run.name} cannot read rows of {len(rows.T)} numbers ({error})") from error
    if norm is None:
        raise BadData(f"{where}: {run.name} is neither a matrix nor a norm")
    return norm


def input_norm(runs: Sequence[ModuleRun], x: Tensor, u: Tensor, where: str, tolerance: float) -> FrozenNorm:
    """Return the norm between the block's input x and the matrix's input u [T, d_model]: none, a module's, or one without weights."""
    ones = torch.ones(x.shape[-1], dtype=torch.float64, device=x.device)
    for run in runs:
        is_alike = isinstance(run.output, Tensor) and run.input.numel() == run.output.numel() == x.numel()
        if is_alike and torch.equal(run.input.reshape(x.shape), x) and torch.equal(run.output.reshape(u.shape), u):
            return probed_norm(run, where)
    for centred in (False, True):  # the identity too
        norm = FrozenNorm(centred, ones, None)
        part = norm.read(x.double()) / norm.divisor(x.double(), u.double())
        if float((part - u.double()).norm()) <= tolerance * float(u.double().norm()):
            return norm
    raise BadData(
        f"{where} projection does not read a norm of the block's input by a module of the block, or one without weights"
    )


@dataclass(frozen=True)
class Rotation:
    """Rotations of pairs of channels by position, times a scale for queries and keys; the other channels are only scaled."""

    one: Tensor  # channels [pair]
    other: Tensor
    rest: Tensor
    angle: Tensor  # complex, of length 1, [T, pair]
    scales: dict[str, tuple[Tensor, Tensor]]  # of q and k: by pair, of the rest

    def __call__(self, name: str, x: Tensor, at: list[int]) -> Tensor:
        """Rotate queries or keys [part, pos, head, d_head] at positions."""
        by_pair, plain = self.scales[name]
        z = by_pair * self.angle[at][:, None] * torch.complex(x[..., self.one], x[..., self.other])
        out = plain * x
        out[..., self.one], out[..., self.other] = z.real, z.imag
        return out


def fitted_rotation(before: dict[str, Tensor], after: dict[str, Tensor], tolerance: float) -> Rotation | None:
    """Fit one angle for each position and pair of channels to queries and keys [T, head, d_head]; None without a fit."""
    width = before["q"].shape[-1]
    layouts = [(torch.arange(0), torch.arange(0))]  # no rotation
    for n in range(width - width % 2, 0, -2):
        first = torch.arange(n // 2)
        layouts += [(first, first + n // 2), (2 * first, 2 * first + 1)]
    for one, other in layouts:
        rest = torch.tensor(sorted(set(range(width)) - {*one.tolist(), *other.tolist()}), dtype=torch.long)
        pairs = {n: [torch.complex(x[n][..., one], x[n][..., other]) for x in (before, after)] for n in before}
        angle = torch.sgn(torch.stack([(v * u.conj()).sum(1) for u, v in pairs.values()]).sum(0))
        scales, left = {}, 0.0
        for name, (u, v) in pairs.items():
            turned, r, s = angle[:, None] * u, before[name][..., rest], after[name][..., rest]
            by_pair = (v * turned.conj()).real.sum((0, 1)) / u.abs().square().sum((0, 1)).clamp_min(1e-300)
            plain = (r * s).sum() / r.square().sum().clamp_min(1e-300)
            scales[name] = by_pair, plain
            wrong = (v - by_pair * turned).abs().square().sum() + (s - plain * r).square().sum()
            left = max(left, float((wrong / after[name].square().sum().clamp_min(1e-300)).sqrt()))
        if left <= tolerance:
            return Rotation(one, other, rest, angle, scales)
    return None


@dataclass(frozen=True)
class ScoreFit:
    """Scores as cap * tanh(s / cap) of s = factor * q . k / sqrt(d_head) + slopes."""

    factor: Tensor  # [head]
    slopes: Tensor | None = None  # [head, 3]: of the key's position, the query's, and 1
    cap: float | None = None


def fitted_scores(used: dict[str, Tensor], scores: Tensor, visible: Tensor, tolerance: float) -> ScoreFit | None:
    """Fit scores [head, query, key] under a mask: a multiple of q . k, else with slopes (ALiBi), else under a soft cap."""
    q, k = used["q"], used["k"].repeat_interleave(used["q"].shape[1] // used["k"].shape[1], 1)
    if len(q) < LEAST:
        raise BadData(f"{len(q)} tokens: the scores of a masked or changed attention are fitted to {LEAST} or more")
    i, j = visible.nonzero(as_tuple=True)
    dots, seen = torch.einsum("ihd,jhd->hij", q, k)[:, i, j] / q.shape[-1] ** 0.5, scores[:, i, j]
    columns = torch.stack([dots, *(x.double().expand_as(dots) for x in (j, i, torch.ones_like(i)))], -1)
    most = tolerance * float(seen.abs().max())
    count = torch.bincount(i)

    def centred(x: Tensor) -> Tensor:
        """Subtract from each query's row its mean [head, cell]. The softmax ignores such constants, and gpt-oss subtracts one."""
        return x - (x.new_zeros(len(x), len(q)).index_add(1, i, x) / count)[:, i]

    for x, y in ((columns[..., :1], seen), (columns, seen), (centred(dots)[..., None], centred(seen))):
        fits = torch.linalg.lstsq(x.cpu(), y.cpu()[..., None]).solution.to(q)  # [head, column, 1]
        if float(((x @ fits)[..., 0] - y).abs().max()) <= most:
            return ScoreFit(fits[:, 0, 0], fits[:, 1:, 0] if x.shape[-1] > 1 else None)
    from scipy.optimize import least_squares

    products, targets = dots.flatten().cpu().numpy(), seen.flatten().cpu().numpy()
    some, top = slice(None, None, max(1, len(products) // 20_000)), float(abs(targets).max())

    def capped(p: Any, x: Any) -> Any:
        """Scores of a factor and the logarithm of cap / largest score."""
        cap = top * np.exp(p[1])
        return cap * np.tanh(p[0] * x / cap)

    starts = [(float(products @ targets / (products @ products)), start) for start in (0.05, 1.0, 3.0)]
    fits_ = [
        least_squares(lambda p: capped(p, products[some]) - targets[some], start, xtol=1e-14, ftol=1e-14)
        for start in starts
    ]
    best = min(fits_, key=lambda fit: fit.cost).x
    if not float(abs(capped(best, products) - targets).max()) <= most:
        return None
    return ScoreFit(torch.full((q.shape[1],), best[0]).to(q), cap=float(top * np.exp(best[1])))
