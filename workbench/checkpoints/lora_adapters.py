"""LoRA and other adapters of peft: the base's weights with the adapter merged into them."""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.checkpoints import hub
from workbench.checkpoints.checkpoint_facts import State
from workbench.checkpoints.paths import ADAPTER, Checkpoint, identify
from workbench.checkpoints.safetensors_files import safetensors_table
from workbench.checkpoints.state_dicts import read as read_plain
from workbench.checkpoints.stored_tensors import Stored
from workbench.checkpoints.transformers_modules import from_transformers, quiet
from workbench.errors import BadCheckpoint, NotCovered, UnknownName
from workbench.file_io import read_json
from workbench.places import install
from workbench.storage.mirror import mirror_of
from workbench.storage.path_or_url import locate
from workbench.storage.remote import is_url

WEIGHTS = "adapter_model.safetensors"
KINDS = (  # adapters whose weights are added to a base's; other kinds name tokenizers, models or files
    "LORA", "ADALORA", "LOHA", "LOKR", "IA3", "OFT", "BOFT", "VERA", "PVERA", "VBLORA", "RANDLORA", "HRA", "HIRA", "FOURIERFT", "LN_TUNING",
    "MISS", "C3A", "SHIRA", "ROAD", "DELORA", "GRALORA", "WAVEFT", "TRAINABLE_TOKENS",
)  # fmt: skip


def read_merged(checkpoint: Checkpoint) -> State:
    """Return the tensors of any checkpoint; an adapter is merged into the tensors of its base."""
    if not (checkpoint.path / ADAPTER).is_file():
        return read_plain(checkpoint)
    folder, settings = checkpoint.path, read_json(checkpoint.path / ADAPTER)
    if (kind := settings.get("peft_type")) not in KINDS:
        raise BadCheckpoint(f"{folder / ADAPTER}: {UnknownName('kind of adapter that can be merged', kind, KINDS)}")
    if settings.get("megatron_config") is not None:  # peft would import the module that the file names
        raise BadCheckpoint(f"{folder / ADAPTER}: megatron_config is not supported; remove it")
    for name, stored in safetensors_table(folder / WEIGHTS).items():
        stored.check(name)
    base = read_plain(_base(folder, settings.get("base_model_name_or_path"), settings.get("revision")))
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
        first = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:300]}"
        raise BadCheckpoint(f"{folder} cannot be merged into {base.info.path}: {first}") from error
    if lost := [str(warning.message) for warning in told if "adapter keys" in str(warning.message)]:
        raise BadCheckpoint(f"{folder} cannot be merged into {base.info.path}: {lost[0][:300]}")
    tensors = {name: Stored(folder, t.dtype, tuple(t.shape), held=t) for name, t in merged.items()}
    files = (*base.info.files, folder / WEIGHTS)
    step = checkpoint.step
    return State(tensors, replace(base.info, path=folder, base=base.info.path, files=files, stripped=(), step=step))


def _base(folder: Path, named: Any, revision: Any) -> Checkpoint:
    """Return the base of an adapter, which may come from anybody: URLs, patterns and copies of another URL are refused."""
    shown = f"{named[:200]!r}" if isinstance(named, str) else repr(named)
    where = f"{folder / ADAPTER}: base_model_name_or_path is {shown}"
    if not isinstance(named, str) or not named.strip() or "\0" in named:
        raise BadCheckpoint(f"{where}, which does not name its base; write a folder or a name of the Hub")
    if is_url(named) or "://" in named or named.startswith(("//", "\\\\")):
        raise BadCheckpoint(
            f"{where}, a URL; a file may only name a folder or a model in the Hub cache: fetch the base, then write its folder there"
        )
    try:
        location = locate(folder / named)
        name = f"{named}@{revision}" if isinstance(revision, str) and revision else named
        base = location.path if location.path.exists() else hub.snapshot(name)
    except (OSError, BadCheckpoint) as error:
        raise BadCheckpoint(f"{where}, which cannot be opened: {error}") from error
    if base is None:
        raise BadCheckpoint(
            f"{folder} adapts {name[:200]}, which is not here: neither a folder nor in the cache of the Hub; write its folder to "
            "base_model_name_or_path"
        )
    mirror = mirror_of(base.resolve())
    if mirror is not None and mirror != mirror_of(folder.resolve()):
        raise BadCheckpoint(f"{where}, a copy of {mirror.url}; copy it out of the cache, then write its folder there")
    if (base / ADAPTER).is_file():
        raise BadCheckpoint(f"{where}, an adapter itself; write the folder of a model")
    return identify(base)
