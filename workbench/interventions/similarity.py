"""How alike layers are: directions of their vectors, and the geometry of all tokens together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.interventions.registered_experiments import batches_of, hook_points, intervention, mean_row
from workbench.metrics.base import wide

CKA_SITES = ("stream", "own_v", "v")


def pairs(layers: Iterable[int]) -> list[tuple[int, int]]:
    """(layer, the same or an earlier one) of all layers."""
    numbers = list(layers)
    return [(n, m) for n in numbers for m in numbers if m <= n]


class CrossMoments:
    """X_n^T X_m of the centred features of every pair of layers, streamed over tokens.

    Products are float32 (float64 for float64 features) after subtracting the first batch's mean, which keeps the final
    centring accurate. Sums are float64.
    """

    def __init__(self) -> None:
        self.count = 0
        self.origins: dict[int, Tensor] = {}
        self.sums: dict[int, Tensor] = {}
        self.products: dict[tuple[int, int], Tensor] = {}

    def add(self, features: Mapping[int, Tensor]) -> None:
        """Add the features [token, d] of all layers."""
        moved = {n: x - self.origins.setdefault(n, x.mean(0)) for n, x in features.items()}
        self.count += len(next(iter(moved.values())))
        for n, x in moved.items():
            self.sums[n] = self.sums.get(n, 0) + x.sum(0, dtype=torch.double)
        for n, m in pairs(moved):
            self.products[n, m] = self.products.get((n, m), 0) + (moved[n].T @ moved[m]).double()

    def cka(self) -> dict[tuple[int, int], float]:
        """Linear CKA of every pair: ||X_n^T X_m||_F^2 / (||X_n^T X_n||_F ||X_m^T X_m||_F)."""
        centred = {
            (n, m): product - torch.outer(self.sums[n], self.sums[m]) / self.count
            for (n, m), product in self.products.items()
        }
        norm = {n: centred[n, n].norm() for n in self.sums}
        return {(n, m): float(x.square().sum() / (norm[n] * norm[m])) for (n, m), x in centred.items()}


@intervention(
    unit="cosine", range="-1..1; linear CKA 0..1", reading="higher: the two layers are more alike",
    source="linear CKA: Kornblith et al. 2019; cosine of the same token's vectors: Zhou et al. 2024", by_document=True,
)  # fmt: skip
@torch.no_grad()
def layer_similarity(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Similarity of layer pairs: cosine of a token's vectors, averaged over tokens; `cka`: linear CKA of all tokens.

    CKA = ||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F) on features centred over tokens. It streams d x d cross moments, so
    memory does not grow with the documents. Column `source` is the other layer. Caution: few tokens inflate
    CKA (take many more than d); values of two layers live in bases of their own, which only CKA does not mind. If a layer
    projects own values for some heads only, the cosine covers the heads that both layers project.
    """
    for site in CKA_SITES:
        points = hook_points(model, site)
        if len(points) < 2:
            continue
        cosines: dict[tuple[int, int], list[Tensor]] = {}
        moments = CrossMoments()
        is_text = torch.ones_like(sample.ids, dtype=torch.bool) if sample.segments is None else sample.segments.is_text
        for ids, text in zip(batches_of(model, sample, batch), is_text.split(batch), strict=True):
            _, cache = model.run_with_cache(ids, names_filter=list(points.values()))
            text = text.to(ids.device)
            vectors = {n: wide(cache[name].flatten(2)) for n, name in points.items()}
            moments.add({n: x[text] for n, x in vectors.items()})
            for n, m in pairs(vectors):
                both = min(vectors[n].shape[-1], vectors[m].shape[-1])
                x, y = (vectors[i][..., :both].double() for i in (n, m))
                alike = torch.cosine_similarity(x, y, dim=-1).where(text, 0).sum(1) / text.sum(1)
                cosines.setdefault((n, m), []).append(alike.cpu())
        alike = moments.cka()
        for (n, m), parts in cosines.items():
            yield mean_row(torch.cat(parts), site=site, layer=n, source=m, unit="cosine")
            where = {"site": site, "layer": n, "source": m, "variant": "cka"}
            yield where | {"value": alike[n, m], "n": len(sample.ids), "unit": "share"}
