"""Executor over the workers of a dask cluster that run the same code: `dask://HOST:PORT`, or `dask:///path/to/scheduler.json`."""

from __future__ import annotations

import contextlib
import functools
import logging
import platform
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from workbench.errors import InUse, NoWorkersYet, UnknownName, WorkbenchError, warn_caller
from workbench.file_io import digest, read_json
from workbench.places import install
from workbench.storage.mirror import folder, forget, mirror_of

ANSWERS_S = 10.0  # seconds to wait for a scheduler's first answer
AGAIN_S = 2.0  # seconds between attempts on a run that another worker writes
LOOKS_MS = 500.0  # interval of dask's profiler and clock, by default 10 and 20 ms
SCHEMES = ("dask",)
BESIDE = ("app", "analyses", "shipped")  # inside an installed package, beside it in a clone; no job reads them
Explain = Callable[[BaseException | None], BaseException | None]
Mark = tuple[str, str]  # a path, and the URL it stands for
Connection = tuple[Executor, Callable[[Callable[[], Any]], Any], Explain]


class Died(WorkbenchError):
    """A job whose worker died in every attempt, because of this job or another job on the same worker."""


class Unfit(WorkbenchError):
    """A worker whose results would differ from this machine's."""


@contextmanager
def connected(address: str, folders: Sequence[Path] = ()) -> Iterator[Connection]:
    """Yield an executor, the function to call with each job, and a function that explains a job's error."""
    try:
        import distributed
    except ImportError as error:
        raise WorkbenchError(f"dask:// needs dask.distributed: {install('dask')} ({error})") from error
    scheme, _, place = address.partition("://")
    if scheme not in SCHEMES or not place:
        raise UnknownName("cluster", address, [f"{scheme}://HOST:PORT" for scheme in SCHEMES])
    if place.startswith("/"):  # a scheduler file; dask would wait for it forever
        place = str(read_json(Path(place)).get("address"))
    with contextlib.ExitStack() as stack:
        for name in [name for name in logging.root.manager.loggerDict if name.startswith("distributed")]:
            log = logging.getLogger(name)  # silent when the scheduler dies: we report the error ourselves
            stack.callback(log.setLevel, log.level)
            log.setLevel(logging.CRITICAL + 1)
        try:
            client = distributed.Client(place, timeout=ANSWERS_S, set_as_default=False)
        except (OSError, ValueError) as error:
            raise WorkbenchError(f"{address} does not answer: {str(error).splitlines()[0]}") from error

        def close() -> None:
            with contextlib.suppress(OSError, CancelledError):  # the scheduler is gone
                client.close(timeout=ANSWERS_S)

        stack.callback(close)
        marks = stack.enter_context(_marked(folders))
        asked = environment_facts(marks)
        for worker, answer in client.run(_worker_facts, marks, on_error="return").items():
            _refuse(worker, answer, asked)
        client.run(_calm, nanny=True, on_error="ignore")
        if not client.nthreads():
            warn_caller(f"{address} has no workers yet; the jobs wait for the first", NoWorkersYet)
        try:
            executor = client.get_executor(pure=False)
            yield executor, functools.partial(call, asked, marks), functools.partial(explained_error, address)
        except CancelledError as error:
            raise WorkbenchError(f"{address} is gone; the same command goes on from here once it is back") from error
        finally:
            forget()  # other machines wrote to the mirrors


def call(asked: Mapping[str, Any], marks: Sequence[Mark], job: Callable[[], Any]) -> Any:
    """Run a job on its worker; waits for a run that a worker still writes although the scheduler lost it."""
    from distributed import get_worker

    worker = get_worker()
    _refuse(worker.address, _worker_facts(marks, worker), asked)
    _calm(worker)
    while True:
        try:
            return job()
        except InUse:
            time.sleep(AGAIN_S)


def _calm(dask_worker: Any) -> None:
    """Slow down the profiler of a worker or nanny: dask's defaults take 3.5 % of a core."""
    for name in ("profile", "tick"):
        if (clock := dask_worker.periodic_callbacks.get(name)) is not None:
            clock.callback_time = max(LOOKS_MS, clock.callback_time)


def environment_facts(marks: Sequence[Mark]) -> dict[str, Any]:
    """Return the facts that must be equal for two machines to compute the same."""
    unseen = [path for path, url in marks if not (str(folder(url)) == path if url else Path(path).exists())]
    versions = {"workbench": _code(), "torch": version("torch"), "Python": platform.python_version().rpartition(".")[0]}
    return versions | {"threads": 1, "unseen": unseen}


@functools.cache
def _code() -> str:
    """Return a digest of this package's source."""
    root = Path(__file__).parents[1]
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    files = sorted(name.as_posix() for name in names if name.parts[0] not in BESIDE)
    return digest(*((name, (root / name).read_text(encoding="utf-8")) for name in files))


def _worker_facts(marks: Sequence[Mark], dask_worker: Any) -> dict[str, Any]:
    return environment_facts(marks) | {"threads": dask_worker.state.nthreads}


def _refuse(worker: str, answer: Any, asked: Mapping[str, Any]) -> None:
    """Raise `Unfit` for a worker whose facts differ, or which failed to return them."""
    if isinstance(answer, BaseException) and (lacks := re.search(r"No module named '([\w.]+)'", str(answer))):
        raise Unfit(f"the worker {worker} cannot import {lacks[1]}: install there what is installed here")
    if isinstance(answer, BaseException):
        raise Unfit(f"the worker {worker} has another version of workbench: {type(answer).__name__}: {answer}")
    if (unseen := answer["unseen"]) and mirror_of(Path(unseen[0])) is not None:
        cure = "set WORKBENCH_CACHE to one path everywhere"
        raise Unfit(f"the worker {worker} has its cache elsewhere than {unseen[0]}: {cure}")
    if unseen:
        cure = "give a folder that all machines share, or a URL"
        raise Unfit(f"the worker {worker} does not see {Path(unseen[0]).parent}: {cure}")
    if answer["threads"] != 1:
        cure = "start it with --nthreads 1, one for each core"
        raise Unfit(f"the worker {worker} has {answer['threads']} threads: {cure}")
    for what in ("workbench", "torch", "Python"):
        if answer[what] != asked[what]:
            raise Unfit(f"the worker {worker} has another version of {what}: {answer[what]}, here {asked[what]}")


def explained_error(address: str, error: BaseException | None) -> BaseException | None:
    """Return the explained error of a job; raises errors that concern all jobs."""
    if isinstance(error, Unfit):
        raise error
    if error is not None and type(error).__name__ == "KilledWorker":
        last = getattr(error, "last_worker", None)
        others = f"so did those that tried again (out of memory?), last {last and last.address}"
        return Died(f"its worker died, and {others}")
    if isinstance(error, ModuleNotFoundError | AttributeError) and "workbench" in str(error):
        raise Unfit(f"a worker of {address} has another version of workbench, or none: {error}") from error
    return error


@contextmanager
def _marked(folders: Sequence[Path]) -> Iterator[list[Mark]]:
    """Create a file in each folder by which workers recognise it, as equal paths may differ; a mirror is recognised by its URL."""
    made, marks = list[Path](), list[Mark]()
    try:
        for place in folders:
            mark = place / f".shared-{uuid.uuid4().hex[:12]}"
            if (mirror := mirror_of(place)) is not None:
                marks.append((str(mirror.root), mirror.url))
                continue
            try:
                mark.touch()
                made.append(mark)
            except OSError:
                mark = place
            marks.append((str(mark), ""))
        yield marks
    finally:
        for mark in made:
            mark.unlink(missing_ok=True)
