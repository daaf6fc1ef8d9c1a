"""The faults that `benchmarks/mutation.py` plants: which edits a source has, that each changes it, and which are left alone."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SOURCE = '''"""Words + 1."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import math as m

AXIS: "int | None" = -1


def mean(x: list[float], *, start=0, centre=True) -> float:
    """Sum - 1."""
    if not x:
        raise ValueError("empty" + f"{1 + 1}")
    x.sort()
    total = sum(x[start:]) - x[0] if centre else 0.5
    total += 2 ** len(x)
    return total / len(zip(x, strict=True)) and folder / "é < 1"
'''


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "benchmarks" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module
    spec.loader.exec_module(module)
    path = tmp_path_factory.mktemp("mutants") / "mean.py"
    path.write_text(SOURCE, encoding="utf-8")
    yield module, module.mutants_of(path.parent, path)
    del sys.modules["mutants"]


def test_the_edits_of_a_source_are_these_and_no_others(made):
    assert [(m.line, m.kind, m.text) for m in made[1]] == [
        (7, "axis or index", "(-2)"),
        (7, "off by one", "2"),
        (10, "off by one", "1"),
        (10, "switch", "False"),
        (12, "removed check", "False"),
        (12, "removed not", "(x)"),
        (14, "dropped call", "pass"),
        (15, "swapped branches", "(sum(x[start:]) - x[0] if not centre else 0.5)"),
        (15, "sign or factor", "(sum(x[start:]) + x[0])"),
        (15, "dropped term", "(sum(x[start:]))"),
        (15, "off by one", "1"),
        (15, "constant", "1.0"),
        (16, "sign or factor", "total -= 2 ** len(x)"),
        (16, "sign or factor", "(2 * len(x))"),
        (16, "off by one", "3"),
        (17, "and, or", "(total / len(zip(x, strict=True)) or folder / 'é < 1')"),
        (17, "sign or factor", "(total * len(zip(x, strict=True)))"),
    ]


def test_each_edit_compiles_to_another_program(made):
    for mutant in made[1]:
        assert ast.dump(ast.parse(mutant.applied(SOURCE))) != ast.dump(ast.parse(SOURCE)), mutant


def test_what_is_chosen_by_eye_is_left_alone_where_figures_are_made(made, tmp_path):
    source = (
        'MAX_ROWS = 500\nROWS = 5\ndraw(x=1, height=40 + 2, line={"width": 3, "y": 4})\ngc.collect()\na < MAX_ROWS\n'
    )
    for folder, texts in (
        ("app", ["6", "pass", "2", "5"]),
        ("metrics", ["6", "pass", "2", "(40 - 2)", "(40)", "41", "3", "4", "5"]),
    ):
        path = tmp_path / folder / "a.py"
        path.parent.mkdir()
        path.write_text(source, encoding="utf-8")
        assert [m.text for m in made[0].mutants_of(tmp_path, path)] == texts


def test_what_runs_on_import_is_known(made):
    assert {m.line for m in made[1] if m.always} == {7, 10}


def test_a_sample_takes_one_a_line_and_stays_when_lines_move(made, tmp_path):
    module, mutants = made
    chosen = module.sample(mutants, 5, seed=3)
    assert len({m.line for m in chosen}) == len(chosen) == 5
    assert chosen != module.sample(mutants, 5, seed=4)
    (tmp_path / "mean.py").write_text("import ast\n\n" + SOURCE, encoding="utf-8")
    moved = module.sample(module.mutants_of(tmp_path, tmp_path / "mean.py"), 5, seed=3)
    assert [m.key() for m in moved] == [m.key() for m in chosen]
    assert [m.line for m in moved] == [m.line + 2 for m in chosen]
