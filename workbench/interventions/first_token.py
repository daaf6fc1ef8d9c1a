"""Effects of the first position, separated from effects of its token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from workbench.interventions.base import ByDocument, batches_of, hook_points, intervention, mean_row, sinks_by_layer
from workbench.metrics.found_sinks import column_excess

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
            for is_sink, received in sinks_by_layer(model, ids).values():
                total += torch.where(is_sink, column_excess(received)[0], 0).sum(1)
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
