"""The dashboard's server on 127.0.0.1: one per runs folder; a second command finds the running one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from workbench.console import say
from workbench.environment import BUILDERS, FOLDER, RUNS, variable
from workbench.errors import WorkbenchError
from workbench.file_io import read_json, write_json
from workbench.places import HERE, install, module

HOST, NOTE, START_S = "127.0.0.1", ".app.json", 60.0


@dataclass
class Server:
    """A running dashboard. `process` is empty (None) if an earlier command started it."""

    url: str
    process: subprocess.Popen[bytes] | None


def serve(runs: Path, port: int) -> Server:
    """Start the dashboard of a runs folder, or find the running one on this port.

    Raises `WorkbenchError` if another program uses the port, or if the server does not start.
    """
    url = f"http://{HOST}:{port}"
    builders = variable(BUILDERS)
    if (note := running_note(runs, port)) is not None:
        if note.get("builders", "") != builders:
            setting = f"with {BUILDERS}={note['builders']}" if note.get("builders") else f"without {BUILDERS}"
            cure = f"stop it (process {note['pid']}), or name another --port"
            raise WorkbenchError(f"{url} shows these runs already, {setting}: {cure}")
        say(f"dashboard: {url} (already running)")
        return Server(url, None)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            taken = f"port {port} on {HOST} is in use by something else"
            raise WorkbenchError(f"{taken}; choose another with --port") from None
    if importlib.util.find_spec("streamlit") is None:
        raise WorkbenchError(f"the dashboard takes streamlit, which is not installed: {install('app')}")
    environment = os.environ | {RUNS: str(runs), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.setdefault(FOLDER, str(Path.cwd()))  # of builders: the server stands elsewhere
    try:
        log: IO[bytes] = (runs / ".app.log").open("w+b")
    except OSError:  # a folder that may only be read
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
    with log:
        process = subprocess.Popen(
            [sys.executable, "-m", module("app.server"), "--port", str(port), "--runs", str(runs), "--parent", str(os.getpid())],
            cwd=HERE.parent, env=environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        server, begin = Server(url, process), time.monotonic()
        try:
            while not _healthy(port):
                if process.poll() is not None or time.monotonic() - begin > START_S:
                    log.seek(0)
                    raise WorkbenchError(f"the dashboard did not start: {log.read()[-500:].decode(errors='replace')}")
                time.sleep(0.1)
        except BaseException:  # Ctrl-C too
            stop(server)
            raise
    with contextlib.suppress(WorkbenchError):  # a folder that may only be read; the dashboard is not found again then
        write_json(runs / NOTE, {"pid": process.pid, "port": port, "builders": builders})
    say(f"dashboard: {url}")
    return server


def make_folder(runs: Path) -> None:
    """Make the folder of runs. Raises `WorkbenchError` if that is impossible."""
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WorkbenchError(f"{runs} cannot be the folder of runs: {error.strerror or error}") from None


def wait(server: Server) -> None:
    """Wait for Ctrl-C or the end of the dashboard. Return at once if an earlier command started it."""
    if server.process is None:
        return
    say("Ctrl-C ends the dashboard")
    try:
        server.process.wait()
    except KeyboardInterrupt:
        say("dashboard ended")
    finally:
        stop(server)


def stop(server: Server) -> None:
    """Stop a dashboard that this process started."""
    if server.process is None or server.process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGTERM)
    try:
        server.process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()


def running_note(runs: Path, port: int) -> dict[str, Any] | None:
    """Return the note about the running dashboard of these runs on this port, or None."""
    try:
        note: dict[str, Any] = read_json(runs / NOTE)
        os.kill(int(note["pid"]), 0)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return note if note.get("port") == port and _healthy(port) else None


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/_stcore/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
