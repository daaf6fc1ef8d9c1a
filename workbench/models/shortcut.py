"""What an architecture may change about the vanilla decoder: a few seams, composed, never copied.

| seam | where | who uses it |
|---|---|---|
| `reshaped` | the shape of the decoder | GQA, MQA |
| `shared_source`, `own_heads` | construction: another layer's projection, or a table, for all heads or some | SVFormer, SkipV1Former |
| `own_value` | the layer's own values, before any mixing | V-scale, value gates, the held start |
| `sources`, `weights` | q, k, v: a weighted sum of earlier layers' tensors and the layer's own | ResFormer, SATFormer |
| `softmaxes` | the attention: several softmaxes, or one with more columns than own keys | cross-layer attention, sink logits |
| `output` | after pattern x value: what is added to the head outputs | NeuTRENO, identity mapping |
| `gate` | after that, before `hook_z` and W_O: a linear map of the head outputs | gated and exclusive attention |
| `norms` | the norms of a block | sandwich and output norms, DyT |
| `skip` | around attention and MLP: what passes by | the cut-skip control, Attention Residuals |
| `stream_sources`, `stream_weights` | before a sublayer: a weighted sum of what stood there and earlier | DenseFormer, the same |
| `connections` | around a sublayer: several streams, read, mixed and written | hyper-connections, mHC |

Sublayers are counted through: 2 n is layer n's attention, 2 n + 1 its MLP, 2 L the final norm.
`prepare` runs once per forward pass: what depends on token ids alone, and coefficients that are computed.
A source of a tensor is that tensor as its layer projected it (`reads = "own"`; layer 0's is what layer 0 attends with)
or as it attends with it, after any mixing there (`reads = "effective"`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.errors import UnknownName, WorkbenchError
from workbench.kernels.joint import Softmax

Projection = Literal["q", "k", "v"]
Source = int | str  # a layer, or a table of vectors by token id
State = Literal["own", "effective", "cached"]
Weight = float | Tensor
Weights = Mapping[str, Weight]  # by what they multiply
Tensors = Mapping[Source, Tensor]  # by where they come from
Reads = Mapping[str, Tensors]  # by what they are: rot_q, rot_k, v
Skip = Literal["stream", "sum", ""]
SoftmaxForm = Literal["", "softmax", "null", "sets", "mixture"]
Path = Literal["output", "pattern"]
Memory = dict[Any, Any]  # of one forward pass: (tensor, layer, state) -> tensor, and what shortcuts prepare


class Shortcut(nn.Module):
    """A difference from the vanilla decoder, at one or more seams; layers are numbered from 0."""

    prefix: ClassVar[str]
    """Name of the submodule, hence of its tensors in a checkpoint."""
    branch: ClassVar[str] = "cross"
    """Where the hook points of what its softmaxes read stand: `cross`, or `source` with those of mixed tensors."""
    reads: State = "own"
    detaches: bool = False
    """Whether no gradient flows back to the sources it mixes."""
    streams: int = 1
    """How many residual streams there are."""
    norms: str = "pre"
    """Where the norms of the blocks stand: one of `norms.PLACEMENTS`."""
    decays: bool = False
    """Whether weight decay applies to its coefficients (its matrices decay like all others)."""
    weighs_tokens: ClassVar[bool] = False
    """Whether its weights depend on the token: those of values are then [batch, pos, kv_head], or numbers, those of the
    stream [batch, pos, head, source]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def reshaped(cls, config: ModelConfig, **options: Any) -> ModelConfig:
        """The decoder's shape under these options."""
        return config

    def initialise(self, draw: Callable[[str, Tensor], None]) -> None:
        """Fill what is random at the start: `draw(name, tensor)` fills from N(0, init_std), seeded by model and name.

        Unless a shortcut says otherwise these are its matrices.
        """
        for name, tensor in self.named_parameters():
            if tensor.ndim == 2 and min(tensor.shape) > 1:
                draw(name, tensor)

    def prepare(self, tokens: Tensor) -> Memory:
        """What `weights` and sources read that no layer computes; once per forward pass."""
        return {}

    def shared_source(self, projection: Projection, layer: int) -> Source:
        """The layer or table whose query, key or value `layer` uses as it is; `layer` where it projects its own.

        Where `weights` of the same shortcut defines this tensor too, it is used times these, without an own.
        """
        return layer

    def own_heads(self, projection: Projection, layer: int) -> int:
        """How many of the heads, the first ones, a layer with a shared source still projects itself."""
        return 0

    def own_value(self, layer: int, v: Tensor, x: Tensor, past: int) -> Tensor:
        """The layer's own values [batch, pos, kv_head, d_head] from themselves and its input; `past` positions came before."""
        return v

    def sources(self, tensor: str, layer: int) -> tuple[Source, ...]:
        """Whose `tensor` this shortcut reads at `layer`: of q, k, v; of rot_q, rot_k, v where it defines `softmaxes`."""
        return ()

    def mixes(self, projection: Projection, layer: int) -> bool:
        """Whether `weights` defines this tensor at `layer`; at most one shortcut of a model may."""
        return overrides(self, "weights") and bool(self.sources(projection, layer))

    def weights(self, projection: Projection, layer: int, memory: Memory, x: Tensor) -> Sequence[Weight]:
        """Coefficients of the sources in their order, the layer's own last; x is the layer's input [batch, pos, d_model]."""
        raise NotImplementedError

    def attends(self, layer: int) -> SoftmaxForm:
        """What `softmaxes` makes at `layer`; empty where the attention is the ordinary one.

        `softmax`: one over the layer's own keys; `null`: and a column that is no key, whose share of each row has a hook
        point. `sets`: one over its own keys and those of its sources, in this order.
        `mixture`: one for each source and one of its own, last, summed with weights.
        """
        return ""

    def constants(self, path: Path, layer: int) -> dict[str, float]:
        """Coefficients that `output` (path `output`) or `softmaxes` (`pattern`) multiply with, by what they multiply.

        Hooks at `attn.hook_output_mix` and `attn.hook_pattern_mix` see and set them; both seams get them as `weights`.
        """
        return {}

    def softmaxes(self, layer: int, q: Tensor, k: Tensor, read: Reads, weights: Weights) -> list[Softmax]:
        """The attention of rotated q and k [batch, pos, head, d_head] and of what it reads: `read["rot_k"][j]`."""
        raise NotImplementedError

    def output(self, layer: int, z: Tensor, v: Tensor, sources: Tensors, weights: Weights) -> Tensor:
        """Head outputs [batch, pos, head, d_head] with what is added to them: linear in the effective and source values."""
        return z

    def gate(self, layer: int, z: Tensor, v: Tensor, x: Tensor) -> Tensor:
        """Head outputs as W_O reads them: linear in z, by the effective values and the layer's input [batch, pos, d_model]."""
        return z

    def idle(self, root: Callable[[Projection, int], Source]) -> bool:
        """Whether it changes nothing where `root(tensor, layer)` says whose query, key or value each layer uses."""
        return False

    def skip(self, sublayer: int) -> Skip:
        """What a sublayer's output is added to: `stream`, what it reads; `sum`, what it would read if nothing were averaged."""
        return "stream"

    def stream_sources(self, sublayer: int) -> tuple[int, ...]:
        """What a sublayer reads a weighted sum of: 0 the embedding, s what stands before sublayer s; its own last."""
        return ()

    def stream_weights(self, sublayer: int, sources: Sequence[Tensor], memory: Memory) -> Sequence[Weight] | Tensor:
        """Their coefficients; of `weighs_tokens` a head is a chunk of d_model."""
        raise NotImplementedError

    def connections(self, sublayer: int, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of `streams` [batch, pos, stream, d_model]: their weights in what a sublayer reads [.., stream], how they mix as they
        pass by it [.., into, from], how much of its output each gets [.., stream]; by token, or without batch and pos."""
        raise NotImplementedError

    def coefficients(self) -> dict[str, list[float]]:
        """Numbers worth following over training: name -> one per layer (NaN where a layer has none)."""
        return {}

    @classmethod
    def options_for(cls, shapes: Mapping[str, Sequence[int]], config: ModelConfig) -> list[dict[str, Any]]:
        """Every setting under which this shortcut has just the tensors in `shapes` (its names, without prefix).

        Empty where tensors do not tell.
        """
        return []


def overrides(shortcut: Shortcut, method: str) -> bool:
    """Whether a shortcut uses a seam."""
    return getattr(type(shortcut), method) is not getattr(Shortcut, method)


def mix(weights: Sequence[Weight], tensors: Sequence[Tensor]) -> Tensor:
    """Weighted sum; one pass for each tensor."""
    first = weights[0]
    total = tensors[0] if isinstance(first, float) and first == 1.0 else first * tensors[0]
    for weight, tensor in zip(weights[1:], tensors[1:], strict=True):
        if isinstance(weight, float):
            total = torch.add(total, tensor, alpha=weight)
        else:
            total = torch.addcmul(total, tensor, weight.to(tensor.dtype))
    return total


def chosen_layers(name: str, layers: str | Sequence[int], allowed: range) -> tuple[int, ...]:
    """Layers an option selects: `all`, the `late` last three eighths of the model, its `last_third`, or a list of allowed ones."""
    if layers == "all":
        return tuple(allowed)
    if layers in ("late", "last_third"):
        share = round(3 * allowed.stop / 8) if layers == "late" else allowed.stop // 3
        return tuple(allowed)[-max(1, share) :]
    chosen = () if isinstance(layers, str) else tuple(layers)
    if isinstance(layers, str) or any(isinstance(n, bool) or n not in allowed for n in chosen):
        choices = f"{allowed.start}..{allowed.stop - 1}" if allowed else "none in this model"
        whole = [n for n in chosen if isinstance(n, int) and not isinstance(n, bool)]
        near = sorted({min(max(n, allowed.start), allowed.stop - 1) for n in whole}) if allowed else []
        raise WorkbenchError(
            f"{name}={layers!r}: choose 'all', 'late', 'last_third' or a list from the layers {choices}"
            + (f"; nearest {near}" if near else "")
        )
    return tuple(sorted(set(chosen)))


def number(name: str, value: object, *, minimum: float = -math.inf) -> float:
    """A finite number from `minimum` on; raises `WorkbenchError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise WorkbenchError(f"{name}={value!r}: must be a finite number, as 0.5")
    if value < minimum:
        raise WorkbenchError(f"{name}={value!r}: must be {minimum:g} or more; nearest {minimum:g}")
    return float(value)


def one_of(name: str, value: str, choices: Sequence[str]) -> str:
    """A choice by its name; raises `UnknownName` for anything else."""
    if value not in choices:
        raise UnknownName(name, value, choices)
    return value


def stream_count(streams: int) -> int:
    """A number of streams; raises `WorkbenchError` below one."""
    if isinstance(streams, bool) or not isinstance(streams, int) or streams < 1:
        raise WorkbenchError(f"streams={streams!r}: must be a whole number from 1 on; nearest 1")
    return streams


def one_layer(name: str, layer: int, allowed: range) -> int:
    """A layer an option names; raises `WorkbenchError` with the nearest valid one."""
    if isinstance(layer, bool) or not isinstance(layer, int) or layer not in allowed:
        nearest = min(allowed, key=lambda n: abs(n - layer)) if isinstance(layer, int) and allowed else allowed.start
        raise WorkbenchError(
            f"{name}={layer!r}: must be one of the layers {allowed.start}..{allowed.stop - 1}; nearest {nearest}"
        )
    return layer
