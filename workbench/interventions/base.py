"""How an experiment on a whole model is registered: `@intervention` on a generator of record rows."""

from __future__ import annotations

import inspect
import math
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.files import digest

Experiment = Callable[..., Iterator[dict[str, Any]]]


@dataclass(frozen=True)
class Intervention:
    """A registered experiment: `function(model, sample, data, batch)` yields record rows."""

    function: Experiment
    unit: str
    range: str
    reading: str
    source: str
    min_length: int = 2
    timed: bool = False

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (inspect.getdoc(self.function) or "").split("\n", 1)[0]

    def version(self) -> str:
        """Changes with the code of its module; what a clock says also with the machine, its threads and PyTorch."""
        where = _machine() if self.timed else ()
        return digest(inspect.getsource(sys.modules[self.function.__module__]), *where)


def _machine() -> tuple[Any, ...]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return platform.node(), platform.machine(), gpu, torch.get_num_threads(), torch.__version__


INTERVENTIONS: dict[str, Intervention] = {}


def intervention(
    *,
    unit: str,
    range: str,  # noqa: A002 - the word of the record
    reading: str,
    source: str,
    min_length: int = 2,
    timed: bool = False,
) -> Callable[[Experiment], Experiment]:
    """Register an experiment under its function's name.

    `timed`: its numbers are a clock's. No two runs agree; what is kept is the first, and on another machine it is measured anew.
    """

    def register(function: Experiment) -> Experiment:
        INTERVENTIONS[function.__name__] = Intervention(function, unit, range, reading, source, min_length, timed)
        return function

    return register


def batches_of(model: Any, sample: Any, batch: int) -> list[Tensor]:
    """The sample's ids [n, T] in batches on the model's device."""
    return [ids.to(model.embed.weight.device) for ids in sample.ids.split(batch)]


@torch.no_grad()
def losses(model: Any, batches: Sequence[Tensor]) -> Tensor:
    """Mean next-token loss of each document in nats, float64 on the CPU."""
    found = [model(ids, return_type="loss", loss_per_token=True).mean(1) for ids in batches]
    return torch.cat(found).double().cpu()


def over_documents(values: Tensor, **axes: Any) -> dict[str, Any]:
    """One row: mean over documents, its standard error, n."""
    values = values.double()
    se = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan
    return {**axes, "value": float(values.mean()), "se": se, "n": len(values)}
