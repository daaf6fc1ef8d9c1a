"""Training loop: one recipe for every architecture, with paired seeds and bitwise resume.

Recipe of Zhou et al. (2024), Value Residual Learning: AdamW (0.9, 0.95), decay on matrices and the embedding only, clipping, linear
warm-up from 1e-7, cosine to a tenth of the peak. Factors on the rate of some parameters are controls, not part of it. Weights depend
only on (seed, tensor name) and batches on (seed, step), so models of one seed differ only in their architecture. `accelerate`
supplies devices, precision and several processes.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from workbench import distributed
from workbench.checkpoints.paths import RUN_FILE
from workbench.checkpoints.saving import save, write_tensors
from workbench.config import ModelConfig, TrainConfig
from workbench.data.data_sources import Data
from workbench.environment import WORLD_SIZE, variable
from workbench.errors import BadCheckpoint, NotSent, UnknownName, WorkbenchError, warn_caller
from workbench.file_io import open_regular, read_json, replacing, write_json
from workbench.metrics import METRICS
from workbench.models import build, compose
from workbench.models.transformer import Transformer
from workbench.runs.records import records, write_parquet
from workbench.runs.run import CORPORA, FORMAT, Run, place_of, written_now
from workbench.runs.tracker_export import Tracker, installed_trackers, open_trackers, send_rows
from workbench.storage.mirror import folder, push, reading
from workbench.storage.path_or_url import locate


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of a step: linear from 1e-7 to the peak in `warmup` steps, then a cosine to `lr_final` of it."""
    floor = config.lr * config.lr_final
    if step < config.warmup:
        return 1e-7 + (config.lr - 1e-7) * step / config.warmup
    if step >= config.steps:
        return floor
    done = (step - config.warmup) / max(config.steps - config.warmup, 1)
    return floor + (config.lr - floor) * (1 + math.cos(math.pi * done)) / 2


def checkpoint_steps(steps: int, per_doubling: int) -> list[int]:
    """Return step 0, the last step, and a grid between them that is even in the logarithm from step 8 on."""
    grid = {round(8 * 2 ** (i / per_doubling)) for i in range(64 * per_doubling) if 8 * 2 ** (i / per_doubling) < steps}
    return sorted({0, steps} | grid)


def rate_factors(names: Iterable[str], config: TrainConfig) -> dict[str, float]:
    """Return the factor on the learning rate of every parameter; 1 if no pattern of `lr_factors` matches.

    Raises `UnknownName` for a pattern without a match, `WorkbenchError` if two patterns match one parameter.
    """
    known = list(names)
    pattern_of: dict[str, str] = {}
    for pattern in config.lr_factors:
        fitting = [name for name in known if fnmatchcase(name, pattern)]
        if not fitting:
            raise UnknownName("pattern of parameters in lr_factors", pattern, known)
        if twice := next((name for name in fitting if name in pattern_of), None):
            raise WorkbenchError(f"lr_factors: {pattern_of[twice]!r} and {pattern!r} both fit {twice}; keep one")
        pattern_of |= dict.fromkeys(fitting, pattern)
    return {name: float(config.lr_factors[pattern_of[name]]) if name in pattern_of else 1.0 for name in known}


def optimiser(model: Any, config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW with decay on the parameters that `model.decays`: matrices, the embedding, and coefficients by option.

    Every pair of decay and factor on the learning rate is one group. The group stores the factor, and AdamW's decay, which
    is multiplied with the learning rate, grows with it.
    """
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups: dict[tuple[bool, float], list[torch.Tensor]] = {}
    for name, factor in rate_factors(named, config).items():
        groups.setdefault((bool(model.decays(name)), factor), []).append(named[name])
    settings = [
        {"params": parameters, "weight_decay": config.weight_decay if decays else 0.0, "factor": factor, "lr": config.lr * factor}
        for (decays, factor), parameters in groups.items()
    ]  # fmt: skip
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(settings, lr=config.lr, betas=betas, eps=config.eps, fused=True)


class Telemetry:
    """Buffer of rows for `telemetry/<first>-<last>.parquet`; tensors are fetched only when a file is written.

    Every written file is also sent to the `trackers`.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.trackers, self.begin = run, list[Tracker](), 0
        self.rows: list[dict[str, Any]] = []
        self.pending: list[tuple[dict[str, Any], Tensor]] = []
        self.common = {"run": run.name, "architecture": run.architecture, "seed": run.seed}

    def add(self, step: int, metric: str, value: float | Tensor, **axes: Any) -> None:
        """Add one number of a step; a tensor stays on its device until the next flush."""
        row = self.common | {"step": step, "metric": metric, **axes}
        if isinstance(value, Tensor):
            self.pending.append((row, value.detach()))
        else:
            self.rows.append(row | {"value": value})

    def flush(self, end: int) -> None:
        """Write the rows of all steps before `end` as one file."""
        if self.pending:
            values = torch.stack([value.float() for _, value in self.pending]).tolist()
            self.rows += [row | {"value": value} for (row, _), value in zip(self.pending, values, strict=True)]
        if self.rows:
            frame = records(self.rows)
            write_parquet(frame, self.run.path / "telemetry" / f"{self.begin:06d}-{end:06d}.parquet")
            if self.trackers:
                send_rows(self.trackers, frame)
        self.rows, self.pending, self.begin = [], [], end

    def merge(self) -> None:
        """Merge all files into one at the end of the training, which readers of many runs open much faster."""
        parts = [path for _, path in self.run.telemetry_parts()]
        if len(parts) > 1:
            first, end = parts[0].stem.split("-")[0], parts[-1].stem.split("-")[1]
            write_parquet(self.run.telemetry(), parts[0].with_name(f"{first}-{end}.parquet"))
            for path in parts:
                path.unlink()

    def rewind(self, step: int) -> None:
        """Remove files that a resumed run writes again."""
        for first, part in self.run.telemetry_parts():
            if first >= step:
                part.unlink()
        self.begin = step


OnStep = Callable[[int, float, float], None]  # called with (step, loss in nats, tokens per second)


def create(
    name: str, runs: Path, *, architecture: str, model: ModelConfig, train: TrainConfig, data: Data, seed: int,
    options: dict[str, Any],
) -> Run:  # fmt: skip
    """Write `run.json`, corpus and tokenizer of a new run, or reopen a run with equal settings.

    Raises `WorkbenchError` if a run of that name has other settings.
    """
    path = locate(place_of(runs, name)).path
    with torch.device("meta"):  # raises for unknown options before anything is written
        outline = compose(architecture, model, **options)
    rate_factors((name for name, _ in outline.named_parameters()), train)
    info = {
        "format": FORMAT, "architecture": architecture, "options": outline.options, "seed": seed,
        "model": asdict(model), "train": asdict(train), "data": data.describe(), **written_now(),
    }  # fmt: skip
    if (path / RUN_FILE).exists():
        old = read_json(path / RUN_FILE)
        if isinstance(old.get("train"), dict):
            old["train"] = asdict(TrainConfig.of(old["train"]))  # new keys had their defaults
        old, new = json.loads(json.dumps([old, info]))
        if differing := [k for k in info if k not in ("versions", "created") and old.get(k) != new[k]]:
            raise WorkbenchError(f"{path} exists with another {', '.join(differing)}; choose another name or remove it")
        return Run.open(path)
    if any(file for kind in ("step_*/*", "telemetry/*.parquet", "records/*.parquet") for file in path.glob(kind)):
        raise WorkbenchError(f"{path} has files of a run whose {RUN_FILE} is gone; choose another name or remove it")
    if data.tokenizer is not None:
        data.save(runs / CORPORA)  # type: ignore[attr-defined]
        push(runs / CORPORA)
        data.tokenizer.save(path / "tokenizer.json")
    write_json(path / RUN_FILE, info)
    return Run.open(path)


def train(
    architecture: str, data: Data, *, name: str, runs: Path, model: ModelConfig, train: TrainConfig, seed: int = 0,
    checkpoints: Sequence[int] | None = None, device: str | None = None, progress: OnStep | None = None, log: str | Sequence[str] = (),
    **options: Any,
) -> Run:  # fmt: skip
    """Train a model, or resume an interrupted training of the same name.

    Ctrl-C ends the training after the current step, writes everything and raises `KeyboardInterrupt`.

    Args:
        architecture: Name of the architecture.
        data: Training data.
        name: Name of the run.
        runs: Folder of runs.
        model: Shape of the model.
        train: Recipe.
        seed: Seed of weights and data order.
        checkpoints: Steps to save instead of the logarithmic grid; step 0 and the last step are always saved.
        device: Default the first accelerator.
        progress: Called with (step, loss in nats, tokens per second).
        log: Trackers that receive the telemetry: `wandb`, `tensorboard`, `mlflow`.
        **options: Options of the architecture.

    Returns:
        The finished run.

    Raises:
        WorkbenchError: The run is in use or has other settings.
    """
    if data.d_vocab > model.d_vocab:
        raise WorkbenchError(f"d_vocab={model.d_vocab} is smaller than the data's vocabulary of {data.d_vocab}")
    if model.n_ctx < train.T:
        raise WorkbenchError(f"T={train.T} exceeds the model's context n_ctx={model.n_ctx}")
    if wrong := [step for step in checkpoints or () if not 0 <= step <= train.steps]:
        raise WorkbenchError(f"checkpoints={wrong}: must lie within the steps 0..{train.steps}")
    data.batch(0, 1, train.T, seed)  # data that cannot be trained on raise before a run folder exists
    for domain in data.domains:
        data.sample(train.validation_sequences, train.T, domain=domain)
    logs = installed_trackers(log)
    accelerator, runs = create_accelerator(device, train), folder(runs)
    first = accelerator.is_main_process
    if first:
        run = create(
            name, runs, architecture=architecture, model=model, train=train, data=data, seed=seed, options=options
        )
    accelerator.wait_for_everyone()
    run = run if first else Run.open(runs / name)
    if run.finished:
        push(run.path)  # what an earlier call could not
        return run
    lock = run.writing() if first else None
    try:
        grid = sorted({0, train.steps, *(checkpoints or checkpoint_steps(train.steps, train.checkpoints))})
        with reading(run.path / "resume"):
            loop = _Loop(run, data, accelerator, grid, progress, options)
        try:
            loop.telemetry.trackers += open_trackers(logs if first else (), run.path, run.info, loop.step)
            loop.run_to_end()
        finally:
            for tracker in loop.telemetry.trackers:
                tracker.close()
            if first:
                push(run.path)
        accelerator.wait_for_everyone()  # a launcher ends all processes with the first that leaves badly
    finally:
        if lock is not None:
            lock.release()
    return run


def create_accelerator(device: str | None, config: TrainConfig) -> Accelerator:
    """Set device and precision, which accelerate would otherwise reuse from the first training in a process."""
    if variable(WORLD_SIZE):
        atexit.register(distributed.leave)
    else:  # without a launcher there is no process group to preserve
        AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision="bf16" if config.bf16 else "no")
    if device not in (None, accelerator.device.type, str(accelerator.device)):
        raise WorkbenchError(f"device={device!r}: training would run on {accelerator.device}; choose that, or cpu")
    if config.batch % accelerator.num_processes:
        raise WorkbenchError(f"batch={config.batch} does not divide over {accelerator.num_processes} processes")
    return accelerator


class _Loop:
    """State of one training: model, optimiser, telemetry and step."""

    def __init__(
        self, run: Run, data: Data, accelerator: Accelerator, grid: list[int], progress: OnStep | None, options: dict[str, Any]
    ) -> None:  # fmt: skip
        self.run, self.data, self.accelerator, self.grid, self.progress = run, data, accelerator, grid, progress
        self.config, self.main = run.train, accelerator.is_main_process
        self.bare: Transformer = build(run.architecture, run.model, seed=run.seed, **options)
        self.model, prepared = accelerator.prepare(self.bare.train(), optimiser(self.bare, self.config))
        # without loss scaling accelerate's wrapper only adds time
        self.optimiser: torch.optim.AdamW = prepared.optimizer
        self.parameters = dict(self.bare.named_parameters())
        self.telemetry, self.step, self.stop, self.sent = Telemetry(run), 0, False, True
        self.samples = {d: data.sample(self.config.validation_sequences, self.config.T, domain=d) for d in data.domains}
        self._restore()

    def run_to_end(self) -> None:
        """Train to the recipe's last step, and write telemetry, checkpoints and resume points."""
        clock, since, steps = time.perf_counter(), self.step, self.config.steps
        stop = False
        with self._interruptible():
            self._keep_checkpoint()
            while self.step < steps and not stop:
                loss = self._update()
                self.step += 1
                stop = self.stop  # once per step: a later Ctrl-C ends the next step
                if self.accelerator.num_processes > 1:  # all stop together: the others would wait for gradients
                    asked = torch.tensor(float(stop), device=self.accelerator.device)
                    stop = bool(self.accelerator.reduce(asked, "sum") > 0)
                due = self.step % self.config.save_every == 0 or self.step == steps or stop
                if not (due or self.step in self.grid or time.perf_counter() - clock > 2.0):
                    continue
                rate = (self.step - since) * self.config.batch * self.config.T / (time.perf_counter() - clock)
                clock, since = time.perf_counter(), self.step
                size = float(torch.nn.utils.get_total_norm(self.parameters.values()))
                if not math.isfinite(float(loss) + size):  # before anything of it is written
                    state = f"the loss is {float(loss)} and the weights' norm {size} at step {self.step}"
                    raise WorkbenchError(f"{self.run.name}: {state}; lower lr={self.config.lr}")
                if self.main:
                    self.telemetry.add(self.step - 1, "tokens_per_second", rate, unit="tokens/s")
                    if self.step == steps:
                        self._validate()
                    self.telemetry.flush(self.step)
                    if due:
                        self._save_resume()
                    if self.progress:
                        self.progress(self.step, float(loss), rate)
                self._keep_checkpoint()
        if stop:
            raise KeyboardInterrupt(f"stopped after step {self.step} of {steps}; the same command goes on from there")
        if self.main:
            self.telemetry.merge()

    def _update(self) -> Tensor:
        config, step = self.config, self.step
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(step, config) * group["factor"]
        share = slice(self.accelerator.process_index, None, self.accelerator.num_processes)
        tokens = self.data.batch(step, config.batch, config.T, self.run.seed)[share].to(self.accelerator.device)
        if self.main and (step % config.validate_every == 0):
            self._validate()
        per_token = self.model(tokens, return_type="loss", loss_per_token=True)
        loss = mean = per_token.mean()
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        gradients = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        total = torch.nn.utils.get_total_norm(gradients.values())
        if self.accelerator.num_processes > 1:  # of all sequences: the processes have unequal numbers of copied tokens
            per_token, tokens = self.accelerator.gather((per_token.detach(), tokens))
            mean = per_token.mean()
        if self.main:
            for metric, value in {"train_loss": mean, **self.data.readings(per_token, tokens)}.items():
                self.telemetry.add(step, metric, value, unit="nats")
            if step % config.log_every == 0:
                self.telemetry.add(step, "learning_rate", learning_rate(step, config))
                self.telemetry.add(step, "gradient_norm", total, part="all", unit="loss per weight")
                self._note_gradients(gradients)
                with torch.no_grad():
                    for axes, coefficient in (row for s in self.bare.shortcuts for row in s.coefficient_rows()):
                        self.telemetry.add(step, "coefficient", coefficient, **axes)
        if config.clip:
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), config.clip, total)
        self.optimiser.step()
        return loss.detach()

    def _note_gradients(self, gradients: dict[str, Tensor], variant: str | None = None) -> None:
        measure = METRICS["gradient_norm"]
        axes = {"variant": variant, "unit": measure.units.get(variant or "", measure.unit)}
        for row in measure.function(gradients, {}):
            self.telemetry.add(self.step, "gradient_norm", row.value, part=row.part, layer=row.layer, **axes)

    def _validate(self) -> None:
        """Add the validation loss of every domain, and the gradient of the mean largest logit on a few sequences."""
        self.bare.eval()
        for domain, sample in self.samples.items():
            batches = (ids.to(self.accelerator.device) for ids in sample.ids.split(self.config.batch))
            with torch.no_grad(), self.accelerator.autocast():
                losses = torch.cat([self.bare(ids, return_type="loss", loss_per_token=True) for ids in batches])
            documents = losses.mean(1)
            se = float(documents.std() / len(documents) ** 0.5) if len(documents) > 1 else None
            axes = {"data": domain, "T": self.config.T, "n": len(documents), "unit": "nats"}
            self.telemetry.add(self.step, "validation_loss", documents.mean(), se=se, **axes)
            for metric, value in self.data.readings(losses, sample.ids.to(losses.device)).items():
                self.telemetry.add(self.step, metric, value, variant="validation", **axes)
        ids = sample.ids[:4].to(self.accelerator.device)
        with torch.enable_grad():
            gradients = torch.autograd.grad(self.bare(ids).max(-1).values.mean(), list(self.parameters.values()))
        self._note_gradients(dict(zip(self.parameters, gradients, strict=True)), "output")
        self.bare.train()

    def _keep_checkpoint(self) -> None:
        if self.main and self.step in self.grid and self.step not in self.run.steps:
            save(self.bare, self.run.step_folder(self.step), seed=self.run.seed, step=self.step, run=self.run.name)
            try:
                push(self.run.path)  # if it mirrors a URL; tried again later if this fails
                self.sent = True
            except WorkbenchError as error:
                if self.sent:
                    warn_caller(f"training continues without the upload: {error}", NotSent)
                self.sent = False

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let the first Ctrl-C end the current step; only the main thread can set a handler."""

        def ask(*_: Any) -> None:
            self.stop = True
            signal.signal(signal.SIGINT, signal.default_int_handler)

        try:
            before = signal.signal(signal.SIGINT, ask)
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _save_resume(self) -> None:
        """Write weights, moments and random states to one safetensors file, atomically."""
        tensors = {"rng.cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            tensors["rng.cuda"] = torch.cuda.get_rng_state()
        for name, parameter in self.parameters.items():
            tensors[f"model.{name}"] = parameter.detach()
            for key, value in self.optimiser.state[parameter].items():
                tensors[f"{key}.{name}"] = value.detach().reshape(value.shape)
        tensors = {name: tensor.to("cpu").contiguous() for name, tensor in tensors.items()}
        with replacing(self.run.path / "resume" / "state.safetensors") as part:
            write_tensors(tensors, part, {"step": str(self.step), "format": str(FORMAT), "sum": _checksum(tensors)})

    def _restore(self) -> None:
        path = self.run.path / "resume" / "state.safetensors"
        if path.exists():
            try:
                with open_regular(path), safe_open(path, framework="pt") as file:
                    metadata = file.metadata()
                step, tensors = int(metadata["step"]), load_file(path)
                if "sum" in metadata and metadata["sum"] != _checksum(tensors):
                    raise ValueError("its checksum is wrong")
                with torch.no_grad():
                    for name, parameter in self.parameters.items():
                        parameter.copy_(tensors[f"model.{name}"])
                        keys = ("step", "exp_avg", "exp_avg_sq")
                        moments = {k: tensors[f"{k}.{name}"].to(parameter.device) for k in keys}
                        self.optimiser.state[parameter] = moments
                torch.set_rng_state(tensors["rng.cpu"])
                if torch.cuda.is_available() and "rng.cuda" in tensors:
                    torch.cuda.set_rng_state(tensors["rng.cuda"])
                self.step = step
            except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
                raise BadCheckpoint(f"{path} is damaged ({error}); remove it to start this run again") from error
        if self.main:
            for leftover in self.run.path.glob("*/.*.part"):  # from a killed process
                if leftover.parent.name != "records":
                    leftover.unlink()
            self.telemetry.rewind(self.step)
            now = {"device": self.accelerator.device.type, "float32_matmul": torch.get_float32_matmul_precision()}
            before = self.run.info.get("machine", {})
            if self.step:  # resumed, maybe elsewhere: a run of two devices equals no run of one
                now = {k: " and ".join(sorted({*v.split(" and "), now[k]})) for k, v in before.items()}
            if before != now:
                self.run.info["machine"] = now
                write_json(self.run.path / RUN_FILE, self.run.info)


def _checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a checksum of tensors and their names: nothing else would show a changed bit of a moment."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(name.encode())
        sha.update(tensors[name].flatten().view(torch.uint8).numpy())  # without a copy, which would double the memory
    return sha.hexdigest()[:16]
