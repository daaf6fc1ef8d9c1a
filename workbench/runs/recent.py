"""Least-recently-used cache with a budget of bytes or of entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import pandas as pd

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Cache of values by key: evicts least recently used entries until their total `size` is within `budget`, never the newest."""

    def __init__(self, budget: int, size: Callable[[V], int]) -> None:
        self.budget, self.size, self.all = budget, size, 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the cached value of a key, or cache the result of `make`."""
        if key not in self._entries:
            value = make()
            self._entries[key] = value, self.size(value)
            self.all += self._entries[key][1]
            while len(self) > 1 and self.all > self.budget:
                self.all -= self._entries.popitem(last=False)[1][1]
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()
        self.all = 0


def bytes_of(frame: pd.DataFrame) -> int:
    """Return the memory of a table's columns in bytes."""
    return int(frame.memory_usage(index=False).sum())
