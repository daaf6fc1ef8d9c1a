"""The workers of a dask cluster as an executor: `dask://HOST:PORT`, or `dask:///path/to/scheduler.json`.

Every worker must run this code: it is asked for the package, its source's sum, torch, Python, and whether it sees the folders
that the jobs read and write. A job whose worker dies is given to another one, which goes on where the first one was.
"""

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
from workbench.files import digest, read_json
from workbench.places import install
from workbench.storage.mirror import folder, forget
from workbench.storage.sync import mirror_of

ANSWERS_S = 10.0  # that a scheduler has for its first answer
AGAIN_S = 2.0  # between two looks at a run that another worker is writing
LOOKS_MS = 500.0  # between two looks of dask's profiler and of its clock, which has 10 and 20 ms
SCHEMES = ("dask",)
BESIDE = (
    "app",
    "analyses",
    "shipped",
)  # inside the package where it is installed, beside it in a clone; no job reads them
Told = Callable[[BaseException | None], BaseException | None]
Mark = tuple[str, str]  # a path, and the URL it stands for
Connection = tuple[Executor, Callable[[Callable[[], Any]], Any], Told]


class Died(WorkbenchError):
    """A job whose worker died, and those of a few more attempts, by its own fault or by that of a job beside it."""


class Unfit(WorkbenchError):
    """A worker that would not do the same as this machine."""


@contextmanager
def connected(address: str, folders: Sequence[Path] = ()) -> Iterator[Connection]:
    """An executor, what is called there with each job, and how the job's error reads here.

    Raises `WorkbenchError` for an address that does not answer and for workers that are not fit, as soon as that is seen.
    """
    distributed = _distributed()
    with _silent(), _client(distributed, address) as client, _marked(folders) as marks:
        asked = facts(marks)
        for worker, says in client.run(_of_worker, marks, on_error="return").items():
            _refuse(worker, says, asked)
        client.run(_calm, nanny=True, on_error="ignore")
        if not client.nthreads():
            warn_caller(f"{address} has no workers yet; the jobs wait for the first", NoWorkersYet)
        try:
            executor = client.get_executor(pure=False)
            yield executor, functools.partial(call, asked, marks), functools.partial(_told, address)
        except CancelledError as error:
            raise WorkbenchError(f"{address} is gone; the same command goes on from here once it is back") from error
        finally:
            forget()  # what others wrote meanwhile


def call(asked: Mapping[str, Any], marks: Sequence[Mark], job: Callable[[], Any]) -> Any:
    """A job on its worker; a run that another worker still writes, which its scheduler took for lost, is waited for."""
    from distributed import get_worker

    worker = get_worker()
    _refuse(worker.address, _of_worker(marks, worker), asked)
    _calm(worker)
    while True:
        try:
            return job()
        except InUse:
            time.sleep(AGAIN_S)


def _calm(dask_worker: Any) -> None:
    """Let a worker, or its nanny, look at itself seldom: dask's defaults take 3.5 % of a core beside a job."""
    for name in ("profile", "tick"):
        if (clock := dask_worker.periodic_callbacks.get(name)) is not None:
            clock.callback_time = max(LOOKS_MS, clock.callback_time)


def facts(marks: Sequence[Mark]) -> dict[str, Any]:
    """What decides whether two machines do the same."""
    unseen = [path for path, url in marks if not (str(folder(url)) == path if url else Path(path).exists())]
    versions = {"workbench": _code(), "torch": version("torch"), "Python": platform.python_version().rpartition(".")[0]}
    return versions | {"threads": 1, "unseen": unseen}


@functools.cache
def _code() -> str:
    """A sum of this package's source."""
    root = Path(__file__).parents[1]
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    files = sorted(name.as_posix() for name in names if name.parts[0] not in BESIDE)
    return digest(*((name, (root / name).read_text(encoding="utf-8")) for name in files))


def _of_worker(marks: Sequence[Mark], dask_worker: Any) -> dict[str, Any]:
    return facts(marks) | {"threads": dask_worker.state.nthreads}


def _refuse(worker: str, says: Any, asked: Mapping[str, Any]) -> None:
    """Raise `Unfit` for a worker that does not do the same, by what it says of itself or by how it failed to."""
    if isinstance(says, BaseException) and (lacks := re.search(r"No module named '([\w.]+)'", str(says))):
        raise Unfit(f"the worker {worker} cannot import {lacks[1]}: install there what is installed here")
    if isinstance(says, BaseException):
        raise Unfit(f"the worker {worker} has another version of workbench: {type(says).__name__}: {says}")
    if (unseen := says["unseen"]) and mirror_of(Path(unseen[0])) is not None:
        raise Unfit(
            f"the worker {worker} has its cache elsewhere than {unseen[0]}: set WORKBENCH_CACHE to one path everywhere"
        )
    if unseen:
        raise Unfit(
            f"the worker {worker} does not see {Path(unseen[0]).parent}: give a folder that all machines share, or a URL"
        )
    if says["threads"] != 1:
        raise Unfit(f"the worker {worker} has {says['threads']} threads: start it with --nthreads 1, one for each core")
    for what in ("workbench", "torch", "Python"):
        if says[what] != asked[what]:
            raise Unfit(f"the worker {worker} has another version of {what}: {says[what]}, here {asked[what]}")


def _told(address: str, error: BaseException | None) -> BaseException | None:
    """A job's error as it reads here; raises what concerns all jobs."""
    if isinstance(error, Unfit):
        raise error
    if error is not None and type(error).__name__ == "KilledWorker":
        last = getattr(error, "last_worker", None)
        return Died(
            f"its worker died, and so did those that tried again (out of memory?), last {last and last.address}"
        )
    if isinstance(error, ModuleNotFoundError | AttributeError) and "workbench" in str(error):
        raise Unfit(f"a worker of {address} has another version of workbench, or none: {error}") from error
    return error


@contextmanager
def _silent() -> Iterator[None]:
    """Without what dask logs of a scheduler that is gone: it is one sentence here."""
    logs = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith("distributed")]
    levels = [log.level for log in logs]
    try:
        for log in logs:
            log.setLevel(logging.CRITICAL + 1)
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def _distributed() -> Any:
    try:
        import distributed
    except ImportError as error:
        raise WorkbenchError(f"dask:// needs dask.distributed: {install('dask')} ({error})") from error
    return distributed


@contextmanager
def _client(distributed: Any, address: str) -> Iterator[Any]:
    scheme, _, place = address.partition("://")
    if scheme not in SCHEMES or not place:
        raise UnknownName("cluster", address, [f"{scheme}://HOST:PORT" for scheme in SCHEMES])
    if place.startswith("/"):  # what a scheduler writes of itself; dask would wait for the file without end
        place = str(read_json(Path(place)).get("address"))
    try:
        client = distributed.Client(place, timeout=ANSWERS_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise WorkbenchError(f"{address} does not answer: {str(error).splitlines()[0]}") from error
    try:
        yield client
    finally:
        with contextlib.suppress(OSError, CancelledError):  # a scheduler that is gone
            client.close(timeout=ANSWERS_S)


@contextmanager
def _marked(folders: Sequence[Path]) -> Iterator[list[Mark]]:
    """A file with a new name in each folder, by which workers know it: another machine may have one of the same path.

    What may only be read is known by its path; what stands for a URL, by that.
    """
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
