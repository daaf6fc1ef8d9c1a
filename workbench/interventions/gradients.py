"""Gradients of activations: how strongly the loss pulls on them, where they gather, which layers shape the first values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from workbench.hook_names import before_branching
from workbench.interventions.ablation import branches
from workbench.interventions.registered_experiments import (
    ByDocument,
    batches_of,
    hook_points,
    intervention,
    sinks_by_layer,
)
from workbench.models.hooked import next_token_loss

SITES = ("stream", "v", "attn_out", "mlp_out")
GATHERED = 32  # positions among which a gradient sink is sought, as published
GROUPS = 8  # of documents, behind the error of what is summed over them
PATHS = {None: "", "query": "q_proj.", "key": "k_proj.", "value": "v_proj."}
"""What flows back through a layer's attention, and by which projection."""


def _each(logits: Tensor, ids: Tensor) -> Tensor:
    """Sum over documents of their mean losses, so that gradients do not depend on the batch."""
    return next_token_loss(logits, ids, per_token=True).mean(1).sum()


@intervention(
    unit="loss per activation unit", range=">= 0", reading="higher: the loss pulls harder here",
    source="Frobenius norm of the gradient of a document's mean loss", version=2,
)  # fmt: skip
def activation_gradient_norm(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Norm of the loss's gradient at the streams, the effective values and what attention and MLP add, per layer.

    ||dloss/dh||_F over the positions of a document, of all that reads the activation: a stream that later averages read too
    counts them beside its block. `relative`: times the activation's own norm, so that scale drops out.
    Caution: a larger activation has a smaller gradient at equal importance; compare with the relative form.
    """
    named = [(site, n, name) for site in SITES for n, name in hook_points(model, site).items()]
    points = {before_branching(model, n, name): (site, n) for site, n, name in named}
    norms = ByDocument()
    for ids in batches_of(model, sample, batch):
        _, values, grads = model.run_with_grads(ids, list(points), _each)
        for name, (site, layer) in points.items():
            norm, size = (x[name].double().flatten(1).norm(dim=-1).cpu() for x in (grads, values))
            norms.add(norm, site=site, layer=layer, variant=None, unit="loss per activation unit")
            norms.add(norm * size, site=site, layer=layer, variant="relative", unit="loss per relative change")
    yield from norms.rows()


@intervention(
    unit="share", range="any, sums to 1 over layers", reading="higher: this layer shapes the first layer's values more",
    source="chain rule over the branches of the first layer's values", version=2,
)  # fmt: skip
def shortcut_gradient_share(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Share per layer in the gradient that reaches the first layer's values.

    With g = dloss/dV_1 and g_n the part that comes through layer n's branches (coefficients included; layer 0: its own attention):
    <g_n, g> / ||g||^2. A layer that mixes V_1 into its values and also attends to it has two branches, which add up. The shares sum
    to 1 exactly and may be negative. A model whose later layers do not read V_1 has a share of 1 in layer 0. Caution: a larger
    gradient of W_V in layer 0 of such models is close to a tautology, since every shortcut adds a term.
    """
    origin = "blocks.0.attn.hook_v"
    points = {}
    for n, names in branches(model).items():
        for name in names:  # at `cross`, the name does not say of which layer
            crosses = name.endswith(".attn.cross.hook_v") and 0 in model.blocks[n].attn.attended["v"]
            if crosses or name.endswith((".source.0.hook_v", ".cross.0.hook_v")):
                points[name] = n
    if origin not in model.hook_dict:
        return
    results = ByDocument()
    for ids in batches_of(model, sample, batch):
        _, _, grads = model.run_with_grads(ids, [origin, *points], _each)
        total = grads[origin].double().flatten(1)
        size = total.square().sum(-1)
        shares = dict.fromkeys(points.values(), torch.zeros_like(size))
        for name, n in points.items():
            shares[n] = shares[n] + (grads[name].double().flatten(1) * total).sum(-1) / size
        shares[0] = 1 - sum(shares.values(), torch.zeros_like(size))
        for layer in sorted(shares):
            results.add(shares[layer], layer=layer, unit="share")
    yield from results.rows()


@intervention(
    unit="ratio", range=">= 0", reading="higher: the gradient gathers at the first position",
    source="Chen et al. 2026, Attention Sinks Induce Gradient Sinks, arXiv 2603.17771 (s = 0, t up to 31)",
)  # fmt: skip
def gradient_sink(
    model: Any, sample: Any, data: Any, batch: int, *, positions: str = "first"
) -> Iterator[dict[str, Any]]:
    """Gradient at the first position's attention input divided by the mean of the next 31 positions, per layer.

    ||g_0|| / mean over 1 <= t <= 31 of ||g_t||, g_t = dloss/dh_t summed over the documents before its norm is taken, h what a
    layer's attention reads (after the norm). `query`, `key`, `value`: the part of g_0 through this projection, divided by
    the same mean. Parts (and the parts of gates) add up as vectors. The query's part is 0, because the first position sees only
    itself.
    The control is the ratio of sqrt(sum over i >= t of 1 / i^2): the value path under uniform causal attention with
    independent gradients of head outputs. Uniform attention gathers gradients too. Caution: a sum over documents, so compare equal numbers
    of them, and step 0. With positions `found`, the most frequent sink position of the layer among
    the first 32 (`sink_positions`) replaces position 0. Layers without one have no number. Unit: ratio.
    """
    if getattr(model, "foreign", None) is not None:  # whose modules are not ours to name
        return
    pairs = [(n, path) for n in range(model.config.n_layers) for path in PATHS]
    points = {f"blocks.{n}.attn.{PATHS[path]}hook_in": (n, path) for n, path in pairs}
    points = {name: at for name, at in points.items() if name.removesuffix(".hook_in") in model.mod_dict}
    T, groups = min(sample.ids.shape[1], GATHERED), min(GROUPS, len(sample.ids))
    places = dict.fromkeys(range(model.config.n_layers), 0)
    if positions == "found":  # by layer the position below T where its heads rest in most documents
        counts = dict[int, Tensor]()
        for ids in batches_of(model, sample, batch):
            for n, (is_sink, _) in sinks_by_layer(model, ids).items():
                counts[n] = counts.get(n, 0) + is_sink[..., :T].any(1).sum(0).cpu()
        places = {n: int(count.argmax()) for n, count in counts.items() if count.any()}
        points = {name: at for name, at in points.items() if at[0] in places}
    sums = {at: torch.zeros(groups, T, model.config.d_model, dtype=torch.double) for at in points.values()}
    seen = 0
    for ids in batches_of(model, sample, batch):
        _, _, grads = model.run_with_grads(ids, list(points), _each)
        group = torch.arange(seen, seen + len(ids)) % groups
        for name, at in points.items():
            sums[at].index_add_(0, group, grads[name][:, :T].double().cpu())
        seen += len(ids)
    for (layer, path), parts in sums.items():
        place, of_all = places[layer], sums[layer, None]
        value = _gathered(parts.sum(0), of_all.sum(0), place)
        se = math.nan
        if groups > 2:  # jackknife
            left_out = [_gathered(parts.sum(0) - parts[g], of_all.sum(0) - of_all[g], place) for g in range(groups)]
            each = torch.tensor(left_out, dtype=torch.double)
            se = float(((groups - 1) / groups * (each - each.mean()).square().sum()).sqrt())
        yield {"layer": layer, "variant": path, "value": value, "se": se, "n": seen, "unit": "ratio"}
        if path is None:  # where every query attends evenly and gradients of head outputs are independent
            later = torch.arange(sample.ids.shape[1], 0, -1, dtype=torch.double).pow(-2).cumsum(0).flip(0)
            power = later[:GATHERED].sqrt()
            even = float(power[place] / torch.cat((power[:place], power[place + 1 :])).mean())
            yield {"layer": layer, "control": "uniform_causal", "value": even, "unit": "ratio"}


def _gathered(part: Tensor, whole: Tensor, place: int = 0) -> float:
    """||part|| at a position over the mean of ||whole|| at the others, of gradients [pos, width]."""
    others = torch.cat((whole[:place], whole[place + 1 :]))
    return float(part[place].norm() / others.norm(dim=-1).mean())


FLOW = {
    "attention": ("hook_resid_pre", "hook_resid_mid", "ln1", "attn"),
    "mlp": ("hook_resid_mid", "hook_resid_post", "ln2", "mlp"),
}
"""Of each sublayer the stream before and after it, its norm and itself."""


@intervention(
    unit="ratio", range="> 0, 1 = unchanged", reading="higher: the gradient grows on its way back through the sublayer",
    source="Chen et al. 2026, Attention Sinks Induce Gradient Sinks, arXiv 2603.17771",
)  # fmt: skip
def gradient_flow(model: Any, sample: Any, data: Any, batch: int) -> Iterator[dict[str, Any]]:
    """How an attention or an MLP changes the loss's gradient on its way back, and what its norm lets through.

    ||dloss/dx_in|| / ||dloss/dx_out||, x the stream before and after the sublayer (part), norms over a document's positions after
    the first. `compress`: ||dloss/dx_in through the branch|| / ||dloss/dh||, with h the sublayer's input after its norm. The
    norm divides by the size of x, so a large state is shielded (the reciprocal is called bloat). `first_position`,
    `compress_first_position`: of position 0 alone. Caution: `compress` falls as the stream grows with depth; read the first
    position beside the others. Unit: ratio.
    """
    if getattr(model, "foreign", None) is not None:
        return
    # (numerator, denominator) by sublayer, layer and kind; models with a weighted skip connection or several streams have no
    # stream before and after a sublayer
    plan: dict[tuple[str, int, str], tuple[str, str]] = {}
    skips = getattr(getattr(model, "residual", None), "skips", ())
    for n in range(model.config.n_layers):
        for place, (part, (before, after, norm, sublayer)) in enumerate(FLOW.items()):
            plan[part, n, "compress"] = f"blocks.{n}.{norm}.hook_in", f"blocks.{n}.{sublayer}.hook_in"
            if f"blocks.{n}.hook_streams" in model.hook_dict or (skips and skips[2 * n + place] != "stream"):
                continue
            averaged = f"blocks.{n}.hook_dwa_in"  # a block's own output, where later ones read an average
            out = averaged if after.endswith("post") and averaged in model.hook_dict else f"blocks.{n}.{after}"
            plan[part, n, ""] = f"blocks.{n}.{before}", out
    known = {*model.hook_dict, *(f"{name}.hook_in" for name in model.mod_dict)}
    plan = {at: pair for at, pair in plan.items() if set(pair) <= known}
    ratios = ByDocument()
    for ids in batches_of(model, sample, batch):
        _, _, grads = model.run_with_grads(ids, list({name for pair in plan.values() for name in pair}), _each)
        for (part, layer, kind), (above, below) in plan.items():
            for first, positions in (("", slice(1, None)), ("first_position", slice(0, 1))):
                a, b = (grads[name][:, positions].double().flatten(1).norm(dim=-1).cpu() for name in (above, below))
                variant = "_".join(filter(None, (kind, first))) or None
                ratios.add(a / b, layer=layer, part=part, variant=variant, unit="ratio")
    yield from ratios.rows()
