"""The wheel as somebody installs it: away from the clone it imports, lists and serves, with the clone's guards."""

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
import zipfile
from pathlib import Path

import browsing
import pytest
from browsing import ask, connected

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
OURS = ("workbench", "app", "analyses")
FOREIGN = '[server]\nallowedHosts = ["*"]\n[browser]\ngatherUsageStats = true\n[client]\nshowErrorDetails = "full"\n'
"""Settings that somebody may have for dashboards of their own."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of the working tree, built without the network and without a trace in it."""
    pytest.importorskip("setuptools", minversion="77", reason="setuptools >= 77 builds the wheel")
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in OURS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--no-build-isolation", "--wheel-dir", made, source)
    (path,) = made.glob("workbench-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """`installed(*command)`: a process that knows of the wheel alone, where somebody has settings of their own."""
    target, here = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("elsewhere")
    pip("install", "--no-compile", "--target", target, wheel)
    (here / ".streamlit").mkdir()
    (here / ".streamlit" / "config.toml").write_text(FOREIGN)
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "WORKBENCH", "STREAMLIT"))
    }
    environment = kept | {"PYTHONPATH": str(target), "HOME": str(here), "COLUMNS": "200"}

    def process(*command, program=(sys.executable,), start=subprocess.run, **options):
        return start([*program, *map(str, command)], cwd=here, env=environment, text=True, **options)

    process.target, process.program = target, (sys.executable, str(target / "bin" / "workbench"))
    return process


def pip(*command):
    command = [sys.executable, "-m", "pip", *command[:1], "--quiet", "--no-deps", "--no-index", *command[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def said(installed, *command, **options):
    done = installed(*command, capture_output=True, timeout=240, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_holds_the_code_and_what_the_code_reads_and_nothing_else(wheel):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in names} == set(OURS)
    asides = {p.relative_to(ROOT).as_posix() for p in (ROOT / "app").rglob("*") if p.suffix in (".css", ".js", ".toml")}
    assert {name for name in names if not name.endswith(".py")} == asides
    assert {name for name in names if name.endswith(".py")} == {
        p.relative_to(ROOT).as_posix() for folder in OURS for p in (ROOT / folder).rglob("*.py")
    }


def test_it_imports_all_of_itself(installed):
    """But for the pages and commands, which run as they are imported."""
    code = (
        "import importlib, json, pkgutil, sys\n"
        f"for package in map(importlib.import_module, {OURS}):\n"
        "    for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        if not found.name.startswith(('app.screens.', 'app.main')) and not found.name.endswith('__main__'):\n"
        "            importlib.import_module(found.name)\n"
        f"print(json.dumps([m.__file__ for name, m in sys.modules.items() if name.partition('.')[0] in {OURS}]))"
    )
    files = json.loads(said(installed, "-c", code).splitlines()[-1])
    assert len(files) > 200
    assert all(Path(file).is_relative_to(installed.target) for file in files)


def test_its_command_helps_and_lists(installed):
    assert "value-residual transformers" in said(installed, "--help", program=installed.program)
    listed = json.loads(said(installed, "list", "architectures", "--json", program=installed.program))
    assert "resformer" in json.dumps(listed)


def test_its_dashboard_is_set_as_the_file_says_whatever_else_is_set(installed):
    names = dict(flat(tomllib.loads((ROOT / "app" / "settings.toml").read_text(encoding="utf-8"))))
    assert {"server.allowedHosts", "browser.gatherUsageStats", "client.showErrorDetails"} <= names.keys()
    code = (
        f"import json, app.server, streamlit as st; print(json.dumps({{n: st.get_option(n) for n in {list(names)}}}))"
    )
    assert json.loads(said(installed, "-c", code).splitlines()[-1]) == names


def flat(section, prefix=""):
    for name, value in section.items():
        yield from flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]


def test_its_dashboard_answers_to_this_machine_alone(installed, tmp_path):
    port = browsing.free_port()
    command = ("app", "--runs", tmp_path / "runs", "--port", port)
    server = installed(*command, program=installed.program, start=subprocess.Popen, stdout=subprocess.PIPE)
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
