"""nanoGPT's `ckpt.pt`: {model, optimizer, model_args, iter_num, best_val_loss, config}.

Source: karpathy/nanoGPT, train.py. `model_args` are the model's settings, `config` the training's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.formats.state import Info, State, number, state_of, weights_in


def read(container: Any, path: Path) -> State | None:
    """The state of a nanoGPT file, None where the container is another's."""
    if not (isinstance(container, dict) and {"model", "model_args"} <= container.keys()):
        return None
    found, beside = weights_in(container, path)
    settings = container["model_args"]
    return state_of(
        found,
        Info(
            format="nanoGPT", path=path, step=number(container.get("iter_num")), beside=beside,
            config=settings if isinstance(settings, dict) else None,
        ),
    )  # fmt: skip
