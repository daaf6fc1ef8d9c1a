"""Matrices that are not drawn when they are made: `Transformer.initialise` draws them, or a checkpoint fills them.

PyTorch draws every matrix of a new module. Here that would be thrown away, and costs as much as the model's own draw.
"""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """A projection."""

    def reset_parameters(self) -> None:
        """Left as memory holds it."""


class Embedding(nn.Embedding):
    """A vector for each token."""

    def reset_parameters(self) -> None:
        """Left as memory holds it."""
