"""What the residual stream and the logits are made of, exactly, in every architecture.

    parts = workbench.decompose(model, tokens, by="head")
    parts = workbench.decompose(model, cache, to="logits", by="value_path", tokens=answer, against=other)

The stream is linear in the embedding and in what attentions and MLPs add: x = sum over c of w_c o_c, with w_c the product
of everything on the way (1 in most; DenseFormer's averages, the embedding added again, a skip that was cut). A head adds
z_h W_O_h, and with its pattern A fixed z_h is linear in the values, so it splits by where they come from: the layer's own
projection, the first layer's or another's, a table. Each call checks that the parts sum to what the model computed.

Sources: Elhage et al. (2021), A Mathematical Framework for Transformer Circuits (the linear view of the stream and the
value paths); Pagliardini et al. (2024), DenseFormer, for the weights on the way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.utilities import Slice

from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.kernels.joint import Softmax, joint_attention
from workbench.models.attention import Attention
from workbench.models.joint_attention import JointAttention
from workbench.models.shortcut import Source
from workbench.models.transformer import Transformer
from workbench.names import position_axis, stream_hook, value_path

By = Literal["layer", "head", "value_path"]

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest error of the sum for the coarsest type on the way, in units of the largest sum of the parts' magnitudes."""


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    """Parts that sum to a stream [component, batch, pos, d_model], or to logits [component, batch, pos (, d_vocab)]."""

    parts: Tensor
    labels: list[str]
    whole: Tensor
    """What the model computed, [batch, pos, ...]."""

    def __getitem__(self, label: str) -> Tensor:
        label = re.sub(r"\.source\.0$", ".first", label)
        if label not in self.labels:
            raise UnknownName("component", label, self.labels)
        return self.parts[self.labels.index(label)]

    @property
    def error(self) -> float:
        """Largest absolute difference between the sum of the parts and the whole."""
        return (self.parts.sum(0) - self.whole).abs().max().item()


def decompose(
    model: Transformer,
    given: Any,
    to: int | Literal["final", "logits"] | None = None,
    by: By = "layer",
    *,
    tokens: Any = None,
    against: Any = None,
    pos: Any = None,
) -> Decomposition:
    """The parts of a stream or of logits, labelled as in TransformerLens, checked to sum to it.

    `given`: token ids or text, or a cache of a run. `to`: a stream by index (0..L - 1 what a block reads, L or None what
    the final norm reads), `final` (its output before the gain, its scale frozen), or `logits`: those of `tokens` (ids
    [], [batch] or [batch, pos], or a text of one token), minus those of `against`, of the whole vocabulary where no tokens
    are given. `by`: `layer` (`embed`, `0_attn_out`, `0_mlp_out`, ...), `head` (`L0H3` for the attention outputs),
    `value_path` (`L1H0.own`, `L1H0.first`, `L2H0.source.1`, `L2H0.table`, `L1H0.cross`). `pos`: positions to keep, as
    `pos_slice` of `run_with_cache`. Parts are float32 or better. Raises `BadData` where a cache lacks what is needed, and
    `WorkbenchError` where the parts do not sum up, as after a hook changed a stream.
    """
    if not isinstance(model, Transformer):
        raise BadData(f"a {type(model).__name__} has no known paths to its stream: decompose takes models of `build`")
    if by not in ("layer", "head", "value_path"):
        raise UnknownName("by", by, ["layer", "head", "value_path"])
    layers = model.config.n_layers
    streams: dict[Any, int] = {n: n for n in range(layers + 1)} | {"final": layers, "logits": layers}
    if isinstance(to, bool) or (to is not None and to not in streams):
        raise UnknownName("stream", to, map(str, streams))
    layer = layers if to is None else streams[to]
    read = Reader(model, given, by, layer, frozen=to in ("final", "logits"), pos=pos)
    weights = model.stream_paths(layer, cache=read.tensors)
    parts = [(label, w * part) for name, w in weights.items() for label, part in _outputs(model, read, name, by)]
    stacked, labels = torch.stack([part for _, part in parts]), [label for label, _ in parts]
    whole = read.cut(stream_hook(layer, layers))
    if to in ("final", "logits"):
        scale = read.cut("ln_final.hook_scale")
        stacked, whole = stacked / scale, whole / scale
    if to == "logits":
        seen = read.cut("unembed.hook_in")  # the model's own path to the logits
        stacked, whole = _logits(model, stacked, seen, tokens, against)
    size = stacked.abs().sum(0).max().clamp(min=torch.finfo(stacked.dtype).tiny)
    result = Decomposition(parts=stacked, labels=labels, whole=whole)
    if not (off := result.error / size.item()) <= TOLERANCE[read.coarsest]:
        raise WorkbenchError(
            f"the parts by {by} miss {'stream ' if isinstance(to, int) else ''}{'the stream' if to is None else to} by"
            f" {off:.1e} of their size: it was changed on its way, as by a hook; decompose a run without it"
        )
    return result if read.batched else Decomposition(parts=stacked[:, 0], labels=labels, whole=whole[0])


@dataclass
class Reader:
    """Activations of one run as they are needed: with a batch, float32 or better."""

    model: Transformer
    given: Any
    by: str
    layer: int
    frozen: bool
    pos: Any
    batched: bool = True
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    coarsest: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        names = needed(self.model, self.by, self.layer, self.frozen)
        if isinstance(self.given, ActivationCache):
            if self.given.model is not None and self.given.model is not self.model:
                raise BadData("this cache belongs to another model")
            self.tensors, self.batched = self.given.cache_dict, self.given.has_batch_dim
        else:
            with torch.no_grad():
                self.tensors = self.model.run_with_cache(self.given, names_filter=names)[1].cache_dict
        if missing := [n for n in names if n not in self.tensors]:
            raise BadData(f"the cache lacks {', '.join(missing[:4])}: give the tokens, or a cache of the whole run")
        dtypes = [self.tensors[n].dtype for n in names] + [self.model.embed.weight.dtype]
        self.coarsest = max(dtypes, key=lambda dtype: TOLERANCE[dtype])
        self.wide = torch.float64 if self.coarsest == torch.float64 else torch.float32

    def __call__(self, name: str) -> Tensor:
        """[batch, ...] of every position."""
        tensor = self.tensors[name].to(self.wide)
        return tensor if self.batched or position_axis(name) is None else tensor[None]

    def cut(self, name: str) -> Tensor:
        """[batch, pos, ...] of the positions to keep."""
        return self.kept(self(name))

    def kept(self, tensor: Tensor) -> Tensor:
        """[batch, pos, ...] cut to them."""
        return Slice.unwrap(self.pos).apply(tensor, dim=1)


def needed(model: Transformer, by: str, layer: int, frozen: bool = False) -> list[str]:
    """Hook points that a decomposition of stream `layer` reads."""
    names = ["hook_embed", stream_hook(layer, model.config.n_layers)]
    names += ["ln_final.hook_scale", "unembed.hook_in"] if frozen else []
    for n in range(layer):
        attn = model.blocks[n].attn
        names += [f"blocks.{n}.hook_mlp_out", f"blocks.{n}.{'hook_attn_out' if by == 'layer' else 'attn.hook_z'}"]
        names += [f"blocks.{n}.hook_dwa_weights"] if model.averaged[n] else []
        if by == "value_path":
            names += [f"blocks.{n}.attn.hook_{x}" for x in ("rot_q", "rot_k")]
            names += [f"blocks.{n}.attn.own.hook_v"] if attn.projections["v"].shared_source is None else []
            mixes = [path for path in attn.coefficients if path in ("v", "output", "pattern")]
            names += [f"blocks.{n}.attn.hook_{path}_mix" for path in mixes]
            names += [*_points_read(attn).values(), *_points_crossed(attn)]
            names += sorted(attn.recipe().needs) if isinstance(attn, JointAttention) else ()
            names += [f"blocks.{n}.ln1.hook_normalized"] if attn.outputs else []
    return list(dict.fromkeys(names))


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
    results = {f".{path}" if path else "": torch.einsum("bphd,hdm->hbpm", read.kept(z), w_o) for path, z in zs.items()}
    return [(f"L{n}H{h}{path}", part[h]) for h in range(model.config.n_heads) for path, part in results.items()]


@torch.no_grad()
def value_paths(model: Transformer, read: Reader, layer: int) -> dict[str, Tensor]:
    """Head outputs [batch, pos, head, d_head] of a layer by where the values come from; they sum to `hook_z`.

    The attention, what mixes the values and what shortcuts add to the head outputs are linear in the values, so each
    part is the layer's own computation with all other values at zero.
    """
    attn: Attention = model.blocks[layer].attn
    stem, wiring, points = f"blocks.{layer}.attn", attn.projections["v"], _points_read(attn)
    values = {j: read(name) for j, name in points.items()}
    weights: dict[Source, Any] = {} if wiring.shared_source is None else {wiring.shared_source: 1.0}
    own: list[tuple[Tensor, Any]] = [(read(f"{stem}.own.hook_v"), 1.0)] if wiring.shared_source is None else []
    if wiring.mixer is not None:
        *shares, last = read(f"{stem}.hook_v_mix").unbind(-1)
        weights, own = dict(zip(wiring.mixed, shares, strict=True)), [(own[0][0], last)]
    others = {name: read(name) for name in _points_crossed(attn)}
    nothing = torch.zeros_like([*values.values(), *(v for v, _ in own)][0])
    absent, unread = dict.fromkeys(values, nothing), [nothing] * len(others)
    through = _through(model, read, attn)
    parts: dict[str, Tensor] = {}
    for j, value in values.items():
        parts[value_path(points[j])] = through(weights.get(j, 0.0) * value, absent | {j: value}, unread)
    for value, weight in own:
        parts["own"] = through(weight * value, absent, unread)
    for i, (name, value) in enumerate(others.items()):
        parts[value_path(name)] = through(nothing, absent, [*unread[:i], value, *unread[i + 1 :]])
    return parts


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
    x = q
    if attn.outputs:  # the attention's input
        x = read(f"{stem}.ln1.hook_normalized") * model.blocks[layer].ln1.weight
        x = x.to(model.embed.weight.dtype)

    def through(v: Tensor, sources: Mapping[Source, Tensor], crossed: Sequence[Tensor]) -> Tensor:
        attends = any(bool(t.any()) for t in (v, *crossed))
        z = joint_attention(softmaxes, [v, *crossed]) if attends else torch.zeros_like(q)
        for shortcut in attn.outputs:
            z = shortcut.output(layer, z, v, sources, x, weights)
        return z.to(read.wide)

    return through


def _logits(model: Transformer, parts: Tensor, seen: Tensor, tokens: Any, against: Any) -> tuple[Tensor, Tensor]:
    """Parts of the normalised stream and the head's input -> (parts, whole) of logits."""
    gain, head = model.ln_final.weight.detach().to(parts.dtype), model.unembed.weight.detach().to(parts.dtype)
    if tokens is None:
        if against is not None:
            raise BadData("`against` needs the `tokens` whose logits it is compared with")
        return parts @ (gain[:, None] * head.T), seen @ head.T
    direction = _rows(model, head, tokens, seen.shape)
    if against is not None:
        direction = direction - _rows(model, head, against, seen.shape)
    return (parts * (gain * direction)).sum(-1), (seen * direction).sum(-1)


def _rows(model: Transformer, head: Tensor, tokens: Any, shape: Sequence[int]) -> Tensor:
    """Rows of the head [batch or 1, pos or 1, d_model] for ids [], [batch] or [batch, pos], or a text."""
    ids = torch.as_tensor(model.to_single_token(tokens) if isinstance(tokens, str) else tokens, device=head.device)
    if ids.ndim == 1:
        ids = ids[:, None]
    if ids.ndim > 2 or ids.is_floating_point() or any(a not in (1, b) for a, b in zip(ids.shape, shape, strict=False)):
        raise BadData(f"tokens of shape {tuple(ids.shape)} do not fit [batch, pos] = {tuple(shape[:2])}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(head):
        raise BadData(f"token ids {int(ids.min())}..{int(ids.max())} leave the vocabulary 0..{len(head) - 1}")
    return head[ids]
