"""Names, shapes and facts of a checkpoint: a Hugging Face directory, a safetensors file, a PyTorch file or another code base's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from workbench.checkpoints.checkpoint_facts import Info, State, whole_number
from workbench.checkpoints.format import formats
from workbench.checkpoints.paths import CONFIG, PICKLED, UNREAD, WEIGHTS, Checkpoint, is_directory, refuse_shards
from workbench.checkpoints.safe_unpickling import unpickle
from workbench.checkpoints.safetensors_files import safetensors_table
from workbench.checkpoints.stored_tensors import Stored
from workbench.errors import BadCheckpoint, suggest
from workbench.file_io import read_json
from workbench.storage.mirror import reading

CONTAINERS = ("model", "state_dict", "model_state_dict", "module", "weights")
STEPS = ("step", "global_step", "iteration", "iter", "iter_num", "itr", "steps")
CONFIGS = ("config", "model_config", "model_args", "hyper_parameters", "args")
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # name parts a wrapper puts anywhere
LEADING = ("module", "model")  # name parts that count as a prefix where every tensor has them
EMBEDDINGS = "model.embed_tokens.weight"


def read(checkpoint: Checkpoint) -> State:
    """Return names, shapes and facts of a checkpoint, its weights unread; the step in the files precedes the one in their names."""
    path = checkpoint.path
    lease = None if checkpoint.mirror is None else reading(path)
    weights, info = _directory(path) if path.is_dir() else _file(path, checkpoint.key)
    tensors = {k: v for k, v in weights.items() if isinstance(k, str) and isinstance(v, Stored)}
    prefix = checkpoint.strip_prefix
    for key, value in weights.items():
        if key not in tensors and not str(key).endswith("_extra_state"):  # of modules, as Transformer Engine's
            raise BadCheckpoint(f"{path}: {key!r} among the weights is no tensor but {_kind(value)}")
    below = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if prefix and not below:
        begins = sorted({f"{name.split('.')[0]}." for name in tensors})
        raise BadCheckpoint(f"{path}: no tensor's name begins with {prefix!r}; {suggest(prefix, begins)}")
    names, taken = {name: name for name in below}, []  # prefixes of DDP, FSDP, torch.compile and Lightning
    for part in WRAPPERS:
        if any(part in name.split(".") for name in names.values()):
            names = {k: ".".join(p for p in name.split(".") if p != part) for k, name in names.items()}
            taken.append(f"{part}.")
    while EMBEDDINGS not in names.values():  # `model.` is Llama's own
        shared = next((f"{p}." for p in LEADING if names and all(n.startswith(f"{p}.") for n in names.values())), None)
        if shared is None:
            break
        names = {k: name.removeprefix(shared) for k, name in names.items()}
        taken.append(shared)
    if len(set(names.values())) < len(names):
        twice = next(name for name in names.values() if list(names.values()).count(name) > 1)
        both = [k for k, name in names.items() if name == twice]
        raise BadCheckpoint(f"{path} holds {twice} more than once: as {' and '.join(both)}; save one of them")
    tensors, stripped = {names[k]: tensor for k, tensor in below.items()}, tuple(taken)
    if prefix:
        stripped = (prefix, *stripped)
    step = checkpoint.step if info.step is None else info.step
    used = tuple(sorted({t.path for t in tensors.values()}))
    return State(tensors, replace(info, step=step, stripped=stripped, files=used), lease)


def _file(path: Path, key: str) -> tuple[Mapping[Any, Any], Info]:
    """Return the state dict in a file, and its facts."""
    is_safetensors = path.suffix == ".safetensors"
    for reader in () if is_safetensors else formats().values():
        if reader.read is not None and (contents := reader.read(path)) is not None:
            return contents[0], Info(format=reader.name, path=path, config=contents[1])
    container = safetensors_table(path) if is_safetensors else unpickle(path)
    recognised = ((form, info) for form in formats().values() if (info := form.recognise(container, path)) is not None)
    unknown = Info(format="safetensors" if is_safetensors else "state dict", path=path)
    form, info = next(recognised, (None, unknown))
    if form is None and is_safetensors:
        return container, info
    weights, beside = _weights_in(container, path, form.weights if form else None, key)
    if form is None and weights is not container:
        steps = (whole_number(container.get(name)) for name in STEPS)
        configs = (container[name] for name in CONFIGS if isinstance(container.get(name), dict))
        step, config = next((s for s in steps if s is not None), None), cast(Any, next(configs, None))
        info = Info(format="PyTorch container", path=path, step=step, config=config)
    return weights, replace(info, beside=beside)


def _weights_in(
    container: Any, path: Path, key: str | None = None, given: str = ""
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the state dict inside containers, under the format's `key`, the caller's (`given`) or a usual one; and the other keys."""
    beside: list[str] = []
    here = container
    if given:
        key, beside = None, [str(k) for k in container if k != given] if isinstance(container, dict) else []
        for part in [given] if isinstance(here, dict) and given in here else given.split("."):
            keys = [str(k) for k in here] if isinstance(here, dict) else []
            if part not in keys:
                raise BadCheckpoint(
                    f"{path} has no {given!r} (key={given!r}): no {part!r} there; {suggest(part, keys)}"
                )
            here = here[part]
    for _ in range(4):
        if not isinstance(here, dict):
            break
        if {"state", "param_groups"} <= here.keys():
            raise BadCheckpoint(f"{path} is an optimizer's state; open the file of the weights beside it")
        if here and sum(isinstance(v, Stored) for v in here.values()) > len(here) / 2:
            return here, tuple(beside)
        inner = next((k for k in ((key,) if key else CONTAINERS) if isinstance(here.get(k), dict)), None)
        if inner is None:
            break
        beside += [str(k) for k in here if k != inner]
        here, key = here[inner], None
    if not isinstance(here, dict):
        raise BadCheckpoint(f"{path} holds no state dict but {_kind(here)}")
    keys = [str(k) for k in here]
    raise BadCheckpoint(
        f"{path} holds no state dict under {given or ', '.join(CONTAINERS)}; it has {', '.join(keys[:12]) or 'nothing'}. If the weights "
        "are below one of these, name it: key='ema' (workbench import --key ema), or key='nets.student' for a key in a key"
    )


def _directory(folder: Path) -> tuple[dict[str, Stored], Info]:
    """Return the tensors of a Hugging Face directory, in one file of weights or those in its index, and its facts."""
    if not is_directory(folder):
        refuse_shards(folder, UNREAD)
        raise BadCheckpoint(f"{folder} is no checkpoint: it has no {CONFIG} and no weights")
    weights = [folder / f"{name}{end}" for name in (WEIGHTS, PICKLED) for end in (".index.json", "")]
    first = next((path for path in weights if path.exists()), None)
    if first is None:
        refuse_shards(folder, UNREAD)
        _ = read_json(folder / CONFIG)
        raise BadCheckpoint(f"{folder / WEIGHTS} is missing; so are {PICKLED} and their indices")
    files = [first]
    if first.name.endswith(".index.json"):
        mapping = read_json(first).get("weight_map")
        if not isinstance(mapping, dict):
            raise BadCheckpoint(f"{first} has no weight_map")
        kind = "safetensors" if WEIGHTS in first.name else "bin"
        names = sorted({str(name) for name in mapping.values()})
        if bad := [name for name in names if Path(name).name != name or not name.endswith(f".{kind}")]:
            raise BadCheckpoint(f"{first} points outside its folder or at no {kind} file: {bad[0]!r}")
        for name in names:
            place, home = (folder / name).resolve(), folder.resolve()
            if not place.is_relative_to(home) and place.parent.name != "blobs":  # where the Hub's cache keeps all files
                where = f"a link to {place} outside its folder"
                raise BadCheckpoint(f"{first} names {name!r}, {where}; copy that file there")
        files = [first.with_name(name) for name in names]
    tensors = dict[str, Stored]()
    for path in files:
        is_pickled = path.suffix != ".safetensors"
        for name, stored in (_weights_in(unpickle(path), path)[0] if is_pickled else safetensors_table(path)).items():
            if name in tensors:
                raise BadCheckpoint(f"{path} and {tensors[name].path.name} both hold {name}")
            if not str(name).endswith("rotary_emb.inv_freq"):  # a constant that older libraries wrote down
                tensors[name] = stored
    form, step = "Hugging Face", None
    if (folder / "trainer_state.json").exists():
        form, step = "Hugging Face Trainer", whole_number(read_json(folder / "trainer_state.json").get("global_step"))
    return tensors, Info(format=form, path=folder, step=step, config=read_json(folder / CONFIG))


def _kind(value: Any) -> str:
    if isinstance(value, Stored):
        return f"one tensor {list(value.shape)}"
    return f"an empty {type(value).__name__}" if value in ({}, [], "") else f"a {type(value).__name__}"
