"""Structure of a recognised decoder: its layers, the places of their tensors, and both ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from torch import Tensor

from workbench.config import ObservedConfig
from workbench.observing.interception.call_sites import CallSite
from workbench.observing.interception.position_axes import Axes, Layout
from workbench.observing.interception.tensor_paths import TensorPath
from workbench.observing.interception.weight_products_and_lookups import MatrixCall
from workbench.observing.recognition.attention_calls import TracedAttention
from workbench.observing.recognition.least_squares import FrozenNorm, StreamSum
from workbench.observing.recognition.module_runs import Execution, TracedTensor, run_index

UNLIMITED = 2**30
"""Context length or vocabulary of a module that does not show it."""


@dataclass(frozen=True)
class TensorLocation:
    """One input or output tensor of a module: the module's name, its run within the block (or in all), and a path."""

    module: str
    run: int
    path: TensorPath
    axes: Axes = field(kw_only=True)
    site: CallSite | None = field(default=None, kw_only=True)  # where a product outside a module of its own is called
    parameter: str = field(default="", kw_only=True)  # of a lookup that is no module: the table's name

    @classmethod
    def of(cls, entry: Execution, tensor: TracedTensor, among: Iterable[Execution], **more: Any) -> Self:
        """Locate a tensor of an execution; runs of its module are counted among these executions."""
        return cls(module=entry.name, run=run_index(entry, among), path=tensor.path, axes=tensor.axes, **more)


@dataclass(frozen=True)
class Projection(TensorLocation):
    """Columns of an output [batch, pos, width] that are heads; rows are [any, width], heads [any, head, d_head]."""

    columns: slice | tuple[int, ...]
    heads: int

    def heads_in(self, rows: Tensor) -> Tensor:
        columns = rows[:, self.columns if isinstance(self.columns, slice) else list(self.columns)]
        return columns.unflatten(1, (self.heads, -1))

    def with_heads(self, rows: Tensor, heads: Tensor) -> Tensor:
        rows = rows.clone()
        rows[:, self.columns if isinstance(self.columns, slice) else list(self.columns)] = heads.flatten(1)
        return rows


@dataclass(frozen=True)
class Addition(TensorLocation):
    """An output that is added to the stream, times a factor."""

    factor: float = 1.0


@dataclass(frozen=True)
class CallScope:
    """The innermost module run that contains all attention calls of a layer: the module's name and its run within the block."""

    module: str
    run: int


CONSTANT, NORMED = "a combination of", "a norm of each head of a combination of"
GATED = "sums, weighted by token (gates), of"
"""Kinds of combinations of several attentions, in words before their names."""


@dataclass(frozen=True)
class Combination:
    """W_O's input as a combination of several attentions: weights [head, source] and the residual."""

    names: tuple[str, ...]  # attn.0, attn.1, ...
    weights: Tensor  # relative to the first one where a norm of each head follows; means where they depend on the token
    spread: Tensor  # their standard deviations over tokens
    residual: float
    kind: str

    @property
    def words(self) -> str:
        return f"{self.kind} {' and '.join(self.names)}: see value_paths()"


class Mixed(NamedTuple):
    """Weights of the first layer's and the own queries (or keys). Behind a norm only their ratio is known: they sum to 1."""

    first: float
    own: float
    residual: float
    is_normed: bool = False


@dataclass
class Part:
    """One attention of a layer, and the places of its tensors."""

    attention: TracedAttention
    calls: dict[CallSite, str]  # the attention's calls within the scope, and the role of each
    q: Projection | None = None
    k: Projection | None = None
    v: Projection | None = None
    own: Tensor | None = None  # rows of its own values
    latent: TensorLocation | None = None  # input of the value matrix, if that is narrower than the stream


@dataclass(frozen=True)
class BareOutput:
    """A product with W_O that is no module: its call and the layout of its input."""

    call: MatrixCall
    heads_second: bool  # whether its input is [batch, head, pos, d_head]
    by_head: bool  # whether heads have an axis of their own

    def __call__(self, heads: Tensor) -> Tensor:
        """Return rows [row, d_model] for rows of heads [row, head, d_head]."""
        x = heads[None] if self.by_head else heads[None].flatten(2)
        made: Tensor = self.call.run(x.transpose(1, 2) if self.heads_second else x)
        return made.reshape(len(heads), -1)


@dataclass
class LayerStructure:
    """One run of a block and where its tensors pass. The heads of several attentions follow one another."""

    block: str
    run: int  # which run of the block
    stream_in: TensorPath
    stream_out: TensorPath
    parts: list[Part]  # empty if the block has no readable attention
    attention: TracedAttention
    scope: CallScope | None = None
    z: TensorLocation | None = None  # W_O's input
    w_o: BareOutput | None = None  # W_O, if it is no module
    changed: str = ""  # difference between the attention's output and W_O's input, in words
    combination: Combination | None = None  # of several attentions, in W_O's input
    attn_out: Addition | None = None
    mlp_out: Addition | None = None
    keeps: tuple[float, float] = (1.0, 0.0)  # coefficients of its own and the first block's input in its output
    rows: dict[str, Tensor] = field(default_factory=dict)  # of the traced run: stream in and out, own values, z
    mixed: dict[str, Mixed] = field(default_factory=dict)  # q, k: of the first layer's and its own
    inline: tuple[str, ...] = ()  # modules of a block that is no module itself
    caller: str = ""  # of an inline block: the module whose code runs its modules
    stream: TensorLocation | None = None  # of an inline block: the first input that is the stream
    has_stream: bool = True  # whether the block's input and output are the stream
    adds: bool = False  # whether the block adds outputs of its parts to its input
    adds_norms: bool = False  # whether the block adds norms of its parts' outputs, computed outside a module
    axes: tuple[Axes, Axes] = (Axes(), Axes())  # of the stream in and out
    is_normed: bool = False  # whether the block returns a norm's output (BERT)
    router: Any = None  # `Router` of a mixture of experts, or why a module that looks like one is none

    @property
    def is_read(self) -> bool:
        return bool(self.parts)


@dataclass(frozen=True)
class Table:
    """Vectors looked up by token id: the parameter, which of its lookups, rows of the traced run, and how they are read."""

    parameter: str
    run: int
    rows: Tensor  # [row, width]
    columns: slice
    axes: Axes  # of the vectors [..., width] of a lookup
    through: Callable[[Tensor], Any] | None = None  # projection of the vectors before the columns are taken

    def read(self, vectors: Tensor) -> Tensor:
        """Return its vectors [..., width] from those of its lookup [..., any]."""
        return (vectors if self.through is None else self.through(vectors))[..., self.columns]


@dataclass(frozen=True)
class LinearEnding:
    """logits = factor * W norm(x) + bias: linear in the last stream x while the norm's divisors are held fixed."""

    norm: FrozenNorm
    factor: float
    bias: Tensor | None  # float64 [d_vocab]; None where nothing is added
    transposed: bool  # whether the head stores W as [d_model, d_vocab]

    @property
    def words(self) -> str:
        norm = "mean and variance" if self.norm.centred else "root mean square"
        added = [word for word, x in (("shift", self.norm.shift), ("bias of the head", self.bias)) if x is not None]
        return ", ".join([norm, *added, *([f"logits times {self.factor:.4g}"] if abs(self.factor - 1) > 1e-6 else [])])


@dataclass
class DecoderStructure:
    """All layers and both ends, and notes on unusual parts."""

    config: ObservedConfig
    layers: list[LayerStructure]
    embed: TensorLocation | None
    head: TensorLocation | None
    final: TensorLocation | None  # the final norm's input, if that is not the last block's output
    logits: TensorPath | None
    logits_axes: Axes | None  # None if they are of the last position alone
    predicted: int  # number of logits, which may differ from the number of token ids; 0 without logits
    in_place: bool
    layout: Layout  # which positions inside the module are tokens, and the layout of its streams
    notes: list[str]
    block_lists: str = ""  # effect of FlexAttention's block lists in the module's own runs; empty without FlexAttention
    ending: LinearEnding | str = ""  # how logits follow from the last stream; if unknown, the reason in words
    tables: dict[str, Table] = field(default_factory=dict)  # by name, those as wide as values, without the embedding
    arriving: list[StreamSum] = field(default_factory=list)  # sums in the inputs of each block and the final norm
    last_stream: Tensor | None = None  # rows of the final norm's input
    between: list[StreamSum | None] = field(default_factory=list)  # sums in the inputs of each MLP, None if unknown
