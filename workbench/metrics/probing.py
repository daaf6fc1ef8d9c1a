"""What linear probes share: which documents they keep, the classes' sums, and bits on documents they have not seen.

A probe tells apart the tokens seen in fitting; all others keep their unigram probability (add-one). The ceiling is what a
lookup of the true token reaches under that rule: it knows every token seen, and loses the bits of all others.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LN2 = math.log(2)
SHARPNESS = torch.tensor([0.0, *(10 ** (i / 8) for i in range(-16, 5))])
FINER = 41
TIE = 1e-6  # nats: where all tokens are read right, ever sharper scores gain nothing but rounding, and the least sharp is taken
TOTAL_SHARE = 0.03  # of the whole covariance in what whitens: lookups do not vary within a token at all


def key_of(tokens: Tensor) -> bytes:
    """A document's name, and its place in a random order: a hash of its tokens."""
    return hashlib.blake2b(tokens.long().cpu().numpy().tobytes(), digest_size=8).digest()


class Reservoir:
    """At most `documents` documents and `vectors` vectors: the documents with the smallest keys, some positions of each.

    What is kept does not depend on the order of coming or on merging; a document that comes twice counts once. Of each, the
    first `vectors` over their number (rounded up to a power of 2) positions in an order drawn from its key.
    """

    def __init__(self, documents: int, vectors: int) -> None:
        self.documents, self.vectors = documents, vectors
        self.kept: dict[bytes, tuple[Tensor, Tensor]] = {}

    def add(self, key: bytes, x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Take a document's vectors [pos, width] and targets [pos]; returns those that have no place (any more)."""
        if key in self.kept:
            return []
        self.kept[key] = (x, y)
        dropped = [self.kept.pop(max(self.kept))] if len(self.kept) > self.documents else []
        share = self.vectors >> (len(self.kept) - 1).bit_length()
        for name, (vectors, targets) in self.kept.items():
            if len(targets) > share:
                self.kept[name] = (vectors[:share].clone(), targets[:share].clone())
        return dropped

    def sorted(self) -> list[tuple[Tensor, Tensor]]:
        """The documents in the order of their keys."""
        return [self.kept[key] for key in sorted(self.kept)]


def drawn(key: bytes, x: Tensor, y: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """At most `most` positions of a document in an order drawn from its key: copies in float32 on the CPU."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(int.from_bytes(key, "big") >> 1))[:most]
    return x[order.to(x.device)].float().cpu(), y[order.to(y.device)].cpu()


class ClassSums:
    """Per token: count and sum of its vectors; over all: their second moment. Grows with the tokens seen, not the documents."""

    def __init__(self) -> None:
        self.rows = torch.zeros(0, dtype=torch.long)  # row of a token id, -1 where it was never seen
        self.ids = torch.zeros(0, dtype=torch.long)
        self.counts = torch.zeros(0, dtype=torch.double)
        self.sums = torch.zeros(0, 0, dtype=torch.double)
        self.second = torch.zeros(0, 0, dtype=torch.double)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add vectors [pos, width] of the tokens y [pos]."""
        x = x.double()
        self._add(y, torch.ones(len(y), dtype=torch.double), x, x.T @ x)

    def merge(self, other: ClassSums) -> None:
        """Add what another has seen."""
        if len(other.ids):
            self._add(other.ids, other.counts, other.sums, other.second)

    def _add(self, ids: Tensor, counts: Tensor, sums: Tensor, second: Tensor) -> None:
        if int(ids.max()) >= len(self.rows):
            self.rows = F.pad(self.rows, (0, int(ids.max()) + 1 - len(self.rows)), value=-1)
        new = ids[self.rows[ids] < 0].unique()
        if len(new):
            self.rows[new] = torch.arange(len(self.ids), len(self.ids) + len(new))
            self.ids, self.counts = torch.cat((self.ids, new)), F.pad(self.counts, (0, len(new)))
            self.sums = torch.cat((self.sums.reshape(-1, sums.shape[1]), sums.new_zeros(len(new), sums.shape[1])))
        self.counts.index_add_(0, self.rows[ids], counts)
        self.sums.index_add_(0, self.rows[ids], sums)
        self.second = self.second + second if len(self.second) else second

    def ascending(self) -> tuple[Tensor, Tensor, Tensor]:
        """(ids, counts, sums), ids ascending."""
        order = self.ids.argsort()
        return self.ids[order], self.counts[order], self.sums[order]


@dataclass(frozen=True)
class Discriminant:
    """Coordinates in which vectors of one token vary alike in all directions, and the tokens' centres there."""

    mean: Tensor
    turn: Tensor  # [width, width]
    centres: Tensor  # [tokens, width], drawn to 0 where few vectors stand behind them
    log_counts: Tensor  # [tokens]

    @classmethod
    def of(cls, sums: ClassSums) -> Discriminant:
        """From the sums alone; tokens in ascending order."""
        _, counts, totals = sums.ascending()
        n, k = float(counts.sum()), len(counts)
        mean = totals.sum(0) / n
        centres = totals / counts[:, None] - mean
        whole = sums.second / n - torch.outer(mean, mean)
        scatter = (centres * counts[:, None]).T @ centres
        within = (whole * n - scatter) / max(n - k, 1)
        typical = (n - float(counts.square().sum()) / n) / max(k - 1, 1)  # vectors behind a centre, corrected
        between = (scatter / max(k - 1, 1) - within) / max(typical, 1e-300)
        values, directions = torch.linalg.eigh(within + TOTAL_SHARE * whole)
        floor = max(1e-6 * float(values[-1]), torch.finfo(torch.float).tiny)  # directions that do not vary stay small
        turn = directions * values.clamp_min(floor).rsqrt()
        spread, rotation = torch.linalg.eigh(turn.T @ between @ turn)
        turn, weight = turn @ rotation, counts[:, None] * spread.clamp_min(0)
        return cls(mean, turn, centres @ turn * (weight / (weight + 1)), counts.log())

    def coordinates(self, x: Tensor) -> Tensor:
        """Vectors in these coordinates, and a last column of ones."""
        return F.pad(((x - self.mean.float()) @ self.turn.float()), (0, 1), value=1.0)

    def scores(self, x: Tensor) -> Tensor:
        """ln(count of the token) - (distance to its centre)^2 / 2, up to a constant of each vector: [pos, tokens]."""
        weight = torch.cat((self.centres, (self.log_counts - self.centres.square().sum(-1) / 2)[:, None]), dim=1)
        return self.coordinates(x) @ weight.float().T


@dataclass(frozen=True)
class Prior:
    """The unigram of what was fitted and tuned on, and which tokens a probe fitted on `seen` tells apart."""

    log_p: Tensor  # [d_vocab]
    seen: Tensor  # ascending

    @classmethod
    def of(cls, counts: Tensor, seen: Tensor) -> Prior:
        """From the counts [d_vocab] of every token, add-one."""
        return cls(((counts + 1) / (counts + 1).sum()).log().float(), seen)

    def nats(self, evidence: Tensor, y: Tensor) -> Tensor:
        """-log p [pos]: `evidence` [pos, seen] shifts the seen tokens' share among themselves."""
        mine = self.log_p[self.seen]
        index = torch.searchsorted(self.seen, y).clamp_max(len(self.seen) - 1)
        log_p = (mine + evidence).log_softmax(-1).gather(1, index[:, None])[:, 0] + mine.logsumexp(0)
        return -torch.where(self.seen[index] == y, log_p, self.log_p[y])

    def ceiling(self, y: Tensor) -> Tensor:
        """Nats above the unigram [pos] of a lookup of the token."""
        known = torch.isin(y, self.seen)
        return torch.where(known, self.log_p[self.seen].logsumexp(0) - self.log_p[y], 0.0)

    def judged(self, tune: tuple[Tensor, Tensor], held: list[tuple[Tensor, Tensor]]) -> Tensor:
        """[documents, 4]: bits, accuracy, unigram bits and the ceiling's bits of each held-out document.

        `tune` and `held` are (scores [pos, seen], targets [pos]); `tune` sets how sharp the scores are, down to the bare unigram.
        """
        prior = self.log_p[self.seen]
        tuned = tune[0] - prior

        def best(sharpness: Tensor) -> int:
            losses = torch.stack([self.nats(a * tuned, tune[1]).mean() for a in sharpness])
            return int((losses <= losses.min() + TIE).nonzero()[0])

        i = best(SHARPNESS)  # steps of a third; then finer ones between its neighbours, since held-out bits hang on it
        near = torch.linspace(float(SHARPNESS[max(i - 1, 0)]), float(SHARPNESS[: i + 2][-1]), FINER)
        sharpness = near[best(near)]
        rows = []
        for scores, y in held:
            evidence = sharpness * (scores - prior)
            unigram = -self.log_p[y]
            right = self.seen[(prior + evidence).argmax(-1)] == y
            numbers = (unigram - self.nats(evidence, y)) / LN2, right.float(), unigram / LN2, self.ceiling(y) / LN2
            rows.append(torch.stack([part.double().mean() for part in numbers]))
        return torch.stack(rows)


def fitted(x: Tensor, y: Tensor, *, ridge: float, iterations: int, tolerance: float) -> Tensor:
    """Weights [tokens seen in y, ascending; columns of x] of softmax regression by L-BFGS; the last column is not decayed."""
    _, target, counts = y.unique(return_inverse=True, return_counts=True)
    weight = x.new_zeros(len(counts), x.shape[1])
    weight[:, -1] = (counts / len(y)).log()
    decay, rows = x.new_full((x.shape[1],), ridge), torch.arange(len(y))
    decay[-1] = 0
    optimiser = torch.optim.LBFGS(
        [weight], max_iter=iterations, tolerance_change=tolerance, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:  # gradient by hand and in place: half the time of autograd
        log_p = (x @ weight.T).log_softmax(-1)
        loss = -log_p[rows, target].mean() + (weight.square() * decay).sum() / 2
        error = log_p.exp_()
        error[rows, target] -= 1
        weight.grad = error.T @ x / len(y) + weight * decay
        return loss

    with torch.no_grad():
        optimiser.step(closure)
    return weight
