"""What is kept is not measured again: by weights, data, metric and version; and which of the kept records are shown."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from measured import EVERYTHING, table

import workbench.measurement.measuring
from workbench.interventions import INTERVENTIONS
from workbench.measurement.measuring import measure
from workbench.metrics import METRICS
from workbench.runs.records import SAMPLE_COLUMNS, Store, facts, load_records, one_sample, provenance, records
from workbench.runs.run import Run
from workbench.runs.table_cache import RecordCache
from workbench.views import Source


@pytest.mark.slow
def test_the_second_time_nothing_is_run(everything, forwards):
    run, first = everything
    again = measure(Run.open(run.path), EVERYTHING, n=5, batch=3)
    pd.testing.assert_frame_equal(first, again)
    measure(run, ["sink_mass", "loss"], n=5)
    assert not forwards
    measure(run, "loss", n=7)
    assert forwards, "other sequences are another measurement"


def test_what_ships_with_a_run_is_not_measured_again(forwards):
    found = measure(
        "models-resformer-s0", ["sink_mass", "token_identity_share"], sites={"token_identity_share": ("v",)}
    )
    assert not forwards
    assert {*found["metric"]} == {"sink_mass", "token_identity_share"}
    assert found["n"].max() == 64


def test_one_changed_weight_is_measured_again(tiny, forwards):
    model, ids = tiny(), torch.arange(40).view(2, 20)
    before = measure(model, "loss", ids)
    forwards.clear()
    pd.testing.assert_frame_equal(measure(model, "loss", ids), before)
    assert not forwards
    with torch.no_grad():
        model.blocks[1].mlp.up_proj.weight[3, 4] += 0.5
    after = measure(model, "loss", ids)
    assert forwards
    assert after["value"][0] != before["value"][0]


def test_records_of_a_step_that_was_trained_anew_are_removed(tmp_path):
    store = Store(tmp_path / "records")
    for weights, values in (("aa", {8: 1.0, 20: 2.0}), ("bb", {8: 3.0}), ("cc", {30: 4.0})):
        common = {"run": "x", "metric": "loss", "provenance": provenance(key=weights, version=1)}
        rows = records(common | {"step": step, "value": value} for step, value in values.items())
        store.put(weights, "dd", rows, records([common | {"document": 0, "step": 8}], SAMPLE_COLUMNS))
    assert sorted(load_records([tmp_path])["value"]) == [2.0, 3.0, 4.0]
    assert {file.name.partition("-")[0] for file in tmp_path.glob("records/*.samples.parquet")} == {"bb", "cc"}


def test_a_hooked_model_is_neither_remembered_nor_recalled(tiny):
    model, ids = tiny(), torch.arange(40).view(2, 20)
    clean = measure(model, "loss", ids)["value"][0]
    with model.hooks([("blocks.0.hook_attn_out", lambda x, hook: x * 0)]):
        ablated = measure(model, "loss", ids)["value"][0]
    assert ablated != clean
    assert measure(model, "loss", ids)["value"][0] == clean


@pytest.mark.slow
def test_raising_a_version_measures_that_metric_again_and_not_its_neighbours(measured_runs, monkeypatch):
    run, names, measured = (
        measured_runs["transformer"],
        ["hidden_peak", "token_similarity", "logit_lens", "sink_rate"],
        [],
    )
    before = measure(run, names, n=3)
    inner = workbench.measurement.measuring._compute
    monkeypatch.setattr(
        "workbench.measurement.measuring._compute",
        lambda subject, missing, *more: (
            measured.extend(i.name for i in missing.values()) or inner(subject, missing, *more)
        ),
    )
    for registry, name in ((METRICS, "hidden_peak"), (INTERVENTIONS, "logit_lens")):
        monkeypatch.setitem(registry, name, dataclasses.replace(registry[name], version=2))
        after = measure(run, names, n=3)
        assert measured == [name]
        measured.clear()
    pd.testing.assert_frame_equal(table(before), table(after))
    assert set(
        after.loc[after["metric"].isin(["hidden_peak", "logit_lens"]), "provenance"].map(lambda p: facts(p)["version"])
    ) == {2}


@pytest.mark.slow
def test_a_store_written_before_versions_were_numbers_is_read_until_it_is_measured_anew(tmp_path):
    """What `measure` returns and what every reader shows agree, and no reader sees two versions of a metric."""
    folder = tmp_path / "resformer-before-s0"
    shutil.copytree(Path(__file__).parent / "golden" / "run_before" / folder.name, folder)
    before = load_records([folder])
    assert not any("version" in facts(text) for text in before["provenance"].unique())
    name = "sink_mass"
    assert name in set(before["metric"])
    source = Source(tmp_path)
    entries = source.catalogue().entries
    assert len(source.records(entries, [name])) == (before["metric"] == name).sum()
    fresh = measure(folder, name)
    after = load_records([folder])
    for seen in (source.records(source.catalogue().entries, [name]), RecordCache().rows(entries, [name])[0]):
        seen = seen.astype(fresh.dtypes.to_dict())  # an answer holds texts as categories
        pd.testing.assert_frame_equal(table(seen, "architecture"), table(fresh, "architecture"))
        assert len(one_sample(seen)) == len(seen)
    pd.testing.assert_frame_equal(table(after[after["metric"] == name]), table(fresh))
    pd.testing.assert_frame_equal(table(after[after["metric"] != name]), table(before[before["metric"] != name]))
