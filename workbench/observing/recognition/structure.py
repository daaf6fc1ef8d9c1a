"""What was recognised in a decoder: its layers, where their tensors pass, and both of its ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from workbench.config import ObservedConfig
from workbench.observing.interception.call_sites import CallSite
from workbench.observing.interception.matrix_calls import MatrixCall
from workbench.observing.interception.positions import Axes, Layout
from workbench.observing.interception.tensor_layouts import TensorPath
from workbench.observing.recognition.ending import LinearEnding
from workbench.observing.recognition.projections import Projection, TensorLocation
from workbench.observing.recognition.stream_sums import StreamSum
from workbench.observing.recognition.traced_attention import TracedAttention

UNLIMITED = 2**30
"""Context length, or vocabulary, of a module that does not show it."""


@dataclass(frozen=True)
class Addition(TensorLocation):
    """An output that is added to the stream, times a factor."""

    factor: float = 1.0


@dataclass(frozen=True)
class Scope:
    """The innermost run of a module in which all attention calls of a layer are made: its name, which of its runs in the block."""

    module: str
    run: int


CONSTANT, NORMED, GATED = (
    "a combination of",
    "a norm of each head of a combination of",
    "sums, weighted by token (gates), of",
)
"""What a combination of several attentions is, in words before their names."""


@dataclass(frozen=True)
class Combination:
    """What W_O reads of several attentions: weights [head, source], and what they leave of it."""

    names: tuple[str, ...]  # attn.0, attn.1, ...
    weights: Tensor  # over the first one's where a norm of each head follows; means where they depend on the token
    spread: Tensor  # their standard deviations over tokens
    residual: float
    kind: str

    @property
    def words(self) -> str:
        """It in words."""
        return f"{self.kind} {' and '.join(self.names)}: see value_paths()"


class Mixed(NamedTuple):
    """Weights of the first layer's queries or keys and of the own ones, what they leave, whether a norm follows.

    Behind a norm the weights are known but for a factor; they sum to 1.
    """

    first: float
    own: float
    residual: float
    is_normed: bool = False


@dataclass
class Part:
    """One attention of a layer, and where its tensors pass."""

    attention: TracedAttention
    calls: dict[CallSite, str]  # which of the scope's calls it is made of, and what each is
    q: Projection | None = None
    k: Projection | None = None
    v: Projection | None = None
    own: Tensor | None = None  # rows of its own values
    latent: TensorLocation | None = None  # what the matrix of the values reads, where that is narrower than the stream


@dataclass(frozen=True)
class BareOutput:
    """A product with W_O that is no module: its call, and how its input lies."""

    call: MatrixCall
    heads_second: bool  # whether it reads [batch, head, pos, d_head]
    by_head: bool  # whether heads have an axis of their own

    def __call__(self, heads: Tensor) -> Tensor:
        """Rows [row, d_model] of rows of heads [row, head, d_head]."""
        x = heads[None] if self.by_head else heads[None].flatten(2)
        made: Tensor = self.call.run(x.transpose(1, 2) if self.heads_second else x)
        return made.reshape(len(heads), -1)


@dataclass
class LayerStructure:
    """One run of a block: where its tensors pass. Of several attentions their heads stand one after the other."""

    block: str
    run: int  # which of the block's runs, where one is run several times
    stream_in: TensorPath
    stream_out: TensorPath
    parts: list[Part]  # empty where the block has no attention that can be read
    attention: TracedAttention
    scope: Scope | None = None
    z: TensorLocation | None = None  # what W_O multiplies
    w_o: BareOutput | None = None  # that matrix, where it is no module
    changed: str = ""  # what stands between the attention's output and W_O
    combination: Combination | None = None  # of what it reads, where that is one of several attentions
    attn_out: Addition | None = None
    mlp_out: Addition | None = None
    keeps: tuple[float, float] = (1.0, 0.0)  # how much of what it and the first block read is in its output
    rows: dict[str, Tensor] = field(default_factory=dict)  # of the traced run: stream in and out, own values, z
    mixed: dict[str, Mixed] = field(default_factory=dict)  # q, k: of the first layer's and its own
    inline: tuple[str, ...] = ()  # modules that run in it, where the block itself is no module
    caller: str = ""  # there: the module whose code runs them
    stream: TensorLocation | None = None  # there: what first reads the stream
    has_stream: bool = True  # whether the stream was found
    adds: bool = False  # whether the block makes its stream by adding outputs of its parts to what it reads
    adds_norms: bool = (
        False  # whether it adds norms of its parts' outputs, which are functions and no outputs themselves
    )
    axes: tuple[Axes, Axes] = (Axes(), Axes())  # of the stream that it reads and the one that it returns
    is_normed: bool = False  # whether what the block returns is a norm's output (BERT)

    @property
    def is_read(self) -> bool:
        """Whether the block has an attention that can be read."""
        return bool(self.parts)

    def found(self, name: str) -> bool:
        """Whether each of its attentions shows a projection: q, k, v or latent."""
        return bool(self.parts) and all(getattr(part, name) is not None for part in self.parts)


@dataclass(frozen=True)
class Table:
    """Vectors that are looked up by token id: in which parameter, by which of its lookups, rows of the traced run, how they are read."""

    parameter: str
    run: int
    rows: Tensor  # [row, width]
    columns: slice
    axes: Axes  # of the vectors [..., width] that a lookup gives
    through: Callable[[Tensor], Any] | None = None  # what is done to the vectors before the columns are taken

    def read(self, vectors: Tensor) -> Tensor:
        """Its vectors [..., width] among those of its lookup [..., any], which may be projected first."""
        return (vectors if self.through is None else self.through(vectors))[..., self.columns]


@dataclass
class DecoderStructure:
    """All layers and both ends, and notes on what is unusual."""

    config: ObservedConfig
    layers: list[LayerStructure]
    embed: TensorLocation | None
    head: TensorLocation | None
    final: TensorLocation | None  # what the final norm reads, where that is not the last block's output
    logits: TensorPath | None
    logits_axes: Axes | None  # None where they are of the last position alone
    predicted: int  # ids that have a logit, which need not be as many as can be read; 0 without logits
    in_place: bool
    layout: Layout  # which positions inside the module are tokens, and how its streams lie
    notes: list[str]
    block_lists: str = ""  # what those of FlexAttention's BlockMasks do in its own runs; empty without FlexAttention
    ending: LinearEnding | str = ""  # what makes the logits of the last stream; why that is not known, in words
    tables: dict[str, Table] = field(default_factory=dict)  # by name, those wide enough for values, the embedding aside
    arriving: list[StreamSum] = field(default_factory=list)  # of what each block and the final norm read
    last_stream: Tensor | None = None  # rows of what the final norm reads
    between: list[StreamSum | None] = field(
        default_factory=list
    )  # of what the MLP of each block reads, where that was found
