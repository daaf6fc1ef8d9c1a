"""The command line as a person meets it: help at once, one sentence and exit code 2 for what they can cause."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import warnings

import pytest
import typer

from workbench.cli import app as commands
from workbench.cli import main
from workbench.cli.arguments import OLD_NAMES
from workbench.cli.list_tables import listing, measures
from workbench.interventions import INTERVENTIONS
from workbench.metrics import METRICS

EXPECTED = {
    "demo", "train", "study", "estimate", "import", "coefficients", "export", "export-log", "push", "measure", "analyze", "generate",
    "plot", "report", "ship", "xray", "app", "list", "data", "diff", "view",
}  # fmt: skip


def run(*arguments, cwd=None, **environment):
    """The command line in this process: a new one imports torch for seconds."""
    told, errors, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(told), contextlib.redirect_stderr(errors):
        patch.setattr(sys, "argv", ["workbench", *map(str, arguments)])
        patch.setattr(warnings, "formatwarning", warnings.formatwarning)  # main sets its own, and a signal handler
        patch.setattr("signal.signal", lambda number, handler: None)
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.chdir(cwd or ".")
        try:
            main()
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(arguments, code, told.getvalue(), errors.getvalue())


def run_process(*arguments, cwd=None, **environment):
    """A real process of the command line."""
    return subprocess.run(
        [sys.executable, "-m", "workbench", *map(str, arguments)], capture_output=True, text=True, timeout=560, cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def one_run(tmp_path_factory):
    """A runs folder with one tiny trained run."""
    folder = tmp_path_factory.mktemp("runs")
    done = run(
        "train", "resformer", "--task", "repeated", "--runs", folder, "--name", "small", "--json",
        *(part for key in ("n_layers=2", "d_model=16", "n_heads=2", "d_mlp=24") for part in ("--model", key)),
        *(part for key in ("steps=6", "T=16", "batch=4", "warmup=2", "validate_every=3") for part in ("--recipe", key)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["run"] == "small"
    return folder


def test_commands_are_a_decision():
    assert {c.name or c.callback.__name__ for c in commands.registered_commands} == EXPECTED


@pytest.mark.slow
@pytest.mark.fast(5)
@pytest.mark.parametrize("command", sorted(EXPECTED))
def test_every_command_has_help_from_its_docstring(command):
    done = run(command, "--help", COLUMNS="200")
    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_the_options_of_all_commands_are_the_same():
    """`--quiet`, `--debug`, `--json`, `-o` and `-T` mean one thing everywhere."""
    group = typer.main.get_command(commands)
    options = {name: {p.name: p.opts for p in command.params} for name, command in group.commands.items()}
    assert all({"quiet", "debug"} <= given.keys() for given in options.values())
    assert {name for name, given in options.items() if "as_json" not in given} == {"app", "demo"}
    for given in options.values():
        assert given.get("out", [["--out", "-o"]])[-2:] in ([["--out", "-o"]], ["--out", "-o"], ["out"])
        assert given.get("length", ["--length", "-T"]) == ["--length", "-T"]
        assert not given.keys() & {"n", "data", "T"}


@pytest.mark.parametrize("command", OLD_NAMES)
def test_old_names_of_options_are_accepted_and_not_shown(command):
    shown = run(command, "--help", COLUMNS="200").stdout
    options = {opt for p in typer.main.get_command(commands).commands[command].params for opt in p.opts}
    for old, new in OLD_NAMES[command].items():
        assert new in options
        assert not re.search(rf"{old}\b(?!-)", shown)
    if command == "analyze":
        told = run("analyze", "nowhere", "--n=3", "--data", "nowhere.txt").stderr
        assert "nowhere" in told
        assert "--n is the old name of --documents" in told


def test_names_of_measures_are_read_without_pytorch():
    rows = {row["metric"]: row for row in listing("metrics")[0]}
    for name, m in METRICS.items():
        words = {
            "form": m.form,
            "unit": m.unit,
            "reading": m.reading,
            "sites": ", ".join(m.sites),
            "summary": m.summary,
        }
        assert rows[name] == {"metric": name, **words}
    assert measures() == [*rows, *(row["intervention"] for row in listing("interventions")[0])]
    assert set(measures()) == {*METRICS, *INTERVENTIONS}


COMMAND = (
    "import sys, runpy\nsys.argv = ['workbench', *sys.argv[1:]]\n"
    "try: runpy.run_module('workbench', run_name='__main__')\nexcept SystemExit: pass\n"
)


@pytest.mark.slow
def test_errors_in_arguments_need_no_torch():
    asked = {
        "--help": "", "train transformer --device tpu": "unknown device", "app --port 99999": "65535",
        "measure nowhere -m sink_mas": "sink_mass", "list metrics": "",
    }  # fmt: skip
    code = (
        "import contextlib, io, json, runpy, sys\nsaid = []\n"
        "for words in sys.argv[1:]:\n"
        "    sys.argv = ['workbench', *words.split()]\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as error, contextlib.redirect_stdout(io.StringIO()):\n"
        "        try: runpy.run_module('workbench', run_name='__main__')\n"
        "        except SystemExit: pass\n"
        "    said.append(error.getvalue())\n"
        "assert not {'torch', 'transformer_lens'} & set(sys.modules)\n"
        "print(json.dumps(said))"
    )
    command = [sys.executable, "-c", code, *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for said, words in zip(json.loads(done.stdout), asked.values(), strict=True):
        assert words in said
        assert said.count("\n") <= 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "resfromer"], "resformer"),
        (["train", "resformer", "--task", "repeated", "--option", "lambda_v2=1"], "lambda_v1"),
        (["study", "nowhere.toml"], "nowhere.toml"),
        (["estimate", "resformer", "-m", "sink_mas"], "sink_mass"),
        (["train", "resformer", "--recipe", "steps"], "key=value"),
        (["list", "metric"], "metrics"),
        (["report"], "workbench demo"),
        (["xry"], "xray"),
        (["list", "runs", "--by", "model", "--by", "rate"], "--by is given 2 times; give it once"),
        (["diff", "a", "b", "--step", "first", "--step=last"], "--step is given 2 times"),
        (["measure", "nowhere", "-m", "loss"], "nowhere"),
        (["list", "runs", "--runs", "s4://bucket/runs"], "unknown kind of storage 's4'; did you mean s3"),
        (["analyze", "--out", "gs://bucket"], "gs:/bucket is a URL"),
        (["report", "--out", "/dev/full"], "/dev/full: it is there already and neither"),
        (["plot", "nowhere.parquet"], "nowhere.parquet does not exist"),
    ],
)
def test_what_a_user_can_cause_is_one_sentence_and_exit_code_2(arguments, said, tmp_path):
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert not done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_process_says_the_same_sentence_and_no_traceback(tmp_path):
    command = ("list", "metric")
    done, here = run_process(*command, cwd=tmp_path), run(*command, cwd=tmp_path)
    assert done.returncode == here.returncode == 2
    assert done.stderr == here.stderr
    assert done.stderr.startswith("workbench: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_measure_plot_and_list_work_on_a_run(one_run, tmp_path):
    out = tmp_path / "records.parquet"
    done = run("measure", one_run / "small", "-m", "importance_entropy", "--steps", "ends", "--documents", 4, "-o", out)
    assert done.returncode == 0, done.stderr
    assert re.search(r"records: \S+records\.parquet \(\d+ rows\)", done.stdout)
    done = run("plot", out, "--out", tmp_path / "figure.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "figure.html").read_text()
    assert "showSendToCloud" in page
    assert "Plotly.newPlot" in page
    listed = json.loads(run("list", "runs", "--runs", one_run, "--json").stdout)
    assert listed[0]["run"] == "small"
    assert listed[0]["state"] == "finished"


@pytest.mark.slow
def test_report_is_one_offline_page(one_run, tmp_path):
    done = run("report", "--runs", one_run, "--out", tmp_path / "report.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "report.html").read_text()
    assert 'src="http' not in page
    assert "Claims without a verdict" in page
    assert "aria-label" in page


def test_an_unexpected_error_is_one_sentence_and_a_traceback_with_debug(monkeypatch, one_run):
    def broken(*_, **__):
        raise RuntimeError("broken here\nand there")

    monkeypatch.setattr("workbench.runs.run.list_runs", broken)
    done = run("list", "runs", "--runs", one_run)
    assert done.returncode == 1
    assert done.stderr == (
        "workbench: unexpected error, RuntimeError: broken here; run it again with --debug for the traceback\n"
    )
    debugged = run("list", "runs", "--runs", one_run, "--debug")
    assert "Traceback" in debugged.stderr
    assert "in broken" in debugged.stderr
    monkeypatch.setattr("workbench.checkpoints.hub.download", lambda name: broken())
    done = run("xray", "gpt3", "--download")
    assert done.returncode == 2
    assert done.stderr == "workbench: gpt3 cannot be downloaded: RuntimeError: broken here\n"


def test_a_taken_port_is_refused_naming_the_option(tmp_path):
    import socket

    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        done = run("app", "--runs", tmp_path, "--port", busy.getsockname()[1])
    assert done.returncode == 2
    assert "--port" in done.stderr


@pytest.mark.slow
def test_an_xray_imports_no_library_that_it_does_not_use(one_run, tmp_path):
    """Most of these take longer to import than a small model to measure."""
    unused = {
        "transformers", "transformer_lens", "datasets", "accelerate", "scipy", "huggingface_hub.errors", "torch._dynamo", "sympy",
        "streamlit", "requests", "workbench.training.loop", "workbench.claims.judging",
    }  # fmt: skip
    code = f"{COMMAND}print('imported:', *sorted({unused} & set(sys.modules)))"
    arguments = ["xray", one_run / "small", "--no-png", "--out", tmp_path / "page.html"]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    assert (tmp_path / "page.html").exists()
    assert done.stdout.splitlines()[-1] == "imported:"
