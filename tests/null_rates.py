"""How often the rule of `lower_loss` decides that equal trainings differ: public runs of one configuration, repeated with other seeds.

    python tests/null_rates.py modded_nanogpt_val_loss.parquet    # writes docs/null_rates.csv, which docs/verdicts.md shows

The table has the validation losses of the logs in KellerJordan/modded-nanogpt under `records/` at f411b3d3: columns record, arm, run,
step, total and val_loss. Two groups of runs of one record, arm and length take the places of a model and its baseline.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from workbench.claims.verdict import decide
from workbench.statistics.intervals import paired_seeds

DRAWS, LEAST = 10_000, 10
OUT = Path(__file__).parent.parent / "docs" / "null_rates.csv"


def repeated(table: pd.DataFrame) -> list[np.ndarray]:
    """Last losses of the runs of each configuration with `LEAST` runs or more; a run that two records hold counts once."""
    last = table.sort_values("step").groupby(["track", "record", "arm", "run"], as_index=False).last()
    last = last.drop_duplicates("run")
    groups = last.groupby(["track", "record", "arm", "total", "step"])["val_loss"]
    return [losses.to_numpy() for _, losses in groups if len(losses) >= LEAST]


def decided(model: np.ndarray, baseline: np.ndarray) -> str:
    """What `decide` says of the difference between two groups of losses, as `lower_loss` puts it."""
    return decide({"all domains": paired_seeds(pd.Series(model), pd.Series(baseline))}, -1)[0]


def null_rates(groups: list[np.ndarray], draws: int = DRAWS) -> pd.DataFrame:
    """Shares in per cent of draws that are decided, for real runs and for normal noise in their place."""
    rows = []
    for seeds in (3, 5):
        rng = np.random.default_rng(0)
        for name in ("public runs", "normal noise"):
            statuses = []
            for _ in range(draws):
                group = groups[rng.integers(len(groups))]
                losses = (
                    rng.choice(group, 2 * seeds, replace=False) if name == "public runs" else rng.normal(size=2 * seeds)
                )
                statuses.append(decided(losses[:seeds], losses[seeds:]))
            share = {status: round(100 * statuses.count(status) / draws, 1) for status in ("supported", "refuted")}
            rows.append(
                {
                    "losses": name,
                    "configurations": len(groups) if name == "public runs" else "",
                    "seeds": seeds,
                    "draws": draws,
                    **share,
                }
            )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    found = null_rates(repeated(pd.read_parquet(sys.argv[1])))
    found.to_csv(OUT, index=False)
    print(found.to_string())
