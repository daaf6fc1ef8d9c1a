"""Exact decomposition of the residual stream and the logits, in every architecture and in observed decoders.

    parts = workbench.decompose(model, tokens, by="head")
    parts = workbench.decompose(model, cache, to="logits", by="value_path", tokens=answer, against=other)

An `Anatomy` gives a model's parts; each call checks that they sum to the model's own stream or logits. In our models the stream is
linear in the embedding and in the outputs of attentions and MLPs: x = sum over c of w_c o_c, with w_c = 1 except for averaged states,
added embeddings and cut skips. A head adds z_h W_O_h. With a fixed pattern z_h is linear in the values, so it splits by their source:
the layer's own projection, another layer's values, a table.

Source: Elhage et al. (2021), A Mathematical Framework for Transformer Circuits.
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.console import ROWS, notebook_html
from workbench.errors import BadData, WorkbenchError, refuse_unknown
from workbench.hook_names import path_name, position_axis, stream_hook
from workbench.kernels.joint_and_null_softmax import Softmax, joint_attention
from workbench.models.attention_layer import Attention, JointAttention
from workbench.models.hooked import HookedModel, refuse_ids, slice_positions
from workbench.models.shortcut import Source
from workbench.models.transformer import Transformer

By = Literal["layer", "head", "value_path"]
BIAS = "bias"  # label of the constant that the final norm and the head add to the logits

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest error of the sum by the coarsest type of the run, relative to the sum of the parts' magnitudes: at any position the root mean
square over channels of a stream, or the largest of the logits relative to the largest sum."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The final norm and the head in one run: logits = W_U (gain * (x - mean x) / divisor + shift) + bias."""

    centred: bool  # whether the norm subtracts the mean over d_model
    divisor: Tensor  # frozen, [batch, pos, 1]
    gain: Tensor  # [d_model]
    head: Tensor  # W_U, [d_vocab, d_model]
    shift: Tensor | None = None  # [d_model]; None for a norm without a shift
    bias: Tensor | None = None  # [d_vocab]; None for a head without a bias

    def normed(self, x: Tensor) -> Tensor:
        """Return x [..., batch, pos, d_model] normed but before the gain; linear in x."""
        return (x - x.mean(-1, keepdim=True) if self.centred else x) / self.divisor

    @property
    def constant(self) -> Tensor | None:
        """The constant part of the logits [d_vocab], None without one."""
        if self.shift is None:
            return self.bias
        return self.head @ self.shift if self.bias is None else self.head @ self.shift + self.bias


class Anatomy(ABC):
    """The parts of a model's stream and its final norm and head."""

    def __init__(self, model: HookedModel) -> None:
        self.model = model

    @property
    def inner_dtypes(self) -> tuple[torch.dtype, ...]:
        """Types coarser than the activations' to which tensors are rounded between hook points."""
        return ()

    @abstractmethod
    def needed(self, by: str, layer: int, frozen: bool = False) -> list[str]:
        """Return the hook points for a decomposition of stream `layer`; with `frozen` also those of the final norm."""

    @abstractmethod
    def parts(self, read: Reader, by: str, layer: int, through: Tensor | None = None) -> list[tuple[str, Tensor]]:
        """Return (label, [batch, pos, d_model]) of all parts of a stream, or their products with a matrix [d_model, n]."""

    @abstractmethod
    def ending(self, read: Reader) -> Ending:
        """Return the final norm and the head."""

    @abstractmethod
    def adds_values(self, layer: int) -> bool:
        """Return whether a layer adds values to the attention's output at the token's own place, as NeuTRENO does."""

    @abstractmethod
    def run(self, given: Any, names: Sequence[str]) -> tuple[Tensor | None, Mapping[str, Tensor]]:
        """Run tokens or text; return the logits of every position (None without a head) and the named activations."""


class Reader:
    """Reads activations of one run with a batch axis, in float32 or better."""

    def __init__(self, anatomy: Anatomy, given: Any, by: str, layer: int, *, frozen: bool, pos: Any) -> None:
        self.pos, self.batched = pos, True
        self.gates = self  # reader of the run whose gates are used
        self.logits: Tensor | None = None  # of every position, where the run was made here
        self.tensors: Mapping[str, Tensor]
        model, names = anatomy.model, anatomy.needed(by, layer, frozen)
        if hasattr(given, "cache_dict"):  # an ActivationCache
            if given.model is not None and given.model is not model:
                raise BadData("this cache belongs to another model")
            self.tensors, self.batched = given.cache_dict, given.has_batch_dim
        else:
            with torch.no_grad():
                self.logits, self.tensors = anatomy.run(given, names)
        if missing := [n for n in names if n not in self.tensors]:
            raise BadData(f"the cache lacks {', '.join(missing[:4])}: give the tokens, or a cache of the whole run")
        dtypes = [self.tensors[n].dtype for n in names] + [model.embed.weight.dtype]
        self.coarsest = max(dtypes, key=lambda dtype: TOLERANCE[dtype])
        self.wide = torch.float64 if self.coarsest == torch.float64 else torch.float32
        self.coarsest = max((self.coarsest, *anatomy.inner_dtypes), key=lambda dtype: TOLERANCE[dtype])

    def __call__(self, name: str) -> Tensor:
        """Return an activation [batch, ...] at every position."""
        tensor = self.tensors[name].to(self.wide)
        return tensor if self.batched or position_axis(name) is None else tensor[None]

    def cut(self, name: str) -> Tensor:
        """Return an activation [batch, pos, ...] at the selected positions."""
        return self.at_positions(self(name))

    def at_positions(self, tensor: Tensor) -> Tensor:
        return tensor if self.pos is None else slice_positions(tensor, self.pos, axis=1)


OWN = "own"  # label of the values that a layer projects itself


class TransformerAnatomy(Anatomy):
    """The parts of a model of `build`."""

    model: Transformer

    def needed(self, by: str, layer: int, frozen: bool = False) -> list[str]:
        model = self.model
        names = ["hook_embed", stream_hook(layer, model.config.n_layers)]
        names += ["ln_final.hook_scale", "unembed.hook_in"] if frozen else []
        names += model.residual.points(2 * layer)
        for n in range(layer):
            attn = model.blocks[n].attn
            names += [f"blocks.{n}.hook_mlp_out", f"blocks.{n}.{'hook_attn_out' if by == 'layer' else 'attn.hook_z'}"]
            if model.blocks[n].ln1_post is not None and by != "layer":
                names.append(f"blocks.{n}.ln1_post.hook_scale")
            if by == "value_path":
                names += [f"blocks.{n}.attn.hook_{x}" for x in ("rot_q", "rot_k")]
                names += [f"blocks.{n}.attn.own.hook_v"] if attn.projections["v"].projects else []
                mixes = [path for path in attn.coefficients if path in ("v", "output", "pattern")]
                names += [f"blocks.{n}.attn.{attn.weight_points[path]}" for path in mixes]
                names += [*(str(module.hook_v.name) for _, module, _ in attn.reads["v"]), *crossed_points(attn)]
                names += sorted(attn.recipe().needs) if isinstance(attn, JointAttention) else ()
                names += [f"blocks.{n}.ln1.hook_normalized", f"blocks.{n}.attn.hook_v"] if attn.gates else []
        return list(dict.fromkeys(names))

    def parts(self, read: Reader, by: str, layer: int, through: Tensor | None = None) -> list[tuple[str, Tensor]]:
        """Return (label, [batch, pos, d_model]) of outputs, heads or value paths, weighted as in stream `layer`."""

        def mapped(x: Tensor) -> Tensor:
            return x if through is None else x.to(through) @ through

        used = {name: read(name) for name in self.model.residual.points(2 * layer)}
        weights = self.model.stream_paths(layer, cache=used)
        weights = {name: read.at_positions(w) if isinstance(w, Tensor) else w for name, w in weights.items()}
        parts: list[tuple[str, Tensor]] = []
        for name, weight in weights.items():
            if name == "embed":
                parts.append((name, mapped(weight * read.cut("hook_embed"))))
                continue
            n, kind = int(name.split("_")[0]), name.split("_", 1)[1]
            if kind == "mlp_out" or by == "layer":
                parts.append((name, mapped(weight * read.cut(f"blocks.{n}.hook_{kind}"))))
                continue
            by_path, block = by == "value_path", self.model.blocks[n]
            zs = value_paths(self.model, read, n) if by_path else {"": read(f"blocks.{n}.attn.hook_z")}
            w_o, post = block.attn.W_O.detach().to(read.wide), block.ln1_post
            share = 1.0 if post is None else post.share(read.cut(f"blocks.{n}.ln1_post.hook_scale"))
            # a matrix joins W_O, which spares the parts of the stream, unless a factor of each channel stands between them
            early = post is None and not (isinstance(weight, Tensor) and weight.shape[-1] > 1)
            w_o = mapped(w_o) if early else w_o
            outputs = {p: torch.einsum("bphd,hdm->hbpm", read.at_positions(z).to(w_o), w_o) for p, z in zs.items()}
            for h in range(self.model.config.n_heads):
                parts += [
                    (f"L{n}H{h}{'.' * by_path}{path}", weight * out[h] if early else mapped(weight * (share * out[h])))
                    for path, out in outputs.items()
                ]
        return parts

    def ending(self, read: Reader) -> Ending:
        gain, head = (x.detach().to(read.wide) for x in (self.model.ln_final.weight, self.model.unembed.weight))
        return Ending(centred=False, divisor=read.cut("ln_final.hook_scale"), gain=gain, head=head)

    def adds_values(self, layer: int) -> bool:
        return bool(self.model.blocks[layer].attn.outputs)

    def run(self, given: Any, names: Sequence[str]) -> tuple[Tensor, Mapping[str, Tensor]]:
        logits, cache = self.model.run_with_cache(given, names_filter=names)
        return logits, cache.cache_dict


def crossed_points(attn: Attention) -> list[str]:
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
    points: dict[Source, str] = {j: str(module.hook_v.name) for j, module, _ in attn.reads["v"]}
    values: dict[Source, Tensor] = {j: read(name) for j, name in points.items()}
    others = {name: read(name) for name in crossed_points(attn)}
    stem, wiring = f"blocks.{layer}.attn", attn.projections["v"]
    made: dict[Source, Tensor] = {OWN: read(f"{stem}.own.hook_v")} if wiring.projects else {}  # the parts of the values
    if wiring.mixer is not None:
        tensors = {j: values[j] for j in wiring.mixed} | made
        weights = read(f"{stem}.{attn.weight_points['v']}").unbind(-1)
        made = {j: (w[..., None] if w.ndim else w) * x for (j, x), w in zip(tensors.items(), weights, strict=True)}
    elif (shared := wiring.shared_source) is not None and (heads := wiring.own_heads):
        others_heads = values[shared].shape[2] - heads
        made[shared] = F.pad(values[shared][:, :, heads:], (0, 0, heads, 0))
        made[OWN] = F.pad(made[OWN], (0, 0, 0, others_heads))
    elif shared is not None:
        made = {shared: values[shared]}
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
    gated = gate_of(model, read, layer)

    def through(v: Tensor, sources: Mapping[Source, Tensor], crossed: Sequence[Tensor]) -> Tensor:
        attends = any(bool(t.any()) for t in (v, *crossed))
        z = joint_attention(softmaxes, [v, *crossed]) if attends else torch.zeros_like(q)
        for shortcut in attn.outputs:
            z = shortcut.output(layer, z, v, sources, weights)
        return gated(z).to(read.wide)

    return through


def gate_of(model: Transformer, read: Callable[[str], Tensor], layer: int) -> Callable[[Tensor], Tensor]:
    """Return a function that applies a layer's gates to head outputs [batch, pos, head, d_head]."""
    gates, stem = model.blocks[layer].attn.gates, f"blocks.{layer}"
    if not gates:
        return lambda z: z
    x = model.blocks[layer].ln1.gained(read(f"{stem}.ln1.hook_normalized")).to(model.embed.weight.dtype)
    effective = read(f"{stem}.attn.hook_v")
    return lambda z: functools.reduce(lambda y, shortcut: shortcut.gate(layer, y, effective, x), gates, z)


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    """Parts that sum to a stream [component, batch, pos, d_model], or to logits [component, batch, pos (, d_vocab)]."""

    parts: Tensor
    labels: list[str]
    whole: Tensor  # the model's own stream or logits, [batch, pos, ...]

    def __getitem__(self, label: str) -> Tensor:
        label = re.sub(r"\.source\.0$", ".first", label)
        refuse_unknown("component", label, self.labels)
        return self.parts[self.labels.index(label)]

    def _repr_html_(self) -> str:
        table = [("sum", self.whole), *zip(self.labels, self.parts, strict=True)]
        numbers = {label: (x.mean(), x.abs().mean(), x.abs().max()) for label, x in table[:ROWS]}
        rows = "".join(
            f"<tr><th>{label}</th><td>{a:+.3g}</td><td>{b:.3g}</td><td>{c:.3g}</td></tr>"
            for label, (a, b, c) in numbers.items()
        )
        hidden = max(0, len(table) - ROWS) or None
        shape, error = tuple(self.parts.shape[1:]), f"{self.error:.2g}"
        facts = {"shape": shape, "largest error of the sum": error, "not shown": hidden}
        head = "<tr><th>part</th><th>mean</th><th>mean size</th><th>largest size</th></tr>"
        return notebook_html(f"{len(self.parts)} parts and their sum", facts, f"<table>{head}{rows}</table>")

    @property
    def error(self) -> float:
        """Largest absolute difference between the sum of the parts and `whole`."""
        return (self.parts.sum(0) - self.whole).abs().max().item()


def label_parts(label: str) -> tuple[str, int | None, int | None, str | None]:
    """Return (part, layer, head, value path) of a label: `embed`, `bias`, `2_mlp_out`, `2_attn_bias`, `L1H0.first`."""
    if match := re.fullmatch(r"L(\d+)H(\d+)(?:\.(.+))?", label):
        return "attn", int(match[1]), int(match[2]), match[3]
    if "_" not in label:
        return label, None, None, None
    layer, kind, _ = label.split("_")
    return kind, int(layer), None, None


def anatomy_of(model: HookedModel) -> Anatomy:
    """Return the anatomy of a model; raise `BadData` for a model without one."""
    if isinstance(model, Transformer):
        return TransformerAnatomy(model)
    if (observed := getattr(model, "anatomy", None)) is None:
        raise BadData(
            f"a {type(model).__name__} has no known paths to its stream: decompose takes models of `build` and observed ones"
        )
    return observed()


def decompose(
    model: HookedModel,
    given: Any,
    to: int | Literal["final", "logits"] | None = None,
    by: By = "layer",
    *,
    tokens: Any = None,
    against: Any = None,
    pos: Any = None,
    through: Tensor | None = None,
    anatomy: Anatomy | None = None,
) -> Decomposition:
    """Split a stream or logits into parts, labelled as in TransformerLens, and check their sum.

    Args:
        model: A model of `build`, or an observed one.
        given: Token ids or text, or the cache of a run.
        to: Number of a block (its input), L or None (the input of the final norm), `final` (the norm's output before the gain, with a
            frozen scale), or `logits`.
        by: `layer` (`embed`, `0_attn_out`, `0_mlp_out`, ...), `head` (`L0H3` for attention outputs) or `value_path` (`L1H0.own`,
            `L1H0.first`, `L2H0.source.1`, `L2H0.table`, `L1H0.cross`).
        tokens: The tokens of the logits: ids [], [batch] or [batch, pos], or a text of one token. Default: the full vocabulary.
        against: Tokens whose logits are subtracted.
        pos: Positions to return, as `pos_slice` of `run_with_cache`.
        through: Matrix [d_model, n] of which the parts of a stream (`to` a number) are mapped, for example one head's W_Q: far cheaper
            than the parts themselves.
        anatomy: The result of `anatomy_of(model)`, if it is there already.

    Returns:
        Parts in float32 or better. Observed models add `0_attn_bias` (of W_O), `bias` (of the final norm and the head) and, by
        layer, `0_block_out` for a block whose attention and MLP are unknown; their `embed` is the first block's input.

    Raises:
        BadData: The cache lacks an activation, or the observed model does not show its parts.
        WorkbenchError: The parts do not sum to the stream, for example because a hook changed it.
    """
    anatomy = anatomy or anatomy_of(model)
    refuse_unknown("by", by, ("layer", "head", "value_path"))
    layers = model.config.n_layers
    streams: dict[Any, int] = {n: n for n in range(layers + 1)} | {"final": layers, "logits": layers}
    refuse_unknown("stream", to, (None, *streams))
    layer = layers if to is None else streams[to]
    read = Reader(anatomy, given, by, layer, frozen=to in ("final", "logits"), pos=pos)
    with torch.autocast(model.embed.weight.device.type, enabled=False):  # autocast is for the run, not for its parts
        parts = anatomy.parts(read, by, layer, through)
        stacked, labels = torch.stack([part for _, part in parts]), [label for label, _ in parts]
        whole = read.cut(stream_hook(layer, layers))
        if through is not None:
            if to in ("final", "logits"):
                raise BadData(f"`through` maps the parts of a stream, not those of {to}")
            whole = whole.to(through) @ through
        rounded = whole.new_zeros(())
        if to in ("final", "logits"):
            end = anatomy.ending(read)
            stacked, whole = end.normed(stacked), end.normed(whole)
            if to == "logits":
                stacked, whole, rounded = _logits(model, end, read, stacked, tokens, against)
                labels += [BIAS] if len(stacked) > len(labels) else []
        least, size = torch.finfo(stacked.dtype).tiny, stacked.abs().sum(0)
        result, left = Decomposition(parts=stacked, labels=labels, whole=whole), (stacked.sum(0) - whole).abs()
        if to == "logits" or through is not None:
            off = float(left.max() / torch.maximum(size, rounded).max().clamp(min=least))
        else:  # by channel: a massive one excuses nothing in the others
            off = float((left / size.clamp(min=least)).square().mean(-1).sqrt().max())
    if not off <= TOLERANCE[read.coarsest]:
        raise WorkbenchError(
            f"the parts by {by} miss {'stream ' if isinstance(to, int) else ''}{'the stream' if to is None else to} by"
            f" {off:.1e} of their size: it was changed on its way, as by a hook; decompose a run without it"
        )
    return result if read.batched else Decomposition(parts=stacked[:, 0], labels=labels, whole=whole[0])


def _logits(
    model: Any, end: Ending, read: Reader, parts: Tensor, tokens: Any, against: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Map the parts of the normed stream to (parts, whole, size before `against`) of the logits: the run's, or the head's of a cache."""
    inputs, own, constant = read.cut("unembed.hook_in"), read.logits, end.constant
    own = None if own is None else read.at_positions(own.detach().to(read.wide))
    if tokens is None:
        if against is not None:
            raise BadData("`against` needs the `tokens` whose logits it is compared with")
        parts = parts @ (end.gain[:, None] * end.head.T)
        whole = inputs @ end.head.T + (0.0 if end.bias is None else end.bias) if own is None else own
        size = whole.abs()
    else:
        ids = []  # [], [batch, 1] or [batch, pos] from ids [], [batch] or [batch, pos], or from a text
        for given in (x for x in (tokens, against) if x is not None):
            each = model.to_single_token(given) if isinstance(given, str) else given
            each = torch.as_tensor(each, device=end.head.device)
            each, fits = each[:, None] if each.ndim == 1 else each, inputs.shape[:2]
            if (
                each.ndim > 2
                or each.is_floating_point()
                or any(a not in (1, b) for a, b in zip(each.shape, fits, strict=False))
            ):
                raise BadData(f"tokens of shape {tuple(each.shape)} do not fit [batch, pos] = {tuple(fits)}")
            refuse_ids(each, len(end.head))
            ids.append(each)

        def of_tokens(table: Tensor) -> Tensor:
            """Return the rows of `tokens` minus those of `against`."""
            return table[ids[0]] - table[ids[1]] if len(ids) > 1 else table[ids[0]]

        direction = of_tokens(end.head)
        parts = (parts * (end.gain * direction)).sum(-1)
        whole = (inputs * direction).sum(-1) + (0.0 if end.bias is None else of_tokens(end.bias))
        size = whole.abs()
        if own is not None:
            each = [own.gather(-1, i.expand(own.shape[:2])[..., None])[..., 0] for i in ids]
            whole, size = each[0] - each[1] if len(each) > 1 else each[0], torch.stack(each).abs().amax(0)
        constant = None if constant is None else of_tokens(constant)
    return parts if constant is None else torch.cat([parts, constant.expand(1, *parts.shape[1:])]), whole, size
