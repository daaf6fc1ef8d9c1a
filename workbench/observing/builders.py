"""Decoders of your own code as runs: a function of yours builds the module, the checkpoint's tensors fill it.

    workbench import out/ --as mine --builder my_model:build
    WORKBENCH_BUILDERS=my_model:build workbench app

`build(settings)` gets what the checkpoint says beside its weights (nanoGPT's `model_args`, `--config key=value`) as a dictionary
and returns the module; it is imported from the current folder or an installed package. A run names its builder, but a name in a
file runs nothing: `Run.load` calls only those that the environment names in `WORKBENCH_BUILDERS`, several joined by commas.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from workbench.errors import ArchitectureAssumed, BadCheckpoint, WorkbenchError, suggest
from workbench.files import read_json, replacing, write_json
from workbench.formats.huggingface import CONFIG, WEIGHTS
from workbench.formats.state import State
from workbench.observing.anatomy import CONTEXT, UNLIMITED
from workbench.observing.layouts import tensors as tensors_in
from workbench.observing.observed import Observed
from workbench.observing.observing import observe
from workbench.observing.watching import unwrapped

MODEL_TYPE = "builder"
FOLDER = "WORKBENCH_FOLDER"
"""Environment variable with the folder that builders are imported from, unless it is the current one."""
OURS = ("app", "workbench", "analyses", "tests")
LENGTHS = (32, 16, 8)
"""Positions of the random tokens on which a module is looked at: as many as it reads."""
PROBED, ALIKE = 128, 1e-2
"""Positions at most of the text whose logits a step remembers in sums with random weights, and how far these may be off, as a share of
the largest: kernels and devices round."""


def build(name: str, settings: Mapping[str, Any]) -> nn.Module:
    """The module, in evaluation mode, that the builder `package.module:function` makes of settings.

    Raises `WorkbenchError` where there is no such function, where it raises, and where it returns something else.
    """
    function, dtype = _function(name), torch.get_default_dtype()
    try:
        with torch.random.fork_rng():
            module = function(dict(settings))
    except (Exception, SystemExit) as error:  # somebody's code
        raise WorkbenchError(f"{name}({dict(settings)}) raised {type(error).__name__}: {error}") from error
    finally:
        torch.set_default_dtype(dtype)
    if not isinstance(module, nn.Module):
        raise WorkbenchError(f"{name} returned a {type(module).__name__}; a torch.nn.Module is wanted")
    return unwrapped(module)[0].eval()


def _function(name: str) -> Callable[[dict[str, Any]], Any]:
    where, _, what = name.partition(":")
    if not where or not what.isidentifier():
        raise WorkbenchError(f"builder {name!r}: write package.module:function")
    if where.partition(".")[0] in OURS:
        raise WorkbenchError(f"builder {name!r}: {where} is a name of the workbench's own; call your file otherwise")
    here = os.environ.get(FOLDER) or str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last, so that no file there stands before Python's own modules
    try:
        with torch.random.fork_rng():
            found = importlib.import_module(where)
    except (Exception, SystemExit) as error:  # somebody's code
        told = f"{type(error).__name__}: {error}"
        raise WorkbenchError(
            f"builder {name}: {where} cannot be imported from {here} or as a package ({told})"
        ) from error
    function = getattr(found, what, None)
    if not callable(function):
        functions = [n for n, x in vars(found).items() if callable(x) and not n.startswith("_")]
        raise WorkbenchError(
            f"builder {name}: {getattr(found, '__file__', where)} has no function {what!r}; {suggest(what, functions)}"
        )
    return function


# ---- from a checkpoint -----------------------------------------------------------------------------------------------


def observed_of(name: str, state: State, given: Mapping[str, Any] | None = None) -> Observed:
    """A checkpoint in the module of a builder, observed; `model.source` has the builder and the settings.

    `given` completes and overrides what the checkpoint says. Raises `BadCheckpoint` where tensors and module do not fit.
    """
    settings = _plain(dict(state.info.config or {}) | dict(given or {}), state.info.path)
    module = build(name, settings)
    state.check()
    _fill(module, dict(state.read()), state.info.path, name, state.info.stripped)
    length, output = _read(module, name)
    example = {"vocabulary": _vocabulary(module, settings, output, name), "length": length}
    said = next((n for key in CONTEXT if isinstance(n := settings.get(key), int) and n > 0), None)
    model = _observed(module, example, said, name)
    model.source |= state.info.provenance | {"builder": name, "settings": settings, "example": example, "n_ctx": said}
    return model


def _plain(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(json.dumps(settings)))
    except (TypeError, ValueError) as error:
        raise BadCheckpoint(f"{path}: its configuration is more than numbers and text ({error})") from error


def _fill(module: nn.Module, tensors: dict[str, Tensor], path: Path, name: str, taken: Sequence[str] = ()) -> None:
    """Give a module its tensors, under the prefixes `taken` from their names where it has those itself."""
    wanted = module.state_dict()
    prefixes = ["".join(taken[i:]) for i in range(len(taken), -1, -1)]
    found = min(({p + n: t for n, t in tensors.items()} for p in prefixes), key=lambda f: len(f.keys() ^ wanted.keys()))
    held = {_place(t) for n, t in wanted.items() if n in found}
    parameters = {n for n, _ in module.named_parameters(remove_duplicate=False)}
    left = [n for n, t in wanted.items() if n not in found and _place(t) not in held]
    missing = [n for n in left if n in parameters]
    strange = [n for n in found if n not in wanted]
    odd = [n for n in wanted if n in found and wanted[n].shape != found[n].shape]
    what = f"{path} does not fill the {type(module).__name__} of {name}: "
    if missing or strange or odd:
        lines = [f"missing {', '.join(missing[:5])}"] if missing else []
        lines += [f"unexpected {', '.join(strange[:5])}"] if strange else []
        lines += [f"{n} is {list(found[n].shape)}, wanted {list(wanted[n].shape)}" for n in odd[:5]]
        more = max(0, len(missing) - 5) + max(0, len(strange) - 5) + max(0, len(odd) - 5)
        raise BadCheckpoint(what + "; ".join(lines + ([f"and {more} more"] if more else [])))
    if any(t.is_meta for t in wanted.values()):
        raise WorkbenchError(f"{name} returned a module on the meta device; build it on the CPU")
    module.load_state_dict(found, strict=False)  # what is left are tied parameters and buffers that the module makes
    if untied := [n for n, t in module.state_dict().items() if n in found and not t.equal(found[n].to(t))]:
        raise BadCheckpoint(f"{what}tied to others in the module and different in the file: {', '.join(untied[:5])}")
    if left:
        told = f"{path} does not hold {', '.join(left[:5])}; what {name} makes of them is used"
        warnings.warn(told, ArchitectureAssumed, stacklevel=2)


def _place(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr() if t.numel() else id(t), t.shape, t.stride()


def _read(module: nn.Module, name: str) -> tuple[int, Any]:
    """The largest of `LENGTHS` that a module reads, and what it makes of it; raises what it said of the first."""
    refused: list[WorkbenchError] = []
    for length in LENGTHS:
        try:
            return length, _called(module, _ids(1, length), name)
        except WorkbenchError as error:
            refused.append(error)
    raise refused[0]


def _vocabulary(module: nn.Module, settings: Mapping[str, Any], output: Any, name: str) -> int:
    """How many ids the module reads: what the settings say, else the rows of the embedding that are its logits' too."""
    said = settings.get("vocab_size")
    if isinstance(said, int) and said > 0:
        return said
    rows = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    made = {x.shape[-1] for _, x in tensors_in(output) if x.ndim}
    if not (rows := [n for n in rows if n in made]):  # a table of positions may be the larger one
        raise WorkbenchError(f"nothing says how many token ids the module of {name} reads: give --config vocab_size=N")
    return max(rows)


def _observed(module: nn.Module, example: Mapping[str, int], n_ctx: int | None, name: str) -> Observed:
    ids = _ids(**example).to(next(module.parameters()).device)
    _called(module, ids, name)
    with torch.random.fork_rng():
        model = observe(module, ids, quiet=True)
    if n_ctx is not None and model.config.n_ctx == UNLIMITED:  # the module does not say; its settings do
        model.config = dataclasses.replace(model.config, n_ctx=n_ctx)
    return model


@torch.no_grad()
def _called(module: nn.Module, ids: Tensor, name: str) -> Any:
    try:
        return module(ids)
    except Exception as error:  # somebody's code
        told = f"ids {list(ids.shape)} of 0..{int(ids.max())}: {type(error).__name__}: {error}"
        raise WorkbenchError(f"the module of {name} cannot read {told}") from error


def _ids(vocabulary: int, length: int) -> Tensor:
    return torch.randint(vocabulary, (2, length), generator=torch.Generator().manual_seed(0))


# ---- as a step of a run ----------------------------------------------------------------------------------------------


def save(model: Observed, folder: Path, **provenance: Any) -> None:
    """Write a step: weights, then the settings and a few numbers by which a builder that has changed is noticed."""
    seen: set[tuple[Any, ...]] = set()
    tensors = {}
    for name, t in model.foreign.state_dict().items():
        if _place(t) not in seen:  # tied tensors once
            tensors[name] = t.detach().to("cpu").clone(memory_format=torch.contiguous_format)
        seen.add(_place(t))
    with replacing(folder / WEIGHTS) as part:
        safetensors.torch.save_file(tensors, str(part), {"format": "pt"})
    mine = {key: model.source[key] for key in ("example", "n_ctx")} | {"probe": _probe(model)} | provenance
    write_json(folder / CONFIG, {"model_type": MODEL_TYPE, "settings": model.source["settings"], "workbench": mine})


def load(
    name: str, folder: Path, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> Observed:
    """The model of a step in the module of its run's builder, observed.

    Raises `BadCheckpoint` where the builder now makes another module, or one that computes something else. Whoever calls
    this runs code by its name (see `Run.load`).
    """
    config = read_json(folder / CONFIG)
    try:
        kept, settings = config["workbench"], config["settings"]
        example, n_ctx, origin = kept["example"], kept["n_ctx"], kept["origin"]
        before = torch.tensor(kept["probe"], dtype=torch.float64)
        tensors = safetensors.torch.load_file(folder / WEIGHTS)
    except (KeyError, TypeError, ValueError, OSError, SafetensorError) as error:
        raise BadCheckpoint(f"{folder} is no whole step of {name}: {type(error).__name__}: {error}") from error
    module = build(name, settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ArchitectureAssumed)  # said when it was imported
        _fill(module, tensors, folder, name)
    model = _observed(module.to(device or "cpu", dtype), example, n_ctx, name)
    model.source |= origin | {"builder": name, "settings": settings, "example": example, "n_ctx": n_ctx}
    now = torch.tensor(_probe(model), dtype=torch.float64)
    off = (before - now).abs().max() if before.shape == now.shape else torch.tensor(torch.inf)
    if dtype in (None, torch.float32, torch.float64) and not off <= ALIKE * before.abs().max():
        raise BadCheckpoint(
            f"{name} computes something else now than when {folder.parent.name} was imported (by {float(off):.2g} of "
            f"{float(before.abs().max()):.2g}): import it again under another name"
        )
    return model


@torch.no_grad()
def _probe(model: Observed) -> list[float]:
    """Sums of the logits at the first, middle and last position, with random weights, two texts."""
    example = model.source["example"]
    T = min(model.config.n_ctx, PROBED) if model.config.n_ctx < UNLIMITED else example["length"]
    ids = _ids(example["vocabulary"], T).to(next(model.parameters()).device)
    try:
        logits = model.everywhere(ids)[:, [0, T // 2, T - 1]]
    except WorkbenchError:
        raise
    except Exception as error:  # somebody's code
        raise WorkbenchError(
            f"the module cannot read {T} ids, as its n_ctx says: {type(error).__name__}: {error}"
        ) from error
    weights = torch.randn(logits.shape[-1], 4, generator=torch.Generator().manual_seed(1)) / logits.shape[-1] ** 0.5
    return (logits.double().cpu() @ weights.double()).flatten().tolist()
