"""Jobs in processes: what is told of each, how long the rest takes, and what the children inherit."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from workbench.jobs import worker_processes
from workbench.jobs.running import Job, StatusFile, results, run_jobs
from workbench.jobs.worker_processes import one_thread
from workbench.runs.run import CORPORA, shared_text


def threads(monkeypatch):
    """The pool of processes as one of threads: its jobs run here."""
    monkeypatch.setattr(worker_processes, "pool", ThreadPoolExecutor)
    monkeypatch.setattr(worker_processes, "interruptible", lambda job: job())


def test_every_job_is_called_and_what_it_returned_is_told_before_it_is_done(monkeypatch):
    threads(monkeypatch)
    heard = []
    jobs = [Job("4 - 1", lambda a, b: a - b, (4, 1)), Job("1 / 0", lambda: 1 // 0)]
    run_jobs(
        jobs,
        1,
        lambda job, error: heard.append((job.name, type(error))),
        lambda job, value: heard.append((job.name, value)),
    )
    assert sorted(heard, key=str) == sorted(
        [("4 - 1", 3), ("4 - 1", type(None)), ("1 / 0", ZeroDivisionError)], key=str
    )
    assert heard.index(("4 - 1", 3)) < heard.index(("4 - 1", type(None)))


def test_ctrl_c_in_a_worker_ends_them_all_and_is_no_failure_of_a_job(monkeypatch):
    threads(monkeypatch)
    heard = []

    def stopped():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs([Job("a", stopped)], 1, lambda job, error: heard.append(error))
    assert not heard


def test_ctrl_c_in_a_worker_leaves_no_job_that_had_not_begun(monkeypatch):
    threads(monkeypatch)
    begun = []

    def stopped():
        raise KeyboardInterrupt

    waiting = [Job(str(i), lambda i=i: begun.append(i) or time.sleep(0.05)) for i in range(50)]
    with pytest.raises(KeyboardInterrupt):
        run_jobs([Job("stopped", stopped, cost=9.0), *waiting], 1, lambda job, error: None)
    assert len(begun) < 10


@pytest.mark.parametrize("place", ["as a job begins", "as a job ends"])
def test_ctrl_c_between_the_lines_of_a_worker_refuses_all_further_jobs(place, monkeypatch):
    """It arrives just after the handler of a job is installed, or just before it is removed."""
    stopped, begun, install, before = [], [], signal.signal, signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(worker_processes, "_stopped", stopped)

    def arrives(number, handler):
        if place == "as a job begins" and handler is not worker_processes._note:
            install(number, handler)
            signal.raise_signal(signal.SIGINT)
        elif place == "as a job ends" and handler is worker_processes._note and not stopped:
            signal.raise_signal(signal.SIGINT)
        install(number, handler)

    monkeypatch.setattr(worker_processes.signal, "signal", arrives)
    try:
        with pytest.raises(KeyboardInterrupt):
            worker_processes.interruptible(lambda: begun.append("first"))
        monkeypatch.undo()
        monkeypatch.setattr(worker_processes, "_stopped", stopped)
        with pytest.raises(KeyboardInterrupt):
            worker_processes.interruptible(lambda: begun.append("second"))
    finally:
        signal.signal(signal.SIGINT, before)
    assert "second" not in begun


def test_any_executor_takes_the_jobs_and_their_results_come_in_the_jobs_order():
    jobs, heard = [Job(str(i), lambda i=i: time.sleep(0.01 * (3 - i)) or i) for i in range(3)], []
    with ThreadPoolExecutor(3) as executor:
        assert results(jobs, executor, lambda *told: heard.append(told)) == [0, 1, 2]
        with pytest.raises(ZeroDivisionError):
            results([Job("1 / 0", lambda: 1 // 0), jobs[0]], executor, None)
        assert executor.submit(abs, -1).result() == 1, "it is the caller's to end"
    assert [told[:2] for told in heard] == [(1, 3), (2, 3), (3, 3)]


def test_the_time_left_counts_what_ends_here_and_nothing_that_had_ended_before(tmp_path, monkeypatch):
    """Of five equal jobs two had ended: after one of the others in 60 seconds, two are left; after a failure, one."""
    clock, told = iter([0.0, 0.0, 60.0, 90.0, 120.0, 120.0]), []
    monkeypatch.setattr("workbench.jobs.running.time.time", lambda: next(clock))
    jobs = [Job(name, print, (), 1.0) for name in "abcde"]
    status = StatusFile(
        tmp_path / "status.json", jobs, lambda now: told.append((len(now["ready"]), now["left_s"])), before="ab"
    )
    status.done("c", None)
    status.done("a", ValueError("its measures"))
    status.done("d", None)
    status.done("e", None)
    assert told == [(2, None), (3, 120.0), (2, 180.0), (3, 60.0), (4, 0.0)]


@pytest.mark.parametrize("before", ["7", None])
def test_children_start_with_one_thread_and_the_parent_gets_its_own_number_back(monkeypatch, before):
    if before is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", before)
    with contextlib.suppress(ZeroDivisionError), one_thread():
        assert os.environ["OMP_NUM_THREADS"] == "1"
        raise ZeroDivisionError
    assert os.environ.get("OMP_NUM_THREADS") == before


def test_a_corpus_is_built_once_for_all_processes_under_its_settings_or_a_name(tmp_path):
    text = "\n\n".join(f"line {i} of the book says {i * i % 97} and nothing more than that" for i in range(1500))
    (tmp_path / "book.txt").write_text(text)
    settings = {"texts": (tmp_path / "book.txt",), "vocabulary": 280}
    data = shared_text(tmp_path / "runs", **settings)
    pointers = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs" / CORPORA).glob("*.json")}
    assert len(pointers) == 1
    shared_text.cache_clear()  # as another process
    (tmp_path / "book.txt").unlink()
    assert shared_text(tmp_path / "runs", **settings).hash == data.hash
    assert {path: path.stat().st_mtime_ns for path in pointers} == pointers
    (tmp_path / "book.txt").write_text(text)
    assert shared_text(tmp_path / "runs", "theirs", **settings).hash == data.hash
    assert (tmp_path / "runs" / CORPORA / "theirs.json").exists()
    shared_text.cache_clear()
