"""Commands on checkpoints and runs of other tools: import, coefficients, export, push, export-log; and generate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from workbench.cli.arguments import (
    ConfigKeys,
    Device,
    Download,
    Json,
    Options,
    Out,
    Revision,
    RunOrModel,
    Runs,
    Step,
    app,
    fetch,
    key_values,
    print_result,
    step_of,
)


@app.command(name="import")
def import_checkpoints(
    paths: Annotated[
        list[str],
        RunOrModel(
            help="A checkpoint, or several: a folder, a glob, a pattern with (?P<step>...). Or training logs and folders of logs.",
            metavar="PATH...",
        ),
    ],
    name: Annotated[str | None, Option("--name", help="Name of the run; default the file's or folder's name.")] = None,
    architecture: Annotated[
        str | None, Option(help="Architecture, if the files lack it: resformer. Of logs also SETTING=NAME,RUN=NAME.")
    ] = None,
    option: Options = None,
    config: ConfigKeys = None,
    builder: Annotated[
        str | None,
        Option(help="Your own code as package.module:function; function(settings) returns the module to load into."),
    ] = None,
    key: Annotated[str, Option(help="Key of the weights in a PyTorch file: ema or nets.student.")] = "",
    strip_prefix: Annotated[str, Option(help="Read only tensors with this prefix, and remove it: net.")] = "",
    seed: Annotated[int | None, Option(min=0, help="Seed of the training, which groups runs of one model.")] = None,
    revision: Revision = "",
    download: Download = False,
    runs: Runs = None,
    as_json: Json = False,
) -> None:
    """Import checkpoints as a run, or training logs as runs without weights. Files are never unpickled.

    With logs, --config gives the known facts of the training: parameters, tokens_per_step, warmup, lr.
    """
    from workbench.console import note, progress
    from workbench.environment import BUILDERS
    from workbench.errors import WorkbenchError
    from workbench.runs.checkpoint_import import import_run
    from workbench.runs.log_import import import_logs, is_log
    from workbench.runs.run import runs_folder

    if all(map(is_log, paths)):
        for option_name, value in {"option": option, "builder": builder, "key": key or None, "seed": seed}.items():
            if value is not None:
                raise WorkbenchError(f"--{option_name} is for checkpoints; these are training logs")
        facts, folder, of_log = key_values(config, "config"), runs_folder(runs), dict[str, str]()
        if "=" in (architecture or ""):  # by setting: base=transformer,vr=resformer
            pairs = [part.rpartition("=") for part in str(architecture).split(",")]
            of_log = {key.strip(): value.strip() for key, _, value in pairs}
        named = of_log or architecture
        with progress("reading") as task:
            logs = import_logs(paths, folder, name=name, architecture=named, config=facts, progress=task)
        some = ", ".join(run.name for run in logs.runs[:6]) + (" and others" if len(logs.runs) > 6 else "")
        line = f"runs: {len(logs.runs)} without weights in {logs.runs[0].path.parent}: {some}"
        print_result(as_json, line, runs=[run.path for run in logs.runs], notes=list(logs.notes))
        for told in () if as_json else logs.notes:
            note(told)
        return
    if len(paths) > 1:
        first = next(p for p in paths if not is_log(p))
        raise WorkbenchError(f"{first} is no training log; checkpoints are imported one path at a time")
    (path,) = paths
    path = str(fetch(Path(path), download, revision)) if revision or download else path
    settings = key_values(option, "option")
    with progress("reading") as task:
        run = import_run(
            path, runs_folder(runs), name=name, architecture=architecture, config=key_values(config, "config"), builder=builder,
            seed=seed, progress=task, key=key, strip_prefix=strip_prefix, **settings,
        )  # fmt: skip
    line = f"run: {run.path} ({run.architecture}, steps {', '.join(map(str, run.steps))})"
    print_result(as_json, line, run=run.path, architecture=run.architecture, steps=run.steps)
    if builder:
        note(f"to open it: {BUILDERS}={builder} workbench app")


@app.command(name="coefficients")
def coefficients_command(
    path: Annotated[str, RunOrModel(help="A run, a checkpoint or the URL of one (hf://owner/name).")],
    out: Annotated[Path | None, Out(help="Write the numbers to this file: .parquet, .arrow, .csv or .json.")] = None,
    as_json: Json = False,
) -> None:
    """Print the learned depth weights of a checkpoint, read from its small tensors alone: lambdas, attention residuals, gates.

    Known are the names of our architectures, nanochat, modded-nanogpt and Kimi K3. From a URL only the needed bytes are fetched.
    """
    from workbench.checkpoints.coefficients import read_coefficients
    from workbench.console import json_rows, note, print_table
    from workbench.runs.tables import refuse_ending, write_table_as

    refuse_ending(out)
    result = read_coefficients(path)
    if out is not None:
        write_table_as(result.frame, out)
    elif not as_json:
        print_table(result.frame)
    line = f"{result.layout}: {len(result.frame)} numbers, {result.bytes_read:,} bytes read"
    print_result(
        as_json,
        line,
        layout=result.layout,
        bytes_read=result.bytes_read,
        notes=result.notes,
        coefficients=json_rows(result.frame),
    )
    for text in () if as_json else result.notes:
        note(text)


@app.command(name="export")
def export_command(
    path: Annotated[Path, RunOrModel(help="A run or a checkpoint of a transformer.")],
    out: Annotated[Path, Argument(help="A new folder.")],
    step: Step = "last",
    as_json: Json = False,
) -> None:
    """Write a vanilla transformer as a Hugging Face directory, with the same logits in transformers."""
    from workbench.checkpoints.loading import load
    from workbench.checkpoints.saving import export as write

    folder = write(load(path, step=step_of(step)), out)
    print_result(as_json, f"exported: {folder}", folder=folder)


@app.command(name="push")
def push_command(
    path: Annotated[str, RunOrModel(help="A run.")],
    repo: Annotated[str, Argument(help="A repository on the Hugging Face Hub: me/resformer-tiny.")],
    step: Step = "last",
    private: Annotated[bool, Option("--private", help="Make a new repository private.")] = False,
    harness: Annotated[
        Path | None, Option(help="lm-evaluation-harness results; default of the last step <run>/harness.json.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Upload a checkpoint to the Hugging Face Hub with a model card: formula, options, losses over seeds, evaluation."""
    from workbench.console import progress
    from workbench.reports.model_card import push_to_hub
    from workbench.runs.run import Run

    with progress(f"uploading {path}"):
        address = push_to_hub(Run.open(path), repo, step_of(step), private=private or None, harness=harness)
    print_result(as_json, f"pushed: {address}", url=address)


@app.command(name="export-log")
def export_log_command(
    path: Annotated[str, RunOrModel(help="A run.")],
    to: Annotated[str, Option(help="wandb, tensorboard or mlflow.")],
    metric: Annotated[
        list[str] | None,
        Option("--metric", "-m", help="Only these metrics, also per head and position; repeat it for several."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Export a run's telemetry and records to W&B, TensorBoard or MLflow."""
    from workbench.console import progress
    from workbench.runs.run import Run
    from workbench.runs.tracker_export import export_log as send

    with progress(f"{path} to {to}"):
        numbers = send(Run.open(path), to, metric)
    print_result(as_json, f"exported: {numbers} numbers of {path} to {to}", run=path, tracker=to, numbers=numbers)


@app.command(name="generate")
def generate_command(
    path: Annotated[Path, RunOrModel(help="A run or a checkpoint.")],
    prompt: Annotated[str, Option(help="Text to continue; without a tokenizer, token ids as '3 14 15'.")],
    tokens: Annotated[int, Option("-n", "--max-new-tokens", help="Largest number of new tokens.")] = 64,
    temperature: Annotated[float, Option(help="0 always takes the most likely token.")] = 1.0,
    top_k: Annotated[int | None, Option(help="Sample from this many most likely tokens.")] = None,
    top_p: Annotated[float | None, Option(help="Sample from the smallest set with this probability.")] = None,
    seed: Annotated[int | None, Option(help="Equal seeds give equal texts; default a new one each time.")] = None,
    stop: Annotated[list[str] | None, Option(help="Stop at this text; repeat it for several.")] = None,
    step: Step = "last",
    device: Device = None,
    revision: Revision = "",
    download: Download = False,
    as_json: Json = False,
) -> None:
    """Continue a text token by token."""
    from workbench.checkpoints.loading import load
    from workbench.errors import BadData

    path = fetch(path, download, revision)
    model = load(path, step=step_of(step), device=device)
    words = prompt.replace(",", " ").split()
    if not model.tokenizer and not (words and all(word.isdigit() for word in words)):
        raise BadData(f"--prompt {prompt!r}: this model has no tokenizer; write token ids as '3 14 15'")
    start = prompt if model.tokenizer else [int(word) for word in words]
    pieces = model.stream(start, tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop)
    texts = (str(piece) if model.tokenizer else f" {piece}" for piece in pieces)
    if as_json:
        print_result(True, "", prompt=prompt, text="".join(texts))
        return
    print(prompt, end="", flush=True)
    for text in texts:
        print(text, end="", flush=True)
    print()
