"""The command line: demo, train, study, measure, analyze, view, report, app, list and more. A command's help is its docstring.

Heavy imports happen inside the commands, so `--help` answers at once.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="workbench",
    help="An interpretability workbench for value-residual transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Runs = Annotated[Path | None, typer.Option("--runs", help="Folder of runs; else $WORKBENCH_RUNS, else ./runs.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; the best there is unless given.")]


@app.command()
def demo(
    runs: Runs = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny trainings, to see that everything works.")] = False,
    show: Annotated[bool, typer.Option("--app/--no-app", help="Show the dashboard while the models train.")] = True,
    port: Annotated[int, typer.Option(help="Port of the dashboard on 127.0.0.1.")] = 8501,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each architecture.")] = 3,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one for each core unless given.")] = None,
    device: Device = None,
) -> None:
    """Train small models on this machine, measure them, write the report, and show it all on a dashboard.

    Everything that is there already is reused; Ctrl-C stops and the same command goes on.
    """
    from workbench.console import demo_progress, say
    from workbench.demo import run_demo
    from workbench.report import write_report
    from workbench.runs import runs_folder
    from workbench.serving import make_folder, serve, stop, wait

    folder = runs_folder(runs)
    make_folder(folder)
    server = serve(folder, port) if show else None
    try:
        with demo_progress() as told:
            run_demo(folder, seeds=seeds, quick=quick, workers=workers, device=device, told=told)
        say(f"report: {write_report(folder, folder / 'report.html')}")
        if server is not None:
            wait(server)
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here")
        raise
    finally:
        if server is not None:
            stop(server)


@app.command()
def train(
    architecture: Annotated[str, typer.Argument(help="A name from `workbench list architectures`, or a+b.")],
    preset: Annotated[str, typer.Option(help="A name from `workbench list presets`.")] = "tiny",
    name: Annotated[str | None, typer.Option(help="Run folder; architecture, preset and seed unless given.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and data order.")] = 0,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text, .jsonl, .parquet or token .bin files, folders, datasets:NAME; else the embedded corpus."
        ),
    ] = None,
    task: Annotated[str, typer.Option(help="text, repeated (random tokens repeated once) or backcopy.")] = "text",
    shortest: Annotated[
        int | None, typer.Option(help="Task repeated: draw each period from this to half the length, not fixed.")
    ] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Size of the tokenizer's vocabulary.")] = None,
    bos: Annotated[str | None, typer.Option(help="first: begin each document with a start token.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Architecture option as key=value, e.g. lambda_v1=0.3.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="Config key as key=value, e.g. n_layers=8.")] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Training key as key=value, e.g. steps=1000, lr=1e-3.")
    ] = None,
    runs: Runs = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Train one model, or go on where an interrupted training of the same name stopped."""
    from workbench.config import PRESETS, ModelConfig
    from workbench.console import say, train_progress
    from workbench.data import BackcopyData, RepeatedData, open_tokens, prepare
    from workbench.errors import UnknownName
    from workbench.models import architecture as find_architecture
    from workbench.runs import CORPORA, runs_folder
    from workbench.training import train as run_training

    if preset not in PRESETS:
        raise UnknownName("preset", preset, PRESETS)
    if task not in ("text", "repeated", "backcopy"):
        raise UnknownName("task", task, ["text", "repeated", "backcopy"])
    find_architecture(architecture)  # refuse before the corpus is built
    folder, chosen, options = runs_folder(runs), PRESETS[preset], _settings(option, "option")
    sizes, settings = _settings(model, "model"), chosen.train.replace(**_settings(recipe, "recipe"))
    vocabulary = vocabulary or sizes.get("d_vocab")
    if task == "repeated":
        data: Any = RepeatedData(vocabulary or 64, shortest)
    elif task == "backcopy":
        data = BackcopyData(vocabulary or 64)
    elif text and all(path.suffix == ".bin" for path in text):
        data = open_tokens(text, vocabulary)
    else:
        data = prepare(
            texts=text, vocabulary=vocabulary or min(chosen.model.d_vocab, 4096), bos=bos, root=folder / CORPORA
        )
    config = ModelConfig.of(chosen.model).replace(**({"d_vocab": data.d_vocab} | sizes))
    run_name = name or f"{architecture}-{preset}-s{seed}"
    with train_progress(run_name, settings.steps) as progress:
        run = run_training(
            architecture, data, name=run_name, runs=folder, model=config, train=settings, seed=seed, device=device,
            progress=progress, **options,
        )  # fmt: skip
    losses = run.telemetry(f"metric = 'validation_loss' and step = {settings.steps}")
    if as_json:
        print(losses[["run", "data", "step", "value", "se", "n", "unit"]].to_json(orient="records"))
        return
    for row in losses.itertuples():
        say(f"{row.data}: validation loss {row.value:.4f} nats (se {row.se:.4f}, {row.n} documents)")
    say(f"run: {run.path}")


@app.command(name="import")
def import_checkpoints(
    path: Annotated[
        str, typer.Argument(help="A checkpoint, or a series: a folder, a glob, a pattern with (?P<step>...).")
    ],
    name: Annotated[
        str | None, typer.Option("--as", help="Run folder; the checkpoint's or its folder's name unless given.")
    ] = None,
    architecture: Annotated[str | None, typer.Option(help="What the files do not say, e.g. resformer.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Architecture option as key=value, e.g. lambda_v1=0.3.")
    ] = None,
    config: Annotated[list[str] | None, typer.Option(help="Config key the files do not say, e.g. n_heads=8.")] = None,
    builder: Annotated[
        str | None,
        typer.Option(help="Your own code: package.module:function(settings) -> the module the weights fill."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Tells runs of one model apart.")] = None,
    runs: Runs = None,
) -> None:
    """Make a run of anyone's checkpoints, to measure it and see it on the dashboard. Nothing in them is ever run."""
    from workbench.console import say, status
    from workbench.importing import import_run
    from workbench.runs import BUILDERS, runs_folder

    settings = _settings(option, "option")
    with status("reading") as told:
        run = import_run(
            path, runs_folder(runs), name=name, architecture=architecture, config=_settings(config, "config"), builder=builder,
            seed=seed, progress=told, **settings,
        )  # fmt: skip
    say(f"run: {run.path} ({run.architecture}, steps {', '.join(map(str, run.steps))})")
    if builder:
        say(f"to open it: {BUILDERS}={builder} workbench app")


@app.command()
def export(
    path: Annotated[Path, typer.Argument(help="A run or a checkpoint of a transformer.")],
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    step: Annotated[str, typer.Option(help="last, first, or a number.")] = "last",
) -> None:
    """Write a vanilla model as a plain Hugging Face directory: the same logits in transformers."""
    from workbench.checkpoints import export as write
    from workbench.console import say
    from workbench.runs import load

    say(f"exported: {write(load(path, step=int(step) if step.isdigit() else step), out)}")


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
    out: Annotated[Path | None, typer.Option(help="Write the records here: .parquet, .csv or .json.")] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Measure runs or checkpoints and print the records; what was measured before is not run again."""
    from workbench.console import say, status, table
    from workbench.launched import rank
    from workbench.measuring import measure as run_measures

    with status("measuring") as told:
        frame = run_measures(
            list(paths), metric, data, steps=_steps(steps), n=n, T=length, batch=batch, device=device, progress=told
        )
    if rank():  # of several processes, the first one speaks
        return
    for sentence in _lacking(frame, metric):
        typer.echo(sentence, err=True)
    if out is not None:
        _write(frame, out)
        say(f"records: {out} ({len(frame)} rows)")
    elif as_json:
        print(frame.to_json(orient="records"))
    else:
        table(frame)


def _lacking(frame: Any, metrics: list[str]) -> list[str]:
    """What a measurement has no number of, a sentence each: a metric may read or change what an architecture does not have."""
    found = []
    for name in dict.fromkeys(metrics):
        without = frame[~frame["run"].isin(frame.loc[frame["metric"] == name, "run"])]
        if not (frame["metric"] == name).any():
            found.append(f"{name}: no number here, these models have nothing that it reads or changes")
        elif len(without):
            whose = ", ".join(
                f"{run} ({of})" for run, of in dict.fromkeys(zip(without["run"], without["architecture"], strict=True))
            )
            found.append(f"{name}: no number of {whose}, which has nothing that it reads or changes")
    return found


@app.command()
def estimate(
    architecture: Annotated[str, typer.Argument(help="A name from `workbench list architectures`, or a+b.")],
    preset: Annotated[str, typer.Option(help="A name from `workbench list presets`.")] = "tiny",
    metric: Annotated[
        list[str] | None, typer.Option("--metric", "-m", help="Estimate measuring these instead of training.")
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="Architecture option as key=value.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Config key as key=value, e.g. n_layers=8.")] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="Training key as key=value, e.g. batch=64.")] = None,
    n: Annotated[int, typer.Option(min=1, help="Documents to measure.")] = 64,
    length: Annotated[int | None, typer.Option("-T", "--length", min=2, help="Tokens of each document.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Documents at a time while measuring.")] = 8,
    as_json: Json = False,
) -> None:
    """Say how much memory a training will need, or with -m a measurement, before it runs."""
    from workbench.config import PRESETS, ModelConfig
    from workbench.console import status, table
    from workbench.estimating import measuring_memory, training_memory

    shape = ModelConfig.of(preset).replace(**_settings(model, "model"))
    train, options = PRESETS[preset].train.replace(**_settings(recipe, "recipe")), _settings(option, "option")
    with status("estimating") as told:
        if metric:
            T = length or train.T
            frame = measuring_memory(architecture, shape, metric, n=n, T=T, batch=batch, progress=told, **options)
        else:
            frame = training_memory(architecture, shape, train, **options)
    if as_json:
        print(frame.to_json(orient="records"))
    else:
        table(frame)


@app.command()
def generate(
    path: Annotated[Path, typer.Argument(help="A run or a checkpoint.")],
    prompt: Annotated[str, typer.Option(help="Text to continue; token ids as '3 14 15' where there is no tokenizer.")],
    tokens: Annotated[int, typer.Option("-n", "--max-new-tokens", help="New tokens at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the smallest set whose mass reaches this.")] = None,
    seed: Annotated[int | None, typer.Option(help="Equal seeds give equal texts; else another one each time.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends it; repeat for more.")] = None,
    step: Annotated[str, typer.Option(help="last, first, or a number.")] = "last",
    device: Device = None,
) -> None:
    """Continue a text, token by token."""
    from workbench.runs import load

    model = load(path, step=int(step) if step.isdigit() else step, device=device)
    start, texts = (prompt, True) if model.tokenizer else (_ids(prompt), False)
    pieces = model.stream(
        start, tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop, use_cache=model.caches
    )
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece if texts else f" {piece}", end="", flush=True)
    print()


@app.command()
def study(
    file: Annotated[Path, typer.Argument(help="A study's .toml file, as those under analyses/studies.")],
    runs: Runs = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few steps of tiny models, to see that it works.")] = False,
    processes: Annotated[int | None, typer.Option(min=1, help="One for each core unless given.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the tables (.parquet).")] = Path("results"),
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Train the runs of a study file that are not there yet, and compare its cells over seeds.

    Ctrl-C stops and the same command goes on; a run that fails is told at the end, after all others.
    """
    from workbench.console import demo_progress, say, table
    from workbench.errors import WorkbenchError
    from workbench.runs import runs_folder
    from workbench.studies import read_study
    from workbench.studying import keep, run_study, summary

    asked, folder = read_study(file), runs_folder(runs)
    try:
        with demo_progress() as told:
            frame = run_study(asked, folder, quick=quick, processes=processes, device=device, told=told)
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here")
        raise
    cells = summary(asked, frame)
    if as_json:
        print(cells.to_json(orient="records"))
    else:
        say(asked.question)
        table(cells)
    for path in keep(asked, frame, folder, out):
        if not as_json:
            say(f"kept: {path}")
    if len(broken := frame[frame["failed"] != ""]):
        first = broken.iloc[0]
        raise WorkbenchError(f"{len(broken)} of {len(frame)} runs failed, first {first['run']}: {first['failed']}")


@app.command()
def plot(
    records: Annotated[Path, typer.Argument(help="Records as `measure --out` writes them (.parquet).")],
    out: Annotated[Path, typer.Option(help="The figure: one offline .html page.")] = Path("figure.html"),
) -> None:
    """Draw records as a figure, chosen by their axes."""
    from workbench import plots
    from workbench.console import say
    from workbench.files import write_text
    from workbench.results import read_parquet

    if not records.exists():
        raise _missing(records)
    write_text(out, plots.html(plots.plot(read_parquet([records])), whole=True))
    say(f"figure: {out}")


@app.command()
def view(
    link: Annotated[
        str, typer.Argument(help="A page's address or its end, e.g. 'depth?metric=sink_mass&a=text-resformer-s0'.")
    ],
    out: Annotated[
        Path, typer.Option(help="The file; its ending says what: .html, .svg, .png, .csv, .parquet, .json.")
    ] = Path("view.html"),
    only: Annotated[str | None, typer.Option(help="One view of the page; pictures hold one.")] = None,
    play: Annotated[bool, typer.Option("--play", help="A time-lapse over the checkpoints of model A (.html).")] = False,
    runs: Runs = None,
) -> None:
    """Draw what a page of the dashboard shows, from its link: a figure for a paper, a table, an offline page."""
    from workbench.console import say, status
    from workbench.runs import runs_folder
    from workbench.views import Link, Source
    from workbench.views.writing import write

    chosen, ask = Link.parse(link), Source(runs_folder(runs))
    told = f'workbench view "{chosen}"{f" --only {only}" if only else ""}{" --play" if play else ""} --out {shlex.quote(str(out))}'
    told += "" if runs is None else f" --runs {shlex.quote(str(runs))}"
    with status("drawing"):
        path, reasons = write(ask, chosen, out, only=only, play=play, command=told)
    for name, why in {**ask.problems, **reasons}.items():
        say(f"left out: {name}: {why}")
    say(f"view: {path}")


@app.command()
def report(
    runs: Runs = None,
    out: Annotated[Path | None, typer.Option(help="The page; <runs>/report.html unless given.")] = None,
) -> None:
    """Write one offline HTML page: figures, tables, provenance, and what was not checkable at this size."""
    from workbench.console import say
    from workbench.report import write_report
    from workbench.runs import runs_folder

    folder = runs_folder(runs)
    say(f"report: {write_report(folder, out or folder / 'report.html')}")


@app.command()
def analyze(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Runs, or folders of runs; the runs folder unless given.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for tables, figures and the page.")] = Path("results"),
    question: Annotated[
        list[str] | None, typer.Option(help="A name from `workbench list claims`; repeat for more, all unless given.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Text for runs that came without data.")] = None,
    n: Annotated[int, typer.Option(min=1, help="Documents at most.")] = 64,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one for each core unless given.")] = None,
    png: Annotated[
        bool, typer.Option("--png", help="Draw the figures as PNG too; needs Chrome, Chromium or Edge.")
    ] = False,
    svg: Annotated[bool, typer.Option("--svg", help="Draw the figures as SVG too; needs the same.")] = False,
    runs: Runs = None,
    as_json: Json = False,
) -> None:
    """Say for each claim of the field what these runs decide, with tables, figures and one offline page.

    What was measured before is not run again; Ctrl-C stops and the same command goes on.
    """
    import os

    from workbench.analysing import analyse, verdicts, write_figures, write_tables
    from workbench.claimspage import write_page
    from workbench.console import say, status
    from workbench.runs import runs_folder

    chosen = list(paths or [runs_folder(runs)])
    with status("measuring") as told:
        found = analyse(
            chosen, questions=question, data=data, n=n, workers=workers or min(os.cpu_count() or 1, 8),
            told=lambda done, total, name: told(f"measured {done} of {total} runs, last {name}"),
        )  # fmt: skip
        told("writing")
        write_tables(found, out)
        page = write_page(found, out, f"workbench analyze {' '.join(map(str, chosen))} --out {out}")
        write_figures(found, out, png=png, svg=svg)
    if as_json:
        print(verdicts(found).to_json(orient="records"))
        return
    for j in found.judged:
        say(f"{j.claim.name}: {j.verdict.said}. {j.verdict.sentence}")
    for name, why in found.problems.items():
        say(f"left out: {name}: {why}")
    say(f"page: {page}")


@app.command()
def xray(
    path: Annotated[Path, typer.Argument(help="A run, its name, or any checkpoint `load` opens.")],
    data: Annotated[
        Path | None, typer.Option(help="Text or .bin token ids to look on; a run has its own validation documents.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The page; <name>-xray.html unless given. The PNG stands beside it.")
    ] = None,
    n: Annotated[int, typer.Option(min=4, help="Documents.")] = 32,
    length: Annotated[int | None, typer.Option("--tokens", min=2, help="Tokens of each document.")] = None,
    png: Annotated[bool, typer.Option(help="Draw the page as a PNG too; needs Chrome, Chromium or Edge.")] = True,
    runs: Runs = None,
    device: Device = None,
) -> None:
    """Answer four questions about one model: concentration, sinks, what deep values carry, would a value residual help."""
    from workbench.browser import find_browser
    from workbench.console import say, status
    from workbench.runs import runs_folder
    from workbench.xrays import xray as look

    named = runs_folder(runs) / path
    thing = path if path.exists() or not named.exists() else named
    with status(f"measuring {thing.name}") as told:
        found = look(thing, data, n=n, T=length, device=device, progress=told)
    say(str(found))
    drawn = png and find_browser() is not None
    for written in found.save(out or Path(f"{thing.stem}-xray.html"), png=drawn):
        say(f"written: {written}")
    if png and not drawn:
        say(
            "no PNG: no Chrome, Chromium or Edge found (set WORKBENCH_BROWSER to one); the page works offline in any browser"
        )


@app.command(name="app")
def dashboard(runs: Runs = None, port: Annotated[int, typer.Option(help="Port on 127.0.0.1.")] = 8501) -> None:
    """Show the dashboard on 127.0.0.1 until Ctrl-C."""
    from workbench.runs import runs_folder
    from workbench.serving import make_folder, serve, wait

    folder = runs_folder(runs)
    make_folder(folder)
    wait(serve(folder, port))


@app.command(name="list")
def list_things(
    what: Annotated[
        str, typer.Argument(help="architectures, metrics, interventions, presets, claims or runs.")
    ] = "runs",
    runs: Runs = None,
    as_json: Json = False,
) -> None:
    """List what can be named: architectures with their options, metrics, interventions, presets, claims, or the runs."""
    from workbench.console import say, table
    from workbench.listing import LISTINGS, listing
    from workbench.runs import runs_folder

    frame, notes = listing(what, runs_folder(runs)) if what in LISTINGS else listing(what, Path())
    if as_json:
        print(frame.to_json(orient="records"))
        return
    table(frame)
    for note in notes:
        say(note)


def _settings(pairs: list[str] | None, kind: str) -> dict[str, Any]:
    """`key=value` arguments as a dictionary; values are read as JSON where they are, else as text."""
    from workbench.errors import WorkbenchError

    found: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise WorkbenchError(f"--{kind} {pair!r}: write it as key=value")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def _ids(text: str) -> list[int]:
    from workbench.errors import BadData

    words = text.replace(",", " ").split()
    if not words or not all(word.isdigit() for word in words):
        raise BadData(f"--prompt {text!r}: this model came without a tokenizer, so write token ids as '3 14 15'")
    return [int(word) for word in words]


def _steps(text: str) -> Any:
    parts = text.split(",")
    return [int(p) for p in parts] if all(p.strip().isdigit() for p in parts) else text


def _write(frame: Any, out: Path) -> None:
    from workbench.errors import UnknownName
    from workbench.files import write_text
    from workbench.results import write_parquet

    writers = {
        ".parquet": lambda: write_parquet(frame, out),
        ".csv": lambda: write_text(out, frame.to_csv(index=False)),
        ".json": lambda: write_text(out, frame.to_json(orient="records")),
    }
    if out.suffix not in writers:
        raise UnknownName("file ending", out.suffix, writers)
    writers[out.suffix]()


def _missing(path: Path) -> Exception:
    from workbench.errors import BadData

    return BadData(f"{path} does not exist")


def _terminated(*_: Any) -> None:
    """Being asked to end is Ctrl-C for this process and for the workers, which the terminal would have told itself."""
    import multiprocessing
    import os

    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, signal.SIGINT)
    raise KeyboardInterrupt("ended; the same command goes on from here")


_standard = warnings.formatwarning


def _one_sentence(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> str:
    """Our own warnings as a sentence; a line of code says nothing to who typed a command."""
    ours = category.__module__ == "workbench.errors"
    return f"workbench: {message}\n" if ours else _standard(message, category, *where, **more)


def main() -> None:
    """Run a command; what a user can cause is one sentence on stderr and exit code 2, Ctrl-C is 130."""
    from workbench.errors import WorkbenchError

    signal.signal(signal.SIGTERM, _terminated)
    warnings.formatwarning = _one_sentence
    try:
        app()
    except WorkbenchError as error:
        print(f"workbench: {error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:
        stop = getattr(end.__context__, "__cause__", None)  # typer turns Ctrl-C into exit code 130 and says nothing
        if isinstance(stop, KeyboardInterrupt):
            print(f"workbench: {str(stop) or 'stopped; the same command goes on from here'}", file=sys.stderr)
        raise


if __name__ == "__main__":
    main()
