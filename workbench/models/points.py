"""Hook points that cost nothing while nobody listens, and the modules that hold them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

if TYPE_CHECKING:
    from workbench.models.hooked import HookedModel


class Switch:
    """One per model: `on` where somebody may be listening. Off, no hook point is even looked at.

    Graphs of `torch.compile` know no hooks and are guarded by `on = False`. While it is on, a compiled model finds another
    `forward`, which runs outside them: PyTorch itself would take no notice of a hook that comes later.
    """

    def __init__(self, model: HookedModel | None = None) -> None:
        self.on, self.model = model is None, model

    def listen(self) -> None:
        """Look at the hook points from now on."""
        self.on = True
        if self.model is not None and "torch._dynamo" in sys.modules:  # else nothing is compiled yet
            self.model.__dict__["forward"] = uncompiled(self.model)

    def rest(self) -> None:
        """Look at no hook point, until somebody listens again."""
        self.on = False
        if self.model is not None:
            self.model.__dict__.pop("forward", None)


def uncompiled(model: HookedModel) -> Callable[..., Any]:
    """The model's `forward` outside every graph; ids are still checked in one, as fullgraph=True wants one at least."""
    reason = "hooks and key-value caches are no part of a graph"
    run = torch.compiler.disable(partial(type(model).forward, model), reason=reason)

    @partial(torch.compiler.disable, recursive=False, reason=reason)
    def forward(tokens: Any, *args: Any, **kwargs: Any) -> Any:
        return run(model.to_tokens(tokens), *args, **kwargs)

    return forward


class Point(HookPoint):
    """A hook point that turns its model's switch on when somebody begins to listen."""

    switch = Switch()

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """As in PyTorch."""
        handle = super().register_forward_hook(*args, **kwargs)
        self.switch.listen()
        return handle

    def remove_hooks(self, *args: Any, **kwargs: Any) -> None:
        """As in TransformerLens, at once where there are none."""
        if self.fwd_hooks or self.bwd_hooks:
            super().remove_hooks(*args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """As in PyTorch."""
        handle = super().register_full_backward_hook(*args, **kwargs)
        self.switch.listen()
        return handle


class Part(nn.Module):
    """A module with hook points; they and its projections are made by name."""

    switch = Switch()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def hooked(point: HookPoint) -> bool:
    """Whether anything listens at a hook point. A graph would keep the answer for good, so none is made of it."""
    if torch.compiler.is_compiling():  # a part of the model, compiled alone: PyTorch goes on outside the graph
        raise WorkbenchError("hooks are no part of a graph: compile the model itself, torch.compile(model)")
    return bool(point._forward_hooks or point._backward_hooks)


def at(part: Any, name: str, tensor: Tensor) -> Tensor:
    """A tensor as it leaves the hook point `name` of a part; without hooks the point is not called."""
    if not part.switch.on:
        return tensor
    point = getattr(part, name)
    return point(tensor) if hooked(point) else tensor


def lent(part: Any, name: str, tensor: Tensor) -> Tensor:
    """As `at`, for a tensor that others read too: hooks get a copy, so that an edit in place (patching does) stays here."""
    if not part.switch.on or not hooked(point := getattr(part, name)):
        return tensor
    copy = tensor.clone()
    if torch.compiler.is_compiling() or copy.is_inference():
        return point(copy)
    version = copy._version
    found = point(copy)
    return tensor if found is copy and copy._version == version else found


def keep(module: nn.Module) -> None:
    """Let attribute lookups find a module's children without `nn.Module.__getattr__`, three times faster.

    `setattr` drops such an entry when it replaces a child; `add_module` on a finished model would not.
    """
    module.__dict__.update({name: child for name, child in module._modules.items() if isinstance(child, nn.Module)})
