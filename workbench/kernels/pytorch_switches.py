"""Switches of PyTorch: from fused encoder layers and compiled code to plain Python code, and out of inference mode.

Fused layers and compiled code call neither hooks nor function modes.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class ProcessSwitch:
    """A process-wide setting that is changed while runs in any thread need it; the last of them restores it.

    `read` returns the present setting, `change` takes it and changes it, `restore` takes it and sets it again.
    """

    def __init__(
        self, read: Callable[[], Any], change: Callable[[Any], object], restore: Callable[[Any], object]
    ) -> None:
        self.read, self.change, self.restore = read, change, restore
        self.lock, self.owners, self.before = threading.RLock(), set[int](), list[Any]()

    def begin(self, owner: object) -> None:
        """Change the setting until `end` is called for this owner."""
        with self.lock:
            self.owners.add(id(owner))
            if not self.before:
                self.before = [self.read()]
            self.change(self.before[0])

    def end(self, owner: object) -> None:
        """Restore the setting if no other owner is left. Calling it again does nothing."""
        with self.lock:
            self.owners.discard(id(owner))
            if self.before and not self.owners:
                self.restore(self.before[0])
                self.before = []


def _stance() -> Any:
    return importlib.import_module("torch._dynamo.eval_frame")


FAST_PATH = ProcessSwitch(
    torch.backends.mha.get_fastpath_enabled,
    lambda before: torch.backends.mha.set_fastpath_enabled(False),
    torch.backends.mha.set_fastpath_enabled,
)
"""PyTorch's fused encoder layers, switched off."""
COMPILED_CODE = ProcessSwitch(
    lambda: _stance()._stance,
    lambda before: torch.compiler.set_stance("force_eager"),
    lambda before: _stance()._set_stance(before),
)
"""Compiled code, run as plain Python."""


def outside_inference_mode() -> AbstractContextManager[Any]:
    """Return a context outside inference mode, which is empty where that mode is off.

    An interrupt can keep `torch.inference_mode` from its exit. It then restores the earlier gradient mode when it is freed, which
    may be much later.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
