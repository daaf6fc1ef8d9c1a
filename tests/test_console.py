"""How far work is: bars on a terminal, plain lines elsewhere, nothing where nothing is wanted, and all of it on stderr."""

from __future__ import annotations

import io
import json
import time

import pandas as pd
import pytest
from rich.console import Console

from workbench import console
from workbench.console import Task, progress, silence


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only where the test says so."""
    now = [1000.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_the_time_left_is_what_the_pieces_took_and_runs_down_between_them(clock):
    """Two of five pieces after 10 and 20 seconds: 15 s each, 45 s for three, 41 s four seconds later."""
    task = Task("measuring", 5)
    assert task.line() == "measuring: 0 of 5, 0 s so far"
    for seconds, done in ((10, 1), (20, 2), (4, 2)):
        clock[0] += seconds
        task(done, what="step 8")
    assert task.line() == "measuring: 2 of 5, about 41 s left, step 8"


def test_pieces_that_were_there_already_say_nothing_of_the_rest(clock):
    task = Task("study")
    assert task.line() == "study: 0 s so far"
    task(98, 100)
    clock[0] += 30
    task(99)
    assert task.line() == "study: 99 of 100, about 30 s left"
    task(99, left=7.0)
    assert task.left() == 7.0
    task(100)
    assert task.line() == "study: 100 of 100"


def test_without_a_terminal_a_line_is_said_now_and_then_and_one_at_the_end(monkeypatch, capsys):
    monkeypatch.setattr(console, "EVERY", 0.02)
    with progress("measuring") as task:
        task(1, 3, "a step 8")
        time.sleep(0.1)
        task(3)
    told = capsys.readouterr()
    assert not told.out
    first, *_, last = told.err.splitlines()
    assert first.startswith("measuring: 1 of 3, about ")
    assert first.endswith(" s left, a step 8")
    assert last == "measuring: 3 of 3 in 0 s"


def test_work_that_is_done_at_once_or_asked_to_be_quiet_says_nothing(monkeypatch, capsys):
    with progress("drawing"):
        pass
    monkeypatch.setattr(console, "EVERY", 0.01)
    silence(True)
    try:
        with progress("measuring", 3) as task:
            time.sleep(0.05)
            task(2)
    finally:
        silence(False)
    assert capsys.readouterr() == ("", "")


ROWS = [
    {
        "run": "models-resformer-s0",
        "metric": "sink_mass",
        "layer": layer,
        "part": None,
        "value": 0.1 + layer / 3,
        "se": 0.0026546,
        "n": 64,
    }
    for layer in range(70)
]


@pytest.mark.parametrize("width", [24, 60, 120])
def test_a_table_on_a_terminal_breaks_no_number_and_has_constants_in_a_caption(monkeypatch, width):
    screen = io.StringIO()
    monkeypatch.setattr(console, "console", Console(file=screen, force_terminal=True, color_system=None, width=width))
    console.print_table(ROWS)
    text = screen.getvalue()
    assert "run models-resformer-s0, metric sink_mass, n 64" in text
    assert max(len(line) for line in text.splitlines()[1:-1]) <= width
    for layer in range(60):
        assert f"{0.1 + layer / 3:.5g}" in text
    assert text.count("layer") == (2 if width == 24 else 1)
    assert "... 10 more of 70 rows" in text


def test_a_table_in_a_pipe_is_tsv_with_all_rows(capsys):
    frame = pd.DataFrame(ROWS).assign(provenance='{"code": "a"}')
    console.print_table(frame)
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["run", "metric", "layer", "value", "se", "n"]
    assert [float(line[3]) for line in lines[1:]] == [row["value"] for row in ROWS]
    console.print_json(frame)
    assert json.loads(capsys.readouterr().out)[0]["provenance"] == {"code": "a"}


def test_a_terminal_shows_a_bar_with_the_same_words(monkeypatch, capsys):
    screen = io.StringIO()
    monkeypatch.setattr(console, "errors", Console(file=screen, force_terminal=True, width=100, legacy_windows=False))
    monkeypatch.setenv("TERM", "xterm")
    with progress("training [a]", 4) as task:
        task(1, what="loss 2.5 nats")
    assert "training [a]" in screen.getvalue()
    assert "━" in screen.getvalue()
    assert "1 of 4, about 0 s left, loss 2.5 nats" in screen.getvalue()
    assert capsys.readouterr() == ("", "")
