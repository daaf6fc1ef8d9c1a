"""Every measure of gradients once more in plain float64: see `truth.py`."""

from __future__ import annotations

import torch
from truth import PARTS, World, at


def part_of(name):
    """(part, layer) of a matrix."""
    words = name.split(".")
    if words[0] == "blocks":
        return PARTS[words[-2].removesuffix("_proj")], int(words[1])
    return {"embed": "W_E", "unembed": "W_U"}.get(words[0], name.removesuffix(".weight")), None


def gradient_norm(world):
    rows = {}
    names = [name for name, p in world.p.items() if p.ndim == 2]
    for row in world.ids[:, None]:
        leaves = {name: world.p[name].clone().requires_grad_() for name in names}
        copy = World(world.kind, world.p | leaves, world.shape, row[:, :2])
        for variant in (None, "relative", "output"):
            scalar = copy.forward(row).max(-1)[0].mean() if variant == "output" else copy.losses(row).mean()
            for name, grad in zip(names, torch.autograd.grad(scalar, list(leaves.values())), strict=True):
                part, layer = part_of(name)
                size = world.p[name].norm() if variant == "relative" else 1.0
                rows.setdefault(at(part=part, layer=layer, variant=variant), []).append(grad.norm() * size)
    return {key: torch.stack(values) for key, values in rows.items()}


def slopes(world, row, wanted):
    """Values and gradients of one document's loss at every named site: that of all that reads what passes there."""
    kept = {}

    def see(name, n, x):
        if name not in wanted:
            return x
        x = kept[name, n] = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
        return x

    loss = world.losses(row, see).sum()
    return kept, dict(zip(kept, torch.autograd.grad(loss, list(kept.values()), allow_unused=True), strict=True))


def activation_gradient_norm(world):
    rows = {}
    for row in world.ids[:, None]:
        x, grads = slopes(world, row, ("embed", "stream", "v", "attn_out", "mlp_out"))
        for (site, n), grad in grads.items():
            if (site, n) == ("stream", 0):
                grad = grads["embed", None]  # the stream before anything read it
            if site != "embed":
                rows.setdefault(at(site=site, layer=n), []).append(grad.norm())
                rows.setdefault(at(site=site, layer=n, variant="relative"), []).append(grad.norm() * x[site, n].norm())
    return {key: torch.stack(values).detach() for key, values in rows.items()}


def shortcut_gradient_share(world):
    rows = {}
    for row in world.ids[:, None]:
        _, grads = slopes(world, row, ("embed", "v", "first_v"))
        whole = grads["v", 0]
        shares = {
            n: float((g * whole).sum() / whole.pow(2).sum()) for (name, n), g in grads.items() if name == "first_v"
        }
        for n, value in (shares | {0: 1 - sum(shares.values())}).items():
            rows.setdefault(at(layer=n), []).append(value)
    return {key: torch.tensor(values, dtype=torch.double) for key, values in rows.items()}


def gradient_sink(world):
    """Gradients of all documents summed, then their norms at the first 32 positions."""
    paths = {None: "attn_in", "query": "q_in", "key": "k_in", "value": "v_in"}
    total = {}
    for row in world.ids[:, None]:
        _, grads = slopes(world, row, ("embed", *paths.values()))
        for at_, grad in grads.items():
            total[at_] = total.get(at_, 0) + grad[0, :32]
    power, rows = [sum(1 / i**2 for i in range(t + 1, world.ids.shape[1] + 1)) ** 0.5 for t in range(32)], {}
    for n in range(world.L):
        rest = sum(total["attn_in", n][t].norm() for t in range(1, 32)) / 31
        rows[at(layer=n, control="uniform_causal")] = 31 * power[0] / sum(power[1:])
        rows |= {
            at(layer=n, variant=variant): float(total[name, n][0].norm() / rest)
            for variant, name in paths.items()
            if (name, n) in total
        }
    return rows


def gradient_flow(world):
    ways = {("attention", ""): ("stream", "mid"), ("attention", "compress"): ("ln1_in", "attn_in"),
            ("mlp", ""): ("mid", "block"), ("mlp", "compress"): ("ln2_in", "mlp_in")}  # fmt: skip
    rows = {}
    for row in world.ids[:, None]:
        _, grads = slopes(world, row, ("embed", *{name for pair in ways.values() for name in pair}))
        for (part, kind), (above, below) in ways.items():
            for n in range(world.L):
                for where, chosen in (("", slice(1, None)), ("first_position", slice(0, 1))):
                    a, b = (grads[name, n][0, chosen].pow(2).sum().sqrt() for name in (above, below))
                    variant = "_".join(x for x in (kind, where) if x) or None
                    rows.setdefault(at(part=part, layer=n, variant=variant), []).append(a / b)
    return {key: torch.stack(values) for key, values in rows.items()}


GRADIENTS = {
    f.__name__: f
    for f in (gradient_norm, activation_gradient_norm, shortcut_gradient_share, gradient_sink, gradient_flow)
}
