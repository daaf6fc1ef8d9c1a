"""Detection of attention sinks at any position, for each head and document, from streamed column sums and row maxima.

The null model of the detection rule moves the weights of every row to other visible keys at random.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from workbench.metrics.base import metric, wide
from workbench.statistics.sink_thresholds import FOUND_EXCESS, FOUND_LENGTH, FOUND_MOST, FOUND_P, FOUND_QUERIES

NAMED = 6  # positions and tokens in the result, of each kind the strongest


def keys_in_sight(T: int, window: int | None = None) -> Tensor:
    """Return the number of keys that each query sees, float64 [T]: at most `window`. A window of 0 stands for an unknown mask: NaN."""
    keys = torch.arange(1, T + 1, dtype=torch.float64)
    return keys if window is None else keys.clamp(max=window) if window else keys * math.nan


def over_queries(rows: Tensor, window: int | None = None) -> Tensor:
    """Sum values of queries [..., pos] over the queries that see each position: from this position on, at most `window` of them."""
    sums, T = rows.flip(-1).cumsum(-1).flip(-1), rows.shape[-1]
    if window and window < T:
        sums[..., : T - window] -= sums[..., window:].clone()
    return sums


def column_excess(
    received: Float[Tensor, "batch head pos"], window: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare column sums with uniform causal attention, to the `window` latest keys where a layer has one.

    Returns:
        c_j - sum over the queries i that see j of 1 / keys(i), float64 like `received`; the number of these queries [pos]; and
        whether they are at least a quarter of all, and more than 10 [pos].
    """
    T = received.shape[-1]
    queries = torch.arange(T, 0, -1, device=received.device).clamp(max=window or T)
    even = over_queries(1.0 / keys_in_sight(T, window), window).to(received.device)
    # where each query attends to one recent key alone, a column sums to 1: no excess of 0.1 for more than 10 queries
    return received.double() - even, queries, (queries >= FOUND_QUERIES * T) & (queries * FOUND_EXCESS > 1)


def sink_positions(
    received: Float[Tensor, "batch head pos"], row_max: Float[Tensor, "batch head pos"], window: int | None = None
) -> Bool[Tensor, "batch head pos"]:
    """Detect the positions on which each head rests, in each document: at most 4 a head.

    Three conditions define a sink of a head. At least a quarter of the queries, and more than 10, see the position. Their mean
    attention to it exceeds that of uniform causal attention by 0.1. The excess t of the column sum is significant under the null model, by
    Bernstein's inequality and Bonferroni's correction: t^2 / 2 / (V + m t / 3) > ln(positions / 0.01). Here m_i is the largest
    weight of row i, m the largest of the later rows, and V bounds the variance: V = sum over the queries i that see j of m_i / keys(i).

    Args:
        received: Column sums c_j of the attention pattern.
        row_max: Largest weight m_i of each row.
        window: Number of latest keys that a query sees; None for all. One of less than a quarter of the document has no sinks.

    Note:
        Documents of fewer than 16 tokens show no significant sink. Row 0 has one key, so it cannot vary.
    """
    T = received.shape[-1]
    excess, queries, tested = column_excess(received, window)
    largest = row_max.double().clone()
    largest[..., 0] = 0
    variance = over_queries(largest / keys_in_sight(T, window).to(received.device), window)
    bound = largest.flip(-1).cummax(-1).values.flip(-1)
    evidence = excess.clamp_min(0).square() / 2 / (variance + bound * excess.clamp_min(0) / 3)
    selected = tested & (excess > FOUND_EXCESS * queries) & (evidence > math.log(max(int(tested.sum()), 1) / FOUND_P))
    strongest = torch.where(selected, excess, -math.inf).topk(min(FOUND_MOST, T), dim=-1).indices
    return selected & torch.zeros_like(selected).scatter(-1, strongest, True)


def found_mass(
    received: Float[Tensor, "batch head pos"], at: Bool[Tensor, "batch head pos"]
) -> Float[Tensor, "batch head pos"]:
    """Return the share of the attention of the queries after the first at each selected position, 0 at the others.

    Summed over positions, {0} gives `sink_mass`. NaN where the pattern is NaN.
    """
    sums = wide(received).clone()
    sums[..., 0] -= 1  # of the first query
    return torch.where(at | sums.isnan(), sums, 0) / max(received.shape[-1] - 1, 1)


@metric(
    unit="share", range="0..1", reading="higher: the head rests more on few positions", min_length=FOUND_LENGTH, version=2,
    source="this project: column sums against rows in random order (Bernstein's inequality)", controls={},
)  # fmt: skip
class FoundSinks:
    """Share of each head's attention at its sink positions, in total and by position and token.

    `sink_positions` detects at most 4 positions for each head and document. The share counts the attention of all queries after
    the first. Variant `position 1` is the share at this position. `first token 13` is the share at the first occurrence of this
    id in a document, `token 13` the share at later ones. The result has the strongest 6 of each kind.
    Caution: heads that copy may attend strongly to one token of a document too.
    """

    axes = ("head",)

    def __init__(self) -> None:
        self.n = 0
        self.sums = defaultdict[str, Tensor](lambda: torch.zeros((), dtype=torch.double))

    def update(
        self,
        received: Float[Tensor, "batch head pos"],
        row_max: Float[Tensor, "batch head pos"],
        tokens: Int[Tensor, "batch pos"],
        window: int | None = None,
    ) -> None:
        share = found_mass(received, sink_positions(received, row_max, window)).double().cpu()
        self.n += len(share)
        self._add("", share.sum((0, -1)))
        for document, ids in zip(share, tokens.tolist(), strict=True):
            for position in document.sum(0).nan_to_num().nonzero().flatten().tolist():
                first = "" if ids[position] in ids[:position] else "first "
                self._add(f"position {position}", document[:, position])
                self._add(f"{first}token {ids[position]}", document[:, position])

    def merge(self, other: FoundSinks) -> None:
        self.n += other.n
        for name, total in other.sums.items():
            self._add(name, total)

    def _add(self, name: str, total: Tensor) -> None:
        self.sums[name] = self.sums[name] + total

    def result(self) -> Mapping[str, list[float]]:
        """Return shares by head of all found positions (""), and of the strongest positions and tokens."""
        sizes = {kind: defaultdict[str, float](float) for kind in ("", "position", "token")}
        for name, total in self.sums.items():
            sizes[name.split()[-2] if name else ""][name] = total.sum().item()
        names = [name for kind in sizes.values() for name in sorted(kind, key=kind.__getitem__, reverse=True)[:NAMED]]
        return {name: (self.sums[name] / max(self.n, 1)).tolist() for name in names}


class ColumnExcess:
    """Mean attention to each position minus the uniform causal value, by head. A position counts if a quarter of the queries see it."""

    def __init__(self) -> None:
        self.sum, self.count = torch.zeros(0, 0, dtype=torch.double), torch.zeros(0, dtype=torch.double)

    def update(self, received: Float[Tensor, "batch head pos"], window: int | None = None) -> None:
        excess, queries, tested = column_excess(received, window)
        self._add((excess / queries)[..., tested].sum(0).cpu(), torch.full((int(tested.sum()),), float(len(received))))

    def merge(self, other: ColumnExcess) -> None:
        if len(other.count):
            self._add(other.sum, other.count)

    def _add(self, total: Tensor, count: Tensor) -> None:
        more = max(len(count), len(self.count))
        old = self.sum if len(self.count) else total.new_zeros(len(total), 0)
        pad = torch.nn.functional.pad
        self.sum = pad(old, (0, more - old.shape[1])) + pad(total, (0, more - total.shape[1]))
        self.count = pad(self.count, (0, more - len(self.count))) + pad(count, (0, more - len(count)))

    def result(self) -> list[list[float]]:
        """Return the mean over documents [head, position]."""
        return (self.sum / self.count).tolist() if len(self.count) else []
