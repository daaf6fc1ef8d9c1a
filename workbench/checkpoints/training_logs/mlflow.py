"""MLflow's stores: a folder `mlruns`, and the database `mlflow.db` of newer versions.

In the folder, a run has `meta.yaml`, and `metrics/NAME` has a line with time, value and step for each number. A name with a slash is a
folder below `metrics/`. An experiment is a setting. Deleted runs are left out.
Source: mlflow, store/tracking/file_store.py and store/tracking/dbmodels/models.py.
"""

from __future__ import annotations

import math
import re
import sqlite3
import sys
from contextlib import closing
from functools import lru_cache
from pathlib import Path

from workbench.checkpoints.training_logs.reading import LogNumbers, LogReader
from workbench.errors import BadData
from workbench.file_io import read_text

SQLITE = b"SQLite format 3\0"
ROWS = """
    SELECT experiments.name, runs.name, runs.run_uuid, key, step, value, is_nan
    FROM metrics JOIN runs USING (run_uuid) JOIN experiments USING (experiment_id)
    WHERE runs.lifecycle_stage = 'active' ORDER BY runs.run_uuid, key, timestamp, step
"""
PARAMETERS = """
    SELECT experiments.name, runs.name, runs.run_uuid, key, value
    FROM params JOIN runs USING (run_uuid) JOIN experiments USING (experiment_id)
"""


@lru_cache(4096)
def _settings(folder: Path) -> dict[str, str]:
    """Return the lines of a folder's `meta.yaml` as text, empty without one of MLflow."""
    file = folder / "meta.yaml"
    text = read_text(file) if file.is_file() else ""
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
                for setting, name, run, key, step, value, missing in opened.execute(ROWS):
                    infinite = abs(value) == sys.float_info.max  # MLflow stores it in place of infinity
                    value = math.nan if missing else math.copysign(math.inf, value) if infinite else value
                    numbers.add(step, key, value, run=(setting, _named(name, run)))
                if opened.execute("SELECT 1 FROM sqlite_master WHERE name = 'params'").fetchone():
                    for setting, name, run, key, text in opened.execute(PARAMETERS):
                        numbers.parameters.setdefault((setting, _named(name, run)), {})[key] = text
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
    run = _settings(folder.parent).get("name", folder.parent.name), _named(settings.get("run_name"), folder.name)
    kind, _, name = path.relative_to(folder).as_posix().partition("/")
    if kind == "params":
        numbers.parameters.setdefault(run, {})[name] = read_text(path).strip()
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            words = line.split()
            if len(words) >= 3:  # newer versions add the data set
                numbers.add(int(words[2]), name, float(words[1]), run=run)
            elif words:
                numbers.skipped["the line is not time, value and step"] += 1


def _named(name: str | None, run: str) -> str:
    """Return the name of a run with the beginning of its identifier, as MLflow does not keep names apart."""
    return f"{name} {run[:8]}" if name else run


READER = LogReader("MLflow", _recognises, _read, home=home)
