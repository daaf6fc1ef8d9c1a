"""Commands on checkpoints and runs as others keep them: import, export, push, export-log; and generate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.arguments import (
    Device,
    Download,
    Options,
    Quiet,
    Revision,
    Runs,
    Step,
    app,
    fetch,
    key_values,
    step_of,
)


@app.command(name="import")
def import_checkpoints(
    path: Annotated[
        str, typer.Argument(help="A checkpoint, or a series: a folder, a glob, a pattern with (?P<step>...).")
    ],
    name: Annotated[
        str | None, typer.Option("--as", help="Run folder; the checkpoint's or its folder's name unless given.")
    ] = None,
    architecture: Annotated[str | None, typer.Option(help="What the files do not say, e.g. resformer.")] = None,
    option: Options = None,
    config: Annotated[list[str] | None, typer.Option(help="Config key the files do not say, e.g. n_heads=8.")] = None,
    builder: Annotated[
        str | None,
        typer.Option(help="Your own code: package.module:function(settings) -> the module the weights fill."),
    ] = None,
    key: Annotated[str, typer.Option(help="Where the weights lie in a PyTorch file, e.g. ema or nets.student.")] = "",
    strip_prefix: Annotated[
        str, typer.Option(help="Prefix of the tensors to read, e.g. net.; others are left out.")
    ] = "",
    seed: Annotated[int | None, typer.Option(min=0, help="Tells runs of one model apart.")] = None,
    revision: Revision = "",
    download: Download = False,
    runs: Runs = None,
    quiet: Quiet = False,
) -> None:
    """Import checkpoints as a run, to measure it and show it on the dashboard. Files are never unpickled."""
    from workbench.console import progress, say
    from workbench.environment import BUILDERS
    from workbench.runs.importing import import_run
    from workbench.runs.run import runs_folder

    path = str(fetch(Path(path), download, revision)) if revision or download else path
    settings = key_values(option, "option")
    with progress("reading") as task:
        run = import_run(
            path, runs_folder(runs), name=name, architecture=architecture, config=key_values(config, "config"), builder=builder,
            seed=seed, progress=task, key=key, strip_prefix=strip_prefix, **settings,
        )  # fmt: skip
    say(f"run: {run.path} ({run.architecture}, steps {', '.join(map(str, run.steps))})")
    if builder:
        say(f"to open it: {BUILDERS}={builder} workbench app")


@app.command()
def export(
    path: Annotated[Path, typer.Argument(help="A run or a checkpoint of a transformer.")],
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    step: Step = "last",
) -> None:
    """Write a vanilla model as a plain Hugging Face directory: the same logits in transformers."""
    from workbench.checkpoints.opening import load
    from workbench.checkpoints.saving import export as write
    from workbench.console import say

    say(f"exported: {write(load(path, step=step_of(step)), out)}")


@app.command()
def push(
    path: Annotated[str, typer.Argument(help="A run.")],
    repo: Annotated[str, typer.Argument(help="A repository of the Hugging Face Hub, as me/resformer-tiny.")],
    step: Step = "last",
    private: Annotated[bool, typer.Option("--private", help="Where the repository is made: for nobody else.")] = False,
    harness: Annotated[
        Path | None, typer.Option(help="Results of lm-evaluation-harness; <run>/harness.json unless given.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Put a step on the Hugging Face Hub, with a card: architecture, formula, options, losses over seeds, evaluation."""
    from workbench.console import progress, say
    from workbench.reports.model_card import push_to_hub
    from workbench.runs.run import Run

    with progress(f"putting {path} up"):
        address = push_to_hub(Run.open(path), repo, step_of(step), private=private or None, harness=harness)
    say(f"pushed: {address}")


@app.command(name="export-log")
def export_log(
    path: Annotated[str, typer.Argument(help="A run.")],
    to: Annotated[str, typer.Option(help="wandb, tensorboard or mlflow.")],
    metric: Annotated[
        list[str] | None, typer.Option("--metric", "-m", help="These alone, by head and position too; repeat for more.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Hand what is written down of a run, telemetry and records, to a tracker of yours."""
    from workbench.console import progress, say
    from workbench.runs.run import Run
    from workbench.runs.trackers import export_log as hand_on

    with progress(f"{path} to {to}"):
        numbers = hand_on(Run.open(path), to, metric)
    say(f"handed on: {numbers} numbers of {path} to {to}")


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
    step: Step = "last",
    device: Device = None,
    revision: Revision = "",
    download: Download = False,
) -> None:
    """Continue a text, token by token."""
    from workbench.checkpoints.opening import load

    path = fetch(path, download, revision)
    model = load(path, step=step_of(step), device=device)
    start, texts = (prompt, True) if model.tokenizer else (_ids(prompt), False)
    pieces = model.stream(
        start, tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop, use_cache=model.caches
    )
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece if texts else f" {piece}", end="", flush=True)
    print()


def _ids(text: str) -> list[int]:
    from workbench.errors import BadData

    words = text.replace(",", " ").split()
    if not words or not all(word.isdigit() for word in words):
        raise BadData(f"--prompt {text!r}: this model came without a tokenizer, so write token ids as '3 14 15'")
    return [int(word) for word in words]
