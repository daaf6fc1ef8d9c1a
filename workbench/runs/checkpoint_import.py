"""Import of checkpoints from any training as a run (`workbench import PATH`), for measuring and for the dashboard."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from workbench.checkpoints import hub, user_built_modules
from workbench.checkpoints.format import formats
from workbench.checkpoints.infer_architecture import Given
from workbench.checkpoints.loading import open_state
from workbench.checkpoints.lora_adapters import read_merged
from workbench.checkpoints.paths import RUN_FILE, WEIGHTS, Checkpoint, checkpoints_at, is_checkpoint, step_in_name
from workbench.checkpoints.saving import save
from workbench.checkpoints.tokenizer_files import SETTINGS, TOKENIZER, export_tokenizer, tokenizer_beside
from workbench.checkpoints.transformers_modules import quiet
from workbench.config import TrainConfig
from workbench.console import Progress
from workbench.errors import ArchitectureAssumed, BadCheckpoint, ObservedInstead, WorkbenchError
from workbench.file_io import write_json
from workbench.models import Transformer
from workbench.observing.observed_model import Observed
from workbench.runs.log_import import all_appearing
from workbench.runs.run import FORMAT, Run, place_of, written_now
from workbench.storage.mirror import push
from workbench.storage.path_or_url import Location, locate

LENGTH = 128  # default number of tokens to measure


def import_run(
    path: str | Path, runs: Path, *, name: str | None = None, architecture: str | None = None,
    config: Mapping[str, Any] | None = None, builder: str | None = None, seed: int | None = None,
    progress: Progress | None = None, key: str = "", strip_prefix: str = "", **options: Any,
) -> Run:  # fmt: skip
    """Import one checkpoint or a series as a run, one model in memory at a time; `workbench import` explains the arguments.

    A model that our decoder does not implement is stored as a transformers model and observed from outside, with an
    `ObservedInstead` warning. The run's folder appears complete or not at all. A checkpoint without a step becomes step 0.
    """
    checkpoints = _checkpoints(locate(path).with_weights(), key, strip_prefix)
    only = checkpoints[0].path  # else the folder that holds the series names it
    parents = (set(checkpoint.path.resolve().parents) for checkpoint in checkpoints)
    above = max(set.intersection(*parents), key=lambda folder: len(folder.parts)).name
    own = above if len(checkpoints) > 1 else only.name if only.is_dir() else only.stem
    place = place_of(runs, name or hub.short_name(str(path)) or own)
    if place.exists():
        raise WorkbenchError(f"{place} exists; choose another name with --name, or remove it")
    if builder and (architecture or options):
        raise WorkbenchError("a builder makes the module itself: architecture and options are settings of our decoder")
    given = Given(architecture, config or {}, options)
    with all_appearing([place]) as (folder,):
        first: dict[str, Any] = {}
        for i, checkpoint in enumerate(checkpoints):
            step, source = checkpoint.step or 0, checkpoint.path
            if progress:
                progress(i, len(checkpoints), f"{source} as step {step}")
            with warnings.catch_warnings():
                for category in (ArchitectureAssumed, ObservedInstead) if first else ():  # one warning for a series
                    warnings.simplefilter("ignore", category)
                state = read_merged(checkpoint)
                model = user_built_modules.observed_of(builder, state, config) if builder else open_state(state, given)
            facts = _facts(model)
            first = first or facts | {"seed": model.source.get("seed") if seed is None else seed}
            for what in ("observed", "shapes") if first["observed"] else ("architecture", "options", "config"):
                if (one := first[what]) == (other := facts[what]):
                    continue
                if what == "shapes":  # facts inferred from values, such as heads, may differ at step 0
                    odd = sorted(n for n in one.keys() | other.keys() if one.get(n) != other.get(n))
                    one, other = ({n: shapes.get(n, "absent") for n in odd[:3]} for shapes in (one, other))
                raise BadCheckpoint(f"{only} and {source} are not steps of one model: {what} {one} and {other}")
            first |= facts if first["observed"] else {}  # values of trained weights give the most reliable options
            first["seed"] = first["seed"] or 0
            origin = {k: model.source[k] for k in ("path", "format", "step", "stripped", "sha256") if k in model.source}
            first.setdefault("origins", {})[step] = origin
            to, provenance = folder / f"step_{step:06d}", {"seed": first["seed"], "step": step, "run": name}
            if not isinstance(model, Observed):
                save(model, to, origin=origin, **provenance)
            elif builder:
                user_built_modules.save_observed(model, to, origin=origin, **provenance)
            else:
                with quiet():
                    model.foreign.save_pretrained(to, max_shard_size="1000TB")  # one file, as in all steps
        shape, form = first["config"], formats().get(first["form"])
        beside = source if source.is_dir() else source.parent
        if form and form.tokenizer:
            if (tokenizer := form.tokenizer(source, shape.d_vocab)) is not None:
                export_tokenizer(tokenizer, folder, LENGTH)
        elif tokenizer_beside(beside, shape.d_vocab) is not None:
            for file in [file for file in (TOKENIZER, SETTINGS) if (beside / file).exists()]:
                shutil.copyfile(beside / file, folder / file)
        write_json(folder / RUN_FILE, {
            "format": FORMAT, "architecture": first["architecture"], "options": first["options"], "seed": first["seed"],
            "model": asdict(shape), "train": asdict(TrainConfig(steps=step or 1, batch=1, T=min(LENGTH, shape.n_ctx))),
            "data": {"kind": "imported", "domains": ["unknown"]},
            "imported": {"from": str(path), "assumed": first["assumed"], "format": first["form"], "origins": first["origins"]},
            **({"observed": first["observed"]} if first["observed"] else {}), **written_now(),
        })  # fmt: skip
    push(place)
    return Run.open(place)


def _facts(model: Transformer | Observed) -> dict[str, Any]:
    facts = {what: getattr(model, what) for what in ("architecture", "options", "config")}
    facts |= {"form": model.source["format"], "assumed": getattr(model, "assumed", False), "observed": None}
    if isinstance(model, Observed):
        parameters = sum(p.numel() for p in model.parameters())
        by = {"builder": model.source["builder"]} if "builder" in model.source else {"library": "transformers"}
        facts["observed"] = {"module": type(model.foreign).__name__, "parameters": parameters, **by}
        facts["shapes"] = {name: list(p.shape) for name, p in model.named_parameters()}
        options = model.options.items()  # fitted numbers to four digits: they become a model's name
        facts["options"] = {key: float(f"{x:.4g}") if isinstance(x, float) else x for key, x in options}
    return facts


def _checkpoints(location: Location, key: str, strip_prefix: str) -> list[Checkpoint]:
    """Return the checkpoints to import, by step; a single checkpoint without a step is step 0."""
    path = location.path
    if location.is_run:
        raise WorkbenchError(f"{path} is a run already; copy it into the folder of runs")
    options: dict[str, Any] = {"key": key, "strip_prefix": strip_prefix, "mirror": location.mirror}
    checkpoints = [replace(checkpoint, **options) for checkpoint in checkpoints_at(location)]
    if len(checkpoints) == 1 and (folder := checkpoints[0].path).is_dir() and folder == path:
        inner = (p for p in folder.iterdir() if p.is_dir() and is_checkpoint(p))
        if steps := sorted(p.name for p in inner if step_in_name(p) is not None):
            raise WorkbenchError(
                f"{path} holds a final model beside the steps {', '.join(steps)}: give '{folder / 'checkpoint-*'}' for the series, or "
                f"{folder / WEIGHTS} for the final model alone"
            )
    if len(checkpoints) > 1:
        return checkpoints
    step = read_merged(checkpoints[0]).info.step or 0
    return [replace(checkpoints[0], path=checkpoints[0].path.resolve(), step=step)]
