"""Every experiment, and every measure of the cache, once more in plain float64: see `truth.py`."""

from __future__ import annotations

import math

import torch
from truth import MIX, PULL, World, at

# ---- the cache -----------------------------------------------------------------------------------


def held(world):
    """Bytes of keys and values for each token, 16 bits each: SVFormer holds one layer's values."""
    values = 1 if world.kind == "svformer" else world.L
    return 2.0 * (world.L + values) * world.G * world.dh


def cache_bytes(world):
    return {at(part="all"): held(world), at(part="all", control="formula"): held(world)}


def cache_traffic(world):
    read = 2.0 * 2 * world.L * world.G * world.dh
    return {at(part="all"): read, at(part="all", control="capacity"): held(world)}


# ---- experiments -----------------------------------------------------------------------------------------------------


def every(world, name):
    return sorted(n for known, n in world.seen if known == name)


def instead(name, layers, change):
    """Shows a forward pass another tensor at a site of some layers."""
    return lambda seen, n, x: change(n, x) if seen == name and n in layers else x


def skip_ablation(world):
    rows, layers, ids = {}, every(world, "first_v"), world.ids
    if not layers:
        return {}
    plain, T = world.losses(ids), ids.shape[1]
    order = torch.randperm(T, generator=torch.Generator().manual_seed(T))
    first = world.seen["v", 0]
    means = {n: first.mean((0, 1)).expand_as(first) for n in layers}
    ways = {
        "zero": lambda n, x: torch.zeros_like(x), "mean": lambda n, x: means[n],
        "shuffled": lambda n, x: x[:, order], "other": lambda n, x: first.roll(1, 0),
    }  # fmt: skip
    for chosen in ([n] for n in layers), [layers]:
        for group in chosen:
            for how, change in ways.items():
                layer = group[0] if len(group) == 1 else None
                name = (
                    "pull" if how == "zero" and world.kind == "neutreno" else "first_v"
                )  # its coefficient is of V_1 - V_n
                rows[at(layer=layer, variant=how)] = world.losses(ids, instead(name, group, change)) - plain
    return rows


def sublayer_removal(world):
    plain = world.losses(world.ids)
    return {
        at(layer=n, part=part): world.losses(world.ids, instead(name, [n], lambda n, x: x * 0)) - plain
        for n in range(world.L)
        for part, name in (("attention", "attn_out"), ("mlp", "mlp_out"))
    }


def cross_layer_approximation(world):
    rows, T = {}, world.ids.shape[1]
    wide = lambda x: x.repeat_interleave(world.H // world.G, 2)  # noqa: E731
    future = torch.ones(T, T).triu(1).bool()
    for n in range(1, world.L):
        q, A = world.seen["rot_q", n], world.seen["pattern", n]
        both = [
            torch.einsum("bqhd,bkhd->bhqk", q, wide(world.seen["rot_k", m]))
            .div(math.sqrt(world.dh))
            .masked_fill(future, -math.inf)
            for m in (n, n - 1)
        ]
        v, before = (wide(world.seen["v", m]) for m in (n, n - 1))
        exact = torch.einsum("bhqk,bkhd->bqhd", torch.cat(both, -1).softmax(-1), torch.cat((v, before), 1))
        own, mean = (torch.einsum("bhqk,bkhd->bqhd", A, x) for x in (v, (v + before) / 2))
        earlier = sum(wide(world.seen["v", m]) for m in range(n)) / n
        for axes, guess in (
            ({"variant": "same_key"}, mean), ({"variant": "identity"}, own + before),
            ({"variant": "identity_all"}, own + earlier), ({"control": "own"}, own),
        ):  # fmt: skip
            a, b = exact.flatten(2), guess.flatten(2)
            rows[at(layer=n, **axes)] = ((a * b).sum(-1) / a.norm(dim=-1) / b.norm(dim=-1)).mean(1)
    return rows


def massive_emergence(world):
    x = torch.stack([v for (name, n), v in sorted(world.vectors("stream").items()) if name == "stream"])
    rows = {}
    for name, sizes in ((None, (x**2).sum(-1).sqrt()), ("dimension", x.abs().max(-1)[0])):
        first, others = (sizes[:, :, 0].log().diff(dim=0), sizes[:, :, 1:].mean(-1).log().diff(dim=0))
        for n in range(world.L):
            rows[at(layer=n, variant=name)], rows[at(layer=n, variant=name, control="others")] = first[n], others[n]
        largest = [max(range(world.L), key=lambda n, d=d: float(first[n, d])) for d in range(len(world.ids))]
        rows[at(variant="layer" if name is None else "dimension_layer")] = torch.tensor(largest)
    for n in range(world.L):
        a, b = x[n, :, 0], x[n + 1, :, 0]
        rows[at(layer=n, variant="invariance")] = (a * b).sum(-1) / a.norm(dim=-1) / b.norm(dim=-1)
    return rows


def logit_lens(world):
    rows, targets = {}, world.ids[:, 1:, None]
    final = world.logits.log_softmax(-1)[:, :-1]
    for (name, n), x in world.seen.items():
        if name == "stream":
            log_p = (world.norm(x, "ln_final") @ world.p["unembed.weight"].T).log_softmax(-1)[:, :-1]
            mine = log_p.gather(-1, targets)
            rows[at(layer=n)] = -mine[..., 0].mean(1)
            rows[at(layer=n, variant="kl")] = (final.exp() * (final - log_p)).sum(-1).mean(1)
            rows[at(layer=n, variant="rank")] = (log_p > mine).double().sum(-1).mean(1)
    return rows


def value_parts(world, n):
    """Head outputs by where their values come from."""
    wide = lambda x: x.repeat_interleave(world.H // world.G, 2)  # noqa: E731
    through = lambda v: torch.einsum("bhqk,bkhd->bqhd", world.seen["pattern", n], wide(v))  # noqa: E731
    first, own = world.seen["v", 0], world.seen.get(("own_v", n))
    if n == 0 or world.kind not in (*MIX, "neutreno"):
        return {"own": through(own)}
    if world.kind == "neutreno":
        return {"own": through(own) - PULL * wide(own), "first": PULL * wide(first)}
    a, b = MIX[world.kind]
    return {"first": a * through(first)} | ({"own": b * through(own)} if b else {})


def logit_attribution(world):
    """The stream is linear in what each part adds once patterns, MLPs and the last scale are frozen."""
    x = world.seen["stream", world.L]
    scale = (x.pow(2).mean(-1, keepdim=True) + world.eps).sqrt()
    head = world.p["unembed.weight"]
    direction = (head[world.ids[:, 1:]] - head.mean(0)) * world.p["ln_final.weight"]

    def arrives(part):
        """What of the stream's last state comes from {layer or None: addition}."""
        y = part.get(None, torch.zeros_like(x))
        outputs = [y]
        for n in range(world.L):
            y = y + part.get(n, 0)
            outputs.append(y)
            if world.kind == "denseformer":
                y = sum(a * o for a, o in zip(world.alphas(n), outputs, strict=True))
        return ((y / scale)[:, :-1] * direction).sum(-1).mean(1)

    rows = {at(part="embed"): arrives({None: world.seen["embed", None]})}
    for n in range(world.L):
        rows[at(part="mlp", layer=n)] = arrives({n: world.seen["mlp_out", n]})
        for name, z in value_parts(world, n).items():
            out = torch.einsum("bqhd,hdm->bqm", z, world.output_matrix(n))
            rows[at(part=f"attn.{name}", layer=n)] = arrives({n: out})
    return rows


def nearest_embedding(world):
    rows, vocabulary = {}, len(world.p["embed.weight"])
    E = world.p["embed.weight"]
    tables = {"stream": E, "values": world.norm(E, "blocks.0.ln1") @ world.p["blocks.0.attn.v_proj.weight"].T}
    chance = sum(1 / r for r in range(1, vocabulary + 1)) / vocabulary
    for site in ("stream", "own_v", "v"):
        table = tables.get(site, tables["values"])
        for (name, n), x in world.vectors(site).items():
            if name == "final":
                continue
            cosine = x @ (table / table.norm(dim=-1, keepdim=True)).T
            ahead = (cosine > cosine.gather(-1, world.ids[..., None])).sum(-1)
            rows[at(site=site, layer=n)] = (1 / (1 + ahead.double())).mean(1)
            rows[at(site=site, layer=n, variant="top_1")] = (ahead == 0).double().mean(1)
            rows[at(site=site, layer=n, control="chance")] = chance
    return rows


def sink_output(world):
    rows = {}
    for n in range(world.L):
        A, v = world.seen["pattern", n], world.seen["v", n].repeat_interleave(world.H // world.G, 2)
        for h, matrix in enumerate(world.output_matrix(n)):
            out, sink = (world.seen["z", n][:, 1:, h] @ matrix), A[:, h, 1:, :1]
            ratio = ((sink * (v[:, :1, h] @ matrix)).norm(dim=-1) / out.norm(dim=-1)).mean(1)
            spread = ((out - out.mean(1, keepdim=True)) ** 2).sum((1, 2)) / (out**2).sum((1, 2))
            mass = sink[..., 0].mean(1)
            no_op = (mass > 0.3) & (ratio <= 0.2)
            broadcast = (mass > 0.3) & (ratio > 0.2) & (ratio >= 0.5) & (spread <= 0.5)
            found = {
                None: ratio,
                "mass": mass,
                "spread": spread,
                "no_op": no_op.double(),
                "broadcast": broadcast.double(),
            }
            rows |= {at(layer=n, head=h, variant=name): value for name, value in found.items()}
    return rows


def layer_similarity(world):
    rows = {}
    for site in ("stream", "own_v", "v"):
        layers = {n: x for (name, n), x in world.vectors(site).items() if name == site}
        for n, x in layers.items() if len(layers) > 1 else ():
            for m, y in layers.items():
                if m <= n:
                    a, b = (t.flatten(0, 1) - t.flatten(0, 1).mean(0) for t in (x, y))
                    norms = torch.linalg.matrix_norm(a.T @ a) * torch.linalg.matrix_norm(b.T @ b)
                    cosine = (x * y).sum(-1) / x.norm(dim=-1) / y.norm(dim=-1)
                    rows[at(site=site, layer=n, source=m)] = cosine.mean(1)
                    rows[at(site=site, layer=n, source=m, variant="cka")] = float(
                        torch.linalg.matrix_norm(a.T @ b) ** 2 / norms
                    )
    return rows


def value_ablation(world):
    """Means over the training ids; ids that are not among them keep their own values."""
    rows, ids = {}, world.ids
    taught = World(world.kind, world.p, world.shape, world.training)
    plain, layers = world.losses(ids), every(world, "own_v")
    flat = world.training.flatten()
    seen = torch.isin(ids, flat)[..., None, None]
    groups = [([n], n) for n in layers] + ([([n for n in layers if n > 0], None)] if max(layers) else [])
    for group, layer in groups:
        change = {}
        for how in ("token_mean", "mean", "zero"):

            def swap(n, x, how=how):
                v = taught.seen["own_v", n].flatten(0, 1)
                table = {int(t): v[flat == t].mean(0) for t in ids.unique() if (flat == t).any()}
                means = torch.stack([table.get(int(t), v[0]) for t in ids.flatten()]).view_as(x)
                new = {"token_mean": means, "mean": v.mean(0).expand_as(x), "zero": torch.zeros_like(x)}[how]
                return torch.where(seen, new, x)

            change[how] = world.losses(ids, instead("own_v", group, swap)) - plain
            rows[at(site="own_v", layer=layer, variant=how)] = change[how]
        zero, token = float(change["zero"].mean()), float(change["token_mean"].mean())
        clear = zero > 2 * float(change["zero"].std()) / math.sqrt(len(change["zero"]))
        rows[at(site="own_v", layer=layer, variant="kept")] = 1 - token / zero if clear else math.nan
    return rows


def deep_value_ablation(world):
    rows = {key: value for key, value in value_ablation(world).items() if "layer" not in dict(key)}
    rows.pop(at(site="own_v", variant="mean"), None)
    return rows | {at(site="own_v", variant="seen"): torch.isin(world.ids, world.training).double().mean(1)}


def coefficient_share(world):
    rows = {}

    def add(site, layer, parts):
        sizes = {name: abs(w) * x.flatten(1).norm(dim=-1) for name, (w, x) in parts.items()}
        for name, size in sizes.items():
            rows[at(site=site, layer=layer, part=name)] = size / sum(sizes.values())

    def tell(site, layer, parts):
        for name, w in parts.items():
            rows[at(site=site, layer=layer, part=name, variant="coefficient")] = float(w)

    first = world.seen["v", 0]
    for n in range(world.L):
        if world.kind != "resformer" or n == 0:
            rows[at(site="v", layer=n, part="first" if world.kind == "svformer" and n else "own")] = 1.0
        else:
            add("v", n, {"first": (0.5, first), "own": (0.5, world.seen["own_v", n])})
            tell("v", n, {"first": 0.5, "own": 0.5})
        if world.kind == "neutreno" and n:
            pull = (first - world.seen["v", n]).repeat_interleave(world.H // world.G, 2)
            add("z", n, {"own": (1, world.seen["z", n] - PULL * pull), "first": (PULL, pull)})
            tell("z", n, {"first": PULL})
        if world.kind == "denseformer":
            names = ["embed", *(f"block.{j}" for j in range(n)), "own"]
            outputs = [world.seen["embed", None], *(world.seen["block", j] for j in range(n + 1))]
            add("stream", n + 1, dict(zip(names, zip(world.alphas(n), outputs, strict=True), strict=True)))
            tell("stream", n + 1, dict(zip(names, world.alphas(n), strict=True)))
    return rows


def first_token_norm(world):
    rows, T = {}, world.ids.shape[1]
    swapped = world.ids.clone()
    swapped[:, 0], swapped[:, T // 2] = world.ids[:, T // 2], world.ids[:, 0]
    other = World(world.kind, world.p, world.shape, swapped)
    for site in ("v", "own_v", "stream"):
        for control, seen, place in ((None, world, 0), ("same_token", other, T // 2), ("other_token", other, 0)):
            for (name, n), x in seen.vectors(site).items():
                if name == site:
                    norms = x.norm(dim=-1)
                    rest = norms[:, [t for t in range(T) if t != place]]
                    of = rest.mean(1) if site == "stream" else rest.quantile(0.5, dim=1)
                    rows[at(site=site, layer=n, control=control)] = norms[:, place] / of
    return rows


def reader_ablation(world):
    """Only the projection sees the stream without one part; DenseFormer's averages weigh every part by what arrives."""
    rows, plain = {}, world.losses(world.ids)
    outs = {None: world.seen["embed", None]} | {
        n: world.seen["attn_out", n] + world.seen["mlp_out", n] for n in range(world.L)
    }
    for n in range(1, world.L):
        for part, source in (("embed", None), ("latest", n - 1)):
            said = arriving(world, n, source) * outs[source]
            without = world.norm(world.seen["stream", n] - said + said.mean(1, keepdim=True), f"blocks.{n}.ln1")
            for site in ("q", "k", "v"):
                if f"blocks.{n}.attn.{site}_proj.weight" in world.p:
                    see = instead(f"{site}_in", [n], lambda _, x, w=without: w)
                    rows[at(site=site, layer=n, part=part)] = world.losses(world.ids, see) - plain
    return rows


def arriving(world, layer, source):
    """Weight of the embedding (None) or of a block's additions in the stream that a layer reads."""
    y = 1.0 if source is None else 0.0
    outputs = [y]
    for n in range(layer):
        y += n == source
        outputs.append(y)
        if world.kind == "denseformer":
            y = float(sum(a * o for a, o in zip(world.alphas(n), outputs, strict=True)))
    return y


EXPERIMENTS = {
    f.__name__: f
    for f in (
        cache_bytes, cache_traffic, skip_ablation, sublayer_removal, cross_layer_approximation,
        logit_lens, logit_attribution, nearest_embedding, sink_output,
        layer_similarity, value_ablation, deep_value_ablation, coefficient_share, first_token_norm, massive_emergence,
        reader_ablation,
    )
}  # fmt: skip
