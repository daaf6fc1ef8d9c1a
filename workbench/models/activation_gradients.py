"""Gradients of the loss with respect to activations and to the inputs of single modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import WorkbenchError
from workbench.names import ByHookName, is_statistic

NamesFilter = str | Sequence[str] | Callable[[str], bool] | None
LossFn = Callable[[Tensor, Tensor], Tensor]
INPUT = ".hook_in"  # after a module's name: its input


def gradients_at(
    model: Any, tokens: Any, names: NamesFilter, loss_fn: LossFn
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return (loss, values, gradients) at the named points of a hooked model: see `HookedModel.run_with_grads`."""
    inputs: dict[str, nn.Module] = {}  # modules whose inputs are named; a hook point of such a name has precedence
    others = names
    if names is not None and not callable(names):
        listed = [names] if isinstance(names, str) else list(names)
        modules = {n: model.mod_dict.get(n.removesuffix(INPUT)) for n in listed if n.endswith(INPUT)}
        inputs = {n: module for n, module in modules.items() if module is not None and n not in model.hook_dict}
        others = [n for n in listed if n not in inputs]
    hooked = model.hook_names(others)
    if inert := [n for n in hooked if is_statistic(n)]:
        if names is not None and not callable(names):
            raise WorkbenchError(f"{inert[0]} has no gradient; name q, k, v, z, attn_scores or pattern instead")
        hooked = [n for n in hooked if n not in inert]
    ids, captured = model.to_tokens(tokens), dict[str, Tensor]()

    def leaf(tensor: Tensor, hook: Any) -> Tensor:
        return tensor.detach().requires_grad_()

    def branch(name: str, tensor: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            raise WorkbenchError(
                f"{name} is computed without a graph (torch.no_grad, or a checkpoint with use_reentrant=True): switch that off, or "
                "checkpoint with use_reentrant=False"
            )
        captured[name] = tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
        return captured[name]

    def capture(tensor: Tensor, hook: Any) -> Tensor:
        return branch(str(hook.name), tensor)

    def enter(name: str, module: nn.Module, args: Any) -> Any:
        return branch(name, args[0]), *args[1:]

    points = [("hook_embed", leaf), *((name, capture) for name in hooked)]
    with torch.inference_mode(False), torch.enable_grad(), model.hooks(points), ExitStack() as stack:
        for name, module in inputs.items():
            stack.callback(module.register_forward_pre_hook(partial(enter, name)).remove)
        loss = loss_fn(model._logits(ids), ids)
        slopes = torch.autograd.grad(loss, list(captured.values()), allow_unused=True) if captured else ()
    if unread := [name for name in inputs if name not in captured]:
        raise WorkbenchError(f"{unread[0]}: the model does not call this module; name one that it calls")
    values, grads = ByHookName[Tensor](), ByHookName[Tensor]()
    for (name, value), grad in zip(captured.items(), slopes, strict=True):
        values[name], grads[name] = value.detach(), torch.zeros_like(value) if grad is None else grad
    return loss.detach(), values, grads
