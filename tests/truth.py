"""Every metric once more in plain float64: a forward pass of five architectures in loops, and each measure from what it shows.

Nothing of the product is imported. A truth gives {axes: value}, the value one number, or one for each document; `axes` are those of
the record that are not null. Layers are numbered from 0, stream L is what the final norm reads, site `final` what leaves it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from sklearn.decomposition import PCA

MIX = {"resformer": (0.5, 0.5), "svformer": (1.0, 0.0)}  # of the first values and the own
PULL = 0.4  # of NeuTRENO
PARTS = {"q": "W_Q", "k": "W_K", "v": "W_V", "o": "W_O", "gate": "W_gate", "up": "W_up", "down": "W_down"}


def at(**axes):
    """The key of a row."""
    return frozenset((k, v) for k, v in axes.items() if v is not None)


class World:
    """One model's weights by name, its shape, some documents, and what a forward pass over them shows."""

    def __init__(self, kind, weights, shape, ids, training=None):
        self.kind, self.p, self.shape, self.ids, self.training = kind, weights, shape, ids, training
        self.L, self.H, self.G, self.d = shape.n_layers, shape.n_heads, shape.n_key_value_heads, shape.d_model
        self.eps, self.theta, self.dh = shape.rms_norm_eps, shape.rope_theta, shape.d_model // shape.n_heads
        self.seen = {}
        with torch.no_grad():
            self.logits = self.forward(ids, lambda name, n, x: self.seen.setdefault((name, n), x))

    def vectors(self, site):
        """{(site, layer): [document, position, width]} wherever a site is."""
        found = {(site, n): x.flatten(2) for (name, n), x in self.seen.items() if name == site}
        return found | ({("final", self.L): self.seen["final", self.L]} if site == "stream" else {})

    def norm(self, x, name):
        return self.p[name + ".weight"] * x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()

    def turned(self, x):
        """Rotary positions, angles in two halves: [batch, pos, head, d_head]."""
        T, width = x.shape[1], x.shape[-1]
        angle = torch.arange(T)[:, None] * self.theta ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
        cos, sin, (a, b) = angle.cos()[:, None], angle.sin()[:, None], x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def alphas(self, n):
        return self.p[f"dwa.alphas.{n}.weight"][0]

    def forward(self, ids, see=lambda name, n, x: x):
        """Logits; `see(name, layer, x)` is shown every activation and may change it."""
        y = see("embed", None, self.p["embed.weight"][ids])
        outputs, first = [y], None
        for n in range(self.L):
            y = see("stream", n, y)
            x = see("attn_in", n, self.norm(see("ln1_in", n, y), f"blocks.{n}.ln1"))
            out, first = self.attention(n, x, first, see)
            middle = see("mid", n, y + see("attn_out", n, out))
            m, at = see("mlp_in", n, self.norm(see("ln2_in", n, middle), f"blocks.{n}.ln2")), f"blocks.{n}.mlp."
            gate = m @ self.p[at + "gate_proj.weight"].T
            out = (gate / (1 + (-gate).exp()) * (m @ self.p[at + "up_proj.weight"].T)) @ self.p[
                at + "down_proj.weight"
            ].T
            y = see("block", n, middle + see("mlp_out", n, out))
            outputs.append(y)
            if self.kind == "denseformer":
                y = sum(a * x for a, x in zip(self.alphas(n), outputs, strict=True))
        y = see("final", self.L, self.norm(see("stream", self.L, y), "ln_final"))
        return y @ self.p["unembed.weight"].T

    def attention(self, n, x, first, see):
        """What attention adds, and the first layer's values."""
        weight = lambda w: self.p[f"blocks.{n}.attn.{w}_proj.weight"].T  # noqa: E731
        split = lambda t, w: (see(f"{w}_in", n, x) @ weight(w)).unflatten(-1, (t, self.dh))  # noqa: E731
        q, k = see("q", n, split(self.H, "q")), see("k", n, split(self.G, "k"))
        q, k = see("rot_q", n, self.turned(q)), see("rot_k", n, self.turned(k))
        own = see("own_v", n, split(self.G, "v")) if self.kind != "svformer" or n == 0 else None
        v, mixes = own, n > 0 and self.kind in ("resformer", "svformer", "neutreno")
        source = see("first_v", n, first) if mixes else None
        if mixes and self.kind != "neutreno":
            a, b = MIX[self.kind]
            v = a * source + (b * own if b else 0)
        v = see("v", n, v)
        wide = lambda t: t.repeat_interleave(self.H // self.G, 2)  # noqa: E731
        scores = torch.einsum("bqhd,bkhd->bhqk", q, wide(k)) / math.sqrt(self.dh)
        future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        pattern = see("pattern", n, scores.masked_fill(future, -math.inf).softmax(-1))
        z = torch.einsum("bhqk,bkhd->bqhd", pattern, wide(v))
        if mixes and self.kind == "neutreno":
            z = z + PULL * see("pull", n, wide(source - v))
        z = see("z", n, z)
        return z.flatten(2) @ self.p[f"blocks.{n}.attn.o_proj.weight"].T, v if n == 0 else first

    def losses(self, ids, see=lambda name, n, x: x):
        """Mean next-token loss of each document, nats."""
        log_p = self.forward(ids, see).log_softmax(-1)[:, :-1]
        return -log_p.gather(-1, ids[:, 1:, None])[..., 0].mean(1)

    def output_matrix(self, n):
        return self.p[f"blocks.{n}.attn.o_proj.weight"].T.unflatten(0, (self.H, self.dh))


def spread(value, axes, **fixed):
    """A row for each entry of [document, *axes] (or of [*axes], the same for all)."""
    if not axes:
        return {at(**fixed): value}
    front = value.ndim - len(axes)
    entries = np.ndindex(*value.shape[front:])
    return {
        at(**fixed, **dict(zip(axes, place, strict=True))): value[(slice(None), *place)]
        if front
        else float(value[place])
        for place in entries
    }


# ---- vectors ---------------------------------------------------------------------------------------------------------


def of_vectors(sites, parts, controls=None):
    """Truth of a measure of vectors, one document at a time: {variant: (function([position, width]), axes)}."""

    def truth(world):
        rows = {}
        for (name, n), x in [item for site in sites for item in world.vectors(site).items()]:
            for variant, (function, axes) in parts.items():
                each = torch.stack([torch.as_tensor(function(document)) for document in x])
                rows |= spread(each, axes, site=name, layer=n, variant=variant)
            for control, function in (controls or {}).items():
                rows[at(site=name, layer=n, control=control)] = function(world)
        return rows

    return truth


def similarity(x):
    """Mean cosine of all pairs, each pair by itself."""
    unit = x / x.norm(dim=-1, keepdim=True)
    return (unit @ unit.T)[~torch.eye(len(x), dtype=torch.bool)].mean()


def repetition(world):
    equal, T = (world.ids[:, :, None] == world.ids[:, None]).double(), world.ids.shape[1]
    return float(((equal.sum((1, 2)) - T) / (T * (T - 1))).mean())


def collapse(x):
    return torch.linalg.matrix_norm(x - x.mean(0)) / torch.linalg.matrix_norm(x)


def middle(size):
    """The median entry; of an even number the lower of the two in the middle."""
    return size.flatten().sort()[0][(size.numel() - 1) // 2]


def massive(x):
    return ((x.abs() > 100) & (x.abs() >= 1000 * middle(x.abs()))).sum().double()


def first_over(x, of):
    norms = x.norm(dim=-1).numpy()
    return norms[0] / of(norms[1:])


def head_rank(x, top, world_heads):
    found = []
    for head in x.unflatten(-1, (world_heads, -1)).unbind(1):
        q = np.linalg.svd(head.numpy(), compute_uv=False) ** 2
        q = q / q.sum()
        found.append(q.max() if top else np.exp(-(q[q > 0] * np.log(q[q > 0])).sum()))
    return torch.tensor(np.array(found))


def pooled(sites, function):
    """Truth of a measure of all documents together: function([document, position, width], ids) -> {(variant, axes...): value}."""

    def truth(world):
        rows = {}
        for (name, n), x in [item for site in sites for item in world.vectors(site).items()]:
            for variant, value in function(x, world.ids).items():
                value = torch.as_tensor(value, dtype=torch.double)
                rows |= spread(value, ["index"], site=name, layer=n, variant=variant) if value.ndim else {
                    at(site=name, layer=n, variant=variant): float(value)
                }  # fmt: skip
        return rows

    return truth


def massive_dimensions(x, ids):
    ratio = torch.stack([d.abs().max(0)[0] / middle(d.abs()) for d in x]).mean(0)
    first = torch.stack([(d.abs().max(0)[1] == 0).double() for d in x]).mean(0)
    order = sorted(range(len(ratio)), key=lambda j: -float(ratio[j]))[:10]
    return {None: ratio[order], "dimension": order, "first_position": first[order]}


def spectrum(x, ids):
    rows = x.flatten(0, 1)
    mu = torch.linalg.eigvalsh(rows.T @ rows / len(rows)).flip(0)
    each = torch.stack([torch.linalg.eigvalsh(d.T @ d / len(d)).flip(0) for d in x]).mean(0)
    return {None: (mu / mu.sum())[:32], "per_sequence": (each / each.sum())[:32]}


def effective_rank(x, ids):
    rows = x.flatten(0, 1).numpy()
    mu = np.linalg.svd(rows, compute_uv=False) ** 2 / len(rows)
    q = mu / mu.sum()
    variance = PCA(svd_solver="full").fit(rows).explained_variance_ratio_.cumsum()
    return {
        None: np.exp(-(q[q > 0] * np.log(q[q > 0])).sum()), "participation": mu.sum() ** 2 / (mu**2).sum(),
        "pcs_99": int((variance < 0.99 - 1e-12).sum()) + 1, "top_share": q[0], "trace": (rows**2).sum(1).mean(),
    }  # fmt: skip


def identity_share(world):
    order = torch.randperm(world.ids.shape[1], generator=torch.Generator().manual_seed(world.ids.shape[1]))
    rows = {}
    for (name, n), x in [i for site in ("own_v", "v", "q", "k", "z", "stream") for i in world.vectors(site).items()]:
        for control, ids in ((None, world.ids), ("shuffled", world.ids[:, order])):
            groups = [x.flatten(0, 1)[ids.flatten() == t] for t in ids.unique() if (ids == t).sum() > 1]
            every = torch.cat(groups)
            within = sum(((g - g.mean(0)) ** 2).sum() for g in groups)
            between = sum(len(g) * ((g.mean(0) - every.mean(0)) ** 2).sum() for g in groups)
            noise = within / (len(every) - len(groups))
            rows[at(site=name, layer=n, control=control)] = float(
                (between - (len(groups) - 1) * noise) / (between + within + noise)
            )
    return rows


VALUES, FOUR = ("v", "own_v"), ("stream", "v", "own_v", "z")
VECTORS = {
    "hidden_norm": of_vectors(["stream"], {None: (lambda x: x.norm(dim=-1), ["position"])}),
    "value_norm": of_vectors(VALUES, {None: (lambda x: x.norm(dim=-1), ["position"])}),
    "hidden_peak": of_vectors(["stream"], {None: (lambda x: first_over(x, np.mean), [])}, {"none": lambda w: 1.0}),
    "value_drain": of_vectors(VALUES, {None: (lambda x: first_over(x, np.median), [])}, {"none": lambda w: 1.0}),
    "token_similarity": of_vectors(
        (*FOUR, "rot_k"),
        {None: (similarity, []), "excl0": (lambda x: similarity(x[1:]), [])},
        {"token_repetition": repetition},
    ),
    "collapse_residual": of_vectors(
        FOUR, {None: (collapse, []), "excl0": (lambda x: collapse(x[1:]), [])},
        {"orthogonal": lambda w: math.sqrt(1 - 1 / w.ids.shape[1])},
    ),
    "massive_activations": of_vectors(
        ["stream"], {None: (lambda x: x.abs().max() / middle(x.abs()), []), "count": (massive, [])}
    ),
    "massive_dimensions": pooled(["stream"], massive_dimensions),
    "head_rank": lambda world: of_vectors(
        VALUES,
        {None: (lambda x: head_rank(x, False, world.G), ["head"]), "top_share": (lambda x: head_rank(x, True, world.G), ["head"])},
    )(world),
    "spectrum": pooled(VALUES, spectrum),
    "effective_rank": pooled(("v", "own_v", "stream", "z"), effective_rank),
    "token_identity_share": identity_share,
    "loss": lambda world: {at(): world.losses(world.ids)},
}  # fmt: skip
