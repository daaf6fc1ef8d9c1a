"""The wheel as somebody installs it: away from the clone it imports, trains, looks and serves, with the clone's guards."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.request
import venv
import zipfile
from pathlib import Path

import browsing
import pytest
from browsing import ask, connected

from workbench.claims.collect_evidence import find_runs
from workbench.reports.runs_report import up_to_date
from workbench.reports.xray import QUESTIONS
from workbench.studies.demo import finished, jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1600)]
PATIENCE = 400.0
ROOT = Path(__file__).parents[1]
INSIDE = {
    "workbench": "workbench",
    "app": "workbench/app",
    "analyses": "workbench/analyses",
    "data": "workbench/shipped",
}
"""Folders here, and where they go."""
LARGE = {
    "induction_settings", "losses", "losses100", "routing", "sinks_long", "sinks_remedies", "sinks_settings", "value_paths"
}  # fmt: skip
FOREIGN = '[server]\nallowedHosts = ["*"]\n[browser]\ngatherUsageStats = true\n[client]\nshowErrorDetails = "full"\n'
"""Settings that somebody may have for dashboards of their own."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of the working tree, built without the network and without a trace in it."""
    pytest.importorskip("setuptools", minversion="77", reason="setuptools >= 77 builds the wheel")
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in INSIDE:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    pip("wheel", "--no-build-isolation", "--wheel-dir", made, source)
    (path,) = made.glob("value_residual_workbench-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """`installed(*command)`: a process of an environment that has the wheel and what it needs, where somebody has own settings.

    Its own packages are the wheel alone; torch and the rest are read where this process has them.
    """
    home, here = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("elsewhere")
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python3*/site-packages")
    (site / "shared.pth").write_text("\n".join(p for p in sys.path if p.endswith("-packages")))
    pip("install", "--no-compile", wheel, python=home / "bin" / "python")
    (here / ".streamlit").mkdir()
    (here / ".streamlit" / "config.toml").write_text(FOREIGN)
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "WORKBENCH", "STREAMLIT"))
    }
    environment = kept | {"HOME": str(here), "COLUMNS": "200", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def process(*command, program="python", start=subprocess.run, **options):
        return start([home / "bin" / program, *map(str, command)], cwd=here, env=environment, text=True, **options)

    process.site, process.wheel = site, wheel.name
    return process


def pip(*command, python=sys.executable):
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        *command[:1],
        "--quiet",
        "--no-deps",
        "--no-index",
        *command[1:],
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stderr


def said(installed, *command, **options):
    done = installed(*command, capture_output=True, timeout=PATIENCE, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_holds_the_code_and_what_the_code_reads_under_one_name(wheel, installed):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {path.name for path in installed.site.iterdir() if path.is_dir()} == {
        "workbench",
        f"{wheel.stem[:30]}.dist-info",
    }
    last = {max(run.glob("step_*")) for run in (ROOT / "data" / "models").glob("*/")}
    left_out = {ROOT / "data" / "evidence" / study for study in LARGE}
    left_out |= set((ROOT / "data" / "models").glob("*/step_*")) - last
    theirs = {
        f"{INSIDE[folder]}/{path.relative_to(ROOT / folder).as_posix()}": path.suffix
        for folder in INSIDE
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and left_out.isdisjoint(path.parents)
        and not any(part.startswith((".", "__pycache__")) for part in path.parts[len(ROOT.parts) :])
    }  # fmt: skip
    assert names == set(theirs)
    assert wheel.stat().st_size < 12_500_000
    assert {theirs[name] for name in names if "shipped" not in name} == {
        ".py", ".css", ".js", ".toml", ".ipynb", ".parquet", ".typed"
    }  # fmt: skip


def test_it_imports_all_of_itself(installed):
    """But for the commands, which run as they are imported, and a callback of a library that is not there."""
    code = (
        "import importlib, json, pkgutil, sys, workbench\n"
        "for found in pkgutil.walk_packages(workbench.__path__, 'workbench.'):\n"
        "    if not found.name.endswith(('__main__', 'app.main', 'lightning_callback')):\n"
        "        importlib.import_module(found.name)\n"
        "print(json.dumps([m.__file__ for name, m in sys.modules.items() if name.partition('.')[0] == 'workbench']))\n"
        "assert not {'app', 'analyses'} & set(sys.modules)"
    )
    files = json.loads(said(installed, "-c", code).splitlines()[-1])
    assert len(files) > 300
    assert all(Path(file).is_relative_to(installed.site) for file in files)


def test_its_command_tells_its_version_helps_completes_and_lists_what_ships(installed):
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "workbench" / "__init__.py").read_text(), re.MULTILINE)
    assert said(installed, "--version", program="workbench") == f"workbench {version}\n"
    assert f"-{version}-" in installed.wheel
    assert "value-residual transformers" in said(installed, "-m", "workbench", "--help")
    listed = json.loads(said(installed, "list", "studies", "--json", program="workbench"))
    asked = {"_WORKBENCH_COMPLETE": "complete_bash", "COMP_WORDS": "workbench study sinks_", "COMP_CWORD": "2"}
    code = f"import os, sys; os.environ |= {asked}; sys.argv = ['workbench']; from workbench.cli import main; main()"
    assert {"sinks_held", "sinks_length"} <= set(said(installed, "-c", code).split())
    shipped = {path.name for path in (ROOT / "data" / "evidence").glob("[!.]*/")}
    assert {row["study"] for row in listed if row["shipped"]} == shipped - LARGE | {"models"}


def test_it_refuses_to_share_its_folder_with_the_other_project_of_its_name(installed):
    theirs, own = installed.site / "workbench-0.8.506.dist-info", installed.site / "workbench" / "__init__.py"
    told = "two projects whose package is called workbench, value-residual-workbench and workbench-0.8.506"
    theirs.mkdir()
    kept = own.read_text()
    try:
        assert (
            f"ImportError: {installed.site} holds {told}"
            in installed("-c", "import workbench", capture_output=True).stderr
        )
        for face in (kept, '"""Somebody else\'s."""\n'):  # theirs installed before ours, and after
            own.write_text(face)
            short, long, module = ["workbench"], ["value-residual-workbench"], ["python", "-m", "workbench"]
            for program, *command in (long, module) if face is kept else (short,):
                done = installed(*command, "list", capture_output=True, program=program)
                assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
                assert told in done.stderr
    finally:
        own.write_text(kept)
        theirs.rmdir()


def test_it_trains_the_quick_demo_once_measures_and_reports(installed, tmp_path):
    demo = ("demo", "--quick", "--no-app", "--seeds", "1", "--runs", tmp_path)
    said(installed, *demo, program="workbench")
    status = json.loads((tmp_path / ".demo.json").read_text())
    assert status["finished"]
    assert sorted(status["ready"]) == sorted(status["models"])
    assert (tmp_path / "report.html").stat().st_size > 1_000_000
    kinds = ("step_*/*.safetensors", "telemetry/*.parquet", "records/*.parquet")
    written = {path: path.stat().st_mtime_ns for kind in kinds for path in tmp_path.glob(f"*/{kind}")}
    assert {path.suffix for path in written} == {".safetensors", ".parquet"}
    said(installed, *demo, program="workbench")
    again = {path: path.stat().st_mtime_ns for kind in kinds for path in tmp_path.glob(f"*/{kind}")}
    assert again == written, "nothing is trained or measured twice"
    planned = jobs(tmp_path, seeds=1, quick=True)
    assert all(map(finished, planned))
    assert not any(map(finished, jobs(tmp_path, seeds=1))), "those of the whole demo are trained longer"
    assert up_to_date(tmp_path / "report.html", tmp_path)
    lost = tmp_path / planned[0].name / "records"
    lost.rename(tmp_path / "aside")
    assert [finished(job) for job in planned] == [False, *[True] * (len(planned) - 1)], (
        "what is not measured any more is"
    )
    assert not up_to_date(tmp_path / "report.html", tmp_path)
    (tmp_path / "aside").rename(lost)
    page = tmp_path / "looked_at.html"
    told = said(installed, "xray", tmp_path / "sinks-transformer-s0", "--no-png", "--out", page, program="workbench")
    assert all(f"{title}\n" in told for title in QUESTIONS.values()), "a line for each part"


def test_studies_models_and_questions_that_ship_go_by_their_names(installed, tmp_path):
    study = ("study", "sinks_ratio", "--quick", "--workers", "1", "--runs", tmp_path, "--out", tmp_path)
    assert "held start_norm" in said(installed, *study, program="workbench")
    one = ("generate", "models-resformer-s0", "--prompt", "def ", "-n", "2")
    assert said(installed, *one, program="workbench").startswith("def ")
    assert "Do value paths speed up induction?" in said(installed, "-m", "workbench.analyses.race_to_induction", "-h")
    assert find_runs(["sinks"])[0] == find_runs([ROOT / "data" / "evidence" / "sinks"])[0]


def test_its_dashboard_is_set_as_the_file_says_whatever_else_is_set(installed):
    names = dict(flat(tomllib.loads((ROOT / "app" / "settings.toml").read_text(encoding="utf-8"))))
    assert {"server.allowedHosts", "browser.gatherUsageStats", "client.showErrorDetails"} <= names.keys()
    code = f"import json, workbench.app.server, streamlit as st; print(json.dumps({{n: st.get_option(n) for n in {list(names)}}}))"
    assert json.loads(said(installed, "-c", code).splitlines()[-1]) == names


def flat(section, prefix=""):
    for name, value in section.items():
        yield from flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]


def test_its_pages_draw_what_ships(installed):
    code = (
        "import json, sys, workbench.places as places\n"
        "from streamlit.testing.v1 import AppTest\n"
        "sys.argv = ['main.py']\n"
        "at = AppTest.from_file(str(places.HERE / 'app' / 'main.py'), default_timeout=60).run()\n"
        "titles = [at.title[0].value]\n"
        "at.switch_page('screens/depth.py').run()\n"
        "print(json.dumps([*titles, at.title[0].value, [e.message for e in at.exception], [c.value for c in [*at.caption, *at.markdown]]]))"
    )
    *titles, wrong, captions = json.loads(said(installed, "-c", code).splitlines()[-1])
    assert (titles, wrong) == (["Start", "Depth"], [])
    assert any("n = 64" in caption for caption in captions), "what a figure of the shipped models is drawn of"


def test_its_dashboard_answers_to_this_machine_alone(installed, tmp_path):
    port = browsing.free_port()
    command = ("app", "--runs", tmp_path / "runs", "--port", port)
    server = installed(*command, program="workbench", start=subprocess.Popen, stdout=subprocess.PIPE)
    try:
        assert re.search(rf"dashboard: http://127\.0\.0\.1:{port}\b", server.stdout.readline())
        assert ask(port, "/")[0].status == 200
        for path in ("/", "/_stcore/health", "/_stcore/host-config"):
            assert ask(port, path, "evil.example")[0].status == 403
            assert ask(port, path, Origin="http://evil.example")[0].status == 403
        assert connected(port, "http://evil.example") == 403
        assert connected(port, f"http://127.0.0.1:{port}") == 101
        page = urllib.request.urlopen(f"http://localhost:{port}/depth", timeout=20)
        assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    finally:
        server.terminate()
        server.wait(60)
        server.stdout.close()
    end = time.monotonic() + 60
    while not free(port) and time.monotonic() < end:
        time.sleep(0.2)
    assert free(port), "the dashboard outlives the command that started it"


def free(port):
    try:
        ask(port, "/_stcore/health")
    except OSError:
        return True
    return False


def test_the_complete_data_come_from_a_clone_and_nothing_is_written_into_the_installation(installed):
    """Last: this environment finds the complete data from here on."""

    def files():
        return {path for path in installed.site.rglob("*") if path.is_file() and path.suffix != ".pyc"}

    before, told = files(), json.loads(said(installed, "data", "--json", program="workbench"))
    assert (told["data"], set(told["absent"])) == (str(installed.site / "workbench" / "shipped"), LARGE)
    refused = installed("analyze", "losses", program="workbench", capture_output=True).stderr
    assert "losses: not in this installation; `workbench data` adds it" in refused
    assert json.loads(said(installed, "data", ROOT, "--json", program="workbench"))["absent"] == []
    code = "import workbench; print(workbench.Run.open('models-resformer-s0').steps)"
    assert said(installed, "-c", code) == "[0, 512, 2048, 5000]\n"
    assert files() == before
