"""What every analysis does alike: read the runs, print the verdict, keep table and figure."""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from workbench import plots
from workbench.console import say, table
from workbench.files import write_text
from workbench.results import load_records, write_parquet
from workbench.runs import Run, list_runs, runs_folder


def arguments(question: str) -> argparse.Namespace:
    """`--runs` and `--out` of an analysis, as absolute paths."""
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--runs", help="folder of runs; else $WORKBENCH_RUNS, else ./runs")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for table, figure and verdict")
    given = parser.parse_args()
    given.runs = runs_folder(given.runs)
    return given


def read(folder: Path, beginning: str) -> tuple[list[Run], pd.DataFrame, pd.DataFrame]:
    """Runs whose name begins so, their records and their telemetry; ends the script with a sentence where there are none."""
    runs = [run for run in list_runs(folder)[0] if run.name.startswith(beginning)]
    if not runs:
        raise SystemExit(f"no runs named {beginning}* under {folder}; make them with `workbench demo`")
    telemetry = pd.concat([run.telemetry() for run in runs], ignore_index=True)
    return runs, load_records([run.path for run in runs]), telemetry


def conclude(out: Path, name: str, verdict: str, frame: pd.DataFrame, figure: go.Figure) -> None:
    """Print table and verdict; keep `<name>.parquet`, `<name>.html` and `<name>.txt`."""
    table(frame)
    say(verdict)
    write_parquet(frame, out / f"{name}.parquet")
    write_text(out / f"{name}.html", plots.html(figure, whole=True))
    write_text(out / f"{name}.txt", verdict + "\n")
    say(f"kept under {out}")
