"""One program in several processes, as `accelerate launch` and `torchrun` start it: who this one is, and what they exchange.

Alone, every function here does nothing. What is exchanged travels pickled between the processes of one launch, which run
the same code for the same user; no file is ever read that way.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any, TypeVar

from workbench.environment import RANK, WORLD_SIZE
from workbench.errors import WorkbenchError

T = TypeVar("T")


_ALONE: ContextVar[bool] = ContextVar("alone", default=False)


def world_size() -> int:
    """Return the number of processes that a launcher has started; 1 without a launcher."""
    return 1 if _ALONE.get() else max(1, _number_in(WORLD_SIZE, 1))


def rank() -> int:
    """Return the number of this process, from 0; a `RANK` without other processes (`WORLD_SIZE`) does not count."""
    return 0 if world_size() == 1 else _number_in(RANK, 0)


def _number_in(variable: str, default: int) -> int:
    text = os.environ.get(variable, "").strip()
    if text and not text.isdecimal():
        raise WorkbenchError(
            f"the environment variable {variable} is {text!r}, not a whole number: unset it or correct it"
        )
    return int(text or default)


@contextmanager
def alone(chosen: bool = True) -> Iterator[None]:
    """While open, this process does all of the work: for models whose every run needs every process (sharded weights)."""
    token = _ALONE.set(chosen or _ALONE.get())
    try:
        yield
    finally:
        _ALONE.reset(token)


def join(device: str | None) -> str | None:
    """Meet the other processes, once; returns the device of this one where none was asked for."""
    if world_size() == 1:
        return device
    from accelerate import PartialState

    atexit.register(leave)
    state = PartialState(cpu=device == "cpu")
    return device or str(state.device)


def leave() -> None:
    """End the launcher's process group before the interpreter does: its threads abort a process that just exits."""
    import torch

    gc.collect()  # a finished training holds the group, and with it the threads, through its wrapped model
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def shard(items: Iterable[T]) -> Iterable[T]:
    """This process's items: every k-th of them."""
    return islice(items, rank(), None, world_size())


def all_gather(mine: T) -> list[T]:
    """What each process has, in their order; the same everywhere. All must call it alike."""
    if world_size() == 1:
        return [mine]
    import torch

    gathered: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(gathered, mine)
    return gathered


def scatter(work: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """The results of all, each computed by one process and known to every one. A `WorkbenchError` of one is raised in all."""
    if world_size() == 1:
        return {name: make() for name, make in work.items()}
    mine: dict[str, T | WorkbenchError] = {}
    for name in shard(work):
        try:
            mine[name] = work[name]()
        except WorkbenchError as error:  # the others would wait for it for ever
            mine[name] = error
    everything = {name: result for part in all_gather(mine) for name, result in part.items()}
    results: dict[str, T] = {}
    for name in work:
        result = everything[name]
        if isinstance(result, WorkbenchError):
            raise result
        results[name] = result
    return results
