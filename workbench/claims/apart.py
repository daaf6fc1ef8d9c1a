"""Judging in a separate process, so that a server that shows verdicts stays small and responsive.

    python -m workbench.claims.apart RUNS < names   # the path of one run per line

The process writes JSON lines: its progress, and at last the verdicts. It needs less than 1 GiB for a thousand runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from workbench.claims import all_verdicts
from workbench.claims.all_verdicts import Verdicts
from workbench.errors import WorkbenchError
from workbench.runs.catalogue import Entry, catalogue
from workbench.runs.table_cache import RecordCache, TelemetryCache

BUDGET = 20_000_000  # bytes of answers that each table keeps


def judge_apart(folder: Path, entries: Sequence[Entry], progress: Callable[..., None] | None = None) -> Verdicts:
    """Call `judge_all` in a separate process; `progress` may raise to stop it. Raises `WorkbenchError` if the process dies."""
    command, alone = [sys.executable, "-m", __spec__.name, str(folder)], os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=alone) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it died before it read: told below
                process.stdin.write("\n".join(entry.path for entry in entries))
                process.stdin.close()
            for line in process.stdout:
                said = json.loads(line)
                if "verdicts" in said:
                    return all_verdicts.parse_verdicts(said)
                if progress is not None:
                    progress(*said["done"])
            process.wait()
        finally:
            process.kill()
    why = "killed: out of memory?" if process.returncode < 0 else "its error stands in the server's log"
    raise WorkbenchError(f"judging {len(entries)} runs ended in the middle (exit {process.returncode}; {why})")


def main(folder: Path) -> None:
    """Judge the runs named on standard input."""
    asked = set(sys.stdin.read().splitlines())
    runs = [entry for entry in catalogue(folder).entries if entry.path in asked]
    caches = {"record_cache": RecordCache(folder, BUDGET), "telemetry_cache": TelemetryCache(folder, BUDGET)}
    told = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # a module of the user's own may print
        found = all_verdicts.judge_all(
            runs, lambda *done: print(json.dumps({"done": done}), file=told, flush=True), **caches
        )
    print(all_verdicts.text("", found).replace("\n", ""), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
