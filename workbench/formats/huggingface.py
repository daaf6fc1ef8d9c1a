"""Hugging Face directories: `config.json` with `model.safetensors` or `pytorch_model.bin`, single or sharded.

A `Trainer`'s `checkpoint-500/` also has `trainer_state.json`, the only other file read. Directories of DeepSpeed and FSDP
shards are refused: their weights lie in pieces that only those libraries put together.
"""

from __future__ import annotations

from pathlib import Path

from workbench.errors import BadCheckpoint
from workbench.files import read_json
from workbench.formats.pickled import unpickle
from workbench.formats.state import Info, State, number, state_of, step_in_name, weights_in
from workbench.formats.stored import Stored, safetensors_table

CONFIG, WEIGHTS, PICKLED = "config.json", "model.safetensors", "pytorch_model.bin"
SHARDS = {
    "DeepSpeed": ("*mp_rank_*_model_states.pt", "zero_pp_rank_*", "*_optim_states.pt", "global_step*/mp_rank_*"),
    "FSDP": ("*.distcp", "pytorch_model_fsdp_*", "*_fsdp_*/*.distcp"),
}


def is_directory(folder: Path) -> bool:
    """Whether a folder is one checkpoint in this form, whole or not."""
    names = (CONFIG, *(f"{n}{end}" for n in (WEIGHTS, PICKLED) for end in ("", ".index.json")))
    return any((folder / name).exists() for name in names)


def refuse_shards(folder: Path) -> None:
    """Raise `BadCheckpoint` for a directory of DeepSpeed or FSDP shards, saying how to put them together."""
    cures = {
        "DeepSpeed": "zero_to_fp32.py, which stands in it, writes one file",
        "FSDP": "`accelerate merge-weights` or torch.distributed.checkpoint.format_utils.dcp_to_torch_save writes one file",
    }
    for library, patterns in SHARDS.items():
        if any(True for pattern in patterns for _ in folder.glob(pattern)):
            raise BadCheckpoint(f"{folder} holds {library} shards, not weights: {cures[library]}; open that")


def read(folder: Path) -> State:
    """The state of a directory; raises `BadCheckpoint` for what is missing or damaged."""
    weights = [folder / f"{name}{end}" for name in (WEIGHTS, PICKLED) for end in (".index.json", "")]
    found = next((path for path in weights if path.exists()), None)
    if found is None:
        refuse_shards(folder)
    config = read_json(folder / CONFIG)
    if found is None:
        raise BadCheckpoint(f"{folder / WEIGHTS} is missing; so are {PICKLED} and their indices")
    tensors: dict[str, Stored] = {}
    for path in _files(found):
        for name, stored in _table(path).items():
            if name in tensors:
                raise BadCheckpoint(f"{path} and {tensors[name].path.name} both hold {name}")
            if not name.endswith("rotary_emb.inv_freq"):  # a constant that older libraries wrote down
                tensors[name] = stored
    form, step = "Hugging Face", step_in_name(folder)
    if (folder / "trainer_state.json").exists():
        form, step = "Hugging Face Trainer", number(read_json(folder / "trainer_state.json").get("global_step"))
    return state_of(tensors, Info(format=form, path=folder, step=step, config=config))


def _files(found: Path) -> list[Path]:
    if not found.name.endswith(".index.json"):
        return [found]
    mapping = read_json(found).get("weight_map")
    if not isinstance(mapping, dict):
        raise BadCheckpoint(f"{found} has no weight_map")
    kind = "safetensors" if WEIGHTS in found.name else "bin"
    names = sorted({str(name) for name in mapping.values()})
    if bad := [name for name in names if Path(name).name != name or not name.endswith(f".{kind}")]:
        raise BadCheckpoint(f"{found} points outside its folder or at no {kind} file: {bad[0]!r}")
    return [found.with_name(name) for name in names]


def _table(path: Path) -> dict[str, Stored]:
    if path.suffix == ".safetensors":
        return safetensors_table(path)[0]
    return {str(k): v for k, v in weights_in(unpickle(path), path)[0].items()}
