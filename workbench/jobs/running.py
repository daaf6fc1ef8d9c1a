"""Run independent jobs through processes, a cluster or any executor; a failed job is reported and the others continue."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.console import Progress
from workbench.file_io import write_json
from workbench.jobs import dask_cluster, worker_processes

Workers = int | str | Executor | None
"""Number of processes of this machine (default one per core), address of a cluster, or any executor."""


@dataclass(frozen=True)
class Job:
    """A named call `function(*arguments)` for another process; the relative `cost` is used to estimate the time left."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    cost: float = 1.0

    def __call__(self) -> Any:
        return self.function(*self.arguments)


Done = Callable[[Job, BaseException | None], None]
Result = Callable[[Job, Any], None]


def run_jobs(
    jobs: Sequence[Job], workers: Workers, done: Done, result: Result | None = None, folders: Sequence[Path] = ()
) -> None:
    """Run jobs on `workers`; call `result` with each return value, then `done` with the error or None.

    A killed process (out of memory) ends its pool, and a cluster's killed worker loses its waiting jobs. These jobs then run
    one by one, so that the faulty one is identified. The workers of a cluster must see the `folders` too.
    """
    left = list[Job]()  # jobs whose process or worker died

    def sorted_out(job: Job, error: BaseException | None) -> None:
        if isinstance(error, BrokenProcessPool | dask_cluster.Died):
            left.append(job)
        else:
            done(job, error)

    if isinstance(workers, Executor):
        _run(workers, Job.__call__, jobs, done, result)
    elif isinstance(workers, str):
        with dask_cluster.connected(workers, folders) as (executor, call, explain):
            _run(executor, call, jobs, lambda job, error: sorted_out(job, explain(error)), result)
            for job in left:
                _run(executor, call, [job], lambda job, error: done(job, explain(error)), result)
    else:
        size = workers or worker_processes.default_processes()
        with worker_processes.one_thread():
            with worker_processes.pool(size) as pool:
                _run(pool, worker_processes.interruptible, jobs, sorted_out, result)
            if left:
                with ThreadPoolExecutor(size) as threads:
                    _run(threads, worker_processes.in_new_process, left, done, result)


def results(
    jobs: Sequence[Job], workers: Workers, progress: Progress | None, folders: Sequence[Path] = ()
) -> list[Any]:
    """Return the results of all jobs in order; raises the first error after all have ended. See `run_jobs`."""
    returned, failed = dict[str, Any](), list[BaseException]()

    def done(job: Job, error: BaseException | None) -> None:
        failed.extend([error] if error else [])
        if progress:
            progress(len(returned) + len(failed), len(jobs), f"last {job.name}")

    run_jobs(jobs, workers, done, lambda job, value: returned.update({job.name: value}), folders)
    if failed:
        raise failed[0]
    return [returned[job.name] for job in jobs]


def _run(pool: Executor, call: Callable[[Job], Any], jobs: Sequence[Job], done: Done, result: Result | None) -> None:
    futures = dict[Future[Any], Job]()
    try:
        with worker_processes.delayed_interrupts():
            futures |= {pool.submit(call, job): job for job in jobs}
        for future in as_completed(futures):
            error = future.exception()
            if isinstance(error, KeyboardInterrupt):  # a terminal sends Ctrl-C to the workers too
                raise error
            if result and error is None:
                result(futures[future], future.result())
            done(futures[future], error)
    except BaseException:
        for future in futures:  # running jobs end by themselves
            future.cancel()
        raise


class StatusFile:
    """Progress of jobs in a JSON file for other processes, also sent to `progress` after each change.

    The time left is estimated from the jobs that end here; those that ended `before` take none.
    """

    def __init__(
        self, path: Path, jobs: Sequence[Job], progress: Callable[[dict[str, Any]], None] | None, before: Iterable[str] = ()
    ) -> None:  # fmt: skip
        self.ready, self.failures, self.begin = set(before), dict[str, str](), time.time()
        self.cost = {job.name: 0.0 if job.name in self.ready else job.cost for job in jobs}
        self.path, self.progress = path, progress
        self._write(False)

    def done(self, name: str, error: BaseException | None) -> None:
        """Record that a model is ready or failed."""
        if error is None:
            self.ready.add(name)
        else:
            self.ready.discard(name)
            self.failures[name] = f"{type(error).__name__}: {error}"
        self._write(False)

    def finish(self) -> None:
        """Record the end."""
        self._write(True)

    def _write(self, finished: bool) -> None:
        elapsed = time.time() - self.begin
        done = sum(self.cost[name] for name in self.ready)
        todo = sum(cost for name, cost in self.cost.items() if name not in self.ready | self.failures.keys())
        left = elapsed / done * todo if done else None if todo else 0.0
        status = {
            "finished": finished, "elapsed_s": round(elapsed, 1), "left_s": None if left is None else round(left, 1),
            "models": list(self.cost), "ready": sorted(self.ready), "failed": self.failures,
        }  # fmt: skip
        write_json(self.path, status)
        if self.progress:
            self.progress(status)
