"""modded-nanogpt's `state_step000500.pt`: {step, code, model, optimizer(s)}; `code` is the script's text, never run.

Source: KellerJordan/modded-nanogpt, train_gpt.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.formats.state import Info, State, number, state_of, weights_in


def read(container: Any, path: Path) -> State | None:
    """The state of a modded-nanogpt file, None where the container is another's."""
    if not (isinstance(container, dict) and {"model", "code"} <= container.keys()):
        return None
    found, beside = weights_in(container, path)
    code = container["code"] if isinstance(container["code"], str) else None
    return state_of(
        found, Info(format="modded-nanogpt", path=path, step=number(container.get("step")), code=code, beside=beside)
    )
