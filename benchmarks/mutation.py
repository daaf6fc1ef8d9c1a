"""What share of small faults the fast tests catch: one mutant at a time, the tests that run its lines on each.

    python benchmarks/mutation.py [--each 36] [--seed 0] [--tree .] [--out results/mutation]

The fast suite runs once under coverage, with a context for each test and each fixture. A line's tests ran it or use a fixture that
did. The other tests of the same files follow, because a cache or a session's fixture may have spared them the line. The result is
stored in `tests.json`; only changed files of tests run again. Delete it when the program has changed. Each mutant is then
written into a copy of the tree, where its tests run until one fails, none is left, or `--cap` CPU seconds are spent. Files of
tests named after the mutant's file or folder come first, cheap ones before others. A mutant that hangs counts as caught. Rows are
appended to `mutants.jsonl` as they come, so an interrupted run goes on. The table of rooms is printed at the end, with the
survivors that have no reason in `equivalent_mutants.json`. `--again` runs those that were not caught once more, after tests were
added. Linux: processes are forked.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mutants import Mutant, mutants_of, sample

LIBRARY = (
    "models", "kernels", "metrics", "statistics", "claims", "checkpoints", "observing", "training", "runs",
    "data", "interventions", "measurement", "prompts", "views", "plots",
)  # fmt: skip
ROOMS = {name: f"workbench/{name}/" for name in LIBRARY} | {"app": "app/"}
HEAVY = (
    "torch", "transformers", "transformer_lens", "pandas", "scipy.stats", "plotly.graph_objects", "streamlit.testing.v1",
)  # fmt: skip
FAST = [
    "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-m", "not slow",
]  # fmt: skip
OUTCOMES = {0: "survived", 5: "no test"}
CAUGHT = ("caught", "hung")
REASONS = Path(__file__).with_name("equivalent_mutants.json")
"""Why no input tells a mutant from the program, by its key."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=36, help="mutants of each room (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cap", type=float, default=60, help="CPU seconds of tests on one mutant (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="those that were not caught, on the tests as they are now")
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--out", type=Path, default=Path("results/mutation"))
    asked = parser.parse_args()
    asked.out = asked.out.resolve()  # the forks work in folders of their own
    asked.out.mkdir(parents=True, exist_ok=True)

    for name in HEAVY:  # once, before the forks; nothing of ours
        __import__(name)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copies = [copied(asked.tree.resolve(), Path(folder) / str(job) / "tree") for job in range(asked.jobs)]
        rows = asked.out / "mutants.jsonl"
        rows.touch()
        before = [json.loads(row) for row in rows.read_text().splitlines()]
        chosen = choose(copies[0], asked.each, asked.seed)  # the tree may have gone on since
        if asked.again:  # the same ones, as far as their places still stand
            keys, same = {row["key"] for row in before}, json.loads(REASONS.read_text(encoding="utf-8"))
            chosen = [mutant for room in places(copies[0]) for mutant in room if mutant.key() in keys]
            before = [row for row in before if row["outcome"] in CAUGHT or row["key"] in same]
            rows.write_text("".join(f"{json.dumps(row)}\n" for row in before))
        tests = covered(copies, asked.out / "tests.json")
        left = iter([mutant for mutant in chosen if mutant.key() not in {row["key"] for row in before}])
        run_jobs(copies, lambda copy: start_next(copy, left, tests, asked.cap, rows))
    print(table([json.loads(row) for row in rows.read_text().splitlines()], {mutant.key() for mutant in chosen}))
    return 0


def choose(tree: Path, each: int, seed: int) -> list[Mutant]:
    """`each` of every room, one room after the other in turn."""
    rooms = [sample(room, each, seed) for room in places(tree)]
    return [room[i] for i in range(each) for room in rooms if i < len(room)]


def places(tree: Path) -> list[list[Mutant]]:
    """All mutants of every room."""
    rooms = [sorted((tree / room).rglob("*.py")) for room in ROOMS.values()]
    return [[mutant for file in files for mutant in mutants_of(tree, file)] for files in rooms]


def copied(tree: Path, to: Path) -> Path:
    """The files that git knows of, at `to`, as a repository of its own."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=tree, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tree / name, to / name)
    subprocess.run(["git", "init", "-q"], cwd=to, check=True)
    subprocess.run(["git", "add", "-A"], cwd=to, check=True)
    return to


@dataclass
class Running:
    """A forked child, the moment it is given up, and what to do with its exit code (None: it hung)."""

    pid: int
    end: float
    finish: Callable[[int | None], None]


def run_jobs(copies: list[Path], start: Callable[[Path], Running | None]) -> None:
    """Keeps one child running in each copy until `start` has no more."""
    running: dict[Path, Running | None] = {copy: start(copy) for copy in copies}
    while any(running.values()):
        time.sleep(0.05)
        for copy, job in running.items():
            if job is None:
                continue
            pid, status = os.waitpid(job.pid, os.WNOHANG)
            hung = not pid and time.monotonic() > job.end
            if not pid and not hung:
                continue
            end_group(job.pid)
            if hung:
                os.waitpid(job.pid, 0)
            job.finish(None if hung else os.waitstatus_to_exitcode(status))
            running[copy] = start(copy)


def end_group(pid: int) -> None:
    """Ends what a child left behind as well."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def forked(copy: Path, arguments: list[str], plugin: Any, output: Path) -> int:
    """The pid of a child that runs pytest in the copy, leading a process group of its own."""
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    sys.path[:0] = [str(copy)]
    import pytest

    code = 70
    try:
        with plugin.measured():
            code = int(pytest.main([*FAST, f"--basetemp={copy.parent / 'tmp'}", *arguments], plugins=[plugin]))
    except BaseException:  # told here: a fork must never return into its parent's frames
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Coverage:
    """A pytest plugin: which lines each test and each fixture ran, which fixtures a test uses, and what it cost."""

    def __init__(self, copy: Path, out: Path) -> None:
        import coverage

        self.out, self.copy = out, copy
        self.fixtures: dict[str, set[str]] = defaultdict(set)
        self.seconds: Counter[str] = Counter()
        sources = [str(copy / room) for room in ROOMS.values()]
        self.coverage = coverage.Coverage(
            data_file=str(out.with_suffix(".coverage")), source=sources, config_file=False
        )

    @contextmanager
    def measured(self) -> Iterator[None]:
        self.coverage.start()
        yield
        self.coverage.stop()
        data = self.coverage.get_data()
        number = {name: n for n, name in enumerate(sorted(data.measured_contexts()))}  # names would fill the disk
        lines = {}
        for file in data.measured_files():
            contexts = data.contexts_by_lineno(file).items()
            lines[Path(file).relative_to(self.copy).as_posix()] = {
                line: [number[name] for name in names if name] for line, names in contexts
            }
        fixtures = {test: sorted(names) for test, names in self.fixtures.items()}
        found = {"contexts": list(number), "lines": lines, "seconds": self.seconds, "fixtures": fixtures}
        self.out.write_text(json.dumps(found))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if sys.gettrace() is None:  # a test that traces for itself ends the tracing of all that follow
            self.coverage.stop()
            self.coverage.start()
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> None:
        """The lines of a shared one are counted for every test that uses it, whichever came first."""
        shared = fixturedef.scope != "function"
        self.coverage.switch_context(_name(fixturedef) if shared else request.node.nodeid)

    def pytest_runtest_call(self, item: Any) -> None:
        self.coverage.switch_context(item.nodeid)
        used = item._fixtureinfo.name2fixturedefs.values()
        self.fixtures[item.nodeid] = {_name(one) for definitions in used for one in definitions}


def _name(fixture: Any) -> str:
    return f"fixture {fixture.baseid}::{fixture.argname}"


@dataclass
class Tests:
    """Tests of the suite by the lines that they run and by their file, and the seconds that each takes."""

    by_line: dict[str, dict[int, set[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))
    by_file: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    seconds: dict[str, float] = field(default_factory=dict)

    def of(self, mutant: Mutant, lines: range) -> list[str]:
        """The tests that run one of the lines, then their neighbours; files by subject, then by cost, a file's own order kept."""
        direct = set().union(*(self.by_line[mutant.path][line] for line in lines))
        files: dict[str, float] = Counter()
        for test in direct:
            files[test.split("::")[0]] += self.seconds[test]
        order = sorted(files, key=lambda file: (not _speaks_of(file, mutant.path), files[file]))
        near = [test for file in order for test in self.by_file[file] if test in direct]
        return near + [test for file in order for test in self.by_file[file] if test not in direct]


def _speaks_of(tests: str, path: str) -> bool:
    """Whether the names of a file of tests and of a file or its folder share a word (its first five letters)."""
    ours, theirs = ({word[:5] for word in re.split(r"[/_.]", name)} for name in (tests, path))
    return bool(ours & theirs - {"tests", "test", "py", "workb", "app"})


def covered(copies: list[Path], kept: Path) -> Tests:
    """The files of the fast suite once under coverage, dealt out to the copies; kept, and those that have changed run again."""
    parts = json.loads(kept.read_text()) if kept.exists() else []
    have = {file: digest for part in parts for file, digest in part["files"].items()}
    now = {
        file.relative_to(copies[0]).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in (copies[0] / "tests").glob("test_*.py")
    }
    changed = sorted(file for file, digest in now.items() if have.get(file) != digest)
    random.Random(0).shuffle(changed)
    shares = [changed[number :: len(copies)] for number in range(len(copies))]
    waiting = {copy: (number, mine) for number, (copy, mine) in enumerate(zip(copies, shares, strict=True)) if mine}

    def start(copy: Path) -> Running | None:
        if copy not in waiting:
            return None
        number, mine = waiting.pop(copy)
        out = kept.with_suffix(f".{number}.json")
        pid = forked(copy, mine, Coverage(copy, out), out.with_suffix(".log"))

        def finish(code: int | None) -> None:
            print("suite under coverage: exit", code, flush=True)
            parts.append(json.loads(out.read_text()) | {"files": {file: now[file] for file in mine}})
            kept.write_text(json.dumps(parts))

        return Running(pid, time.monotonic() + 3 * 3600, finish)

    run_jobs(copies, start)
    return _known(parts, now)


def _known(parts: list[dict[str, Any]], files: dict[str, str]) -> Tests:
    """Return the tests of each line, from the runs whose files are unchanged."""
    tests = Tests()
    for part in parts:
        users = defaultdict(set)
        ours = {file for file, digest in part["files"].items() if files.get(file) == digest}
        for test, fixtures in part["fixtures"].items():
            if test.split("::")[0] in ours:
                tests.by_file[test.split("::")[0]].append(test)
                for name in fixtures:
                    users[name].add(test)
        for path, lines in part["lines"].items():
            for line, contexts in lines.items():
                for name in (part["contexts"][number] for number in contexts):
                    if name.startswith("fixture "):
                        tests.by_line[path][int(line)] |= users[name]
                    elif name.split("::")[0] in ours:
                        tests.by_line[path][int(line)].add(name)
        tests.seconds |= part["seconds"]
    return tests


class Cap:
    """A pytest plugin: ends the session when its CPU seconds are spent."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.failed = seconds, False

    @contextmanager
    def measured(self) -> Iterator[None]:
        yield

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One that hangs fails once its time is up, which is longer than the cap: caught all the same."""
        self.failed |= report.failed

    def pytest_runtest_logfinish(self) -> None:
        if spent() > self.seconds and not self.failed:
            import pytest

            pytest.exit("the cap", returncode=0)


def spent() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def start_next(copy: Path, left: Iterator[Mutant], tests: Tests, cap: float, rows: Path) -> Running | None:
    """Forks the tests of the next mutant, written into the copy; its row is appended when they end."""
    if (mutant := next(left, None)) is None:
        return None
    file = copy / mutant.path
    source = file.read_text(encoding="utf-8")
    chosen = tests.of(mutant, lines_of(source, mutant))
    begin, log = time.monotonic(), copy.parent / "log"

    def finish(code: int | None) -> None:
        write(file, source)
        outcome = "hung" if code is None else OUTCOMES.get(code, "caught") if chosen else "no test"
        failed = (
            re.search(r"^(?:FAILED|ERROR) (\S+)", log.read_text(errors="replace"), re.MULTILINE) if chosen else None
        )
        row = {
            "key": mutant.key(), "path": mutant.path, "line": mutant.line, "kind": mutant.kind, "before": mutant.before,
            "text": mutant.text, "outcome": outcome, "by": failed and failed[1], "tests": len(chosen),
            "seconds": round(time.monotonic() - begin, 1),
        }  # fmt: skip
        with rows.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
        print(f"{outcome:9} {row['seconds']:6} s  {mutant.path}:{mutant.line} {mutant.kind}", flush=True)

    write(file, mutant.applied(source))
    tested = partial(forked, copy, ["-x", *chosen], Cap(cap), log)
    return Running(tested() if chosen else os.spawnlp(os.P_NOWAIT, "true", "true"), begin + 5 * cap + 120, finish)


def write(file: Path, text: str) -> None:
    """A time of its own for each version, so that no compiled file of another is taken for its."""
    file.write_text(text, encoding="utf-8")
    shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)


def lines_of(source: str, mutant: Mutant) -> range:
    """The lines whose tests matter: the statement's own, or for one that runs on import the whole function or file."""
    whole = ast.parse(source)
    statements = (node for node in ast.walk(whole) if isinstance(node, ast.stmt))
    around = [node for node in statements if node.lineno <= mutant.line <= (node.end_lineno or 0)]
    if not mutant.always:
        if not around:  # a decorator of a function in a function stands before it
            return range(mutant.line, mutant.last + 1)
        smallest = min(around, key=lambda node: (node.end_lineno or 0) - node.lineno)
        simple = not hasattr(smallest, "body")
        return range(smallest.lineno, (smallest.end_lineno or 0) + 1) if simple else range(mutant.line, mutant.last + 1)
    functions = [node for node in around if isinstance(node, ast.FunctionDef)]
    if functions:
        return range(functions[0].body[0].lineno, (functions[0].end_lineno or 0) + 1)
    return range(1, source.count("\n") + 2)


def table(rows: list[dict[str, Any]], keys: set[str]) -> str:
    """By room: the share caught of all, and of those that an input could tell from the program."""
    rows = [row for row in rows if row["key"] in keys]
    reasons = json.loads(REASONS.read_text(encoding="utf-8"))
    text = ["| room | mutants | caught | of all | equal to the program | of the others |", "|---|---|---|---|---|---|"]
    for room, folder in (ROOMS | {"all": ""}).items():
        mine = [row for row in rows if row["path"].startswith(folder)]
        caught = sum(row["outcome"] in CAUGHT for row in mine)
        equal = sum(row["outcome"] not in CAUGHT and row["key"] in reasons for row in mine)
        shares = [f"{caught / max(n, 1):.0%}" for n in (len(mine), len(mine) - equal)]
        text.append(f"| {room} | {len(mine)} | {caught} | {shares[0]} | {equal} | {shares[1]} |")
    for row in rows:
        if row["outcome"] not in CAUGHT and row["key"] not in reasons:
            at = f"{row['path']}:{row['line']} ({row['kind']})"
            text.append(f"{row['outcome']}: {at} {row['before']!r} -> {row['text']!r}")
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main())
