"""Parts of a layer's rotated queries and keys in an observed decoder: its own modules applied to the parts, norms frozen.

One run records the inputs and outputs of the block's modules. The matrix behind the queries is the module whose output holds them, or
holds the input of their norm. A norm's gain and shift are fitted on fixed random rows, so they do not depend on the prompt. Its divisors
are those of the run. The rotation is fitted to queries and keys before and after it, for half-split and neighbouring pairs of channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.errors import BadData
from workbench.models.decomposition import BIAS, By, decompose
from workbench.models.hook_points import has_hooks
from workbench.observing.interception.masks import CAUSAL, visible_keys
from workbench.observing.interception.positions import Layout, Positions
from workbench.observing.interception.tensor_layouts import get_at
from workbench.observing.interception.weights import apply_module, full_weight, matrix_and_bias
from workbench.observing.observed_model import Observed
from workbench.observing.recognition.executions import MATRIX
from workbench.observing.recognition.fits import EXACT, FrozenNorm, fit_norm
from workbench.observing.recognition.projections import matching_columns
from workbench.observing.recognition.structure import LayerStructure, Projection
from workbench.prompts.score_parts import NULL_NOTE, ScoreParts

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
