"""The demo: small models, trained and measured on this machine while the dashboard shows them.

1. Attention sinks: two-layer models on a task that leaves a head idle. At which step does the head attend to the start token?
2. Induction: two-layer models on random tokens that repeat. At which step does each model copy?
3. Token information in deep values: four-layer models on the embedded text.

Every architecture uses the same seeds, so equal-named weights and all batches are equal between architectures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.config import PRESETS, ModelConfig, TrainConfig
from workbench.errors import WorkbenchError
from workbench.jobs.running import Job, StatusFile, Workers, run_jobs
from workbench.runs.run import RUN_FILE, Run, shared_text

STATUS = ".demo.json"
# one head and a two-neuron MLP: with more, other parts take over what the resting head is for
SINK_MODEL = ModelConfig(n_layers=2, d_model=64, n_heads=1, d_mlp=2, d_vocab=64, n_ctx=128)
# half the batch of `study sinks`: a step takes half the time, and the Transformer's sink forms in every seed
SINK_TRAIN = TrainConfig(steps=1200, batch=16, T=32, lr=1e-2, warmup=50, validate_every=100, save_every=300)
SINK_STEPS = (50, 100, 150, 200, 250, 300, 350, 400, 500, 600, 800, 1000)
SINK_METRICS = ("sink_mass", "value_drain", "importance_entropy")  # at every checkpoint, as soon as it is there
RACE_MODEL = ModelConfig(n_layers=2, d_model=64, n_heads=2, d_mlp=176, d_vocab=64, n_ctx=128)
SHORTEST = 16  # distances are drawn from here to half the length: a head has to recognise, not to count
# constant rate after the warm-up: a decaying one would stop the slower models before they get there
RACE_TRAIN = TrainConfig(
    steps=400, batch=32, T=64, lr=3e-3, lr_final=1.0, warmup=50, validate_every=100, save_every=100, checkpoints=4
)
RACE_METRICS = ("induction_score",)
SERIES_METRICS = ("importance_entropy", "token_similarity", "value_drain", "hidden_peak")  # at every checkpoint
TEXT_METRICS = (
    "token_identity_share", "importance_entropy", "concentration_parts", "token_importance", "row_entropy", "sink_rate", "sink_mass",
    "token_similarity", "value_norm", "value_drain", "hidden_norm", "hidden_peak", "loss", "cache_bytes",
)  # fmt: skip
COST = {"sinks": 3.0, "sinks_without_start": 3.0, "race": 2.0, "text": 5.0}  # relative, for the time left
EXPERIMENTS = {
    "sinks": ("transformer", "svformer", "gated_attention"), "sinks_without_start": ("transformer",),
    "race": ("svformer", "resformer", "transformer", "residual_k"),
    "text": ("transformer", "resformer", "svformer", "neutreno", "denseformer"),
}  # fmt: skip
DEFAULT = ("sinks", "sinks_without_start")
ONCE = ("sinks_without_start",)  # one seed suffices for this control
ONE_SEED_ON_TEXT = ("transformer", "resformer", "svformer")


def jobs(
    runs: Path, *, seeds: int = 3, quick: bool = False, full: bool = False, text: bool = False, device: str | None =
    None,
) -> list[Job]:  # fmt: skip
    """Return one job per model, by experiment and seed; `full` adds induction and one seed on text, `text` all seeds on text too."""
    once = ONCE if text else (*ONCE, "text")
    experiments = EXPERIMENTS if full or text else DEFAULT
    planned = list[Job]()
    for experiment in experiments:
        models = EXPERIMENTS[experiment] if text or experiment != "text" else ONE_SEED_ON_TEXT
        for seed, a in itertools.product(range(1 if experiment in once else seeds), models):
            arguments = (experiment, a, seed, runs, quick, device)
            planned.append(Job(f"{experiment}-{a}-s{seed}", train_and_measure, arguments, COST[experiment]))
    figures = list(dict.fromkeys(experiment.partition("_")[0] for experiment in experiments))
    return sorted(planned, key=lambda job: (figures.index(job.arguments[0].partition("_")[0]), job.arguments[2]))


def finished(job: Job) -> bool:
    """Return whether a job's model is trained with these settings and measured."""
    from workbench.runs.catalogue import DAMAGE
    from workbench.runs.records import load_records

    experiment, _, _, runs, quick, _ = job.arguments
    if not (runs / job.name / RUN_FILE).exists():
        return False
    try:
        run, (data, _, recipe) = Run.open(runs / job.name), _setting(experiment, runs, quick)
        same = run.info["data"].get("hash") == data.describe().get("hash")
        if not (run.finished and same and run.train.replace(checkpoints=recipe.checkpoints) == recipe):
            return False
        stored = load_records([run.path])
        there = set(zip(stored["metric"], stored["step"], strict=True))
        wanted = ((metric, step) for metric, steps in _measured(experiment).items() for step in run.resolve(steps))
        return all(pair in there for pair in wanted)
    except DAMAGE:  # its training says what is wrong with it, and the other models go on
        return False


def _measured(experiment: str) -> dict[str, str]:
    """Metrics of an experiment's models, with the steps they are measured at."""
    if experiment.startswith("sinks"):
        return dict.fromkeys(SINK_METRICS, "all")
    if experiment == "race":
        return dict.fromkeys(RACE_METRICS, "all")
    return dict.fromkeys(TEXT_METRICS, "ends") | {"value_ablation": "last"} | dict.fromkeys(SERIES_METRICS, "all")


def train_and_measure(
    experiment: str, architecture: str, seed: int, runs: Path, quick: bool, device: str | None
) -> str:
    """Train and measure one model, resuming both, and return its run's name."""
    import torch

    from workbench.measurement.measuring import measure
    from workbench.training.loop import train

    torch.set_num_threads(1)
    name = f"{experiment}-{architecture}-s{seed}"
    data, model, recipe = _setting(experiment, runs, quick)
    given: dict[str, Any] = {
        "name": name,
        "runs": runs,
        "model": model,
        "train": recipe,
        "seed": seed,
        "device": device,
    }
    if experiment.startswith("sinks"):
        look = Watch(runs / name, data)
        steps = [step for step in SINK_STEPS if step < recipe.steps]
        train(architecture, data, checkpoints=steps, progress=look, **given)
        look()
    elif experiment == "race":
        measure(train(architecture, data, **given), RACE_METRICS, data, steps="all", n=32, batch=32)
    else:
        run, n = train(architecture, data, **given), 16 if quick else 64
        for steps_of in ("ends", "last", "all"):
            metrics = [metric for metric, s in _measured(experiment).items() if s == steps_of]
            measure(run, metrics, data, steps=steps_of, n=n)
    return name


class Watch:
    """Callback that measures each checkpoint of a training right after it is saved."""

    def __init__(self, path: Path, data: Any) -> None:
        self.path, self.data, self.seen = path, data, set[int]()

    def __call__(self, *_: Any) -> None:
        from workbench.measurement.measuring import measure

        run = Run.open(self.path)
        if new := [step for step in run.steps if step not in self.seen]:
            measure(run, SINK_METRICS, self.data, steps=new, n=32, batch=32)
            self.seen.update(new)


def _setting(experiment: str, runs: Path, quick: bool) -> tuple[Any, ModelConfig, TrainConfig]:
    from workbench.data.data_sources import BackcopyData, RepeatedData

    if experiment.startswith("sinks"):
        recipe = SINK_TRAIN.replace(steps=60, warmup=10, save_every=30) if quick else SINK_TRAIN
        return BackcopyData(triggers=8, start=experiment == "sinks"), SINK_MODEL, recipe
    if experiment == "race":
        recipe = RACE_TRAIN.replace(steps=30, warmup=10, checkpoints=1) if quick else RACE_TRAIN
        return RepeatedData(shortest=SHORTEST), RACE_MODEL, recipe
    # the embedded corpus and its tokenizer, built once per runs folder and shared by all workers
    data = shared_text(runs, "demo-quick" if quick else "demo", max_bytes=1_000_000 if quick else None)
    preset = PRESETS["tiny"]
    recipe = preset.train.replace(steps=20, warmup=5, validate_every=20) if quick else preset.train
    return data, preset.model.replace(d_vocab=data.d_vocab), recipe


def run_demo(
    runs: Path, *, seeds: int = 3, quick: bool = False, full: bool = False, text: bool = False, workers: Workers = None,
    device: str | None = None, progress: Callable[[dict[str, Any]], None] | None = None,
) -> None:  # fmt: skip
    """Train and measure the demo's models (`full`, `text`: see `jobs`); finished ones are reused.

    `progress` receives the status after each change, which is also written to `<runs>/.demo.json` for the dashboard. Raises
    `WorkbenchError` naming the first model that failed.
    """
    runs.mkdir(parents=True, exist_ok=True)
    planned = jobs(runs, seeds=seeds, quick=quick, full=full, text=text, device=device)
    left = [job for job in planned if not finished(job)]
    status = StatusFile(runs / STATUS, planned, progress, before=[job.name for job in planned if job not in left])
    if left:
        run_jobs(left, workers, lambda job, error: status.done(job.name, error), folders=[runs])
    status.finish()
    if status.failures:
        name, error = next(iter(status.failures.items()))
        raise WorkbenchError(f"{len(status.failures)} of {len(planned)} models failed, first {name}: {error}")
