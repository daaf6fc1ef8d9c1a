"""A second device without hardware: tensors that say they are elsewhere and refuse to meet those of the CPU.

Within `pretended()`, `x.to(NAME)` and `device=NAME` give such tensors. They compute on the CPU, so that results are the CPU's, and an
operation on tensors of both places raises as it does on a GPU.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

aten = torch.ops.aten
NAME = "elsewhere"
CROSSING = {aten._to_copy.default, aten.copy_.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
"""Of a tensor that is elsewhere, indices may be on the CPU, as on a GPU."""


class Elsewhere(torch.Tensor):
    """A tensor that says it is on the other device and holds its numbers here."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=torch.device(NAME, 0),
            requires_grad=held.requires_grad,
        )  # fmt: skip
        made.held = held
        return made

    def __repr__(self):
        return f"Elsewhere({self.held})"

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return run(operation, args, kwargs or {})

    def tolist(self):
        return self.held.tolist()


def run(operation, args, kwargs):
    """One operation: on tensors of one place, or one that carries from place to place."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    away = [isinstance(x, Elsewhere) for x in tensors]
    goes = any(away[:1] if operation in CROSSING else away)
    here = [tuple(x.shape) for x, there in zip(tensors, away, strict=True) if not there and x.ndim]
    if any(away) and here and operation not in CROSSING and not (operation in INDEXING and away[0]):
        raise RuntimeError(f"{operation}: all tensors must be on one device; those of shapes {here} are on the CPU")
    if kwargs.get("device") is not None:
        goes = torch.device(kwargs["device"]).type == NAME
        kwargs = kwargs | {"device": torch.device("cpu")}
    inner_args, inner_kwargs = pytree.tree_map_only(Elsewhere, lambda x: x.held, (args, kwargs))
    found = operation(*inner_args, **inner_kwargs)
    if goes:
        found = pytree.tree_map_only(torch.Tensor, lambda x: x if isinstance(x, Elsewhere) else Elsewhere(x), found)
    if any(away):
        return return_and_correct_aliasing(operation, args, kwargs, found)
    return found


class Factories(TorchDispatchMode):
    """Tensors that are made on the other device, or go there."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return run(operation, args, kwargs or {})


class FromPython(TorchFunctionMode):
    """Tensors of numbers, which PyTorch makes on the device without asking a dispatch mode."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device = kwargs.get("device") if function in (torch.tensor, torch.as_tensor) else None
        if device is None or torch.device(device).type != NAME:
            return function(*args, **kwargs)
        return function(*args, **kwargs | {"device": "cpu"}).to(NAME)


@contextlib.contextmanager
def pretended():
    """The other device, for as long as the block runs."""
    prepare()
    with pytest.MonkeyPatch.context() as patch, Factories(), FromPython():
        patch.setattr(torch.accelerator, "synchronize", lambda device=None: None)
        yield


@functools.cache
def prepare():
    """Tell PyTorch that there is such a device, which it cannot forget."""
    module = backend_registration._DummyBackendModule()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=module)
    for name, kernel in KERNELS.items():
        KEPT.impl(name, kernel, "PrivateUse1")


def copied(source, target, non_blocking=False):
    target.held.copy_(getattr(source, "held", source))
    return target


KEPT = torch.library.Library("aten", "IMPL")
KERNELS = {
    "empty_strided": lambda size, stride, dtype=None, **_: Elsewhere(torch.empty_strided(size, stride, dtype=dtype)),
    "_copy_from": copied,
}
"""What PyTorch calls past a dispatch mode, as for an index that is a list."""
