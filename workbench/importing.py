"""Anyone's checkpoints as a run: `workbench import PATH` writes a folder that measuring and the dashboard read."""

from __future__ import annotations

import platform
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from workbench.checkpoints import load_state, save
from workbench.config import TrainConfig
from workbench.errors import ArchitectureAssumed, BadCheckpoint, NotCovered, WorkbenchError
from workbench.files import write_json
from workbench.formats import open_state, series
from workbench.formats.huggingface import is_directory, refuse_shards
from workbench.formats.series import is_pattern
from workbench.formats.vocabulary import SETTINGS, TOKENIZER, tokenizer_beside
from workbench.models import Transformer
from workbench.runs import RUN_FILE, Run

LENGTH = 128  # tokens measured at unless another length is asked for


def import_run(
    path: str | Path,
    runs: Path,
    *,
    name: str | None = None,
    architecture: str | None = None,
    config: Mapping[str, Any] | None = None,
    seed: int | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Run:
    """A run of one checkpoint or of a series (a folder, a glob, a pattern with a `step` group), one model in memory at a time.

    The folder appears whole or not at all. A checkpoint that names no step is kept as step 0. `seed` tells runs of one
    model apart; what the files say unless given, else 0. Raises `BadCheckpoint` where steps are not of one model, `NotCovered`
    for a model our decoder does not compute, `WorkbenchError` for a name that is taken.
    """
    found = _found(path)
    name = name or _name(found[-1][1] if len(found) == 1 else _common(found))
    if not name or Path(name).name != name or name.startswith("."):
        raise WorkbenchError(f"run name {name!r}: one plain folder name, not starting with a dot")
    if (runs / name).exists():
        raise WorkbenchError(f"{runs / name} exists; choose another name with --as, or remove it")
    with _appearing(runs / name) as folder:
        first: dict[str, Any] = {}
        for step, source in found:
            if progress:
                progress(f"{source} as step {step}")
            with warnings.catch_warnings():
                if first:  # what is assumed of a series is said once
                    warnings.simplefilter("ignore", ArchitectureAssumed)
                model = _load(source, architecture, config, options)
            first = first or _facts(model) | {"seed": model.source["seed"] if seed is None else seed}
            _refuse_other(first, _facts(model), found[0][1], source)
            first["seed"] = first["seed"] or 0
            save(model, folder / f"step_{step:06d}", seed=first["seed"], step=step, run=name, origin=model.source)
        _copy_tokenizer(found[-1][1], folder, first["config"].d_vocab)
        _describe(folder, first, found[-1][0], path)
    return Run.open(runs / name)


def _facts(model: Transformer) -> dict[str, Any]:
    facts = {what: getattr(model, what) for what in ("architecture", "options", "config", "assumed")}
    return facts | {"form": model.source["format"]}


def _found(path: str | Path) -> list[tuple[int, Path]]:
    folder = Path(path)
    if not is_pattern(str(path)) and (folder / RUN_FILE).exists():
        raise WorkbenchError(f"{folder} is a run already; copy it into the folder of runs")
    if is_pattern(str(path)) or (folder.is_dir() and not is_directory(folder)):
        if folder.is_dir():
            refuse_shards(folder)
        return series(path)
    step = open_state(folder).info.step
    return [(step or 0, folder.resolve())]


def _load(
    source: Path, architecture: str | None, config: Mapping[str, Any] | None, options: dict[str, Any]
) -> Transformer:
    try:
        return load_state(open_state(source), architecture_name=architecture, config=config, **options)
    except NotCovered as reason:
        raise NotCovered(
            f"{reason}. Only models of our decoder become runs, with all pages of the dashboard; others are observed in Python: "
            "workbench.xray(model, ids) of model = workbench.load(path), or of workbench.observe(module, ids)"
        ) from reason


def _refuse_other(first: dict[str, Any], other: dict[str, Any], a: Path, b: Path) -> None:
    for what in ("architecture", "options", "config"):
        if first[what] != other[what]:
            raise BadCheckpoint(f"{a} and {b} are not steps of one model: {what} {first[what]} and {other[what]}")


def _describe(folder: Path, first: dict[str, Any], last: int, path: str | Path) -> None:
    config = first["config"]
    info = {
        "format": 1, "architecture": first["architecture"], "options": first["options"], "seed": first["seed"],
        "model": asdict(config), "train": asdict(TrainConfig(steps=last or 1, batch=1, T=min(LENGTH, config.n_ctx))),
        "data": {"kind": "imported", "domains": ["unknown"]},
        "imported": {"from": str(path), "assumed": first["assumed"], "format": first["form"]},
        "versions": {"python": platform.python_version(), "torch": torch.__version__.split("+")[0]},
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip
    write_json(folder / RUN_FILE, info)


def _copy_tokenizer(last: Path, to: Path, d_vocab: int) -> None:
    """The tokenizer beside the last checkpoint, checked against the model."""
    beside = last if last.is_dir() else last.parent
    if tokenizer_beside(beside, d_vocab) is not None:
        for name in (TOKENIZER, SETTINGS):
            if (beside / name).exists():
                shutil.copyfile(beside / name, to / name)


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A hidden folder that becomes `folder` on success and vanishes otherwise."""
    part = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        part.mkdir(parents=True)
        yield part
        part.rename(folder)
    except OSError as error:
        raise WorkbenchError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _name(path: Path) -> str:
    return path.name if path.is_dir() else path.stem


def _common(found: list[tuple[int, Path]]) -> Path:
    """The folder a series lies in."""
    parents = [set(path.resolve().parents) for _, path in found]
    return max(set.intersection(*parents), key=lambda path: len(path.parts))
