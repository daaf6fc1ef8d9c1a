"""Commands that measure and judge: measure, analyze, xray, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.arguments import (
    Device,
    Download,
    Json,
    On,
    OneWorker,
    Out,
    Quiet,
    Revision,
    Runs,
    Workers,
    app,
    fetch,
    steps_of,
)


@app.command()
def measure(
    paths: Annotated[list[Path], typer.Argument(help="Runs or checkpoint directories.")],
    metric: Annotated[
        list[str], typer.Option("--metric", "-m", help="A name from `workbench list metrics`; repeat for more.")
    ],
    data: Annotated[str | None, typer.Option(help="A text file or a text; else each run's validation split.")] = None,
    steps: Annotated[str, typer.Option(help="last, first, ends, all, or numbers as 0,100.")] = "last",
    n: Annotated[int, typer.Option(min=1, help="Documents at most.")] = 64,
    length: Annotated[
        int | None, typer.Option("-T", "--length", min=1, help="Tokens of each; the training length unless given.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time; results do not depend on it.")] = 8,
    out: Annotated[Path | None, Out(help="Write the records here: .parquet, .arrow, .csv or .json.")] = None,
    workers: OneWorker = 1,
    on: On = None,
    device: Device = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure runs or checkpoints and print the records; what was measured before is not run again."""
    from workbench.console import progress, say, table
    from workbench.distributed import rank
    from workbench.measurement.measuring import measure as run_measures
    from workbench.runs.tables import refuse_ending, write_table_as

    refuse_ending(out)
    with progress("measuring") as task:
        frame = run_measures(
            list(paths),
            metric,
            data,
            steps=steps_of(steps),
            n=n,
            T=length,
            batch=batch,
            device=device,
            progress=task,
            workers=on or workers,
        )
    if rank():  # of several processes, the first one speaks
        return
    if out is not None:
        write_table_as(frame, out)
        say(f"records: {out} ({len(frame)} rows)")
    elif as_json:
        print(frame.to_json(orient="records"))
    else:
        table(frame)


@app.command()
def analyze(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Runs, or folders of runs; the runs folder unless given.")
    ] = None,
    out: Annotated[Path, Out(help="Folder for tables, figures and the page.")] = Path("results"),
    question: Annotated[
        list[str] | None, typer.Option(help="A question of `workbench list claims`; repeat for more, all unless given.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Text for runs that came without data.")] = None,
    n: Annotated[int, typer.Option(min=1, help="Documents at most.")] = 64,
    workers: Workers = None,
    on: On = None,
    png: Annotated[
        bool, typer.Option("--png", help="Draw the figures as PNG too; needs Chrome, Chromium or Edge.")
    ] = False,
    svg: Annotated[bool, typer.Option("--svg", help="Draw the figures as SVG too; needs the same.")] = False,
    runs: Runs = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Say for each claim of the field what these runs decide, with tables, figures and one offline page.

    What was measured before is not run again; Ctrl-C stops and the same command goes on.
    """
    from workbench.claims.analysis import analyse, verdicts, write_figures, write_tables
    from workbench.claims.page import write_page
    from workbench.console import progress, say
    from workbench.jobs.processes import usual
    from workbench.runs.run import runs_folder

    chosen = list(paths or [runs_folder(runs)])
    with progress("measuring") as task:
        analysis = analyse(chosen, questions=question, data=data, n=n, workers=on or workers or usual(), progress=task)
        task(task.done, what="writing")
        write_tables(analysis, out)
        page = write_page(analysis, out, f"workbench analyze {' '.join(map(str, chosen))} --out {out}")
        write_figures(analysis, out, png=png, svg=svg)
    if as_json:
        print(verdicts(analysis).to_json(orient="records"))
        return
    for j in analysis.judged:
        say(f"{j.claim.name}: {j.verdict.words}. {j.verdict.sentence}")
    for name, why in analysis.problems.items():
        say(f"left out: {name}: {why}")
    say(f"page: {page}")


@app.command()
def xray(
    path: Annotated[Path, typer.Argument(help="A run, its name, or any checkpoint `load` opens.")],
    data: Annotated[
        Path | None, typer.Option(help="Text or .bin token ids to look on; a run has its own validation documents.")
    ] = None,
    out: Annotated[
        Path | None,
        Out(help="The page; <name>-xray.html unless given. The PNG stands beside it."),
    ] = None,
    n: Annotated[int, typer.Option(min=4, help="Documents.")] = 32,
    length: Annotated[int | None, typer.Option("--tokens", min=2, help="Tokens of each document.")] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Replace values layer by layer too: three passes for each.")
    ] = False,
    png: Annotated[bool, typer.Option(help="Draw the page as a PNG too; needs Chrome, Chromium or Edge.")] = True,
    revision: Revision = "",
    download: Download = False,
    runs: Runs = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Answer four questions about one model: concentration, sinks, what deep values carry, would a value residual help."""
    from workbench.console import note, progress, say
    from workbench.plots.browser import find_browser
    from workbench.reports.xray import xray as answer
    from workbench.runs.run import runs_folder
    from workbench.storage.locations import locate
    from workbench.storage.remote import is_url

    named = path if is_url(path) else locate(runs_folder(runs) / path).path
    path = fetch(path, download, revision)
    thing = path if path.exists() or not named.exists() else named
    with progress(f"measuring {thing.name}") as task:
        page = answer(thing, data, n=n, T=length, layers=layers, device=device, progress=task, announce=note)
    say(str(page))
    drawn = png and find_browser() is not None
    for written in page.save(out or Path(f"{thing.stem}-xray.html"), png=drawn):
        say(f"written: {written}")
    if png and not drawn:
        say(
            "no PNG: no Chrome, Chromium or Edge found (set WORKBENCH_BROWSER to one); the page works offline in any browser"
        )


@app.command()
def report(
    runs: Runs = None,
    out: Annotated[Path | None, Out(help="The page; <runs>/report.html unless given.")] = None,
    quiet: Quiet = False,
) -> None:
    """Write one offline HTML page: figures, tables, provenance, and what was not checkable at this size."""
    from workbench.console import progress, say
    from workbench.reports.folder import write_report
    from workbench.runs.run import runs_folder

    folder = runs_folder(runs)
    with progress("drawing"):
        page = write_report(folder, out or folder / "report.html")
    say(f"report: {page}")
