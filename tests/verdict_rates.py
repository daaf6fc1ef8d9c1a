"""How often a claim's verdict is false by chance, and how often it is right: a simulation of every claim's rule.

    python tests/verdict_rates.py        # writes docs/verdict_rates.csv, which docs/generate.py prints in docs/verdicts.md

Each claim's own function is put to tables of runs whose numbers are noise. What it compares, and how the comparisons of one
seed hang together, is taken from there; tables of new seeds with the same covariance are then decided by the same rule.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
from noise import NOISE, Table
from planted import evidence
from scipy import stats

from workbench.claims import CLAIMS
from workbench.claims import verdict as verdicts
from workbench.statistics.censored import compare_steps
from workbench.statistics.intervals import LEVEL, over_seeds

TABLES, LOOKED_AT, COMPARED = 20_000, 12, 100
UNEVEN, CENSORED = 100, 1_000  # tables that a claim judges itself, and tables of censored steps
WIDER = 3.0  # factor of a wider spread
OUT = Path(__file__).parent.parent / "docs" / "verdict_rates.csv"


class Rule:
    """What a claim's function gave to `decide` on tables of noise: each seed's comparisons, and what is asked of them."""

    def __init__(self, name: str, rng: np.random.Generator) -> None:
        seen: list[np.ndarray] = []
        for _ in range(LOOKED_AT):
            with mock.patch.object(verdicts, "decide", wraps=verdicts.decide) as decided:
                found = CLAIMS[name].judge(evidence(*NOISE[name](rng)))
            assert decided.call_count == 1, f"{name}: {found.sentence}"
            (parts, expected), more = decided.call_args
            groups = [parts, more.get("also", {}), more.get("against", {})]
            given = [i for group in groups for i in group.values()]
            self.sizes, self.least = [len(group) for group in groups], more.get("min_seeds", 3)
            self.signs = np.array([expected] * len(given) if isinstance(expected, int) else list(expected))
            seen.append(np.stack([i.each for i in given], axis=1))
        each = np.concatenate(seen)
        assert np.isfinite(each).all(), f"{name}: a comparison is not a number"
        self.spread = each.std(axis=0, ddof=1)
        self.factor = (each - each.mean(axis=0)) / np.sqrt(len(each) - 1)

    def tables(self, n: int, seeds: int, sigmas: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Comparisons of new seeds, [table, seed, comparison]: the claimed way by so many standard deviations of one seed's."""
        noise = rng.standard_normal((n, seeds, len(self.factor))) @ self.factor
        return noise + sigmas * self.signs * self.spread

    def decide(self, tables: np.ndarray) -> np.ndarray:
        """What `verdict.decide` says of each table: 1 supported, -1 refuted, 0 unresolved."""
        support, contrary = self._both(tables)
        return np.where(contrary <= 1 - LEVEL, -1, support <= 1 - LEVEL)

    def odds(self, tables: np.ndarray) -> np.ndarray:
        """The smaller of a table's two odds, which decides it below 1 - LEVEL."""
        return np.minimum(*self._both(tables))

    def _both(self, tables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        n, seeds, _ = tables.shape
        if seeds < self.least:
            return np.ones(n), np.ones(n)
        t = tables.mean(1) / tables.std(1, ddof=1) * np.sqrt(seeds) * self.signs
        odds = stats.t.sf(t, seeds - 1)
        both, also, _ = self.sizes
        able = np.concatenate([odds[:, :both], odds[:, both + also :]], axis=1)
        return 2 * odds[:, : both + also].max(1), 2 * able.shape[1] * (1 - able.max(1))

    def said(self, tables: np.ndarray) -> list[str]:
        """What `verdict.decide` itself says of each of these tables."""
        edges = np.cumsum([0, *self.sizes])

        def status(table: np.ndarray) -> str:
            given = [{k: over_seeds(table[:, k]) for k in range(a, b)} for a, b in itertools.pairwise(edges)]
            more = {"also": given[1], "against": given[2], "min_seeds": self.least}
            return verdicts.decide(given[0], list(self.signs), **more)[0]

        return [status(table) for table in tables]

    def agrees(self, tables: np.ndarray) -> bool:
        """Whether `verdict.decide` itself says the same of these tables."""
        numbers = {"supported": 1, "refuted": -1}
        return [numbers.get(status, 0) for status in self.said(tables)] == self.decide(tables).tolist()


class Wide(np.random.Generator):
    """Normal numbers with a wider spread."""

    def normal(self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:
        return super().normal(loc, WIDER * np.asarray(scale), size)


def uneven(name: str, rng: np.random.Generator, wide_first: bool) -> Table:
    """A claim's table of noise in which the numbers of the first model, or of all others, spread more."""
    made, *plain = NOISE[name](rng)
    wide = NOISE[name](Wide(rng.bit_generator))[1:]
    runs = {of["run"] for of in made if (of["model"] == made[0]["model"]) == wide_first}
    rows, told = (
        [r for r in a if r["run"] not in runs] + [r for r in b if r["run"] in runs]
        for a, b in zip(plain, wide, strict=True)
    )
    return made, rows, told


def uneven_rates(name: str, n: int = UNEVEN) -> dict[str, float]:
    """How often the claim's own function decides tables in which nothing differs but the spread, in per cent; the worse direction."""
    rng = np.random.default_rng(0)
    said = [
        [CLAIMS[name].judge(evidence(*uneven(name, rng, first))).status for _ in range(n)] for first in (True, False)
    ]
    return {status: max(100 * one.count(status) / n for one in said) for status in ("supported", "refuted")}


def rates(names: Sequence[str] = tuple(NOISE), n: int = TABLES) -> Iterator[dict[str, Any]]:
    """Rates of false and right verdicts in per cent, for each claim at 3 and at 5 seeds.

    `supported`: nothing differs; `one part false`: all hold clearly but the first; `refuted`: nothing differs.
    """
    for name in names:
        rng = np.random.default_rng(0)
        rule = Rule(name, rng)
        m = len(rule.signs)
        for seeds in (3, 5):
            nothing = rule.tables(n, seeds, np.zeros(m), rng)
            nearest = np.argsort(np.abs(rule.odds(nothing) - (1 - LEVEL)))[:COMPARED]
            assert rule.agrees(nothing[np.r_[:COMPARED, nearest]]), name
            found = {"comparisons": m, "seeds": seeds, "supported": (rule.decide(nothing) > 0).mean()}
            but_one = np.array([0.0] + [30.0] * (m - 1))
            found["one part false"] = (rule.decide(rule.tables(n, seeds, but_one, rng)) > 0).mean()
            found["refuted"] = (rule.decide(nothing) < 0).mean()
            for sigma in (1, 2, 3):
                right = rule.decide(rule.tables(n // 4, seeds, np.full(m, float(sigma)), rng)) > 0
                found[f"power at {sigma} sigma"] = right.mean()
            yield {
                "claim": name,
                **{k: v if k in ("comparisons", "seeds") else round(100 * float(v), 1) for k, v in found.items()},
            }


def _chosen_rate(n: int, seeds: int, spread: float, rng: np.random.Generator) -> np.ndarray:
    """p of each model at the best of three rates, chosen on three other seeds; each seed has luck of its own."""

    def losses(seeds: int) -> np.ndarray:
        luck = rng.standard_normal((n, seeds, 1, 1))
        return luck + rng.standard_normal((n, seeds, 2, 3)) * np.array([spread, 1.0])[:, None]

    best = losses(3).mean(1, keepdims=True).argmin(-1)[..., None]
    return _p(np.take_along_axis(losses(seeds), best, axis=-1)[..., 0])


def _chosen_on_reported(n: int, seeds: int, spread: float, rng: np.random.Generator) -> np.ndarray:
    """As `_chosen_rate`, chosen on the seeds that are reported."""
    losses = (
        rng.standard_normal((n, seeds, 1, 1)) + rng.standard_normal((n, seeds, 2, 3)) * np.array([spread, 1.0])[:, None]
    )
    best = losses.mean(1, keepdims=True).argmin(-1)[..., None]
    return _p(np.take_along_axis(losses, best, axis=-1)[..., 0])


def _all_layers(n: int, seeds: int, spread: float, rng: np.random.Generator) -> np.ndarray:
    """p of the mean over eight layers, which are fixed beforehand."""
    return _p((rng.standard_normal((n, seeds, 2, 8)) * np.array([spread, 1.0])[:, None]).mean(-1))


def _censored(n: int, seeds: int, spread: float, rng: np.random.Generator) -> np.ndarray:
    """p of steps of which a third is never reached, by `compare_steps` itself, on as few tables as its permutations take."""
    found = []
    for _ in range(min(n, CENSORED)):
        at = 100 + rng.standard_normal((2, seeds)) * np.array([[spread], [1.0]])
        both = [
            pd.DataFrame({"at": np.minimum(x, 100.43), "formed": x < 100.43}) for x in at
        ]  # the middle third of a normal
        change = compare_steps(*both)
        found.append((change.p if np.isfinite(change.p) else 1.0) * (1 if change.value >= 0 else -1))
    return np.array(found)[:, None]


def _settings(n: int, seeds: int, spread: float, rng: np.random.Generator) -> np.ndarray:
    """p of one comparison in each of three comparable settings, all of them judged."""
    three = [_p(rng.standard_normal((n, seeds, 2)) * np.array([spread, 1.0])) for _ in range(3)]
    return np.concatenate(three, axis=1)


def _p(pairs: np.ndarray) -> np.ndarray:
    """Two-sided p of each table's paired differences, with their sign, [table, 1]."""
    change = pairs[..., 0] - pairs[..., 1]
    t = change.mean(1, keepdims=True) / change.std(1, ddof=1, keepdims=True) * np.sqrt(change.shape[1])
    return 2 * stats.t.sf(np.abs(t), change.shape[1] - 1) * np.sign(t)


CHOICES = {
    "a loss at each model's best of 3 rates, chosen on other seeds": _chosen_rate,
    "a loss at each model's best of 3 rates, chosen on the reported seeds": _chosen_on_reported,
    "the mean over all layers after the first": _all_layers,
    "steps that some runs never reach": _censored, "one comparison in 3 comparable settings": _settings,
}  # fmt: skip
"""Rules and not claims: [table, test] two-sided p, with the sign of the difference, where nothing differs but the spread."""


def choices(n: int = TABLES) -> Iterator[dict[str, Any]]:
    """Rates of false verdicts, in per cent, where something is chosen or censored: with equal spreads, and with one `WIDER`."""
    for name, draw in CHOICES.items():
        for seeds, (spread, told) in itertools.product(
            (3, 5), ((1.0, ""), (WIDER, f", one model spread {WIDER:.0f} times as wide"))
        ):
            p = draw(n, seeds, spread, np.random.default_rng(0))
            clear = p.shape[1] * np.abs(p) <= 1 - LEVEL
            up, down = (clear & (p > 0)).any(1), (clear & (p < 0)).any(1)
            found = {"supported": down & ~up, "refuted": up & ~down}
            rest = {k: round(100 * float(v.mean()), 1) for k, v in found.items()}
            yield {"claim": f"{name}{told}", "comparisons": p.shape[1], "seeds": seeds, **rest}


if __name__ == "__main__":
    table = pd.DataFrame([*rates(sys.argv[1:] or tuple(NOISE)), *choices()])
    if not sys.argv[1:]:
        table.to_csv(OUT, index=False)
    print(table.to_string())
