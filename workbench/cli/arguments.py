"""The application that the commands register on, and how their arguments are written and read."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="workbench",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from workbench import __version__

        print(f"workbench {__version__}")
        raise typer.Exit


@app.callback()
def whole(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which it is.")
    ] = False,
) -> None:
    """An interpretability workbench for value-residual transformers."""


def destination(out: Path | None) -> Path | None:
    """The callback of options that name what is written: what cannot be is refused before the work is done."""
    from workbench.files import writable

    return out and writable(out)


Out = functools.partial(typer.Option, callback=destination)

Runs = Annotated[Path | None, typer.Option("--runs", help="Folder of runs; else $WORKBENCH_RUNS, else ./runs.")]


def _silence(quiet: bool) -> None:
    from workbench.console import silence

    silence(quiet)


Quiet = Annotated[bool, typer.Option("--quiet", "-q", callback=_silence, help="No progress on stderr.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes; one for each core unless given.")]
OneWorker = Annotated[int, typer.Option("--workers", min=1, help="Processes that measure.")]
On = Annotated[
    str | None,
    typer.Option("--on", help="A cluster in their place: dask://HOST:PORT, or dask:///path/to/scheduler.json."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; the best there is unless given.")]
ArchitectureName = Annotated[str, typer.Argument(help="A name from `workbench list architectures`, or a+b.")]
PresetName = Annotated[str, typer.Option(help="A name from `workbench list presets`.")]
Options = Annotated[list[str] | None, typer.Option(help="Architecture option as key=value, e.g. lambda_v1=0.3.")]
ModelKeys = Annotated[list[str] | None, typer.Option(help="Config key as key=value, e.g. n_layers=8.")]
RecipeKeys = Annotated[list[str] | None, typer.Option(help="Training key as key=value, e.g. steps=1000, lr=1e-3.")]
Download = Annotated[
    bool, typer.Option("--download", help="Fetch a name of the Hub first; else only this machine's cache is read.")
]
Revision = Annotated[
    str, typer.Option(help="Of a name of the Hub: step1000, or of several 'step*'. The same as NAME@REVISION.")
]
Step = Annotated[str, typer.Option(help="last, first, or a number.")]


def fetch(path: Path, download: bool, revision: str) -> Path:
    """A path with its revision; with `--download` a name of the Hub is brought into the cache, where nothing lies under it here."""
    from workbench.checkpoints import hub

    path = path.with_name(f"{path.name}@{revision}") if revision else path
    if download and not path.exists():
        hub.download(str(path))
    return path


def key_values(pairs: list[str] | None, kind: str) -> dict[str, Any]:
    """`key=value` arguments as a dictionary; values are read as JSON where they are, else as text."""
    from workbench.errors import WorkbenchError

    values: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise WorkbenchError(f"--{kind} {pair!r}: write it as key=value")
        try:
            values[key] = json.loads(value)
        except json.JSONDecodeError:
            values[key] = value
    return values


def step_of(text: str) -> int | str:
    """`last`, `first`, or a step's number."""
    return int(text) if text.isdigit() else text


def steps_of(text: str) -> Any:
    """As `step_of`, or several numbers as `0,100`."""
    parts = text.split(",")
    return [int(part) for part in parts] if all(part.strip().isdigit() for part in parts) else text
