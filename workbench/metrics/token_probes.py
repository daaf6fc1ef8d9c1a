"""Token information in vectors: bits that a linear probe recovers, fitted to convergence or estimated from sums.

A probe distinguishes the tokens seen in fitting. All others have their unigram probability (add-one). The ceiling is the result
of a lookup of the true token under that rule: it knows every token seen, and loses the bits of all others.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from workbench.metrics.base import metric, wide

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


CONTROLLED = ("", "accuracy", "fraction")
STREAMED: Mapping[str, Mapping[str, bool]] = {"accuracy": {}, "fraction": {}, "ceiling": {}, "of_ceiling": {}}
BITS: Mapping[str, Mapping[str, bool]] = {**STREAMED, "spread": {}}
UNITS = {"accuracy": "share", "fraction": "share", "of_ceiling": "share"}
CONTROLS = {"shifted": {"shifted": True}, "random_labels": {"random_labels": True}}
SOURCE = "V-information, Xu et al. 2020; controls after Hewitt and Liang 2019"
SHIFT = 16


class _Probe:
    """Base of the probes: pairs of vectors and targets."""

    before = 0  # positions from the target to the vector
    shifted = False
    errors: Mapping[str, float] = {}  # standard errors of the results over held-out documents
    documents_held_out: int | None = None  # number of them, once there is a result

    def update(self, vectors: Float[Tensor, "batch pos *width"], tokens: Int[Tensor, "batch pos"]) -> None:
        vectors, targets = vectors[:, self.before :].flatten(2), tokens[:, : tokens.shape[1] - self.before]
        shift = min(SHIFT, targets.shape[1] // 2) if self.shifted else 0
        for x, y, ids in zip(wide(vectors), targets.roll(shift, dims=1), tokens, strict=True):
            self._add(key_of(ids), x, y)

    def _add(self, key: bytes, x: Tensor, y: Tensor) -> None:
        raise NotImplementedError


@metric(
    unit="bits", range="<= entropy of the tokens", reading="higher: more of the token's identity is linearly readable", folds=1,
    source=SOURCE, sites=("stream", "z", "own_v", "v", "q", "k"), variants=BITS, units=UNITS, controls=CONTROLS, min_length=2,
    version=3,
)  # fmt: skip
class TokenProbe(_Probe):
    """Bits of the input token's identity that a linear softmax probe recovers beyond token frequency, fitted to convergence.

    (CE_unigram - CE_probe) / ln 2 on two of eight documents, which are held out. Mean over three splits that hold out different
    documents; its error is over documents. Five of eight documents fit the probe by L-BFGS, with a small ridge, on vectors
    whitened within tokens. One sets the temperature, down to the unigram, so that noise gives about 0. At most 64 documents,
    those with the smallest hashes, and 8,192 of their vectors are used.

    The probe distinguishes the tokens seen in fitting. Others have their unigram probability (add-one). Variants:
    `ceiling`: bits of a lookup of the token under that rule. `of_ceiling`: bits over the ceiling. `fraction`: bits over the
    unigram bits. `accuracy`: share of tokens predicted right. `spread`: standard deviation over the splits.
    Controls, on the first split: `shifted`, with the token up to 16 positions before as target, measures leakage within a
    document. `random_labels`, with a random token for every token, measures memorisation.

    The fit starts at the unigram and is convex, so nothing but the splits is random. It stops within 1.5 % of the bits of
    scikit-learn's converged multinomial logistic regression on the same vectors and ridge (2 % at about one bit). Probes on
    vectors scaled by dimension give a weaker bound: 2.6 instead of 4.1 of 4.2 bits in a stream, at the best ridge.

    Caution: layer 1's own values and all SVFormer values are exact lookups and must reach 0.99 of the ceiling by construction.
    If they do not, the probe is too weak for conclusions at other sites.
    """

    splits, documents, vectors = 3, 64, 8192
    ridge, iterations, tolerance = 1e-3, 200, 1e-4

    def __init__(self, *, shifted: bool = False, random_labels: bool = False) -> None:
        self.shifted, self.random_labels, self.finite = shifted, random_labels, True
        self.reservoir = Reservoir(self.documents, self.vectors)

    def _add(self, key: bytes, x: Tensor, y: Tensor) -> None:
        self.finite = self.finite and bool(x.isfinite().all())
        self.reservoir.add(key, *draw_positions(key, x, y, self.vectors))

    def merge(self, other: TokenProbe) -> None:
        self.finite = self.finite and other.finite
        for key, (x, y) in other.reservoir.sample.items():
            self.reservoir.add(key, x, y)

    def result(self) -> Mapping[str, float]:
        """Return {"": bits, and the variants} on the held-out documents; NaN with fewer than seven documents."""
        control = self.shifted or self.random_labels
        if len(self.reservoir.sample) < 7 or not self.finite:
            return dict.fromkeys(CONTROLLED if control else ("", *BITS), math.nan)
        judged = [self.held_out_results(split) for split in range(1 if control else self.splits)]
        means, self.errors = _means(torch.cat(judged))
        self.documents_held_out = sum(map(len, judged))
        if control:
            return {key: means[key] for key in CONTROLLED}
        return means | {"spread": float(torch.stack([each[:, 0].mean() for each in judged]).std())}

    @torch.no_grad()
    def held_out_results(self, split: int) -> Tensor:
        """Return the results of `Prior.judged` on the held-out documents of a split."""
        documents = self.reservoir.sorted()
        eighths = (0, 1, 2, 4, 5), (6,), (3, 7)
        sides = [[d for i, d in enumerate(documents) if (i + split) % 8 in side] for side in eighths]
        (x, y), (tune, tuned) = ([torch.cat(part) for part in zip(*side, strict=True)] for side in sides[:2])
        held = sides[2]
        size = 1 + max(int(targets.max()) for _, targets in documents)
        if self.random_labels:
            label = random_labels(y, size, split)
            y, tuned, held = label[y], label[tuned], [(v, label[targets]) for v, targets in held]
        sums = ClassSums()
        sums.add(x, y)
        basis = Discriminant.of(sums)
        prior = Prior.of(torch.cat((y, tuned)).bincount(minlength=size), y.unique())
        weight = fitted(basis.coordinates(x), y, ridge=self.ridge, iterations=self.iterations, tolerance=self.tolerance)
        scored = [(basis.coordinates(v) @ weight.T, targets) for v, targets in held]
        return prior.judged((basis.coordinates(tune) @ weight.T, tuned), scored)


@metric(
    unit="bits", range="<= entropy of the tokens", reading="higher: the vector has mixed in its neighbour", folds=1,
    source="V-information, Xu et al. 2020, of the token before", sites=("stream", "z"), variants=BITS,
    units=UNITS, controls=CONTROLS, min_length=4, version=3,
)  # fmt: skip
class PreviousTokenProbe(TokenProbe):
    """Bits of the previous token's identity that a linear softmax probe recovers: a measure of mixing.

    As `token_probe` with the target one position before; position 0 is left out. Caution: neighbouring tokens in text are
    related, so a token's identity predicts the previous one. The baseline is layer 0's stream, before any mixing.
    """

    before = 1


@metric(
    unit="bits", range="<= entropy of the tokens", reading="higher: more of the token's identity is linearly readable", folds=1,
    source="linear discriminant analysis, its class means drawn to the centre as random effects; " + SOURCE,
    sites=("stream", "z", "own_v", "v", "q", "k"), variants=STREAMED, units=UNITS,
    controls={"shifted": {"shifted": True}}, min_length=2, version=3,
)  # fmt: skip
class TokenProbeStreamed(_Probe):
    """Estimate of `token_probe`: the same bits by a probe in closed form, from sums over any number of documents.

    Linear discriminant analysis from the count and sum of vectors per token and the second moment of all vectors. At most
    sixteen documents (a quarter), those with the smallest hashes, are held out, and the next eight (an eighth) set the
    temperature, so that one pass is enough and the order does not matter. At most 256 positions of a document are used.
    Variants and the control `shifted` as in `token_probe`, on a single split.

    Caution: not for comparing models. Compared with the converged probe on the same documents (4 layers, d 96, 300 steps on
    text), it loses nothing on lookups and 0.00 to 0.05 of 7.6 bits at init. On a vanilla model's last own values it loses 0.55
    of 6.6 bits and 0.07 of the accuracy, on ResFormer's 0.08 bits, which nearly doubles their difference. At about one bit it
    may give more (1.6 instead of 1.3).
    """

    held, tuned, positions = 16, 8, 256

    def __init__(self, *, shifted: bool = False) -> None:
        self.shifted, self.seen, self.sums = shifted, 0, ClassSums()
        self.reservoir = Reservoir(self.held + self.tuned, 32 * self.positions)

    def _add(self, key: bytes, x: Tensor, y: Tensor) -> None:
        self._keep(key, *draw_positions(key, x, y, self.positions))

    def _keep(self, key: bytes, x: Tensor, y: Tensor) -> None:
        for vectors, targets in self.reservoir.add(key, x, y):
            self.sums.add(vectors, targets)
            self.seen += 1

    def merge(self, other: TokenProbeStreamed) -> None:
        self.sums.merge(other.sums)
        self.seen += other.seen
        for key, (x, y) in other.reservoir.sample.items():
            self._keep(key, x, y)

    @torch.no_grad()
    def result(self) -> Mapping[str, float]:
        """Return {"": bits, and the variants} on the held-out documents; NaN with fewer than seven documents."""
        documents = self.reservoir.sorted()
        n = self.seen + len(documents)
        names = CONTROLLED if self.shifted else ("", *STREAMED)
        if n < 7 or not (self.sums.second.isfinite().all() and all(x.isfinite().all() for x, _ in documents)):
            return dict.fromkeys(names, math.nan)
        first, last = min(self.held, n // 4), min(self.held, n // 4) + min(self.tuned, max(n // 8, 1))
        held, tune = documents[:first], [torch.cat(part) for part in zip(*documents[first:last], strict=True)]
        sums = ClassSums()
        sums.merge(self.sums)
        for x, y in documents[last:]:
            sums.add(x, y)
        basis, (seen, counts, _) = Discriminant.of(sums), sums.ascending()
        size = 1 + max(int(seen[-1]), *(int(y.max()) for _, y in documents))
        prior = Prior.of(tune[1].bincount(minlength=size).index_add(0, seen, counts.long()), seen)
        judged = prior.judged((basis.scores(tune[0]), tune[1]), [(basis.scores(x), y) for x, y in held])
        (means, self.errors), self.documents_held_out = _means(judged), len(judged)
        return {key: means[key] for key in names}


@metric(
    unit="bits", range="<= entropy of the tokens", reading="higher: the vector has mixed in its neighbour", folds=1,
    source="linear discriminant analysis, as `token_probe_streamed`", sites=("stream", "z"), variants=STREAMED,
    units=UNITS, controls={"shifted": {"shifted": True}}, min_length=4, version=2,
)  # fmt: skip
class PreviousTokenProbeStreamed(TokenProbeStreamed):
    """Estimate of `previous_token_probe`: as `token_probe_streamed` with the target one position before.

    Caution: less accurate than the estimate of the token itself, since earlier tokens are a small part of the vector.
    """

    before = 1


def random_labels(y: Tensor, size: int, seed: int) -> Tensor:
    """Return a token for every token [size]: tokens in `y` get one of these, drawn by frequency, others stay."""
    label = torch.arange(size)
    seen, counts = y.unique(return_counts=True)
    draw = counts.double().multinomial(len(seen), True, generator=torch.Generator().manual_seed(seed))
    label[seen] = seen[draw]
    return label


def _means(judged: Tensor) -> tuple[dict[str, float], dict[str, float]]:
    """Return means over documents by variant, and their standard errors, from the results of `Prior.judged`."""
    bits, accuracy, unigram, ceiling = judged.mean(0).tolist()
    share = bits / ceiling if ceiling > 0 else math.nan
    means = {"": bits, "accuracy": accuracy, "fraction": bits / unigram, "ceiling": ceiling, "of_ceiling": share}
    if len(judged) < 2:
        return means, {}
    errors = (judged.std(0) / math.sqrt(len(judged))).tolist()
    return means, {"": errors[0], "accuracy": errors[1], "ceiling": errors[3]}
