"""Long work of pages: it runs once in a background thread, shows progress and time left, can be cancelled, and is kept when done.

The library's own workers are processes (`workbench.jobs`); these are threads of the dashboard's server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import streamlit as st
from streamlit.runtime.scriptrunner import add_script_run_ctx, get_script_run_ctx

POLL_S, MAX_KEPT = 0.5, 64  # between looks at work under way; finished results kept
GONE_S = 5.0  # after which a visitor whose page did not poll has left
ABANDONED_S = 150.0  # after which work that no page polls stops: browsers wake hidden pages once a minute

Progress = Callable[[int, int], None]


class Cancelled(Exception):
    """Raised inside work that every visitor who waited for it cancelled, or left."""


class Running(Exception):
    """Raised where a result is not there yet; its progress stands on the page, which runs again when it is done."""


@dataclass
class Task:
    """Work under way, or its end."""

    label: str
    future: Future[Any] = field(default_factory=Future)
    started: float = field(default_factory=time.monotonic)
    done: int = 0
    total: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)
    polled: dict[str, float] = field(default_factory=dict)
    """When the page of each visitor who waits last polled."""

    @property
    def error(self) -> BaseException | None:
        return self.future.exception() if self.future.done() else None

    def progress(self, done: int, total: int) -> None:
        """Called by the work as it goes; stops it where every visitor cancelled, or closed the page."""
        self.done, self.total = done, total
        polls = list(self.polled.values())
        if self.cancelled.is_set() or (polls and time.monotonic() - max(polls) > ABANDONED_S):
            raise Cancelled

    def words(self) -> str:
        if not self.done or not self.total:
            return self.label
        left = (time.monotonic() - self.started) / self.done * (self.total - self.done)
        return f"{self.label}: {self.done} of {self.total}, about {left:.0f} s left"

    def start(self, work: Callable[[Progress], Any]) -> None:
        """Begin the work in a thread that does not keep the server from ending."""
        thread = threading.Thread(target=self._run, args=(work,), daemon=True, name=f"background: {self.label}")
        add_script_run_ctx(thread)  # the caches it uses ask whose script they run in
        thread.start()

    def _run(self, work: Callable[[Progress], Any]) -> None:
        try:
            self.future.set_result(work(self.progress))
        except BaseException as error:  # raised again where the result is read
            self.future.set_exception(error)


@st.cache_resource(show_spinner=False)
def _tasks() -> tuple[dict[Any, Task], threading.Lock]:
    return {}, threading.Lock()


def run(key: Any, label: str, work: Callable[[Progress], Any]) -> Any:
    """The result of `work(progress)`; while it is not there, draws progress with a cancel button and raises `Running`.

    `key`: plain values that name the work. Visitors with the same key wait for the same task, which stops once all of them
    have cancelled; for each who did it stays cancelled, with a button that starts it again. Work that takes less than half
    a second shows nothing. Raises what the work raised.
    """
    task = _task(key, label, work)
    if task is None:
        message, again = st.columns([4, 1], vertical_alignment="center")
        message.info(f"{label}: cancelled.")
        button = f"again_{abs(hash(key))}"
        again.button("Start again", key=button, on_click=_cancelled_here().discard, args=(key,), width="stretch")
        raise Running
    task.polled[_visitor()] = time.monotonic()
    wait([task.future], POLL_S)
    if not task.future.done() or isinstance(task.error, Cancelled):
        _show_progress(key, task)
        raise Running
    if task.error is not None:
        tasks, lock = _tasks()
        with lock:
            tasks.pop(key, None)  # the next visitor tries again
    return task.future.result()


def _task(key: Any, label: str, work: Callable[[Progress], Any]) -> Task | None:
    """The task of a key, begun where there is none; None where this visitor cancelled it and it has no result."""
    tasks, lock = _tasks()
    with lock:
        task = tasks.get(key)
        ready = task is not None and task.future.done() and task.error is None
        if key in _cancelled_here() and not ready:
            return None
        if task is None or isinstance(task.error, Cancelled):
            for old in [k for k, t in tasks.items() if t.future.done()][: max(0, len(tasks) - MAX_KEPT)]:
                del tasks[old]
            task = tasks[key] = Task(label)
            task.start(work)
    return task


def _visitor() -> str:
    context = get_script_run_ctx(suppress_warning=True)
    return "" if context is None else context.session_id


def _cancelled_here() -> set[Any]:
    keys: set[Any] = st.session_state.setdefault("cancelled", set())
    return keys


def _cancel(key: Any, task: Task) -> None:
    """Wait no longer; the work stops unless another visitor waits for it."""
    _cancelled_here().add(key)
    task.polled.pop(_visitor(), None)
    if all(time.monotonic() - at > GONE_S for at in list(task.polled.values())):
        task.cancelled.set()


@st.fragment(run_every=POLL_S)
def _show_progress(key: Any, task: Task) -> None:
    task.polled[_visitor()] = time.monotonic()
    if task.future.done():
        st.rerun()
    share = task.done / task.total if task.total else 0.0
    left, right = st.columns([5, 1], vertical_alignment="center")
    left.progress(min(1.0, share), text=task.words())
    right.button("Cancel", key=f"cancel_{abs(hash(key))}", on_click=_cancel, args=(key, task), width="stretch")
