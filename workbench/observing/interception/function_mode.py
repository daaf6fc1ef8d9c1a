"""Function mode that hands the attention calls of a forward pass to a handler, in one thread and for one run.

The mode sees every torch function that the module calls, so nothing of the module is edited. Functions registered in Hugging
Face's `AttentionInterface` (flash, flex, custom ones) are intercepted where the interface hands them out.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from types import FunctionType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from workbench.kernels.switches import COMPILED_CODE, FAST_PATH, ProcessSwitch
from workbench.observing.interception.flash_calls import flash_call, is_flash
from workbench.observing.interception.fused_calls import FusedCall, aten_call, flex_call, interface_call, sdpa_call
from workbench.observing.interception.matrix_calls import (
    Lookup,
    MatrixCall,
    indexed_parameter,
    is_parameter,
    matrix_call,
)
from workbench.observing.interception.product_calls import PRODUCTS, ProductCall, product_call

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
_WRITES = re.compile(r"\w*[^\W_]_|__i[a-z]+__|__setitem__")  # names of functions that write over what they are given
_ATEN = re.compile(r"_scaled_dot_product_\w*attention\w*")
_SEEN_BY_MODE = ("eager", "sdpa", "flex_attention")  # these run through torch functions
_WHOLE = {"fused": sdpa_call, "flex": flex_call, "aten": aten_call, "flash": flash_call}

Failed = Callable[[Exception], object]
"""Called with an error of a handler or hook in a run that must go on, as a forward pass of a training: the rest of it is plain."""


class CallHandler(Protocol):
    """Handles intercepted calls; each method runs the call and returns what the module gets."""

    def fused(self, call: FusedCall) -> Any:
        """A whole attention in one call."""

    def product(self, call: ProductCall) -> Any:
        """A product of two tensors of three axes or more."""

    def softmax(self, scores: Tensor, run: Callable[[Tensor], Tensor], axis: int) -> Tensor:
        """A softmax over the last axis, which stands at `axis` in the module."""

    def matrix(self, call: MatrixCall) -> Any:
        """A product with a parameter or a view of one, or any `linear`."""

    def looked_up(self, lookup: Lookup) -> Any:
        """The vectors of a table by ids, which were looked up."""

    def other(self, name: str) -> None:
        """A call that may be an attention which cannot be read, by the function's name."""

    def wrote(self) -> None:
        """A tensor has just been written over."""


@functools.cache
def _kind(function: Any) -> str | None:
    """Which handler method a torch function is for (or `composite`); None for all others."""
    name = _name(function)
    if name in PRODUCTS or name == "einsum":
        return "product"
    if name in MATRICES:
        return "matrix"
    if isinstance(function, HigherOrderOperator) and name == "flex_attention":
        return "flex"
    if _ATEN.match(name) and "backward" not in name:
        return "aten"
    if is_flash(function):
        return "flash"
    if _WRITES.fullmatch(name):
        return "writing"
    return _KINDS.get(name) or ("other" if ATTENTION_LIKE.search(_full_name(function)) else None)


def _name(function: Any) -> str:
    return getattr(function, "__name__", "") or str(function)


def _full_name(function: Any) -> str:
    """A function's name, that of a torch operator with its library: kernels of the Hub are called `fwd` there."""
    operators = torch._ops.OpOverload, torch._ops.OpOverloadPacket
    return str(function) if isinstance(function, operators) else _name(function)


class InterceptionMode(TorchFunctionMode):
    """Hands a handler the calls that attention can be read from; every other call passes at once."""

    def __init__(self, handler: CallHandler, failed: Failed | None = None) -> None:
        super().__init__()
        self.handler, self.failed = handler, failed
        self.silent = False  # inside a call that was handled as a whole, or a hook that the handler runs

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
        """Report an error and be silent for the rest of the run; raise it where the run need not go on, or has been computed again."""
        if self.failed is None or isinstance(error, checkpoint._StopRecomputationError):
            raise error
        self.failed(error)
        self.silent = True

    def _handled(self, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        if kind in _WHOLE:
            return self.handler.fused(_WHOLE[kind](func, args, kwargs))
        if kind == "writing":
            out = func(*args, **kwargs)
            self.handler.wrote()
            return out
        if kind == "lookup":
            out = func(*args, **kwargs)
            ids, table = (*args, *kwargs.values())[:2]
            return self.handler.looked_up(Lookup(ids, table, out))
        if kind == "index":
            out = func(*args, **kwargs)
            lookup = indexed_parameter(args, kwargs, out)
            return out if lookup is None else self.handler.looked_up(lookup)
        if kind == "softmax":
            return self._softmax(func, args, kwargs)
        if kind == "composite":
            with self:
                return _decomposed(func)(*args, **kwargs)
        if kind == "other":
            self.handler.other(_full_name(func))
            return func(*args, **kwargs)
        if _name(func) == "linear" or any(is_parameter(x) for x in (*args, *kwargs.values())):
            return self.handler.matrix(matrix_call(func, args, kwargs))
        call = product_call(func, args, kwargs) if kind == "product" else None
        return func(*args, **kwargs) if call is None else self.handler.product(call)

    def _softmax(self, func: Any, args: Any, kwargs: Any) -> Any:
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


def _decomposed(function: Any) -> Any:
    """A composite of `torch.nn.functional` that runs at once where a mode is on, so that the mode sees what it calls."""
    names = function.__globals__ | {"has_torch_function": lambda tensors: False}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


def attention_functions(module: nn.Module) -> list[str]:
    """Names of the functions in Hugging Face's `AttentionInterface` that submodules use and the mode cannot see."""
    names = {getattr(getattr(part, "config", None), "_attn_implementation", None) for part in module.modules()}
    return sorted(name for name in names if isinstance(name, str) and name not in _SEEN_BY_MODE)


def has_fused_layers(module: nn.Module) -> bool:
    """Whether some submodule has a fused form in PyTorch that calls neither hooks nor modes."""
    return any(isinstance(part, nn.MultiheadAttention | nn.TransformerEncoderLayer) for part in module.modules())


_DEVICES = ("cpu", "cuda")
_INTERFACE: dict[str, ProcessSwitch] = {}  # functions of Hugging Face's `AttentionInterface`, by name


def _interface_switch(table: Any, name: str) -> ProcessSwitch:
    """Let the interface hand out a function that passes calls to the mode of its thread, where one is on."""

    def change(before: tuple[Any, bool]) -> None:
        table[name] = _passed_to_mode(before[0])

    def restore(before: tuple[Any, bool]) -> None:
        if before[1]:
            table[name] = before[0]
        else:
            table._local_mapping.pop(name, None)

    return ProcessSwitch(lambda: (table[name], name in table._local_mapping), change, restore)


def _passed_to_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def intercepted(*args: Any, **kwargs: Any) -> Any:
        modes = [m for m in torch.overrides._get_current_function_mode_stack() if isinstance(m, InterceptionMode)]
        if not modes or modes[-1].silent:
            return original(*args, **kwargs)
        return modes[-1].handler.fused(interface_call(partial(_silently, modes[-1], original), args, kwargs))

    return intercepted


def _silently(mode: InterceptionMode, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    mode.silent = True
    try:
        return function(*args, **kwargs)
    finally:
        mode.silent = False


class Interception:
    """What stands in one thread while calls are intercepted there. `guarded` and `intercepting` begin and end it.

    Args:
        mode: The function mode, or None to run compiled code and fused layers as they were written, and no more.
        names: Functions of the `AttentionInterface` that are passed to the mode.
        everywhere: Whether the mode is on from the beginning; else others enter it.
        fused: Whether PyTorch's fused encoder layers must be switched off.
    """

    def __init__(
        self, mode: InterceptionMode | None, names: Sequence[str] = (), *, everywhere: bool = True, fused: bool = True
    ) -> None:
        self.mode, self.everywhere = mode, everywhere
        self.depth, self.state = torch.overrides._len_torch_function_stack(), _thread_state()
        table = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", ())
        self.switches = [_INTERFACE.setdefault(name, _interface_switch(table, name)) for name in names if name in table]
        self.switches += [FAST_PATH] if fused else []
        self.switches += (
            [COMPILED_CODE] if "torch._dynamo" in sys.modules else []
        )  # else nothing can have been compiled

    def begin(self) -> None:
        """Intercept from now on, in this thread."""
        for switch in self.switches:
            switch.begin(self)
        if self.mode is not None and self.everywhere:
            self.mode.__enter__()

    def end(self) -> None:
        """Take everything away, also after an interrupted `begin` or `end`. Calling it again does nothing."""
        while torch.overrides._len_torch_function_stack() > self.depth:
            torch.overrides._pop_mode()
        if (state := _thread_state()) != self.state:  # an interrupt arrived in the `__exit__` of no_grad or autocast
            _restore_thread_state(state, self.state)
        for switch in self.switches:
            switch.end(self)


class _ThreadState(NamedTuple):
    """What context managers of PyTorch change for a thread: gradient mode, autocast by device type, nested autocasts."""

    gradients: bool
    autocast: tuple[bool, ...]
    nesting: int


def _thread_state() -> _ThreadState:
    enabled = tuple(torch.is_autocast_enabled(device) for device in _DEVICES)
    # `map` makes both calls without the interpreter, so that no interrupt arrives between them
    _, nesting = map(operator.call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))
    return _ThreadState(torch.is_grad_enabled(), enabled, nesting)


def _restore_thread_state(now: _ThreadState, before: _ThreadState) -> None:
    torch._C._set_grad_enabled(before.gradients)
    for device, enabled in zip(_DEVICES, before.autocast, strict=True):
        torch.set_autocast_enabled(device, enabled)
    for _ in range(now.nesting - before.nesting):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()


class Scope(Protocol):
    """What `guarded` puts in place and takes away."""

    def begin(self) -> None:
        """Put everything in place."""

    def end(self) -> None:
        """Take everything away, also after an interrupted `begin` or `end`."""


def guarded(scope: Scope, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function within a scope; nothing of the scope is left, whatever is raised, at whatever moment.

    An interrupt can arrive at the first instruction of any Python function, so also of an `__exit__`: hence no context
    manager, and an `end` that is begun again when it is interrupted.
    """
    try:
        scope.begin()
        return call(*args, **kwargs)
    except BaseException as error:
        _close_context_managers(error)
        raise
    finally:
        try:
            scope.end()
        except BaseException:
            scope.end()
            raise


def _close_context_managers(error: BaseException) -> None:
    """Close the generators of context managers that an exception interrupted in their own `__enter__` or `__exit__`.

    The traceback keeps them alive. PyTorch's own would put a function mode back on the stack when the traceback is dropped.
    """
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == contextlib.__file__:
            trace.tb_frame.clear()
        trace = trace.tb_next


@contextlib.contextmanager
def intercepting(handler: CallHandler | None, names: Sequence[str] = ()) -> Iterator[None]:
    """While open, the handler gets this thread's calls, and those of the attention functions of these names."""
    scope = Interception(None if handler is None else InterceptionMode(handler), names)
    try:
        scope.begin()
        yield
    finally:
        try:
            scope.end()
        except BaseException:
            scope.end()
            raise


def uncompiled() -> contextlib.AbstractContextManager[None]:
    """While open, compiled code and PyTorch's encoder layers run as they were written: their fused forms run past the mode."""
    return intercepting(None)


FAST_PATH_NOTE = (
    "PyTorch's fused encoder layers: runs that are listened to take their plain path; the two may round differently"
)
COMPILED_NOTE = "torch.compile: runs that are listened to are eager, others compiled; the two may round differently"


def unwrapped(module: nn.Module) -> tuple[nn.Module, list[str]]:
    """The module behind DistributedDataParallel, DataParallel and torch.compile, and notes on what was taken off."""
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
