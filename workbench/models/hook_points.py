"""Hook points without cost while they have no hooks, and the base class of modules with hook points.

Calling a module costs as much as a small operation. `HookedModule.run_hook` therefore calls a hook point only if the model's
`HookState` is enabled and the point has hooks.

Names, arguments and behaviour match TransformerLens' `HookPoint` and `HookedRootModule`. They are implemented here because
importing TransformerLens takes longer than importing PyTorch.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from workbench.errors import WorkbenchError

IN_A_GRAPH = (
    "compiled graphs contain no hooks: compile the model itself, torch.compile(model); if nothing was compiled in this "
    "process yet, do so before its first hook is registered"
)


class HookState:
    """The hook state of a model: `enabled` while a hook point may have hooks; otherwise no hook point is checked.

    Graphs of `torch.compile` contain no hooks and are guarded by `enabled = False`. While it is True, a compiled model has
    another `forward`, which runs outside the graphs, because PyTorch does not notice hooks that are registered later.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.enabled, self.model = model is None, model

    def enable(self) -> None:
        """Check the hook points in later runs."""
        self.enabled = True
        if self.model is not None and "torch._dynamo" in sys.modules:  # else nothing is compiled yet
            self.model.__dict__["forward"] = outside_graphs(self.model)

    def disable(self) -> None:
        """Check no hook point until one gets a hook."""
        self.enabled = False
        if self.model is not None:
            self.model.__dict__.pop("forward", None)


def outside_graphs(model: Any) -> Callable[..., Any]:
    """Return the model's `forward` outside all graphs; ids are checked in one, as fullgraph=True requires a graph."""
    reason = "compiled graphs contain no hooks"
    run = torch.compiler.disable(partial(type(model).forward, model), reason=reason)

    @partial(torch.compiler.disable, recursive=False, reason=reason)
    def forward(tokens: Any, *args: Any, **kwargs: Any) -> Any:
        return run(model.to_tokens(tokens), *args, **kwargs)

    return forward


Direction = Literal["fwd", "bwd", "both"]
HookName = str | Callable[[str], bool]


@dataclass
class HookHandle:
    """A registered hook: PyTorch's handle, the function that it calls, and the level of its `hooks` context."""

    hook: RemovableHandle
    is_permanent: bool = False
    context_level: int | None = None
    user_hook: Callable[..., Any] | None = None


class HookPoint(nn.Module):
    """An identity module with hooks `hook(tensor, hook=point)`, whose results replace the tensor."""

    hook_state = HookState()
    # faster than `nn.Module.__setattr__`, which checks for tensors and modules; a hook point has neither
    __setattr__ = object.__setattr__  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.fwd_hooks, self.bwd_hooks = list[HookHandle](), list[HookHandle]()
        self.ctx: dict[str, Any] = {}
        self.name: str | None = None  # set by `HookedRoot.setup`

    def forward(self, x: Tensor) -> Tensor:
        """Return the tensor; PyTorch's hooks see and replace it."""
        return x

    def extra_repr(self) -> str:
        counts = {"fwd": len(self.fwd_hooks), "bwd": len(self.bwd_hooks)}
        return ", ".join(f"{count} {dir}" for dir, count in counts.items() if count)  # noqa: A001

    def add_hook(
        self,
        hook: Callable[..., Any],
        dir: Literal["fwd", "bwd"] = "fwd",  # noqa: A002  # TransformerLens' name
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        alias: str | None = None,
    ) -> HookHandle:
        """Register a hook on the tensor (`fwd`) or on its gradient (`bwd`); it sees the point under `alias` if given."""
        seen = self
        if alias is not None:  # shares hooks and context, has another name
            seen = copy.copy(self)
            seen.name = alias

        def forward_hook(module: nn.Module, inputs: Any, output: Tensor) -> Any:
            return hook(output, hook=seen)

        def backward_hook(module: nn.Module, gradients_in: Any, gradients: tuple[Tensor]) -> Any:
            result = hook(gradients[0], hook=seen)
            return result if result is None or isinstance(result, tuple) else (result,)

        if dir not in ("fwd", "bwd"):
            raise ValueError(f"dir is {dir!r}; give 'fwd' or 'bwd'")
        register, run, handles = (
            (self.register_forward_hook, forward_hook, self.fwd_hooks)
            if dir == "fwd"
            else (self.register_full_backward_hook, backward_hook, self.bwd_hooks)
        )
        handle = HookHandle(register(run, prepend=prepend), is_permanent, level, hook)
        handles.insert(0 if prepend else len(handles), handle)
        return handle

    def add_perma_hook(self, hook: Callable[..., Any], dir: Literal["fwd", "bwd"] = "fwd") -> None:  # noqa: A002
        """Register a hook that only `remove_hooks(including_permanent=True)` removes."""
        self.add_hook(hook, dir=dir, is_permanent=True)

    def has_hooks(self, dir: Direction = "both", including_permanent: bool = True, level: int | None = None) -> bool:  # noqa: A002
        """Return whether hooks of a direction, or of one `hooks` context, are registered."""
        return any(_matches(h, including_permanent, level) for handles in self._handles(dir) for h in handles)

    def remove_hooks(self, dir: Direction = "fwd", including_permanent: bool = False, level: int | None = None) -> None:  # noqa: A002
        """Remove hooks of a direction, or only the hooks of one `hooks` context."""
        for handles in self._handles(dir):
            for handle in [h for h in handles if _matches(h, including_permanent, level)]:
                handle.hook.remove()
                handles.remove(handle)

    def _handles(self, dir: Direction) -> list[list[HookHandle]]:  # noqa: A002
        if dir not in ("fwd", "bwd", "both"):
            raise ValueError(f"dir is {dir!r}; give 'fwd', 'bwd' or 'both'")
        by_name = {"fwd": self.fwd_hooks, "bwd": self.bwd_hooks}
        return [handles for name, handles in by_name.items() if dir in (name, "both")]

    def clear_context(self) -> None:
        self.ctx = {}

    def layer(self) -> int:
        """Return the layer in a name `blocks.N...`."""
        return int(str(self.name).split(".")[1])

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        handle = super().register_forward_hook(*args, **kwargs)
        self.hook_state.enable()
        return handle

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        handle = super().register_full_backward_hook(*args, **kwargs)
        self.hook_state.enable()
        return handle

    def remove_orphans(self) -> None:
        """Remove hooks of `add_hook` without a handle, which an interrupt can leave."""
        for hooks, handles in ((self._forward_hooks, self.fwd_hooks), (self._backward_hooks, self.bwd_hooks)):
            handled = {handle.hook.id for handle in handles}
            for key, hook in list(hooks.items()):
                if key not in handled and getattr(hook, "__qualname__", "").startswith("HookPoint.add_hook."):
                    del hooks[key]


def _matches(handle: HookHandle, including_permanent: bool, level: int | None) -> bool:
    return (including_permanent or not handle.is_permanent) and (level is None or handle.context_level == level)


def is_hooked(point: nn.Module) -> bool:
    """Return whether a hook point has hooks; raise in a compiled graph, which would store the answer."""
    refuse_graph()
    return has_hooks(point)


def refuse_graph() -> None:
    """Raise in a compiled graph, which would store whether there are hooks; PyTorch then runs that part outside the graph."""
    if torch.compiler.is_compiling():
        raise WorkbenchError(IN_A_GRAPH)


def has_hooks(point: nn.Module) -> bool:
    """Return whether a hook point has hooks, in code that no compiled graph contains."""
    return bool(point._forward_hooks or point._backward_hooks)


def submodules(module: nn.Module) -> list[nn.Module]:
    """Return a module and its submodules once each, without the nested generators of `nn.Module.modules()`."""
    parts, known = [module], {module}
    for part in parts:  # grows
        for child in part._modules.values():
            if child is not None and child not in known:
                known.add(child)
                parts.append(child)
    return parts


def read_only(hook: Callable[..., Any]) -> Any:
    """Mark a hook that never edits its tensor in place, so that it gets no copy."""
    hook.only_reads = True  # type: ignore[attr-defined]
    return hook


def may_write(point: HookPoint) -> bool:
    """Return whether one of a hook point's hooks may edit its tensor in place."""
    readers = {h.hook.id for h in point.fwd_hooks if getattr(h.user_hook, "only_reads", False)}
    hooks = point._forward_hooks.items()
    return any(key not in readers and not getattr(hook, "only_reads", False) for key, hook in hooks)


def frozen_copy(point: HookPoint) -> HookPoint:
    """Return a copy of a hook point with its present hooks."""
    frozen = copy.copy(point)
    for name, value in vars(point).items():
        if isinstance(value, dict | list):
            setattr(frozen, name, copy.copy(value))
    return frozen


class HookedModule(nn.Module):
    """A module with hook points."""

    hook_state = HookState()

    if TYPE_CHECKING:  # hook points and projections are attributes set by name

        def __getattr__(self, name: str) -> Any: ...

    def add_hook_points(self, *names: str) -> None:
        for name in names:
            setattr(self, f"hook_{name}", HookPoint())

    def run_hook(self, name: str, tensor: Tensor) -> Tensor:
        """Run the hooks at the hook point `name` on a tensor."""
        if not self.hook_state.enabled:
            return tensor
        point = getattr(self, name)
        return point(tensor) if is_hooked(point) else tensor

    def run_hook_on_copy(self, name: str, tensor: Tensor) -> Tensor:
        """Run hooks on a copy of a tensor that other layers read too, so an edit in place has no effect there."""
        if not self.hook_state.enabled or not is_hooked(point := getattr(self, name)):
            return tensor
        copy = tensor.clone()
        if torch.compiler.is_compiling() or copy.is_inference():
            return point(copy)
        version = copy._version
        result = point(copy)
        return tensor if result is copy and copy._version == version else result


class HookedRoot(nn.Module):
    """A module with an index of its hook points by name."""

    mod_dict: dict[str, Any]
    hook_dict: dict[str, HookPoint]

    def __init__(self) -> None:
        super().__init__()
        self.context_level = 0  # of nested `hooks`

    def setup(self) -> None:
        """Name all modules and index the hook points; call it when the module is complete."""
        self.mod_dict = {name: module for name, module in self.named_modules() if name}
        self.hook_dict = {name: module for name, module in self.mod_dict.items() if isinstance(module, HookPoint)}
        for name, module in self.mod_dict.items():
            module.name = name

    def hook_points(self) -> Any:
        return self.hook_dict.values()

    def add_hook(self, name: HookName, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Register a hook at a hook point, or at all that a function of the name selects; see `HookPoint.add_hook`."""
        for selected in [name] if isinstance(name, str) else filter(name, self.hook_dict):
            self.hook_dict[selected].add_hook(hook, *args, **kwargs)

    def add_perma_hook(self, name: HookName, hook: Callable[..., Any], dir: Literal["fwd", "bwd"] = "fwd") -> None:  # noqa: A002
        """Register a hook that only `reset_hooks(including_permanent=True)` removes."""
        self.add_hook(name, hook, dir=dir, is_permanent=True)

    def reset_hooks(
        self, clear_contexts: bool = True, direction: Direction = "both", including_permanent: bool = False, level: int | None = None
    ) -> None:  # fmt: skip
        """Remove hooks everywhere, or only the hooks of one `hooks` context, and empty the points' contexts."""
        for point in self.hook_points():
            if clear_contexts:
                point.clear_context()
            if point.fwd_hooks or point.bwd_hooks:
                point.remove_hooks(direction, including_permanent, level)

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[tuple[HookName, Callable[..., Any]]] = (),
        bwd_hooks: Sequence[tuple[HookName, Callable[..., Any]]] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Any]:
        """Register hooks, (name or function of names, hook), and by default remove them at the end."""
        self.context_level += 1
        try:
            for direction, hooks in (("fwd", fwd_hooks), ("bwd", bwd_hooks)):
                for name, hook in hooks:
                    for each in [name] if isinstance(name, str) else filter(name, self.hook_dict):
                        point = self.hook_dict[each]
                        alias = None if each == point.name else each  # which the hook sees
                        point.add_hook(hook, direction, level=self.context_level, alias=alias)  # type: ignore[arg-type]
            yield self
        finally:
            if reset_hooks_end:
                self.reset_hooks(clear_contexts, level=self.context_level)
            self.context_level -= 1

    def run_with_hooks(
        self, *args: Any, fwd_hooks: Any = (), bwd_hooks: Any = (), reset_hooks_end: bool = True,
        clear_contexts: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Run `forward` inside `hooks`."""
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            return self.forward(*args, **kwargs)
