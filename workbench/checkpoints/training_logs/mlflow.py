"""MLflow's stores: a folder `mlruns`, and the database `mlflow.db` of newer versions.

In the folder, a run has `meta.yaml`, and `metrics/NAME` has a line with time, value and step for each number. A name with a slash is a
folder below `metrics/`. An experiment is a setting, and so is a run with child runs, which is no run itself: it has results of a search
or of several seeds. Deleted runs are left out.
Source: mlflow, store/tracking/file_store.py and store/tracking/dbmodels/models.py.
"""

from __future__ import annotations

import math
import re
import sqlite3
import sys
from collections.abc import Mapping
from contextlib import closing
from functools import lru_cache
from pathlib import Path

from workbench.checkpoints.training_logs.reading import LogNumbers, LogReader
from workbench.errors import BadData
from workbench.file_io import read_text

SQLITE = b"SQLite format 3\0"
RUNS = """
    SELECT experiments.name, runs.run_uuid, runs.name FROM runs JOIN experiments USING (experiment_id)
    WHERE runs.lifecycle_stage = 'active'
"""
ROWS = "SELECT run_uuid, key, step, value, is_nan, timestamp FROM metrics ORDER BY run_uuid, key, timestamp, step"
PARAMETERS = "SELECT run_uuid, key, value FROM params"
PARENTS = "SELECT run_uuid, value FROM tags WHERE key = 'mlflow.parentRunId'"


def _settings(folder: Path) -> dict[str, str]:
    """Return the lines of a folder's `meta.yaml` as text, empty without one of MLflow."""
    file = folder / "meta.yaml"
    return _read_settings(file, file.stat().st_mtime_ns) if file.is_file() else {}


@lru_cache(4096)
def _read_settings(file: Path, changed: int) -> dict[str, str]:
    """Read `meta.yaml`; a run that is deleted meanwhile has another time of change."""
    text = read_text(file)
    pairs = re.findall(r"^(\w+): *(.*?) *$", text, re.MULTILINE)
    settings = {key: re.sub(r"^(['\"])(.*)\1$", r"\2", value).replace("''", "'") for key, value in pairs}
    return settings if settings.keys() & {"run_id", "experiment_id"} else {}


def run_folder(path: Path) -> Path | None:
    """Return the folder of MLflow's run to which a file belongs, None for other files."""
    return next((p for p in path.parents if "run_id" in _settings(p)), None)


def _recognises(path: Path, head: bytes) -> bool:
    return (
        head.startswith(SQLITE)
        or run_folder(path) is not None
        or (path.name == "meta.yaml" and bool(_settings(path.parent)))
    )


def home(path: Path) -> Path:
    """Return the database, or the folder of all experiments."""
    run = run_folder(path)
    return run.parents[1] if run else path.parents[1] if path.name == "meta.yaml" else path


def _read(path: Path, numbers: LogNumbers) -> None:
    numbers.by_quantity = True
    with path.open("rb") as file:
        database = file.read(len(SQLITE)) == SQLITE
    if database:
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as opened:
                tables = {name for (name,) in opened.execute("SELECT name FROM sqlite_master")}
                parents = dict(opened.execute(PARENTS)) if "tags" in tables else {}
                runs = opened.execute(RUNS).fetchall()
                names = {run: name for _, run, name in runs}
                keys = {run: key for of, run, _ in runs if (key := _run(of, run, names, parents, numbers))}
                for run, name, step, value, missing, time in opened.execute(ROWS):
                    infinite = abs(value) == sys.float_info.max  # MLflow stores it in place of infinity
                    value = math.nan if missing else math.copysign(math.inf, value) if infinite else value
                    if run in keys:
                        numbers.add(step, name, value, run=keys[run], time=time)
                for run, name, text in opened.execute(PARAMETERS) if "params" in tables else ():
                    if run in keys:
                        numbers.parameters.setdefault(keys[run], {})[name] = text
        except sqlite3.Error as error:
            raise BadData(f"{path} is no database of MLflow: {error}") from error
        return
    folder = run_folder(path)
    if folder is None or path.relative_to(folder).parts[0] not in ("metrics", "params"):
        return
    settings = _settings(folder)
    if settings.get("lifecycle_stage") == "deleted":
        numbers.skipped["the run is deleted"] += 1
        return
    parents = _parents(folder.parent, folder.parent.stat().st_mtime_ns)
    own = folder.name, parents.get(folder.name, folder.name)
    names = {run: _settings(folder.parent / run).get("run_name") for run in own}
    setting = _settings(folder.parent).get("name", folder.parent.name)
    if (run := _run(setting, folder.name, names, parents, numbers)) is None:
        return
    kind, _, name = path.relative_to(folder).as_posix().partition("/")
    if kind == "params":
        numbers.parameters.setdefault(run, {})[name] = read_text(path).strip()
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            words = line.split()
            if len(words) >= 3:  # newer versions add the data set
                numbers.add(int(words[2]), name, float(words[1]), run=run, time=float(words[0]))
            elif words:
                numbers.skipped["the line is not time, value and step"] += 1


@lru_cache(4096)
def _parents(experiment: Path, changed: int) -> dict[str, str]:
    """Return the parents of an experiment's child runs by child."""
    tags = experiment.glob("*/tags/mlflow.parentRunId")
    return {tag.parents[1].name: read_text(tag).strip() for tag in tags}


def _run(
    setting: str, run: str, names: Mapping[str, str | None], parents: Mapping[str, str], numbers: LogNumbers
) -> tuple[str, str] | None:
    """Return the setting and the name of a run with the beginning of its identifier, as names repeat; None for a parent."""
    name, parent = names.get(run), parents.get(run, "")
    if run in set(parents.values()):
        numbers.skipped[f"{name or run} has child runs, so it is the parent of a search or of seeds"] += 1
        return None
    return f"{setting}/{names.get(parent) or parent}" if parent else setting, f"{name} {run[:8]}" if name else run


READER = LogReader("MLflow", _recognises, _read, home=home)
