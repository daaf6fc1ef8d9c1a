"""The verdicts of a folder of runs, stored beside them in `.verdicts.json`: of hundreds of runs they take a minute.

Stored verdicts are valid for the same runs and code: `mark` is a digest of both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from workbench import statistics
from workbench.claims import Verdict
from workbench.claims.judging import chosen, judge
from workbench.claims.verdict import STATUSES
from workbench.errors import BadCheckpoint
from workbench.files import MAX_TABLE, digest_of, read_bytes, read_json, write_text
from workbench.runs.catalogue import RUN_FILE, Entry
from workbench.storage.packed import checksum

FILE = ".verdicts.json"


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
    from workbench.claims.stored import stored  # imports torch

    claims, report = chosen(), progress or (lambda *_: None)
    total = len(entries) + len(claims)
    evidence, problems = stored(entries, lambda done, _: report(done, total), **caches)
    judged = judge(evidence, claims, lambda n, c, v: report(len(entries) + n, total, c.name, STATUSES[v.status]))
    return Verdicts({j.claim.name: j.verdict for j in judged}, evidence.kept.metrics, problems)


def mark(entries: Sequence[Entry]) -> str:
    """Return a digest of the runs and of the code that judges them.

    A run is identified by the time of its last change, a shipped run by its files: every copy of the project has other times.
    """
    return digest_of(_parts(entries))


def _parts(entries: Sequence[Entry]) -> Iterator[object]:
    for package in (Path(__file__).parent, Path(str(statistics.__file__)).parent):
        for file in sorted(package.glob("*.py")):
            yield file.name
            yield read_bytes(file)
    for entry in entries:
        yield entry.name
        if not entry.shipped:
            yield entry.stamp
            continue
        run = Path(entry.path)
        if (packed := checksum(run)) is not None:
            yield packed
            continue
        for file in (run / RUN_FILE, *sorted(run.glob("telemetry/*.parquet")), *sorted(run.glob("records/*.parquet"))):
            yield file.name
            yield read_bytes(file, MAX_TABLE)


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
        verdicts[name] = Verdict(**facts | {"table": table, "p": p, "runs": tuple(facts["runs"])})
    return Verdicts(verdicts, frozenset(stored["metrics"]), stored["problems"])


def save_verdicts(folder: Path, marked: str, verdicts: Verdicts) -> None:
    """Store verdicts in a folder; raises `WorkbenchError` if it cannot be written."""
    write_text(folder / FILE, text(marked, verdicts))


def text(marked: str, verdicts: Verdicts) -> str:
    """Return verdicts as JSON, one line per claim."""
    lines = []
    for name, verdict in verdicts.of.items():
        table = {
            str(column): {"type": str(values.dtype), "values": [_plain(v) for v in values.tolist()]}
            for column, values in verdict.table.items()
        }
        facts = asdict(verdict) | {"p": _plain(verdict.p), "table": table}
        lines.append(f"{json.dumps(name)}: {json.dumps(facts, ensure_ascii=False)}")
    head = {"mark": marked, "metrics": sorted(verdicts.metrics), "problems": verdicts.problems}
    body = ",\n".join(lines)
    return f'{json.dumps(head)[:-1]}, "verdicts": {{\n{body}\n}}}}\n'


def _plain(value: Any) -> Any:
    return None if pd.isna(value) else value
