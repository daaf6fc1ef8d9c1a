"""Attention patterns rebuilt from cached queries and keys, and gradients of the loss at activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import WorkbenchError
from workbench.hook_names import QUADRATIC, ByHookName, hook_name, is_statistic
from workbench.kernels.full_pattern_reference import shares
from workbench.kernels.pytorch_switches import outside_inference_mode


def causal_scores(q: Tensor, k: Tensor) -> Tensor:
    """Return scaled, masked scores [..., head, query, key] of rotated q [..., pos, head, d_head] and grouped k."""
    k = k.repeat_interleave(q.shape[-2] // k.shape[-2], dim=-2)
    scores = torch.einsum("...qhd,...khd->...hqk", q, k) * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, float("-inf"))


def probabilities(scores: Tensor, dtype: torch.dtype, null: Tensor | None = None) -> Tensor:
    """Return the softmax of scores in `dtype`; `null` has the logits [head] of an additional column."""
    return shares(scores, null).to(dtype)


class RebuiltPatterns(ByHookName[Tensor]):
    """Cached activations; scores and patterns are rebuilt from rotated queries and keys when they are read."""

    recipes: Sequence[Any] = ()  # one `joint_attention.Recipe` for each layer whose attention a shortcut defines

    def with_recipes(self, recipes: Sequence[Any]) -> RebuiltPatterns:
        """Set the recipes and return the cache."""
        self.recipes = recipes
        return self

    def __missing__(self, key: Any) -> Tensor:
        if key not in self:
            raise KeyError(key)
        if (name := hook_name(key)) != key:
            return self[name]
        for recipe in self.recipes:
            if key in recipe.makes:
                return recipe(self, key)
        stem, point = key.rsplit(".", 1)
        q, k = self[f"{stem}.hook_rot_q"], self[f"{stem}.hook_rot_k"]
        scores = causal_scores(q, k)
        return scores if point == "hook_attn_scores" else probabilities(scores, q.dtype)

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        key = hook_name(str(key))
        for recipe in self.recipes:
            if key in recipe.makes:
                return recipe.needs <= self.keys()
        stem, _, point = key.rpartition(".")
        return point in QUADRATIC and {f"{stem}.hook_rot_q", f"{stem}.hook_rot_k"} <= self.keys()


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

    def branch(name: str, tensor: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            raise WorkbenchError(
                f"{name} is computed without a graph (torch.no_grad, or a checkpoint with use_reentrant=True): switch that off, or "
                "checkpoint with use_reentrant=False"
            )
        captured[name] = tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
        return captured[name]

    points: list[Any] = [(name, lambda x, hook: branch(str(hook.name), x)) for name in hooked]
    points = [("hook_embed", lambda x, hook: x.detach().requires_grad_()), *points]
    with outside_inference_mode(), torch.enable_grad(), model.hooks(points), ExitStack() as stack:
        for name, module in inputs.items():
            enter = partial(lambda name, _, args: (branch(name, args[0]), *args[1:]), name)
            stack.callback(module.register_forward_pre_hook(enter).remove)
        loss = loss_fn(model._logits(ids), ids)
        slopes = torch.autograd.grad(loss, list(captured.values()), allow_unused=True) if captured else ()
    if unread := [name for name in inputs if name not in captured]:
        raise WorkbenchError(f"{unread[0]}: the model does not call this module; name one that it calls")
    values, grads = ByHookName[Tensor](), ByHookName[Tensor]()
    for (name, value), grad in zip(captured.items(), slopes, strict=True):
        values[name], grads[name] = value.detach(), torch.zeros_like(value) if grad is None else grad
    return loss.detach(), values, grads
