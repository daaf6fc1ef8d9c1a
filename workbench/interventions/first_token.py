"""Effects of the first position, separated from effects of its token, and the output of attention sinks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from workbench.interventions.registered_experiments import (
    ByDocument,
    batches_of,
    hook_points,
    intervention,
    mean_row,
    sinks_by_layer,
)
from workbench.kernels.joint_and_null_softmax import joint_attention
from workbench.metrics.found_sinks import sink_positions
from workbench.models.decomposition import crossed_points, gate_of
from workbench.statistics.sink_thresholds import sink_kind

SITES = ("v", "own_v", "stream")
SIZES: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x.norm(dim=-1), "dimension": lambda x: x.abs().amax(-1),
}  # fmt: skip
"""Of the stream's state at each position, by variant."""


@intervention(
    unit="ratio", range="> 0, 1 = none", reading="of values lower: drained; of streams higher: towering", min_length=4,
    source="value drain and hidden peak: Guo et al. 2024, arXiv 2410.13835; Zhou et al. 2024; the matched baselines ours",
)  # fmt: skip
@torch.no_grad()
def first_token_norm(
    model: Any, sample: Any, data: Any, batch: int, *, positions: str = "first"
) -> Iterator[dict[str, Any]]:
    """Drain of the first position's value and peak of its stream, beside the same token elsewhere and another token there.

    Norm of one position's vector divided by the median (values, `value_drain`) or mean (streams, `hidden_peak`) of the
    others. The controls read the document with the tokens of positions 0 and T // 2 exchanged:
    `same_token` is the ratio at position T // 2, which now holds the first token; `other_token` is that at position 0.
    A drain or peak in `other_token` only is an effect of the position, one in `same_token` only of the token. A trained
    start token alone gives ratios of 0.6 and 1.3. Caution: where both show it, neither is excluded.
    With positions `found`, each document's strongest sink position (`sink_positions`) of any head replaces position 0,
    and the position half a document further replaces T // 2. Documents without a sink do not count.
    """
    points = {name: (site, n) for site in SITES for n, name in hook_points(model, site).items()}
    ratios = ByDocument()
    for ids in batches_of(model, sample, batch):
        at = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
        if positions == "found":  # the documents in which a head rests on some position, and the strongest of these
            total = torch.zeros(ids.shape, dtype=torch.double, device=ids.device)
            for is_sink, excess in sinks_by_layer(model, ids).values():
                total += torch.where(is_sink, excess, 0).sum(1)
            has_sink = total.sum(1) > 0
            ids, at = ids[has_sink], total.argmax(1)[has_sink]
            if not len(ids):
                continue
        T, rows = ids.shape[1], torch.arange(len(ids), device=ids.device)
        middle, swapped = (at + T // 2) % T, ids.clone()
        swapped[rows, at], swapped[rows, middle] = ids[rows, middle], ids[rows, at]
        for text, read in ((ids, {None: at}), (swapped, {"same_token": middle, "other_token": at})):
            _, cache = model.run_with_cache(text, names_filter=list(points))
            for name, (site, layer) in points.items():
                norms = cache[name].double().flatten(2).norm(dim=-1)
                for control, place in read.items():
                    is_other = torch.ones_like(norms, dtype=torch.bool).scatter(1, place[:, None], False)
                    others = norms[is_other].view(len(norms), -1)
                    usual = others.mean(1) if site == "stream" else others.quantile(0.5, dim=1)
                    here = norms.gather(1, place[:, None])[:, 0]
                    ratios.add(here / usual, site=site, layer=layer, control=control, unit="ratio")
    yield from ratios.rows()


@intervention(
    unit="logarithm of a ratio", range="any", reading="higher: the first token's state grows more in this layer",
    source="massive-emergence layer of arXiv 2605.08504 (2026); its threshold is not published, so the largest jump is taken",
)  # fmt: skip
@torch.no_grad()
def massive_emergence(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Growth of the first token's state per layer, and the layer of its largest jump, where a massive activation emerges.

    ln of the norm of x_0 in the stream after the layer over that before it; `dimension`: of the largest |entry| of x_0. The control
    `others`: the same of the mean over all other positions. `layer` and `dimension_layer` (without a layer axis) are the layer, from
    0, of the largest jump in a document. `invariance` per layer is cos(x_0 before, x_0 after), near 1 for an unchanged state.
    Caution: some layer always has the largest jump; that one emerged is said by its size beside the control and beside step 0.
    """
    names = [name for _, name in sorted(hook_points(model, "stream").items())]
    jumps: dict[tuple[str | None, str | None], list[Tensor]] = {}  # (variant, control) -> [document, layer]
    for ids in batches_of(model, sample, batch):
        _, cache = model.run_with_cache(ids, names_filter=names)
        streams = [cache[name].double() for name in names]
        for variant, size in SIZES.items():
            sizes = torch.stack([size(x) for x in streams], 1).cpu()  # [document, stream, position]
            for control, of in ((None, sizes[..., 0]), ("others", sizes[..., 1:].mean(-1))):
                jumps.setdefault((variant, control), []).append(of.log().diff(dim=1))
        kept = [torch.cosine_similarity(x[:, 0], y[:, 0], dim=-1).cpu() for x, y in itertools.pairwise(streams)]
        jumps.setdefault(("invariance", None), []).append(torch.stack(kept, 1))
    for (variant, control), parts in jumps.items():
        each, unit = torch.cat(parts), "cosine" if variant == "invariance" else "logarithm of a ratio"
        for layer in range(each.shape[1]):
            yield mean_row(each[:, layer], layer=layer, variant=variant, control=control, unit=unit)
        if variant in SIZES and control is None:
            which = "layer" if variant is None else f"{variant}_layer"
            yield mean_row(each.argmax(1), variant=which, unit="layer")


def _from_found(given: dict[str, Tensor], window: int | None) -> tuple[Tensor, Tensor] | None:
    """Return each query's attention to its head's found positions [batch, head, pos], and their part of z.

    None for a mixed pattern, and for a mask of an unknown kind, whose `window` is 0.
    """
    if window == 0:
        return None
    at = sink_positions(given["received"], given["row_max"], window)
    most, heads = int(at.sum(-1).max()), at.shape[1]
    is_one, places = at.double().topk(max(most, 1), dim=-1)  # [batch, head, few]
    group = heads // given["v"].shape[2]
    where = places.transpose(1, 2)[..., None]  # [batch, few, head, 1]
    wide = (given[name].repeat_interleave(group, dim=2) for name in ("rot_k", "v"))
    keys, values = (x.gather(1, where.expand(-1, -1, -1, x.shape[-1])) for x in wide)
    scores = torch.einsum("bqhd,bkhd->bhqk", given["rot_q"], keys) * given["rot_q"].shape[-1] ** -0.5
    queries = torch.arange(at.shape[-1], device=at.device)[:, None]
    is_seen = (places[:, :, None] <= queries) & (is_one[:, :, None] > 0)
    weights = (scores - given["lse"][..., None]).exp().masked_fill(~is_seen, 0)
    sums = given["received"].gather(-1, places) * is_one
    if not torch.allclose(weights.sum(2), sums, rtol=1e-3, atol=1e-3):
        return None
    return weights.sum(-1), torch.einsum("bhqk,bkhd->bqhd", weights, values)


def _from_first(attn: Any, given: dict[str, Tensor], cache: Any) -> Tensor:
    """Return what position 0 adds to the head outputs [batch, pos, head, d_head], before gates."""
    if not (crossed := crossed_points(attn)):
        first = given["v"][:, 0].repeat_interleave(given["z"].shape[2] // given["v"].shape[2], dim=1)
        return torch.einsum("bhq,bhd->bqhd", given["sink"], first)
    softmaxes = attn.recipe().softmaxes({name: cache[name] for name in attn.recipe().needs})
    values = [cache[name] for name in (str(attn.hook_v.name), *crossed)]
    alone = [torch.cat((v[:, :1], torch.zeros_like(v[:, 1:])), 1) for v in values]
    return joint_attention(softmaxes, alone).double()


SINK_VARIANTS: dict[str | None, str] = {
    "mass": "share", None: "ratio", "spread": "share", "no_op": "share of documents", "broadcast": "share of documents",
}  # fmt: skip
"""Rows of `sink_output` for each head, and their units."""


@intervention(
    unit="ratio", range=">= 0", reading="near 0: the sink writes nothing; large: it writes to every position",
    source="attention to position 0 times its value through W_O, over the head's whole output", version=2,
)  # fmt: skip
@torch.no_grad()
def sink_output(
    model: Any, sample: Any, data: Any, batch: int, *, positions: str = "first"
) -> Iterator[dict[str, Any]]:
    """Contribution of position 0 to each head's output: ||A_i0 v_0 W_O|| / ||z_i W_O||, mean over queries i > 0.

    Gates of the head output apply to both. Joint attention over several layers has one position 0 for each of them.
    `spread`: variance of the head's output over positions, as a share of its mean square; `mass`: mean attention of those
    queries to position 0. A broadcasting sink has a large ratio and little spread, a no-op a small ratio. `no_op` and
    `broadcast`: share of documents in which the head is a sink of that kind. Thresholds of this project: mass above 0.3;
    ratio at most 0.2 (`no_op`); ratio at least 0.5 and spread at most 0.5 (`broadcast`). Caution: the ratio passes 1 where
    the rest cancels it. With positions `found`: of the sum over all positions where the head rests (`sink_positions`), in layers
    whose pattern the rotated queries and keys give.
    """
    is_first = positions == "first"
    points = ("sink", "v", "z") if is_first else ("v", "z", "rot_q", "rot_k", "lse", "received", "row_max")
    layers = [
        n for n, block in enumerate(getattr(model, "blocks", []))
        if hasattr(block.attn, "W_O") and (is_first or (
            getattr(block.attn, "joint", None) is None
            and all(f"blocks.{n}.attn.hook_{x}" in model.hook_dict for x in points)
        ))
    ]  # fmt: skip
    results = ByDocument()
    for ids in batches_of(model, sample, batch):
        names = [f"blocks.{n}.attn.hook_{x}" for n in layers for x in points]
        for n in layers:
            attn = model.blocks[n].attn
            names += [f"blocks.{n}.ln1.hook_normalized"] if attn.gates else []
            names += [*crossed, *attn.recipe().needs] if (crossed := crossed_points(attn)) else []
        _, cache = model.run_with_cache(ids, names_filter=list(dict.fromkeys(names)))
        for n in layers:
            given = {x: cache[f"blocks.{n}.attn.hook_{x}"].double() for x in points}
            attn, z = model.blocks[n].attn, given["z"]
            found = (
                (given["sink"], _from_first(attn, given, cache))
                if is_first
                else _from_found(given, model.attention_window(n))
            )
            if found is None:
                continue
            sink, part = found[0], gate_of(model, lambda name: cache[name].double(), n)(found[1])  # noqa: B023
            written, out = (torch.einsum("bphd,hdm->bhpm", x, attn.W_O.double()) for x in (part, z))
            ratio = (written.norm(dim=-1)[..., 1:] / out.norm(dim=-1)[..., 1:].clamp_min(1e-300)).mean(-1)
            later = out[:, :, 1:]
            spread = later.var(2, unbiased=False).sum(-1) / later.square().sum(-1).mean(-1).clamp_min(1e-300)
            mass = sink[..., 1:].mean(-1)
            for head in range(z.shape[2]):
                numbers = [x[:, head].cpu() for x in (mass, ratio, spread)]
                kinds = [sink_kind(*one) for one in zip(*(x.tolist() for x in numbers), strict=True)]
                no_op, broadcast = (torch.tensor([k == kind for k in kinds]) for kind in ("no-op", "broadcast"))
                for variant, values in zip(SINK_VARIANTS, (*numbers, no_op, broadcast), strict=True):
                    results.add(values, layer=n, head=head, variant=variant, unit=SINK_VARIANTS[variant])
    yield from results.rows()
