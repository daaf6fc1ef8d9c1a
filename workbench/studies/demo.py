"""The demo: two experiments on real models, trained and measured on this machine while the dashboard shows them.

1. The race to induction: two-layer models on random tokens repeated once; at which step does each learn to copy?
2. What deep values carry: four-layer models on the standard library's text; how much of a value is its token alone?

Every architecture runs with the same seeds, so equal-named weights and all batches are equal between them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.config import PRESETS, ModelConfig, TrainConfig
from workbench.errors import WorkbenchError
from workbench.training.workers import Job, Status, run_jobs, shared_text

STATUS = ".demo.json"
RACE_ARCHITECTURES = ("svformer", "resformer", "transformer", "residual_k")
TEXT_ARCHITECTURES = ("transformer", "resformer", "svformer", "neutreno", "denseformer")
RACE_MODEL = ModelConfig(n_layers=2, d_model=64, n_heads=2, d_mlp=176, d_vocab=64, n_ctx=128)
# constant rate after the warm-up: a decaying one would stop the slower models before they get there
RACE_TRAIN = TrainConfig(
    steps=150, batch=32, T=64, lr=4e-3, lr_final=1.0, warmup=50, validate_every=50, save_every=50, checkpoints=4
)
RACE_METRICS = ("induction_score",)
SERIES_METRICS = ("importance_entropy", "token_similarity", "value_drain", "hidden_peak")  # at every checkpoint
TEXT_METRICS = (
    "token_identity_share", "importance_entropy", "concentration_parts", "token_importance", "row_entropy", "sink_rate", "sink_mass",
    "token_similarity", "value_norm", "value_drain", "hidden_norm", "hidden_peak", "loss", "cache_bytes",
)  # fmt: skip
COST = {"race": 1.0, "text": 4.0}  # relative, for the time left
EXPERIMENTS = {"race": RACE_ARCHITECTURES, "text": TEXT_ARCHITECTURES}


def jobs(runs: Path, *, seeds: int = 3, quick: bool = False, device: str | None = None) -> list[Job]:
    """All models of the demo, the race first and seed by seed, so that every figure has all its lines early."""
    return [
        Job(f"{experiment}-{a}-s{seed}", work, (experiment, a, seed, runs, quick, device), COST[experiment])
        for experiment, architectures in EXPERIMENTS.items() for seed in range(seeds) for a in architectures
    ]  # fmt: skip


def work(experiment: str, architecture: str, seed: int, runs: Path, quick: bool, device: str | None) -> str:
    """Train and measure one model and return its run's name; both steps go on where they were."""
    import torch

    from workbench.measurement.measuring import measure
    from workbench.training.loop import train

    torch.set_num_threads(1)
    name = f"{experiment}-{architecture}-s{seed}"
    data, model, recipe = _setting(experiment, runs, quick)
    run = train(architecture, data, name=name, runs=runs, model=model, train=recipe, seed=seed, device=device)
    if experiment == "race":
        measure(run, RACE_METRICS, data, steps="all", n=32, batch=32)
    else:
        n = 16 if quick else 64
        measure(run, TEXT_METRICS, data, steps="ends", n=n)
        measure(run, "value_ablation", data, n=n)
        measure(run, SERIES_METRICS, data, steps="all", n=n)
    return name


def _setting(experiment: str, runs: Path, quick: bool) -> tuple[Any, ModelConfig, TrainConfig]:
    from workbench.data.sources import RepeatedData

    if experiment == "race":
        recipe = RACE_TRAIN.replace(steps=30, warmup=10, checkpoints=1) if quick else RACE_TRAIN
        return RepeatedData(), RACE_MODEL, recipe
    # the embedded corpus and its tokenizer, built once per runs folder and shared by all workers
    data = shared_text(runs, "demo-quick" if quick else "demo", max_bytes=1_000_000 if quick else None)
    preset = PRESETS["tiny"]
    recipe = preset.train.replace(steps=20, warmup=5, validate_every=20) if quick else preset.train
    return data, preset.model.replace(d_vocab=data.d_vocab), recipe


def run_demo(
    runs: Path,
    *,
    seeds: int = 3,
    quick: bool = False,
    workers: int | None = None,
    device: str | None = None,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Train and measure everything that is not there yet, in processes of one thread each.

    `progress` receives the status after each change; it is also kept in `<runs>/.demo.json` for the dashboard. Ctrl-C stops
    after the step at hand; the same call goes on from there. Raises `WorkbenchError` naming the first model that failed.
    """
    runs.mkdir(parents=True, exist_ok=True)
    planned = jobs(runs, seeds=seeds, quick=quick, device=device)
    status = Status(runs / STATUS, planned, progress)
    run_jobs(planned, workers, lambda job, error: status.done(job.name, error))
    status.finish()
    if status.failures:
        name, error = next(iter(status.failures.items()))
        raise WorkbenchError(f"{len(status.failures)} of {len(planned)} models failed, first {name}: {error}")
