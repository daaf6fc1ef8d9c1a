"""Identify a call by the code lines from a module's forward to the call.

The lines are the same in every run. They leave out frames of PyTorch and of this package, since hooks and modes add such frames.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

Line = tuple[str, int, tuple[int | None, ...]]
"""File, first line of the function, and where the call is written: line, last line, column, last column."""
Frames = tuple[tuple[int, Line | None], ...]
"""Frames that are running, the innermost first: identity of each, and its line (None: PyTorch's or ours)."""
_LEFT_OUT = tuple(f"{folder}/" for folder in (Path(torch.__file__).parent, Path(__file__).parent.parent))


class CallSite(NamedTuple):
    """One call in a run of a module: its kind, the lines that make it, its number among their calls and the total of these."""

    kind: str
    lines: tuple[Line, ...]
    number: int
    total: int

    @property
    def words(self) -> str:
        """Description of the calls of these lines."""
        file, line, _ = self.lines[0] if self.lines else ("torch", 0, 0)
        calls = f"{self.total} {self.kind} call{'s' if self.total > 1 else ''}"
        return f"{calls} in the function at {Path(file).name}:{line}"


def caller_frame() -> int:
    """Return the identity of the innermost frame of this thread that is not this package's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LEFT_OUT[1]):
        frame = frame.f_back
    return id(frame)


@lru_cache(maxsize=4096)
def _line(code: CodeType, offset: int) -> Line:
    """Return the line of an instruction. Its offset alone depends on how Python runs the call, which `torch.compile` changes."""
    return code.co_filename, code.co_firstlineno, next(islice(code.co_positions(), offset // 2, None))


def running_frames(end: int = 0, start: FrameType | None = None) -> Frames:
    """Return the frames of this thread, innermost first, from `start` to the frame with the identity `end`, without that frame."""
    frame, frames = start or sys._getframe(1), list[tuple[int, Line | None]]()
    while frame is not None and id(frame) != end:
        code = frame.f_code
        left_out = code.co_filename.startswith(_LEFT_OUT)
        frames.append((id(frame), None if left_out else _line(code, frame.f_lasti)))
        frame = frame.f_back  # type: ignore[assignment]  # None at the end
    return tuple(frames)


def lines_within(frames: Frames, end: int = 0) -> tuple[Line, ...]:
    """Return the lines of the frames before the frame with the identity `end`, or of all frames without it."""
    until = next((i for i, (identity, _) in enumerate(frames) if identity == end), len(frames))
    return tuple(line for _, line in frames[:until] if line is not None)
