"""Shared parts of the analysis scripts: find or train runs, judge claims, print published values, write files."""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from workbench import plots
from workbench.claims import Claim, Evidence
from workbench.claims.analysis import Analysis, analyse
from workbench.claims.judging import chosen
from workbench.claims.verdict import InsufficientEvidence
from workbench.config import ModelConfig, TrainConfig
from workbench.console import print_table, progress, say
from workbench.data.data_sources import RepeatedData, prepare
from workbench.errors import WorkbenchError
from workbench.file_io import digest, write_text
from workbench.runs.records import write_parquet
from workbench.runs.run import CORPORA, runs_folder

Model = str | tuple[str, dict[str, Any]]
QUICK_MODEL = ModelConfig(n_layers=4, d_model=32, n_heads=4, d_mlp=48, d_vocab=300, n_ctx=128)
QUICK_TRAIN = TrainConfig(
    steps=2, batch=4, T=64, lr=4e-3, warmup=1, validate_every=1, save_every=2, log_every=1, validation_sequences=8
)
QUICK_DOCUMENTS, QUICK_TEXT = 16, 400_000


@dataclass(frozen=True, kw_only=True)
class Script:
    """A question put to runs from the command line: `python -m analyses.NAME RUN...`.

    `question` is the docstring of its `file`. The claims are those of some `questions` (modules of `workbench.claims`) or named
    one by one. `table` makes the absolute numbers that stand before the verdicts. `quick` are the models of the quick form,
    trained for a few steps on `task` to see that everything works; its verdicts mean nothing.
    """

    file: str
    question: str | None
    questions: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    table: Callable[[Evidence], pd.DataFrame]
    quick: Sequence[Model]
    task: str = "text"

    @property
    def name(self) -> str:
        """Name of the file."""
        return Path(self.file).stem

    @property
    def asked(self) -> list[Claim]:
        """Claims that answer the question."""
        return chosen(self.questions, self.claims)

    def main(self) -> None:
        """Run the analysis with command-line arguments."""
        try:
            self._run(_arguments(self.question or ""))
        except WorkbenchError as error:
            print(f"{self.name}: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print(f"{self.name}: stopped; the same command goes on from here", file=sys.stderr)
            sys.exit(130)

    def _run(self, given: argparse.Namespace) -> None:
        with tempfile.TemporaryDirectory() as spare:
            paths = given.paths or [given.runs]
            if given.quick:
                paths = quick_runs(Path(given.paths[0] if given.paths else spare), self.quick, self.task)
            n = QUICK_DOCUMENTS if given.quick else 64
            with progress("measuring") as task:
                analysis = analyse(paths, claims=[claim.name for claim in self.asked], n=n, progress=task)
            try:
                numbers = self.table(analysis.evidence)
            except InsufficientEvidence as reason:  # nothing of this was measured: the verdicts say why
                numbers = pd.DataFrame({"missing": [str(reason)]})
            conclude(analysis, self.name, numbers, given.out)


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
    """Train tiny models for a few steps, and return their runs."""
    from workbench.training.loop import train

    data: Any = (
        RepeatedData() if task == "repeated" else prepare(root=folder / CORPORA, max_bytes=QUICK_TEXT, vocabulary=300)
    )
    shape, paths = QUICK_MODEL.replace(d_vocab=data.d_vocab), list[Path]()
    for given in models:
        architecture, options = (given, {}) if isinstance(given, str) else given
        recipe = QUICK_TRAIN.replace(**{k: options[k] for k in options if k in ("lr", "lr_factors")})
        own = {k: v for k, v in options.items() if k not in ("lr", "lr_factors")}
        suffix = f"-{digest(options)[:6]}" if options else ""
        for seed in range(seeds):
            name = f"{task}-{architecture}{suffix}-s{seed}"
            run = train(
                architecture, data, name=name, runs=folder, model=shape, train=recipe, seed=seed, device="cpu", **own
            )
            paths.append(run.path)
    return paths


def conclude(analysis: Analysis, name: str, numbers: pd.DataFrame, out: Path) -> None:
    """Print numbers, published values and verdicts; write `<name>.csv`, `.parquet`, `.txt` and `.html`."""
    print_table(numbers)
    lines = []
    for j in analysis.judged:
        lines += [
            f"Claim: {j.claim.text}",
            f"  Published: {j.claim.published}.",
            f"  Would refute it: {j.claim.refutes}.",
            f"  Here: {j.verdict.words}. {j.verdict.details}",
            f"  Runs: {len(j.verdict.runs)}{f' ({j.verdict.setting})' if j.verdict.runs else ''}.",
        ]
    lines += [f"Left out: {run}: {why}" for run, why in analysis.problems.items()]
    for line in lines:
        say(line)
    write_text(out / f"{name}.csv", numbers.to_csv(index=False))
    write_parquet(numbers, out / f"{name}.parquet")
    write_text(out / f"{name}.txt", "\n".join(lines) + "\n")
    drawn = [j for j in analysis.judged if j.figure is not None]
    for i, j in enumerate(drawn):
        write_text(out / (f"{name}-{j.claim.name}.html" if i else f"{name}.html"), plots.html(j.figure, whole=True))
    say(f"kept under {out}")
