"""The key-value cache of decoding: rotated keys and effective values; a tensor that layers share is stored once.

Capacity (`nbytes`) and traffic (`traffic`) differ. SVFormer's cache has (L + 1) / (2 L) of the decoder's bytes, but each layer's
attention reads the shared values again. Decoding therefore moves as many bytes as in the decoder, unless a nearer memory keeps them.

    cache = model.new_cache(1)
    logits = model(prompt, past_kv_cache=cache)  # adds the prompt to the cache; the next pass continues it
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
    """Keys and values of past tokens; `model.new_cache` makes a cache and cached forward passes fill it."""

    def __init__(
        self, model: Any, batch: int, capacity: int, *, reserve: int = 0, dtype: torch.dtype | None = None
    ) -> None:
        self._model = weakref.ref(model)
        self.batch, self.capacity, self.reserve, self.dtype = batch, capacity, reserve, dtype
        self.length = 0
        self.entries: dict[tuple[str, int], Tensor] = {}  # (k or v, layer) -> [batch, reserved, kv_head, d_head]
        self._read = self._traffic = 0
        self._made: list[tuple[str, int]] = []  # entries that the current pass has added

    def check(self, model: Any, ids: Tensor) -> None:
        """Raise `BadData` if ids [batch, pos] of a model cannot continue this cache."""
        for key in self._made:  # by an interrupted pass; its entries in other buffers are beyond `length`
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
        """Add new keys or values of a layer and return the keys or values of all positions [batch, pos, kv_head, d_head].

        With `shared` the tensor, or its heads from `own_heads` on, equals that of the layer `source`, so nothing is stored. After a
        hook changes a shared tensor, the layer gets a separate entry with the source's past.
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

    @torch.inference_mode(False)  # a tensor of inference mode could not be written outside it
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
        """Count the bytes that an attention reads."""
        self._read += read.numel() * (self.dtype or read.dtype).itemsize

    def advance(self, new: int) -> None:
        """End a forward pass over `new` tokens."""
        self.length += new
        self._traffic, self._read, self._made = self._read, 0, []

    @torch.inference_mode(False)
    def clone(self) -> KeyValueCache:
        """Return an independent copy, for two continuations of one prompt."""
        twin = copy.copy(self)
        twin.entries, twin._made = {key: entry.clone() for key, entry in self.entries.items()}, list(self._made)
        return twin

    def truncate(self, length: int) -> None:
        """Remove everything after the first `length` tokens."""
        if not 0 <= length <= self.length:
            raise BadData(f"length={length}: the cache holds {self.length} tokens, choose from 0..{self.length}")
        self.length = length
        if not length:
            self.entries, self._made = {}, []  # layers with a separate entry may share again

    def nbytes(self) -> int:
        """Return the bytes of the stored keys and values, without memory reserved for later tokens."""
        return sum(entry[:, : self.length].nbytes for entry in self.entries.values())

    def traffic(self) -> int:
        """Return the bytes that the attentions of the last pass read; shared tensors count once per reader."""
        return self._traffic
