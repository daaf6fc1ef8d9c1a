"""Tables of runs whose numbers are noise, one kind for every claim that can be judged: what `verdict_rates` puts their rules to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from planted import LAST, coefficients, formed, losses, options, per_layer, row, runs, sinks, training

from workbench.claims.registry import SCALED
from workbench.claims.sinks import AT_ZERO, EVEN, UNEVEN

SEEDS = 5
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
    models = ("transformer", "resformer", "transformer[first_layer_rate=5]", SCALED)
    made = [of for rate in (1e-3, 2e-3, 4e-3) for of in runs(*models, seeds=SEEDS, lr=rate)]
    return made, [], ended(made, rng)


def grown(key: str) -> Callable[[np.random.Generator], Table]:
    def table(rng: np.random.Generator) -> Table:
        made, told = [], []
        for size in SIZES:
            facts = {"parameters": size, "d_model": int(size / 1e4)}
            facts = facts if key == "parameters" else {"tokens": int(size), "steps": int(size / 1e3), "parameters": 1e3}
            more = runs("transformer", SCALED, "resformer", seeds=SEEDS, **facts)
            level = 5 * (size / 1e5) ** -0.2
            told += [row(of, "validation_loss", level * (1 + rng.normal(0, 0.003)), step=of["steps"]) for of in more]
            made += more
        return made, [], told

    return table


def racing(rng: np.random.Generator) -> Table:
    made, told = [], []
    for rate in (1e-3, 2e-3, 4e-3):
        made += runs(
            "transformer", "svformer", "resformer", "residual_k", SCALED, seeds=SEEDS, task="repeated", lr=rate
        )
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


def beside(*models: str, **metrics: str | None) -> Callable[[np.random.Generator], Table]:
    """Ratios at a site, noise around 2, of vanilla and models that all have sinks."""

    def table(rng: np.random.Generator) -> Table:
        made = runs("transformer", *models, seeds=SEEDS, task="backcopy")
        rows = sinks(made, lambda of: 0.6 + rng.normal(0, 0.02))
        for (metric, site), step in itertools.product(metrics.items(), (0, LAST)):
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


def routed(rng: np.random.Generator) -> Table:
    made = runs("attention_residuals", seeds=SEEDS)
    metrics = [
        ("depth_routing", {}),
        ("source_ablation", {"variant": "mean"}),
        ("source_ablation", {"control": "random"}),
    ]
    rows = [
        row(of, metric, rng.normal(1, 0.1), layer=n, site="depth_weights", part=part, **axes)
        for metric, axes in metrics for of in made for n in range(4) for part in "abcd"
    ]  # fmt: skip
    return made, rows, []


RESIDUAL, DEFICIT = ("transformer", "resformer"), {"importance_entropy": [{"variant": "deficit"}]}
LINKED = {
    "importance_entropy": [{}], "token_similarity": [{"site": "stream"}, {"site": "stream", "variant": "excl0"}],
    "concentration_parts": [{"variant": "profile"}, {"variant": "content"}],
}  # fmt: skip
RANKS = {"effective_rank": [{"site": "v"}, {"site": "v", "variant": "trace"}, {"site": "own_v"}]}
NOISE: dict[str, Callable[[np.random.Generator], Table]] = {
    "lower_loss": of_losses(*RESIDUAL, SCALED), "fewer_parameters": grown("parameters"), "fewer_tokens": grown("tokens"),
    "same_cost": cached(*RESIDUAL), "ahead_of_relatives": of_losses("resformer", "neutreno", "denseformer"),
    "value_path_is_the_place": of_losses(*RESIDUAL, *CONTROLS, SCALED),
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
    "a_value_gate_removes_outliers": beside("value_gate", massive_activations="stream"),
    "sinks_gather_gradients_that_spikes_answer": beside("value_scale", gradient_sink=None, hidden_peak="stream"),
    "norms_remove_spikes_and_leave_sinks": beside("sandwich_norm", "post_norm", "dyt", massive_activations="stream"),
    "smoothing_and_concentration_are_linked": with_sinks(of_layers(*RESIDUAL, metrics=LINKED)),
    "neutreno_smooths_less": of_layers("transformer", "neutreno", metrics={"token_similarity": [{"site": "stream"}]}),
    "value_residuals_smooth_less": of_layers(*RESIDUAL, SCALED, metrics={"token_similarity": [{"site": "stream"}]}),
    "token_information_is_preserved": of_layers(*RESIDUAL, SCALED, metrics={"token_probe": [{"site": "stream"}, {"site": "z"}]}),
    "deep_values_need_little_context": replaced, "richer_values": of_layers(*RESIDUAL, SCALED, metrics=RANKS),
    "deep_layers_learn_a_correction": corrections, "same_key_averaging_approximates": approximated,
    "half_the_cache_for_a_small_penalty": cached("transformer", "svformer", "gqa", "cla"),
    "fast_at_first_then_overtaken": overtaken,
    "better_than_grouped_heads_at_length": of_losses("svformer", "gqa", "cla", T=32_000),
    "sharing_values_hurts_least": of_losses("share_v", "share_k", "share_q"),
    "half_of_the_heads_can_share_the_first_values": of_losses("transformer", "skip_v1"),
    "reuse_by_token_beats_constant_reuse": of_losses("satformer", "resformer", "resformer_learnable"),
    "deep_values_can_be_looked_up": of_losses("transformer", "bank_of_values"),
    "attention_residuals_lower_the_loss": of_losses("transformer", "attention_residuals", "attention_residuals[depth_blocks=2]"),
    "what_is_read_most_is_needed_most": routed,
    "values_read_the_embedding_queries_and_keys_the_latest": of_layers("attention_residuals", metrics={"reader_ablation": [
        {"site": site, "part": part} for site in ("q", "k", "v") for part in ("embed", "latest")]}),
    "averages_by_content_beat_fixed_ones": of_losses("denseformer", "attention_residuals"),
    "denseformer_weights_have_structure": averages, "value_paths_speed_up_induction": racing,
}  # fmt: skip
"""Tables of noise for every claim that can be judged."""
