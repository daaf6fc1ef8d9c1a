"""Running a model differently: replace a tensor by its mean per token, by its mean, or by zero, and read the loss.

`replaced(model, site, layers, table)` is the context manager; `value_ablation` is the experiment built on it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.errors import UnknownName, WorkbenchError
from workbench.files import digest
from workbench.models.hooked import HookedModel
from workbench.names import ACTIVATIONS

SITES = ("own_v", "v", "q", "k")


@dataclass(frozen=True)
class Intervention:
    """A registered experiment: `function(model, sample, data, batch)` yields record rows."""

    function: Callable[..., Iterator[dict[str, Any]]]
    unit: str
    range: str
    reading: str
    source: str
    min_length: int = 2

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (inspect.getdoc(self.function) or "").split("\n", 1)[0]

    def version(self) -> str:
        """Changes with the code."""
        return digest(*(inspect.getsource(f) for f in (self.function, token_means, replaced)))


INTERVENTIONS: dict[str, Intervention] = {}


def _hooks(model: HookedModel, site: str, layers: Sequence[int]) -> dict[int, str]:
    if site not in SITES:
        raise UnknownName("site", site, SITES)
    names = {layer: ACTIVATIONS[site].hook.format(layer=layer) for layer in layers}
    return {layer: name for layer, name in names.items() if name in model.hook_dict}


@dataclass(frozen=True)
class TokenMeans:
    """Mean of a site per token id and layer: `sums` [layer][d_vocab, ...], `counts` [d_vocab]; unseen ids get the global mean."""

    site: str
    counts: Tensor
    sums: dict[int, Tensor]

    def table(self, layer: int) -> Tensor:
        """[d_vocab, kv_head, d_head]."""
        sums = self.sums[layer]
        counts = self.counts.view(-1, *[1] * (sums.ndim - 1))
        overall = sums.sum(0) / self.counts.sum()
        return torch.where(counts > 0, sums / counts.clamp_min(1), overall)


@torch.no_grad()
def token_means(model: HookedModel, site: str, batches: Sequence[Tensor]) -> TokenMeans:
    """Means per token id over training batches [batch, pos], at every layer that has the site."""
    hooks = _hooks(model, site, range(model.config.n_layers))
    counts = torch.zeros(model.config.d_vocab, dtype=torch.double)
    sums: dict[int, Tensor] = {}
    for tokens in batches:
        ids = tokens.flatten()
        counts += ids.bincount(minlength=len(counts)).double().cpu()

        def add(tensor: Tensor, hook: Any, ids: Tensor = ids) -> None:
            layer, flat = int(hook.layer()), tensor.flatten(0, 1).double().cpu()
            total = sums.setdefault(layer, flat.new_zeros(len(counts), *flat.shape[1:]))
            total.index_add_(0, ids.cpu(), flat)

        with model.hooks([(name, add) for name in hooks.values()]):
            model(tokens, return_type=None)
    return TokenMeans(site, counts, sums)


@contextmanager
def replaced(
    model: HookedModel, tokens: Tensor, site: str, layers: Sequence[int], how: str, means: TokenMeans | None = None
) -> Iterator[HookedModel]:
    """While open, the site's vectors at `layers` are replaced for runs on `tokens` [batch, pos].

    `how`: `token_mean` (the mean of each position's token id), `mean` (the mean over all tokens) or `zero`. The first two
    need `means`. Raises `UnknownName` for another way or site, `WorkbenchError` where no chosen layer has the site.
    """
    if how not in ("token_mean", "mean", "zero"):
        raise UnknownName("replacement", how, ["token_mean", "mean", "zero"])
    hooks = _hooks(model, site, layers)
    if not hooks:
        raise WorkbenchError(f"{model.architecture} has no {site} at layers {list(layers)}")

    def swap(tensor: Tensor, hook: Any) -> Tensor:
        if how == "zero":
            return torch.zeros_like(tensor)
        assert means is not None
        table = means.table(int(hook.layer())).to(tensor)
        if how == "token_mean":
            return table[tokens]
        frequency = (means.counts / means.counts.sum()).to(tensor)
        return torch.tensordot(frequency, table, dims=1).expand_as(tensor)

    with model.hooks([(name, swap) for name in hooks.values()]):
        yield model


@torch.no_grad()
def _losses(
    model: HookedModel, batches: Sequence[Tensor], how: str | None, means: TokenMeans, layers: Sequence[int]
) -> Tensor:
    """Loss of each document in nats."""
    found = []
    for tokens in batches:
        if how is None:
            found.append(model(tokens, return_type="loss", loss_per_token=True).mean(1))
            continue
        with replaced(model, tokens, means.site, layers, how, means):
            found.append(model(tokens, return_type="loss", loss_per_token=True).mean(1))
    return torch.cat(found).double()


def value_ablation(
    model: HookedModel, sample: Any, data: Any, batch: int, *, sites: Sequence[str] = ("own_v",)
) -> Iterator[dict[str, Any]]:
    """Change of the validation loss when values are replaced by their per-token mean, their mean, or zero.

    Per layer, and for all layers after the first together (no layer). The table of means comes from training documents.
    `kept` = 1 - change(token mean) / change(zero): the share of what the values do that the token alone supplies. The first
    layer's own values change by exactly 0 under the token mean, since they are a function of the token: a built-in check.
    Caution: zero also changes the scale of attention's output; read it beside the mean. Unit: nats.
    """
    if data is None:
        raise WorkbenchError("value_ablation needs the run's training data for its table of means: give a run")
    device, T, n_layers = model.embed.weight.device, sample.ids.shape[1], model.config.n_layers
    batches = [ids.to(device) for ids in sample.ids.split(batch)]
    training = [data.batch(step, batch, T, 0).to(device) for step in range(max(1, 65536 // (batch * T)))]
    for site in sites:
        means = token_means(model, site, training)
        plain = _losses(model, batches, None, means, [])
        groups = [([layer], {"layer": layer}) for layer in sorted(means.sums)]
        if deep := [layer for layer in range(1, n_layers) if layer in means.sums]:
            groups.append((deep, {}))
        for layers, axes in groups:
            changes = {
                how: _losses(model, batches, how, means, layers) - plain for how in ("token_mean", "mean", "zero")
            }
            for how, change in changes.items():
                se = float(change.std() / math.sqrt(len(change))) if len(change) > 1 else math.nan
                yield {
                    "site": site,
                    **axes,
                    "variant": how,
                    "value": float(change.mean()),
                    "se": se,
                    "n": len(change),
                    "unit": "nats",
                }
            zero, token = float(changes["zero"].mean()), float(changes["token_mean"].mean())
            kept = 1 - token / zero if zero > 0 else math.nan
            yield {"site": site, **axes, "variant": "kept", "value": kept, "n": len(plain), "unit": "share"}


INTERVENTIONS["value_ablation"] = Intervention(
    value_ablation, "nats", "any", "lower: less context is needed", "after Bank of Values, arXiv 2606.02780"
)
