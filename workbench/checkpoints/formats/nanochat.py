"""nanochat's `model_000500.pt`, a bare state dict; its settings are `model_config` in `meta_000500.json`.

Source: karpathy/nanochat, nanochat/checkpoint_manager.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.checkpoints.checkpoint_facts import whole_number
from workbench.checkpoints.format import Format
from workbench.errors import BadCheckpoint
from workbench.file_io import read_json


def in_meta(container: Any, path: Path) -> tuple[int, Mapping[str, Any] | None] | None:
    """Return step and settings from the meta file of the same step, None without one."""
    match = re.fullmatch(r"model_(\d+)\.pt", path.name)
    meta = path.with_name(f"meta_{match[1]}.json") if match else None
    if match is None or meta is None or not meta.exists():
        return None
    values = read_json(meta)
    config, step = values.get("model_config"), whole_number(values.get("step"))
    if step is not None and step != int(match[1]):
        raise BadCheckpoint(f"{meta} says step {step}, its name {int(match[1])}; one of the two files is misnamed")
    return int(match[1]), config if isinstance(config, dict) else None


FORMAT = Format(name="nanochat", beside=in_meta)
