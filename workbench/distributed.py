"""Ranks and collectives of the processes that `accelerate launch` or `torchrun` started; without them nothing happens."""

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
        cure = "unset it or correct it"
        raise WorkbenchError(f"the environment variable {variable} is {text!r}, not a whole number: {cure}")
    return int(text or default)


@contextmanager
def alone(enabled: bool = True) -> Iterator[None]:
    """Let this process do all of the work, for sharded models whose forward pass needs every process."""
    token = _ALONE.set(enabled or _ALONE.get())
    try:
        yield
    finally:
        _ALONE.reset(token)


def join(device: str | None) -> str | None:
    """Join the other processes, and return this process's device unless one is given."""
    if world_size() == 1:
        return device
    from accelerate import PartialState

    atexit.register(leave)
    state = PartialState(cpu=device == "cpu")
    return device or str(state.device)


def leave() -> None:
    """End the process group before the interpreter exits: its threads would abort the process."""
    import torch

    gc.collect()  # a finished training holds the group, and with it the threads, through its wrapped model
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def shard(items: Iterable[T]) -> Iterable[T]:
    """Return this process's share of the items: every k-th."""
    return islice(items, rank(), None, world_size())


def all_gather(value: T) -> list[T]:
    """Return the values of all processes, by rank; every process must call it."""
    if world_size() == 1:
        return [value]
    import torch

    gathered: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def scatter(work: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Compute each result in one process and return all of them in every process; a `WorkbenchError` is raised in all."""
    if world_size() == 1:
        return {name: make() for name, make in work.items()}
    own: dict[str, T | WorkbenchError] = {}
    for name in shard(work):
        try:
            own[name] = work[name]()
        except WorkbenchError as error:  # the other processes would wait for ever
            own[name] = error
    everything = {name: result for part in all_gather(own) for name, result in part.items()}
    results: dict[str, T] = {}
    for name in work:
        result = everything[name]
        if isinstance(result, WorkbenchError):
            raise result
        results[name] = result
    return results
