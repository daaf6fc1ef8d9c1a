"""Lightning's `epoch=1-step=500.ckpt`: {state_dict: {"model.…"}, global_step, hyper_parameters, …}.

Source: Lightning-AI/pytorch-lightning, trainer/connectors/checkpoint_connector.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.formats.state import Info, State, number, state_of, weights_in


def read(container: Any, path: Path) -> State | None:
    """The state of a Lightning file, None where the container is another's."""
    if not (isinstance(container, dict) and {"state_dict", "global_step"} <= container.keys()):
        return None
    found, beside = weights_in({"state_dict": container["state_dict"]}, path)
    settings = container.get("hyper_parameters")
    return state_of(
        found,
        Info(
            format="Lightning", path=path, step=number(container["global_step"]),
            config=settings if isinstance(settings, dict) else None,
            beside=(*beside, *(str(k) for k in container if k != "state_dict")),
        ),
    )  # fmt: skip
