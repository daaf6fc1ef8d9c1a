"""How often a claim's verdict is false by chance, and how often it is right: a simulation of every claim's rule.

    python tests/verdict_rates.py        # writes docs/verdict_rates.csv, which docs/generate.py prints in docs/verdicts.md

Each claim's own function is put to tables of runs whose numbers are noise. What it compares, and how the comparisons of one
seed hang together, is taken from there; tables of new seeds with the same covariance are then decided by the same rule.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
from planted import LAST, coefficients, evidence, formed, losses, options, per_layer, row, runs, sinks, training
from scipy import stats

from workbench.claims import CLAIMS
from workbench.claims import verdict as verdicts
from workbench.claims.sinks import AT_ZERO, EVEN, UNEVEN
from workbench.statistics.error_bars import LEVEL, over_seeds

TABLES, LOOKED_AT, SEEDS, COMPARED = 20_000, 12, 5, 100
OUT = Path(__file__).parent.parent / "docs" / "verdict_rates.csv"
Table = tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]
STEPS = ((0, 0.1), (100, 0.5), (200, 0.8), (LAST, 1.0))
CONTROLS = ("residual_q", "residual_k", "residual_attention", "residual_hidden")
SIZES = (1e5, 2e5, 4e5, 8e5)


def ended(made: list[dict[str, Any]], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Validation losses that end at noise."""
    return losses(made, lambda of: 2.7 + rng.normal(0, 0.01), domains=("a",))


def of_losses(*models: str, **facts: Any) -> Callable[[np.random.Generator], Table]:
    def table(rng: np.random.Generator) -> Table:
        made = runs(*models, seeds=SEEDS, **facts)
        return made, [], ended(made, rng)

    return table


def of_options(base: Sequence[str], **models: tuple[str, dict[str, Any]]) -> Callable[[np.random.Generator], Table]:
    def table(rng: np.random.Generator) -> Table:
        made = runs(*base, seeds=SEEDS, n_layers=8)
        for name, given in models.values():
            made += runs(name, seeds=SEEDS, n_layers=8, options=options(**given))
        return made, [], ended(made, rng)

    return table


def of_layers(*models: str, metrics: dict[str, list[dict[str, Any]]], n: int = 4, **facts: Any) -> Callable[..., Table]:
    """Records of metrics on their axes, noise around 1 in every layer, growing over the steps as losses fall."""

    def table(rng: np.random.Generator) -> Table:
        made, rows = runs(*models, seeds=SEEDS, n_layers=n, **facts), []
        for metric, axes in metrics.items():
            for one in axes:
                for step, share in STEPS:
                    value = lambda of, layer, s=share: 1.0 + s * (1 + rng.normal(0, 0.05))  # noqa: E731
                    rows += per_layer(made, metric, value, layers=range(n), step=step, **one)
        return made, rows, ended(made, rng)

    return table


def with_sinks(table: Callable[..., Table]) -> Callable[[np.random.Generator], Table]:
    def more(rng: np.random.Generator) -> Table:
        made, rows, told = table(rng)
        strongest = lambda of: 0.6 + rng.normal(0, 0.02)  # noqa: E731
        return made, rows + sinks(made, strongest), told

    return more


def start_tokens(rng: np.random.Generator) -> Table:
    made = [of for bos in (True, False) for of in runs("transformer", "resformer", seeds=SEEDS, bos=bos)]
    return made, sinks(made, lambda of: 0.6 + rng.normal(0, 0.02)), []


def sweep(rng: np.random.Generator) -> Table:
    models = ("transformer", "resformer", "transformer[first_layer_rate=5]")
    made = [of for rate in (1e-3, 2e-3, 4e-3) for of in runs(*models, seeds=SEEDS, lr=rate)]
    return made, [], ended(made, rng)


def grown(key: str) -> Callable[[np.random.Generator], Table]:
    def table(rng: np.random.Generator) -> Table:
        made, told = [], []
        for size in SIZES:
            facts = {"parameters": size, "d_model": int(size / 1e4)}
            facts = facts if key == "parameters" else {"tokens": int(size), "steps": int(size / 1e3)}
            more = runs("transformer", "resformer", seeds=SEEDS, **facts)
            level = 5 * (size / 1e5) ** -0.2
            told += [row(of, "validation_loss", level * (1 + rng.normal(0, 0.003)), step=of["steps"]) for of in more]
            made += more
        return made, [], told

    return table


def racing(rng: np.random.Generator) -> Table:
    made, told = [], []
    for rate in (1e-3, 2e-3, 4e-3):
        made += runs("svformer", "resformer", "transformer", "residual_k", seeds=SEEDS, task="repeated", lr=rate)
    for of in made:
        formed = int(rng.normal(40, 6))
        told += [row(of, "copy_loss", 4.0 if step < formed else 1.0, step=step) for step in range(0, 80, 2)]
    return made, [], told


def delayed(rng: np.random.Generator) -> Table:
    made = runs("transformer", "svformer", seeds=SEEDS, task="backcopy", n_layers=2)
    return made, *formed(made, lambda of: rng.normal(150, 30), lambda of: rng.normal(60, 10))


def gates(rng: np.random.Generator) -> Table:
    made = runs("transformer", "gated_attention", seeds=SEEDS, task="backcopy", n_layers=2)
    rows, told = formed(made, lambda of: 100, lambda of: 60)
    return made, [r | {"value": r["value"] + rng.normal(0, 0.02)} for r in rows], told


def beside(model: str, *metrics: tuple[str, str | None]) -> Callable[[np.random.Generator], Table]:
    def table(rng: np.random.Generator) -> Table:
        made = runs("transformer", model, seeds=SEEDS, task="backcopy")
        rows = sinks(made, lambda of: 0.6 + rng.normal(0, 0.02))
        for (metric, site), step in itertools.product(metrics, (0, LAST)):
            rows += per_layer(made, metric, lambda of, n: 2.0 + rng.normal(0, 0.1), site=site, step=step)
        return made, rows, ended(made, rng)

    return table


def of_lengths(rng: np.random.Generator) -> Table:
    made = [of for T in (128, 512) for of in runs("transformer", "exclusive_attention", seeds=SEEDS, T=T)]
    return made, [], ended(made, rng)


def held(rng: np.random.Generator) -> Table:
    made = runs("transformer", AT_ZERO, EVEN, UNEVEN, seeds=SEEDS, task="backcopy", n_layers=2)
    rows, told = formed(made, lambda of: rng.normal(150, 30), lambda of: 60)
    return made, [r | {"value": r["value"] + rng.normal(0, 0.02)} for r in rows], told


def overtaken(rng: np.random.Generator) -> Table:
    made = [of for T in (128, 256) for of in runs("transformer", "svformer", seeds=SEEDS, T=T)]

    def curve(of: dict[str, Any], steps: np.ndarray) -> np.ndarray:
        return 3.0 + (steps - rng.normal(150, 10)) / 1000 * (of["model"] == "svformer") + rng.normal(0, 0.002)

    return made, [], training(made, curve)


def averages(rng: np.random.Generator) -> Table:
    made = runs("transformer", "denseformer", seeds=SEEDS)
    told = ended(made, rng)
    for of in made[SEEDS:]:
        for n in range(4):
            told += [row(of, "coefficient", rng.normal(0, 0.1), layer=n, part=f"alpha_{j}") for j in range(n + 2)]
    return made, [], told


def late(rng: np.random.Generator) -> Table:
    models = {
        "a": ("resformer_sparse", {"layers": [5, 6, 7]}),
        "b": ("resformer_sparse[layers=[1,2]]", {"layers": [1, 2]}),
    }
    made, _, told = of_options(("resformer",), **models)(rng)
    learnt = runs("resformer_learnable", seeds=SEEDS, n_layers=8)
    return (
        made + learnt,
        [],
        told + [r | {"value": r["value"] + rng.normal(0, 0.1)} for r in coefficients(learnt, lambda n: 0.5)],
    )


def cached(*models: str) -> Callable[[np.random.Generator], Table]:
    def table(rng: np.random.Generator) -> Table:
        made = runs(*models, seeds=SEEDS)
        rows = [row(of, "cache_bytes", 1024 * (0.625 if of["model"] == "svformer" else 1)) for of in made]
        pace = [row(of, "tokens_per_second", 1000 * (1 + rng.normal(0, 0.02)), step=1) for of in made]
        return made, rows, ended(made, rng) + pace

    return table


def replaced(rng: np.random.Generator) -> Table:
    made, rows, told = of_layers(
        "transformer", metrics={"token_identity_share": [{"site": s} for s in ("own_v", "q", "k")]}
    )(rng)
    cost = {"token_mean": 0.2, "zero": 0.4}
    rows += [
        row(of, "value_ablation", c + rng.normal(0, 0.02), site="own_v", variant=how)
        for of in made
        for how, c in cost.items()
    ]
    return made, rows, told


def corrections(rng: np.random.Generator) -> Table:
    made, rows, told = of_layers("transformer", "resformer", metrics={"value_norm": [{"site": "own_v"}]})(rng)
    for part in ("attention", "mlp"):
        rows += per_layer(made, "sublayer_removal", lambda of, n: 0.5 + rng.normal(0, 0.05), part=part)
    rows += [row(of, "layer_similarity", 0.5 + rng.normal(0, 0.05), layer=n, source=n - 1, site="own_v", variant="cka")
             for of in made for n in (1, 2, 3)]  # fmt: skip
    return made, rows, told


def approximated(rng: np.random.Generator) -> Table:
    axes = [{"variant": "same_key"}, {"variant": "identity"}, {"control": "own"}]
    return of_layers("transformer", metrics={"cross_layer_approximation": axes}, n=8)(rng)


RESIDUAL, DEFICIT = ("transformer", "resformer"), {"importance_entropy": [{"variant": "deficit"}]}
LINKED = {
    "importance_entropy": [{}], "token_similarity": [{"site": "stream"}, {"site": "stream", "variant": "excl0"}],
    "concentration_parts": [{"variant": "profile"}, {"variant": "content"}],
}  # fmt: skip
RANKS = {"effective_rank": [{"site": "v"}, {"site": "v", "variant": "trace"}, {"site": "own_v"}]}
NOISE: dict[str, Callable[[np.random.Generator], Table]] = {
    "lower_loss": of_losses(*RESIDUAL), "fewer_parameters": grown("parameters"), "fewer_tokens": grown("tokens"),
    "same_cost": cached(*RESIDUAL), "ahead_of_relatives": of_losses("resformer", "neutreno", "denseformer"),
    "value_path_is_the_place": of_losses(*RESIDUAL, *CONTROLS),
    "first_layer_is_the_source": of_options(
        ("resformer",), **{f"s{n}": (f"resformer[source_layer={n}]", {"source_layer": n}) for n in (1, 2, 3)}),
    "late_layers_profit": late,
    "robust_to_its_weight": of_options(("transformer",), **{
        f"w{w}": (f"resformer_constant[lambda_v1={w:g}]", {"lambda_v1": w, "lambda_own": 1.0}) for w in (0.2, 0.5, 0.8, 1.0, 2.0, 5.0)}),
    "not_merely_easier_optimisation": sweep, "concentration_is_learned": of_layers("transformer", metrics=DEFICIT, n=8),
    "less_concentration_in_deep_layers": with_sinks(of_layers(*RESIDUAL, "svformer", metrics=DEFICIT)),
    "sinks_drains_and_peaks_vanish_together": with_sinks(
        of_layers(*RESIDUAL, metrics={"value_drain": [{"site": "own_v"}], "hidden_peak": [{"site": "stream"}]})),
    "start_token_decides_the_sinks": start_tokens, "sharing_values_delays_the_sink": delayed, "a_gate_prevents_the_sink": gates,
    "the_sink_waits_for_the_drain": held,
    "exclusive_heads_lower_the_loss": of_lengths,
    "a_value_gate_removes_outliers": beside("value_gate", ("massive_activations", "stream")),
    "sinks_gather_gradients_that_spikes_answer": beside("value_scale", ("gradient_sink", None), ("hidden_peak", "stream")),
    "smoothing_and_concentration_are_linked": with_sinks(of_layers(*RESIDUAL, metrics=LINKED)),
    "neutreno_smooths_less": of_layers("transformer", "neutreno", metrics={"token_similarity": [{"site": "stream"}]}),
    "value_residuals_smooth_less": of_layers(*RESIDUAL, metrics={"token_similarity": [{"site": "stream"}]}),
    "token_information_is_preserved": of_layers(*RESIDUAL, metrics={"token_probe": [{"site": "stream"}, {"site": "z"}]}),
    "deep_values_need_little_context": replaced, "richer_values": of_layers(*RESIDUAL, metrics=RANKS),
    "deep_layers_learn_a_correction": corrections, "same_key_averaging_approximates": approximated,
    "half_the_cache_for_a_small_penalty": cached("transformer", "svformer", "gqa", "cla"),
    "fast_at_first_then_overtaken": overtaken,
    "better_than_grouped_heads_at_length": of_losses("svformer", "gqa", "cla", T=32_000),
    "sharing_values_hurts_least": of_losses("share_v", "share_k", "share_q"),
    "half_of_the_heads_can_share_the_first_values": of_losses("transformer", "skip_v1"),
    "reuse_by_token_beats_constant_reuse": of_losses("satformer", "resformer", "resformer_learnable"),
    "deep_values_can_be_looked_up": of_losses("transformer", "bank_of_values"),
    "attention_residuals_lower_the_loss": of_losses("transformer", "attention_residuals", "attention_residuals[block=2]"),
    "averages_by_content_beat_fixed_ones": of_losses("denseformer", "attention_residuals"),
    "denseformer_weights_have_structure": averages, "value_paths_speed_up_induction": racing,
}  # fmt: skip
"""Tables of noise for every claim that can be judged."""


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


def _chosen_rate(n: int, seeds: int, rng: np.random.Generator) -> np.ndarray:
    """t of each model at the best of three rates, chosen on the same seeds; each seed has luck of its own."""
    losses = rng.standard_normal((n, seeds, 2, 3)) + rng.standard_normal((n, seeds, 1, 1))
    best = losses.mean(1, keepdims=True).argmin(-1)[..., None]
    return _t(np.take_along_axis(losses, best, axis=-1)[..., 0])


def _chosen_layer(n: int, seeds: int, rng: np.random.Generator) -> np.ndarray:
    """t in the layer, of eight, where the sum of both models is largest on the same seeds."""
    both = rng.standard_normal((2, n, seeds, 8))
    best = both.sum(0).mean(1, keepdims=True).argmax(-1)[..., None]
    return _t(np.stack([np.take_along_axis(x, best, axis=-1)[..., 0] for x in both], axis=-1))


def _t(pairs: np.ndarray) -> np.ndarray:
    change = pairs[..., 0] - pairs[..., 1]
    return change.mean(1, keepdims=True) / change.std(1, ddof=1, keepdims=True) * np.sqrt(change.shape[1])


def _settings(n: int, seeds: int, rng: np.random.Generator) -> np.ndarray:
    """t of one comparison in each of three comparable settings, all of them judged."""
    return np.concatenate([_t(rng.standard_normal((n, seeds, 1, 2))[:, :, 0]) for _ in range(3)], axis=1)


CHOICES = {
    "a loss at each model's best of 3 rates": _chosen_rate, "the layer where both models together have most": _chosen_layer,
    "one comparison in 3 comparable settings": _settings,
}  # fmt: skip
"""Where something is chosen, or several are judged: [table, test] t statistics where nothing differs."""


def choices(n: int = TABLES) -> Iterator[dict[str, Any]]:
    """Rates of false verdicts, in per cent, where a rate, a layer or a setting is chosen."""
    for name, draw in CHOICES.items():
        for seeds in (3, 5):
            t = draw(n, seeds, np.random.default_rng(0))
            clear = t.shape[1] * 2 * stats.t.sf(np.abs(t), seeds - 1) <= 1 - LEVEL
            up, down = (clear & (t > 0)).any(1), (clear & (t < 0)).any(1)
            found = {"supported": down & ~up, "refuted": up & ~down}
            rest = {k: round(100 * float(v.mean()), 1) for k, v in found.items()}
            yield {"claim": name, "comparisons": t.shape[1], "seeds": seeds, **rest}


if __name__ == "__main__":
    table = pd.DataFrame([*rates(sys.argv[1:] or tuple(NOISE)), *choices()])
    if not sys.argv[1:]:
        table.to_csv(OUT, index=False)
    print(table.to_string())
