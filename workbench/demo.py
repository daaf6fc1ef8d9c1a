"""The demo: two experiments on real models, trained and measured on this machine while the dashboard shows them.

1. The race to induction: two-layer models on random tokens repeated once; at which step does each learn to copy?
2. What deep values carry: four-layer models on the standard library's text; how much of a value is its token alone?

Every architecture runs with the same seeds, so equal-named weights and all batches are equal between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.config import PRESETS, ModelConfig, TrainConfig
from workbench.errors import WorkbenchError
from workbench.jobs import Status, run_jobs, shared_text

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


@dataclass(frozen=True)
class Job:
    """One model of the demo: train it, then measure it."""

    experiment: str
    architecture: str
    seed: int
    runs: str
    quick: bool
    device: str | None

    @property
    def name(self) -> str:
        """The run's folder."""
        return f"{self.experiment}-{self.architecture}-s{self.seed}"


def jobs(runs: Path, *, seeds: int = 3, quick: bool = False, device: str | None = None) -> list[Job]:
    """All models of the demo, the race first and seed by seed, so that every figure has all its lines early."""
    plan = [(experiment, a, s) for experiment, names in _EXPERIMENTS for s in range(seeds) for a in names]
    return [Job(experiment, a, s, str(runs), quick, device) for experiment, a, s in plan]


_EXPERIMENTS = (("race", RACE_ARCHITECTURES), ("text", TEXT_ARCHITECTURES))


def work(job: Job) -> str:
    """Train and measure one model; both steps find out by themselves what is there already."""
    import torch

    from workbench.measuring import measure
    from workbench.training import train

    torch.set_num_threads(1)
    runs = Path(job.runs)
    data, model, recipe = _setting(job)
    run = train(
        job.architecture, data, name=job.name, runs=runs, model=model, train=recipe, seed=job.seed, device=job.device
    )
    if job.experiment == "race":
        measure(run, RACE_METRICS, data, steps="all", n=32, batch=32)
    else:
        n = 16 if job.quick else 64
        measure(run, TEXT_METRICS, data, steps="ends", n=n)
        measure(run, "value_ablation", data, n=n)
        measure(run, SERIES_METRICS, data, steps="all", n=n)
    return job.name


def _setting(job: Job) -> tuple[Any, ModelConfig, TrainConfig]:
    from workbench.data import RepeatedData

    if job.experiment == "race":
        return (
            RepeatedData(),
            RACE_MODEL,
            RACE_TRAIN.replace(steps=30, warmup=10, checkpoints=1) if job.quick else RACE_TRAIN,
        )
    data = corpus(Path(job.runs), quick=job.quick)
    preset = PRESETS["tiny"]
    recipe = preset.train.replace(steps=20, warmup=5, validate_every=20) if job.quick else preset.train
    return data, preset.model.replace(d_vocab=data.d_vocab), recipe


def corpus(runs: Path, *, quick: bool = False) -> Any:
    """The embedded corpus and its tokenizer, built once per runs folder and shared by all workers."""
    return shared_text(runs, "demo-quick" if quick else "demo", max_bytes=1_000_000 if quick else None)


def run_demo(
    runs: Path,
    *,
    seeds: int = 3,
    quick: bool = False,
    workers: int | None = None,
    device: str | None = None,
    told: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Train and measure everything that is not there yet, in processes of one thread each.

    `told` receives the status after each change; it is also kept in `<runs>/.demo.json` for the dashboard. Ctrl-C stops
    after the step at hand; the same call goes on from there. Raises `WorkbenchError` naming the first model that failed.
    """
    runs.mkdir(parents=True, exist_ok=True)
    plan = jobs(runs, seeds=seeds, quick=quick, device=device)
    status = Status(runs / STATUS, {job.name: COST[job.experiment] for job in plan}, told)
    run_jobs(work, plan, workers, lambda job, error: status.done(job.name, error))
    status.finish()
    if status.failures:
        name, error = next(iter(status.failures.items()))
        raise WorkbenchError(f"{len(status.failures)} of {len(plan)} models failed, first {name}: {error}")
