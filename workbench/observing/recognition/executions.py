"""Runs of submodules in a traced run, and the tensors that passed through them, of which a few rows are kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from workbench.observing.interception.call_sites import Frames
from workbench.observing.interception.matrix_calls import MatrixCall
from workbench.observing.interception.positions import Axes
from workbench.observing.interception.tensor_layouts import TensorPath

MATRIX = "(matrix)"
"""Stands for a module's name where a product with a parameter is called by itself; its runs are counted in a block."""
LOOKUP = "(lookup)"
"""Stands for a module's name where vectors are looked up in a parameter; its runs are counted in all, `kind` names the parameter."""


@dataclass
class TracedTensor:
    """A tensor as it passed: its path among inputs or outputs, its rows [position, width], its axes."""

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
    reads_tokens: bool = False
    call: MatrixCall | None = None  # of a product that no module makes alone, without its input
    size: int = 0  # of a lookup: vectors in the table
    place: tuple[str, int, str] = ("", 0, "")  # its name, how often that ran before, input or output
    frame: int = 0  # the Python frame that runs it
    frames: Frames = ()  # where it is called, of a product that is no module

    def stack(self) -> list[Execution]:
        """From the outermost module to this one."""
        return [*(self.parent.stack() if self.parent else []), self]

    def holds(self, time: int) -> bool:
        """Whether it was running at a time."""
        return self.start < time < self.end


def rows_at(tensors: list[TracedTensor], path: TensorPath) -> Tensor | None:
    """Rows of the tensor at a path, None where there is none."""
    return next((t.rows for t in tensors if t.path == path), None)
