"""Commands that show what is there: list, plot, view, app."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.arguments import (
    Json,
    Out,
    Quiet,
    Runs,
    app,
)


@app.command(name="list")
def list_things(
    what: Annotated[
        str, typer.Argument(help="architectures, metrics, interventions, presets, claims, studies or runs.")
    ] = "runs",
    runs: Runs = None,
    as_json: Json = False,
) -> None:
    """List what can be named: architectures with their options, metrics, interventions, presets, claims, studies, or the runs."""
    from workbench.cli.listing import LISTINGS, listing
    from workbench.console import say, table
    from workbench.runs.run import runs_folder

    frame, notes = listing(what, runs_folder(runs)) if what in LISTINGS else listing(what, Path())
    if as_json:
        print(frame.to_json(orient="records"))
        return
    table(frame)
    for note in notes:
        say(note)


@app.command()
def plot(
    records: Annotated[Path, typer.Argument(help="Records as `measure --out` writes them.")],
    out: Annotated[Path, Out(help="The figure: one offline .html page.")] = Path("figure.html"),
) -> None:
    """Draw records as a figure, chosen by their axes."""
    from workbench import plots
    from workbench.console import say
    from workbench.files import write_text
    from workbench.runs.tables import read_records

    write_text(out, plots.html(plots.plot(read_records(records)), whole=True))
    say(f"figure: {out}")


@app.command()
def view(
    link: Annotated[
        str, typer.Argument(help="A page's address or its end, e.g. 'depth?metric=sink_mass&a=text-resformer-s0'.")
    ],
    out: Annotated[
        Path,
        Out(help="The file; its ending says what: .html, .svg, .png, .csv, .parquet, .arrow, .json."),
    ] = Path("view.html"),
    only: Annotated[str | None, typer.Option(help="One view of the page; pictures hold one.")] = None,
    play: Annotated[bool, typer.Option("--play", help="A time-lapse over the checkpoints of model A (.html).")] = False,
    runs: Runs = None,
    quiet: Quiet = False,
) -> None:
    """Draw what a page of the dashboard shows, from its link: a figure for a paper, a table, an offline page."""
    from workbench.console import progress, say
    from workbench.runs.run import runs_folder
    from workbench.views import Link, source_of
    from workbench.views.writing import write

    chosen = Link.parse(link)
    source = source_of(chosen, runs_folder(runs))
    command = f'workbench view "{chosen}"{f" --only {only}" if only else ""}{" --play" if play else ""} --out {shlex.quote(str(out))}'
    command += "" if runs is None else f" --runs {shlex.quote(str(runs))}"
    with progress("drawing"):
        path, reasons = write(source, chosen, out, only=only, play=play, command=command)
    for name, why in {**source.problems, **reasons}.items():
        say(f"left out: {name}: {why}")
    say(f"view: {path}")


@app.command(name="app")
def dashboard(runs: Runs = None, port: Annotated[int, typer.Option(help="Port on 127.0.0.1.")] = 8501) -> None:
    """Show the dashboard on 127.0.0.1 until Ctrl-C."""
    from workbench.cli.serving import make_folder, serve, wait
    from workbench.runs.run import runs_folder

    folder = runs_folder(runs)
    make_folder(folder)
    wait(serve(folder, port))
