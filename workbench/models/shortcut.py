"""The base class of all architectures: a `Shortcut` changes the vanilla decoder at one or more of these seams.

| seam | place in the decoder | users |
|---|---|---|
| `reshaped` | the shape of the decoder | GQA, MQA |
| `sources`, `weights` | queries, keys, values: a weighted sum of other layers' tensors and the layer's own | ResFormer, SATFormer |
| `shared_source`, `own_heads` | the projections: all or some heads use another layer's tensor, or a table | SVFormer, SkipV1Former |
| `own_value` | the layer's own values, before they are mixed | V-scale, value gates |
| `softmaxes` | the attention: several softmaxes, or one with more columns than own keys | cross-layer attention, sink logits |
| `output` | the head outputs: a term is added | NeuTRENO, identity mapping |
| `gate` | the head outputs, before `hook_z` and W_O: a linear map | gated and exclusive attention |
| `norms` | the norms of a block | sandwich and output norms, DyT |
| `skip` | the skip connections of attention and MLP | the cut-skip control, Attention Residuals |
| `stream_sources`, `stream_weights` | a sublayer's input: a weighted sum of earlier states | DenseFormer, Attention Residuals |
| `connections` | several residual streams: read, mixed and written around each sublayer | hyper-connections, mHC |

Layers are numbered from 0 and sublayers too: 2 n is layer n's attention, 2 n + 1 its MLP, 2 L the final norm.
`prepare` runs once per forward pass, for everything that depends on token ids or on coefficients alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from workbench.config import ModelConfig
from workbench.kernels.joint_and_null_softmax import Softmax

Projection = Literal["q", "k", "v"]
Source = int | str  # a layer, or the name of a table of vectors by token id
State = Literal["own", "effective", "cached"]
Weight = float | Tensor
Weights = Mapping[str, Weight]  # coefficients by the name of what they multiply
Tensors = Mapping[Source, Tensor]
Reads = Mapping[str, Tensors]  # tensors of other layers, by kind (`rot_q`, `rot_k`, `v`) and by source
Skip = Literal["stream", "sum", ""]
SoftmaxForm = Literal["", "softmax", "null", "sets", "mixture"]
COEFFICIENT_UNITS = {"sink_logit": "logits", "depth_query": "norm", "value_threshold": "squared norm"}
Path = Literal["output", "pattern"]
Memory = dict[Any, Any]  # tensors of one forward pass by (tensor, layer, state), and everything that shortcuts prepare


class Shortcut(nn.Module):
    """One difference from the vanilla decoder, at one or more seams."""

    prefix: ClassVar[str]  # name of the submodule, and so of its tensors in a checkpoint
    branch: ClassVar[str] = "cross"
    """Submodule of the hook points that `softmaxes` reads: `cross`, or `source` to share those of mixed tensors."""
    reads: State = "own"  # state of the source tensors: `own`, as their layer projects them, or `effective`, as it attends with them
    detaches: bool = False  # whether gradients stop at the sources that it mixes
    streams: int = 1  # number of residual streams
    norms: str = "pre"  # placement of the norms in a block, one of `norms.PLACEMENTS`
    decays: bool = False  # whether weight decay applies to its coefficients; its matrices always decay
    weighs_tokens: ClassVar[bool] = False
    """Whether its weights depend on the token: [batch, pos, kv_head] for values, [batch, pos, head, source] for the stream."""

    random: ClassVar[Literal["matrices", "all", "none"]] = "matrices"
    """Parameters that `initialise` draws from N(0, init_std); the others keep the values of their construction."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def reshaped(cls, config: ModelConfig, **options: Any) -> ModelConfig:
        """Return the decoder's shape under these options."""
        return config

    def initialise(self, draw: Callable[[str, Tensor], None]) -> None:
        """Fill the `random` parameters: `draw(name, tensor)` fills one from N(0, init_std)."""
        for name, tensor in self.named_parameters():
            is_matrix = tensor.ndim == 2 and min(tensor.shape) > 1
            if self.random == "all" or (is_matrix and self.random == "matrices"):
                draw(name, tensor)

    def prepare(self, tokens: Tensor) -> Memory:
        """Return entries of the memory that no layer computes, once per forward pass."""
        return {}

    def sources(self, tensor: str, layer: int) -> tuple[Source, ...]:
        """Return the layers and tables whose `tensor` this layer reads: q, k or v; rot_q, rot_k or v for `softmaxes`."""
        return ()

    def arriving(self, source: Tensor) -> Tensor:
        """Return a source tensor [batch, pos, head, d_head] as it arrives at the layers that mix it."""
        return source

    def weights(self, projection: Projection, layer: int, memory: Memory, x: Tensor) -> Sequence[Weight]:
        """Return the coefficients of the `sources`, in order, and last of the layer's own tensor.

        x is the layer's input [batch, pos, d_model].
        """
        raise NotImplementedError

    def mixes(self, projection: Projection, layer: int) -> bool:
        """Return whether `weights` defines this tensor of the layer; at most one shortcut of a model may."""
        return overrides(self, "weights") and bool(self.sources(projection, layer))

    def shared_source(self, projection: Projection, layer: int) -> Source:
        """Return the layer or table whose query, key or value `layer` uses unchanged; `layer` if it projects its own.

        If `weights` of the same shortcut defines this tensor too, the shared tensor is multiplied by these weights.
        """
        return layer

    def own_heads(self, projection: Projection, layer: int) -> int:
        """Return the number of heads, the first ones, that a layer with a shared source projects itself."""
        return 0

    def own_value(self, layer: int, v: Tensor, x: Tensor, past: int) -> Tensor:
        """Map the layer's projected values [batch, pos, kv_head, d_head] to its own values, before they are mixed.

        x is the layer's input; `past` is the number of cached positions before the first one.
        """
        return v

    def attends(self, layer: int) -> SoftmaxForm:
        """Return the form of the layer's `softmaxes`, empty for ordinary attention.

        `softmax`: one over the layer's own keys. `null`: the same with one column more, which is no key. `sets`: one over its
        own keys and those of its sources, in this order. `mixture`: a weighted sum of one per source and its own, last.
        """
        return ""

    def softmaxes(self, layer: int, q: Tensor, k: Tensor, read: Reads, weights: Weights) -> list[Softmax]:
        """Return the layer's softmaxes from its rotated q and k [batch, pos, head, d_head] and others', `read["rot_k"][j]`."""
        raise NotImplementedError

    def output(self, layer: int, z: Tensor, v: Tensor, sources: Tensors, weights: Weights) -> Tensor:
        """Add a term to the head outputs z [batch, pos, head, d_head], linear in the effective and source values."""
        return z

    def constants(self, path: Path, layer: int) -> dict[str, float]:
        """Return the coefficients that `output` or `softmaxes` (path `pattern`) receive, by the name of what they multiply.

        Hooks at `attn.hook_output_mix` and `attn.hook_pattern_mix` read and set them.
        """
        return {}

    def gate(self, layer: int, z: Tensor, v: Tensor, x: Tensor) -> Tensor:
        """Map the head outputs z linearly, depending on the effective values v and the layer's input x."""
        return z

    def idle(self, root: Callable[[Projection, int], Source]) -> bool:
        """Return whether it changes nothing if layer n uses the query, key or value of `root(tensor, n)`."""
        return False

    def skip(self, sublayer: int) -> Skip:
        """Return what a sublayer's output is added to: its input (`stream`), the unaveraged input (`sum`), or nothing."""
        return "stream"

    def stream_sources(self, sublayer: int) -> tuple[int, ...]:
        """Return the states that a sublayer's input averages: 0 the embedding, s the state before sublayer s; own last."""
        return ()

    def stream_weights(self, sublayer: int, sources: Sequence[Tensor], memory: Memory) -> Sequence[Weight] | Tensor:
        """Return the coefficients of `stream_sources`; with `weighs_tokens` a head is a chunk of d_model."""
        raise NotImplementedError

    def connections(self, sublayer: int, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return how a sublayer uses `streams` [batch, pos, stream, d_model]: read weights, mixing matrix, write weights.

        Shapes [.., stream], [.., into, from] and [.., stream], with or without batch and pos.
        """
        raise NotImplementedError

    def coefficients(self) -> dict[str, list[float]]:
        """Return the numbers to follow during training: name -> one per layer, NaN for a layer without one."""
        return {}

    def coefficient_rows(self) -> Iterator[tuple[dict[str, Any], float]]:
        """Yield every number of `coefficients` with its axes in telemetry: part, unit and layer."""
        for part, values in self.coefficients().items():
            axes = {"part": part, "unit": COEFFICIENT_UNITS.get(part, "weight")}
            yield from ((axes | {"layer": n}, value) for n, value in enumerate(values) if not math.isnan(value))

    @classmethod
    def options_for(cls, shapes: Mapping[str, Sequence[int]], config: ModelConfig) -> list[dict[str, Any]]:
        """Return every setting under which this shortcut has exactly the tensors in `shapes`, named without prefix."""
        return []


def overrides(shortcut: Shortcut, method: str) -> bool:
    """Return whether a shortcut uses a seam."""
    return getattr(type(shortcut), method) is not getattr(Shortcut, method)


def mix(weights: Sequence[Weight], tensors: Sequence[Tensor]) -> Tensor:
    """Return the weighted sum of tensors, in one pass over each."""
    first = weights[0]
    total = tensors[0] if isinstance(first, float) and first == 1.0 else first * tensors[0]
    for weight, tensor in zip(weights[1:], tensors[1:], strict=True):
        if isinstance(weight, float):
            total = torch.add(total, tensor, alpha=weight)
        else:
            total = torch.addcmul(total, tensor, weight.to(tensor.dtype))
    return total
