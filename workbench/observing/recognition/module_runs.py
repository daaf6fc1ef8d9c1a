"""Runs of submodules in a traced run, and a few rows of the tensors that pass through them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from workbench.observing.interception.call_sites import Frames
from workbench.observing.interception.position_axes import Axes
from workbench.observing.interception.tensor_paths import TensorPath
from workbench.observing.interception.weight_products_and_lookups import MatrixCall

MATRIX = "(matrix)"
"""Replaces a module's name for a product with a parameter outside a module of its own; its runs are counted within a block."""
LOOKUP = "(lookup)"
"""Replaces a module's name for a lookup in a parameter, which `kind` names; its runs are counted over the whole module."""


@dataclass
class TracedTensor:
    """A tensor that passed: its path among inputs or outputs, rows [position, width], shape and axes."""

    path: TensorPath
    rows: Tensor
    shape: tuple[int, ...]
    axes: Axes


@dataclass
class Execution:
    """One run of one submodule."""

    name: str
    kind: str
    parent: Execution | None
    start: int
    end: int = -1
    inputs: list[TracedTensor] = field(default_factory=list)
    outputs: list[TracedTensor] = field(default_factory=list)
    indices: list[TracedTensor] = field(default_factory=list)
    """Outputs of whole numbers with the shape of one of its others."""
    reads_tokens: bool = False
    call: MatrixCall | None = None  # of a product outside a module of its own, without its input
    size: int = 0  # of a lookup: number of vectors in the table
    place: tuple[str, int, str] = ("", 0, "")  # its name, number of earlier runs, input or output
    frame: int = 0  # the Python frame that runs it
    frames: Frames = ()  # of a product outside a module of its own: where it is called

    def stack(self) -> list[Execution]:
        """Return the executions around it, from the outermost to itself."""
        return [*(self.parent.stack() if self.parent else []), self]

    def holds(self, time: int) -> bool:
        """Return whether it was running at a time."""
        return self.start < time < self.end


def rows_at(tensors: list[TracedTensor], path: TensorPath) -> Tensor | None:
    """Return the rows of the tensor at a path; None without one."""
    return next((t.rows for t in tensors if t.path == path), None)


def run_index(entry: Execution, among: Iterable[Execution]) -> int:
    """Count the earlier runs of an execution's module among these."""
    return sum(other.name == entry.name and other.start < entry.start for other in among)
