"""The key-value cache of decoding: rotated keys and effective values, each tensor that layers share held once.

Capacity and traffic are two things: SVFormer's cache holds (L + 1) / (2 L) of the decoder's bytes, yet each layer's
attention reads the shared values again, so decoding moves as many bytes as the decoder's unless they stay in a nearer
memory. `nbytes` counts the first, `traffic` the second.

    cache = model.new_cache(1)
    logits = model(prompt, past_kv_cache=cache)  # the pass takes the prompt in; the next one continues it
    branch = cache.clone()
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch import Tensor

from workbench.errors import BadData


class KeyValueCache:
    """Keys and values of the tokens that a model has read; made by `model.new_cache`, filled by cached forward passes."""

    def __init__(
        self, model: Any, batch: int, capacity: int, *, reserve: int = 0, dtype: torch.dtype | None = None
    ) -> None:
        self._model = weakref.ref(model)
        self.batch, self.capacity, self.reserve, self.dtype = batch, capacity, reserve, dtype
        self.length = 0
        self.entries: dict[tuple[str, int], Tensor] = {}  # (k or v, layer) -> [batch, reserved, kv_head, d_head]
        self._read = self._traffic = 0
        self._made: list[tuple[str, int]] = []  # entries that the pass under way has added

    def check(self, model: Any, ids: Tensor) -> None:
        """Raise `BadData` where ids [batch, pos] of a model cannot continue this cache."""
        for key in self._made:  # by a pass that did not end; what it wrote to the others is behind their length
            del self.entries[key]
        self._made, self._read = [], 0
        owner: Any = self._model()
        if owner is not model:
            raise BadData("this cache belongs to another model: make one with model.new_cache(batch)")
        if len(ids) != self.batch:
            n = len(ids)
            raise BadData(f"the cache holds {self.batch} sequences, these are {n}; make one with new_cache({n})")
        if self.length + ids.shape[1] > self.capacity:
            raise BadData(
                f"{self.length} cached and {ids.shape[1]} new tokens exceed the cache's {self.capacity}"
                f" (the model's context is n_ctx={model.config.n_ctx}); room for {self.capacity - self.length}"
            )

    def extend(
        self, name: str, layer: int, new: Tensor, *, source: Any = None, shared: bool = False, own_heads: int = 0
    ) -> Tensor:
        """All positions' keys or values [batch, pos, kv_head, d_head] at a layer, the new ones last.

        `shared`: the tensor, or its heads from `own_heads` on, is that of the layer `source` as it is, so nothing is stored. A
        layer that shared until a hook changed its tensor gets an entry of its own, with the source's past.
        """
        if not own_heads:
            return self._extended((name, layer), new, self.entries.get((name, source)), shared)
        own, others = new[:, :, :own_heads], new[:, :, own_heads:]
        past = self.entries[name, source][:, :, own_heads:]
        both = (
            self._extended((name, layer), own, None),
            self._extended((f"{name} of others", layer), others, past, shared),
        )
        return torch.cat(both, 2)

    def _extended(self, key: tuple[str, int], new: Tensor, source: Tensor | None, shared: bool = False) -> Tensor:
        end = self.length + new.shape[1]
        if shared and key not in self.entries:
            assert source is not None
            full = source[:, :end]
        else:
            buffer = self._room(key, new, end, source)
            buffer[:, self.length : end] = new
            full = buffer[:, :end]
        self.note(full)
        return full if full.dtype == new.dtype else full.to(new.dtype)

    @torch.inference_mode(False)  # what inference mode allocates could not be written outside it
    def _room(self, key: tuple[str, int], new: Tensor, end: int, source: Tensor | None) -> Tensor:
        held = self.entries.get(key)
        if held is not None and held.shape[1] >= end:
            return held
        size = min(self.capacity, max(end, 2 * held.shape[1])) if held is not None else max(end, self.reserve)
        buffer = new.new_empty((self.batch, size, *new.shape[2:]), dtype=self.dtype or new.dtype)
        past = held if held is not None else source
        if self.length:
            assert past is not None, f"{key[0]} of layer {key[1]} has no past"
            buffer[:, : self.length] = past[:, : self.length]
        if held is None:
            self._made.append(key)
        self.entries[key] = buffer
        return buffer

    def note(self, read: Tensor) -> None:
        """Count what an attention reads."""
        self._read += read.numel() * (self.dtype or read.dtype).itemsize

    def advance(self, new: int) -> None:
        """End of a forward pass over `new` tokens."""
        self.length += new
        self._traffic, self._read, self._made = self._read, 0, []

    @torch.inference_mode(False)
    def clone(self) -> KeyValueCache:
        """An independent copy, for two continuations of one prompt."""
        twin = copy.copy(self)
        twin.entries, twin._made = {key: entry.clone() for key, entry in self.entries.items()}, list(self._made)
        return twin

    def truncate(self, length: int) -> None:
        """Forget what follows the first `length` tokens."""
        if not 0 <= length <= self.length:
            raise BadData(f"length={length}: the cache holds {self.length} tokens, choose from 0..{self.length}")
        self.length = length
        if not length:
            self.entries, self._made = {}, []  # a layer that had an entry of its own may share again

    def nbytes(self) -> int:
        """Bytes of the keys and values held, counted from the tensors (without room kept for later tokens)."""
        return sum(entry[:, : self.length].nbytes for entry in self.entries.values())

    def traffic(self) -> int:
        """Bytes of cached keys and values that the attentions of the last pass read, shared ones once for each reader."""
        return self._traffic
