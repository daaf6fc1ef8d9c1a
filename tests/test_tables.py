"""Tables in the forms that others use, and what a notebook shows of runs and models."""

from __future__ import annotations

import math
import re

import pandas as pd
import pyarrow as pa
import pytest
import test_cli
import training_runs
from scipy import stats

import workbench
from workbench.errors import BadData, UnknownName
from workbench.measurement.measuring import measure
from workbench.runs.catalogue import catalogue
from workbench.runs.records import typed
from workbench.runs.tables import as_frame, latex_table, markdown_table, read_records, write_table_as
from workbench.statistics.intervals import confidence, group_intervals


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return training_runs.start(tmp_path_factory.mktemp("runs"), lambda_v1=0.3)


@pytest.fixture(scope="module")
def frame(run):
    return measure(run, ["loss", "row_entropy"], steps="ends", n=2)


@pytest.mark.slow
def test_records_go_to_arrow_and_come_back_and_a_figure_takes_both(frame):
    table = pa.table(frame)
    assert pa.types.is_int64(table.schema.field("layer").type)
    pd.testing.assert_frame_equal(as_frame(table), frame, check_frame_type=False)
    (here, there) = (workbench.plot(given[given["metric"] == "row_entropy"]) for given in (frame, as_frame(table)))
    assert here.to_json() == there.to_json()
    chosen = table.filter(pa.compute.equal(table["metric"], "row_entropy"))
    assert workbench.plot(chosen).to_json() == here.to_json()
    with pytest.raises(BadData, match="a list is no table"):
        workbench.plot([1, 2])
    with pytest.raises(BadData, match="it has no value"):
        workbench.plot(table.select(["metric"]))


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".csv", ".json"])
def test_a_file_of_every_ending_holds_the_same_records(frame, tmp_path, ending):
    out = tmp_path / f"records{ending}"
    odd = {
        "run": ["007", "NA"],
        "variant": ["0.50", None],
        "value": [-1.2345678901e-11, math.inf],
        "se": [3e-17, math.nan],
    }
    frame = typed(pd.concat([frame, frame[:2].assign(**odd)], ignore_index=True))  # as texts and in all digits
    write_table_as(frame, out)
    again = read_records(out)
    assert again["value"].tolist() == frame["value"].tolist()
    for column in ("run", "variant", "se", "metric", "layer", "step", "unit", "provenance"):
        assert again[column].dtype == frame[column].dtype
        assert again[column].isna().tolist() == frame[column].isna().tolist()
        assert again[column].dropna().tolist() == frame[column].dropna().tolist()


def test_another_ending_is_refused_before_anything_is_measured(run, tmp_path):
    before = sorted(run.path.rglob("*"))
    done = test_cli.run("measure", run.path, "-m", "hidden_norm", "--out", tmp_path / "records.feather")
    assert done.returncode == 2
    assert "unknown file ending '.feather'" in done.stderr
    assert sorted(run.path.rglob("*")) == before
    (tmp_path / "records.arow").touch()
    with pytest.raises(UnknownName, match=r"did you mean \.arrow"):
        read_records(tmp_path / "records.arow")
    (tmp_path / "broken.arrow").write_bytes(b"ARROW1")
    with pytest.raises(BadData, match=r"broken\.arrow cannot be read"):
        read_records(tmp_path / "broken.arrow")


def test_a_notebook_shows_runs_and_models_with_what_decides(run, gpt, ids):
    shown = run._repr_html_()
    for fact in ("run resformer", "lambda_v1 = 0.3", "8/8", "0, 8"):
        assert fact in shown
    assert "<td>resformer</td>" in catalogue(run.path.parent)._repr_html_()
    model = run.load()
    assert "lambda_v1 = 0.3" in model._repr_html_()
    assert "2 layers of width 16" in model._repr_html_()
    assert f"{sum(p.numel() for p in model.parameters()):,}" in model._repr_html_()
    observed = workbench.observe(gpt.eval(), ids % 24)
    assert re.search("<pre[^>]*>GPT", observed._repr_html_())
    paths = observed.value_paths()
    for shown in (observed._repr_html_(), paths._repr_html_()):
        assert "<table" in shown
        assert not re.search("NaN|<NA>|e-1|-0<", shown), "what is nothing but rounding, or not there"
    assert type(paths.head(1)) is pd.DataFrame, "a table like any other"
    assert paths["spread"].isna().all()
    model.source["path"] = "<script>"
    assert "<script>" not in model._repr_html_()


def test_a_table_for_a_paper_has_rounded_numbers_and_escaped_words(tmp_path):
    table = pd.DataFrame(
        {
            "model_a": ["50 % | x", "b"],
            "loss": [3.14159265, float("nan")],
            "steps": [12000, 7],
            "rate": [-3e-5, 12345.6],
        }
    ).assign(empty=None, provenance="{}")
    assert latex_table(table) == (
        "\\begin{tabular}{lrrr}\n\\toprule\nmodel\\_a & loss & steps & rate \\\\\n\\midrule\n"
        "50 \\% \\textbar{} x & 3.142 & 12000 & $-3\\times 10^{-5}$ \\\\\nb &  & 7 & 12346 \\\\\n\\bottomrule\n\\end{tabular}\n"
    )
    assert markdown_table(table) == (
        "| model_a | loss | steps | rate |\n| --- | ---: | ---: | ---: |\n"
        "| 50 % \\| x | 3.142 | 12000 | -3e-05 |\n| b |  | 7 | 12346 |\n"
    )
    runs = pd.DataFrame({
        "run": ["a", "b"], "rate": [0.003, 0.012], "state": "finished", "options": "", "note": ["x" * 50, ""],
        "loss": [2.4576, 2.0], "loss ± 95 %": [0.0117, float("nan")],
    })  # fmt: skip
    assert latex_table(runs).splitlines() == [
        r"\begin{table}", r"\centering", r"\caption{Equal in all rows: state: finished.}", r"\begin{tabular}{lrp{40mm}r}", r"\toprule",
        r"run & rate & note & loss $\pm$ 95 \% \\", r"\midrule", "a & 0.003 & " + "x" * 50 + r" & 2.458 $\pm$ 0.012 \\",
        r"b & 0.012 &  & 2.000 \\", r"\bottomrule", r"\end{tabular}", r"\end{table}",
    ]  # fmt: skip
    assert latex_table(runs.head(0)).count(r"\\") == 1
    tokens = pd.DataFrame({"token": ["[0, 1]", "<s>", "**", "__init__", "a_b"]})
    assert latex_table(tokens).splitlines()[4:6] == [r"{[}0, 1] \\", r"\textless{}s\textgreater{} \\"]
    assert markdown_table(tokens).splitlines()[2:] == [
        "| [0, 1] |", r"| \<s> |", r"| \*\* |", r"| \_\_init\_\_ |", "| a_b |",
    ]  # fmt: skip
    for ending in (".tex", ".md"):
        write_table_as(table, tmp_path / f"t{ending}")
        with pytest.raises(BadData, match="rounded numbers"):
            read_records(tmp_path / f"t{ending}")


def test_means_by_group_count_each_seed_once_and_name_their_interval():
    table = pd.DataFrame(
        {
            "model": ["a", "a", "a", "b"],
            "seed": [0, 0, 1, 0],
            "loss": [1.0, 3.0, 4.0, 5.0],
            "other": [float("nan")] * 3 + [1.0],
        }
    )
    grouped = group_intervals(table, ["model"], ["loss", "other"])
    assert grouped["runs"].tolist() == [3, 1]
    assert grouped["loss"].tolist() == [3.0, 5.0]  # seed 0 has mean 2, seed 1 has 4
    assert grouped["loss, seeds"].tolist() == [2, 1]
    half = stats.t.ppf(0.975, 1) * 2**0.5 / 2**0.5  # standard deviation sqrt(2) over sqrt(n)
    assert grouped[f"loss ± {confidence()}"].tolist() == pytest.approx([half, float("nan")], nan_ok=True)
    assert grouped["other, seeds"].tolist() == [0, 1]
    none = group_intervals(table.head(0), ["model"], ["loss", "other"])
    assert none.columns.tolist() == grouped.columns.tolist()


def test_numbers_that_are_equal_only_when_rounded_stay_in_the_table():
    text = latex_table(pd.DataFrame({"run": ["a", "b"], "loss": [0.12340001, 0.12340002], "n": [8, 8]}))
    assert r"\caption{Equal in all rows: n: 8.}" in text
    assert "a & 0.1234" in text
    assert "b & 0.1234" in text
