"""A study's file: readable TOML that names architectures x settings x seeds.

    question = "Does the value residual win at every learning rate?"
    preset = "tiny"                      # the model and recipe that [model] and [recipe] change
    seeds = [0, 1, 2]
    outcome = "formation_step"           # or validation_loss, or sink_step
    baseline = "transformer"             # whom the others are compared with at equal [grid]; a model may name its own
    data = { kind = "repeated" }         # text (texts, vocabulary, bos), repeated (vocabulary, shortest), backcopy
    recipe = { steps = 150 }
    grid.recipe.lr = [2e-3, 4e-3]        # crossed with every model

    [[models]]
    architecture = "transformer"
    [[models]]
    architecture = "resformer"
    vary.options.lambda_v1 = [0.5, 2]    # one model each; also model, recipe, data

Under `grid` and `vary`, a name that is no section is an axis of named points: `[[grid.size]]` with `name` and sections.
`tuned = "lr"` names the grid axis of which every model may take its best value, for the second comparison. `rates_from = "NAME"` names
another study, trained before on other seeds, whose best learning rate each model takes. `[measure]` takes `metrics`, `steps` and `n`.
Unknown keys are refused; runs are resumed, and a finished one is not trained again.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.config import PRESETS, ModelConfig, TrainConfig
from workbench.data.corpus import is_named
from workbench.errors import BadData, UnknownName, refuse_unknown
from workbench.file_io import read_text
from workbench.places import studies

KEYS = (
    "question", "preset", "seeds", "outcome", "baseline", "tuned", "rates_from", "data", "model", "recipe", "grid", "models", "measure",
)  # fmt: skip
SECTIONS = ("options", "model", "recipe", "data")
MODEL_KEYS = ("architecture", "name", "baseline", "vary", *SECTIONS)
DATA_KEYS = {
    "text": ("kind", "texts", "vocabulary", "bos"), "repeated": ("kind", "vocabulary", "shortest"),
    "backcopy": ("kind", "vocabulary", "triggers", "start"),
}  # fmt: skip
MEASURE_KEYS = ("metrics", "steps", "n")
OUTCOMES = {  # what a value below and above the baseline's is called
    "validation_loss": ("lower", "higher"), "formation_step": ("earlier", "later"), "sink_step": ("earlier", "later"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One set of settings, trained with every seed."""

    model: str
    baseline: str
    point: Mapping[str, Any] = field(default_factory=dict)
    architecture: str
    settings: Mapping[str, Mapping[str, Any]]  # by section

    @property
    def name(self) -> str:
        """Model and grid point in words."""
        return " ".join([self.model, *(f"{axis}={value_text(value)}" for axis, value in self.point.items())])

    @property
    def folder(self) -> str:
        """The name as part of a folder's name."""
        return re.sub(r"[^\w.=+-]+", "-", self.name).strip("-")


@dataclass(frozen=True, kw_only=True)
class Study:
    """Contents of a study file."""

    name: str
    question: str
    preset: str
    seeds: tuple[int, ...]
    outcome: str
    tuned: str | None
    rates_from: str | None
    cells: tuple[Cell, ...]
    measure: Mapping[str, Any]

    @property
    def axes(self) -> list[str]:
        """Axes of the grid."""
        return list(self.cells[0].point)


def find_study(given: str) -> Path:
    """Return the file of a shipped study by its name, or a path unchanged; raises `UnknownName` for an unknown name."""
    path = Path(given)
    if path.suffix == ".toml" or path.is_file():
        return path
    if given not in (shipped := studies()):
        raise UnknownName("study", given, shipped)
    return shipped[given]


def read_study(path: str | Path) -> Study:
    """Return the study of a file; raises `UnknownName` for unknown keys and names, `BadData` for a file that cannot be read."""
    from workbench.models import architecture

    file = Path(path)
    try:
        raw = tomllib.loads(read_text(file))
    except OSError as error:
        raise BadData(f"{file}: {error.strerror or error}; give a study's .toml file") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadData(f"{file} is no TOML: {error}") from error
    _known("study", raw, KEYS)
    if missing := [key for key in ("question", "baseline", "models") if key not in raw]:
        raise BadData(f"{file} lacks {', '.join(missing)}")
    for key in ("question", "baseline", "outcome", "preset", "tuned", "rates_from"):
        _text(key, raw.get(key, ""))
    given = {"seeds": [0, 1, 2], "outcome": "validation_loss", "preset": "tiny"} | raw
    seeds, outcome, preset = given["seeds"], given["outcome"], given["preset"]
    whole = isinstance(seeds, list) and seeds and all(type(s) is int and s >= 0 for s in seeds)
    if not whole or len(set(seeds)) < len(seeds):
        raise BadData(f"seeds={seeds!r}: give different whole numbers of at least 0")
    refuse_unknown("outcome", outcome, OUTCOMES)
    refuse_unknown("preset", preset, PRESETS)
    cells = tuple(_cells(raw, file))
    measure = _table("measure", raw.get("measure", {}))
    _known("measure", measure, MEASURE_KEYS)
    study = Study(
        name=file.stem, question=str(raw["question"]), preset=preset, seeds=tuple(seeds), outcome=outcome,
        tuned=raw.get("tuned"), rates_from=raw.get("rates_from"), cells=cells, measure=measure,
    )  # fmt: skip
    models, names = list(dict.fromkeys(cell.model for cell in cells)), [cell.folder for cell in cells]
    if unknown := [cell.baseline for cell in cells if cell.baseline not in models]:
        raise UnknownName("baseline", unknown[0], models)
    if study.tuned is not None and study.tuned not in study.axes:
        raise UnknownName("tuned axis of the grid", study.tuned, study.axes)
    if len(set(names)) < len(names):
        raise BadData(f"two models are called {next(n for n in names if names.count(n) > 1)!r}; give one a name")
    for cell in cells:  # settings that would fail in every run
        settings = cell.settings
        _known(f"option of {cell.architecture}", settings["options"], architecture(cell.architecture).options)
        _known("config key", settings["model"], [f.name for f in dataclasses.fields(ModelConfig)])
        _known("training key", settings["recipe"], [f.name for f in dataclasses.fields(TrainConfig)])
        kind = _text("kind of data", settings["data"].get("kind", "text"))
        refuse_unknown("kind of data", kind, DATA_KEYS)
        _known(f"key of {kind} data", settings["data"], DATA_KEYS[kind])
        if outcome == "formation_step" and kind == "text":
            raise BadData("outcome formation_step needs repeated or backcopy data: text has no copy loss")
    sinks = "sink_mass" in measure.get("metrics", ()) and measure.get("steps") == "all"
    if outcome == "sink_step" and not sinks:
        raise BadData('outcome sink_step needs measure = { metrics = ["sink_mass", ...], steps = "all" }')
    return study


def _cells(raw: Mapping[str, Any], file: Path) -> Iterator[Cell]:
    """Models x grid: later layers of settings override earlier ones, and data of another kind replace all data settings."""
    common = {s: _table(f"{s} of the study", raw.get(s, {})) for s in ("model", "recipe", "data")}
    grid, entries = _points(_axes("grid", raw.get("grid", {}))), raw["models"]
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise BadData("models: give at least one [[models]] table with an architecture")
    for entry in entries:
        _known("model", entry, MODEL_KEYS)
        if "architecture" not in entry:
            raise BadData(f"[[models]] {entry}: lacks its architecture")
        for key in ("architecture", "name", "baseline"):
            _text(f"{key} of a model", entry.get(key, ""))
        own = {s: _table(f"{s} of {entry['architecture']}", entry.get(s, {})) for s in SECTIONS}
        for variant, point in itertools.product(_points(_axes("vary", entry.get("vary", {}))), grid):
            labels = [f"{axis}={value_text(value)}" for axis, (value, _) in variant.items()]
            settings: dict[str, dict[str, Any]] = {}
            for section in SECTIONS:
                merged = dict[str, Any]()
                for layer in (common, own, *(s for _, s in variant.values()), *(s for _, s in point.values())):
                    given: Mapping[str, Any] = layer.get(section, {})
                    merged = dict(given) if section == "data" and "kind" in given else {**merged, **given}
                settings[section] = merged
            if "texts" in (data := settings["data"]):  # paths are as seen from the study file; names of data sets stay
                texts = _list("texts", data["texts"])
                data["texts"] = [t if is_named(t) else str((file.parent / t).resolve()) for t in texts]
            yield Cell(
                model=" ".join([entry.get("name", entry["architecture"]), *labels]), baseline=entry.get("baseline", raw["baseline"]),
                architecture=entry["architecture"], point={axis: value for axis, (value, _) in point.items()}, settings=settings,
            )  # fmt: skip


Choice = tuple[Any, Mapping[str, Mapping[str, Any]]]  # a value as it is shown, and the settings it stands for


def _axes(kind: str, raw: Any) -> dict[str, list[Choice]]:
    """Axes with their choices; an axis of a section is named by its key."""
    axes: dict[str, list[Choice]] = {}
    for name, values in _table(kind, raw).items():
        if name in SECTIONS:
            for key, choices in _table(f"{kind}.{name}", values).items():
                axes[key] = [(value, {name: {key: value}}) for value in _list(f"{kind}.{name}.{key}", choices)]
        elif isinstance(values, list) and all(isinstance(value, dict) and "name" in value for value in values):
            where, axes[name] = f"{kind}.{name}", []
            for point in values:
                _known(where, point, ("name", *SECTIONS))
                label = point["name"]
                if type(label) not in (int, float):
                    _text(f"name of {where}", label)
                axes[name].append((label, {s: _table(f"{s} of {where}", point[s]) for s in SECTIONS if s in point}))
        else:
            raise UnknownName(f"section of {kind} (an axis of points needs tables with a name)", name, SECTIONS)
    return axes


def _points(axes: Mapping[str, list[Choice]]) -> list[dict[str, Choice]]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _known(kind: str, raw: Mapping[str, Any], choices: Any) -> None:
    for key in raw:
        if key not in choices:
            raise UnknownName(kind if " of " in kind or "key" in kind else f"key of {kind}", key, choices)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadData(f"{name} is {value!r}; give a text in quotes")
    return value


def _table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadData(f"{name} is {value!r}; give a table")
    return value


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise BadData(f"{name} is {value!r}; give a list of values")
    return value


def value_text(value: Any) -> str:
    """Return a value as text for names and tables."""
    if isinstance(value, Mapping):
        return ",".join(f"{k}={v}" for k, v in value.items())
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
