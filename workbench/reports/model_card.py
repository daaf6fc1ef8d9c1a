"""Upload of a run's checkpoint to the Hugging Face Hub with a model card made from the run's records."""

from __future__ import annotations

import inspect
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from workbench.checkpoints import hub
from workbench.checkpoints.saving import export
from workbench.checkpoints.tokenizer_files import SETTINGS, TOKENIZER
from workbench.errors import BadCheckpoint, BadData, NotCovered, WorkbenchError
from workbench.file_io import read_json, write_text
from workbench.models.architecture_names_and_colours import architecture
from workbench.runs.run import Run, list_runs
from workbench.storage.mirror import reading

HARNESS = "harness.json"  # in a run's folder: what lm-evaluation-harness wrote of its last step
SAME = ("architecture", "options", "model", "train", "data")
CARD = "README.md"


def push_to_hub(
    run: Run, repo: str, step: str | int = "last", *, private: bool | None = None, harness: Path | None = None, api: Any = None
) -> str:  # fmt: skip
    """Upload a checkpoint, its tokenizer and its model card to a repository of the Hub, and return its address.

    A vanilla transformer goes as a directory that transformers opens, any other model as its step, which `workbench.load` opens.
    `harness`: results of lm-evaluation-harness; default of the last step those beside the run (`harness.json`), else none.
    """
    if (named := hub.split(repo)) is None or named[1] != hub.MAIN:
        raise BadData(f"{repo!r} is no name of a repository, as me/resformer-tiny")
    if run.observed or run.recorded or run.logged:
        raise NotCovered(f"{run.name} is not one of our models: its checkpoint is that of its own code")
    (number,) = run.resolve(step if isinstance(step, str) else [step])
    client = api or HfApi()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        if run.architecture == "transformer":
            export(run.load(number, device="cpu"), folder)
        else:
            with reading(run.step_folder(number)) as path:
                shutil.copytree(path, folder, ignore=shutil.ignore_patterns(".*"))
            for name in (TOKENIZER, SETTINGS):
                if (run.path / name).exists():
                    shutil.copyfile(run.path / name, folder / name)
        write_text(folder / CARD, card(run, number, named[0], harness))
        try:
            address = client.create_repo(named[0], private=private, exist_ok=True)
            client.upload_folder(repo_id=named[0], folder_path=folder, commit_message=f"{run.name}, step {number}")
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            first = next(iter(str(error).strip().splitlines()), "")
            raise WorkbenchError(f"{named[0]} cannot be written: {type(error).__name__}: {first}") from error
    return str(address)


def card(run: Run, step: int, name: str, harness: Path | None = None) -> str:
    """The card of a step in Markdown: architecture with its formula, options, shape, recipe, losses over seeds, evaluation, use."""
    known = architecture(run.architecture)
    data = ModelCardData(
        library_name="transformers" if run.architecture == "transformer" else "workbench",
        tags=["interpretability", *(["value-residual"] if known.value_path else []), *run.architecture.split("+")],
        pipeline_tag="text-generation" if run.tokenizer is not None else None,
    )
    source = {key: value for key, value in run.info["data"].items() if isinstance(value, str | int | list)}
    source_text = ", ".join(f"{key} {json.dumps(value, ensure_ascii=False)}" for key, value in source.items())
    evaluated = (run.path / HARNESS).exists() and step == run.steps[-1]  # which step the file is of, nothing says
    origin = {"run": run.name, "step": step, "weights": run.weights_hash(step), "made": run.info.get("created")}
    sections = {
        "Architecture": [*formulas(run.architecture), _settings(run.options), _settings(asdict(run.model))],
        "Training": [f"Trained on: {source_text}.", "" if "imported" in run.info else _settings(asdict(run.train) | {"seed": run.seed})],
        "Losses": [losses_text(run, step)],
        "Evaluation": [evaluation(harness or run.path / HARNESS)] if harness or evaluated else [],
        "Use": [USE.format(name=name, run=run.name)],
        "Where it comes from": [_settings(origin | dict(run.info.get("machine") or {}) | dict(run.info.get("versions") or {}))],
    }  # fmt: skip
    text = [f"---\n{data.to_yaml()}\n---\n", f"# {run.name}, step {step}", f"{known.label}: {known.summary}."]
    for title, parts in sections.items():
        if any(parts):
            text += [f"## {title}", *filter(None, parts)]
    return "\n\n".join(text) + "\n"


USE = """```python
import workbench
from huggingface_hub import snapshot_download

model = workbench.load(snapshot_download("{name}"))
logits, cache = model.run_with_cache(ids)  # TransformerLens names: cache["v", 2], cache["pattern", 0]
```"""


def formulas(name: str) -> list[str]:
    """Return an architecture's formula, source, parameters and degenerate case from its docstring."""
    modules = dict.fromkeys(shortcut.__module__ for shortcut in architecture(name).shortcuts)
    return [inspect.cleandoc(sys.modules[module].__doc__ or "") for module in modules]


def losses_text(run: Run, step: int) -> str:
    """Validation losses in nats at a step, of this seed and of the others with the same settings; "" where none were written."""
    recorded = [other for other in list_runs(run.path.parent)[0] if not other.recorded]
    alike = [other for other in recorded if all(other.info.get(key) == run.info.get(key) for key in SAME)]
    rows = pd.concat([_validated(one, step) for one in alike if one.path != run.path] + [_validated(run, step)])
    if not len(mine := rows[rows["run"] == run.name]):
        return ""
    lines = []
    for data, own in mine.groupby("data"):
        every = rows[rows["data"] == data].groupby("seed")["value"].mean().astype(float)  # copies of a run are one seed
        seeds = f"{every.mean():.4f} ({every.min():.4f} to {every.max():.4f}), {len(every)}" if len(every) > 1 else "1"
        row = own.iloc[0]
        lines.append((data, f"{row['value']:.4f}", f"{row['se']:.4f}", f"{row['n']}", seeds))
    head = ("data", "loss in nats", "standard error", "documents", "mean over seeds (least to largest), seeds")
    return _table(head, lines)


def _validated(run: Run, step: int) -> pd.DataFrame:
    try:
        return run.telemetry(f"metric == 'validation_loss' and step == {step}")
    except BadCheckpoint:
        return pd.DataFrame(columns=["run", "seed", "data", "value", "se", "n"])


def evaluation(path: Path) -> str:
    """Return results of lm-evaluation-harness as a table by task and metric."""
    results = read_json(path).get("results")
    if not isinstance(results, dict):
        raise BadData(f"{path} holds no results of lm-evaluation-harness")
    rows = []
    for task, values in results.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            metric, comma, filtered = key.partition(",")  # what has none is no metric: names, how many documents
            if comma and isinstance(value, int | float) and not metric.endswith("_stderr") and math.isfinite(value):
                error = values.get(f"{metric}_stderr,{filtered}")
                error = f"{error:.4f}" if isinstance(error, float) else ""
                rows.append((task, metric, f"{value:.4f}", error, values.get("sample_len", "")))
    return _table(("task", "metric", "value", "standard error", "documents"), rows) + "\n\nBy lm-evaluation-harness."


def _settings(values: Mapping[str, Any]) -> str:
    """Return settings as one line of code each, without unset ones."""
    known = {key: value for key, value in values.items() if value not in (None, {}, [])}
    return ", ".join(f"`{key} = {json.dumps(value, default=str)}`" for key, value in known.items())


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)
