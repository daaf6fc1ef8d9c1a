"""Many jobs in processes of one thread each: what fails is reported and the rest goes on; and the corpus they share."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.files import digest, read_json, write_json
from workbench.runs.run import CORPORA

MAX_PROCESSES = 8  # unless asked otherwise; more share the memory's bandwidth


@dataclass(frozen=True)
class Job:
    """A call for a process of its own, `function(*arguments)`, under a name; `cost` is relative, for the time left."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    cost: float = 1.0

    def __call__(self) -> Any:
        return self.function(*self.arguments)


Done = Callable[[Job, BaseException | None], None]
Result = Callable[[Job, Any], None]


def run_jobs(jobs: Sequence[Job], processes: int | None, done: Done, result: Result | None = None) -> None:
    """Call every job in processes of one thread each; `done` is called after each, with its error if any.

    `result` is called with what a job returned, before `done`.

    A process that is killed (out of memory) takes the whole pool with it; the jobs left then get a process each, so that
    the guilty one is known. Ctrl-C stops after what the jobs at hand do about it, as `KeyboardInterrupt`.
    """
    size = processes or min(os.cpu_count() or 1, MAX_PROCESSES)
    with one_thread():
        left = list[Job]()

        def sorted_out(job: Job, error: BaseException | None) -> None:
            if isinstance(error, BrokenProcessPool):
                left.append(job)
            else:
                done(job, error)

        _run(_pool(size), _interruptible, jobs, sorted_out, result)
        _run(ThreadPoolExecutor(size), _alone, left, done, result)


def _run(pool: Executor, call: Callable[[Job], Any], jobs: Sequence[Job], done: Done, result: Result | None) -> None:
    with pool:
        try:
            futures = {pool.submit(call, job): job for job in jobs}
            for future in as_completed(futures):
                error = future.exception()
                if isinstance(error, KeyboardInterrupt):  # a terminal's Ctrl-C reaches the workers too, often before us
                    raise error
                if result and error is None:
                    result(futures[future], future.result())
                done(futures[future], error)
        except KeyboardInterrupt:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _pool(size: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(size, multiprocessing.get_context("spawn"), initializer=_begin)


def _begin() -> None:
    """What a process does before its first job: Ctrl-C is only noted, and the end of its parent is its own."""
    signal.signal(signal.SIGINT, _note)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End at once with a parent that was killed alone: a resume finds no lock held, and what is written is whole."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


_stopped = list[str]()


def _note(*_: object) -> None:
    """Ctrl-C while a process waits for a job: it takes no other, and says nothing."""
    _stopped.append("Ctrl-C")


def _interruptible(job: Job) -> Any:
    """Call a job, which Ctrl-C interrupts; jobs that wait in this process are not begun after it."""
    if _stopped:
        raise KeyboardInterrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return job()
    except KeyboardInterrupt:
        _stopped.append("Ctrl-C")
        raise
    finally:
        signal.signal(signal.SIGINT, _note)


def _alone(job: Job) -> Any:
    with _pool(1) as pool:
        return pool.submit(_interruptible, job).result()


@contextmanager
def one_thread() -> Iterator[None]:
    """Children start with one thread each: two on a busy core make small models many times slower."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


class Status:
    """How far some jobs are; kept in a file for other processes, and handed to `progress` after each change."""

    def __init__(self, path: Path, jobs: Sequence[Job], progress: Callable[[dict[str, Any]], None] | None) -> None:
        self.path, self.cost, self.progress = path, {job.name: job.cost for job in jobs}, progress
        self.begin, self.ready, self.failures = time.time(), set[str](), dict[str, str]()
        self._write(False)

    def done(self, name: str, error: BaseException | None) -> None:
        """Note that a model is ready or failed."""
        if error is None:
            self.ready.add(name)
        else:
            self.failures[name] = f"{type(error).__name__}: {error}"
        self._write(False)

    def finish(self) -> None:
        """Note the end."""
        self._write(True)

    def _write(self, finished: bool) -> None:
        elapsed = time.time() - self.begin
        paid, whole = sum(self.cost[name] for name in self.ready), sum(self.cost.values())
        left = elapsed / paid * (whole - paid) if paid else None
        status = {
            "finished": finished, "elapsed_s": round(elapsed, 1), "left_s": None if left is None else round(left, 1),
            "models": list(self.cost), "ready": sorted(self.ready), "failed": self.failures,
        }  # fmt: skip
        write_json(self.path, status)
        if self.progress:
            self.progress(status)


@functools.lru_cache(maxsize=2)
def shared_text(runs: Path, name: str = "", **settings: Any) -> Any:
    """A corpus and its tokenizer as `prepare` makes them, built once per runs folder and shared by all processes.

    `settings` are those of `prepare`; `name` that of the pointer to it under the runs folder, their digest unless given.
    """
    from filelock import FileLock

    from workbench.data.opening import open_data
    from workbench.data.sources import prepare

    root = runs / CORPORA
    root.mkdir(parents=True, exist_ok=True)
    pointer = root / f"{name or digest('text', settings)}.json"
    with FileLock(root / ".lock"):
        if not pointer.exists():
            write_json(pointer, prepare(root=root, **settings).describe())
    return open_data(read_json(pointer), root)
