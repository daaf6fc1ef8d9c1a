"""A counter for the bytes of live tensors during a computation, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensor storages in its context: `now`, and `peak` since it was last set."""

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        for tensor in held:
            self._watch(tensor)

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # one for all views
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

            def end() -> None:
                self.now -= self._sizes.pop(key)

            weakref.finalize(storage, end)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._watch(leaf)
        return out


def memory_table(parts: Sequence[tuple[str, int, str]], libraries: int) -> pd.DataFrame:
    """Return a table (`part`, `bytes`, `MiB`, `what`) of the parts, the libraries (in bytes) and their total."""
    parts = [*parts, ("libraries", libraries, "interpreter and imported code, before any tensor")]
    total = ("total", sum(size for _, size, _ in parts), "without the corpus")
    frame = pd.DataFrame([*parts, total], columns=["part", "bytes", "what"])
    frame.insert(2, "MiB", (frame["bytes"] / 2**20).round(1))
    return frame
