"""The parts of our own models' streams: outputs of embedding, heads and MLPs, weighted by everything on their way.

The stream is linear in the embedding and in what attentions and MLPs add: x = sum over c of w_c o_c, with w_c the product
of everything on the way (1 in most; DenseFormer's averages, the embedding added again, a skip that was cut). A head adds
z_h W_O_h, and with its pattern A fixed z_h is linear in the values, so it splits by where they come from: the layer's own
projection, the first layer's or another's, a table.

Sources: Elhage et al. (2021), A Mathematical Framework for Transformer Circuits (the linear view of the stream and the
value paths); Pagliardini et al. (2024), DenseFormer, for the weights on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.joint import Softmax, joint_attention
from workbench.models.anatomy import Anatomy, Ending, Reader
from workbench.models.attention import Attention
from workbench.models.joint_attention import JointAttention
from workbench.models.shortcut import Source
from workbench.models.transformer import Transformer
from workbench.names import path_name, stream_hook

OWN = "own"
"""The path of what a layer projects itself."""


class TransformerAnatomy(Anatomy):
    """Of a model of `build`."""

    model: Transformer

    def needed(self, by: str, layer: int, frozen: bool = False) -> list[str]:
        """Hook points that a decomposition of stream `layer` reads."""
        model = self.model
        names = ["hook_embed", stream_hook(layer, model.config.n_layers)]
        names += ["ln_final.hook_scale", "unembed.hook_in"] if frozen else []
        names += model.residual.points(2 * layer)
        for n in range(layer):
            attn = model.blocks[n].attn
            names += [f"blocks.{n}.hook_mlp_out", f"blocks.{n}.{'hook_attn_out' if by == 'layer' else 'attn.hook_z'}"]
            names += (
                [f"blocks.{n}.ln1_post.hook_scale"] if model.blocks[n].ln1_post is not None and by != "layer" else []
            )
            if by == "value_path":
                names += [f"blocks.{n}.attn.hook_{x}" for x in ("rot_q", "rot_k")]
                names += [f"blocks.{n}.attn.own.hook_v"] if attn.projections["v"].projects else []
                mixes = [path for path in attn.coefficients if path in ("v", "output", "pattern")]
                names += [f"blocks.{n}.attn.{attn.weight_points[path]}" for path in mixes]
                names += [*_points_read(attn).values(), *_points_crossed(attn)]
                names += sorted(attn.recipe().needs) if isinstance(attn, JointAttention) else ()
                names += [f"blocks.{n}.ln1.hook_normalized", f"blocks.{n}.attn.hook_v"] if attn.gates else []
        return list(dict.fromkeys(names))

    def parts(self, read: Reader, by: str, layer: int) -> list[tuple[str, Tensor]]:
        """(label, [batch, pos, d_model]) of outputs, heads or value paths, as they arrive in stream `layer`."""
        used = {name: read(name) for name in self.model.residual.points(2 * layer)}
        weights = self.model.stream_paths(layer, cache=used)
        kept = {name: read.kept(w) if isinstance(w, Tensor) else w for name, w in weights.items()}
        return [(label, w * part) for name, w in kept.items() for label, part in _outputs(self.model, read, name, by)]

    def ending(self, read: Reader) -> Ending:
        """The final norm and the head."""
        gain, head = (x.detach().to(read.wide) for x in (self.model.ln_final.weight, self.model.unembed.weight))
        return Ending(centred=False, divisor=read.cut("ln_final.hook_scale"), gain=gain, head=head)

    def run(self, given: Any, names: Sequence[str]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Logits and activations of a run."""
        logits, cache = self.model.run_with_cache(given, names_filter=names)
        return logits, cache.cache_dict


def _points_read(attn: Attention) -> dict[Source, str]:
    """Hook points of the values of other layers and tables that a layer mixes or shares, by source."""
    return {j: str(module.hook_v.name) for j, module, _ in attn.reads["v"]}


def _points_crossed(attn: Attention) -> list[str]:
    """Hook points of the values of other layers that a layer's softmaxes read."""
    modules = attn.attended.get("v", {}) if isinstance(attn, JointAttention) else {}
    return [str(module.hook_v.name) for module in modules.values()]


def _outputs(model: Transformer, read: Reader, name: str, by: str) -> list[tuple[str, Tensor]]:
    """(label, [batch, pos, d_model]) of one entry of `stream_paths`."""
    if name == "embed":
        return [(name, read.cut("hook_embed"))]
    n, kind = int(name.split("_")[0]), name.split("_", 1)[1]
    if kind == "mlp_out" or by == "layer":
        return [(name, read.cut(f"blocks.{n}.hook_{kind}"))]
    attn = model.blocks[n].attn
    zs = value_paths(model, read, n) if by == "value_path" else {"": read(f"blocks.{n}.attn.hook_z")}
    w_o = attn.W_O.detach().to(read.wide)
    post = model.blocks[n].ln1_post
    share = 1.0 if post is None else post.share(read.cut(f"blocks.{n}.ln1_post.hook_scale"))
    results = {
        f".{path}" if path else "": share * torch.einsum("bphd,hdm->hbpm", read.kept(z), w_o) for path, z in zs.items()
    }
    return [(f"L{n}H{h}{path}", part[h]) for h in range(model.config.n_heads) for path, part in results.items()]


@torch.no_grad()
def value_paths(model: Transformer, read: Reader, layer: int) -> dict[str, Tensor]:
    """Head outputs [batch, pos, head, d_head] of a layer by where the values come from; they sum to `hook_z`.

    The attention, what mixes the values and what shortcuts add to the head outputs are linear in the values, and gates in
    these, so each part is the layer's own computation with all other values at zero and the gates as they were.
    """
    attn: Attention = model.blocks[layer].attn
    points = _points_read(attn)
    values: dict[Source, Tensor] = {j: read(name) for j, name in points.items()}
    others = {name: read(name) for name in _points_crossed(attn)}
    made = _made_of(attn, read, values)
    nothing = torch.zeros_like(next(iter(made.values())))
    absent, unread = dict.fromkeys(values, nothing), [nothing] * len(others)
    through = _through(model, read, attn)
    parts: dict[str, Tensor] = {}
    for j, value in values.items():
        parts[path_name(points[j])] = through(made.get(j, nothing), absent | {j: value}, unread)
    if OWN in made:
        parts[OWN] = through(made[OWN], absent, unread)
    for i, (name, value) in enumerate(others.items()):
        parts[path_name(name)] = through(nothing, absent, [*unread[:i], value, *unread[i + 1 :]])
    return parts


def _made_of(attn: Attention, read: Reader, values: Mapping[Source, Tensor]) -> dict[Source, Tensor]:
    """What each source, and the layer's `own` projection, puts into the effective values [batch, pos, kv_head, d_head]."""
    stem, wiring = f"blocks.{attn.layer}.attn", attn.projections["v"]
    own: dict[Source, Tensor] = {OWN: read(f"{stem}.own.hook_v")} if wiring.projects else {}
    if wiring.mixer is not None:
        tensors = {j: values[j] for j in wiring.mixed} | own
        weights = read(f"{stem}.{attn.weight_points['v']}").unbind(-1)
        return {j: (w[..., None] if w.ndim else w) * x for (j, x), w in zip(tensors.items(), weights, strict=True)}
    if wiring.shared_source is None:
        return own
    shared, heads = values[wiring.shared_source], wiring.own_heads
    if not heads:
        return {wiring.shared_source: shared}
    others = shared.shape[2] - heads
    return {
        wiring.shared_source: F.pad(shared[:, :, heads:], (0, 0, heads, 0)),
        OWN: F.pad(own[OWN], (0, 0, 0, others)),
    }


def _through(
    model: Transformer, read: Reader, attn: Attention
) -> Callable[[Tensor, Mapping[Source, Tensor], Sequence[Tensor]], Tensor]:
    """Effective values, sources of the outputs and the other key sets' values -> head outputs of a layer's attention."""
    stem, layer = f"blocks.{attn.layer}", attn.layer
    q, k = read(f"{stem}.attn.hook_rot_q"), read(f"{stem}.attn.hook_rot_k")
    softmaxes = [Softmax(1.0, q, [k])]
    if isinstance(attn, JointAttention):
        recipe = attn.recipe()
        softmaxes = recipe.softmaxes({name: read(name) for name in recipe.needs})
    names = attn.coefficients.get("output", ())
    weights = dict(zip(names, read(f"{stem}.attn.hook_output_mix").unbind(-1), strict=True)) if names else {}
    x = effective = q
    if attn.gates:  # what they multiply with is that of the run
        x = model.blocks[layer].ln1.gained(read(f"{stem}.ln1.hook_normalized"))
        x, effective = x.to(model.embed.weight.dtype), read(f"{stem}.attn.hook_v")

    def through(v: Tensor, sources: Mapping[Source, Tensor], crossed: Sequence[Tensor]) -> Tensor:
        attends = any(bool(t.any()) for t in (v, *crossed))
        z = joint_attention(softmaxes, [v, *crossed]) if attends else torch.zeros_like(q)
        for shortcut in attn.outputs:
            z = shortcut.output(layer, z, v, sources, weights)
        for shortcut in attn.gates:
            z = shortcut.gate(layer, z, effective, x)
        return z.to(read.wide)

    return through
