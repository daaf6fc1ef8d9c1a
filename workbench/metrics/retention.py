"""Token information in vectors: bits that a linear probe recovers, fitted to convergence or estimated from sums."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from workbench.metrics.base import metric, wide
from workbench.metrics.probing import ClassSums, Discriminant, Prior, Reservoir, draw_positions, fitted, key_of

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

    The fit starts at the unigram and is convex, so nothing but the splits is random. It stops within 0.5 % of the bits of
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
        judged = [self._held_out(split) for split in range(1 if control else self.splits)]
        means, self.errors = _means(torch.cat(judged))
        if control:
            return {key: means[key] for key in CONTROLLED}
        return means | {"spread": float(torch.stack([each[:, 0].mean() for each in judged]).std())}

    @torch.no_grad()
    def _held_out(self, split: int) -> Tensor:
        """Return the results of `Prior.judged` on the held-out documents of a split."""
        documents = self.reservoir.sorted()
        eighths = (0, 1, 2, 4, 5), (6,), (3, 7)
        sides = [[d for i, d in enumerate(documents) if (i + split) % 8 in side] for side in eighths]
        (x, y), (tune, tuned) = ([torch.cat(part) for part in zip(*side, strict=True)] for side in sides[:2])
        held = sides[2]
        size = 1 + max(int(targets.max()) for _, targets in documents)
        if self.random_labels:
            label = _random_labels(y, size, split)
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
        means, self.errors = _means(judged)
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


def _random_labels(y: Tensor, size: int, seed: int) -> Tensor:
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
