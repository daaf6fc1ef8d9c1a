"""The parts of the streams of our own models: weighted outputs of the embedding, the heads and the MLPs.

The stream is linear in the embedding and in the outputs of attentions and MLPs: x = sum over c of w_c o_c. The weights w_c are 1
except for averaged states, added embeddings and cut skips. A head adds z_h W_O_h. With a fixed pattern A, z_h is linear in the
values, so it splits by their source: the layer's own projection, another layer's values, a table.

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
"""Label of the values that a layer projects itself."""


class TransformerAnatomy(Anatomy):
    """The parts of a model of `build`."""

    model: Transformer

    def needed(self, by: str, layer: int, frozen: bool = False) -> list[str]:
        """Return the hook points for a decomposition of stream `layer`."""
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
        """Return (label, [batch, pos, d_model]) of outputs, heads or value paths, weighted as in stream `layer`."""
        used = {name: read(name) for name in self.model.residual.points(2 * layer)}
        weights = self.model.stream_paths(layer, cache=used)
        weights = {name: read.at_positions(w) if isinstance(w, Tensor) else w for name, w in weights.items()}
        parts: list[tuple[str, Tensor]] = []
        for name, weight in weights.items():
            if name == "embed":
                parts.append((name, weight * read.cut("hook_embed")))
                continue
            n, kind = int(name.split("_")[0]), name.split("_", 1)[1]
            if kind == "mlp_out" or by == "layer":
                parts.append((name, weight * read.cut(f"blocks.{n}.hook_{kind}")))
                continue
            by_path, block = by == "value_path", self.model.blocks[n]
            zs = value_paths(self.model, read, n) if by_path else {"": read(f"blocks.{n}.attn.hook_z")}
            w_o, post = block.attn.W_O.detach().to(read.wide), block.ln1_post
            share = 1.0 if post is None else post.share(read.cut(f"blocks.{n}.ln1_post.hook_scale"))
            outputs = {p: share * torch.einsum("bphd,hdm->hbpm", read.at_positions(z), w_o) for p, z in zs.items()}
            for h in range(self.model.config.n_heads):
                parts += [(f"L{n}H{h}{'.' * by_path}{path}", weight * out[h]) for path, out in outputs.items()]
        return parts

    def ending(self, read: Reader) -> Ending:
        """Return the final norm and the head."""
        gain, head = (x.detach().to(read.wide) for x in (self.model.ln_final.weight, self.model.unembed.weight))
        return Ending(centred=False, divisor=read.cut("ln_final.hook_scale"), gain=gain, head=head)

    def run(self, given: Any, names: Sequence[str]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return logits and activations of a run."""
        logits, cache = self.model.run_with_cache(given, names_filter=names)
        return logits, cache.cache_dict


def _points_read(attn: Attention) -> dict[Source, str]:
    """Return the hook points of the values that a layer mixes or shares, by source."""
    return {j: str(module.hook_v.name) for j, module, _ in attn.reads["v"]}


def _points_crossed(attn: Attention) -> list[str]:
    """Return the hook points of other layers' values that a layer's softmaxes read."""
    modules = attn.attended.get("v", {}) if isinstance(attn, JointAttention) else {}
    return [str(module.hook_v.name) for module in modules.values()]


@torch.no_grad()
def value_paths(model: Transformer, read: Reader, layer: int) -> dict[str, Tensor]:
    """Return a layer's head outputs [batch, pos, head, d_head] by the source of the values; they sum to `hook_z`.

    Attention, mixing and the terms that shortcuts add are linear in the values, and gates are linear in the head outputs.
    Each part is the layer's own computation with all other values set to zero and the gates of the run.
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
    """Return the parts of the effective values [batch, pos, kv_head, d_head], by source and `own`."""
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
    """Return a function from effective values, sources of the outputs and other key sets' values to a layer's head outputs."""
    stem, layer = f"blocks.{attn.layer}", attn.layer
    q, k = read(f"{stem}.attn.hook_rot_q"), read(f"{stem}.attn.hook_rot_k")
    softmaxes = [Softmax(1.0, q, [k])]
    if isinstance(attn, JointAttention):
        recipe = attn.recipe()
        softmaxes = recipe.softmaxes({name: read(name) for name in recipe.needs})
    names = attn.coefficients.get("output", ())
    weights = dict(zip(names, read(f"{stem}.attn.hook_output_mix").unbind(-1), strict=True)) if names else {}
    x = effective = q
    if attn.gates:  # computed from the run's activations
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
