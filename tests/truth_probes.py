"""The probes once more: scikit-learn's multinomial logistic regression run to convergence, and discriminant analysis in numpy.

Nothing of the product is imported. `probe(vectors, ids)` gives {variant: value}, of vectors [document, position, width].
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression

RIDGE, TOTAL, SHIFT = 1e-3, 0.03, 16
SHARPNESS = [0.0, *(10 ** (i / 8) for i in range(-16, 5))]


def documents(x, ids, before=0, shifted=False):
    """(vectors, targets) of each document, in the order of its hash."""
    found = []
    for vectors, row in zip(np.asarray(x, np.float64), np.asarray(ids), strict=True):
        targets = row[: len(row) - before]
        if shifted:
            targets = np.roll(targets, min(SHIFT, len(targets) // 2))
        key = hashlib.blake2b(row.astype(np.int64).tobytes(), digest_size=8).digest()
        found.append((key, vectors[before:], targets))
    return [(v, t) for _, v, t in sorted(found, key=lambda d: d[0])]


def moments(x, y):
    """(mean, within, whole, classes, counts, centres less the mean)."""
    classes, counts = np.unique(y, return_counts=True)
    mean = x.mean(0)
    centres = np.stack([x[y == c].mean(0) for c in classes]) - mean
    rest = x - mean - centres[np.searchsorted(classes, y)]
    return mean, rest.T @ rest / (len(x) - len(classes)), np.cov(x.T, bias=True), classes, counts, centres


def whitening(within, whole):
    values, turn = np.linalg.eigh(within + TOTAL * whole)
    return turn / np.sqrt(np.maximum(values, 1e-6 * values[-1]))


def logistic(x, y):
    """Scores of a softmax regression, its loss's mean plus RIDGE / 2 times the squared weights, at its minimum."""
    mean, within, whole, *_ = moments(x, y)
    turn = whitening(within, whole)
    model = LogisticRegression(C=1 / (RIDGE * len(y)), tol=1e-7, max_iter=20_000).fit((x - mean) @ turn, y)
    return lambda v: model.decision_function((v - mean) @ turn)


def discriminant(x, y):
    """ln(count) less half the squared distance to each centre, the centres drawn to the mean as random effects are."""
    mean, within, whole, _, counts, centres = moments(x, y)
    n, k = len(y), len(counts)
    between = (centres.T * counts) @ centres / (k - 1) - within
    between /= (n - (counts**2).sum() / n) / (k - 1)
    turn = whitening(within, whole)
    spread, rotation = np.linalg.eigh(turn.T @ between @ turn)
    turn = turn @ rotation
    weight = counts[:, None] * np.maximum(spread, 0)
    drawn = centres @ turn * (weight / (weight + 1))
    return lambda v: np.log(counts) - (((v - mean) @ turn)[:, None] - drawn[None]).__pow__(2).sum(-1) / 2


def judged(scores, fitted_on, tune, held, size):
    """[document, 4]: bits, accuracy, unigram bits, bits of a lookup."""
    seen = np.unique(fitted_on)
    counts = np.bincount(np.concatenate((fitted_on, tune[1])), minlength=size) + 1.0
    log_p = np.log(counts / counts.sum())
    mass = np.log(np.exp(log_p[seen]).sum())

    def reads(v, y, sharpness):
        """(nats, whether right) of each position; tokens not seen keep their unigram probability."""
        z = log_p[seen] + sharpness * (scores(v) - log_p[seen])
        z = z - z.max(1, keepdims=True)
        z = z - np.log(np.exp(z).sum(1, keepdims=True)) + mass
        place = np.minimum(np.searchsorted(seen, y), len(seen) - 1)
        known = seen[place] == y
        return -np.where(known, z[np.arange(len(y)), place], log_p[y]), seen[z.argmax(1)] == y, known

    def least_sharp_of_the_best(grid):
        losses = np.array([reads(*tune, a)[0].mean() for a in grid])
        return int(np.argmax(losses <= losses.min() + 1e-6))

    i = least_sharp_of_the_best(SHARPNESS)
    finer = np.linspace(SHARPNESS[max(i - 1, 0)], SHARPNESS[min(i + 1, len(SHARPNESS) - 1)], 41)
    best = finer[least_sharp_of_the_best(finer)]
    rows = []
    for v, y in held:
        nats, right, known = reads(v, y, best)
        ceiling = np.where(known, mass - log_p[y], 0.0)
        rows.append([(-log_p[y] - nats).mean(), right.mean(), -log_p[y].mean(), ceiling.mean()])
    return np.array(rows) / np.array([np.log(2), 1, np.log(2), np.log(2)])


def told(rows):
    bits, accuracy, unigram, ceiling = rows.mean(0)
    return {
        "": bits, "accuracy": accuracy, "fraction": bits / unigram, "ceiling": ceiling, "of_ceiling": bits / ceiling
    }  # fmt: skip


def join(parts):
    return tuple(np.concatenate(each) for each in zip(*parts, strict=True))


def probe(x, ids, *, before=0, shifted=False, random_labels=False):
    """Three splits of the documents in eighths: five fit, one tunes, two are held out; controls take the first split."""
    docs = documents(x, ids, before, shifted)
    size, splits = 1 + max(y.max() for _, y in docs), []
    for split in range(1 if shifted or random_labels else 3):
        sides = [[d for i, d in enumerate(docs) if (i + split) % 8 in side] for side in ((0, 1, 2, 4, 5), (6,), (3, 7))]
        (v, y), (tune, tuned), held = join(sides[0]), join(sides[1]), sides[2]
        if random_labels:
            seen, counts = torch.from_numpy(y).unique(return_counts=True)
            draw = counts.double().multinomial(len(seen), True, generator=torch.Generator().manual_seed(split))
            label = np.arange(size)
            label[seen.numpy()] = seen[draw].numpy()
            y, tuned, held = label[y], label[tuned], [(v, label[t]) for v, t in held]
        splits.append(judged(logistic(v, y), y, (tune, tuned), held, size))
    found = told(np.concatenate(splits))
    if shifted or random_labels:
        return {name: found[name] for name in ("", "accuracy", "fraction")}
    return found | {"spread": float(np.std([rows[:, 0].mean() for rows in splits], ddof=1))}


def streamed(x, ids, *, before=0, shifted=False):
    """A quarter of the documents is held out, an eighth tunes, the rest is fitted on: those with the smallest hashes first."""
    docs = documents(x, ids, before, shifted)
    first = min(16, len(docs) // 4)
    last = first + min(8, max(len(docs) // 8, 1))
    v, y = join(docs[last:])
    size = 1 + max(t.max() for _, t in docs)
    found = told(judged(discriminant(v, y), y, join(docs[first:last]), docs[:first], size))
    return {name: found[name] for name in ("", "accuracy", "fraction")} if shifted else found
