"""From a number to its cause: the documents that pull a mean most are those of the stored values, with the text they were measured on."""

from __future__ import annotations

import dashboard
import numpy as np
import pandas as pd
import pytest

from workbench.data.synthetic import SYMBOLS
from workbench.errors import WorkbenchError
from workbench.runs.records import SAMPLE_COLUMNS, provenance, records, write_parquet
from workbench.runs.run import Run
from workbench.views import Link, depth

RUN, DOCUMENTS, STEP = "race-transformer-s0", 24, 20


def measured(folder, data):
    """Entropy of each head in each document [document, layer, head], of which two are far from the others in layer 1."""
    values = np.random.default_rng(0).normal(1.0, 0.01, (DOCUMENTS, 2, 2))
    values[5, 1], values[17, 1] = 9.0, -4.0
    origin = provenance(data=data, key="k", version=1)
    common = {
        "run": RUN,
        "architecture": "transformer",
        "seed": 0,
        "step": STEP,
        "metric": "row_entropy",
        "provenance": origin,
    }
    rows = [common | {"layer": n, "head": h, "value": values[:, n, h].mean(), "n": DOCUMENTS, "T": 16, "unit": "nats"}
            for n in range(2) for h in range(2)]  # fmt: skip
    each = [common | {"document": d, "layer": n, "head": h, "value": v} for (d, n, h), v in np.ndenumerate(values)]
    write_parquet(records(rows), folder / "records" / "bb.parquet")
    write_parquet(records(each, SAMPLE_COLUMNS), folder / "records" / "bb.samples.parquet")
    return values


@pytest.fixture
def ask(populated, tmp_path):
    return dashboard.kept(dashboard.copied(populated, tmp_path / "runs"))


def link(**options):
    return Link("depth", {"a": RUN, "metric": "row_entropy", "behind": "1"} | {k: str(v) for k, v in options.items()})


@pytest.mark.slow
def test_the_documents_furthest_from_the_mean_are_prompts_of_the_measured_text(ask):
    run = Run.open(ask.folder / RUN)
    sample = run.data.sample(DOCUMENTS, 16)
    values = measured(run.path, sample.hash)
    drawing = depth.behind(ask, link(layer=1))
    assert drawing.table["document"].tolist()[:2] == [5, 17]
    assert drawing.table["value"].tolist()[:2] == [9.0, -4.0]
    mean = values[:, 1].mean()
    assert drawing.table["effect_on_mean"].tolist()[0] == pytest.approx((9.0 - mean) / DOCUMENTS)
    others = np.delete(values[:, 1].mean(axis=1), drawing.table["document"])
    assert f"without these 10 documents {others.mean():.3g}" in drawing.sentence
    (subject,) = ask.subjects(Link("attention", {"a": RUN}))
    begins = ask.tokens(subject, drawing.table["prompt"].iloc[0])
    row = sample.ids[list(sample.documents).index(5)].tolist()
    written = [SYMBOLS[i] for i in row[: len(row) // 2]]
    assert [t for t in begins if t in SYMBOLS][: len(written)] == written
    assert {d[0] for d in drawing.figure.data[0].customdata} == set(range(10))


@pytest.mark.slow
def test_documents_are_sorted_by_a_measure_or_by_the_difference_of_two_models(ask):
    run, other = (Run.open(ask.folder / name) for name in (RUN, "race-svformer-s0"))
    values = measured(run.path, run.data.sample(DOCUMENTS, 16).hash)
    measured(other.path, run.data.sample(DOCUMENTS, 16).hash)
    for path in other.path.glob("records/bb*.parquet"):
        frame = pd.read_parquet(path).assign(run=other.name, architecture="svformer")
        frame.assign(value=frame["value"] * (0.5 if "samples" in path.name else 1.0)).to_parquet(path)
    assert depth.behind(ask, link(layer=1, order="highest")).table["document"].iloc[0] == 5
    assert depth.behind(ask, link(layer=1, order="lowest")).table["document"].iloc[0] == 17
    both = link(layer=1, compare=1, b=other.name, step=STEP, step_b=STEP, minus=1, order="highest")
    drawing = depth.behind(ask, both)
    assert drawing.table["value"].iloc[0] == pytest.approx(0.5 * values[5, 1].mean())
    assert "A − B" in drawing.figure.layout.title.subtitle.text
    assert depth.behind(ask, both.but(minus=0)).table["value"].iloc[0] == pytest.approx(values[5, 1].mean()), (
        "of A alone"
    )


def test_a_head_of_a_layer_has_its_own_documents_and_a_layer_that_is_not_there_is_refused(ask):
    run = Run.open(ask.folder / RUN)
    values = measured(run.path, run.data.sample(DOCUMENTS, 16).hash)
    found = depth.number_behind(ask, link(layer=0, head=1))
    assert found.values.to_numpy() == pytest.approx(values[:, 0, 1])
    assert (found.layers, found.heads) == ([0, 1], [0, 1])
    assert depth.number_behind(ask, link()).layer == 1, "the last layer"
    with pytest.raises(WorkbenchError, match=r"layer 7 has no values of single documents; choose from \[0, 1\]"):
        depth.number_behind(ask, link(layer=7))


def test_a_text_that_is_not_the_runs_own_is_not_taken_for_the_measured_one(ask):
    measured(ask.folder / RUN, "another sample")
    drawing = depth.behind(ask, link(layer=1))
    assert drawing.table["prompt"].isna().all()
    assert "not those of the run's own data" in drawing.sentence


def test_numbers_without_values_of_single_documents_say_how_to_keep_them(ask):
    with pytest.raises(WorkbenchError, match=r"no values of single documents of sink mass.*To store them"):
        depth.behind(ask, Link("depth", {"a": "text-resformer-s0", "metric": "sink_mass", "behind": "1"}))
