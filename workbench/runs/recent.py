"""What was used last, within a budget: of bytes, or of how many."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import pandas as pd

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Values by key, each weighed once by `size`; where all are more than `budget`, those used longest ago go, but never the last."""

    def __init__(self, budget: int, size: Callable[[V], int]) -> None:
        self.budget, self.size, self.all = budget, size, 0
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """What is kept under a key, or what `make` gives, which is kept."""
        if key not in self._kept:
            value = make()
            self._kept[key] = value, self.size(value)
            self.all += self._kept[key][1]
            while len(self) > 1 and self.all > self.budget:
                self.all -= self._kept.popitem(last=False)[1][1]
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def clear(self) -> None:
        """Keep nothing."""
        self._kept.clear()
        self.all = 0


def bytes_of(frame: pd.DataFrame) -> int:
    """What the columns of a table take, its texts counted as they lie in memory."""
    return int(frame.memory_usage(index=False).sum())
