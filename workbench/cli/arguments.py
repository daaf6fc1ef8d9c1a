"""The application that commands register on, and arguments that several commands share, checked before PyTorch is imported."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

from workbench.errors import WorkbenchError, refuse_unknown
from workbench.places import SHIPPED

_SETTINGS = {"debug": False}
_DOCUMENTS_AND_TEXT = {"--n": "--documents", "--data": "--text"}
OLD_NAMES = {
    "measure": _DOCUMENTS_AND_TEXT,
    "analyze": _DOCUMENTS_AND_TEXT,
    "xray": _DOCUMENTS_AND_TEXT | {"--tokens": "--length"},
    "estimate": {"--n": "--documents"},
    "import": {"--as": "--name"},
    "demo": {"--text": "--all"},
}
"""Option names of version 0.2 by command, with their names today. Both are accepted; help shows the new ones."""
DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "npu")


TASKS = ("text", "repeated", "backcopy")


def show_tracebacks(debug: bool) -> None:
    """Print the full traceback of an error instead of one sentence."""
    _SETTINGS["debug"] = debug


def tracebacks_shown() -> bool:
    """Return True if the command runs with `--debug`."""
    return _SETTINGS["debug"]


def checked_argument(value: Any, param: typer.CallbackParam) -> Any:
    """Return the value of an argument, refused here if it is wrong: before the command imports PyTorch."""
    match param.name:
        case "quiet":
            from workbench.console import silence

            silence(value)
        case "out" if value:
            from workbench.file_io import writable

            writable(value)
        case "device" if value is not None and not re.fullmatch(rf"({'|'.join(DEVICES)})(:\d+)?", value):
            raise WorkbenchError(f"--device {value}: unknown device; use cpu, cuda, a number as in cuda:0, or mps")
        case "option" | "model" | "recipe" | "config":
            key_values(value, param.name)
        case "architecture":
            from workbench.models.architecture_names_and_colours import ARCHITECTURES

            for part in value.split("+"):
                refuse_unknown("architecture", part, ARCHITECTURES)
        case "preset":
            from workbench.config import ModelConfig

            ModelConfig.of(value)
        case "metric":
            from workbench.cli.list_tables import measures

            for name in value or ():
                refuse_unknown("metric", name, measures())
        case "task":
            refuse_unknown("task", value, TASKS)
        case "version" if value:
            from workbench import __version__

            print(f"workbench {__version__}")
            raise typer.Exit
    return value


_QUIET = Option("--quiet", "-q", callback=checked_argument, help="Show no progress.")
_DEBUG = Option("--debug", callback=show_tracebacks, is_eager=True, help="Show the full traceback of an error.")


@contextlib.contextmanager
def _usage() -> Iterator[None]:
    """Turn a usage error of the parser into a workbench error, which is printed as one sentence."""
    try:
        yield
    except Exception as error:  # the parser's error classes have several homes, one for each version of typer
        if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
            raise
        path = getattr(getattr(error, "ctx", None), "command_path", "workbench")
        raise WorkbenchError(f"{error.format_message().rstrip('.')}; see {path} --help") from error


class Group(TyperGroup):
    """The commands by their names."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        with _usage():
            return super().resolve_command(ctx, args)


class Command(TyperCommand):
    """A command that also accepts old option names."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names, end = OLD_NAMES.get(str(self.name), {}), args.index("--") if "--" in args else len(args)
        for i, word in enumerate(args[:end]):
            option, equals, value = word.partition("=")
            if option in names:
                typer.echo(
                    f"{option} is the old name of {names[option]}; the next version does not accept it", err=True
                )
                args[i] = names[option] + equals + value
        with _usage():
            given: list[Any] = self.make_parser(ctx).parse_args([*args])[2]
            for one in (p for p in given if p.param_type_name == "option" and not (p.multiple or p.is_flag)):
                if given.count(one) > 1:  # the parser would take the last one alone
                    raise WorkbenchError(f"{one.opts[0]} is given {given.count(one)} times; give it once")
            return super().parse_args(ctx, args)


class Application(typer.Typer):
    """An application whose commands all take `--quiet` and `--debug`."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        register = super().command(name, cls=Command, **settings)

        def registered(function: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(function)
            def run(*, quiet: bool, debug: bool, **arguments: Any) -> None:
                function(**arguments)

            signature = inspect.signature(function, eval_str=True)
            keyword = inspect.Parameter.KEYWORD_ONLY
            common = [
                inspect.Parameter(flag, keyword, default=False, annotation=Annotated[bool, option])
                for flag, option in (("quiet", _QUIET), ("debug", _DEBUG))
            ]
            parameters = [p.replace(kind=keyword) for p in signature.parameters.values()]
            run.__signature__ = signature.replace(parameters=[*parameters, *common])  # type: ignore[attr-defined]
            run.__annotations__ = {p.name: p.annotation for p in [*parameters, *common]}
            register(run)
            return function

        return registered


app = Application(
    name="workbench",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def workbench_command(
    version: Annotated[
        bool, Option("--version", "-V", callback=checked_argument, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """An interpretability workbench for value-residual transformers."""


def completing(module: str, names: str) -> Callable[[str], list[str]]:
    """Return a completion of the names that a module holds, imported when Tab is pressed."""

    def complete(incomplete: str) -> list[str]:
        known = getattr(importlib.import_module(module), names)
        return [name for name in (known() if callable(known) else known) if name.startswith(incomplete)]

    return complete


def runs_and_models(incomplete: str) -> list[str]:
    """Complete names of runs, of shipped models and of files."""
    folders = (SHIPPED / "models", Path(os.environ.get("WORKBENCH_RUNS") or "runs"))
    names = [entry.name for folder in folders if folder.is_dir() for entry in folder.iterdir() if entry.is_dir()]
    place = Path(incomplete if incomplete.endswith("/") else Path(incomplete).parent)
    paths = [str(path) for path in place.iterdir()] if place.is_dir() else []
    return sorted(name for name in {*names, *paths} if name.startswith(incomplete) and not name.startswith("."))


Out = functools.partial(Option, "--out", "-o", callback=checked_argument)
Runs = Annotated[Path | None, Option("--runs", help="Folder of runs; default $WORKBENCH_RUNS, then ./runs.")]
Json = Annotated[bool, Option("--json", help="Print the result as JSON.")]
Workers = Annotated[int | None, Option(min=1, help="Number of processes; default one per core.")]
OneWorker = Annotated[int, Option("--workers", min=1, help="Number of processes that measure.")]
On = Annotated[
    str | None, Option("--on", help="Use a Dask cluster instead: dask://HOST:PORT or dask:///path/to/scheduler.json.")
]
Device = Annotated[
    str | None, Option(callback=checked_argument, help="cpu, cuda, cuda:0, mps; default the best one available.")
]
ArchitectureName = Annotated[
    str,
    Argument(
        callback=checked_argument,
        autocompletion=completing("workbench.models.architecture_names_and_colours", "ARCHITECTURES"),
        help="A name of `workbench list architectures`, or a+b.",
    ),
]
PresetName = Annotated[str, Option(callback=checked_argument, help="A name of `workbench list presets`.")]
Measures = functools.partial(
    Option, "--metric", "-m", callback=checked_argument, autocompletion=completing("workbench.cli.list_tables", "measures"),
)  # fmt: skip
RunOrModel = functools.partial(Argument, autocompletion=runs_and_models)
Documents = Annotated[int, Option("--documents", min=1, help="Largest number of documents.")]
Options = Annotated[
    list[str] | None,
    Option(callback=checked_argument, help="Architecture option as key=value, for example lambda_v1=0.3."),
]
ModelKeys = Annotated[
    list[str] | None, Option(callback=checked_argument, help="Model setting as key=value, for example n_layers=8.")
]
RecipeKeys = Annotated[
    list[str] | None, Option(callback=checked_argument, help="Training setting as key=value, for example lr=1e-3.")
]
ConfigKeys = Annotated[
    list[str] | None,
    Option(callback=checked_argument, help="Setting that the files lack, as key=value, for example n_heads=8."),
]
Port = Annotated[int, Option(min=1, max=65535, help="Port on 127.0.0.1.")]
Download = Annotated[bool, Option("--download", help="Download a Hub name first; else only the local cache is read.")]
Revision = Annotated[str, Option(help="Revision on the Hub: step1000, or several as 'step*'. Same as NAME@REVISION.")]
Step = Annotated[str, Option(help="Checkpoint of a run: last, first, or a step number.")]


def fetch(path: Path, download: bool, revision: str) -> Path:
    """Return a path with its revision. With `--download`, a Hub name is downloaded first, unless a local path has that name."""
    path = path.with_name(f"{path.name}@{revision}") if revision else path
    if download and not path.exists():
        from workbench.checkpoints import hub
        from workbench.errors import BadCheckpoint

        try:
            hub.download(str(path))
        except WorkbenchError:
            raise
        except Exception as error:  # of any HTTP client
            reason = str(error).strip().partition("\n")[0]
            raise BadCheckpoint(f"{path} cannot be downloaded: {type(error).__name__}: {reason}") from error
    return path


def key_values(pairs: list[str] | None, kind: str) -> dict[str, Any]:
    """Parse `key=value` arguments. Values are parsed as JSON where possible, else they are text."""
    values: dict[str, Any] = {}
    for pair in pairs or ():
        key, _, value = pair.partition("=")
        if not key or not value:
            raise WorkbenchError(f"--{kind} {pair!r}: write it as key=value")
        try:
            values[key] = json.loads(value)
        except json.JSONDecodeError:
            values[key] = value
    return values


def print_result(as_json: bool, line: str, **facts: Any) -> None:
    """Print a result as one line, or its facts as a JSON object."""
    from workbench.console import json_text, say

    if as_json:
        print(json_text(facts))
    else:
        say(line)


def step_of(text: str) -> int | str:
    """Parse `last`, `first` or a step number."""
    return int(text) if text.isdigit() else text


def steps_of(text: str) -> Any:
    """Parse as `step_of`, or several step numbers as `0,100`."""
    parts = text.split(",")
    return [int(part) for part in parts] if all(part.strip().isdigit() for part in parts) else text
