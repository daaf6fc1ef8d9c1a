"""How far work is: bars on a terminal, plain lines elsewhere, nothing where nothing is wanted, and all of it on stderr."""

from __future__ import annotations

import io
import json
import math
import time

import pandas as pd
import pytest
from rich.console import Console

from workbench import console
from workbench.console import progress


def test_without_a_terminal_a_line_is_said_now_and_then_and_one_at_the_end(monkeypatch, capsys):
    monkeypatch.setattr(console, "EVERY", 0.02)
    with progress("measuring") as task:
        task(1, 3, "a step 8", left=60)
        time.sleep(0.1)
        task(3)
    told = capsys.readouterr()
    assert not told.out
    first, *_, last = told.err.splitlines()
    assert first == "measuring: 1 of 3, about 60 s left, a step 8"
    assert last == "measuring: 3 of 3 in 0 s"


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


def test_a_caption_names_only_what_is_equal_in_all_rows_and_digits(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(console, "console", Console(file=screen, force_terminal=True, color_system=None, width=80))
    console.print_table([{"run": "a" if i < 65 else "b", "kind": "x", "p": 0.1 + i * 1e-9, "i": i} for i in range(70)])
    assert screen.getvalue().splitlines()[0] == "kind x"


def test_a_table_in_a_pipe_is_tsv_with_all_rows(capsys):
    frame = pd.DataFrame(ROWS).assign(provenance='{"code": "a"}')
    console.print_table(frame)
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["run", "metric", "layer", "value", "se", "n"]
    assert [float(line[3]) for line in lines[1:]] == [row["value"] for row in ROWS]
    console.print_json(frame)
    assert json.loads(capsys.readouterr().out)[0]["provenance"] == {"code": "a"}
    console.print_json(pd.DataFrame({"p": [1.25e-13, -math.inf, math.nan], "each": [[math.nan, math.inf], [], ()]}))
    text = capsys.readouterr().out
    assert text == '[{"p": 1.25e-13, "each": [null, 1e999]}, {"p": -1e999, "each": []}, {"p": null, "each": []}]\n'
    assert json.loads(text)[1]["p"] == -math.inf
