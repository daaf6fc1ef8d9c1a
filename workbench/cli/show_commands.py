"""Commands that show results: list, diff, data, plot, view, app."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from workbench.cli.arguments import Json, Out, Port, RunOrModel, Runs, app, completing, print_result, step_of
from workbench.errors import WorkbenchError


@app.command(name="list")
def list_names(
    kind: Annotated[
        str,
        Argument(
            metavar="WHAT",
            autocompletion=completing("workbench.cli.list_tables", "LISTINGS"),
            help="architectures, metrics, interventions, presets, claims, studies or runs.",
        ),
    ] = "runs",
    by: Annotated[
        str | None,
        Option(help="Columns that group the runs, as model,rate: mean final loss with its interval over seeds."),
    ] = None,
    out: Annotated[
        Path | None, Out(help="Write the table to this file: .tex (booktabs), .md, .csv, .json, .parquet or .arrow.")
    ] = None,
    runs: Runs = None,
    as_json: Json = False,
) -> None:
    """List architectures with their options, metrics, interventions, presets, claims, studies or runs."""
    from workbench.cli.list_tables import listing, runs_by
    from workbench.console import note, print_json, print_table

    if by and kind != "runs":
        raise WorkbenchError(f"--by groups runs; `workbench list {kind}` has no seeds")
    rows, notes = runs_by(by.split(","), runs) if by else listing(kind, runs)
    if out is not None:
        import pandas as pd

        from workbench.runs.tables import write_table_as

        write_table_as(pd.DataFrame(rows), out)
        note(f"table: {out}")
        return
    if as_json:
        print_json(rows)
        return
    print_table(rows)
    for line in notes:
        note(line)


@app.command(name="diff")
def diff_command(
    paths: Annotated[
        list[Path], RunOrModel(help="Two runs, checkpoints or names of shipped models; settings of more.")
    ],
    step: Annotated[str, Option(help="Checkpoint: last, first or a number; one for each path as first,last.")] = "last",
    top: Annotated[int, Option(min=1, help="Singular directions of each matrix.")] = 4,
    only: Annotated[str | None, Option(help="One table: settings, weights or measures. --out needs it.")] = None,
    out: Annotated[
        Path | None, Out(help="Write the table to this file: .tex (booktabs), .md, .csv, .json, .parquet or .arrow.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show only what differs: settings, weights by matrix and direction, and stored measures over seeds."""
    from workbench.console import json_rows, json_text, note, print_table, progress, say
    from workbench.errors import refuse_unknown
    from workbench.reports.diff_of_checkpoints import TABLES, diff
    from workbench.runs.tables import refuse_ending, write_table_as

    refuse_ending(out)
    refuse_unknown("table", only, (None, *TABLES))
    if out is not None and only is None:
        raise WorkbenchError(f"{out.name} holds one table: choose with --only {' | '.join(TABLES)}")
    steps = [step_of(part) for part in step.split(",")]
    with progress("comparing"):
        result = diff(*paths, step=steps if len(steps) > 1 else steps[0], top=top)
    tables = {name: table for name, table in result.tables.items() if only in (None, name)}
    if out is not None:
        write_table_as(tables[str(only)], out)
        print_result(as_json, f"{only}: {out}", table=out, notes=result.notes)
    elif as_json:
        listed = {name: json_rows(table) for name, table in tables.items()}
        print(json_text(listed | {"notes": result.notes}))
    else:
        for name, table in tables.items():
            if only is None:
                say(f"{name}: {len(table)} rows")
            print_table(table)
        for line in result.notes:
            note(line)


@app.command(name="data")
def data_command(
    source: Annotated[Path | None, Argument(help="A clone, or this version's source distribution (.tar.gz).")] = None,
    as_json: Json = False,
) -> None:
    """Show where the shipped studies and models are, or copy the complete ones, which a wheel lacks, into the cache."""
    from workbench import places

    folder, absent = places.SHIPPED, places.absent_studies()
    if source is not None:
        from workbench.storage.shipped_data import add_data

        folder, absent = add_data(source), []
    lacking = f"; not installed: {', '.join(absent)} and early steps of the models" if absent else ""
    print_result(as_json, f"data: {folder}{lacking}", data=folder, absent=absent)


@app.command(name="plot")
def plot_command(
    records: Annotated[Path, Argument(help="A file of records from `measure --out`.")],
    out: Annotated[Path, Out(help="The figure, one offline .html page.")] = Path("figure.html"),
    as_json: Json = False,
) -> None:
    """Draw records as a figure that fits their axes."""
    from workbench import plots
    from workbench.file_io import write_text
    from workbench.runs.tables import read_records

    write_text(out, plots.html(plots.plot(read_records(records)), whole=True))
    print_result(as_json, f"figure: {out}", figure=out)


@app.command(name="view")
def view_command(
    link: Annotated[
        str, Argument(help="Address of a dashboard page, or its end: 'depth?metric=sink_mass&a=text-resformer-s0'.")
    ],
    out: Annotated[
        Path,
        Out(
            help="The file; its ending sets the format: .html, .svg, .png, .csv, .tex, .md, .parquet, .arrow or .json."
        ),
    ] = Path("view.html"),
    only: Annotated[str | None, Option(help="One view of the page. Pictures need it.")] = None,
    play: Annotated[bool, Option("--play", help="A time-lapse over the checkpoints of model A (.html).")] = False,
    runs: Runs = None,
    as_json: Json = False,
) -> None:
    """Save a dashboard page from its link: a figure for a paper, a table, or an offline page."""
    from workbench.console import note, progress
    from workbench.runs.run import runs_folder
    from workbench.views import Link, source_of
    from workbench.views.writing import write

    page = Link.parse(link)
    source = source_of(page, runs_folder(runs))
    command = f'workbench view "{page}"{f" --only {only}" if only else ""}{" --play" if play else ""} --out {shlex.quote(str(out))}'
    command += "" if runs is None else f" --runs {shlex.quote(str(runs))}"
    with progress("drawing"):
        path, reasons = write(source, page, out, only=only, play=play, command=command)
    left_out = {**source.problems, **reasons}
    for name, reason in left_out.items():
        note(f"left out: {name}: {reason}")
    print_result(as_json, f"view: {path}", view=path, left_out=left_out)


@app.command(name="app")
def dashboard(runs: Runs = None, port: Port = 8501) -> None:
    """Show the dashboard on 127.0.0.1 until Ctrl-C."""
    from workbench.cli.dashboard_process import make_folder, serve, wait
    from workbench.runs.run import runs_folder

    folder = runs_folder(runs)
    make_folder(folder)
    wait(serve(folder, port))
