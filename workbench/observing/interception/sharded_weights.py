"""Weights that accelerate offloads, or of which every process holds a shard; gathered on request.

The owner of the weights (accelerate, FSDP) loads or gathers them for a run. Gathering a sharded weight is a collective call, which
all processes make together.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import WorkbenchError

_FEW = 16  # numbers of a sample by which matrices are compared
_SAMPLE = 1024  # numbers of a parameter in its sample
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Integer type by the number of bytes of an entry."""


def full_weight(module: nn.Module, name: str = "weight") -> Tensor:
    """Return a parameter of a module, gathered and without a gradient."""
    weight: Any = getattr(module, name)
    if is_sharded(weight):
        return weight.detach().full_tensor()
    return offloaded(module, name).detach() if weight.is_meta else weight.detach()


def is_sharded(weight: Tensor) -> bool:
    """Return whether a tensor is a shard (FSDP2, tensor parallel)."""
    return hasattr(weight, "full_tensor")  # a DTensor, without loading torch.distributed


def offloaded(module: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer that accelerate offloaded, by its name in a module; raises `WorkbenchError` for others."""
    owner, _, last = name.rpartition(".")
    hook: Any = getattr(module.get_submodule(owner), "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        weights = getattr(one, "weights_map", None)
        if weights is not None and last in weights:
            return weights[last]
    raise WorkbenchError(f"{name} is on the meta device, without numbers: load the model's weights first")


def samples(module: nn.Module, *, fast: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield a sample of every parameter and buffer of real numbers, and the sum of all its bits; of a sharded one, of the local shard.

    `fast` sums 8 bytes at a time where they fit, to compare states of one process; stored hashes need the sum by entry.
    """
    buffers = [(name, buffer) for name, buffer in module.named_buffers() if buffer.is_floating_point()]
    for name, parameter in sorted((*module.named_parameters(), *buffers), key=operator.itemgetter(0)):
        local: Any = offloaded(module, name) if parameter.is_meta else parameter.detach()
        flat = (local.to_local() if is_sharded(local) else local).reshape(-1)
        yield name, flat[:: max(len(flat) // _SAMPLE, 1)]
        bits = flat.contiguous()
        wide = fast and not (bits.nbytes % 8 or bits.storage_offset() * bits.element_size() % 8)
        yield f"{name}, sum", bits.view(torch.int64 if wide else _BITS[flat.element_size()]).sum(dtype=torch.int64)


def has_alike_matrices(module: nn.Module) -> bool:
    """Return whether some matrix has a constant sample, or the sample of another matrix."""
    matrices = {name for name, p in module.named_parameters() if p.ndim > 1 and not is_sharded(p)}
    numbers = [tuple(flat[:: max(len(flat) // _FEW, 1)].tolist()) for name, flat in samples(module) if name in matrices]
    return len(set(numbers)) < len(numbers) or any(len(set(each)) == 1 for each in numbers)


def refuse_absent_weights(module: nn.Module) -> None:
    """Raise `WorkbenchError` if a weight has no numbers anywhere."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            offloaded(module, name)


def apply_module(module: nn.Module, rows: Tensor) -> Tensor:
    """Run a module on rows outside a run of its model."""
    own = next((p.dtype for p in module.parameters() if p.is_floating_point()), rows.dtype)
    rows = rows.to(own)  # activations under torch.autocast are narrower than the weights
    weights: dict[str, Any] = {name: p.detach() for name, p in module.named_parameters() if is_sharded(p)}
    sharded = {name: p.full_tensor() for name, p in weights.items()}
    return torch.func.functional_call(module, sharded, (rows,)) if sharded else module(rows)


def matrix_and_bias(module: nn.Module, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrix [in, out] and the bias [out] of a module that maps rows [row, in] affinely.

    A plain linear layer holds both. Any other module maps the unit rows, such as one with an adapter or a hook.
    """
    zero = apply_module(module, torch.zeros_like(like[:1]))
    weight: Any = getattr(module, "weight", None)
    is_turned = type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    is_plain = type(weight) is nn.Parameter or (isinstance(weight, Tensor) and is_sharded(weight))
    if (type(module) is nn.Linear or is_turned) and is_plain:  # others are quantised
        changed = module._forward_hooks or module._forward_pre_hooks
        # accelerate replaces `forward` to load offloaded weights
        if not changed and (weight.is_meta or "forward" not in vars(module)):
            return full_weight(module) if is_turned else full_weight(module).T, zero[0]
    unit = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
    return apply_module(module, unit) - zero, zero[0]
