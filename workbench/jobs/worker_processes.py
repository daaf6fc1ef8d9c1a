"""Worker processes of this machine with one thread each, which handle Ctrl-C and end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

MAX_PROCESSES = 8  # default; more would share the memory bandwidth
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
Call = Callable[[], Any]


def default_processes() -> int:
    """Return the default number of processes: one per core, up to `MAX_PROCESSES`."""
    return min(os.cpu_count() or 1, MAX_PROCESSES)


def pool(size: int) -> ProcessPoolExecutor:
    """Return an executor of `size` processes."""
    return ProcessPoolExecutor(size, multiprocessing.get_context("spawn"), initializer=_begin)


@contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM while processes start, until each new one has its handler: an import could drop them."""
    received = list[int]()
    main = threading.current_thread() is threading.main_thread()
    handlers = {s: signal.signal(s, lambda s, _: received.append(s)) for s in INTERRUPTS} if main else {}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for each in dict.fromkeys(received):
            signal.raise_signal(each)


def _begin() -> None:
    """Prepare a process for its jobs: record Ctrl-C, and end with the parent."""
    signal.signal(signal.SIGINT, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if (parent := multiprocessing.parent_process()) is None:
        return

    def end_with_parent() -> None:
        """Exit as soon as the parent is killed, so that a resumed command finds no lock held; all files are complete."""
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


_stopped = list[str]()


def _note(*_: object) -> None:
    """Record Ctrl-C while a process waits for a job; it then refuses all further jobs."""
    _stopped.append("Ctrl-C")


def interruptible(job: Call) -> Any:
    """Run a job, which Ctrl-C interrupts; raises `KeyboardInterrupt` for all jobs after a Ctrl-C."""

    def interrupt(*_: object) -> None:
        """Record Ctrl-C and interrupt the job. It is recorded first, as code that drops the exception may be running."""
        _stopped.append("Ctrl-C")
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        if _stopped:
            raise KeyboardInterrupt
        return job()
    except KeyboardInterrupt:
        _stopped.append("Ctrl-C")
        raise
    finally:
        signal.signal(signal.SIGINT, _note)


def in_new_process(job: Call) -> Any:
    """Run a job in a new process."""
    with pool(1) as executor:
        with delayed_interrupts():
            future = executor.submit(interruptible, job)
        return future.result()


@contextmanager
def one_thread() -> Iterator[None]:
    """Start child processes with one thread each, since two threads per core slow small models down many times."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
