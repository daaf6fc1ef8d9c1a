"""How much of a token a vector still carries, as far as a linear probe can read it: converged, or estimated from sums."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from workbench.metrics.base import metric, wide
from workbench.metrics.probing import ClassSums, Discriminant, Prior, Reservoir, drawn, fitted, key_of

CONTROLLED = ("", "accuracy", "fraction")
STREAMED: Mapping[str, Mapping[str, bool]] = {"accuracy": {}, "fraction": {}, "ceiling": {}, "of_ceiling": {}}
BITS: Mapping[str, Mapping[str, bool]] = {**STREAMED, "spread": {}}
UNITS = {"accuracy": "share", "fraction": "share", "of_ceiling": "share"}
CONTROLS = {"shifted": {"shifted": True}, "random_labels": {"random_labels": True}}
SOURCE = "V-information, Xu et al. 2020; controls after Hewitt and Liang 2019"
SHIFT = 16


class _Probe:
    """What the probes do alike: which vector belongs to which target."""

    before = 0  # the target stands this many positions before the vector
    shifted = False
    errors: Mapping[str, float] = {}  # of what `result` returns, over held-out documents

    def update(self, vectors: Float[Tensor, "batch pos *width"], tokens: Int[Tensor, "batch pos"]) -> None:
        """Add a batch of documents."""
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

    (CE_unigram - CE_probe) / ln 2 on held-out documents, two of eight, in each of three splits of the documents that hold
    out different ones; their mean, and its error over documents. `spread`: standard deviation over the splits; nothing
    else is random, since the fit starts at the unigram and is convex. Five of eight documents fit the probe by L-BFGS, with
    a small ridge, on vectors whitened within tokens; one sets its temperature, down to the bare unigram, so that noise gives
    about 0 rather than the price of overfitting. The same for every model. It stops within 0.5 % of the bits at which
    scikit-learn's multinomial logistic regression converges on the same vectors and ridge (2 % where there is about one bit).
    Vectors that are scaled by dimension instead, as plain probes have them, are another family and give a weaker bound: of 4.2
    bits in a stream 2.6 at convergence and the best ridge, against 4.1; in head outputs, where there is less than one, as much.
    It keeps the 64 documents with the smallest hashes and 8,192
    vectors of them at most, whatever it is shown.

    The probe tells apart the tokens seen in fitting; others keep their unigram probability (add-one). `ceiling`: bits of a
    lookup of the token under that rule. `of_ceiling`: bits over it. `fraction`: of the unigram bits. `shifted`: the target is
    the token up to 16 positions before, what document-level leakage alone would give. `random_labels`: every token seen
    stands for a random one, what the probe can learn by heart. Controls take the first split.

    Caution: layer 1's own values and all SVFormer values are exact lookups and must reach 0.99 of the ceiling by construction;
    that is no finding, and where they do not, the probe is too weak here to tell anything of other sites.
    """

    splits, documents, vectors = 3, 64, 8192
    ridge, iterations, tolerance = 1e-3, 200, 1e-4

    def __init__(self, *, shifted: bool = False, random_labels: bool = False) -> None:
        self.shifted, self.random_labels, self.finite = shifted, random_labels, True
        self.reservoir = Reservoir(self.documents, self.vectors)

    def _add(self, key: bytes, x: Tensor, y: Tensor) -> None:
        self.finite = self.finite and bool(x.isfinite().all())
        self.reservoir.add(key, *drawn(key, x, y, self.vectors))

    def merge(self, other: TokenProbe) -> None:
        """Add what another accumulator has kept."""
        self.finite = self.finite and other.finite
        for key, (x, y) in other.reservoir.kept.items():
            self.reservoir.add(key, x, y)

    def result(self) -> Mapping[str, float]:
        """{"": bits, and the variants} on the held-out documents; NaN with fewer than seven documents."""
        control = self.shifted or self.random_labels
        if len(self.reservoir.kept) < 7 or not self.finite:
            return dict.fromkeys(CONTROLLED if control else ("", *BITS), math.nan)
        judged = [self._held_out(split) for split in range(1 if control else self.splits)]
        means, self.errors = _means(torch.cat(judged))
        if control:
            return {key: means[key] for key in CONTROLLED}
        return means | {"spread": float(torch.stack([each[:, 0].mean() for each in judged]).std())}

    @torch.no_grad()
    def _held_out(self, split: int) -> Tensor:
        """What `Prior.judged` finds on the documents that a split holds out."""
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
    """Bits of the previous token's identity that a linear softmax probe recovers: mixing, where `token_probe` is retention.

    As `token_probe`, three splits included, with the target one position before; position 0, which has none, is left out.
    Caution: neighbours are alike in text, so the identity of a token tells of the one before it; layer 0's stream, which has
    mixed nothing in, is the baseline.
    """

    before = 1


@metric(
    unit="bits", range="<= entropy of the tokens", reading="higher: more of the token's identity is linearly readable", folds=1,
    source="linear discriminant analysis, its class means drawn to the centre as random effects; " + SOURCE,
    sites=("stream", "z", "own_v", "v", "q", "k"), variants=STREAMED, units=UNITS,
    controls={"shifted": {"shifted": True}}, min_length=2, version=3,
)  # fmt: skip
class TokenProbeStreamed(_Probe):
    """`token_probe` estimated: the same bits by a probe in closed form, from sums over any number of documents.

    Linear discriminant analysis from each token's count and sum of vectors and the second moment of all; nothing is
    iterated. Sixteen documents at most (a quarter) are held out and eight (an eighth) set the temperature: those with the
    smallest hashes, kept until the end, so one pass is enough and the order does not matter. At most 256 positions of a
    document are used. Variants and `shifted` as there; a single split.

    Caution: not for comparing models. Against the converged probe on the same documents (4 layers, d 96, 300 steps on text) it
    loses nothing on lookups and .00-.05 bits of 7.6 at init, but .55 bits and .07 of the accuracy on a vanilla model's last own
    values (6.6 bits) and .08 on ResFormer's, which nearly doubles their difference. Where about one bit is left it may find
    more (1.6 against 1.3).
    """

    held, tuned, positions = 16, 8, 256

    def __init__(self, *, shifted: bool = False) -> None:
        self.shifted, self.seen, self.sums = shifted, 0, ClassSums()
        self.reservoir = Reservoir(self.held + self.tuned, 32 * self.positions)

    def _add(self, key: bytes, x: Tensor, y: Tensor) -> None:
        self._keep(key, *drawn(key, x, y, self.positions))

    def _keep(self, key: bytes, x: Tensor, y: Tensor) -> None:
        for vectors, targets in self.reservoir.add(key, x, y):
            self.sums.add(vectors, targets)
            self.seen += 1

    def merge(self, other: TokenProbeStreamed) -> None:
        """Add what another accumulator has seen."""
        self.sums.merge(other.sums)
        self.seen += other.seen
        for key, (x, y) in other.reservoir.kept.items():
            self._keep(key, x, y)

    @torch.no_grad()
    def result(self) -> Mapping[str, float]:
        """{"": bits, and the variants} on the held-out documents; NaN with fewer than seven documents."""
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
    """`previous_token_probe` estimated: as `token_probe_streamed`, with the target one position before.

    Caution: worse than the estimate of the token itself, since what is mixed in is a small part of the vector.
    """

    before = 1


def _random_labels(y: Tensor, size: int, seed: int) -> Tensor:
    """A token for every token [size]: those in `y` get one of these, drawn by frequency; all others stay."""
    label = torch.arange(size)
    seen, counts = y.unique(return_counts=True)
    draw = counts.double().multinomial(len(seen), True, generator=torch.Generator().manual_seed(seed))
    label[seen] = seen[draw]
    return label


def _means(judged: Tensor) -> tuple[dict[str, float], dict[str, float]]:
    """Means over documents under the variants' names, and their standard errors, from what `Prior.judged` finds."""
    bits, accuracy, unigram, ceiling = judged.mean(0).tolist()
    share = bits / ceiling if ceiling > 0 else math.nan
    means = {"": bits, "accuracy": accuracy, "fraction": bits / unigram, "ceiling": ceiling, "of_ceiling": share}
    if len(judged) < 2:
        return means, {}
    errors = (judged.std(0) / math.sqrt(len(judged))).tolist()
    return means, {"": errors[0], "accuracy": errors[1], "ceiling": errors[3]}
