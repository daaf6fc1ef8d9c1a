"""What was recognised in a decoder: its layers, where their tensors pass, and both of its ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from workbench.config import ObservedConfig
from workbench.names import NULL, STATISTICS
from workbench.observing.interception.masks import CAUSAL
from workbench.observing.interception.tensor_layouts import TensorPath
from workbench.observing.recognition.ending import LinearEnding
from workbench.observing.recognition.projections import Projection, TensorLocation
from workbench.observing.recognition.stream_sums import StreamSum
from workbench.observing.recognition.trace import BY_HAND, UNREAD, TracedAttention

UNLIMITED = 2**30
"""Context length, or vocabulary, of a module that does not show it."""


@dataclass(frozen=True)
class Addition(TensorLocation):
    """An output that is added to the stream, times a factor."""

    factor: float = 1.0


@dataclass
class LayerStructure:
    """One run of a block: where its tensors pass."""

    block: str
    run: int  # which of the block's runs, where one is run several times
    stream_in: TensorPath
    stream_out: TensorPath
    attention: TracedAttention
    calls: tuple[int, ...]  # which of the block's fused calls, or of its products, softmaxes and products
    q: Projection | None = None
    k: Projection | None = None
    v: Projection | None = None
    latent: TensorLocation | None = None  # what the matrix of the values reads, where that is narrower than the stream
    z: TensorLocation | None = None  # what W_O multiplies
    changed: str = ""  # what stands between the attention's output and W_O
    attn_out: Addition | None = None
    mlp_out: Addition | None = None
    keeps: tuple[float, float] = (1.0, 0.0)  # how much of what it and the first block read is in its output
    rows: dict[str, Tensor] = field(default_factory=dict)  # of the traced run: stream in and out, own values, z
    mixed: dict[str, tuple[float, float, float]] = field(
        default_factory=dict
    )  # q, k: of the first layer's, of its own, what is left
    inline: tuple[str, ...] = ()  # modules that run in it, where the block itself is no module
    stream: TensorLocation | None = None  # there: what first reads the stream
    has_stream: bool = True  # whether the stream was found
    adds: bool = False  # whether the block makes its stream by adding outputs of its parts to what it reads

    @property
    def is_read(self) -> bool:
        """Whether the block has an attention that can be read."""
        return self.attention.kind != UNREAD

    @property
    def has_statistics(self) -> bool:
        """Whether attention statistics can be given exactly."""
        return self.attention.is_distribution and (self.attention.exact or self.attention.kind == "eager")

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the attention statistics that can be given exactly."""
        null = (NULL,) if self.attention.has_null else ()
        return (*STATISTICS, *null) if self.has_statistics else ()

    @property
    def squares(self) -> tuple[str, ...]:
        """Names of what it shows over queries and keys: the scores of a softmax that is written out are no tensor of its own."""
        if not self.has_statistics:
            return ()
        return ("pattern",) if self.attention.kind == BY_HAND else ("attn_scores", "pattern")

    @property
    def pattern_from_qk(self) -> bool:
        """Whether softmax of q . k under the causal mask alone is the pattern, so that it can be rebuilt from them."""
        return self.attention.exact and self.attention.mask == CAUSAL


@dataclass(frozen=True)
class Table:
    """Vectors that are looked up by token id: which of all such calls it is, and rows of the traced run."""

    run: int
    rows: Tensor


@dataclass
class DecoderStructure:
    """All layers and both ends, and notes on what is unusual."""

    config: ObservedConfig
    layers: list[LayerStructure]
    embed: TensorLocation | None
    head: TensorLocation | None
    final: TensorLocation | None  # what the final norm reads, where that is not the last block's output
    logits: TensorPath | None
    in_place: bool
    positions_first: bool  # whether streams are [pos, batch, d_model]
    notes: list[str]
    ending: LinearEnding | str = ""  # what makes the logits of the last stream; why that is not known, in words
    tables: dict[str, Table] = field(default_factory=dict)  # by name, those wide enough for values, the embedding aside
    arriving: list[StreamSum] = field(default_factory=list)  # of what each block and the final norm read
