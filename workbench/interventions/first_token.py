"""What is special about the first position, and what only about the token that stands there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from workbench.interventions.base import batches_of, hook_points, intervention, mean_row

SITES = ("v", "own_v", "stream")


@intervention(
    unit="ratio", range="> 0, 1 = none", reading="of values lower: drained; of streams higher: towering", min_length=4,
    source="value drain and hidden peak: Guo et al. 2024, arXiv 2410.13835; Zhou et al. 2024; the matched baselines ours",
)  # fmt: skip
@torch.no_grad()
def first_token_norm(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Drain of the first position's value and peak of its stream, beside the same token elsewhere and another token there.

    Norm of one position's vector over those of all others: over their median for values (`value_drain`), over their mean for
    streams (`hidden_peak`). The controls read the document with the tokens of positions 0 and T // 2 exchanged:
    `same_token` is the ratio of position T // 2, where the first token stands now, `other_token` that of position 0.
    A drain or peak that `other_token` shows and `same_token` does not belongs to the position; the other way round to the token
    (a trained start token alone gives ratios of .6 and 1.3). Caution: where both show it, neither is excluded.
    """
    points = {name: (site, n) for site in SITES for n, name in hook_points(model, site).items()}
    results: dict[tuple[str, int, str | None], list[Tensor]] = {}
    for ids in batches_of(model, sample, batch):
        middle = ids.shape[1] // 2
        swapped = ids.clone()
        swapped[:, [0, middle]] = ids[:, [middle, 0]]
        for text, read in ((ids, {None: 0}), (swapped, {"same_token": middle, "other_token": 0})):
            _, cache = model.run_with_cache(text, names_filter=list(points))
            for name, (site, layer) in points.items():
                norms = cache[name].double().flatten(2).norm(dim=-1)
                for control, place in read.items():
                    results.setdefault((site, layer, control), []).append(_ratio(norms, place, site).cpu())
    for (site, layer, control), parts in results.items():
        yield mean_row(torch.cat(parts), site=site, layer=layer, control=control, unit="ratio")


def _ratio(norms: Tensor, place: int, site: str) -> Tensor:
    """Norm at a position over the others' [batch]: their mean for streams, their median for values."""
    others = torch.cat((norms[:, :place], norms[:, place + 1 :]), 1)
    return norms[:, place] / (others.mean(1) if site == "stream" else others.quantile(0.5, dim=1))
