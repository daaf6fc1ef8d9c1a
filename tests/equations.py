"""Logits of every architecture from its published equations: loops over layers and heads, no code of the models.

`logits(name, weights, shape, ids, options)` reads the weights by their names in a checkpoint; the defaults, too, are
written here a second time. Layers are numbered from 0.
"""

from __future__ import annotations

import math

import torch
from stream_equations import Streams, depth_attention

RESFORMER = {"lambda_v1": 0.5, "lambda_own": 0.5, "layers": "all", "source_layer": 0, "detach_source": False}
PARTS = {  # name -> (family, its settings)
    "transformer": ("transformer", {}),
    "resformer": ("resformer", RESFORMER),
    "resformer_constant": ("resformer", RESFORMER | {"lambda_v1": 2, "lambda_own": 1}),
    "resformer_sparse": ("resformer", RESFORMER | {"lambda_v1": 5, "lambda_own": 1, "layers": "late"}),
    "resformer_learnable": ("learnable", {"lambda_v1": 0.5, "lambda_own": 0.5, "decay_lambda": False}),
    "resformer_learnable_plus": (
        "plus", {"lambda_own": 0.5, "plus_logit_init": "zeros", "plus_scale_init": None, "decay_lambda": False}
    ),
    "resformer_dense": (
        "dense", {"lambda_source": 1, "lambda_own": 1, "dense_source": "raw", "decay_lambda": False}
    ),
    "svformer": ("svformer", {"anchors": None, "refresh_every": None, "shared_layers": "all"}),
    "neutreno": ("neutreno", {"neutreno_lambda": 0.4}),
    "attention_residuals": (
        "depth", {"depth_form": "replace", "depth_blocks": None, "depth_heads": 1}
    ),
    "hyper_connections": ("hyper_connections", {"streams": 4, "dynamic": True}),
    "mhc": ("mhc", {"streams": 4, "mixing": "sinkhorn"}),
    "denseformer": ("denseformer", {"dilation": 1, "period": 1, "decay_alpha": False}),
    "gqa": ("gqa", {"query_group": 2}),
    "mqa": ("gqa", {"query_group": "all"}),
    "cla": ("sharing", {"share": "kv", "group": 2}),
    "share_q": ("sharing", {"share": "q", "group": 2}),
    "share_k": ("sharing", {"share": "k", "group": 2}),
    "share_v": ("sharing", {"share": "v", "group": 2}),
    "cross_layer": ("cross_layer", {"source": "previous"}),
    "cross_layer_all": ("cross_layer", {"source": "all"}),
    "same_key": ("same_key", {"source": "all", "same_key_weight": 1}),
    "identity_map": ("identity_map", {"identity_source": "all", "identity_scale": 1}),
    "residual_q": ("residual_q", {"lambda_q1": 0.5, "lambda_q_own": 0.5}),
    "residual_k": ("residual_k", {"lambda_k1": 0.5, "lambda_k_own": 0.5}),
    "residual_attention": ("residual_attention", {"lambda_a1": 0.5, "lambda_a_own": 0.5, "attn_mix": "prob"}),
    "residual_hidden": ("residual_hidden", {"lambda_h1": 1, "lambda_h_own": 1, "once": False}),
    "value_embedding": (
        "value_embedding", {"value_tables": None, "lambda_table": 0.5, "lambda_own": 0.5, "decay_lambda": False}
    ),
    "sandwich_norm": ("norms", {"norms": "sandwich"}),
    "post_norm": ("norms", {"norms": "post"}),
    "dyt": ("norms", {"norms": "dyt"}),
    "bank_of_values": ("bank", {"bank_layers": "last_third", "bank": "table", "bank_gain": True}),
    "gated_value_embedding": (
        "gated_tables", {"gate_scale": 3, "gate_channels": None, "table_layers": "alternate"}
    ),
    "satformer": ("satformer", {"gate_form": "relu", "layers": "all"}),
    "skip_v1": ("skip_v1", {"skip_heads": None}),
    "value_scale": ("value_scale", {"scale_start": 1}),
    "value_gate": ("value_gate", {"gate_from": "value"}),
    "value_gate_query": ("value_gate_query", {"gate_from": "value"}),
    "gated_attention": ("gate", {}),
    "exclusive_attention": ("exclusive", {"gated": False}),
    "sink_logit": ("sink_logit", {"logit": "learned"}),
    "held_start": ("held_start", {"start_norm": 0, "others_norm": "free"}),
    "cut_skip": ("cut_skip", {"cut": "both"}),
    "values_scaled": ("values_scaled", {"value_factor": 0.5}),
    "first_layer_shuffled": ("shuffled", {"lambda_other": 0.5, "lambda_own": 0.5}),
}  # fmt: skip
TOGETHER = {  # what was published for some of them together
    ("resformer", "neutreno"): {"neutreno_lambda": 0.2},
    ("svformer", "gqa"): {"query_group": 4},
    ("svformer", "cla"): {"share": "k"},
}


def written(name):
    """Whether an architecture's equations stand here."""
    return set(name.split("+")) <= PARTS.keys()


def settings(name, options):
    """Family -> settings."""
    parts = name.split("+")
    families = {family: dict(values) for family, values in (PARTS[part] for part in parts)}
    published = [values for both, values in TOGETHER.items() if set(both) <= set(parts)]
    for key, value in [item for values in (*published, options) for item in values.items()]:
        (owner,) = [family for family, values in families.items() if key in values]
        families[owner][key] = value
    return families


def norm(x, gain, eps):
    return gain * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def rope(x, theta):
    """[batch, pos, d_head] turned as in the Llama implementation: angles in two halves."""
    T, width = x.shape[-2:]
    angle = torch.arange(T, dtype=x.dtype)[:, None] * theta ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def sigmoid(x):
    return 1 / (1 + (-x).exp())


GATES = {  # of one token's logits, over its key-value heads
    "relu": lambda a: a * (a > 0),
    "sigmoid": sigmoid,
    "tanh": lambda a: (a.exp() - (-a).exp()) / (a.exp() + (-a).exp()),
    "identity": lambda a: a,
    "softmax": lambda a: a.shape[-1] * a.exp() / a.exp().sum(-1, keepdim=True),
    "softmax_sigmoid": lambda a: a.shape[-1] * a.exp() / a.exp().sum(-1, keepdim=True) * sigmoid(a),
}


def among(layers, n, L):
    """Whether layer n is one of the chosen of L layers."""
    first = {"all": 0, "late": L - max(1, round(3 * L / 8)), "last_third": L - max(1, L // 3)}
    return n >= first[layers] if isinstance(layers, str) else n in layers


def before(source, n):
    """Layers before n that a source names."""
    return [
        m
        for m in range(n)
        if source in ("all", m) or (source == "first" and m == 0) or (source == "previous" and m == n - 1)
    ]


def logits(name, weights, shape, ids, options):
    """[batch, pos, vocab]; `shape` has n_layers, n_heads, n_key_value_heads, d_model, rms_norm_eps, rope_theta."""
    s, p = settings(name, options), weights
    L, H, G, T = shape.n_layers, shape.n_heads, shape.n_key_value_heads, ids.shape[1]
    dh = shape.d_model // H
    if "gqa" in s:
        group = s["gqa"]["query_group"]
        G = 1 if group == "all" else H // group
    future = torch.ones(T, T).triu(1).bool()

    place = s["norms"]["norms"] if "norms" in s else "pre"

    def entering(x, at):
        """What attention or MLP read of the stream."""
        if place == "post":
            return x
        if place == "dyt":
            return p[at + "weight"] * torch.tanh(p[at + "alpha"] * x) + p[at + "bias"]
        return norm(x, p[at + "weight"], shape.rms_norm_eps)

    def leaving(x, at):
        """What of what they put out is added to it."""
        return norm(x, p[at + "weight"], shape.rms_norm_eps) if place in ("sandwich", "post") else x

    def head(x, h):
        return x[..., h * dh : (h + 1) * dh]

    def shared(n, tensor):
        """The layer whose tensor n uses."""
        if "sharing" in s and tensor in s["sharing"]["share"]:
            group = s["sharing"]["group"]
            return 0 if group == "all" else (n // group) * group
        if "svformer" in s and tensor == "v":
            anchors, every = s["svformer"]["anchors"], s["svformer"]["refresh_every"]
            if not among(s["svformer"]["shared_layers"], n, L):
                return n
            anchors = anchors or [a for a in range(L) if (a % every == 0 if every else a == 0)]
            return max(a for a in anchors if a <= n)
        return n

    def scores(q, k, h):
        """[batch, query, key] of query head h, the future masked."""
        s = rope(head(q, h), shape.rope_theta) @ rope(head(k, h * G // H), shape.rope_theta).transpose(1, 2)
        return (s / math.sqrt(dh)).masked_fill(future, -math.inf)

    def value(n, x):
        """(own, attended) values of layer n."""
        if "bank" in s and among(o := s["bank"]["bank_layers"], n, L):
            bank = [m for m in range(L) if among(o, m, L)]
            gain = p["bank_of_values.gains"][bank.index(n)] if s["bank"]["bank_gain"] else 1
            return (gain * (V[0] if s["bank"]["bank"] == "first" else p[f"bank_of_values.tables.{n}"][ids]),) * 2
        if shared(n, "v") != n:
            return (V[shared(n, "v")],) * 2
        if "skip_v1" in s and n > 0 and G == 1:
            return (V[0],) * 2
        own = x @ p[f"blocks.{n}.attn.v_proj.weight"].T
        if "skip_v1" in s and n > 0:
            return own, torch.cat((own, V[0][..., own.shape[-1] :]), -1)
        if "value_scale" in s:
            C = s["value_scale"]["scale_start"] * shape.d_model * dh * 0.02**2 * p[f"value_scale.thetas.{n}"].exp()
            squared = [head(own, g).pow(2).sum(-1, keepdim=True) for g in range(G)]
            own = torch.cat([head(own, g) * squared[g] / (squared[g] + C[g]) for g in range(G)], -1)
        if "value_gate" in s:
            read = own if s["value_gate"]["gate_from"] == "value" else x
            gate = sigmoid(read @ p[f"value_gate.gates.{n}"].T)
            own = torch.cat([gate[..., g, None] * head(own, g) for g in range(G)], -1)
        if "held_start" in s:
            parts = (own[:, :1], s["held_start"]["start_norm"]), (own[:, 1:], s["held_start"]["others_norm"])
            heads = [(head(part, g), norm) for part, norm in parts for g in range(G)]
            heads = [u if norm == "free" else norm * u / u.norm(dim=-1, keepdim=True) for u, norm in heads]
            own = torch.cat([torch.cat(heads[:G], -1), torch.cat(heads[G:], -1)], 1)
        if "resformer" in s:
            o, layers = s["resformer"], s["resformer"]["layers"]
            if n > o["source_layer"] and among(layers, n, L):
                first = OWN[o["source_layer"]]
                return own, o["lambda_v1"] * (first.detach() if o["detach_source"] else first) + o["lambda_own"] * own
        if "shuffled" in s and n > 0:
            other = torch.cat((V[0][-1:], V[0][:-1]))
            return own, s["shuffled"]["lambda_other"] * other + s["shuffled"]["lambda_own"] * own
        if "values_scaled" in s and n > 0:
            return own, s["values_scaled"]["value_factor"] * own
        if "satformer" in s and n > 0 and among(s["satformer"]["layers"], n, L):
            alpha = GATES[s["satformer"]["gate_form"]](x @ p[f"satformer.gates.{n}"].T)
            return own, torch.cat([head(own, g) + alpha[..., g, None] * head(V[0], g) for g in range(G)], -1)
        if "gated_tables" in s:
            o, at, layers = s["gated_tables"], "gated_value_embedding.", s["gated_tables"]["table_layers"]
            if (L - 1 - n) % 2 == 0 if layers == "alternate" else among(layers, n, L):
                gate = sigmoid(x[..., : o["gate_channels"] or 12] @ p[f"{at}gates.{n}"].T)
                rows = p[f"{at}tables.{n}"][ids]
                added = [o["gate_scale"] * gate[..., g, None] * head(rows, g) for g in range(G)]
                return own, own + torch.cat(added, -1)
        if "learnable" in s and n > 0:
            first, last = p["resformer_learnable.first"], p["resformer_learnable.own"]
            return own, first[n - 1] * V[0] + last[n - 1] * own
        if "plus" in s and n > 0:
            at = "resformer_learnable_plus."
            share = p[at + "logits"].exp() / p[at + "logits"].exp().sum()
            return own, p[at + "scale"] * share[n - 1] * V[0] + p[at + "own"][n - 1] * own
        if "dense" in s and n > 0:
            earlier, row = {"raw": OWN, "mixed": V}[s["dense"]["dense_source"]], p[f"resformer_dense.rows.{n}"]
            return own, sum(row[i] * earlier[i] for i in range(n)) + row[n] * own
        if "same_key" in s and (sources := before(s["same_key"]["source"], n)):
            w = s["same_key"]["same_key_weight"]
            return own, (own + w * sum(OWN[m] for m in sources)) / (1 + w * len(sources))
        if "value_embedding" in s:
            tables = s["value_embedding"]["value_tables"] or min(3, max(1, L // 2))
            at, with_table = "value_embedding.", [*range(tables), *range(L - tables, L)]
            mixed = p[at + "own"][n] * own
            if n in with_table:
                i = with_table.index(n)
                mixed = mixed + p[at + "table"][i] * p[f"{at}tables.{i % tables}"][ids]
            return own, mixed
        return own, own

    y = embedding = p["embed.weight"][ids]
    X, Q, K, V, OWN = [embedding], [], [], [], []
    outputs = [embedding]  # of the sublayers one by one
    several = next((f for f in ("hyper_connections", "mhc") if f in s), "")
    streams = Streams(several, s[several], p, shape, embedding) if several else None
    y = streams.read(0) if streams else y
    for n in range(L):
        at = f"blocks.{n}."
        x = entering(y, at + "ln1.")
        for tensor, layers in (("q", Q), ("k", K)):
            if shared(n, tensor) != n:
                layers.append(layers[shared(n, tensor)])
                continue
            own = x @ p[f"{at}attn.{tensor}_proj.weight"].T
            if place == "post":
                own = norm(own, p[f"{at}attn.{tensor}_proj.norm.weight"], shape.rms_norm_eps)
            if f"residual_{tensor}" in s and n > 0:
                o = s[f"residual_{tensor}"]
                own = o[f"lambda_{tensor}1"] * layers[0] + o[f"lambda_{tensor}_own"] * own
            layers.append(own)
        own, attended = value(n, x)
        V.append(attended)
        OWN.append(attended if n == 0 else own)  # the first layer's are what it attends with
        U = []
        for h in range(H):
            g = h * G // H
            v = head(V[n], g)
            if "cross_layer" in s and (sources := before(s["cross_layer"]["source"], n)):
                joint = torch.cat([scores(Q[n], K[m], h) for m in (n, *sources)], -1).softmax(-1)
                u = joint @ torch.cat([head(V[m], g) for m in (n, *sources)], -2)
            elif "residual_attention" in s and n > 0:
                o, both = s["residual_attention"], (scores(Q[0], K[0], h), scores(Q[n], K[n], h))
                if o["attn_mix"] == "prob":
                    u = (o["lambda_a1"] * both[0].softmax(-1) + o["lambda_a_own"] * both[1].softmax(-1)) @ v
                else:
                    first, last = (x.masked_fill(future, 0) for x in both)
                    mixed = o["lambda_a1"] * first + o["lambda_a_own"] * last
                    u = mixed.masked_fill(future, -math.inf).softmax(-1) @ v
            elif "sink_logit" in s:
                b = p[f"sink_logit.logits.{n}"][h] if s["sink_logit"]["logit"] == "learned" else torch.zeros(())
                u = scores(Q[n], K[n], h).exp()
                u = u / (u.sum(-1, keepdim=True) + b.exp()) @ v
            else:
                u = scores(Q[n], K[n], h).softmax(-1) @ v
            if "neutreno" in s and n > 0:
                u = u + s["neutreno"]["neutreno_lambda"] * (head(V[0], g) - v)
            if "identity_map" in s and (sources := before(s["identity_map"]["identity_source"], n)):
                u = u + s["identity_map"]["identity_scale"] / len(sources) * sum(head(OWN[m], g) for m in sources)
            if "value_gate_query" in s:
                read = V[n] if s["value_gate_query"]["gate_from"] == "value" else x
                opened = sigmoid(read @ p[f"value_gate_query.gates.{n}"].T)[..., h, None]
            if "exclusive" in s:
                share = torch.tanh(p[f"exclusive_attention.alphas.{n}"][h]) if s["exclusive"]["gated"] else 1
                u = u - share * (u * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True) * v
            U.append(opened * u if "value_gate_query" in s else u)
        U = torch.cat(U, -1)
        if "gate" in s:
            U = U * sigmoid(x @ p[f"gated_attention.gates.{n}"].T)
        cut = s["cut_skip"]["cut"] if "cut_skip" in s and n == 0 else "none"
        outputs.append(leaving(U @ p[at + "attn.o_proj.weight"].T, at + "ln1_post."))
        middle = outputs[-1] + (0 if cut in ("attn", "both") else y)
        if "depth" in s:
            middle = depth_attention(2 * n + 1, outputs, s["depth"], p, shape)
        if streams:
            streams.write(outputs[-1])
            middle = streams.read(2 * n + 1)
        m = entering(middle, at + "ln2.")
        gate = m @ p[at + "mlp.gate_proj.weight"].T
        y = (gate * sigmoid(gate) * (m @ p[at + "mlp.up_proj.weight"].T)) @ p[at + "mlp.down_proj.weight"].T
        y = leaving(y, at + "ln2_post.")
        outputs.append(y)
        y = y + (0 if cut in ("mlp", "both") else middle)
        X.append(y)
        if "depth" in s:
            y = depth_attention(2 * n + 2, outputs, s["depth"], p, shape)
        if streams:
            streams.write(outputs[-1])
            y = streams.read(2 * n + 2)
        if "residual_hidden" in s and n < (1 if s["residual_hidden"]["once"] else L - 1):
            y = s["residual_hidden"]["lambda_h1"] * embedding + s["residual_hidden"]["lambda_h_own"] * y
        if "denseformer" in s and (n + 1) % s["denseformer"]["period"] == 0:
            dilation = s["denseformer"]["dilation"]
            stored = [X[j] for j in range(n + 2) if (n + 1 - j) % dilation == 0]
            alpha = p[f"dwa.alphas.{n}.weight"][0]
            assert len(alpha) == (n + 1) // dilation + 1
            y = sum(a * x for a, x in zip(alpha, stored, strict=True))
    return norm(y, p["ln_final.weight"], shape.rms_norm_eps) @ p["unembed.weight"].T
