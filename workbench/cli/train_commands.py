"""Commands that train: demo, train, study, ship; and estimate, for the memory that a training needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from workbench.cli.arguments import (
    ArchitectureName,
    Device,
    Documents,
    Json,
    Measures,
    ModelKeys,
    On,
    OneWorker,
    Options,
    Out,
    Port,
    PresetName,
    RecipeKeys,
    Runs,
    Workers,
    app,
    checked_argument,
    key_values,
    print_result,
)
from workbench.places import studies

if TYPE_CHECKING:
    from workbench.console import Task

SOURCES = (
    "Text, .jsonl, .parquet or token .bin files, folders, datasets:NAME, installed:PACKAGE; default the embedded text."
)
StudyFile = Annotated[str, Argument(help="A name of `workbench list studies`, or a TOML file.", autocompletion=studies)]
Texts = Annotated[list[Path] | None, Option(help=SOURCES)]


@app.command()
def demo(
    runs: Runs = None,
    quick: Annotated[bool, Option("--quick", help="Train tiny models, to check that everything works.")] = False,
    full: Annotated[bool, Option("--full", help="Also train the race to induction and three models on text.")] = False,
    everything: Annotated[bool, Option("--all", help="As --full, with all models on text and all seeds.")] = False,
    with_app: Annotated[bool, Option("--app/--no-app", help="Show the dashboard while the models train.")] = True,
    port: Port = 8501,
    seeds: Annotated[int, Option(min=1, help="Seeds per architecture.")] = 3,
    workers: Workers = None,
    on: On = None,
    device: Device = None,
) -> None:
    """Train small models, measure attention sinks, write a report, and show the results on the dashboard.

    Finished models are reused. Ctrl-C stops; the same command resumes.
    """
    from workbench.cli.dashboard_process import make_folder, serve, stop, wait
    from workbench.runs.run import runs_folder

    folder = runs_folder(runs)
    make_folder(folder)
    server = serve(folder, port) if with_app else None  # first: it starts during the imports below
    try:
        from workbench.console import progress, say

        page = folder / "report.html"
        with progress("training and measuring") as task:
            from workbench.reports.runs_report import up_to_date, write_report
            from workbench.studies.demo import run_demo

            run_demo(
                folder, seeds=seeds, quick=quick, full=full, text=everything, workers=on or workers, device=device,
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
    """Return a function that shows the status of a study or the demo as progress."""

    def update(status: dict[str, Any]) -> None:
        failed = f"{len(status['failed'])} failed" if status["failed"] else ""
        task(
            len(status["ready"]),
            len(status["models"]),
            failed,
            math.inf if status["left_s"] is None else status["left_s"],
        )

    return update


@app.command(name="train")
def train_command(
    architecture: ArchitectureName,
    preset: PresetName = "tiny",
    name: Annotated[str | None, Option(help="Name of the run; default ARCHITECTURE-PRESET-sSEED.")] = None,
    seed: Annotated[int, Option(min=0, help="Seed of weights and data order.")] = 0,
    text: Texts = None,
    task: Annotated[
        str, Option(callback=checked_argument, help="text, repeated (random tokens repeated once) or backcopy.")
    ] = "text",
    shortest: Annotated[int | None, Option(help="Task repeated: draw periods from this to half the length.")] = None,
    vocabulary: Annotated[int | None, Option(help="Size of the tokenizer's vocabulary.")] = None,
    bos: Annotated[
        str | None, Option(help="each: begin every sequence with a start token. first: begin each document with one.")
    ] = None,
    option: Options = None,
    model: ModelKeys = None,
    recipe: RecipeKeys = None,
    log: Annotated[list[str] | None, Option(help="Also log to a tracker: wandb, tensorboard or mlflow.")] = None,
    runs: Runs = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Train one model, or resume an interrupted training of the same name."""
    from workbench.config import PRESETS, ModelConfig

    sizes, settings = key_values(model, "model"), PRESETS[preset].train.replace(**key_values(recipe, "recipe"))
    ModelConfig.of(preset).replace(**sizes)  # refuse before the imports and the corpus
    options = key_values(option, "option")

    from workbench.console import print_json, progress, say
    from workbench.data.data_sources import BackcopyData, RepeatedData, open_tokens, prepare
    from workbench.runs.run import CORPORA, runs_folder
    from workbench.training.loop import train as run_training

    folder, vocabulary = runs_folder(runs), vocabulary or sizes.get("d_vocab")
    if task == "repeated":
        data: Any = RepeatedData(vocabulary or 64, shortest)
    elif task == "backcopy":
        data = BackcopyData(vocabulary or 64)
    elif text and all(path.suffix == ".bin" for path in text):
        data = open_tokens(text, vocabulary)
    else:
        data = prepare(texts=text, vocabulary=vocabulary or PRESETS[preset].vocabulary, bos=bos, root=folder / CORPORA)
    config = ModelConfig.of(preset).replace(**({"d_vocab": data.d_vocab} | sizes))
    run_name = name or f"{architecture}-{preset}-s{seed}"
    with progress(run_name, settings.steps) as bar:
        run = run_training(
            architecture, data, name=run_name, runs=folder, model=config, train=settings, seed=seed, device=device, log=log or (),
            progress=lambda step, loss, rate: bar(step, what=f"loss {loss:.3f} nats, {rate:,.0f} tokens/s"), **options,
        )  # fmt: skip
    losses = run.telemetry(f"metric == 'validation_loss' and step == {settings.steps}")
    if as_json:
        print_json(losses[["run", "data", "step", "value", "se", "n", "unit"]])
        return
    for row in losses.itertuples():
        say(f"{row.data}: validation loss {row.value:.4f} nats (se {row.se:.4f}, {row.n} documents)")
    say(f"run: {run.path}")


@app.command(name="study")
def study_command(
    study: StudyFile,
    runs: Runs = None,
    quick: Annotated[bool, Option("--quick", help="Train tiny models for a few steps, to see that it works.")] = False,
    workers: Workers = None,
    on: On = None,
    out: Annotated[Path, Out(help="Folder for the tables (.parquet).")] = Path("results"),
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Train the missing runs of a study, and compare its cells over seeds.

    Ctrl-C stops; the same command resumes. Runs that fail are reported at the end.
    """
    from workbench.console import note, print_json, print_table, progress
    from workbench.errors import WorkbenchError
    from workbench.runs.run import runs_folder
    from workbench.studies.study_file import find_study, read_study
    from workbench.studies.study_runs import keep, run_study, summary

    plan, folder = read_study(find_study(study)), runs_folder(runs)
    with progress(plan.name) as task:
        frame = run_study(plan, folder, quick=quick, workers=on or workers, device=device, progress=_models(task))
    cells = summary(plan, frame)
    if as_json:
        print_json(cells)
    else:
        note(plan.question)
        print_table(cells)
    for path in keep(plan, frame, folder, out):
        note(f"written: {path}")
    if len(broken := frame[frame["failed"] != ""]):
        first = broken.iloc[0]
        raise WorkbenchError(f"{len(broken)} of {len(frame)} runs failed, first {first['run']}: {first['failed']}")


@app.command(name="ship")
def ship_command(
    study: StudyFile,
    runs: Runs = None,
    out: Annotated[Path, Out(help="Folder of evidence. The study gets a folder in it.")] = Path("data/evidence"),
    question: Annotated[
        list[str] | None, Option(help="Measure only claims of this question of `workbench list claims`.")
    ] = None,
    commit: Annotated[str | None, Option(help="Commit of the training code; default the present one.")] = None,
    weights: Annotated[list[int] | None, Option(help="Steps whose weights are stored too, in bfloat16.")] = None,
    workers: OneWorker = 1,
    on: On = None,
    as_json: Json = False,
) -> None:
    """Store a finished study as evidence: its runs without weights, or with the weights of a few steps.

    Everything that the claims need is measured first, because shipped runs are read-only.
    """
    from workbench.console import progress
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
    print_result(as_json, f"evidence: {place} ({size / 2**20:.1f} MiB)", evidence=place, bytes=size)


@app.command()
def estimate(
    architecture: ArchitectureName,
    preset: PresetName = "tiny",
    metric: Annotated[list[str] | None, Measures(help="Estimate a measurement of these instead of a training.")] = None,
    option: Options = None,
    model: ModelKeys = None,
    recipe: RecipeKeys = None,
    documents: Documents = 64,
    length: Annotated[int | None, Option("--length", "-T", min=2, help="Tokens per document.")] = None,
    batch: Annotated[int, Option(min=1, help="Documents per batch of a measurement.")] = 8,
    as_json: Json = False,
) -> None:
    """Estimate the memory of a training, or with -m of a measurement."""
    from workbench.config import PRESETS, ModelConfig
    from workbench.console import print_json, print_table, progress
    from workbench.measurement.measuring_memory import measuring_memory
    from workbench.training.training_memory import training_memory

    shape = ModelConfig.of(preset).replace(**key_values(model, "model"))
    train, options = PRESETS[preset].train.replace(**key_values(recipe, "recipe")), key_values(option, "option")
    with progress("estimating") as task:
        if metric:
            how: dict[str, Any] = {"n": documents, "T": length or train.T, "batch": batch, "progress": task}
            frame = measuring_memory(architecture, shape, metric, **how, **options)
        else:
            frame = training_memory(architecture, shape, train, **options)
    if as_json:
        print_json(frame)
    else:
        print_table(frame)
