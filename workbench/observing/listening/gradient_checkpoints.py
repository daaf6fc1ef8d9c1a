"""Gradient checkpoints in a run with hooks: the recomputation in the backward pass gets the same hooks.

For each call `torch.utils.checkpoint` stores the function of the recomputation in an object. There it is replaced by one that runs
with the hooks of the forward pass, so that nothing outlives the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.utils import checkpoint

from workbench.errors import WorkbenchError
from workbench.observing.interception.call_sites import lines_within, running_frames
from workbench.observing.interception.function_mode import guarded

AGAIN = -1
"""Placeholder for the frame in which a checkpoint calls its function again."""
_NON_REENTRANT = getattr(checkpoint.checkpoint, "__wrapped__", checkpoint.checkpoint).__code__


def follow_checkpoints(run: Any) -> None:
    """Give the hooks of a run to the recomputations of all surrounding checkpoints, each in a new scope.

    Raises:
        WorkbenchError: The module runs within another autograd function, and a hook may change a tensor in it.
    """
    if torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return
    for owner, name, frame in _surrounding_checkpoints():
        function = getattr(owner, name, None)
        if function is None:
            if run.may_write():
                raise WorkbenchError(
                    f"{type(owner).__name__} runs a part of {type(run.module).__name__} without its graph, so hooks would change its "
                    "values and not its gradients: switch it off, or run under torch.no_grad()"
                )
        elif not isinstance(function, _Recomputation):
            run.freeze_hooks()
            again = run.copy()  # with the lines between the checkpoint and the modules around it
            around = running_frames(start=frame)
            frames = {identity for identity, _ in around}
            for i, scope in enumerate(again.scopes):
                if scope.frame in frames:
                    outer = (*lines_within(around, scope.frame), *scope.outer)
                    again.scopes[i] = scope._replace(frame=AGAIN, outer=outer)
            for caller, (at, outer) in again.callers.items():
                if at in frames:
                    again.callers[caller] = AGAIN, (*lines_within(around, at), *outer)
            setattr(owner, name, _Recomputation(again, function))


def _surrounding_checkpoints() -> Iterator[tuple[Any, str, FrameType]]:
    """Yield each checkpoint in the call stack of this run: the object and attribute with the function, and the frame."""
    frame = sys._getframe(1)
    while (frame := frame.f_back) is not None and frame.f_code is not guarded.__code__:  # type: ignore[assignment]
        if frame.f_code is _NON_REENTRANT and (begun := frame.f_locals.get("gen")) is not None:
            if "new_frame" in (inside := begun.gi_frame.f_locals):
                yield inside["new_frame"], "recompute_fn", frame
        elif frame.f_code.co_varnames[:1] == ("ctx",) and isinstance(context := frame.f_locals["ctx"], FunctionCtx):
            yield context, "run_function", frame


class _Recomputation:
    """The function of a checkpoint's recomputation, within a copy of the run at the start of the checkpoint."""

    def __init__(self, run: Any, function: Any) -> None:
        self.run, self.function = run, function

    def __call__(self, *args: Any) -> Any:
        run, frame = self.run.copy(), id(sys._getframe())
        run.scopes = [s._replace(frame=frame) if s.frame == AGAIN else s for s in run.scopes]
        run.callers = {k: (frame if at == AGAIN else at, outer) for k, (at, outer) in run.callers.items()}
        return guarded(run, self.function, *args)
