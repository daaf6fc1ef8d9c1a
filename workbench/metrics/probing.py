"""Parts of linear probes: a sample of documents, sums per token, and bits on held-out documents.

A probe distinguishes the tokens seen in fitting. All others have their unigram probability (add-one). The ceiling is the result
of a lookup of the true token under that rule: it knows every token seen, and loses the bits of all others.
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
TIE = 1e-6  # nats; among sharpnesses with equal loss the least is taken
TOTAL_SHARE = 0.03  # share of the total covariance in the whitening, as lookups do not vary within a token


def key_of(tokens: Tensor) -> bytes:
    """Return a hash of a document's tokens, which also orders documents at random."""
    return hashlib.blake2b(tokens.long().cpu().numpy().tobytes(), digest_size=8).digest()


class Reservoir:
    """A sample of at most `documents` documents with the smallest keys, and at most `vectors` of their vectors.

    The sample does not depend on the order of adding or on merging. A document that is added twice counts once. Every document
    keeps its first `vectors` / n positions in an order drawn from its key, n the documents rounded up to a power of 2.
    """

    def __init__(self, documents: int, vectors: int) -> None:
        self.documents, self.vectors = documents, vectors
        self.sample: dict[bytes, tuple[Tensor, Tensor]] = {}

    def add(self, key: bytes, x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Add a document's vectors [pos, width] and targets [pos]; returns the document that drops out, if any."""
        if key in self.sample:
            return []
        self.sample[key] = (x, y)
        dropped = [self.sample.pop(max(self.sample))] if len(self.sample) > self.documents else []
        share = self.vectors >> (len(self.sample) - 1).bit_length()
        for name, (vectors, targets) in self.sample.items():
            if len(targets) > share:
                self.sample[name] = (vectors[:share].clone(), targets[:share].clone())
        return dropped

    def sorted(self) -> list[tuple[Tensor, Tensor]]:
        """Return the documents in the order of their keys."""
        return [self.sample[key] for key in sorted(self.sample)]


def draw_positions(key: bytes, x: Tensor, y: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return at most `most` positions of a document in an order drawn from its key, as float32 copies on the CPU."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(int.from_bytes(key, "big") >> 1))[:most]
    return x[order.to(x.device)].float().cpu(), y[order.to(y.device)].cpu()


class ClassSums:
    """Count and sum of vectors per token, and the second moment of all. Grows with the tokens seen, not the documents."""

    def __init__(self) -> None:
        self.rows = torch.zeros(0, dtype=torch.long)  # row of a token id, -1 before it is seen
        self.ids = torch.zeros(0, dtype=torch.long)
        self.counts = torch.zeros(0, dtype=torch.double)
        self.sums = torch.zeros(0, 0, dtype=torch.double)
        self.second = torch.zeros(0, 0, dtype=torch.double)

    def add(self, x: Tensor, y: Tensor) -> None:
        x = x.double()
        self._add(y, torch.ones(len(y), dtype=torch.double), x, x.T @ x)

    def merge(self, other: ClassSums) -> None:
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
        """Return ids, counts and sums, in ascending order of ids."""
        order = self.ids.argsort()
        return self.ids[order], self.counts[order], self.sums[order]


@dataclass(frozen=True)
class Discriminant:
    """Linear discriminant analysis: coordinates with equal variance within tokens in all directions, and the tokens' centres."""

    mean: Tensor
    turn: Tensor  # [width, width]
    centres: Tensor  # [tokens, width], shrunk toward 0 for tokens with few vectors
    log_counts: Tensor  # [tokens]

    @classmethod
    def of(cls, sums: ClassSums) -> Discriminant:
        """Compute the coordinates from sums; tokens in ascending order."""
        _, counts, totals = sums.ascending()
        n, k = float(counts.sum()), len(counts)
        mean = totals.sum(0) / n
        centres = totals / counts[:, None] - mean
        covariance = sums.second / n - torch.outer(mean, mean)
        scatter = (centres * counts[:, None]).T @ centres
        within = (covariance * n - scatter) / max(n - k, 1)
        typical = (n - float(counts.square().sum()) / n) / max(k - 1, 1)  # vectors per centre, corrected
        between = (scatter / max(k - 1, 1) - within) / max(typical, 1e-300)
        values, directions = torch.linalg.eigh(within + TOTAL_SHARE * covariance)
        floor = max(1e-6 * float(values[-1]), torch.finfo(torch.float).tiny)  # directions without variance stay small
        turn = directions * values.clamp_min(floor).rsqrt()
        spread, rotation = torch.linalg.eigh(turn.T @ between @ turn)
        turn, weight = turn @ rotation, counts[:, None] * spread.clamp_min(0)
        return cls(mean, turn, centres @ turn * (weight / (weight + 1)), counts.log())

    def coordinates(self, x: Tensor) -> Tensor:
        """Return vectors in these coordinates, with a last column of ones."""
        return F.pad(((x - self.mean.float()) @ self.turn.float()), (0, 1), value=1.0)

    def scores(self, x: Tensor) -> Tensor:
        """Return ln(count of the token) - (distance to its centre)^2 / 2, up to a constant per vector: [pos, tokens]."""
        weight = torch.cat((self.centres, (self.log_counts - self.centres.square().sum(-1) / 2)[:, None]), dim=1)
        return self.coordinates(x) @ weight.float().T


@dataclass(frozen=True)
class Prior:
    """The unigram distribution of the documents for fitting and tuning, and the tokens that a probe distinguishes."""

    log_p: Tensor  # [d_vocab]
    seen: Tensor  # ascending

    @classmethod
    def of(cls, counts: Tensor, seen: Tensor) -> Prior:
        """Compute the add-one distribution from the counts [d_vocab] of every token."""
        return cls(((counts + 1) / (counts + 1).sum()).log().float(), seen)

    def nats(self, evidence: Tensor, y: Tensor) -> Tensor:
        """Return -log p [pos]; `evidence` [pos, seen] redistributes the share of the seen tokens."""
        seen = self.log_p[self.seen]
        index = torch.searchsorted(self.seen, y).clamp_max(len(self.seen) - 1)
        log_p = (seen + evidence).log_softmax(-1).gather(1, index[:, None])[:, 0] + seen.logsumexp(0)
        return -torch.where(self.seen[index] == y, log_p, self.log_p[y])

    def ceiling(self, y: Tensor) -> Tensor:
        """Return the nats above the unigram [pos] of a lookup of the token."""
        known = torch.isin(y, self.seen)
        return torch.where(known, self.log_p[self.seen].logsumexp(0) - self.log_p[y], 0.0)

    def judged(self, tune: tuple[Tensor, Tensor], held: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return bits, accuracy, unigram bits and the ceiling's bits of held-out documents, [documents, 4].

        `tune` and `held` are (scores [pos, seen], targets [pos]). `tune` sets the sharpness of the scores, down to the unigram.
        """
        prior = self.log_p[self.seen]
        tuned = tune[0] - prior

        def best(sharpness: Tensor) -> int:
            losses = torch.stack([self.nats(a * tuned, tune[1]).mean() for a in sharpness])
            return int((losses <= losses.min() + TIE).nonzero()[0])

        i = best(SHARPNESS)  # steps of a third, then finer ones between its neighbours
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
    """Fit weights [tokens in y, ascending; columns of x] of softmax regression by L-BFGS; the last column is not decayed."""
    _, target, counts = y.unique(return_inverse=True, return_counts=True)
    weight = x.new_zeros(len(counts), x.shape[1])
    weight[:, -1] = (counts / len(y)).log()
    decay, rows = x.new_full((x.shape[1],), ridge), torch.arange(len(y))
    decay[-1] = 0
    optimiser = torch.optim.LBFGS(
        [weight], max_iter=iterations, tolerance_change=tolerance, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:  # an analytic gradient in place takes half the time of autograd
        log_p = (x @ weight.T).log_softmax(-1)
        loss = -log_p[rows, target].mean() + (weight.square() * decay).sum() / 2
        error = log_p.exp_()
        error[rows, target] -= 1
        weight.grad = error.T @ x / len(y) + weight * decay
        return loss

    with torch.no_grad():
        optimiser.step(closure)
    return weight
