"""TransformerLens' `ActivationCache` with patterns on demand and decompositions that sum to the stream.

This module is imported when a cache is made or read, since TransformerLens takes longer to import than PyTorch.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformer_lens import ActivationCache

from workbench.errors import WorkbenchError, suggest
from workbench.models.patterns_and_gradients import RebuiltPatterns


def arriving(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap one of TransformerLens' decompositions so that each part is multiplied by its coefficient in the stream.

    TransformerLens adds unweighted outputs, which is the stream only without averages and cut skips. Their remainder is the
    difference to the stream.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def exact(self: Cache, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        model: Any = self.model
        n_layers = model.cfg.n_layers
        layer = n_layers if arguments["layer"] in (None, -1) else arguments["layer"]
        paths = model.stream_paths(layer, mid=arguments.get("mlp_input", False), cache=self.cache_dict)
        tensors = RebuiltPatterns(self.cache_dict)
        if 0 < layer < n_layers:  # the stream at this layer, after an average
            tensors[f"blocks.{layer - 1}.hook_resid_post"] = self["resid_pre", layer]
        neurons = method.__name__ == "stack_neuron_results" or bool(arguments.get("expand_neurons"))
        _weigh(tensors, model, paths, neurons=neurons)
        arguments |= {"self": ActivationCache(tensors, self.model, self.has_batch_dim)}
        return method(*bound.args, **bound.kwargs)

    return exact


_POINTS_OF = {  # an output -> its hook point, and those of its heads and neurons
    "embed": ("hook_embed",),
    "attn_out": ("hook_attn_out", "attn.hook_result", "attn.hook_z"),
    "mlp_out": ("hook_mlp_out", "mlp.hook_post"),
}


_OUTPUT_NORM = {"attn_out": "ln1_post", "mlp_out": "ln2_post"}


def _weigh(tensors: RebuiltPatterns, model: Any, paths: Mapping[str, float | Tensor], *, neurons: bool) -> None:
    """Multiply each output, its heads and its neurons by the output's coefficient."""
    for name, weight in paths.items():
        layer, kind = ("", name) if name == "embed" else name.split("_", 1)
        stem, points, norm = f"blocks.{layer}." if layer else "", _POINTS_OF[kind], _OUTPUT_NORM.get(kind, "")
        post = getattr(model.blocks[int(layer)], norm) if layer else None
        if post is None and isinstance(weight, float) and weight == 1.0:
            continue
        if post is not None or (isinstance(weight, Tensor) and weight.shape[-1] > 1):  # one factor per channel
            if neurons and kind == "mlp_out":
                raise WorkbenchError(
                    f"{name} has one coefficient per channel, so single neurons have no part of the stream:"
                    " use complete MLPs (expand_neurons=False), or workbench.decompose"
                )
            if kind == "attn_out" and (z := tensors.get(f"{stem}attn.hook_z")) is not None:
                result = torch.einsum("...hd,hdm->...hm", z, model.blocks[int(layer)].attn.W_O)
                share = None if post is None else post.share(tensors[f"{stem}{norm}.hook_scale"])
                tensors[f"{stem}attn.hook_result"] = result if share is None else share[..., None, :] * result
            points = points[:2] if kind == "attn_out" else points[:1]
        for point in points:
            if (tensor := tensors.get(stem + point)) is not None:
                factor = weight
                if isinstance(weight, Tensor):
                    factor = weight.to(torch.promote_types(tensor.dtype, torch.float32))
                    factor = factor if weight.ndim == tensor.ndim else factor[..., None, :]  # the same for all heads
                tensors[stem + point] = factor * tensor


class Cache(ActivationCache):
    """TransformerLens' ActivationCache with patterns on demand and decompositions that sum to the stream.

    `cache["v", 3, "own"]` is `blocks.3.attn.own.hook_v`; TransformerLens' shorthand would ignore `own` and return another tensor.
    """

    cache_dict: Any

    decompose_resid = arriving(ActivationCache.decompose_resid)
    stack_head_results = arriving(ActivationCache.stack_head_results)
    stack_neuron_results = arriving(ActivationCache.stack_neuron_results)
    get_full_resid_decomposition = arriving(ActivationCache.get_full_resid_decomposition)

    def __getitem__(self, key: Any) -> Tensor:
        """Return an activation by name or shorthand `(name, layer, branch)`, with a branch such as `own`, `source.2`, `first`."""
        if isinstance(key, tuple) and len(key) == 3 and re.match(r"(own|first|source|table|cross)\b", str(key[2])):
            point, layer, branch = key
            layer = layer + self.model.cfg.n_layers if layer < 0 else layer
            key = f"blocks.{layer}.attn.{branch}.hook_{point}"
        try:
            return super().__getitem__(key)
        except KeyError as error:  # its argument is the resolved name
            raise KeyError(f"no {key!r} was cached; {suggest(str(error.args[0]), list(self.cache_dict))}") from None

    def to(self, device: str | torch.device) -> Cache:
        moved = RebuiltPatterns({name: value.to(device) for name, value in self.cache_dict.items()})
        self.cache_dict = moved.with_recipes(self.cache_dict.recipes)
        return self

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> Cache:
        """Return a cache of some of the sequences."""
        cut = super().apply_slice_to_batch_dim(batch_slice)
        tensors = RebuiltPatterns(cut.cache_dict).with_recipes(self.cache_dict.recipes)
        return Cache(tensors, self.model, has_batch_dim=cut.has_batch_dim)
