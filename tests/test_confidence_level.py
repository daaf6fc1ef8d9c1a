"""One constant sets the confidence level of every interval, test and sentence."""

import ast
import math
import re
from pathlib import Path

import pandas as pd
import pytest
from planted import evidence, losses, runs
from scipy import stats

from workbench import plots
from workbench.claims import analysis
from workbench.claims.evidence import model_mean
from workbench.claims.judging import chosen, judge
from workbench.claims.verdict import decide, expected_by_chance, judge_differences
from workbench.plots.record_figures import _curve
from workbench.statistics import intervals
from workbench.statistics.intervals import over_documents, over_seeds
from workbench.views import main_result

ROOT = Path(__file__).parent.parent
VALUES = [-0.01, -0.03, -0.04, -0.012]
NUMBERS = {0.95, 0.975, 0.025, 1.96, 2.365}
OTHER_NUMBERS = {
    ("workbench/config.py", 0.95),
    ("workbench/statistics/intervals.py", 0.95),
}  # beta2 of AdamW, and LEVEL itself


@pytest.fixture
def ninety(monkeypatch):
    monkeypatch.setattr(intervals, "LEVEL", 0.9)


def test_the_level_sets_every_interval_and_quantile(ninety):
    found = over_seeds(VALUES)
    half = stats.t.ppf(0.95, 3) * stats.sem(VALUES)
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half))
    documents = over_documents([*range(100)])
    bounds = stats.bootstrap(
        ([*range(100)],), lambda x, axis: x.mean(axis), confidence_level=0.9, rng=0
    ).confidence_interval
    assert documents.low == pytest.approx(bounds.low, abs=0.5)
    rows = pd.DataFrame({"run": "a", "metric": "m", "seed": 0, "value": [1.0, 3.0], "se": [0.3, 0.4], "n": 64})
    mean = model_mean(rows)
    assert mean.high - mean.value == pytest.approx(stats.t.ppf(0.95, 7) * math.hypot(0.3, 0.4) / 2)


def test_the_level_sets_what_is_decided(monkeypatch):
    clear = over_seeds([-6.0, -11.0, -17.0])
    assert 0.05 < clear.p < 0.1 < 2 * clear.p
    statuses = {}
    for level in (0.95, 0.9):
        monkeypatch.setattr(intervals, "LEVEL", level)
        statuses[level] = (decide({"": clear}, -1)[0], judge_differences({"": clear})[""].status)
        assert judge_differences({"a": clear, "b": clear})["a"].status == "unresolved"
    assert statuses == {0.95: ("unresolved",) * 2, 0.9: ("supported",) * 2}


def test_the_level_stands_in_every_sentence(ninety):
    made = runs("transformer", "resformer")
    judged = judge(evidence(made, (), losses(made, lambda _: 3.0)), chosen(claims=["lower_loss"]))
    rows = pd.DataFrame(
        {
            "run": [*"abc"] * 2,
            "seed": [0, 1, 2] * 2,
            "step": [0] * 3 + [1] * 3,
            "value": [1.0, 2, 3, 2, 3, 5],
            "se": math.nan,
        }
    )
    interval = over_seeds(VALUES)
    compared = main_result.Finding(main_result.LOSS, "g", "", {"g": 1.0}, "g", *[{"resformer": interval}] * 2, {}, {})
    table = pd.DataFrame({"comparison": ["a"], "value": [1.0], "low": [0.0], "high": [2.0], "unit": ["nats"]})
    sentences = {
        "page": analysis.how_to_read(),
        "chance": expected_by_chance([j.verdict for j in judged]),
        "band": _curve(rows, "step", paired=True)[1],
        "start page": main_result.method(compared),
        "whiskers": plots.intervals(table, "title").layout.title.subtitle.text,
    }
    for name, sentence in sentences.items():
        assert re.search(r"\b(90|10) %", sentence), name
        assert not re.search(r"\b(95|5) %", sentence), name


def test_no_file_copies_the_level():
    copies = []
    for file in [*ROOT.glob("workbench/**/*.py"), *ROOT.glob("app/**/*.py"), *ROOT.glob("analyses/*.py")]:
        name, text = str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")
        if not re.search(r"\.95|9\.5e|\.9?75|\.025|2\.5e|1\.96|2\.365|9[05] ?%", text):
            continue
        tree = ast.parse(text)
        statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or id(node) in statements:
                continue
            number = isinstance(node.value, float) and node.value in NUMBERS and (name, node.value) not in OTHER_NUMBERS
            if number or (isinstance(node.value, str) and re.search(r"\b9[05] ?%.{0,20}interval", node.value)):
                copies.append(f"{name}:{node.lineno}: {node.value}")
    assert not copies
