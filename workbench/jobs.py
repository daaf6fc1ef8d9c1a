"""Many trainings in processes of one thread each: what fails is told and the rest goes on; and the corpus they share."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from workbench.files import digest, read_json, write_json
from workbench.runs import CORPORA

MOST = 8  # processes unless told otherwise; more share the memory's bandwidth
Job = TypeVar("Job")


def run_jobs(
    work: Callable[[Job], object],
    plan: Sequence[Job],
    processes: int | None,
    done: Callable[[Job, BaseException | None], None],
    found: Callable[[Job, Any], None] | None = None,
) -> None:
    """Call `work` on every job of the plan in processes of one thread each; `done` hears of each, with its error if any.

    `found` hears what `work` returned, before `done` does.

    A process that is killed (out of memory) takes the whole pool with it; the jobs left then get a process each, so that
    the guilty one is known. Ctrl-C stops after what the jobs at hand do about it, as `KeyboardInterrupt`.
    """
    size = processes or min(os.cpu_count() or 1, MOST)
    with one_thread():
        left = list[Job]()

        def heard(job: Job, error: BaseException | None) -> None:
            if isinstance(error, BrokenProcessPool):
                left.append(job)
            else:
                done(job, error)

        _run(_pool(size), work, plan, heard, found)
        _run(ThreadPoolExecutor(size), functools.partial(_alone, work), left, done, found)


def _run(
    pool: Executor,
    work: Callable[[Job], object],
    plan: Sequence[Job],
    done: Callable[[Job, BaseException | None], None],
    found: Callable[[Job, Any], None] | None,
) -> None:
    heeding = functools.partial(_heeding, work)
    with pool:
        try:
            futures: dict[Future[object], Job] = {pool.submit(heeding, job): job for job in plan}
            for future in as_completed(futures):
                error = future.exception()
                if isinstance(error, KeyboardInterrupt):  # a terminal's Ctrl-C reaches the workers too, often before us
                    raise error
                if found and error is None:
                    found(futures[future], future.result())
                done(futures[future], error)
        except KeyboardInterrupt:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _pool(size: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        size, multiprocessing.get_context("spawn"), initializer=signal.signal, initargs=(signal.SIGINT, _note)
    )


_stopped = list[str]()


def _note(*_: object) -> None:
    """Ctrl-C while a process waits for a job: it takes no other, and says nothing."""
    _stopped.append("Ctrl-C")


def _heeding(work: Callable[[Job], object], job: Job) -> object:
    """Call `work`, which Ctrl-C interrupts; jobs that were dealt out already are not begun after it."""
    if _stopped:
        raise KeyboardInterrupt
    if signal.getsignal(signal.SIGINT) != _note:  # a thread of the first process, which hears for itself
        return work(job)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return work(job)
    except KeyboardInterrupt:
        _stopped.append("Ctrl-C")
        raise
    finally:
        signal.signal(signal.SIGINT, _note)


def _alone(work: Callable[[Job], object], job: Job) -> object:
    with _pool(1) as pool:
        return pool.submit(functools.partial(_heeding, work), job).result()


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


def time_left(took: Sequence[float], more: int) -> str:
    """How long so many more pieces of work will take, in words after a comma, from the seconds that each took so far.

    What was there already takes next to nothing and says nothing of the rest: pieces under a tenth of the longest are left out.
    """
    real = [seconds for seconds in took if seconds >= max(took) / 10]
    return f", about {more * sum(real) / len(real):.0f} s left" if real and more else ""


class Status:
    """How far a plan is; kept in a file for whoever looks, and told after each change."""

    def __init__(self, path: Path, cost: Mapping[str, float], told: Callable[[dict[str, Any]], None] | None) -> None:
        self.path, self.cost, self.told = path, cost, told
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
        if self.told:
            self.told(status)


@functools.lru_cache(maxsize=2)
def shared_text(runs: Path, name: str = "", **settings: Any) -> Any:
    """A corpus and its tokenizer as `prepare` makes them, built once per runs folder and shared by all processes.

    `settings` are those of `prepare`; `name` that of the pointer to it under the runs folder, their digest unless given.
    """
    from filelock import FileLock

    from workbench.data import open_data, prepare

    root = runs / CORPORA
    root.mkdir(parents=True, exist_ok=True)
    pointer = root / f"{name or digest('text', settings)}.json"
    with FileLock(root / ".lock"):
        if not pointer.exists():
            write_json(pointer, prepare(root=root, **settings).describe())
    return open_data(read_json(pointer), root)
