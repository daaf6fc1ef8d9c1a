"""MLflow's folders: `metrics/NAME` has a line with time, value and step for each number; the run's folder has `meta.yaml`.

A name with a slash is a folder below `metrics/`. Source: mlflow, store/tracking/file_store.py.
"""

from __future__ import annotations

from pathlib import Path

from workbench.checkpoints.training_logs.reading import LogNumbers, LogReader


def _metrics(path: Path) -> Path | None:
    """Return the folder of metrics above a file of an MLflow run; None for other files."""
    return next((p for p in path.parents if p.name == "metrics" and (p.parent / "meta.yaml").is_file()), None)


def _read(path: Path, numbers: LogNumbers) -> None:
    numbers.by_quantity = True
    folder = _metrics(path)
    name = path.relative_to(folder).as_posix() if folder else path.name
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if len(words := line.split()) == 3:
                numbers.add(int(words[2]), name, float(words[1]))
            elif words:
                numbers.skipped["the line is not time, value and step"] += 1


READER = LogReader("MLflow metrics", lambda path, head: _metrics(path) is not None, _read, named_by_folder=True)
