"""The verdicts of a folder of runs, stored beside them in `.verdicts.json`: of hundreds of runs they take a minute."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from workbench import statistics
from workbench.claims import Verdict
from workbench.claims.judging import chosen, judge
from workbench.claims.verdict import STATUSES, SettingVerdict
from workbench.errors import BadCheckpoint, WorkbenchError
from workbench.file_io import MAX_TABLE, digest_of, read_bytes, read_json, write_text
from workbench.places import SHIPPED
from workbench.runs.catalogue import RUN_FILE, Entry, catalogue
from workbench.runs.table_cache import RecordCache, TelemetryCache
from workbench.storage.packed import checksum

FILE = ".verdicts.json"
BUDGET = 20_000_000  # bytes of answers that each table keeps in a separate process


@dataclass(frozen=True)
class Verdicts:
    """The verdict on every claim by its name, the metrics that any run has, and why runs were left out."""

    of: dict[str, Verdict]
    metrics: frozenset[str]
    problems: dict[str, str]


def judge_all(entries: Sequence[Entry], progress: Callable[..., None] | None = None, **caches: Any) -> Verdicts:
    """Judge every claim from what runs hold, without measuring; `progress` and `caches` as of `stored`.

    `progress` is also called with (done, total, claim, status) once a claim is judged, before the correction over all claims.
    """
    from workbench.claims.collect_evidence import stored  # imports torch

    claims, report = chosen(), progress or (lambda *_: None)
    total = len(entries) + len(claims)
    evidence, problems = stored(entries, lambda done, _: report(done, total), **caches)
    judged = judge(evidence, claims, lambda n, c, v: report(len(entries) + n, total, c.name, STATUSES[v.status]))
    return Verdicts({j.claim.name: j.verdict for j in judged}, evidence.kept.metrics, problems)


def mark(entries: Sequence[Entry]) -> str:
    """Return a digest of the runs and of the code that judges them, for which stored verdicts are valid.

    A run is identified by the time of its last change, a shipped run by its files: every copy of the project has other times.
    """

    def parts() -> Iterator[object]:
        for package in (Path(__file__).parent, Path(str(statistics.__file__)).parent):
            for file in sorted(package.glob("*.py")):
                yield from (file.name, read_bytes(file))
        for entry in entries:
            run = Path(entry.path)
            yield entry.name
            if not entry.shipped:
                yield entry.stamp
            elif (packed := checksum(run)) is not None:
                yield packed
            else:
                tables = (*sorted(run.glob("telemetry/*.parquet")), *sorted(run.glob("records/*.parquet")))
                for file in (run / RUN_FILE, *tables):
                    yield from (file.name, read_bytes(file, MAX_TABLE))

    return digest_of(parts())


def load_verdicts(folder: Path, marked: str) -> Verdicts | None:
    """Return the verdicts stored in a folder under this mark; None if they are missing or damaged."""
    try:
        stored = read_json(folder / FILE)
        return parse_verdicts(stored) if stored["mark"] == marked else None
    except (BadCheckpoint, KeyError, TypeError, ValueError, AttributeError):
        return None


def parse_verdicts(stored: dict[str, Any]) -> Verdicts:
    """Return the verdicts that `text` wrote."""
    verdicts = {}
    for name, facts in stored["verdicts"].items():
        table = pd.DataFrame({n: pd.Series(c["values"], dtype=c["type"]) for n, c in facts["table"].items()})
        p = math.nan if facts["p"] is None else facts["p"]
        settings = tuple(SettingVerdict(**setting) for setting in facts.get("settings", ()))
        verdicts[name] = Verdict(**facts | {"table": table, "p": p, "runs": tuple(facts["runs"]), "settings": settings})
    return Verdicts(verdicts, frozenset(stored["metrics"]), stored["problems"])


def save_verdicts(folder: Path, marked: str, verdicts: Verdicts) -> None:
    """Store verdicts in a folder; raises `WorkbenchError` if it cannot be written."""
    write_text(folder / FILE, text(marked, verdicts))


def text(marked: str, verdicts: Verdicts) -> str:
    """Return verdicts as JSON, one line per claim."""

    def plain(value: Any) -> Any:
        return None if pd.isna(value) else value

    lines = []
    for name, verdict in verdicts.of.items():
        table = {
            str(column): {"type": str(values.dtype), "values": [plain(v) for v in values.tolist()]}
            for column, values in verdict.table.items()
        }
        facts = asdict(verdict) | {"p": plain(verdict.p), "table": table}
        lines.append(f"{json.dumps(name)}: {json.dumps(facts, ensure_ascii=False)}")
    head = {"mark": marked, "metrics": sorted(verdicts.metrics), "problems": verdicts.problems}
    body = ",\n".join(lines)
    return f'{json.dumps(head)[:-1]}, "verdicts": {{\n{body}\n}}}}\n'


def judge_apart(folder: Path, entries: Sequence[Entry], progress: Callable[..., None] | None = None) -> Verdicts:
    """Call `judge_all` in a separate process, so that a server that shows verdicts stays small and responsive.

    It needs less than 1 GiB for a thousand runs. `progress` may raise to stop it. Raises `WorkbenchError` if the process dies.
    """
    command, alone = [sys.executable, "-m", __spec__.name, str(folder)], os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=alone) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it died before it read; its exit code is reported below
                process.stdin.write("\n".join(entry.path for entry in entries))
                process.stdin.close()
            for line in process.stdout:
                message = json.loads(line)
                if "verdicts" in message:
                    return parse_verdicts(message)
                if progress is not None:
                    progress(*message["done"])
            process.wait()
        finally:
            process.kill()
    why = "killed: out of memory?" if process.returncode < 0 else "its error stands in the server's log"
    raise WorkbenchError(f"judging {len(entries)} runs ended in the middle (exit {process.returncode}; {why})")


def main(folder: Path) -> None:
    """Judge the runs whose paths are the lines of standard input; print progress and the verdicts as JSON lines."""
    asked, out = set(sys.stdin.read().splitlines()), sys.stdout
    shipped = (e for name in ("evidence", "models") for e in catalogue(SHIPPED / name).entries)
    known = [*catalogue(folder).entries, *shipped]
    runs = list({entry.path: entry for entry in known if entry.path in asked}.values())
    if len(runs) < len(asked):
        raise WorkbenchError(f"{len(asked) - len(runs)} of {len(asked)} runs to judge are gone from {folder}")
    caches = {"record_cache": RecordCache(folder, BUDGET), "telemetry_cache": TelemetryCache(folder, BUDGET)}
    with contextlib.redirect_stdout(sys.stderr):  # a module of the user's own may print
        verdicts = judge_all(runs, lambda *done: print(json.dumps({"done": done}), file=out, flush=True), **caches)
    print(text("", verdicts).replace("\n", ""), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
