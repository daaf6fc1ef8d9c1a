"""A run folder: `run.json`, `tokenizer.json`, `telemetry/*.parquet`, `step_000500/`, `resume/`, `records/`; files appear complete."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock, Timeout

from workbench.checkpoints.paths import (
    CONFIG,
    LOG_ONLY,
    RUN_FILE,
    WEIGHTS,
    available_steps,
    complete_steps,
    select_steps,
    step_folder,
)
from workbench.config import ModelConfig, ObservedConfig, TrainConfig
from workbench.console import notebook_html
from workbench.environment import RUNS, variable
from workbench.errors import BadCheckpoint, BadData, InUse, WorkbenchError
from workbench.file_io import digest, open_regular, read_bytes, read_json, write_json
from workbench.runs.records import NEEDED, Store, metrics_of, read_parquet
from workbench.storage.mirror import address_of, folder, push, reading, refresh
from workbench.storage.path_or_url import Location, locate

FORMAT = 1  # of run.json
CORPORA = ".corpora"
MAX_WHOLE = 2**53  # largest whole number that tables and pages can hold
SAME_NAME = "{} has the same name; rename one of the folders, as numbers are stored by the run's name"
STUDY = "provenance.json"  # file in a folder that holds the runs of one study
LOG_FACTS = (
    "parameters", "tokens_per_step", "data", "batch", "T", "lr", "lr_final", "warmup", "weight_decay", "n_layers", "d_model", "n_heads",
    "d_mlp", "d_vocab",
)  # fmt: skip
"""What a user can say about the training of an imported log; all else is unknown."""
PATIENCE = 0.5  # seconds a writer waits: `is_locked` holds the lock for an instant


def runs_folder(given: str | Path | None = None) -> Path:
    """Return the folder of runs: the given one, else `$WORKBENCH_RUNS`, else `./runs`; for a URL its local copy."""
    named = folder(given or variable(RUNS, "runs"))
    try:
        return named.resolve()
    except (OSError, RuntimeError) as error:
        raise WorkbenchError(f"{named} cannot be the folder of runs: {error}") from None


@dataclass(frozen=True)
class Run:
    """A run folder that holds a readable `run.json`."""

    path: Path

    @classmethod
    def open(cls, path: str | Path | Location) -> Run:
        """Open the run at a path; raises `BadCheckpoint` naming the missing or damaged file."""
        run = cls(locate(path).path.resolve())
        try:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(run.path):
                pass  # only to see whether this user may
        except OSError as error:
            raise BadCheckpoint(f"{run.path} cannot be listed: {error.strerror or error}") from error
        try:
            _ = run.architecture, run.options, run.seed, run.info["data"]["kind"]
            if run.logged:
                log = run.info["log"]
                _ = int(log["last"]), dict(log["known"]), str(log["experiment"])
            elif run.recorded:
                _ = run.info["recorder"]["every"], run.info["model"]["n_layers"]
            else:
                _ = run.model, run.train
        except (KeyError, TypeError, ValueError) as error:
            raise BadCheckpoint(f"{run.path / RUN_FILE} is no run description: {error}") from error
        return run

    def _repr_html_(self) -> str:
        facts = {
            "architecture": self.architecture,
            "options": ", ".join(f"{key} = {value}" for key, value in self.options.items()),
            "seed": self.seed,
            "data": self.info["data"]["kind"],
            "steps": self.progress,
            "checkpoints": ", ".join(map(str, self.steps)),
            "measured": ", ".join(metrics_of(self.path)),
            "folder": address_of(self.path),
        }
        return notebook_html(f"run {self.name}", facts)

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
    def options(self) -> dict[str, Any]:
        """Options of the architecture by name; raises `TypeError` if they are no table."""
        options = self.info.get("options") or {}
        if not isinstance(options, dict):
            raise TypeError(f"its options are {options!r}, not a table")
        return options

    @property
    def seed(self) -> int:
        """Seed of weights and data order; raises `ValueError` unless it is a whole number that tables can hold."""
        seed = self.info["seed"]
        if type(seed) is not int or abs(seed) > MAX_WHOLE:
            raise ValueError(f"its seed is {str(seed)[:80]}, no whole number up to {MAX_WHOLE}")
        return seed

    @property
    def model(self) -> ModelConfig:
        """Shape of the model; raises `BadCheckpoint` for a training log, whose model is unknown."""
        self._refuse_log()
        return (ObservedConfig if self.observed else ModelConfig).of(self.info["model"])

    @property
    def train(self) -> TrainConfig:
        """The recipe; raises `BadCheckpoint` for a training log, whose recipe is unknown."""
        self._refuse_log()
        return TrainConfig.of(self.info["train"])

    @property
    def device(self) -> str:
        """Type of the device that trained the run; "unknown" if nothing states it."""
        return str(self.info.get("machine", {}).get("device", "unknown"))

    @property
    def precision(self) -> str:
        """Precision of the training, with its device unless it is plain float32, which devices compute alike."""
        matmul = self.info.get("machine", {}).get("float32_matmul", "highest")
        rounded = ["bfloat16"] * self.train.bf16 + [f"float32 products of {matmul} precision"] * (matmul != "highest")
        return f"{' and '.join(rounded)} on {self.device}" if rounded else "float32"

    @property
    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        return complete_steps(self.path)

    @property
    def recorded(self) -> bool:
        """True if a `Recorder` wrote it in another training loop: it has telemetry, but no recipe and no checkpoints."""
        return "recorder" in self.info

    @property
    def logged(self) -> bool:
        """True if it was imported from a training log: it has telemetry, but no weights, and what its log lacks is unknown."""
        return "log" in self.info

    def _refuse_log(self) -> None:
        if self.logged:
            raise BadCheckpoint(f"{self.path} {LOG_ONLY}")

    @property
    def observed(self) -> bool:
        """True if its models are opened by another library or a builder, and observed from outside."""
        return "observed" in self.info

    @property
    def shipped(self) -> bool:
        """True for a finished run that ships with the project, mostly without weights; it is never written."""
        return "shipped" in self.info

    @property
    def finished(self) -> bool:
        """True if the recipe's last step has its checkpoint, or if the recorder has ended."""
        if "imported" in self.info or self.shipped or self.logged:
            return True
        return not is_locked(self.path) if self.recorded else self.train.steps in self.steps

    @property
    def progress(self) -> str:
        """Last checkpoint and last step of the recipe, `500/1000`; for a recording the last recorded step."""
        if self.shipped:
            return f"{self.train.steps}/{self.train.steps}"
        if self.logged:
            return f"{self.info['log']['last']} logged"
        if not self.recorded:
            return f"{self.steps[-1] if self.steps else 0}/{self.train.steps}"
        try:
            last = self.telemetry()["step"].max()
        except BadCheckpoint:
            return "telemetry damaged"
        return f"{0 if pd.isna(last) else last} recorded"

    def step_folder(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, whether it exists or not."""
        return step_folder(self.path, step)

    def resolve(self, steps: str | int | list[int]) -> list[int]:
        """Return the steps for `last`, `first`, `all`, `ends` (first and last), a step or a list; raises for absent steps."""
        return select_steps(steps, available_steps(self.path, self.info), self.name)

    def load(self, step: str | int = "last", **settings: Any) -> Any:
        """Load the `Transformer` or `Observed` model of a step with its tokenizer; for `settings` see `workbench.load`."""
        from workbench.checkpoints.loading import load  # imports torch

        return load(self.path, step=step, **settings)

    @property
    def tokenizer(self) -> Any:
        """The run's tokenizer, None for bare token ids; raises `BadCheckpoint` if it belongs to another model."""
        from workbench.checkpoints.tokenizer_files import tokenizer_beside

        return tokenizer_beside(self.path, self.model.d_vocab)

    @property
    def start_token(self) -> int | None:
        """The id that begins every text, None without one; see `start_token_of`."""
        from workbench.checkpoints.tokenizer_files import start_token_of

        return start_token_of(self.info, self.tokenizer)

    @property
    def data(self) -> Any:
        """The training data; raises `BadCheckpoint` if its corpus is neither the embedded one nor in the folder of runs."""
        from workbench.data.data_sources import open_data

        corpora = self.path.parent / CORPORA
        name = str(self.info["data"].get("hash"))
        is_corpus = self.info["data"].get("kind") == "text" and name.isalnum()
        with reading(corpora / name) if is_corpus else contextlib.nullcontext():
            return open_data(self.info["data"], corpora, self.path / "tokenizer.json")

    @property
    def store(self) -> Store:
        """Measured records of this run."""
        return Store(self.path / "records")

    def weights_hash(self, step: int) -> str:
        """Return the content address of a step's files, without loading a model."""
        with reading(self.step_folder(step)) as folder, open_regular(folder / WEIGHTS) as weights:
            return digest(read_bytes(folder / CONFIG), weights.read())

    def telemetry(self, where: str = "") -> pd.DataFrame:
        """Return the telemetry of training as records; `where` is a condition of `pandas.DataFrame.query`.

        `run` is the name of the folder, also after it was renamed.

        Example: `run.telemetry("metric == 'validation_loss' and step > 0")`. Raises `BadData` for an invalid condition.
        """
        frame = read_parquet((path for _, path in self.telemetry_parts()), needed=(*NEEDED, "step"))
        frame = frame.assign(run=pd.array([self.name] * len(frame), dtype="str"))
        try:
            return frame.query(where, engine="python").reset_index(drop=True) if where else frame
        except Exception as error:  # many types, from the parser to comparisons of unlike values
            raise BadData(f"{where!r} is no condition of DataFrame.query, as \"metric == 'loss'\": {error}") from error

    def telemetry_parts(self) -> list[tuple[int, Path]]:
        """Return first step and path of all telemetry files, in order; files with other names are ignored.

        A file whose steps lie within the steps of another file was merged into it.
        """
        folder, parts, end = self.path / "telemetry", list[tuple[int, Path]](), -1
        matches = (re.fullmatch(r"(\d{6,})-(\d{6,})\.parquet", p.name) for p in folder.glob("*.parquet"))
        for first, last, name in sorted((int(m[1]), -int(m[2]), m[0]) for m in matches if m):
            if -last > end:
                parts.append((first, folder / name))
                end = -last
        return parts

    def writing(self) -> FileLock:
        """Acquire the writer's lock; raises `InUse` if another process holds it."""
        lock = FileLock(self.path / ".lock", timeout=PATIENCE)
        try:
            return lock.acquire().lock
        except Timeout:
            advice = "wait for it or choose another name"
            raise InUse(f"{self.path} is being written by another process; {advice}") from None


def run_or_model(source: Any, device: Any = None) -> Any:
    """Open the run at a path or of a shipped name, or load any other checkpoint; returns other objects unchanged."""
    if not isinstance(source, str | Path):
        return source
    if (location := locate(source)).is_run:
        return Run.open(location)
    from workbench.checkpoints.loading import load  # imports torch

    return load(location, device=device)


@functools.lru_cache(maxsize=2)
def shared_text(runs: Path, name: str = "", **settings: Any) -> Any:
    """Return a corpus and its tokenizer, built once per folder of runs; `settings` go to `prepare`, `name` names its file."""
    from workbench.data.data_sources import open_data, prepare

    root = runs / CORPORA
    root.mkdir(parents=True, exist_ok=True)
    pointer = root / f"{name or digest('text', settings)}.json"
    with reading(root):
        with FileLock(root / ".lock"):
            if not pointer.exists():
                write_json(pointer, prepare(root=root, **settings).describe())
                push(root)
        return open_data(read_json(pointer), root)


def is_locked(path: Path) -> bool:
    """Return whether a process is writing a run."""
    if not (path / ".lock").exists():
        return False
    lock = FileLock(path / ".lock", timeout=0)
    try:
        with lock:
            return False
    except Timeout:
        return True


def place_of(runs: str | Path, name: str) -> Path:
    """Return the folder of a run of this name; raises `WorkbenchError` for names that no folder can have."""
    if not name or Path(name).name != name or name.startswith("."):
        raise WorkbenchError(f"run name {name!r}: one plain folder name, not starting with a dot")
    return folder(runs) / name


def written_now() -> dict[str, Any]:
    """Return the versions and the time that every `run.json` stores."""
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__.split("+")[0]}
    return {"versions": versions, "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def is_run(path: Path) -> bool:
    """Return whether a folder looks like a run, complete or not."""
    try:
        return (path / RUN_FILE).exists() or any(path.glob("step_*"))
    except OSError:  # another user's, without permission to list it
        return False


def is_study(path: Path) -> bool:
    """Return whether a folder holds the runs of a stored study."""
    try:
        has_file = (path / STUDY).exists() or (path / f"{path.name}.toml").exists()  # either may be lost
        return has_file and os.access(path, os.R_OK)
    except OSError:
        return False


def list_runs(root: Path) -> tuple[list[Run], dict[str, str]]:
    """Return the runs under a folder and its studies by name, and the errors of folders that cannot be read as runs."""
    runs, problems, root = [], {}, folder(root)
    refresh(root)
    try:
        folders = [p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")] if root.is_dir() else []
    except OSError as error:
        return [], {root.name: f"the folder of runs cannot be read: {error.strerror or error}"}
    for path in sorted(folders):
        if is_run(path):
            try:
                runs.append(Run.open(path))
            except WorkbenchError as error:
                problems[path.name] = str(error)
        elif is_study(path):
            more, bad = list_runs(path)
            runs, problems = runs + more, problems | bad
    named: dict[str, Run] = {}
    for run in runs:
        if named.setdefault(run.name, run) is not run:
            problems[str(run.path)] = SAME_NAME.format(named[run.name].path)
    return [*named.values()], problems
