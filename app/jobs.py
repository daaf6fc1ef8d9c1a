"""Long work: it runs once in a thread of its own, shows progress and time left, can be cancelled, and is kept when done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import streamlit as st
from streamlit.runtime.scriptrunner import add_script_run_ctx, get_script_run_ctx

EVERY, KEPT = 0.5, 64  # seconds between looks at a running job; finished jobs kept
GONE = 5.0  # seconds after which somebody whose page did not look is gone
ABANDONED = 150.0  # seconds after which work that no page looks at stops: browsers wake hidden pages once a minute


class Cancelled(Exception):
    """Raised inside a job that everybody who waited for it cancelled, or left."""


class Running(Exception):
    """Raised where a result is not there yet; its progress stands on the page, which runs again when it is done."""


@dataclass
class Job:
    """Work under way, or its end."""

    label: str
    started: float = field(default_factory=time.monotonic)
    done: int = 0
    total: int = 0
    result: Any = None
    error: BaseException | None = None
    finished: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    seen: dict[str, float] = field(default_factory=dict)
    """When the page of each person who waits last looked."""

    def progress(self, done: int, total: int) -> None:
        """Told by the work as it goes; stops it where everybody cancelled, or closed the page."""
        self.done, self.total = done, total
        looked = list(self.seen.values())
        if self.cancelled.is_set() or (looked and time.monotonic() - max(looked) > ABANDONED):
            raise Cancelled

    def words(self) -> str:
        """How far it is, and how long it will take."""
        if not self.done or not self.total:
            return self.label
        left = (time.monotonic() - self.started) / self.done * (self.total - self.done)
        return f"{self.label}: {self.done} of {self.total}, about {left:.0f} s left"


@st.cache_resource(show_spinner=False)
def _jobs() -> tuple[dict[Any, Job], threading.Lock]:
    return {}, threading.Lock()


def run(key: Any, label: str, work: Callable[[Callable[[int, int], None]], Any]) -> Any:
    """The result of `work(progress)`; while it is not there, draws progress with a cancel button and raises `Running`.

    What a person cancelled stays so for that person, with a button that starts it again.

    `key`: plain values that name the work; people who ask for the same wait for the same job, which stops once all of them
    have cancelled. Raises what the work raised.
    Work that takes less than half a second shows nothing.
    """
    jobs, lock = _jobs()
    with lock:
        job = jobs.get(key)
        done = job is not None and job.finished.is_set() and job.error is None
        left = key in _left() and not done
        if not left and (job is None or isinstance(job.error, Cancelled)):
            for old in [k for k, j in jobs.items() if j.finished.is_set()][: max(0, len(jobs) - KEPT)]:
                del jobs[old]
            job = jobs[key] = Job(label)
            thread = threading.Thread(target=_work, args=(job, work), daemon=True, name=f"job {label}")
            add_script_run_ctx(thread)  # the caches it uses ask whose script they run in
            thread.start()
    if left or job is None:
        said, again = st.columns([4, 1], vertical_alignment="center")
        said.info(f"{label}: cancelled.")
        again.button(
            "Start again", key=f"again_{abs(hash(key))}", on_click=_left().discard, args=(key,), width="stretch"
        )
        raise Running
    job.seen[_me()] = time.monotonic()
    if not job.finished.wait(EVERY) or isinstance(job.error, Cancelled):
        _wait(key, job)
        raise Running
    if job.error is not None:
        with lock:
            jobs.pop(key, None)  # asked again, it is tried again
        raise job.error
    return job.result


def _me() -> str:
    context = get_script_run_ctx(suppress_warning=True)
    return "" if context is None else context.session_id


def _left() -> set[Any]:
    """Keys of the work that this person cancelled."""
    found: set[Any] = st.session_state.setdefault("cancelled", set())
    return found


def _cancel(key: Any, job: Job) -> None:
    """Wait no longer; the work stops unless somebody else waits for it."""
    _left().add(key)
    job.seen.pop(_me(), None)
    if all(time.monotonic() - at > GONE for at in list(job.seen.values())):
        job.cancelled.set()


def _work(job: Job, work: Callable[[Callable[[int, int], None]], Any]) -> None:
    try:
        job.result = work(job.progress)
    except BaseException as error:  # handed to whoever asks for the result
        job.error = error
    finally:
        job.finished.set()


@st.fragment(run_every=EVERY)
def _wait(key: Any, job: Job) -> None:
    job.seen[_me()] = time.monotonic()
    if job.finished.is_set():
        st.rerun()
    share = job.done / job.total if job.total else 0.0
    left, right = st.columns([5, 1], vertical_alignment="center")
    left.progress(min(1.0, share), text=job.words())
    right.button("Cancel", key=f"cancel_{abs(hash(key))}", on_click=_cancel, args=(key, job), width="stretch")
