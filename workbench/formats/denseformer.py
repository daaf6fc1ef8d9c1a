"""Files of DenseFormer's training code: {model, optimizer, scheduler, itr, …}.

Source: epfml/DenseFormer, optim/utils.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.formats.state import Info, State, number, state_of, weights_in


def read(container: Any, path: Path) -> State | None:
    """The state of a DenseFormer file, None where the container is another's."""
    if not (isinstance(container, dict) and {"model", "itr"} <= container.keys()):
        return None
    found, beside = weights_in(container, path)
    return state_of(found, Info(format="DenseFormer", path=path, step=number(container["itr"]), beside=beside))
