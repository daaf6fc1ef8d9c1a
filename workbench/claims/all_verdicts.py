"""The verdicts of a folder of runs, kept beside them: of hundreds of runs they take a minute, and a page needs them at once.

    runs/.verdicts.json

They hold for exactly these runs and this code: `mark` is a digest of both, and verdicts of another mark are none.
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
from workbench.claims.judging import chosen
from workbench.claims.verdict import corrected
from workbench.errors import BadCheckpoint
from workbench.files import MAX_TABLE, digest_of, read_bytes, read_json, write_text
from workbench.runs.catalogue import RUN_FILE, Entry

FILE = ".verdicts.json"


@dataclass(frozen=True)
class Verdicts:
    """The verdict of every claim by its name, corrected over all of them; the metrics that any run has; why runs were left out."""

    of: dict[str, Verdict]
    metrics: frozenset[str]
    problems: dict[str, str]


def judge_all(entries: Sequence[Entry], progress: Callable[[int, int], None] | None = None, **caches: Any) -> Verdicts:
    """Every claim judged from what the runs hold, nothing being measured; `progress` and `caches`: see `stored`."""
    from workbench.claims.stored import stored  # imports torch

    claims = chosen()
    steps = len(entries) + len(claims)

    def told(done: int) -> None:
        if progress is not None:
            progress(done, steps)

    evidence, problems = stored(entries, lambda done, _: told(done), **caches)
    alone = []
    for i, claim in enumerate(claims):
        alone.append(claim.judge(evidence))
        told(len(entries) + i + 1)
    return Verdicts(dict(zip((c.name for c in claims), corrected(alone), strict=True)), evidence.kept.metrics, problems)


def mark(entries: Sequence[Entry]) -> str:
    """What verdicts follow from: the runs and the code that judges.

    A run is known by when it last changed; one that ships by its files, which every copy of the project writes at another time.
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
        for file in (run / RUN_FILE, *sorted(run.glob("telemetry/*.parquet")), *sorted(run.glob("records/*.parquet"))):
            yield file.name
            yield read_bytes(file, MAX_TABLE)


def load(folder: Path, marked: str) -> Verdicts | None:
    """What is kept in a folder under this mark; None where nothing is."""
    try:
        found = read_json(folder / FILE)
        if found["mark"] != marked:
            return None
        return read(found)
    except (BadCheckpoint, KeyError, TypeError, ValueError, AttributeError):  # none there, or damaged: judged anew
        return None


def read(found: dict[str, Any]) -> Verdicts:
    """Verdicts from what `text` wrote."""
    verdicts = {name: _verdict(facts) for name, facts in found["verdicts"].items()}
    return Verdicts(verdicts, frozenset(found["metrics"]), found["problems"])


def save(folder: Path, marked: str, verdicts: Verdicts) -> None:
    """Keep verdicts in a folder; raises `WorkbenchError` where it cannot be written."""
    write_text(folder / FILE, text(marked, verdicts))


def text(marked: str, verdicts: Verdicts) -> str:
    """Verdicts as they are kept, a claim a line."""
    of = {name: asdict(v) | {"p": _plain(v.p), "table": _columns(v.table)} for name, v in verdicts.of.items()}
    head = {"mark": marked, "metrics": sorted(verdicts.metrics), "problems": verdicts.problems}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(facts, ensure_ascii=False)}" for name, facts in of.items())
    return f'{json.dumps(head)[:-1]}, "verdicts": {{\n{lines}\n}}}}\n'


def _columns(table: pd.DataFrame) -> dict[str, Any]:
    return {
        str(name): {"type": str(column.dtype), "values": [_plain(v) for v in column.tolist()]}
        for name, column in table.items()
    }


def _plain(value: Any) -> Any:
    """A value as JSON holds it: what is missing or no number as null."""
    return None if pd.isna(value) else value


def _verdict(facts: dict[str, Any]) -> Verdict:
    table = pd.DataFrame({n: pd.Series(c["values"], dtype=c["type"]) for n, c in facts["table"].items()})
    p = math.nan if facts["p"] is None else facts["p"]
    return Verdict(**facts | {"table": table, "p": p, "runs": tuple(facts["runs"])})
