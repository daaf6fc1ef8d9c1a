"""A run folder: `run.json`, `tokenizer.json`, `telemetry/*.parquet`, `step_000500/`, `resume/`, `records/`.

Everything in it appears whole or not at all, so any moment's folder can be read.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from filelock import FileLock, Timeout

from workbench.config import ModelConfig, ObservedConfig, TrainConfig
from workbench.errors import BadCheckpoint, NotCovered, ObservedInstead, UnknownName, WorkbenchError
from workbench.files import digest, read_json
from workbench.results import Store, read_parquet

if TYPE_CHECKING:
    import torch

    from workbench.formats import State

RUN_FILE, CORPORA = "run.json", ".corpora"
BUILDERS = "WORKBENCH_BUILDERS"
"""Environment variable with the builders (`package.module:function`) that may run; a file's word is not enough."""
PATIENCE = 0.5  # seconds a writer tries: `is_locked` holds the lock for an instant
EXAMPLE = 32  # random tokens on which another library's module is looked at


def runs_folder(given: str | Path | None = None) -> Path:
    """The folder of runs: the one given, else `$WORKBENCH_RUNS`, else `./runs`; `WorkbenchError` where a path has no end."""
    named = Path(given or os.environ.get("WORKBENCH_RUNS") or "runs")
    try:
        return named.resolve()
    except (OSError, RuntimeError) as error:
        raise WorkbenchError(f"{named} cannot be the folder of runs: {error}") from None


@dataclass(frozen=True)
class Run:
    """A run folder that holds a readable `run.json`."""

    path: Path

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """The run at a path; raises `BadCheckpoint` saying what is missing or damaged."""
        run = cls(Path(path).resolve())
        try:
            _ = run.architecture, run.seed, run.info["data"]["kind"]
            _ = run.info["recorder"]["every"] if run.recorded else (run.model, run.train)
        except (KeyError, TypeError, ValueError) as error:
            raise BadCheckpoint(f"{run.path / RUN_FILE} is no run description: {error}") from error
        return run

    @cached_property
    def info(self) -> dict[str, Any]:
        """Contents of `run.json`."""
        return read_json(self.path / RUN_FILE)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def architecture(self) -> str:
        """Registry name of the architecture."""
        return str(self.info["architecture"])

    @property
    def seed(self) -> int:
        """Seed of weights and data order."""
        return int(self.info["seed"])

    @property
    def model(self) -> ModelConfig:
        """Shape of the model."""
        return (ObservedConfig if self.observed else ModelConfig).of(self.info["model"])

    @property
    def train(self) -> TrainConfig:
        """The recipe."""
        return TrainConfig.of(self.info["train"])

    @property
    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, ascending."""
        found = (re.fullmatch(r"step_(\d{6,})", p.name) for p in self.path.iterdir())
        return sorted(int(m[1]) for m in found if m and (self.path / m[0] / "config.json").exists())

    @property
    def recorded(self) -> bool:
        """Whether a `Recorder` wrote it in somebody's own loop: telemetry, but no recipe and no checkpoints."""
        return "recorder" in self.info

    @property
    def observed(self) -> bool:
        """Whether its models are another library's, or of somebody's own code: opened there and observed from outside."""
        return "observed" in self.info

    @property
    def finished(self) -> bool:
        """Whether the last step of the recipe has its checkpoint; a recording, whether its recorder is gone."""
        if "imported" in self.info:
            return True
        return not is_locked(self.path) if self.recorded else self.train.steps in self.steps

    @property
    def progress(self) -> str:
        """Last checkpoint and last step of the recipe, `500/1000`; of a recording, the last step that was recorded."""
        if not self.recorded:
            return f"{self.steps[-1] if self.steps else 0}/{self.train.steps}"
        try:
            last = self.telemetry()["step"].max()
        except BadCheckpoint:
            return "telemetry damaged"
        return f"{0 if pd.isna(last) else last} recorded"

    def step_folder(self, step: int) -> Path:
        """Where a step's checkpoint is or will be."""
        return self.path / f"step_{step:06d}"

    def resolve(self, steps: str | int | list[int]) -> list[int]:
        """Steps meant by `last`, `first`, `all`, `ends` (first and last), a step or a list; absent ones are refused."""
        have = self.steps
        if not have and self.recorded:
            raise BadCheckpoint(f"{self.path} was recorded in a loop of its own and holds no checkpoints")
        if not have:
            raise BadCheckpoint(f"{self.path} has no whole checkpoint yet")
        words = {"last": have[-1:], "first": have[:1], "all": have, "ends": sorted({have[0], have[-1]})}
        if isinstance(steps, str):
            if steps not in words:
                raise UnknownName("steps", steps, words)
            return words[steps]
        wanted = [steps] if isinstance(steps, int) else list(steps)
        for step in wanted:
            if step not in have:
                raise WorkbenchError(f"{self.name} has no checkpoint at step {step}; choose from {have}")
        return wanted

    def load(self, step: str | int = "last", **kwargs: Any) -> Any:
        """The model of a step, a `Transformer` or an `Observed` one, with its tokenizer where the run has one."""
        from workbench.checkpoints import load_directory

        (number,) = self.resolve(step)
        folder = self.step_folder(number)
        model = self._observed(folder, **kwargs) if self.observed else load_directory(folder, **kwargs)
        model.tokenizer = self.tokenizer
        model.source |= {"run": self.name, "step": number, "seed": self.seed}
        return model

    def _observed(
        self,
        folder: Path,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> Any:
        """A step whose model is another library's or of somebody's own code; refuses settings of our decoder."""
        from workbench.formats import open_state
        from workbench.observing import builders

        if given := [key for key, value in settings.items() if value]:
            raise NotCovered(
                f"{self.name} is observed, not one of our models: {', '.join(given)} would be settings of ours"
            )
        if (builder := self.info["observed"].get("builder")) is not None:
            if builder not in [name.strip() for name in os.environ.get(BUILDERS, "").split(",")]:
                raise NotCovered(
                    f"{self.name} is opened by {builder}, which is code of somebody's own and runs only where the environment "
                    f"names it: {BUILDERS}={builder}"
                )
            return builders.load(str(builder), folder, device, dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ObservedInstead)  # said when it was imported
            reason = NotCovered(f"{folder} holds another library's model")
            return observed_instead(open_state(folder), reason, device, dtype)

    @property
    def tokenizer(self) -> Any:
        """The run's tokenizer, None where it was trained on bare tokens; raises `BadCheckpoint` for another model's."""
        from workbench.formats.vocabulary import tokenizer_beside

        return tokenizer_beside(self.path, self.model.d_vocab)

    @property
    def data(self) -> Any:
        """The data the run was trained on; raises `BadCheckpoint` where its corpus is not beside the run."""
        from workbench.data import open_data

        return open_data(self.info["data"], self.path.parent / CORPORA)

    @property
    def store(self) -> Store:
        """Measured records of this run."""
        return Store(self.path / "records")

    def weights_hash(self, step: int) -> str:
        """Content address of a step's files, read without loading a model."""
        folder = self.step_folder(step)
        return digest((folder / "config.json").read_bytes(), (folder / "model.safetensors").read_bytes())

    def telemetry(self, where: str = "") -> pd.DataFrame:
        """What training wrote down, as records; `where`: a condition in DuckDB's SQL."""
        return read_parquet([path for _, path in self.telemetry_parts()], where=where)

    def telemetry_parts(self) -> list[tuple[int, Path]]:
        """(first step, file) of each telemetry part, in order; files of other names are not ours."""
        found = (re.fullmatch(r"(\d{6,})-\d{6,}\.parquet", p.name) for p in (self.path / "telemetry").glob("*.parquet"))
        return sorted((int(m[1]), self.path / "telemetry" / m[0]) for m in found if m)

    def writing(self) -> FileLock:
        """The lock a writer holds; raises `WorkbenchError` where another process keeps it."""
        lock = FileLock(self.path / ".lock", timeout=PATIENCE)
        try:
            return lock.acquire().lock
        except Timeout:
            raise WorkbenchError(
                f"{self.path} is being written by another process; wait for it or choose another name"
            ) from None


def is_locked(path: Path) -> bool:
    """Whether somebody is writing a run."""
    if not (path / ".lock").exists():
        return False
    lock = FileLock(path / ".lock", timeout=0)
    try:
        with lock:
            return False
    except Timeout:
        return True


def list_runs(root: Path) -> tuple[list[Run], dict[str, str]]:
    """Runs under a folder, by name, and what is wrong with each folder that looks like one but cannot be read."""
    runs, problems = [], {}
    folders = (p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")) if root.is_dir() else ()
    for path in sorted(folders):
        if not (path / RUN_FILE).exists() and not any(path.glob("step_*")):
            continue  # somebody else's folder
        try:
            runs.append(Run.open(path))
        except WorkbenchError as error:
            problems[path.name] = str(error)
    return runs, problems


def load(
    path: str | Path,
    *,
    architecture: str | None = None,
    step: str | int = "last",
    config: Mapping[str, Any] | ModelConfig | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    """A model from a run, a step, or anyone's checkpoint: Hugging Face directories, `.pt`, `.ckpt`, `.bin`, `.safetensors`.

    `step`: `last`, `first` or a number, of a run or a series (see `workbench.series`). `architecture`, `config` and
    `options` complete and override what the files say; where neither says an architecture, a `transformer` is assumed
    with an `ArchitectureAssumed` warning. What our decoder does not compute is opened in transformers and observed, with
    an `ObservedInstead` warning. `model.source` says where the weights come from: path, format, step, stripped prefixes, SHA-256.
    Raises `BadCheckpoint` for missing, damaged, contradictory or unsafe files.
    """
    from workbench.checkpoints import load_state
    from workbench.formats import open_state
    from workbench.formats.vocabulary import tokenizer_beside

    settings = {"architecture_name": architecture, "config": config, "device": device, "dtype": dtype, **options}
    if (Path(path) / RUN_FILE).exists():
        return Run.open(path).load(step, **settings)
    path, number = _one_of_series(path, step)
    of_run = Run.open(path.parent) if (path.parent / RUN_FILE).exists() else None
    if of_run is not None and of_run.observed and (named := re.fullmatch(r"step_(\d{6,})", path.name)):
        return of_run.load(int(named[1]), **settings)
    state = open_state(path)
    try:
        model = load_state(state, **settings)
    except NotCovered as reason:
        if architecture or config or options:
            raise
        model = observed_instead(state, reason, device, dtype)
    model.source["step"] = model.source["step"] if model.source["step"] is not None else number
    if of_run is not None:
        model.tokenizer = of_run.tokenizer
    elif path.is_dir():
        model.tokenizer = tokenizer_beside(path, model.config.d_vocab)
    return model


def _one_of_series(path: str | Path, step: str | int) -> tuple[Path, int | None]:
    """The checkpoint meant by a path and a step: the path itself, or one of the series it stands for."""
    from workbench.formats import series
    from workbench.formats.huggingface import is_directory, refuse_shards
    from workbench.formats.series import is_pattern

    folder = Path(path)
    if not is_pattern(str(path)) and (not folder.is_dir() or is_directory(folder)):
        if step != "last":
            raise WorkbenchError(f"step={step!r}: {folder} is a single checkpoint, not a run")
        return folder, None
    if folder.is_dir():
        refuse_shards(folder)
    found = dict(series(path))
    words = {"last": max(found), "first": min(found)}
    number = words.get(step, step) if isinstance(step, str) else step
    if number not in found:
        raise WorkbenchError(f"{path} has no checkpoint at step {step}; choose from {[*words, *sorted(found)]}")
    return found[int(number)], int(number)


def observed_instead(
    state: State, reason: NotCovered, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> Any:
    """The module of a checkpoint that our decoder does not compute, observed from outside, with the facts of its files."""
    import torch

    from workbench.formats import foreign
    from workbench.observing import observe

    module = foreign.module_of(state, reason, dtype)
    config = module.config
    longest = int(getattr(config, "max_position_embeddings", EXAMPLE) or EXAMPLE)
    ids = torch.randint(config.vocab_size, (2, min(EXAMPLE, longest)), generator=torch.Generator().manual_seed(0))
    model = observe(module.to(device or "cpu"), ids.to(device or "cpu"), quiet=True)
    model.source |= state.info.provenance
    return model
