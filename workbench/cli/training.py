"""Commands that train: demo, train, study; and estimate, which says how much memory that takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.arguments import (
    ArchitectureName,
    Device,
    Json,
    ModelKeys,
    On,
    OneWorker,
    Options,
    Out,
    PresetName,
    Quiet,
    RecipeKeys,
    Runs,
    Workers,
    app,
    key_values,
)
from workbench.places import studies

if TYPE_CHECKING:
    from workbench.console import Task

SOURCES = "Text, .jsonl, .parquet or token .bin files, folders, datasets:NAME, library: (this Python's); else the embedded text."
StudyFile = Annotated[
    str, typer.Argument(help="A name from `workbench list studies`, or a .toml file.", autocompletion=studies)
]
Texts = Annotated[list[Path] | None, typer.Option(help=SOURCES)]


@app.command()
def demo(
    runs: Runs = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny trainings, to see that everything works.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Train the race to induction and three models on text too.")
    ] = False,
    text: Annotated[bool, typer.Option("--text", help="As --full, with all models on text and every seed.")] = False,
    show: Annotated[bool, typer.Option("--app/--no-app", help="Show the dashboard while the models train.")] = True,
    port: Annotated[int, typer.Option(help="Port of the dashboard on 127.0.0.1.")] = 8501,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each architecture.")] = 3,
    workers: Workers = None,
    on: On = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Train small models, measure attention sinks, write a report, and show the results on the dashboard.

    Finished models are reused. Ctrl-C stops; the same command resumes.
    """
    from workbench.cli.serving import make_folder, serve, stop, wait
    from workbench.runs.run import runs_folder

    folder = runs_folder(runs)
    make_folder(folder)
    server = serve(folder, port) if show else None  # first: it starts while what follows is imported
    try:
        from workbench.console import progress, say

        page = folder / "report.html"
        with progress("training and measuring") as task:
            from workbench.reports.folder import up_to_date, write_report
            from workbench.studies.demo import run_demo

            run_demo(
                folder, seeds=seeds, quick=quick, full=full, text=text, workers=on or workers, device=device,
                progress=_models(task),
            )  # fmt: skip
            if not up_to_date(page, folder):
                task(task.done, what="writing the report")
                write_report(folder, page)
        say(f"report: {page}")
        if server is not None:
            wait(server)
    finally:
        if server is not None:
            stop(server)


def _models(task: Task) -> Callable[[dict[str, Any]], None]:
    """How far the models of a study or the demo are, as progress."""

    def told(status: dict[str, Any]) -> None:
        failed = f"{len(status['failed'])} failed" if status["failed"] else ""
        task(len(status["ready"]), len(status["models"]), failed, status["left_s"])

    return told


@app.command()
def train(
    architecture: ArchitectureName,
    preset: PresetName = "tiny",
    name: Annotated[str | None, typer.Option(help="Run folder; architecture, preset and seed unless given.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and data order.")] = 0,
    text: Texts = None,
    task: Annotated[str, typer.Option(help="text, repeated (random tokens repeated once) or backcopy.")] = "text",
    shortest: Annotated[
        int | None, typer.Option(help="Task repeated: draw each period from this to half the length, not fixed.")
    ] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Size of the tokenizer's vocabulary.")] = None,
    bos: Annotated[str | None, typer.Option(help="first: begin each document with a start token.")] = None,
    option: Options = None,
    model: ModelKeys = None,
    recipe: RecipeKeys = None,
    log: Annotated[
        list[str] | None, typer.Option(help="Tell a tracker too, as it trains: wandb, tensorboard or mlflow.")
    ] = None,
    runs: Runs = None,
    device: Device = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train one model, or go on where an interrupted training of the same name stopped."""
    from workbench.config import PRESETS, ModelConfig
    from workbench.console import progress, say
    from workbench.models import architecture as find_architecture
    from workbench.runs.run import runs_folder
    from workbench.training.loop import train as run_training

    shape = ModelConfig.of(preset)  # refuse before the corpus is built
    find_architecture(architecture)
    folder, chosen, options = runs_folder(runs), PRESETS[preset], key_values(option, "option")
    sizes, settings = key_values(model, "model"), chosen.train.replace(**key_values(recipe, "recipe"))
    vocabulary = vocabulary or sizes.get("d_vocab")
    data = _data_of(task, text, vocabulary, shortest, bos, default=chosen.vocabulary, runs=folder)
    config = shape.replace(**({"d_vocab": data.d_vocab} | sizes))
    run_name = name or f"{architecture}-{preset}-s{seed}"
    with progress(run_name, settings.steps) as bar:
        run = run_training(
            architecture, data, name=run_name, runs=folder, model=config, train=settings, seed=seed, device=device, log=log or (),
            progress=lambda step, loss, rate: bar(step, what=f"loss {loss:.3f} nats, {rate:,.0f} tokens/s"), **options,
        )  # fmt: skip
    losses = run.telemetry(f"metric == 'validation_loss' and step == {settings.steps}")
    if as_json:
        print(losses[["run", "data", "step", "value", "se", "n", "unit"]].to_json(orient="records"))
        return
    for row in losses.itertuples():
        say(f"{row.data}: validation loss {row.value:.4f} nats (se {row.se:.4f}, {row.n} documents)")
    say(f"run: {run.path}")


def _data_of(
    task: str,
    text: list[Path] | None,
    vocabulary: int | None,
    shortest: int | None,
    bos: str | None,
    *,
    default: int,
    runs: Path,
) -> Any:
    """The sequences to train on: a synthetic task, files of token ids, or text with a tokenizer of its own."""
    from workbench.data.sources import BackcopyData, RepeatedData, open_tokens, prepare
    from workbench.errors import UnknownName
    from workbench.runs.run import CORPORA

    if task not in ("text", "repeated", "backcopy"):
        raise UnknownName("task", task, ["text", "repeated", "backcopy"])
    if task == "repeated":
        return RepeatedData(vocabulary or 64, shortest)
    if task == "backcopy":
        return BackcopyData(vocabulary or 64)
    if text and all(path.suffix == ".bin" for path in text):
        return open_tokens(text, vocabulary)
    return prepare(texts=text, vocabulary=vocabulary or default, bos=bos, root=runs / CORPORA)


@app.command(name="study")
def run_study(
    study: StudyFile,
    runs: Runs = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few steps of tiny models, to see that it works.")] = False,
    workers: Workers = None,
    on: On = None,
    out: Annotated[Path, Out(help="Folder for the tables (.parquet).")] = Path("results"),
    device: Device = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train the runs of a study file that are not there yet, and compare its cells over seeds.

    Ctrl-C stops and the same command goes on; a run that fails is told at the end, after all others.
    """
    from workbench.console import progress, say, table
    from workbench.errors import WorkbenchError
    from workbench.runs.run import runs_folder
    from workbench.studies.runner import keep, run_study, summary
    from workbench.studies.study_file import find_study, read_study

    asked, folder = read_study(find_study(study)), runs_folder(runs)
    with progress(asked.name) as task:
        frame = run_study(asked, folder, quick=quick, workers=on or workers, device=device, progress=_models(task))
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
def ship(
    study: StudyFile,
    runs: Runs = None,
    out: Annotated[Path, Out(help="Folder of evidence; the study's own is made in it.")] = Path("data/evidence"),
    question: Annotated[
        list[str] | None, typer.Option(help="Whose claims are measured, see `workbench list claims`; all unless given.")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="Of the code that trained it; this one's unless given.")] = None,
    weights: Annotated[list[int] | None, typer.Option(help="Steps whose weights ship too, in bfloat16.")] = None,
    workers: OneWorker = 1,
    on: On = None,
    quiet: Quiet = False,
) -> None:
    """Keep a finished study as evidence: its runs without weights (or with some steps'), readable wherever runs are.

    What the claims need is measured first: of what ships nothing is measured and kept later.
    """
    from workbench.console import progress, say
    from workbench.runs.run import runs_folder
    from workbench.studies.shipping import ship as keep_as_evidence
    from workbench.studies.study_file import find_study, read_study

    file = find_study(study)
    with progress("measuring") as task:
        place = keep_as_evidence(
            read_study(file), file, runs_folder(runs), out, questions=question, commit=commit, weights=weights or (),
            workers=on or workers, progress=task,
        )  # fmt: skip
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    say(f"evidence: {place} ({size / 2**20:.1f} MiB)")


@app.command()
def estimate(
    architecture: ArchitectureName,
    preset: PresetName = "tiny",
    metric: Annotated[
        list[str] | None, typer.Option("--metric", "-m", help="Estimate measuring these instead of training.")
    ] = None,
    option: Options = None,
    model: ModelKeys = None,
    recipe: RecipeKeys = None,
    n: Annotated[int, typer.Option(min=1, help="Documents to measure.")] = 64,
    length: Annotated[int | None, typer.Option("-T", "--length", min=2, help="Tokens of each document.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Documents at a time while measuring.")] = 8,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Say how much memory a training will need, or with -m a measurement, before it runs."""
    from workbench.config import PRESETS, ModelConfig
    from workbench.console import progress, table
    from workbench.measurement.memory_estimate import measuring_memory
    from workbench.training.memory_estimate import training_memory

    shape = ModelConfig.of(preset).replace(**key_values(model, "model"))
    train, options = PRESETS[preset].train.replace(**key_values(recipe, "recipe")), key_values(option, "option")
    with progress("estimating") as task:
        if metric:
            T = length or train.T
            frame = measuring_memory(architecture, shape, metric, n=n, T=T, batch=batch, progress=task, **options)
        else:
            frame = training_memory(architecture, shape, train, **options)
    if as_json:
        print(frame.to_json(orient="records"))
    else:
        table(frame)
