"""Long work of pages: it runs once in a background thread with progress, time left and a cancel button, and its result is cached.

`workbench.jobs` has the library's workers, which are processes; these are threads of the dashboard's server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.runtime.scriptrunner import add_script_run_ctx, get_script_run_ctx

POLL_S, MAX_KEPT = 0.5, 64  # between polls; finished results in memory
GONE_S = 5.0  # a visitor whose page has not polled for so long has left
ABANDONED_S = 150.0  # work that no page polls stops after so long: browsers wake hidden pages once a minute

Progress = Callable[..., None]


class Cancelled(Exception):
    """Raised inside work after every waiting visitor has cancelled or left."""


class Running(Exception):
    """Raised while a result is being computed; the page shows progress and runs again at the end."""


@dataclass
class BackgroundTask:
    """Running or finished work."""

    label: str
    alike: bool = True
    """Whether all parts take about equal time, so that the rest can be estimated."""
    future: Future[Any] = field(default_factory=Future)
    started: float = field(default_factory=time.monotonic)
    done: int = 0
    total: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)
    parts: list[tuple[str, ...]] = field(default_factory=list)
    """What is done so far, in words."""
    polled: dict[str, float] = field(default_factory=dict)
    """Time of the last poll of each waiting visitor."""

    @property
    def error(self) -> BaseException | None:
        return self.future.exception() if self.future.done() else None

    def progress(self, done: int, total: int, *part: str) -> None:
        """Called by the work; raises `Cancelled` if every visitor has cancelled or closed the page."""
        self.done, self.total = done, total
        self.parts += [part] if part else []
        polls = list(self.polled.values())
        if self.cancelled.is_set() or (polls and time.monotonic() - max(polls) > ABANDONED_S):
            raise Cancelled

    def words(self) -> str:
        if not self.done or not self.total:
            return self.label
        passed = time.monotonic() - self.started
        left = f", about {passed / self.done * (self.total - self.done):.0f} s left" if self.alike else ""
        return f"{self.label}: {self.done} of {self.total} after {passed:.0f} s{left}"

    def start(self, work: Callable[[Progress], Any]) -> None:
        """Start the work in a daemon thread."""

        def run() -> None:
            try:
                self.future.set_result(work(self.progress))
            except BaseException as error:  # raised again by `result()`
                self.future.set_exception(error)

        thread = threading.Thread(target=run, daemon=True, name=f"background: {self.label}")
        add_script_run_ctx(thread)  # Streamlit's caches need the script's context
        thread.start()


@st.cache_resource(show_spinner=False)
def _tasks() -> tuple[dict[Any, BackgroundTask], threading.Lock]:
    return {}, threading.Lock()


def run(key: Any, label: str, work: Callable[[Progress], Any], *, alike: bool = True) -> Any:
    """Return the result of `work(progress)`; until it is ready, draw progress with a cancel button and raise `Running`.

    Visitors with the same key (plain values) wait for one task, which stops after all of them have cancelled. A visitor who has
    cancelled gets a button that starts it again. Work below half a second shows nothing. Errors of the work are raised here.
    `alike`: whether its parts take about equal time.
    """
    tasks, lock = _tasks()
    with lock:
        task = tasks.get(key)
        ready = task is not None and task.future.done() and task.error is None
        if key in _cancelled_here() and not ready:
            task = None
        elif task is None or isinstance(task.error, Cancelled):
            for old in [k for k, t in tasks.items() if t.future.done()][: max(0, len(tasks) - MAX_KEPT)]:
                del tasks[old]
            task = tasks[key] = BackgroundTask(label, alike)
            task.start(work)
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
        with lock:
            tasks.pop(key, None)  # the next visitor tries again
    return task.future.result()


def _visitor() -> str:
    context = get_script_run_ctx(suppress_warning=True)
    return "" if context is None else context.session_id


def _cancelled_here() -> set[Any]:
    keys: set[Any] = st.session_state.setdefault("cancelled", set())
    return keys


@st.fragment(run_every=POLL_S)
def _show_progress(key: Any, task: BackgroundTask) -> None:
    def cancel() -> None:
        _cancelled_here().add(key)
        task.polled.pop(_visitor(), None)
        if all(time.monotonic() - at > GONE_S for at in list(task.polled.values())):
            task.cancelled.set()

    task.polled[_visitor()] = time.monotonic()
    if task.future.done():
        st.rerun()
    share = task.done / task.total if task.total else 0.0
    box = st.container(key=f"work_{abs(hash(key))}")  # page.css: never faded
    left, right = box.columns([5, 1], vertical_alignment="center")
    left.progress(min(1.0, share), text=task.words())
    right.button("Cancel", key=f"cancel_{abs(hash(key))}", on_click=cancel, width="stretch")
    if task.parts:
        box.caption("Done so far, before the correction for the number of claims:")
        table = pd.DataFrame(task.parts[::-1], columns=["claim", "verdict"])
        box.dataframe(table, hide_index=True, alt="Claims judged so far")
