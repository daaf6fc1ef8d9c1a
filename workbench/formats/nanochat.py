"""nanochat's `model_000500.pt`, a bare state dict, with `meta_000500.json` beside it (`model_config` is its settings).

Source: karpathy/nanochat, nanochat/checkpoint_manager.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from workbench.errors import BadCheckpoint
from workbench.files import read_json
from workbench.formats.state import Info, State, number, state_of, weights_in


def read(container: Any, path: Path) -> State | None:
    """The state of a nanochat file, None where no meta file of the same step stands beside it."""
    match = re.fullmatch(r"model_(\d+)\.pt", path.name)
    meta = path.with_name(f"meta_{match[1]}.json") if match else None
    if match is None or meta is None or not meta.exists():
        return None
    values = read_json(meta)
    config, step = values.get("model_config"), number(values.get("step"))
    if step is not None and step != int(match[1]):
        raise BadCheckpoint(f"{meta} says step {step}, its name {int(match[1])}; one of the two files is misnamed")
    found, beside = weights_in(container, path)
    return state_of(
        found,
        Info(
            format="nanochat", path=path, step=int(match[1]), config=config if isinstance(config, dict) else None,
            beside=beside,
        ),
    )  # fmt: skip
