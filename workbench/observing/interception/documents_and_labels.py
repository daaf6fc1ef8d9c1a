"""Segments of a batch: padding positions, and the document of every other position.

Padding and packing (several documents in one row) are read from attention masks and from the mask arguments of the module.
Metrics then read one document at a time: `for row, positions in segments.documents(): ...`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import BadData, WorkbenchError

LABELS, NO_MASK = ("labels", "targets", "target"), ("loss", "label", "target", "head")
"""Names of arguments with the tokens to predict, and words in the names of masks that hide no key."""


@dataclass(frozen=True)
class Segments:
    """Documents in the rows of a batch, and tokens with a loss."""

    ids: Tensor  # [batch, pos]: 0 for padding, else the number of the document in its row
    counted: Tensor | None = None  # bool [batch, pos]: tokens that count in the loss; None: all

    @cached_property
    def is_whole(self) -> bool:
        """True if every row is one document without padding, and all its tokens count."""
        return self.counted is None and bool((self.ids == 1).all())

    @property
    def is_text(self) -> Tensor:
        """Positions [batch, pos] without padding."""
        return self.ids > 0

    @cached_property
    def first(self) -> Tensor:
        """Position [batch, pos] of the document's first token; for padding its own position."""
        first = torch.arange(self.ids.shape[1], device=self.ids.device).repeat(len(self.ids), 1)
        for row, positions in self.documents():
            first[row, positions] = positions[0]
        return first

    @property
    def left_out(self) -> float:
        """Share of padding positions."""
        return float((self.ids == 0).double().mean())

    def documents(self) -> Iterator[tuple[int, Tensor]]:
        """Yield all documents in order, each as its row and its positions."""
        return ((row, at) for row in range(len(self.ids)) for at in self.documents_in(row))

    def documents_in(self, row: int) -> list[Tensor]:
        """Return the documents of a row, each as its positions."""
        return [(self.ids[row] == n).nonzero()[:, 0] for n in range(1, int(self.ids[row].max()) + 1)]

    def rows(self, start: int, end: int) -> Segments:
        """Return the segments of some rows."""
        return Segments(self.ids[start:end], None if self.counted is None else self.counted[start:end])

    def to(self, device: torch.device | str) -> Segments:
        """Return the segments on a device."""
        return Segments(self.ids.to(device), None if self.counted is None else self.counted.to(device))

    @staticmethod
    def cat(parts: Sequence[Segments]) -> Segments:
        """Concatenate the segments of batches of one length."""
        counted = [torch.ones_like(p.ids, dtype=torch.bool) if p.counted is None else p.counted for p in parts]
        some = any(p.counted is not None for p in parts)
        return Segments(torch.cat([p.ids for p in parts]), torch.cat(counted) if some else None)


@dataclass
class SeenMasks:
    """Masks of one run: the union over its attentions, and the tensor arguments of the module."""

    tokens: Tensor  # [batch, pos]
    hiding: Tensor | None = None  # bool [batch, query, key]: keys that some masked attention lets a query see
    is_causal: bool = False  # whether an attention hides no earlier key
    arguments: list[tuple[str, Any]] = field(default_factory=list)  # by name

    @cached_property
    def past(self) -> Tensor:
        """Bool [query, key]: keys up to each query."""
        length = self.tokens.shape[1]
        return torch.ones(length, length, dtype=torch.bool, device=self.tokens.device).tril()

    def add(self, visible: Tensor | None) -> None:
        """Add the visible keys [batch or 1, head, query, key] of one attention; None for a plain causal one."""
        if visible is None:
            self.is_causal = True
        elif not self.is_causal:
            seen = visible.any(1) & self.past
            self.hiding = (seen if self.hiding is None else self.hiding | seen).expand(len(self.tokens), -1, -1)

    @property
    def visible(self) -> Tensor | None:
        """Bool [batch, query, key]: keys that some attention lets a query see; None if no attention was read."""
        return self.past.expand(len(self.tokens), -1, -1) if self.is_causal else self.hiding

    def given(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Add the tensor arguments of a call of the module."""
        try:
            named = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        except (TypeError, ValueError):
            named = dict(kwargs)
        named |= named.pop("kwargs", {}) if isinstance(named.get("kwargs"), Mapping) else {}
        self.arguments += [(name, x) for name, x in named.items() if isinstance(x, Tensor)]

    def segments(self) -> Segments:
        """Find the documents in all rows.

        Raises:
            BadData: A row is padding alone.
            WorkbenchError: A mask hides earlier tokens and is neither padding nor packing, or tokens attend to
                positions that a mask argument hides.
        """
        name, text = self._text_argument()
        ids = torch.zeros_like(self.tokens)
        for row in range(len(ids)):
            ids[row] = self._row(row, name, None if text is None else text[row])
        if (empty := (ids == 0).all(1)).any():
            raise BadData(f"row {int(empty.nonzero()[0])} is padding alone: leave it out")
        return Segments(ids, self._counted())

    def _row(self, row: int, name: str, text: Tensor | None) -> Tensor:
        """Return the segment ids [pos] of one row; `text`: visible tokens in the mask argument `name`."""
        one_document = torch.ones_like(self.tokens[row])
        given = text is not None and not bool(text.all())
        if self.is_causal and not given:
            return one_document
        if self.visible is None:  # no attention was read
            return text.long() if text is not None else one_document
        seen = self.visible[row]
        if not given and depends_on_distance(seen):
            return one_document
        text = text if text is not None else ~padding(seen, self.tokens[row])
        if bool(seen[text][:, ~text].any()):
            raise WorkbenchError(
                f"row {row}: tokens attend to positions that {name or 'the padding'} hides, so that leaving these out would change "
                "the numbers; give rows of equal length, or a mask that the attention applies"
            )
        among = seen[text][:, text]
        starts = torch.ones(len(among), dtype=torch.bool, device=seen.device)
        if len(among):
            starts[1:] = False if depends_on_distance(among) else ~among.diagonal(-1)
        number = starts.cumsum(0)
        if bool((among & (number[:, None] != number)).any()):
            raise WorkbenchError(
                f"row {row}: the attention mask hides earlier tokens in a way that is neither padding nor packed documents; "
                "averages over positions would mix them, so measure rows that the mask leaves whole"
            )
        ids = torch.zeros_like(one_document)
        ids[text] = number
        return ids

    def _text_argument(self) -> tuple[str, Tensor | None]:
        """Return the name of the module's padding mask, and the mask: True where a token is text; None without one."""

        def contradictions(text: Tensor) -> int:
            """Count the keys up to a token that the attention does not show or hide as padding would."""
            if self.visible is None:
                return 0
            differs = text[:, :, None] & self.past & (self.visible != text[:, None])
            return int(differs.sum()) + int((~text).all(1).sum())

        for name, mask in self.arguments:
            if "mask" not in name or any(word in name for word in NO_MASK):
                continue
            try:
                flat = mask.expand(self.tokens.shape) if mask.ndim < 3 else None
            except RuntimeError:  # of another shape
                flat = None
            if flat is None:
                if self.visible is None and mask.ndim in (3, 4) and mask.shape[-1] == self.tokens.shape[1]:
                    shown = mask if mask.dtype == torch.bool else mask >= 0
                    self.add(shown.expand(*mask.shape[:-2], mask.shape[-1], -1))
                continue
            text = flat if flat.dtype == torch.bool else flat == 0 if bool((flat < 0).any()) else flat > 0
            if text.shape[0] == text.shape[1] > 1 and torch.equal(text, torch.ones_like(text).tril()):
                continue  # a causal mask [query, key] of as many sequences as positions
            if "pad" in name and flat.dtype == torch.bool:  # True hides a token in PyTorch, and shows one elsewhere
                text = min(~text, text, key=contradictions)
            return name, text.to(self.tokens.device)
        return "", None

    def _counted(self) -> Tensor | None:
        """Return the tokens that the labels of the call count, those with labels >= 0."""
        for name, labels in self.arguments:
            if name not in LABELS or labels.shape != self.tokens.shape or labels.is_floating_point():
                continue
            used = labels >= 0
            if bool(used.all()):
                return None
            if torch.equal(labels[used], self.tokens[used]):
                return used
            if torch.equal(labels[:, :-1][used[:, :-1]], self.tokens[:, 1:][used[:, :-1]]):  # of the next position
                return torch.cat((used[:, :1], used[:, :-1]), 1)
            raise WorkbenchError(f"{name} are neither the tokens nor those one position later: which loss is meant?")
        return None


def weighted_mean(values: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    """Average values [1, ...]. Their second axes may differ: each entry averages the values that have it."""
    longest = max(values, key=lambda value: value.shape[1:2].numel())
    total, weight = torch.zeros_like(longest), torch.zeros_like(longest)
    for value, w in zip(values, weights, strict=True):
        reached = (slice(None), slice(0, value.shape[1])) if value.ndim > 1 else slice(None)
        total[reached] += w * value
        weight[reached] += w
    return values[0] if len(values) == 1 else total / weight


def depends_on_distance(seen: Tensor) -> bool:
    """Return whether a causal mask [query, key] hides by distance alone (full, windowed, dilated), and some query sees another key."""
    return len(seen) == 1 or (bool(seen.tril(-1).any()) and bool((seen[1:, 1:] == seen[:-1, :-1]).all()))


def padding(seen: Tensor, tokens: Tensor) -> Tensor:
    """Return the padding positions under a causal mask [query, key] of one row, True where a query sees a key.

    A padding position does not see itself, or is alone (neither sees nor is seen), or is skipped: later queries see earlier keys
    but not this one. The last position, which no query follows, is padding if it repeats the token of the padding before it.
    """
    itself, others = seen.diagonal(), seen.clone()
    others.fill_diagonal_(False)
    is_seen, sees = others.any(0), others.any(1)
    reach = torch.where(sees, others.to(torch.uint8).argmax(1), len(seen))  # earliest key of each query
    earliest = reach.flip(0).cummin(0).values.flip(0)  # of all queries from each one on
    place = torch.arange(len(seen), device=seen.device)
    skipped = ~is_seen
    skipped[:-1] &= earliest[1:] < place[:-1]
    skipped[-1] = False
    hidden = ~itself | (~is_seen & ~sees) | skipped
    if len(hidden) > 1:
        hidden[-1] |= hidden[-2] & ~is_seen[-1] & (tokens[-1] == tokens[-2])
    return hidden
