"""The `trainer_state.json` of Hugging Face's Trainer: `log_history` is a list of numbers with their step.

The last entry of a finished training has `train_runtime`. Its `train_loss` is the mean over all steps.
Source: transformers, trainer_callback.py (`TrainerState`) and trainer.py.
"""

from __future__ import annotations

import re
from pathlib import Path

from workbench.checkpoints.training_logs.quantity_names import SUMMARY, SUMMARY_REASON
from workbench.checkpoints.training_logs.reading import LogNumbers, LogReader
from workbench.errors import BadData
from workbench.file_io import read_json

NAME = "trainer_state.json"


def _read(path: Path, numbers: LogNumbers) -> None:
    history = read_json(path).get("log_history")
    if not isinstance(history, list):
        raise BadData(f"{path} has no list log_history, so the Trainer of transformers did not write it")
    numbers.notes.append(f"{path.name}: each train_loss is the mean over the steps since the entry before")
    for entry in history:
        if SUMMARY in entry:
            numbers.skipped[SUMMARY_REASON] += 1
            numbers.ended.add(("", ""))
            continue
        for name, value in entry.items():
            is_number = isinstance(value, int | float) and not name.endswith(("runtime", "per_second"))
            if is_number and name not in ("step", "epoch"):
                numbers.add(entry["step"], name, value)


READER = LogReader(
    NAME, lambda path, head: path.name == NAME, _read,
    home=lambda path: path.parent.parent if re.fullmatch(r"checkpoint-\d+", path.parent.name) else path.parent,
)  # fmt: skip
