"""Long work of several visitors: one task for all, cancelled by each for itself; and what the cached source lets go."""

from __future__ import annotations

import os
import threading
from concurrent.futures import wait

import dashboard
import pytest


@pytest.fixture
def visitors(monkeypatch, scanned_once):
    """`visitors(name)` opens a page with a piece of long work for a visitor; and the work: begun, `end` lets it end."""
    from streamlit.testing.v1 import AppTest

    from app import background_tasks

    begun, end = [], threading.Event()

    def work(progress):
        begun.append(1)
        for i in range(2000):
            progress(i, 2000)
            if end.wait(0.01):
                return "forty-two"
        raise AssertionError("the work was never ended")

    def script():
        import contextlib

        import streamlit as st

        from app import background_tasks

        with contextlib.suppress(background_tasks.Running):
            st.text(background_tasks.run("the work", "Long work", background_tasks.work))

    class Visitor:
        def __init__(self, name):
            self.name, self.at = name, AppTest.from_function(script, default_timeout=20)

        def looks(self):
            monkeypatch.setattr(background_tasks, "_visitor", lambda: self.name)
            self.at.run()
            assert not self.at.exception
            return " ".join(e.value for e in (*self.at.text, *self.at.info))

        def presses(self, label):
            monkeypatch.setattr(background_tasks, "_visitor", lambda: self.name)
            next(b for b in self.at.button if b.label == label).click()
            return self.looks()

    background_tasks._tasks.clear()
    monkeypatch.setattr(background_tasks, "work", work, raising=False)
    monkeypatch.setattr(background_tasks, "POLL_S", 0.05)
    yield Visitor, begun, end
    end.set()


def test_cancelling_leaves_the_work_to_the_other_visitors(visitors):
    visitor, begun, end = visitors
    one, two = visitor("one"), visitor("two")
    one.looks()
    two.looks()
    assert len(begun) == 1
    assert "cancelled" in one.presses("Cancel")
    assert "cancelled" not in two.looks()
    end.set()
    for _ in range(100):
        if "forty-two" in two.looks():
            break
    assert "forty-two" in two.looks()
    assert "forty-two" in one.looks()  # it is there after all
    assert len(begun) == 1


def test_work_whose_pages_were_closed_stops_and_is_begun_anew_by_the_next_visitor(visitors, monkeypatch):
    from app import background_tasks

    visitor, begun, end = visitors
    monkeypatch.setattr(background_tasks, "ABANDONED_S", 0.3)
    one = visitor("one")
    one.looks()
    (task,) = background_tasks._tasks()[0].values()
    assert wait([task.future], 10).done
    assert isinstance(task.error, background_tasks.Cancelled)
    monkeypatch.setattr(background_tasks, "ABANDONED_S", 100)
    end.set()
    for _ in range(100):
        if "forty-two" in one.looks():
            break
    assert len(begun) == 2


def test_work_that_all_cancelled_stops_and_is_begun_anew_for_the_next_visitor(visitors):
    from app import background_tasks

    visitor, begun, end = visitors
    one, two = visitor("one"), visitor("two")
    one.looks()
    assert "cancelled" in one.presses("Cancel")
    (task,) = background_tasks._tasks()[0].values()
    assert wait([task.future], 5).done
    assert isinstance(task.error, background_tasks.Cancelled)
    assert "cancelled" in one.looks()
    assert "cancelled" not in two.looks()
    assert len(begun) == 2
    end.set()
    for _ in range(100):
        if "forty-two" in one.presses("Start again") if "cancelled" in one.looks() else "forty-two" in one.looks():
            break
    assert "forty-two" in one.looks()
    assert len(begun) == 2


def test_a_model_in_use_is_let_go_without_keeping_anybody_waiting():
    from app import cached_source

    class Model:
        def __init__(self):
            self.lock, self.done = threading.RLock(), threading.Event()

        def reset_hooks(self):
            pass

        def to(self, device):
            self.done.set()

    model = Model()
    with model.lock:
        cached_source.free_model(model)
        assert not model.done.wait(0.05)
    assert model.done.wait(5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step_000020/model.safetensors", "tokenizer.json", "run.json"])
def test_files_replaced_by_older_ones_are_other_files(populated, tmp_path, name):
    from workbench.views import Link, Source
    from workbench.views.source import checkpoint_key

    folder = dashboard.copied(populated, tmp_path / "runs")
    (subject,) = Source(folder).subjects(Link("prompt", {"a": "text-resformer-s0"}))
    before = checkpoint_key(subject)
    assert checkpoint_key(subject) == before
    path = folder / "text-resformer-s0" / name
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(0, 0))  # as tools do that keep times
    other.replace(path)
    assert checkpoint_key(subject) != before
