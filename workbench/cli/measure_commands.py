"""Commands that measure and judge: measure, analyze, xray, report."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from typer import Option

from workbench.cli.arguments import (
    Device,
    Documents,
    Download,
    Json,
    Measures,
    On,
    OneWorker,
    Out,
    Revision,
    RunOrModel,
    Runs,
    Workers,
    app,
    fetch,
    print_result,
    steps_of,
)
from workbench.places import absent_studies


@app.command(name="measure")
def measure_command(
    paths: Annotated[list[Path], RunOrModel(help="Runs, checkpoints, or names of shipped models.")],
    metric: Annotated[list[str], Measures(help="A name of `workbench list metrics`; repeat it for several.")],
    text: Annotated[str | None, Option(help="Text file, or a text; default each run's validation split.")] = None,
    steps: Annotated[str, Option(help="last, first, ends, all, or step numbers as 0,100.")] = "last",
    documents: Documents = 64,
    length: Annotated[
        int | None, Option("--length", "-T", min=1, help="Tokens per document; default the training length.")
    ] = None,
    batch: Annotated[int, Option(min=1, help="Sequences per batch; results do not depend on it.")] = 8,
    positions: Annotated[str, Option(help="Positions of sink measures: first, or found in each document.")] = "first",
    out: Annotated[
        Path | None, Out(help="Write the records to this file: .parquet, .arrow, .csv, .json, .tex or .md.")
    ] = None,
    workers: OneWorker = 1,
    on: On = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Measure runs or checkpoints and print the records. Stored records are reused."""
    from workbench.console import note, print_json, print_table, progress
    from workbench.distributed import rank
    from workbench.measurement.measuring import measure as run_measures
    from workbench.runs.records import facts
    from workbench.runs.tables import refuse_ending, write_table_as

    refuse_ending(out)
    with progress("measuring") as task:
        frame = run_measures(
            list(paths), metric, text, steps=steps_of(steps), n=documents, T=length, batch=batch, device=device, progress=task,
            positions=positions, workers=on or workers,
        )  # fmt: skip
    if rank():  # only the first of several processes prints
        return
    if out is not None:
        write_table_as(frame, out)
        print_result(as_json, f"records: {out} ({len(frame)} rows)", records=out, rows=len(frame))
    elif as_json:
        print_json(frame)
    else:
        print_table(frame)
    covered = (facts(each)["coverage"] for each in frame["provenance"].dropna().unique() if '"coverage":' in each)
    for line in dict.fromkeys(covered):
        note(line)


@app.command()
def analyze(
    paths: Annotated[list[Path] | None, RunOrModel(help="Runs, or folders of runs; default the runs folder.")] = None,
    out: Annotated[Path, Out(help="Folder for tables, figures and the page.")] = Path("results"),
    question: Annotated[
        list[str] | None, Option(help="A question of `workbench list claims`; repeat it for several. Default all.")
    ] = None,
    text: Annotated[Path | None, Option(help="Text file for runs that were imported without data.")] = None,
    documents: Documents = 64,
    workers: Workers = None,
    on: On = None,
    png: Annotated[bool, Option("--png", help="Write the figures as PNG too. Needs Chrome, Chromium or Edge.")] = False,
    svg: Annotated[bool, Option("--svg", help="Write the figures as SVG too. Needs the same.")] = False,
    runs: Runs = None,
    as_json: Json = False,
) -> None:
    """Judge each published claim on these runs, and write tables, figures and one offline page.

    Stored records are reused. Ctrl-C stops; the same command resumes.
    """
    from workbench.claims.analysis import analyse, verdict_table, write_figures, write_page, write_tables
    from workbench.console import note, print_json, progress, say
    from workbench.jobs.worker_processes import default_processes
    from workbench.runs.run import runs_folder

    places = list(paths or [runs_folder(runs)])
    with progress("measuring") as task:
        processes = on or workers or default_processes()
        analysis = analyse(places, questions=question, data=text, n=documents, workers=processes, progress=task)
        task(task.done, what="writing")
        write_tables(analysis, out)
        options = {
            "--question": question or (),
            "--text": [text] if text else (),
            "--documents": [documents],
            "--out": [out],
        }
        words = [*places, *(word for name, values in options.items() for value in values for word in (name, value))]
        page = write_page(analysis, out, f"workbench analyze {shlex.join(map(str, words))}")
        write_figures(analysis, out, png=png, svg=svg)
    if as_json:
        print_json(verdict_table(analysis))
        return
    for j in analysis.judged:
        say(f"{j.claim.name}: {j.verdict.words}. {j.verdict.details}")
    for name, reason in analysis.problems.items():
        note(f"left out: {name}: {reason}")
    if "evidence" in map(str, places) and (absent := absent_studies()):
        note(f"left out: {', '.join(absent)}: not in this installation; `workbench data` adds them")
    say(f"page: {page}")


@app.command(name="xray")
def xray_report_command(
    path: Annotated[Path, RunOrModel(help="A run, a checkpoint, or the name of a shipped or cached model.")],
    text: Annotated[
        Path | None, Option(help="Text file, or .bin file of token ids; default a run's own validation documents.")
    ] = None,
    out: Annotated[Path | None, Out(help="The page, with a PNG of the same name; default <name>-xray.html.")] = None,
    documents: Annotated[int, Option("--documents", min=4, help="Number of documents.")] = 32,
    length: Annotated[int | None, Option("--length", "-T", min=2, help="Tokens per document.")] = None,
    layers: Annotated[
        bool, Option("--layers", help="Also replace values layer by layer: three more passes per layer.")
    ] = False,
    png: Annotated[bool, Option(help="Write the page as PNG too. Needs Chrome, Chromium or Edge.")] = True,
    revision: Revision = "",
    download: Download = False,
    runs: Runs = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Answer four questions about one model: attention concentration, sinks, token share of deep values, value residual."""
    from workbench.console import note, print_json, progress, say
    from workbench.plots.image_export import find_browser
    from workbench.reports.xray import xray as answer
    from workbench.runs.run import runs_folder
    from workbench.storage.path_or_url import locate
    from workbench.storage.remote import is_url

    in_runs = path if is_url(path) else locate(runs_folder(runs) / path).path
    path = fetch(path, download, revision)
    model = path if path.exists() or not in_runs.exists() else in_runs
    with progress(f"measuring {model.name}") as task:
        page = answer(model, text, n=documents, T=length, layers=layers, device=device, progress=task, announce=note)
    drawn = png and find_browser() is not None
    written = page.save(out or Path(f"{model.stem}-xray.html"), png=drawn)
    if as_json:
        print_json([{"question": a.question, "answer": a.sentence, "page": written[0]} for a in page.answers])
        return
    say(str(page))
    for file in written:
        say(f"written: {file}")
    if png and not drawn:
        cure = "set WORKBENCH_BROWSER to a browser, or open the page in any browser"
        note(f"no PNG: Chrome, Chromium and Edge are missing; {cure}")


@app.command()
def report(
    runs: Runs = None,
    out: Annotated[Path | None, Out(help="The page; default <runs>/report.html.")] = None,
    as_json: Json = False,
) -> None:
    """Write one offline HTML page about all runs: figures, tables, provenance, and questions that these sizes cannot answer."""
    from workbench.console import progress
    from workbench.reports.runs_report import write_report
    from workbench.runs.run import runs_folder

    folder = runs_folder(runs)
    with progress("drawing"):
        page = write_report(folder, out or folder / "report.html")
    print_result(as_json, f"report: {page}", report=page)
