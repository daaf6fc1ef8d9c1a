"""Hook points that cost nothing while none has hooks, and the modules that hold them.

A call of a module costs as much as a small operation, so an idle hook point is not called: `HookedModule.run_hook` calls one
only while its model's `HookState` is enabled and the point has hooks.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformer_lens.hook_points
from torch import Tensor, nn

from workbench.errors import WorkbenchError

IN_A_GRAPH = (
    "hooks are no part of a graph: compile the model itself, torch.compile(model), and where nothing was compiled in this "
    "process yet, before it gets its first hook"
)


class HookState:
    """One per model: `enabled` while a hook point may have hooks. While it is not, no hook point is looked at.

    Graphs of `torch.compile` hold no hooks and are guarded by `enabled = False`. While it is True, a compiled model finds
    another `forward`, which runs outside them: PyTorch itself would not notice a hook that is registered later.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.enabled, self.model = model is None, model

    def enable(self) -> None:
        """Look at the hook points from now on."""
        self.enabled = True
        if self.model is not None and "torch._dynamo" in sys.modules:  # else nothing is compiled yet
            self.model.__dict__["forward"] = outside_graphs(self.model)

    def disable(self) -> None:
        """Look at no hook point until one gets hooks."""
        self.enabled = False
        if self.model is not None:
            self.model.__dict__.pop("forward", None)


def outside_graphs(model: Any) -> Callable[..., Any]:
    """The model's `forward` outside every graph; ids are still checked in one, as fullgraph=True wants one at least."""
    reason = "hooks are no part of a graph"
    run = torch.compiler.disable(partial(type(model).forward, model), reason=reason)

    @partial(torch.compiler.disable, recursive=False, reason=reason)
    def forward(tokens: Any, *args: Any, **kwargs: Any) -> Any:
        return run(model.to_tokens(tokens), *args, **kwargs)

    return forward


class HookPoint(transformer_lens.hook_points.HookPoint):
    """TransformerLens' hook point, which enables its model's hooks when one is registered."""

    hook_state = HookState()
    # a point has no tensors and no modules of its own, and `nn.Module.__setattr__` looks for both at each of its attributes
    __setattr__ = object.__setattr__  # type: ignore[assignment]

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """As in PyTorch."""
        handle = super().register_forward_hook(*args, **kwargs)
        self.hook_state.enable()
        return handle

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """As in PyTorch."""
        handle = super().register_full_backward_hook(*args, **kwargs)
        self.hook_state.enable()
        return handle

    def remove_hooks(self, *args: Any, **kwargs: Any) -> None:
        """As in TransformerLens, at once where there are none."""
        if self.fwd_hooks or self.bwd_hooks:
            super().remove_hooks(*args, **kwargs)

    def remove_orphans(self) -> None:
        """Remove hooks of TransformerLens that were registered and have no handle, as an interrupt can leave them."""
        for hooks, handles in ((self._forward_hooks, self.fwd_hooks), (self._backward_hooks, self.bwd_hooks)):
            handled = {handle.hook.id for handle in handles}
            for key, hook in list(hooks.items()):
                if key not in handled and getattr(hook, "__qualname__", "").startswith("HookPoint.add_hook."):
                    del hooks[key]


def is_hooked(point: nn.Module) -> bool:
    """Whether a hook point has hooks. A graph would keep the answer for good, so none is made of it."""
    if torch.compiler.is_compiling():  # a part of the model, compiled alone: PyTorch goes on outside the graph
        raise WorkbenchError(IN_A_GRAPH)
    return bool(point._forward_hooks or point._backward_hooks)


def reading(hook: Callable[..., Any]) -> Any:
    """Mark a hook that never edits its tensor in place, so that it needs no copy of it."""
    hook.only_reads = True  # type: ignore[attr-defined]
    return hook


def may_write(point: HookPoint) -> bool:
    """Whether one of a hook point's hooks may edit its tensor in place."""
    readers = {h.hook.id for h in point.fwd_hooks if getattr(h.user_hook, "only_reads", False)}
    hooks = point._forward_hooks.items()
    return any(key not in readers and not getattr(hook, "only_reads", False) for key, hook in hooks)


def frozen_copy(point: HookPoint) -> HookPoint:
    """A hook point with the hooks that this one has now, whatever happens to them later."""
    frozen = copy.copy(point)
    for name, value in vars(point).items():
        if isinstance(value, dict | list):
            setattr(frozen, name, copy.copy(value))
    return frozen


class HookedModule(nn.Module):
    """A module with hook points."""

    hook_state = HookState()

    if TYPE_CHECKING:  # hook points and projections are made by name

        def __getattr__(self, name: str) -> Any: ...

    def add_hook_points(self, *names: str) -> None:
        """Add `hook_<name>` for each name."""
        for name in names:
            setattr(self, f"hook_{name}", HookPoint())

    def run_hook(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor as it leaves the hook point `name`; without hooks the point is not called."""
        if not self.hook_state.enabled:
            return tensor
        point = getattr(self, name)
        return point(tensor) if is_hooked(point) else tensor

    def run_hook_on_copy(self, name: str, tensor: Tensor) -> Tensor:
        """As `run_hook`, for a tensor that other layers read too: hooks get a copy, so an edit in place stays here."""
        if not self.hook_state.enabled or not is_hooked(point := getattr(self, name)):
            return tensor
        copy = tensor.clone()
        if torch.compiler.is_compiling() or copy.is_inference():
            return point(copy)
        version = copy._version
        result = point(copy)
        return tensor if result is copy and copy._version == version else result


def cache_submodules(module: nn.Module) -> None:
    """Let attribute lookups find a module's children without `nn.Module.__getattr__`, three times faster.

    `setattr` drops such an entry when it replaces a child; `add_module` on a finished model would not.
    """
    module.__dict__.update({name: child for name, child in module._modules.items() if child is not None})
