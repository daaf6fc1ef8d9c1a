"""Decoders of your own code as runs: a function of yours builds the module, the checkpoint's tensors fill it.

    workbench import out/ --as mine --builder my_model:build
    WORKBENCH_BUILDERS=my_model:build workbench app

`build(settings)` gets what the checkpoint says beside its weights (nanoGPT's `model_args`, `--config key=value`) as a dictionary
and returns the module; it is imported from the current folder or an installed package. A run names its builder, but a name in a
file runs nothing: `Run.load` calls only those that the environment names in `WORKBENCH_BUILDERS`, several joined by commas.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from workbench.errors import BadCheckpoint, WorkbenchError, suggest
from workbench.files import read_json, replacing, write_json
from workbench.formats.huggingface import CONFIG, WEIGHTS
from workbench.formats.state import State
from workbench.observing.layouts import tensors
from workbench.observing.observed import Observed
from workbench.observing.observing import observe

FOLDER = "WORKBENCH_FOLDER"
"""Environment variable with the folder that builders are imported from, unless it is the current one."""
EXAMPLE = (2, 32)
"""Batch and positions of the random tokens on which a module is looked at."""
PROBED, ALIKE = 16, 1e-2
"""Logits that a step remembers, and how far they may be off, as a share of the largest: kernels and devices round."""


def build(name: str, settings: Mapping[str, Any]) -> nn.Module:
    """The module, in evaluation mode, that the builder `package.module:function` makes of settings.

    Raises `WorkbenchError` where there is no such function, where it raises, and where it returns something else.
    """
    try:
        module = _function(name)(dict(settings))
    except WorkbenchError:
        raise
    except Exception as error:  # somebody's code
        raise WorkbenchError(f"{name}({dict(settings)}) raised {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise WorkbenchError(f"{name} returned a {type(module).__name__}; a torch.nn.Module is wanted")
    return module.eval()


def _function(name: str) -> Callable[[dict[str, Any]], Any]:
    where, _, what = name.partition(":")
    if not where or not what.isidentifier():
        raise WorkbenchError(f"builder {name!r}: write package.module:function")
    here = os.environ.get(FOLDER) or str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last, so that no file of this name stands before an installed package
    try:
        found = importlib.import_module(where)
    except ImportError as error:
        raise WorkbenchError(f"builder {name}: {where} cannot be imported here ({error})") from error
    function = getattr(found, what, None)
    if not callable(function):
        raise WorkbenchError(f"builder {name}: {where} has no function {what!r}; {suggest(what, dir(found))}")
    return function


# ---- from a checkpoint -----------------------------------------------------------------------------------------------


def observed_of(name: str, state: State, given: Mapping[str, Any] | None = None) -> Observed:
    """A checkpoint in the module of a builder, observed; `model.source` has the builder and the settings.

    `given` completes and overrides what the checkpoint says. Raises `BadCheckpoint` where tensors and module do not fit.
    """
    settings = _plain(dict(state.info.config or {}) | dict(given or {}), state.info.path)
    module = build(name, settings)
    state.check()
    _fill(module, dict(state.read()), state, name)
    model = _observed(module, _vocabulary(module, settings, name), name)
    model.source |= state.info.provenance | {"builder": name, "settings": settings}
    return model


def _plain(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(json.dumps(settings)))
    except (TypeError, ValueError) as error:
        raise BadCheckpoint(f"{path}: its configuration is more than numbers and text ({error})") from error


def _fill(module: nn.Module, tensors: dict[str, Tensor], state: State, name: str) -> None:
    """Give a module its tensors, under the prefixes that were taken from their names where it has those itself."""
    wanted = module.state_dict()
    taken = state.info.stripped
    prefixes = ["".join(taken[i:]) for i in range(len(taken), -1, -1)]
    found = min(({p + n: t for n, t in tensors.items()} for p in prefixes), key=lambda f: len(f.keys() ^ wanted.keys()))
    held = {t.data_ptr() for n, t in wanted.items() if n in found and t.numel()}
    parameters = {n for n, _ in module.named_parameters(remove_duplicate=False)}
    missing = [n for n, t in wanted.items() if n not in found and n in parameters and t.data_ptr() not in held]
    strange = [n for n in found if n not in wanted]
    odd = [n for n in wanted if n in found and wanted[n].shape != found[n].shape]
    if missing or strange or odd:
        lines = [f"missing {n}; {suggest(n, strange)}" for n in missing[:5]] + [f"unexpected {n}" for n in strange[:5]]
        lines += [f"{n} is {list(found[n].shape)}, wanted {list(wanted[n].shape)}" for n in odd[:5]]
        raise BadCheckpoint(
            f"{state.info.path} does not fill the {type(module).__name__} of {name}: " + "; ".join(lines)
        )
    module.load_state_dict(found, strict=False)  # what is left are tied parameters and buffers that the module makes


def _vocabulary(module: nn.Module, settings: Mapping[str, Any], name: str) -> int:
    """How many ids the module reads: what the settings say, else the rows of the embedding that are its logits' too."""
    said = settings.get("vocab_size")
    if isinstance(said, int) and said > 0:
        return said
    rows = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    output = _called(module, _example(1), name)
    made = {x.shape[-1] for _, x in tensors(output) if x.ndim}
    if not (rows := [n for n in rows if n in made]):  # a table of positions may be the larger one
        raise WorkbenchError(f"nothing says how many token ids the module of {name} reads: give --config vocab_size=N")
    return max(rows)


def _observed(module: nn.Module, vocabulary: int, name: str) -> Observed:
    ids = _example(vocabulary).to(next(module.parameters()).device)
    _called(module, ids, name)
    return observe(module, ids, quiet=True)


@torch.no_grad()
def _called(module: nn.Module, ids: Tensor, name: str) -> Any:
    try:
        return module(ids)
    except Exception as error:  # somebody's code
        told = f"ids {list(ids.shape)} of 0..{int(ids.max())}: {type(error).__name__}: {error}"
        raise WorkbenchError(f"the module of {name} cannot read {told}") from error


def _example(vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, EXAMPLE, generator=torch.Generator().manual_seed(0))


# ---- as a step of a run ----------------------------------------------------------------------------------------------


def save(model: Observed, folder: Path, **provenance: Any) -> None:
    """Write a step: weights, then the settings and a few logits by which a builder that has changed is noticed."""
    with replacing(folder / WEIGHTS) as part:
        safetensors.torch.save_model(model.foreign, str(part))
    mine = {"probe": _probe(model), "vocabulary": model.config.d_vocab} | provenance
    write_json(folder / CONFIG, {"model_type": "builder", "settings": model.source["settings"], "workbench": mine})


def load(name: str, folder: Path, device: str | torch.device | None = None) -> Observed:
    """The model of a step in the module of its run's builder, observed.

    Raises `BadCheckpoint` where the builder now makes another module, or one that computes something else. Whoever calls
    this runs code by its name (see `Run.load`).
    """
    config = read_json(folder / CONFIG)
    module = build(name, config["settings"])
    try:
        safetensors.torch.load_model(module, folder / WEIGHTS)
    except (RuntimeError, OSError, SafetensorError) as error:
        raise BadCheckpoint(f"{folder} does not fill what {name} builds now: {error}") from error
    model = _observed(module.to(device or "cpu"), config["workbench"]["vocabulary"], name)
    model.source |= {"builder": name, "settings": config["settings"]}
    before, now = torch.tensor(config["workbench"]["probe"]), torch.tensor(_probe(model))
    if not (before - now).abs().max() <= ALIKE * before.abs().max():
        raise BadCheckpoint(
            f"{name} computes something else now than when {folder.parent.name} was imported (a logit is off by "
            f"{float((before - now).abs().max()):.2g}): import it again under another name"
        )
    return model


@torch.no_grad()
def _probe(model: Observed) -> list[float]:
    ids = _example(model.config.d_vocab)
    return model.everywhere(ids.to(next(model.parameters()).device))[0, -1, :PROBED].float().tolist()
