"""What every metric and experiment says of one fixed checkpoint: kept, so that changed numbers are noticed.

    python tests/metric_outputs.py        # writes what is missing: of new ones, and where a version was raised

`golden/metric_outputs.json` holds for each name its version and, by site, part, layer, source, variant, control and unit:
how many rows there are, their mean, their mean with weights 1, 2, 3, ... in the order of heads and positions, and the mean
of the standard errors. The model computes in float64, so that machines agree. Of what a clock says only the rows are kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from workbench.data.data_sources import Sample
from workbench.interventions import INTERVENTIONS
from workbench.measurement.measuring import measure
from workbench.metrics import METRICS
from workbench.runs.run import Run

GOLDEN = Path(__file__).parent / "golden"
FILE = GOLDEN / "metric_outputs.json"
ELSEWHERE = (
    "null_mass", "depth_routing", "source_ablation", "stream_gain", "router_entropy", "expert_load", "first_token_experts",
)  # fmt: skip
"""Of what that checkpoint lacks: held to the truth in test_observing_null, test_attention_residuals, test_experiments, test_experts."""
MEASURES: dict[str, Any] = {n: m for n, m in {**METRICS, **INTERVENTIONS}.items() if n not in ELSEWHERE}
GROUP = ["site", "part", "layer", "source", "variant", "control", "unit"]
WITHIN = ["head", "position", "index"]
DOCUMENTS, T = 8, 64


class Fixed:
    """Where experiments that read training sequences find some: always the same few."""

    hash = "fixed"

    def __init__(self, d_vocab: int) -> None:
        self.d_vocab = d_vocab

    def batch(self, step: int, size: int, T: int, seed: int) -> torch.Tensor:
        place = torch.arange(min(size, 32) * T).view(-1, T)
        return (place * place * 5 + place // 7 + step) % self.d_vocab


def measured(names: Iterable[str]) -> dict[str, Any]:
    """The outputs by name, as they are kept."""
    run = Run.open(GOLDEN / "run_before" / "resformer-before-s0")
    model, data = run.load("last", dtype=torch.float64), Fixed(run.model.d_vocab)
    sample = Sample(data.batch(1, DOCUMENTS, T, 0), range(DOCUMENTS), "fixed", "fixed", data)
    frame = measure(model, list(names), sample)
    return {
        str(name): {
            "version": MEASURES[str(name)].version,
            "rows": _summary(rows, getattr(MEASURES[str(name)], "timed", False)),
        }
        for name, rows in frame.groupby("metric")
    }


def _summary(rows: pd.DataFrame, timed: bool) -> dict[str, list[float | None]]:
    groups = rows.sort_values(WITHIN).groupby(GROUP, dropna=False)
    return {
        " ".join("-" if pd.isna(k) else str(k) for k in key): [len(group), *([] if timed else _numbers(group))]
        for key, group in groups
    }


def _numbers(group: pd.DataFrame) -> list[float | None]:
    value, ramp = group["value"].to_numpy(), np.arange(1, len(group) + 1)
    found = (value.mean(), (value * ramp).sum() / ramp.sum(), group["se"].mean())
    return [None if np.isnan(x) else float(f"{x:.9g}") for x in found]


def kept() -> dict[str, Any]:
    """The outputs in the file."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def main() -> None:
    """Write the entries of measures that have none or another version; forget those of measures that are gone."""
    old = {name: entry for name, entry in kept().items() if name in MEASURES}
    missing = [n for n, item in MEASURES.items() if n not in old or old[n]["version"] != item.version]
    new = old | (measured(missing) if missing else {})
    lines = (f" {json.dumps(name)}: {json.dumps(new[name])}" for name in sorted(new))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"written: {', '.join(missing) or 'nothing was missing'}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
