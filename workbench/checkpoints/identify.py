"""Which checkpoint a path means: a run's step, one of a series, a directory or a file. Names alone are looked at.

identify("runs/text-resformer-s0", "first")          # a step of a run
identify("out/", 500)                                # of checkpoint-500/, step_000500/, ckpt_500.pt, ...
identify("EleutherAI/pythia-70m@step1000")           # a name and revision of the Hub, in this machine's cache
series("out/model_*.pt")                             # a glob
series(r"out/run(?P<step>[0-9]+)k/weights\\.pt")      # a regular expression over the paths from its first plain folder on
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workbench.errors import BadCheckpoint, UnknownName, WorkbenchError, suggest
from workbench.files import read_bytes, read_json
from workbench.storage.mirror import fetched

RUN_FILE = "run.json"
BUILDERS = "WORKBENCH_BUILDERS"
"""Environment variable with the builders (`package.module:function`) that may run; a file's word is not enough."""
CONFIG, WEIGHTS, PICKLED, ADAPTER = "config.json", "model.safetensors", "pytorch_model.bin", "adapter_config.json"
METAS = "consolidated.00.pth"  # in a folder of Meta's, beside params.json
ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
OTHERS = re.compile(r"optim|optimizer|scheduler|rng_state|scaler|training_args", re.I)
SPECIAL = re.compile(r"[()\[\]{}^$+*?|\\]")
STEP = re.compile(r"(?:step|iter|itr|checkpoint|ckpt|model|epoch=\d+-step)[-_=]?(\d+)(?!.*\d)", re.I)
WITHOUT = "without weights: its numbers can be looked at, and `workbench study` trains it anew"
STEP_FOLDER = re.compile(r"step_(\d{6,})")
ELSEWHERE = {  # what lies in folders of other libraries -> whose it is, and what makes weights of the folder it lies in
    "*mp_rank_*_model_states.pt zero_pp_rank_* *_optim_states.pt global_step*/mp_rank_*":
        "DeepSpeed shards, not weights: zero_to_fp32.py, which stands in it, writes one file",
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
    "a GGUF file (llama.cpp), which is not read: open the model it was converted from, or save it with transformers' "
    "from_pretrained(folder, gguf_file=...).save_pretrained(OUT)"
)
UNREAD = ELSEWHERE | {"*.gguf": GGUF}
"""The same, and what may lie beside weights that are read."""


@dataclass(frozen=True)
class Checkpoint:
    """Where one checkpoint lies: a directory or a file, the step that names say, and the run it is a step of."""

    path: Path
    step: int | None = None
    run: Path | None = None
    description: Mapping[str, Any] = field(default_factory=dict)
    """The contents of the run's `run.json`."""
    key: str = ""
    """Where the weights lie in a PyTorch file, with dots between nested keys; found by the usual names unless given."""
    strip_prefix: str = ""
    """The prefix of the tensors that are read, which is taken off."""


def identify(path: str | Path, step: str | int = "last", *, key: str = "", strip_prefix: str = "") -> Checkpoint:
    """Return the checkpoint meant by a path and a step (`last`, `first` or a number) of a run or series.

    Args:
        path: A run, a step, a checkpoint or a series.
        step: Which step of a run or series.
        key: Where the weights lie in a PyTorch file, `ema` or `nets.student`.
        strip_prefix: Prefix of the tensors that are read; others are left out.

    Raises `BadCheckpoint` for a path that is none, `WorkbenchError` for a step that is not there.
    """
    return replace(_identified(path, step), key=key, strip_prefix=strip_prefix)


def _identified(path: str | Path, step: str | int) -> Checkpoint:
    path = _snapshot_in(fetched(path))
    if (Path(path) / RUN_FILE).exists():
        folder = Path(path).resolve()
        description = read_json(folder / RUN_FILE)
        number = _one(step, steps_of(folder, description), folder.name)
        return Checkpoint(step_folder(folder, number), number, folder, description)
    checkpoints = checkpoints_at(path)
    if len(checkpoints) == 1 and step == "last":
        return checkpoints[0]
    if not is_series(path):
        raise WorkbenchError(f"step={step!r}: {path} is a single checkpoint, not a run")
    steps = {checkpoint.step: checkpoint for checkpoint in checkpoints if checkpoint.step is not None}
    return steps[_one(step, sorted(steps), str(path))]


def checkpoints_at(path: str | Path) -> list[Checkpoint]:
    """The checkpoint at a path, or those of the series it means, by step; the only one in a folder needs no step."""
    place = Path(path := _snapshot_in(path))
    if place.suffix == ".distcp" or (place.name in ELSEWHERE and place.is_file()):
        refuse_shards(place.parent)
    if (place / METAS).is_file() and not (place / CONFIG).exists():
        return [_placed(place / METAS, None)]
    if is_series(path):
        if place.is_dir():
            refuse_shards(place)
        inside = [p for p in place.iterdir() if is_checkpoint(p)] if place.is_dir() else []
        if len(inside) != 1 or step_in_name(inside[0]) is not None:
            return [_placed(p, step) for step, p in series(path)]
        place = inside[0]  # nanoGPT's `out/`: the step is inside
    if place.exists():
        return [_placed(place, step_in_name(place))]
    found = _in_hub_cache(path)
    revision = STEP.search(str(path).partition("@")[2])
    return [Checkpoint(found, int(revision[1]) if revision else None)]


def _snapshot_in(path: str | Path) -> str | Path:
    """What a folder of the Hub's cache (`models--gpt2`) holds of its main revision; any other path as it is."""
    reference = Path(path, "refs", "main")
    if not Path(path).name.startswith("models--") or not reference.is_file():
        return path
    try:
        revision = read_bytes(reference, 4096).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadCheckpoint(f"{reference} cannot be read: {error}") from error
    if not re.fullmatch(r"\w+", revision):
        raise BadCheckpoint(f"{reference} holds {revision[:80]!r}, not the name of a revision; fetch the model again")
    return Path(path, "snapshots", revision)


def hub_name(path: str | Path) -> str | None:
    """The last part of a name of the Hub, without its revision, where a path is one and not a file or folder here."""
    from workbench.checkpoints import hub

    named = None if os.path.lexists(path) else hub.split(str(path))
    return named[0].rpartition("/")[2] if named else None


def _in_hub_cache(path: str | Path) -> Path:
    """The folder of a name of the Hub (`gpt2`, `EleutherAI/pythia-70m@step1000`) in this machine's cache; raises `BadCheckpoint`."""
    from workbench.checkpoints import hub

    if (found := hub.snapshot(str(path))) is not None:
        return found
    place = Path(path)
    said = f"{place} does not exist"
    if place.parent.is_dir():
        near = sorted(p.name for p in place.parent.iterdir())
        said += f"; {suggest(place.name, near)}" if near else f", and {place.parent} is empty"
    if hub.split(str(path)) is not None and (cached := hub.names()):
        said += f". As a name of the Hub it is not in the cache here; {suggest(str(path), cached)}"
    raise BadCheckpoint(said)


def _placed(path: Path, step: int | None) -> Checkpoint:
    """One path as a checkpoint: the directory that a file of weights belongs to, and the run that a step belongs to."""
    if path.name in (WEIGHTS, PICKLED) and (path.parent / CONFIG).exists():
        path = path.parent
    if (named := STEP_FOLDER.fullmatch(path.name)) and (path.parent / RUN_FILE).exists():
        return Checkpoint(path, int(named[1]), path.parent.resolve(), read_json(path.parent / RUN_FILE))
    return Checkpoint(path, step)


def step_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a run's step is or will be."""
    return run / f"step_{step:06d}"


def whole_steps(run: Path) -> list[int]:
    """Steps with a whole checkpoint in a run's folder, ascending."""
    matches = (STEP_FOLDER.fullmatch(p.name) for p in run.iterdir())
    return sorted(int(m[1]) for m in matches if m and (run / m[0] / CONFIG).exists())


def steps_of(run: Path, description: Mapping[str, Any]) -> list[int]:
    """The same, at least one; raises `BadCheckpoint` saying why there is none."""
    if have := whole_steps(run):
        return have
    reasons = {
        "recorder": "was recorded in a loop of its own and holds no checkpoints",
        "shipped": f"is shipped {WITHOUT}",
    }
    why = next((reason for key, reason in reasons.items() if key in description), "has no whole checkpoint yet")
    raise BadCheckpoint(f"{run} {why}")


def choose(steps: str | int | list[int], have: list[int], whose: str) -> list[int]:
    """Of the ascending steps there are those meant by `last`, `first`, `all`, `ends` (first and last), a step or a list.

    Raises `UnknownName` for another word and `WorkbenchError` for a step that is not there.
    """
    words = {"last": have[-1:], "first": have[:1], "all": have, "ends": sorted({*have[:1], *have[-1:]})}
    if isinstance(steps, str):
        if steps not in words:
            raise UnknownName("steps", steps, words)
        return words[steps]
    wanted = [steps] if isinstance(steps, int) else list(steps)
    for step in wanted:
        if step not in have:
            raise WorkbenchError(f"{whose} has no checkpoint at step {step}; choose from {have}")
    return wanted


def _one(step: str | int, have: list[int], whose: str) -> int:
    chosen = choose(step, have, whose)
    if len(chosen) != 1:
        raise WorkbenchError(f"step={step!r} of {whose} means {len(chosen)} checkpoints; choose one of {have}")
    return chosen[0]


def is_series(path: str | Path) -> bool:
    """Whether a path means several checkpoints: a pattern, or a folder that is none itself."""
    return is_pattern(str(path)) or (Path(path).is_dir() and not is_directory(Path(path)))


def is_pattern(text: str) -> bool:
    """Whether a text means several paths: a glob, or a regular expression with a `step` group."""
    return "(?P<step>" in text or (glob.has_magic(text) and not os.path.lexists(text))


def series(where: str | Path, revision: str = "") -> list[tuple[int, Path]]:
    """(step, path) of each checkpoint of a folder, a glob or a pattern with a `step` group, by step.

    Of a name of the Hub with a pattern over revisions, `series("EleutherAI/pythia-70m", "step*")`, those in this machine's cache.
    Raises `BadCheckpoint` for none, for one without a step, for two of one step and for shards of other libraries.
    """
    text = f"{where}@{revision}" if revision else str(where)
    if "(?P<step>" in text:
        checkpoints = _matching(text)
    elif is_pattern(text):
        checkpoints = _named(Path(name) for name in glob.glob(text)) or _revisions(text)  # noqa: PTH207 - absolute patterns too
    elif (folder := Path(where)).is_dir():
        refuse_shards(folder)
        checkpoints = [(s, p) for p in folder.iterdir() if (s := step_in_name(p)) is not None and is_checkpoint(p)]
    else:
        raise BadCheckpoint(f"{where} is no folder, no glob and no pattern with a (?P<step>...) group")
    if not checkpoints:
        raise BadCheckpoint(f"{where}: no checkpoint there names its step; {_advice(Path(where))}")
    checkpoints.sort()
    for (a, first), (b, second) in itertools.pairwise(checkpoints):
        if a == b:
            both = f"{first} and {second} are both step {a}"
            raise BadCheckpoint(f"{where}: {both}; give a pattern that finds one of them")
    return checkpoints


def step_in_name(path: Path) -> int | None:
    """The step a file or folder names itself by (`step_000500`, `checkpoint-500`, `ckpt_500.pt`), None where it does not."""
    match = STEP.search(path.name if path.is_dir() else path.stem)
    return int(match[1]) if match else None


def is_checkpoint(path: Path) -> bool:
    """Whether a path looks like weights by its name: a Hugging Face directory, or a file of a known ending."""
    if path.is_dir():
        return is_directory(path)
    return path.suffix in ENDINGS and not OTHERS.search(path.name)


def is_directory(folder: Path) -> bool:
    """Whether a folder is one checkpoint in Hugging Face's form, whole or not, or an adapter."""
    names = (CONFIG, ADAPTER, *(f"{n}{end}" for n in (WEIGHTS, PICKLED) for end in ("", ".index.json")))
    return any((folder / name).exists() for name in names)


def refuse_shards(folder: Path, kinds: Mapping[str, str] = ELSEWHERE) -> None:
    """Raise `BadCheckpoint` for a directory of shards or of another library's form, with the command that makes weights of it."""
    if cure := _cure(folder, kinds):
        raise BadCheckpoint(f"{folder} holds {cure}; open that")


def _cure(folder: Path, kinds: Mapping[str, str]) -> str | None:
    """What a folder holds that is of another library, and the command; None for anything else."""
    for patterns, cure in kinds.items():
        if found := next((path for pattern in patterns.split() for path in folder.glob(pattern)), None):
            here = found.resolve() if found.is_dir() else found.resolve().parent
            return cure.format(here=here, above=here.parent)
    return None


def _advice(folder: Path) -> str:
    """What opens where a folder is no series."""
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    if runs := [p.name for p in inside if (p / RUN_FILE).is_file()]:
        return f"it holds runs: give one of them, as {folder / runs[0]}"
    if files := [p.name for p in inside if is_checkpoint(p)]:
        return f"give one of them, as {folder / files[0]}, or a pattern with a (?P<step>...) group"
    for place in (folder, *sorted(folder.glob("*/")), *sorted(folder.glob("*/*/"))):  # out/checkpoint/step-1000
        if cure := _cure(place, UNREAD):
            return f"{place} holds {cure}; open that"
    if folder.is_dir() and not inside:
        return "the folder is empty"
    return "give a glob, or a pattern with a (?P<step>...) group"


def _named(paths: Iterable[Path]) -> list[tuple[int, Path]]:
    checkpoints = []
    for path in filter(is_checkpoint, paths):
        step = step_in_name(path)
        step = step_in_name(path.parent) if step is None else step  # step_500/model.pt
        if step is None:
            raise BadCheckpoint(f"{path} does not name its step; give a pattern with a (?P<step>...) group")
        checkpoints.append((step, path))
    return checkpoints


def _revisions(text: str) -> list[tuple[int, Path]]:
    """Of a pattern over revisions of a name of the Hub, `EleutherAI/pythia-70m@step*`, those in the cache that name a step."""
    from workbench.checkpoints import hub

    return [(int(n[1]), path) for ref, path in hub.revisions(text).items() if (n := STEP.search(ref))]


def _matching(text: str) -> list[tuple[int, Path]]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise BadCheckpoint(f"{text!r} is no regular expression: {error}") from error
    plain = text[: SPECIAL.search(text).start()].rpartition("/")[0]  # type: ignore[union-attr]  # the group is special
    root = Path(plain or ("/" if text.startswith("/") else "."))
    checkpoints = []
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            if match := pattern.fullmatch(path.as_posix()):
                if not (match["step"] or "").isdecimal():
                    raise BadCheckpoint(f"{path}: the step {match['step']!r} is no whole number")
                checkpoints.append((int(match["step"]), path))
    return checkpoints
