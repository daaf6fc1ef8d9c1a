"""The checkpoint that a path means: a run's step, one of a series, a directory or a file. No weights are read here.

identify("runs/text-resformer-s0", "first")          # a step of a run
identify("out/", 500)                                # checkpoint-500/, step_000500/, ckpt_500.pt, ...
identify("EleutherAI/pythia-70m@step1000")           # a Hub name and revision in this machine's cache
series("out/model_*.pt")                             # a glob
series(r"out/run(?P<step>[0-9]+)k/weights\\.pt")      # a regular expression
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workbench.errors import BadCheckpoint, WorkbenchError, refuse_unknown
from workbench.file_io import read_bytes, read_json
from workbench.storage.mirror import Mirror
from workbench.storage.path_or_url import Location, locate

RUN_FILE = "run.json"
CONFIG, WEIGHTS, PICKLED, ADAPTER = "config.json", "model.safetensors", "pytorch_model.bin", "adapter_config.json"
METAS = "consolidated.00.pth"  # in a folder of Meta's, beside params.json
LOG_ONLY = "was imported from a training log: it has no weights and no known model; the Training page shows its numbers"
RECORDING = "was recorded in another training loop and holds no checkpoints"
ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
OTHERS = re.compile(r"optim|optimizer|scheduler|rng_state|scaler|training_args", re.I)
STEP = re.compile(r"(?:step|iter|itr|checkpoint|ckpt|model|epoch=\d+-step)[-_=]?(\d+)(?![a-z\d])(?!.*\d)", re.I)
UNIT = re.compile(r"(?:step|iter|itr|checkpoint|ckpt)[-_=]?\d+(?:\.\d+)?[a-z]", re.I)  # step_10k, step50b_tokens
WITHOUT = "without weights: its numbers can be looked at, and `workbench study` trains it anew"
STEP_FOLDER = re.compile(r"step_(\d{6,})")
SHARDS = {  # files of other libraries -> what they are, and the command that converts them
    "*mp_rank_*_model_states.pt zero_pp_rank_* *_optim_states.pt global_step*/mp_rank_*":
        "DeepSpeed shards, not weights: zero_to_fp32.py in that folder writes one file",
    "model_and_optim/*.distcp ../model_and_optim/*.distcp":
        "OLMo-core's shards, not weights: `python src/examples/huggingface/convert_checkpoint_to_hf.py --checkpoint-input-path {above} "
        "--huggingface-output-dir OUT` of its repository writes a Hugging Face directory",
    "*.distcp pytorch_model_fsdp_* *_fsdp_*/*.distcp":
        "shards of torch.distributed.checkpoint (FSDP, torchtitan), not weights: "
        "`python -m torch.distributed.checkpoint.format_utils dcp_to_torch {here} OUT.pt` or, of accelerate's, "
        "`accelerate merge-weights {here} OUT` writes one file",
    "lit_model.pth":
        "a LitGPT model: `litgpt convert_from_litgpt {here} OUT` writes OUT/model.pth; name it pytorch_model.bin and put the "
        "config.json of the Hugging Face model beside it",
}  # fmt: skip
GGUF = (
    "a GGUF file (llama.cpp), which is not read: install the gguf package (extra `gguf`) and name the file itself, or save it with "
    "transformers' from_pretrained(folder, gguf_file=...).save_pretrained(OUT)"
)
UNREAD = SHARDS | {"*.gguf": GGUF}  # the same and files that may lie beside weights


@dataclass(frozen=True)
class Checkpoint:
    """Path of one checkpoint (a directory or a file), its step and its run."""

    path: Path
    step: int | None = None
    run: Path | None = None
    description: Mapping[str, Any] = field(default_factory=dict)  # the contents of the run's `run.json`
    key: str = ""
    """Key of the weights in a PyTorch file, with dots between nested keys; the usual keys are tried unless given."""
    strip_prefix: str = ""  # prefix of the tensors to read, which is removed from their names
    mirror: Mirror | None = None  # the copy of a URL's folder that the path lies in


def identify(
    path: str | Path | Location, step: str | int = "last", *, key: str = "", strip_prefix: str = ""
) -> Checkpoint:
    """Return the checkpoint at a path, or the one of a step (`last`, `first` or a number) of a run or series.

    Raises `BadCheckpoint` for a path without a checkpoint, `WorkbenchError` for an absent step.
    """
    location = locate(path).with_weights()
    if location.is_run:
        folder = location.path.resolve()
        description = read_json(folder / RUN_FILE)
        number = _one_step(step, available_steps(folder, description), folder.name)
        checkpoint = Checkpoint(step_folder(folder, number), number, folder, description)
    else:
        checkpoints = checkpoints_at(location)
        if len(checkpoints) > 1 or step != "last":
            if not is_series(location):
                raise WorkbenchError(f"step={step!r}: {location.given} is a single checkpoint, not a run")
            steps = {c.step: c for c in checkpoints if c.step is not None}
            checkpoints = [steps[_one_step(step, sorted(steps), location.given)]]
        checkpoint = checkpoints[0]
    return replace(checkpoint, key=key, strip_prefix=strip_prefix, mirror=location.mirror)


def checkpoints_at(location: Location) -> list[Checkpoint]:
    """Return the checkpoint at a location, or the checkpoints of a series by step. A single one in a folder needs no step."""
    place = location.path
    if place.name.startswith("models--") and (reference := place / "refs" / "main").is_file():  # of the Hub's cache
        try:
            main = read_bytes(reference, 4096).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BadCheckpoint(f"{reference} cannot be read: {error}") from error
        if not re.fullmatch(r"\w+", main):
            raise BadCheckpoint(f"{reference} holds {main[:80]!r}, not the name of a revision; fetch the model again")
        place = place / "snapshots" / main
    if place.suffix == ".distcp" or (place.name in SHARDS and place.is_file()):
        refuse_shards(place.parent)
    if (place / METAS).is_file() and not (place / CONFIG).exists():
        return [_checkpoint(place / METAS, None)]
    if is_series(location) and place == location.path:
        if place.is_dir():
            refuse_shards(place)
        inside = [p for p in place.iterdir() if is_checkpoint(p)] if place.is_dir() else []
        if len(inside) != 1 or step_in_name(inside[0]) is not None:
            return [_checkpoint(p, step) for step, p in series(place if place.is_dir() else location.given)]
        place = inside[0]  # nanoGPT's `out/`: the step is inside
    if place.exists():
        return [_checkpoint(place, step_in_name(place))]
    from workbench.checkpoints import hub  # readers of runs alone need no Hub library

    revision = STEP.search(location.given.partition("@")[2])
    return [Checkpoint(hub.folder_of(location.given), int(revision[1]) if revision else None)]


def _checkpoint(path: Path, step: int | None) -> Checkpoint:
    """Return the directory that a file of weights belongs to, with the run that a step belongs to."""
    if path.name in (WEIGHTS, PICKLED) and (path.parent / CONFIG).exists():
        path = path.parent
    if (named := STEP_FOLDER.fullmatch(path.name)) and (path.parent / RUN_FILE).exists():
        return Checkpoint(path, int(named[1]), path.parent.resolve(), read_json(path.parent / RUN_FILE))
    return Checkpoint(path, step)


def step_folder(run: Path, step: int) -> Path:
    """Return the folder of a run's step, which need not exist."""
    return run / f"step_{step:06d}"


def complete_steps(run: Path) -> list[int]:
    """Return the steps of a run that have a complete checkpoint, ascending."""
    matches = (STEP_FOLDER.fullmatch(p.name) for p in run.iterdir())
    return sorted(int(m[1]) for m in matches if m and (run / m[0] / CONFIG).exists())


def available_steps(run: Path, description: Mapping[str, Any]) -> list[int]:
    """Return these steps; raises `BadCheckpoint` for an empty list."""
    if steps := complete_steps(run):
        return steps
    reasons = {"log": LOG_ONLY, "recorder": RECORDING, "shipped": f"is shipped {WITHOUT}"}
    reason = next((r for key, r in reasons.items() if key in description), "has no complete checkpoint yet")
    raise BadCheckpoint(f"{run} {reason}")


def select_steps(steps: str | int | list[int], available: list[int], owner: str) -> list[int]:
    """Return the available steps meant by `last`, `first`, `all`, `ends` (first and last), a step or a list; raises for others."""
    ends = sorted({*available[:1], *available[-1:]})
    words = {"last": available[-1:], "first": available[:1], "all": available, "ends": ends}
    if isinstance(steps, str):
        refuse_unknown("steps", steps, words)
        return words[steps]
    wanted = [steps] if isinstance(steps, int) else list(steps)
    if absent := [step for step in wanted if step not in available]:
        raise WorkbenchError(f"{owner} has no checkpoint at step {absent[0]}; choose from {available}")
    return wanted


def _one_step(step: str | int, available: list[int], owner: str) -> int:
    selected = select_steps(step, available, owner)
    if len(selected) != 1:
        raise WorkbenchError(f"step={step!r} of {owner} means {len(selected)} checkpoints; choose one of {available}")
    return selected[0]


def is_series(location: Location) -> bool:
    """Return whether a location is a pattern, or a folder of checkpoints."""
    return is_pattern(location.given) or (location.path.is_dir() and not is_directory(location.path))


def is_pattern(text: str) -> bool:
    """Return whether a text is a glob, or a regular expression with a `step` group."""
    return "(?P<step>" in text or (glob.has_magic(text) and not os.path.lexists(text))


def series(where: str | Path, revision: str = "") -> list[tuple[int, Path]]:
    """Return the steps and paths of the checkpoints in a folder or of a pattern, by step.

    Args:
        where: A folder, a glob, or a regular expression with a `step` group. A Hub name needs a pattern in `revision`.
        revision: Pattern of revisions, as in `series("EleutherAI/pythia-70m", "step*")`, among those in this machine's cache.

    Raises:
        BadCheckpoint: Nothing matches, a match has no step, two have the same step, or the files are another library's shards.
    """
    text, checkpoints = f"{where}@{revision}" if revision else str(where), list[tuple[int, Path]]()
    if "(?P<step>" in text:
        checkpoints = _matches(text)
    elif is_pattern(text):
        paths = [Path(name) for name in glob.glob(text) if is_checkpoint(Path(name))]  # noqa: PTH207 - absolute patterns too
        for path in paths:
            named = (step_in_name(path), step_in_name(path.parent))  # step_500/model.pt
            if (step := next((n for n in named if n is not None), None)) is None:
                raise BadCheckpoint(f"{path} does not name its step; give a pattern with a (?P<step>...) group")
            checkpoints.append((step, path))
        if not paths:
            from workbench.checkpoints import hub

            checkpoints = [(int(n[1]), path) for ref, path in hub.revisions(text).items() if (n := STEP.search(ref))]
    elif (folder := Path(where)).is_dir():
        refuse_shards(folder)
        if with_unit := [p for p in sorted(folder.iterdir()) if UNIT.search(p.stem) and is_checkpoint(p)]:
            raise BadCheckpoint(
                f"{with_unit[0]}: the step has a unit or is rounded; give a pattern with a (?P<step>...) group"
            )
        checkpoints = [(s, p) for p in folder.iterdir() if (s := step_in_name(p)) is not None and is_checkpoint(p)]
    else:
        raise BadCheckpoint(f"{where} is no folder, no glob and no pattern with a (?P<step>...) group")
    if not checkpoints:
        raise BadCheckpoint(f"{where}: no checkpoint there names its step; {_advice(Path(where))}")
    checkpoints.sort()
    for (a, first), (b, second) in itertools.pairwise(checkpoints):
        if a == b:
            both = f"{first} and {second} are both step {a}"
            raise BadCheckpoint(f"{where}: {both}; give a pattern that matches one of them")
    return checkpoints


def step_in_name(path: Path) -> int | None:
    """Return the step in the name of a file or folder (`step_000500`, `checkpoint-500`, `ckpt_500.pt`), None without one."""
    match = STEP.search(path.name if path.is_dir() else path.stem)
    return int(match[1]) if match else None


def is_checkpoint(path: Path) -> bool:
    """Return whether a path looks like weights by its name: a Hugging Face directory, or a file of a known ending."""
    if path.is_dir():
        return is_directory(path)
    return path.suffix in ENDINGS and not OTHERS.search(path.name)


def is_directory(folder: Path) -> bool:
    """Return whether a folder is one checkpoint in Hugging Face's form, complete or not, or an adapter."""
    names = (CONFIG, ADAPTER, *(f"{n}{end}" for n in (WEIGHTS, PICKLED) for end in ("", ".index.json")))
    return any((folder / name).exists() for name in names)


def refuse_shards(folder: Path, kinds: Mapping[str, str] = SHARDS) -> None:
    """Raise `BadCheckpoint` for a folder of another library's files, with the command that converts them."""
    for patterns, cure in kinds.items():
        if match := next((path for pattern in patterns.split() for path in folder.glob(pattern)), None):
            here = match.resolve() if match.is_dir() else match.resolve().parent
            raise BadCheckpoint(f"{folder} holds {cure.format(here=here, above=here.parent)}; open that")


def _advice(folder: Path) -> str:
    """Return what can be opened in or below a folder that is no series; raises as `refuse_shards` does."""
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    if runs := [p.name for p in inside if (p / RUN_FILE).is_file()]:
        return f"it holds runs: give one of them, as {folder / runs[0]}"
    if files := [p.name for p in inside if is_checkpoint(p)]:
        return f"give one of them, as {folder / files[0]}, or a pattern with a (?P<step>...) group"
    for place in (folder, *sorted(folder.glob("*/")), *sorted(folder.glob("*/*/"))):  # out/checkpoint/step-1000
        refuse_shards(place, UNREAD)
    if folder.is_dir() and not inside:
        return "the folder is empty"
    return "give a glob, or a pattern with a (?P<step>...) group"


def _matches(text: str) -> list[tuple[int, Path]]:
    """Return (step, path) of the files and folders that a regular expression matches, below its first plain folder."""
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise BadCheckpoint(f"{text!r} is no regular expression: {error}") from error
    plain = re.split(r"[()\[\]{}^$+*?|\\]", text, maxsplit=1)[0].rpartition("/")[0]
    checkpoints = []
    for folder, folders, files in os.walk(plain or ("/" if text.startswith("/") else ".")):
        for path in (Path(folder, name) for name in (*folders, *files)):
            if match := pattern.fullmatch(path.as_posix()):
                if not (match["step"] or "").isdecimal():
                    raise BadCheckpoint(f"{path}: the step {match['step']!r} is no whole number")
                checkpoints.append((int(match["step"]), path))
    return checkpoints
