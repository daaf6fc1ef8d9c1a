"""Runs of your own decoders: your function builds the module, and the checkpoint's weights are loaded into it.

    workbench import out/ --name mine --builder my_model:build
    WORKBENCH_BUILDERS=my_model:build workbench app    # `load` calls only the builders that this names, joined by commas

`build(settings)` gets the checkpoint's settings (nanoGPT's `model_args`, `--config key=value`) as a dictionary and returns the module.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from workbench.checkpoints.checkpoint_facts import Device, Dtype, State
from workbench.checkpoints.paths import CONFIG, WEIGHTS
from workbench.checkpoints.weight_checks import misfits
from workbench.environment import FOLDER, variable
from workbench.errors import ArchitectureAssumed, BadCheckpoint, WorkbenchError, suggest, warn_caller
from workbench.file_io import replacing, write_json
from workbench.observing.interception.function_mode import unwrapped
from workbench.observing.interception.tensor_paths import tensors_in
from workbench.observing.observation import observe
from workbench.observing.observed_model import Observed
from workbench.observing.recognition.decoder_structure import UNLIMITED
from workbench.observing.recognition.lm_head import CONTEXT

MODEL_TYPE = "builder"
RESERVED = ("app", "workbench", "analyses", "tests")
LENGTHS = (32, 16, 8)  # numbers of random tokens to observe a module on, the first that it accepts
MAX_PROBED, TOLERANCE = 128, 1e-2  # positions of a probe's text, and tolerance of its sums relative to the largest


def build_module(name: str, settings: Mapping[str, Any]) -> nn.Module:
    """Return the module, in evaluation mode, that the builder `package.module:function` makes of settings."""
    where, _, what = name.partition(":")
    if not where or not what.isidentifier():
        raise WorkbenchError(f"builder {name!r}: write package.module:function")
    if where.partition(".")[0] in RESERVED:
        raise WorkbenchError(f"builder {name!r}: {where} is a name of the workbench's own; call your file otherwise")
    here = variable(FOLDER, str(Path.cwd()))
    if here not in sys.path:
        sys.path.append(here)  # last, so that no file there stands before Python's own modules
    try:
        with torch.random.fork_rng():
            imported = importlib.import_module(where)
    except (Exception, SystemExit) as error:  # code of the builder
        cause = f"cannot be imported from {here} or as a package ({type(error).__name__}: {error})"
        raise WorkbenchError(f"builder {name}: {where} {cause}") from error
    if not callable(function := getattr(imported, what, None)):
        near = suggest(what, [n for n, x in vars(imported).items() if callable(x) and not n.startswith("_")])
        raise WorkbenchError(f"builder {name}: {getattr(imported, '__file__', where)} has no function {what!r}; {near}")
    dtype = torch.get_default_dtype()
    try:
        with torch.random.fork_rng():
            module = function(dict(settings))
    except (Exception, SystemExit) as error:  # code of the builder
        raise WorkbenchError(f"{name}({dict(settings)}) raised {type(error).__name__}: {error}") from error
    finally:
        torch.set_default_dtype(dtype)
    if not isinstance(module, nn.Module):
        raise WorkbenchError(f"{name} returned a {type(module).__name__}; a torch.nn.Module is wanted")
    return unwrapped(module)[0].eval()


def observed_of(name: str, state: State, given: Mapping[str, Any] | None = None) -> Observed:
    """Return a checkpoint in the module of a builder, observed; `given` completes and overrides the checkpoint's settings."""
    try:
        settings: dict[str, Any] = json.loads(json.dumps(dict(state.info.config or {}) | dict(given or {})))
    except (TypeError, ValueError) as error:
        raise BadCheckpoint(f"{state.info.path}: its configuration is more than numbers and text ({error})") from error
    module, refused = _filled(name, settings, state), list[WorkbenchError]()
    for length in LENGTHS:
        try:
            output = _called(module, _ids(1, length), name)
            break
        except WorkbenchError as error:
            refused.append(error)
    else:
        raise refused[0]
    vocabulary = settings.get("vocab_size")
    if not (isinstance(vocabulary, int) and vocabulary > 0):  # the rows of an embedding that are as many as the logits
        widths = {x.shape[-1] for _, x in tensors_in(output) if x.ndim}
        rows = [
            m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding) and m.num_embeddings in widths
        ]
        if not rows:
            raise WorkbenchError(
                f"nothing says how many token ids the module of {name} reads: give --config vocab_size=N"
            )
        vocabulary = max(rows)
    example = {"vocabulary": vocabulary, "length": length}
    n_ctx = next((n for key in CONTEXT if isinstance(n := settings.get(key), int) and n > 0), None)
    model = _observed(module, example, n_ctx, name)
    model.source |= state.info.provenance | {"builder": name, "settings": settings, "example": example, "n_ctx": n_ctx}
    return model


def _filled(name: str, settings: Mapping[str, Any], state: State) -> nn.Module:
    """Return the module of a builder with a state's tensors; prefixes that were stripped are put back if the module has them."""
    module, path, stripped = build_module(name, settings), state.info.path, state.info.stripped
    wanted, what = module.state_dict(), f"{path} does not fill the {type(module).__name__} of {name}: "
    prefixes = itertools.accumulate(reversed(stripped), lambda inner, outer: outer + inner, initial="")
    renamed = ({n: p + n for n in state.tensors} for p in prefixes)
    names = min(renamed, key=lambda names: len(set(names.values()) ^ wanted.keys()))
    shapes = {names[n]: shape for n, shape in state.shapes.items()}
    held = {_place(t) for n, t in wanted.items() if n in shapes}
    absent = [n for n, t in wanted.items() if n not in shapes and _place(t) not in held]
    parameters = {n for n, _ in module.named_parameters(remove_duplicate=False)}
    needed = {n: t.shape for n, t in wanted.items() if n in shapes or (n in absent and n in parameters)}
    if faults := misfits(shapes, needed):
        raise BadCheckpoint(what + faults)
    state.check()
    tensors = {names[n]: t for n, t in state.read()}
    if any(t.is_meta for t in wanted.values()):
        raise WorkbenchError(f"{name} returned a module on the meta device; build it on the CPU")
    module.load_state_dict(tensors, strict=False)  # absent are tied parameters and buffers that the module makes
    if untied := [n for n, t in module.state_dict().items() if n in tensors and not t.equal(tensors[n].to(t))]:
        raise BadCheckpoint(f"{what}tied to others in the module and different in the file: {', '.join(untied[:5])}")
    if absent:
        message = f"{path} does not hold {', '.join(absent[:5])}; what {name} makes of them is used"
        warn_caller(message, ArchitectureAssumed)
    return module


def _place(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr() if t.numel() else id(t), t.shape, t.stride()


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
    except Exception as error:  # code of the builder
        cause = f"ids {list(ids.shape)} of 0..{int(ids.max())}: {type(error).__name__}: {error}"
        raise WorkbenchError(f"the module of {name} cannot read {cause}") from error


def _ids(vocabulary: int, length: int) -> Tensor:
    return torch.randint(vocabulary, (2, length), generator=torch.Generator().manual_seed(0))


def save_observed(model: Observed, folder: Path, **provenance: Any) -> None:
    """Write a step: weights, then settings and a few numbers that reveal a changed builder."""
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


def load_observed(name: str, state: State, device: Device = None, dtype: Dtype = None) -> Observed:
    """Return the model of a step in the module of its run's builder, observed; raises `BadCheckpoint` if that changed."""
    folder, config = state.info.path, state.info.config or {}
    try:
        kept, settings = config["workbench"], config["settings"]
        example, n_ctx, origin = kept["example"], kept["n_ctx"], kept["origin"]
        before = torch.tensor(kept["probe"], dtype=torch.float64)
    except (KeyError, TypeError, ValueError) as error:
        raise BadCheckpoint(f"{folder} is no whole step of {name}: {type(error).__name__}: {error}") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ArchitectureAssumed)  # the import warned
        module = _filled(name, settings, state)
    model = _observed(module.to(device or "cpu", dtype), example, n_ctx, name)
    model.source |= origin | {"builder": name, "settings": settings, "example": example, "n_ctx": n_ctx}
    now = torch.tensor(_probe(model), dtype=torch.float64)
    off = (before - now).abs().max() if before.shape == now.shape else torch.tensor(torch.inf)
    if dtype in (None, torch.float32, torch.float64) and not off <= TOLERANCE * before.abs().max():
        raise BadCheckpoint(
            f"{name} computes something else now than when {folder.parent.name} was imported (by {float(off):.2g} of "
            f"{float(before.abs().max()):.2g}): import it again under another name"
        )
    return model


@torch.no_grad()
def _probe(model: Observed) -> list[float]:
    """Return randomly weighted sums of the logits at the first, middle and last position of two texts."""
    example = model.source["example"]
    T = min(model.config.n_ctx, MAX_PROBED) if model.config.n_ctx < UNLIMITED else example["length"]
    ids = _ids(example["vocabulary"], T).to(next(model.parameters()).device)
    try:
        logits = model.everywhere(ids)[:, [0, T // 2, T - 1]]
    except WorkbenchError:
        raise
    except Exception as error:  # code of the builder
        cause = f"{type(error).__name__}: {error}"
        raise WorkbenchError(f"the module cannot read {T} ids, as its n_ctx says: {cause}") from error
    weights = torch.randn(logits.shape[-1], 4, generator=torch.Generator().manual_seed(1)) / logits.shape[-1] ** 0.5
    return (logits.double().cpu() @ weights.double()).flatten().tolist()
