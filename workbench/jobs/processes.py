"""Processes of this machine, of one thread each: they take Ctrl-C between jobs, and end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

MAX_PROCESSES = 8  # unless asked otherwise; more share the memory's bandwidth
Call = Callable[[], Any]


def usual() -> int:
    """How many there are unless asked otherwise: one for each core, up to `MAX_PROCESSES`."""
    return min(os.cpu_count() or 1, MAX_PROCESSES)


def pool(size: int) -> ProcessPoolExecutor:
    """So many processes."""
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


def interruptible(job: Call) -> Any:
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


def alone(job: Call) -> Any:
    """Call a job in a process of its own."""
    with pool(1) as one:
        return one.submit(interruptible, job).result()


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
