"""Gradient checkpoints in a run with hooks: the part of the forward pass that the backward pass computes again gets the same hooks.

`torch.utils.checkpoint` keeps the function that it will call again, in an object of its own for each call. This function is
replaced there by one that listens as the run did, with the hooks of then, so nothing outlives the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.utils import checkpoint

from workbench.errors import WorkbenchError
from workbench.observing.interception.call_sites import lines_within, running_frames
from workbench.observing.interception.function_mode import Scope, guarded
from workbench.observing.listening.run import HookedRun

AGAIN = -1
"""Stands for the frame in which a checkpoint calls its function again."""
_NON_REENTRANT = getattr(checkpoint.checkpoint, "__wrapped__", checkpoint.checkpoint).__code__


def follow_checkpoints(run: HookedRun, scope: Callable[[HookedRun], Scope]) -> None:
    """Give the hooks of a run to what the checkpoints around this moment will compute again, each time in a new scope.

    Raises:
        WorkbenchError: An autograd function that is no checkpoint runs the module, and a hook may change a tensor in it.
    """
    if torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return
    for owner, name, frame in _checkpoints():
        function = getattr(owner, name, None)
        if function is None:
            if run.may_write():
                raise WorkbenchError(
                    f"{type(owner).__name__} runs a part of {type(run.module).__name__} without its graph, so hooks would change its "
                    "values and not its gradients: switch it off, or run under torch.no_grad()"
                )
        elif not isinstance(function, _ListenedAgain):
            run.freeze_hooks()
            setattr(owner, name, _ListenedAgain(_within(run.copy(), frame), scope, function))


def _within(run: HookedRun, checkpoint: FrameType) -> HookedRun:
    """Note which lines lie between a checkpoint and the modules around it whose calls are told apart by their lines."""
    around = running_frames(start=checkpoint)
    frames = {identity for identity, _ in around}
    for i, made in enumerate(run.scopes):
        if made.frame in frames:
            run.scopes[i] = made._replace(frame=AGAIN, outer=(*lines_within(around, made.frame), *made.outer))
    for name, (frame, outer) in run.callers.items():
        if frame in frames:
            run.callers[name] = AGAIN, (*lines_within(around, frame), *outer)
    return run


def _checkpoints() -> Iterator[tuple[Any, str, FrameType]]:
    """Objects that hold a function to call again, its attribute and the frame, for every checkpoint in the call stack of this run."""
    frame = sys._getframe(1)
    while (frame := frame.f_back) is not None and frame.f_code is not guarded.__code__:  # type: ignore[assignment]
        if frame.f_code is _NON_REENTRANT and (begun := frame.f_locals.get("gen")) is not None:
            if "new_frame" in (inside := begun.gi_frame.f_locals):
                yield inside["new_frame"], "recompute_fn", frame
        elif frame.f_code.co_varnames[:1] == ("ctx",) and isinstance(context := frame.f_locals["ctx"], FunctionCtx):
            yield context, "run_function", frame


class _ListenedAgain:
    """A function that a checkpoint calls again, within a copy of the run as it was when the checkpoint began."""

    def __init__(self, run: HookedRun, scope: Callable[[HookedRun], Scope], function: Any) -> None:
        self.run, self.scope, self.function = run, scope, function

    def __call__(self, *args: Any) -> Any:
        run, frame = self.run.copy(), id(sys._getframe())
        run.scopes = [made._replace(frame=frame) if made.frame == AGAIN else made for made in run.scopes]
        run.callers = {k: (frame if at == AGAIN else at, outer) for k, (at, outer) in run.callers.items()}
        return guarded(self.scope(run), self.function, *args)
