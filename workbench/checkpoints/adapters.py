"""A checkpoint's state, that of an adapter's folder included: its base's weights with the adapter merged into them by peft.

adapter_config.json           names its base: a folder, or a model of the Hub in this machine's cache
adapter_model.safetensors     Hu et al. (2021): W + (alpha / r) B A, and what else peft merges
"""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.checkpoints.identify import ADAPTER, Checkpoint, identify
from workbench.checkpoints.read import read as read_plain
from workbench.checkpoints.state import State
from workbench.checkpoints.stored import Stored, safetensors_table
from workbench.checkpoints.transformers_modules import from_transformers, quiet
from workbench.errors import BadCheckpoint, NotCovered
from workbench.files import read_json
from workbench.places import install

WEIGHTS = "adapter_model.safetensors"


def read(checkpoint: Checkpoint) -> State:
    """The tensors of any checkpoint by name; unread, but those of an adapter's base with the adapter merged in.

    Raises `BadCheckpoint` with the cause: no base, no safetensors, a kind of adapter that cannot be merged.
    """
    if not (checkpoint.path / ADAPTER).is_file():
        return read_plain(checkpoint)
    folder, settings = checkpoint.path, read_json(checkpoint.path / ADAPTER)
    named = settings.get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise BadCheckpoint(f"{folder / ADAPTER} does not name its base (base_model_name_or_path)")
    for name, stored in safetensors_table(folder / WEIGHTS).items():
        stored.check(name)
    base = read_plain(_base(folder, named, settings.get("revision")))
    merged = _merged(base, folder)
    tensors = {name: Stored(folder, t.dtype, tuple(t.shape), held=t) for name, t in merged.items()}
    files = (*base.info.files, folder / WEIGHTS)
    step = checkpoint.step
    return State(tensors, replace(base.info, path=folder, base=base.info.path, files=files, stripped=(), step=step))


def _base(folder: Path, named: str, revision: Any) -> Checkpoint:
    try:
        inside = folder / named
        return identify(inside if inside.exists() else f"{named}@{revision}" if revision else named)
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{folder} adapts {named}, which is not here: {error}") from error


def _merged(base: State, folder: Path) -> dict[str, Any]:
    if importlib.util.find_spec("peft") is None:
        raise BadCheckpoint(f"{folder} is an adapter; merging it takes peft: {install('adapters')}")
    from peft import PeftModel

    reason = NotCovered(f"{base.info.path} is the base of {folder}")
    module = from_transformers(base, reason, None)
    try:
        with quiet(), warnings.catch_warnings(record=True) as told:  # deprecations between the two libraries, too
            warnings.simplefilter("always")
            adapted = PeftModel.from_pretrained(module, str(folder), local_files_only=True)
            merged: dict[str, Any] = adapted.merge_and_unload(safe_merge=True).state_dict()
    except Exception as error:  # whatever another library makes of settings that do not fit
        first = next(iter(str(error).strip().splitlines()), "")[:300]
        raise BadCheckpoint(
            f"{folder} cannot be merged into {base.info.path}: {type(error).__name__}: {first}"
        ) from error
    if lost := [str(warning.message) for warning in told if "adapter keys" in str(warning.message)]:
        raise BadCheckpoint(f"{folder} cannot be merged into {base.info.path}: {lost[0][:300]}")
    return merged
