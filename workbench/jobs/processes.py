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
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
Call = Callable[[], Any]


def usual() -> int:
    """How many there are unless asked otherwise: one for each core, up to `MAX_PROCESSES`."""
    return min(os.cpu_count() or 1, MAX_PROCESSES)


def pool(size: int) -> ProcessPoolExecutor:
    """Return an executor of `size` processes."""
    return ProcessPoolExecutor(size, multiprocessing.get_context("spawn"), initializer=_begin)


@contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM while processes are started, so that their handlers know all of them.

    A process started here has SIGINT blocked until its own handler is installed: an import could drop the exception.
    """
    received = list[int]()
    main = threading.current_thread() is threading.main_thread()
    handlers = {s: signal.signal(s, lambda s, _: received.append(s)) for s in INTERRUPTS} if main else {}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for each in dict.fromkeys(received):
            signal.raise_signal(each)


def _begin() -> None:
    """Prepare a process for its jobs: note Ctrl-C, and end with the parent."""
    signal.signal(signal.SIGINT, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
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
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if _stopped:
            raise KeyboardInterrupt
        return job()
    except KeyboardInterrupt:
        _stopped.append("Ctrl-C")
        raise
    finally:
        signal.signal(signal.SIGINT, _note)


def alone(job: Call) -> Any:
    """Call a job in a process of its own."""
    with pool(1) as one:
        with delayed_interrupts():
            future = one.submit(interruptible, job)
        return future.result()


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
