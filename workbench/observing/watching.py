"""Seeing a module's attention while it runs: a function mode around the forward pass, put away right after it.

The mode sees every torch function the module calls, so nothing of the module is edited. Functions registered in Hugging
Face's `AttentionInterface` (flash, flex, home-made ones) are seen where the interface hands them out.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workbench.observing.calls import PRODUCTS, Fused, Product, fused, interface, product

TELLING = re.compile(r"attn|attention|flash|sdpa|encoder_layer_fwd", re.IGNORECASE)
MATRICES = ("linear", "addmm", "matmul", "__matmul__", "mm", "einsum")
_UNTAPPED = ("eager", "sdpa")  # these run through functions that the mode sees


class Listener(Protocol):
    """What hears of the calls; each method runs the call and returns what the module gets."""

    def fused(self, call: Fused) -> Any:
        """A whole attention in one call."""

    def product(self, call: Product) -> Any:
        """A product of two tensors of three axes or more."""

    def softmax(self, scores: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """A softmax over the last axis."""

    def matrix(self, made: Any) -> Any:
        """The product of something with a parameter, which has run."""

    def other(self, name: str) -> None:
        """A call that may be an attention which cannot be read, by its name."""


@functools.cache
def _kind(function: Any) -> str | None:
    """What a torch function may be to us; None where it is nothing."""
    name = _name(function)
    if name == "scaled_dot_product_attention":
        return "fused"
    if name == "softmax":
        return "softmax"
    if name == "multi_head_attention_forward":
        return "composite"
    if name in PRODUCTS or name == "einsum":
        return "product"
    if name in MATRICES:
        return "matrix"
    return "other" if TELLING.search(name) else None


def _name(function: Any) -> str:
    return getattr(function, "__name__", "") or str(function)


class Watch(TorchFunctionMode):
    """Tells a listener of the calls that attention can be read from; every other call passes at once."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self.listener = listener
        self.silent = False  # inside a call that was told of as a whole, or a hook of the listener's own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _kind(func)
        if kind is None or self.silent:  # nearly always
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        if kind == "fused":
            return self.listener.fused(fused(func, args, kwargs))
        if kind == "softmax":
            return self._softmax(func, args, kwargs)
        if kind == "composite":
            with self:
                return _seen_through(func)(*args, **kwargs)
        if kind == "other":
            self.listener.other(_name(func))
            return func(*args, **kwargs)
        if any(isinstance(x, nn.Parameter) for x in (*args, *kwargs.values())):
            return self.listener.matrix(func(*args, **kwargs))
        call = product(func, args, kwargs) if kind == "product" else None
        return func(*args, **kwargs) if call is None else self.listener.product(call)

    def _softmax(self, func: Any, args: Any, kwargs: Any) -> Any:
        scores = args[0] if args else kwargs.get("input")
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if not isinstance(scores, Tensor) or scores.ndim < 3 or dim not in (-1, scores.ndim - 1):
            return func(*args, **kwargs)
        rest = {key: value for key, value in kwargs.items() if key != "input"}
        return self.listener.softmax(scores, lambda x: func(x, *args[1:], **rest))


def _seen_through(function: Any) -> Any:
    """A composite of `torch.nn.functional` that runs at once where a mode is on, so that the mode sees what it calls."""
    names = function.__globals__ | {"has_torch_function": lambda tensors: False}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


def interfaces(module: nn.Module) -> list[str]:
    """Names of the attention functions in Hugging Face's interface that parts of a module use and the mode cannot see."""
    found = {getattr(getattr(part, "config", None), "_attn_implementation", None) for part in module.modules()}
    return sorted(name for name in found if isinstance(name, str) and name not in _UNTAPPED)


@contextlib.contextmanager
def watching(listener: Listener, names: list[str]) -> Iterator[Watch]:
    """While open, the listener hears of this thread's calls, and of the attention functions of these names."""
    watch = Watch(listener)
    with contextlib.ExitStack() as stack:
        if names and (
            table := getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
        ):
            for name in names:
                if name in table:
                    stack.enter_context(_instead(table, name, watch))
        stack.enter_context(eagerly())
        stack.enter_context(watch)
        yield watch


@contextlib.contextmanager
def _instead(table: Any, name: str, watch: Watch) -> Iterator[None]:
    """While open, the interface hands out a function that tells the listener of each call."""
    original = table[name]
    local = name in table._local_mapping

    @wraps(original)
    def told(*args: Any, **kwargs: Any) -> Any:
        return watch.listener.fused(interface(partial(_silently, watch, original), args, kwargs))

    table[name] = told
    try:
        yield
    finally:
        if local:
            table[name] = original
        else:
            del table[name]


def _silently(watch: Watch, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    watch.silent = True
    try:
        return function(*args, **kwargs)
    finally:
        watch.silent = False


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """While open, compiled code runs as it was written: a compiled graph would run past the mode."""
    if "torch._dynamo" not in sys.modules:  # then nothing can have been compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


COMPILED = "torch.compile: runs that are listened to are eager, others compiled; the two may round differently"


def unwrapped(module: nn.Module) -> tuple[nn.Module, list[str]]:
    """The module behind DistributedDataParallel, DataParallel and torch.compile, and what was taken off."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    notes: list[str] = []
    while True:
        if isinstance(module, wrappers):
            notes.append(f"{type(module).__name__} taken off: runs here gather nothing from other processes")
            module = module.module
        elif isinstance(getattr(module, "_orig_mod", None), nn.Module):
            module = module._orig_mod  # type: ignore[assignment]  # of OptimizedModule
            notes.append(COMPILED)
        else:
            break
    if any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in module.modules()):
        notes.append(COMPILED)
    return module, notes
