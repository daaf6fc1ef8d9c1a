"""Function mode that passes the attention calls of a forward pass to a handler, in one thread and for one run.

The mode sees every torch function that the module calls, so the module is not edited. Functions of Hugging Face's
`AttentionInterface` (flash, flex, custom ones) are intercepted in the interface.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from types import FunctionType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from workbench.kernels.pytorch_switches import COMPILED_CODE, FAST_PATH, ProcessSwitch
from workbench.models.hook_points import submodules
from workbench.observing.interception.eager_attention_products import PRODUCTS, ProductCall, product_call
from workbench.observing.interception.flash_calls import flash_call, is_flash
from workbench.observing.interception.sdpa_and_flex_attention import FusedCall, flex_call, interface_call, sdpa_call
from workbench.observing.interception.weight_products_and_lookups import (
    Lookup,
    MatrixCall,
    indexed_parameter,
    is_parameter,
    matrix_call,
)

ATTENTION_LIKE = re.compile(r"attn|attention|flash|sdpa|encoder_layer_fwd", re.IGNORECASE)
MATRICES = ("linear", "addmm", "matmul", "__matmul__", "mm", "einsum")
_KINDS = {
    "scaled_dot_product_attention": "fused",
    "softmax": "softmax",
    "multi_head_attention_forward": "composite",
    "embedding": "lookup",
    "__getitem__": "index",
    "index_select": "index",
}
_WRITES = re.compile(r"\w*[^\W_]_|__i[a-z]+__|__setitem__")  # names of functions that write in place
_SEEN_BY_MODE = ("eager", "sdpa", "flex_attention")  # these call torch functions
_FUSED = {"fused": sdpa_call, "flex": flex_call, "flash": flash_call}

Failed = Callable[[Exception], object]
"""Takes an error of a handler or hook in a run that must continue without hooks, for example in a training."""


class CallHandler(Protocol):
    """Handler of intercepted calls; each method runs the call and returns its result to the module. Some need not be handled."""

    reads_matrices: bool = True  # whether `matrix` is called
    reads_tables: bool = True  # whether `looked_up` is called

    def fused(self, call: FusedCall) -> Any:
        """Handle a fused attention."""

    def product(self, call: ProductCall) -> Any:
        """Handle a product of two tensors of three axes or more."""

    def softmax(self, scores: Tensor, run: Callable[[Tensor], Tensor], axis: int) -> Tensor:
        """Handle a softmax over the last axis, which is `axis` in the module."""

    def matrix(self, call: MatrixCall) -> Any:
        """Handle a product with a parameter or a view of one, or any `linear`."""

    def looked_up(self, lookup: Lookup) -> Any:
        """Handle a finished lookup of vectors by ids."""

    def other(self, name: str) -> None:
        """Note a function that may be an attention in another form, by name."""
        return

    def wrote(self) -> None:
        """Note that a tensor was written in place."""
        return

    def tanh(self, shape: torch.Size) -> None:
        """Note a tanh of a tensor, which may be a soft cap of scores or logits."""
        return


@functools.cache
def _kind(function: Any) -> str | None:
    """Return the kind of a torch function, which selects the handler method; None for most functions."""
    name = _name(function)
    if name in PRODUCTS or name == "einsum":
        return "product"
    if name in MATRICES:
        return "matrix"
    if isinstance(function, HigherOrderOperator) and name == "flex_attention":
        return "flex"
    if is_flash(function):
        return "flash"
    if name == "tanh" or _WRITES.fullmatch(name):
        return "writing"
    return _KINDS.get(name) or ("other" if ATTENTION_LIKE.search(_full_name(function)) else None)


def _name(function: Any) -> str:
    return getattr(function, "__name__", "") or str(function)


def _full_name(function: Any) -> str:
    """Return a function's name, with the library of a torch operator: kernels of the Hub are called `fwd`."""
    operators = torch._ops.OpOverload, torch._ops.OpOverloadPacket
    return str(function) if isinstance(function, operators) else _name(function)


class InterceptionMode(TorchFunctionMode):
    """Passes the parts of attention to a handler; every other call runs at once."""

    def __init__(self, handler: CallHandler, failed: Failed | None = None) -> None:
        super().__init__()
        self.handler, self.failed = handler, failed
        self.silent = False  # within a handled call, or a hook that the handler calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _kind(func)
        if kind is None or self.silent:  # nearly always
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        try:
            return self._handled(kind, func, args, kwargs)
        except Exception as error:
            self.take(error)
            return func(*args, **kwargs)

    def take(self, error: Exception) -> None:
        """Report an error and pass all further calls; raise it if nothing takes errors, or a recomputation has finished."""
        if self.failed is None or isinstance(error, checkpoint._StopRecomputationError):
            raise error
        self.failed(error)
        self.silent = True

    def _handled(self, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        if kind == "matrix" and not self.handler.reads_matrices:
            return func(*args, **kwargs)
        if kind in _FUSED:
            return self.handler.fused(_FUSED[kind](func, args, kwargs))
        if kind == "writing":
            out = func(*args, **kwargs)
            self.handler.wrote()
            if _name(func) in ("tanh", "tanh_"):
                self.handler.tanh(out.shape)
            return out
        if kind in ("lookup", "index"):
            out = func(*args, **kwargs)
            if not self.handler.reads_tables:
                return out
            ids, table = (*args, *kwargs.values())[:2]
            lookup = Lookup(ids, table, out) if kind == "lookup" else indexed_parameter(args, kwargs, out)
            return out if lookup is None else self.handler.looked_up(lookup)
        if kind == "softmax":
            scores = args[0] if args else kwargs.get("input")
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            if not isinstance(scores, Tensor) or scores.ndim < 3 or not isinstance(dim, int):
                return func(*args, **kwargs)
            rest = {key: value for key, value in kwargs.items() if key != "input"}
            if (axis := dim % scores.ndim) == scores.ndim - 1:
                return self.handler.softmax(scores, lambda x: func(x, *args[1:], **rest), axis)

            def run(moved: Tensor) -> Tensor:
                return func(moved.movedim(-1, axis), *args[1:], **rest).movedim(axis, -1)

            return self.handler.softmax(scores.movedim(axis, -1), run, axis).movedim(-1, axis)
        if kind == "composite":  # run its code in this mode, which sees the calls within
            names = func.__globals__ | {"has_torch_function": lambda tensors: False}
            plain = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
            with self:
                return plain(*args, **kwargs)
        if kind == "other":
            self.handler.other(_full_name(func))
            return func(*args, **kwargs)
        if _name(func) == "linear" or any(is_parameter(x) for x in (*args, *kwargs.values())):
            reads = self.handler.reads_matrices
            return self.handler.matrix(matrix_call(func, args, kwargs)) if reads else func(*args, **kwargs)
        call = product_call(func, args, kwargs) if kind == "product" else None
        return func(*args, **kwargs) if call is None else self.handler.product(call)


def attention_functions(module: nn.Module) -> list[str]:
    """Return the functions of Hugging Face's `AttentionInterface` that submodules use and the mode cannot see."""
    names = {getattr(getattr(part, "config", None), "_attn_implementation", None) for part in submodules(module)}
    return sorted(name for name in names if isinstance(name, str) and name not in _SEEN_BY_MODE)


_DEVICES = ("cpu", "cuda")
_INTERFACE: dict[str, ProcessSwitch] = {}  # functions of Hugging Face's `AttentionInterface`, by name


def _interface_switch(table: Any, name: str) -> ProcessSwitch:
    """Return a switch that replaces a function of the interface by one that passes calls to the mode of its thread."""

    def change(before: tuple[Any, bool]) -> None:
        original = before[0]

        @wraps(original)
        def intercepted(*args: Any, **kwargs: Any) -> Any:
            modes = [m for m in torch.overrides._get_current_function_mode_stack() if isinstance(m, InterceptionMode)]
            if not modes or (mode := modes[-1]).silent:
                return original(*args, **kwargs)

            def silently(*args: Any, **kwargs: Any) -> Any:
                mode.silent = True
                try:
                    return original(*args, **kwargs)
                finally:
                    mode.silent = False

            return mode.handler.fused(interface_call(silently, args, kwargs))

        table[name] = intercepted

    def restore(before: tuple[Any, bool]) -> None:
        if before[1]:
            table[name] = before[0]
        else:
            table._local_mapping.pop(name, None)

    return ProcessSwitch(lambda: (table[name], name in table._local_mapping), change, restore)


class PreservedState:
    """A scope after which a thread has its earlier function modes, gradient mode and autocast, also after an interrupt.

    An interrupt that arrives in the `__exit__` of `no_grad` or `autocast` would leave their setting.
    """

    def __init__(self) -> None:
        self.depth, self.state = torch.overrides._len_torch_function_stack(), _thread_state()

    def begin(self) -> None:
        """Change nothing."""

    def end(self) -> None:
        """Restore the state; may be called twice."""
        while torch.overrides._len_torch_function_stack() > self.depth:
            torch.overrides._pop_mode()
        if (state := _thread_state()) != self.state:
            torch._C._set_grad_enabled(self.state.gradients)
            for device, enabled in zip(_DEVICES, self.state.autocast, strict=True):
                torch.set_autocast_enabled(device, enabled)
            for _ in range(state.nesting - self.state.nesting):
                torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()


class Interception(PreservedState):
    """The interception of calls in one thread: `mode` (None: only run compiled code and fused layers in eager form) and switches.

    `names` are functions of the `AttentionInterface` for the mode; without `everywhere` others enter the mode; `fused` switches
    off PyTorch's fused encoder layers.
    """

    def __init__(
        self, mode: InterceptionMode | None, names: Sequence[str] = (), *, everywhere: bool = True, fused: bool = True
    ) -> None:
        super().__init__()
        self.mode, self.everywhere = mode, everywhere
        table = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", ())
        self.switches = [_INTERFACE.setdefault(name, _interface_switch(table, name)) for name in names if name in table]
        self.switches += [FAST_PATH] if fused else []
        self.switches += [COMPILED_CODE] if "torch._dynamo" in sys.modules else []  # else nothing is compiled

    def begin(self) -> None:
        """Begin the interception in this thread."""
        for switch in self.switches:
            switch.begin(self)
        if self.mode is not None and self.everywhere:
            self.mode.__enter__()

    def end(self) -> None:
        """Undo everything, also after an interrupted `begin` or `end`; may be called twice."""
        super().end()
        for switch in self.switches:
            switch.end(self)


class _ThreadState(NamedTuple):
    """State of a thread that context managers of PyTorch change: gradient mode, autocast by device type, nested autocasts."""

    gradients: bool
    autocast: tuple[bool, ...]
    nesting: int


def _thread_state() -> _ThreadState:
    enabled = tuple(torch.is_autocast_enabled(device) for device in _DEVICES)
    # `map` makes both calls without the interpreter, so that no interrupt arrives between them
    _, nesting = map(operator.call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))
    return _ThreadState(torch.is_grad_enabled(), enabled, nesting)


class Scope(Protocol):
    """A temporary change that `guarded` begins and ends."""

    def begin(self) -> None:
        """Begin the change."""

    def end(self) -> None:
        """Undo the change, also after an interrupted `begin` or `end`."""


def guarded(scope: Scope, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function within a scope, and undo the scope after any exception at any moment.

    An interrupt can arrive at the first instruction of any Python function, also of an `__exit__`. So this is no context manager,
    and an interrupted `end` runs again.
    """
    try:
        scope.begin()
        return call(*args, **kwargs)
    except BaseException as error:
        # Close the generators of context managers that were interrupted in their own `__enter__` or `__exit__`. The traceback
        # holds them, and PyTorch's own would put a function mode back on the stack when the traceback is freed.
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == contextlib.__file__:
                trace.tb_frame.clear()
            trace = trace.tb_next
        raise
    finally:
        try:
            scope.end()
        except BaseException:
            scope.end()
            raise


def remove_module_hooks(owner: object, modules: Iterable[nn.Module]) -> None:
    """Remove forward hooks that are methods of `owner`, also those whose handle an interrupt has lost."""
    for module in modules:
        for hooks, options in (
            (module._forward_pre_hooks, [module._forward_pre_hooks_with_kwargs]),
            (module._forward_hooks, [module._forward_hooks_with_kwargs, module._forward_hooks_always_called]),
        ):
            for key, hook in list(hooks.items()):
                if getattr(getattr(hook, "func", hook), "__self__", None) is owner:
                    hooks.pop(key, None)
                    for names in options:
                        names.pop(key, None)


FAST_PATH_NOTE = "PyTorch's fused encoder layers: runs with hooks take their plain path; the two may round differently"
COMPILED_NOTE = "torch.compile: runs that are listened to are eager, others compiled; the two may round differently"


def unwrapped(module: nn.Module) -> tuple[nn.Module, list[str]]:
    """Return the module inside DistributedDataParallel, DataParallel and torch.compile, and notes on the removed wrappers."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    notes: list[str] = []
    while True:
        if isinstance(module, wrappers):
            notes.append(f"{type(module).__name__} taken off: runs here gather nothing from other processes")
            module = module.module
        elif isinstance(getattr(module, "_orig_mod", None), nn.Module):
            module = module._orig_mod  # type: ignore[assignment]  # of OptimizedModule
            notes.append(COMPILED_NOTE)
        else:
            break
    if any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in module.modules()):
        notes.append(COMPILED_NOTE)
    return module, notes
