"""What every analysis does alike: read or make runs, judge the claims, print published numbers beside ours, keep the files."""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from workbench import plots
from workbench.analysing import Analysis, analyse
from workbench.claims import Evidence
from workbench.claims.base import Undecided
from workbench.config import ModelConfig, TrainConfig
from workbench.console import say, table
from workbench.data import RepeatedData, prepare
from workbench.errors import WorkbenchError
from workbench.files import digest, write_text
from workbench.results import write_parquet
from workbench.runs import CORPORA, runs_folder
from workbench.statistics import seed_band

Model = str | tuple[str, dict[str, Any]]
QUICK_MODEL = ModelConfig(n_layers=4, d_model=32, n_heads=4, d_mlp=48, d_vocab=300, n_ctx=128)
QUICK_TRAIN = TrainConfig(
    steps=2, batch=4, T=64, lr=4e-3, warmup=1, validate_every=1, save_every=2, log_every=1, validation_sequences=8
)
QUICK_DOCUMENTS, QUICK_TEXT = 16, 400_000


def answer(
    name: str,
    question: str,
    claims: Sequence[str],
    ours: Callable[[Evidence], pd.DataFrame],
    *,
    quick: Sequence[Model],
    task: str = "text",
) -> None:
    """The whole of an analysis, from the command line's arguments to the files.

    `question`: the script's docstring. `ours`: the table of absolute numbers, printed before the verdicts. `quick`: models
    of the quick form, trained for a few steps to see that everything works; its verdicts mean nothing.
    """
    given = _arguments(question)
    try:
        _answer(name, claims, ours, quick, task, given)
    except WorkbenchError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{name}: stopped; the same command goes on from here", file=sys.stderr)
        sys.exit(130)


def _answer(
    name: str,
    claims: Sequence[str],
    ours: Callable[[Evidence], pd.DataFrame],
    quick: Sequence[Model],
    task: str,
    given: argparse.Namespace,
) -> None:
    with tempfile.TemporaryDirectory() as spare:
        paths = given.paths or [given.runs]
        if given.quick:
            paths = quick_runs(Path(given.paths[0] if given.paths else spare), quick, task)
        n = QUICK_DOCUMENTS if given.quick else 64
        found = analyse(paths, claims=claims, n=n)
        conclude(found, name, _numbers(ours, found.evidence), given.out)


def _arguments(question: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=inspect.cleandoc(question), formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, metavar="RUN", help="runs, or folders of runs")
    parser.add_argument("--runs", help="folder of runs where none is named; else $WORKBENCH_RUNS, else ./runs")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for tables, figures and verdicts")
    parser.add_argument(
        "--quick", action="store_true", help="on tiny models of a few steps; RUN is where they are kept"
    )
    given = parser.parse_args()
    given.runs = runs_folder(given.runs)
    return given


def quick_runs(folder: Path, models: Sequence[Model], task: str = "text", seeds: int = 1) -> list[Path]:
    """Tiny models trained for a few steps, as many seeds each; those that are there already are kept."""
    from workbench.training import train

    data: Any = (
        RepeatedData() if task == "repeated" else prepare(root=folder / CORPORA, max_bytes=QUICK_TEXT, vocabulary=300)
    )
    shape, found = QUICK_MODEL.replace(d_vocab=data.d_vocab), list[Path]()
    for given in models:
        architecture, options = (given, {}) if isinstance(given, str) else given
        recipe = QUICK_TRAIN.replace(**{k: options[k] for k in options if k in ("lr", "lr_factors")})
        own = {k: v for k, v in options.items() if k not in ("lr", "lr_factors")}
        told = f"-{digest(options)[:6]}" if options else ""
        for seed in range(seeds):
            name = f"{task}-{architecture}{told}-s{seed}"
            run = train(
                architecture, data, name=name, runs=folder, model=shape, train=recipe, seed=seed, device="cpu", **own
            )
            found.append(run.path)
    return found


def _numbers(ours: Callable[[Evidence], pd.DataFrame], evidence: Evidence) -> pd.DataFrame:
    try:
        return ours(evidence)
    except Undecided as reason:  # nothing of this was measured: the verdicts say why
        return pd.DataFrame({"missing": [str(reason)]})


def profile(evidence: Evidence, metric: str, *, by: Sequence[str] = ("layer",), **axes: Any) -> pd.DataFrame:
    """Mean over seeds with its range, of each model at random init and after training, along `by`."""
    frames = []
    for step in ("first", "last"):
        try:
            rows = evidence.rows(metric, step=step, **axes)
        except Undecided:
            if step == "last":
                raise
            continue
        band = seed_band(rows.rename(columns={"architecture": "model"}), ["model", *by])
        frames.append(
            band.assign(when="random init" if step == "first" else "trained", metric=metric, unit=rows["unit"].iloc[0])
        )
    return pd.concat(frames, ignore_index=True)


def final_losses(evidence: Evidence) -> pd.DataFrame:
    """Final validation loss of every model and domain: mean over seeds with its range, nats."""
    band = seed_band(evidence.losses(), ["model", "data"])
    return band.sort_values(["data", "mean"]).assign(unit="nats")


def conclude(found: Analysis, name: str, numbers: pd.DataFrame, out: Path) -> None:
    """Print our numbers, then each claim with published ones and its verdict; keep `<name>.csv`, `.parquet`, `.txt`, `.html`."""
    table(numbers)
    lines = []
    for j in found.judged:
        lines += [
            f"Claim: {j.claim.text}",
            f"  Published: {j.claim.published}.",
            f"  Would refute it: {j.claim.refutes}.",
            f"  Here: {j.verdict.said}. {j.verdict.sentence}",
            f"  Runs: {len(j.verdict.runs)}{f' ({j.verdict.setting})' if j.verdict.runs else ''}.",
        ]
    lines += [f"Left out: {run}: {why}" for run, why in found.problems.items()]
    for line in lines:
        say(line)
    write_text(out / f"{name}.csv", numbers.to_csv(index=False))
    write_parquet(numbers, out / f"{name}.parquet")
    write_text(out / f"{name}.txt", "\n".join(lines) + "\n")
    drawn = [j for j in found.judged if j.figure is not None]
    for i, j in enumerate(drawn):
        write_text(out / (f"{name}-{j.claim.name}.html" if i else f"{name}.html"), plots.html(j.figure, whole=True))
    say(f"kept under {out}")
