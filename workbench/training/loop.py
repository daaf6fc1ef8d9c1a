"""Training loop: one recipe for every architecture, with paired seeds and bitwise resume.

Recipe of Zhou et al. (2024): AdamW, decay on matrices and the embedding only, clipping, linear warm-up from 1e-7, cosine to
a tenth of the peak. Weights depend only on (seed, tensor name) and batches on (seed, step), so models of one seed differ
only in their architecture. `accelerate` supplies devices, precision and several processes.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from workbench import distributed
from workbench.checkpoints.identify import RUN_FILE
from workbench.checkpoints.saving import save, write_tensors
from workbench.config import ModelConfig, TrainConfig
from workbench.data.sources import Data
from workbench.environment import WORLD_SIZE, variable
from workbench.errors import BadCheckpoint, NotSent, WorkbenchError, warn_caller
from workbench.files import open_regular, read_json, replacing, write_json
from workbench.metrics import METRICS
from workbench.models import build, compose
from workbench.models.transformer import Transformer
from workbench.runs.run import CORPORA, FORMAT, Run, place_of, written_now
from workbench.runs.trackers import installed_trackers, open_trackers
from workbench.storage.locations import locate
from workbench.storage.mirror import folder, push, reading
from workbench.training.recipe import checkpoint_steps, learning_rate, optimiser, rate_factors
from workbench.training.telemetry import Telemetry

OnStep = Callable[[int, float, float], None]
"""Called with (step, loss in nats, tokens per second)."""


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
    _refuse(data, model, train, seed, checkpoints or ())
    logs = installed_trackers(log)
    accelerator, runs = _accelerator(device, train), folder(runs)
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


def _refuse(data: Data, model: ModelConfig, config: TrainConfig, seed: int, checkpoints: Sequence[int]) -> None:
    """Raise for settings that cannot be trained, before a run folder exists."""
    if data.d_vocab > model.d_vocab:
        raise WorkbenchError(f"d_vocab={model.d_vocab} is smaller than the data's vocabulary of {data.d_vocab}")
    if model.n_ctx < config.T:
        raise WorkbenchError(f"T={config.T} exceeds the model's context n_ctx={model.n_ctx}")
    if wrong := [step for step in checkpoints if not 0 <= step <= config.steps]:
        raise WorkbenchError(f"checkpoints={wrong}: must lie within the steps 0..{config.steps}")
    data.batch(0, 1, config.T, seed)
    for domain in data.domains:
        data.sample(config.validation_sequences, config.T, domain=domain)


def _accelerator(device: str | None, config: TrainConfig) -> Accelerator:
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
        self.model, self.optimiser = accelerator.prepare(self.bare.train(), optimiser(self.bare, self.config))
        self.telemetry, self.step, self.stop, self.sent = Telemetry(run), 0, False, True
        self.samples = {d: data.sample(self.config.validation_sequences, self.config.T, domain=d) for d in data.domains}
        self._restore()

    # ---- one step ----------------------------------------------------------------------------------------------------

    def run_to_end(self) -> None:
        """Train to the recipe's last step, and write telemetry, checkpoints and resume points."""
        clock, since, steps = time.perf_counter(), self.step, self.config.steps
        stop = False
        with self._interruptible():
            self._keep_checkpoint()
            while self.step < steps and not stop:
                loss = self._update()
                self.step += 1
                stop = self._agreed_to_stop()  # once per step: a later Ctrl-C ends the next step
                due = self.step % self.config.save_every == 0 or self.step == steps or stop
                if due or self.step in self.grid or time.perf_counter() - clock > 2.0:
                    rate = (self.step - since) * self.config.batch * self.config.T / (time.perf_counter() - clock)
                    clock, since = time.perf_counter(), self.step
                    self._note(float(loss), rate, due)
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
        loss = per_token.mean()
        self.optimiser.zero_grad(set_to_none=True)
        self.accelerator.backward(loss)
        total = self._measure_step(loss, per_token, tokens)
        if config.clip:
            torch.nn.utils.clip_grads_with_norm_(self.bare.parameters(), config.clip, total)
        self.optimiser.step()
        return loss.detach()

    def _measure_step(self, loss: Tensor, per_token: Tensor, tokens: Tensor) -> Tensor:
        """Add the step's numbers to the telemetry; returns the total gradient norm, which clipping needs."""
        gradients = {n: p.grad for n, p in self.bare.named_parameters() if p.grad is not None}
        total = torch.nn.utils.get_total_norm(gradients.values())
        readings = {"train_loss": loss, **self.data.readings(per_token, tokens)}
        if self.accelerator.num_processes > 1:
            readings = {k: self.accelerator.reduce(v.detach(), "mean") for k, v in readings.items()}
        if self.main:
            for metric, value in readings.items():
                self.telemetry.add(self.step, metric, value, unit="nats")
            if self.step % self.config.log_every == 0:
                self.telemetry.add(self.step, "learning_rate", learning_rate(self.step, self.config))
                self.telemetry.add(self.step, "gradient_norm", total, part="all", unit="loss per weight")
                self._note_gradients(gradients)
                self._note_coefficients()
        return total

    # ---- telemetry ---------------------------------------------------------------------------------------------------

    def _note_gradients(self, gradients: dict[str, Tensor], variant: str | None = None) -> None:
        measure = METRICS["gradient_norm"]
        axes = {"variant": variant, "unit": measure.units.get(variant or "", measure.unit)}
        for row in measure.function(gradients, {}):
            self.telemetry.add(self.step, "gradient_norm", row.value, part=row.part, layer=row.layer, **axes)

    @torch.no_grad()
    def _note_coefficients(self) -> None:
        for shortcut in self.bare.shortcuts:
            for part, values in shortcut.coefficients().items():
                for layer, value in enumerate(values):
                    if not math.isnan(value):
                        self.telemetry.add(self.step, "coefficient", value, part=part, layer=layer, unit="weight")

    def _validate(self) -> None:
        """Add the validation loss of every domain, and the gradient of the mean largest logit on a few sequences."""
        self.bare.eval()
        for domain, sample in self.samples.items():
            batches = (ids.to(self.accelerator.device) for ids in sample.ids.split(self.config.batch))
            with torch.no_grad(), self.accelerator.autocast():
                losses = torch.cat([self.bare(ids, return_type="loss", loss_per_token=True) for ids in batches])
            self._note_validation(losses, sample.ids.to(losses.device), domain)
        ids = sample.ids[:4].to(self.accelerator.device)
        names, weights = zip(*self.bare.named_parameters(), strict=True)
        with torch.enable_grad():
            gradients = torch.autograd.grad(self.bare(ids).max(-1).values.mean(), weights)
        self._note_gradients(dict(zip(names, gradients, strict=True)), "output")
        self.bare.train()

    def _note_validation(self, per_token: Tensor, tokens: Tensor, domain: str) -> None:
        per_document, T = per_token.mean(1), self.config.T
        se = float(per_document.std() / len(per_document) ** 0.5) if len(per_document) > 1 else None
        axes = {"data": domain, "T": T, "n": len(per_document), "unit": "nats"}
        self.telemetry.add(self.step, "validation_loss", per_document.mean(), se=se, **axes)
        for metric, value in self.data.readings(per_token, tokens).items():
            self.telemetry.add(self.step, metric, value, variant="validation", **axes)

    def _note(self, loss: float, rate: float, due: bool) -> None:
        size = float(torch.nn.utils.get_total_norm(self.bare.parameters()))
        if not math.isfinite(loss + size):  # before anything of it is written
            state = f"the loss is {loss} and the weights' norm {size} at step {self.step}"
            raise WorkbenchError(f"{self.run.name}: {state}; lower lr={self.config.lr}")
        if self.main:
            self.telemetry.add(self.step - 1, "tokens_per_second", rate, unit="tokens/s")
            if self.step == self.config.steps:
                self._validate()
            self.telemetry.flush(self.step)
            if due:
                self._save_resume()
            if self.progress:
                self.progress(self.step, loss, rate)

    def _keep_checkpoint(self) -> None:
        if self.main and self.step in self.grid and self.step not in self.run.steps:
            save(self.bare, self.run.step_folder(self.step), seed=self.run.seed, step=self.step, run=self.run.name)
            self._send()

    def _send(self) -> None:
        """Upload the run if its folder mirrors a URL; warns once if that fails, and is tried again later."""
        try:
            push(self.run.path)
            self.sent = True
        except WorkbenchError as error:
            if self.sent:
                warn_caller(f"training continues without the upload: {error}", NotSent)
            self.sent = False

    # ---- stopping and resuming ---------------------------------------------------------------------------------------

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let the first Ctrl-C end the current step; only the main thread can set a handler."""
        try:
            before = signal.signal(signal.SIGINT, self._ask_to_stop)
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _ask_to_stop(self, *_: Any) -> None:
        self.stop = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _agreed_to_stop(self) -> bool:
        """Return whether any process was asked to stop, since the others would wait for its gradients."""
        if self.accelerator.num_processes == 1:
            return self.stop
        asked = torch.tensor(float(self.stop), device=self.accelerator.device)
        return bool(self.accelerator.reduce(asked, "sum") > 0)

    def _save_resume(self) -> None:
        """Write weights, moments and random states to one safetensors file, atomically."""
        tensors = {"rng.cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            tensors["rng.cuda"] = torch.cuda.get_rng_state()
        for name, parameter in self.bare.named_parameters():
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
                self._read_state(path)
            except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
                raise BadCheckpoint(f"{path} is damaged ({error}); remove it to start this run again") from error
        if self.main:
            for leftover in self.run.path.glob("*/.*.part"):  # from a killed process
                if leftover.parent.name != "records":
                    leftover.unlink()
            self.telemetry.rewind(self.step)

    def _read_state(self, path: Path) -> None:
        with open_regular(path), safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        step, tensors = int(metadata["step"]), load_file(path)
        if "sum" in metadata and metadata["sum"] != _checksum(tensors):
            raise ValueError("its checksum is wrong")
        with torch.no_grad():
            for name, parameter in self.bare.named_parameters():
                parameter.copy_(tensors[f"model.{name}"])
                keys = ("step", "exp_avg", "exp_avg_sq")
                self.optimiser.state[parameter] = {k: tensors[f"{k}.{name}"].to(parameter.device) for k in keys}
        torch.set_rng_state(tensors["rng.cpu"])
        if torch.cuda.is_available() and "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"])
        self.step = step


def _checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a checksum of tensors and their names: nothing else would show a changed bit of a moment."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(name.encode())
        sha.update(tensors[name].flatten().view(torch.uint8).numpy())  # without a copy, which would double the memory
    return sha.hexdigest()[:16]
