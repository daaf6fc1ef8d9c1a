"""How alike layers are: directions of their vectors, and the geometry of all tokens together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from workbench.interventions.base import batches_of, intervention, over_documents
from workbench.names import ACTIVATIONS, stream_hook

CKA_SITES = ("stream", "own_v", "v")


def _places(model: Any, site: str) -> dict[int, str]:
    n_layers = model.config.n_layers
    if site == "stream":
        return {n: stream_hook(n, n_layers) for n in range(n_layers + 1)}
    names = {n: ACTIVATIONS[site].hook.format(layer=n) for n in range(n_layers)}
    return {n: name for n, name in names.items() if name in model.hook_dict}


@intervention(
    unit="cosine", range="-1..1; linear CKA 0..1", reading="higher: the two layers are more alike",
    source="linear CKA: Kornblith et al. 2019; cosine of the same token's vectors: Zhou et al. 2024",
)  # fmt: skip
@torch.no_grad()
def layer_similarity(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Likeness of each pair of layers: cosine of a token's vectors, mean over tokens; `cka`: linear CKA of all tokens.

    CKA = ||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F) on features centred over tokens, from d x d cross moments that are
    streamed, so memory does not grow with the documents. Column `source` is the other layer. Caution: few tokens inflate
    CKA (take many more than d); values of two layers live in bases of their own, which only CKA does not mind.
    """
    for site in CKA_SITES:
        places = _places(model, site)
        if len(places) < 2:
            continue
        cosines: dict[tuple[int, int], list[Tensor]] = {}
        moments: dict[tuple[int, int], Tensor] = {}
        sums: dict[int, Tensor] = {}
        count = 0
        for ids in batches_of(model, sample, batch):
            _, cache = model.run_with_cache(ids, names_filter=list(places.values()))
            found = {n: cache[name].flatten(2).double() for n, name in places.items()}
            count += ids.numel()
            for n, x in found.items():
                sums[n] = sums.get(n, 0) + x.sum((0, 1))
                for m in (m for m in found if m <= n):
                    y = found[m]
                    cosines.setdefault((n, m), []).append(torch.cosine_similarity(x, y, dim=-1).mean(1).cpu())
                    moments[n, m] = moments.get((n, m), 0) + x.flatten(0, 1).T @ y.flatten(0, 1)
        centred = {(n, m): c - torch.outer(sums[n], sums[m]) / count for (n, m), c in moments.items()}
        for (n, m), parts in cosines.items():
            size = centred[n, n].norm() * centred[m, m].norm()
            yield over_documents(torch.cat(parts), site=site, layer=n, source=m, unit="cosine")
            alike = float(centred[n, m].square().sum() / size)
            yield {
                "site": site,
                "layer": n,
                "source": m,
                "variant": "cka",
                "value": alike,
                "n": len(sample.ids),
                "unit": "share",
            }
