"""Linear and embedding layers without initial weights: `Transformer.initialise` draws them, or a checkpoint fills them.

PyTorch's own initialisation would cost as much again, and its result would be overwritten.
"""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """A linear layer without initial weights."""

    def reset_parameters(self) -> None:
        """Leave the memory uninitialised."""


class Embedding(nn.Embedding):
    """An embedding without initial weights."""

    def reset_parameters(self) -> None:
        """Leave the memory uninitialised."""
