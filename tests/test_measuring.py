"""Measuring: nothing depends on the batch, records are as documented, bad data is refused."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from kernel_inputs import LargestTensor
from measured import EVERYTHING, MODEL, RECIPE

from workbench.data.data_sources import prepare
from workbench.errors import BadData, UnknownName, WorkbenchError
from workbench.measurement import forward_pass
from workbench.measurement.measuring import measure
from workbench.metrics import METRICS
from workbench.models.tensor_memory import LiveBytes
from workbench.observing.observation import observe
from workbench.runs.records import COLUMNS, TEXT, WHOLE
from workbench.training.loop import train

STREAMED = [
    n for n in METRICS if n.startswith(("token_imp", "importance", "row_", "sink", "induction", "value_", "hidden"))
]


@pytest.fixture(scope="session")
def text_run(tmp_path_factory):
    """A short run on a corpus of its own."""
    root = tmp_path_factory.mktemp("text")
    words = np.array(
        ["the", "red", "green", "small", "large", "house", "tree", "river", "walks", "sleeps", "near", "under", "and"]
    )
    generator = np.random.default_rng(0)
    text = "\n\n".join(" ".join(generator.choice(words, 40)) + f" {i}." for i in range(600))
    (root / "book.txt").write_text(text)
    data = prepare(texts=[root / "book.txt"], vocabulary=300, root=root / ".corpora")
    model = MODEL.replace(d_vocab=300)
    return train("resformer", data, name="text", runs=root, model=model, train=RECIPE.replace(T=32), device="cpu")


# ---- records ---------------------------------------------------------------------------------------------------------


def test_records_have_the_documented_columns_types_and_counts(everything):
    run, frame = everything
    assert set(frame["metric"]) == set(EVERYTHING)
    assert list(frame.columns) == list(COLUMNS)
    for column in COLUMNS:
        kind = "str" if column in TEXT else "Int64" if column in WHOLE else "float64"
        assert frame[column].dtype == kind, column
    assert (frame[["run", "architecture"]] == run.name).all(axis=None)
    assert (frame["step"] == RECIPE.steps).all()
    counted = frame[frame["control"].isna() & ~frame["metric"].isin(["cache_bytes", "cache_traffic"])]
    assert (counted["n"] == 5).all()
    assert not frame.duplicated([c for c in COLUMNS if c not in ("value", "se", "n", "unit", "provenance")]).any()
    assert frame["unit"].notna().all()
    for entry in METRICS.values():
        sites = set(frame.loc[frame["metric"] == entry.name, "site"].dropna()) - {"final"}
        assert sites <= set(entry.sites)


def test_one_document_has_no_standard_error(measured_runs):
    assert math.isnan(measure(measured_runs["transformer"], "loss", n=1)["se"][0])


def test_jackknife_errors_by_hand(measured_runs):
    """Eight documents, eight folds: the textbook formula over the values that leave one document out."""
    from workbench.metrics.values import TokenIdentityShare

    run = measured_runs["transformer"]
    frame = measure(run, "token_identity_share", n=8)
    ids = run.data.sample(8, 64).ids
    values = run.load().run_with_cache(ids)[1]["blocks.1.attn.hook_v"]
    left_out = []
    for i in range(8):
        accumulator, kept = TokenIdentityShare(), [j for j in range(8) if j != i]
        accumulator.update(values[kept], ids[kept])
        left_out.append(accumulator.result())
    row = frame[(frame["site"] == "v") & (frame["layer"] == 1) & frame["control"].isna()].iloc[0]
    assert row["se"] == pytest.approx(
        (7 / 8 * np.square(np.array(left_out) - np.mean(left_out)).sum()) ** 0.5, rel=1e-6
    )


# ---- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (torch.tensor([[1, 61]]), "0..60"),
        (torch.tensor([[-1, 3]]), "-1"),
        (torch.zeros(1, 129, dtype=torch.long), "n_ctx=128"),
        (torch.zeros(0, 4, dtype=torch.long), "empty"),
        (torch.zeros(2, 3), "float32"),
        ([[1, 2], [3]], "table of token ids"),
        ([], "empty"),
        (torch.tensor([[5]]), "at least 2"),
        ("some words", "no tokenizer"),
        ("missing.txt", "does not exist"),
        (Path("missing.txt"), "does not exist"),
        (None, "no data of its own"),
        (3.5, "cannot read data from a float"),
    ],
)
def test_data_that_cannot_be_used_is_refused_before_anything_runs(tiny, forwards, data, says):
    with pytest.raises(WorkbenchError, match=says):
        measure(tiny(), "loss", data)
    assert not forwards


@pytest.mark.slow
def test_text_and_files(text_run, tmp_path):
    frame = measure(text_run, "loss", "the red house stands near the river")
    assert frame["data"][0].startswith("text ")
    assert measure(text_run, "loss", "the red house " * 200, T=40)["T"][0] == 40
    for text, says in (("", "empty"), ("a", "at least 2"), ("the red house " * 200, "n_ctx=128")):
        with pytest.raises(BadData, match=says):
            measure(text_run, "loss", text)
    (tmp_path / "new.txt").write_text("a small tree sleeps under the large red river.\n" * 400)
    from_file = measure(text_run, "loss", tmp_path / "new.txt")
    assert from_file["n"][0] == 2, "one window for each of the file's documents"
    pd.testing.assert_frame_equal(measure(text_run, "loss", str(tmp_path / "new.txt")), from_file)
    (tmp_path / "latin.txt").write_bytes("\xe9t\xe9 ".encode("latin-1") * 99)
    (tmp_path / "empty.txt").write_bytes(b"")
    for name, says in (("latin.txt", "not UTF-8"), ("empty.txt", "empty")):
        with pytest.raises(BadData, match=says):
            measure(text_run, "loss", tmp_path / name)
    (tmp_path / "short.txt").write_text("a small tree")
    with pytest.raises(BadData, match="the longest has"):
        measure(text_run, "loss", tmp_path / "short.txt")


def test_names_and_lengths_are_refused_by_name(tiny):
    with pytest.raises(UnknownName, match="sink_rate"):
        measure(tiny(), "sink_rat", torch.arange(20)[None])
    with pytest.raises(WorkbenchError, match="sink_rate needs sequences of 64"):
        measure(tiny(), ["loss", "sink_rate"], torch.arange(40)[None])
    with pytest.raises(WorkbenchError, match="at least 1"):
        measure(tiny(), [], torch.arange(40)[None])
    with pytest.raises(WorkbenchError, match="nothing to measure"):
        measure([], "loss")
    with pytest.raises(WorkbenchError, match="cannot measure a int"):
        measure(3, "loss")


@pytest.mark.slow
def test_broken_weights_give_nan_and_no_crash(tiny):
    model = tiny(config={"d_vocab": 61})
    with torch.no_grad():
        model.blocks[0].attn.v_proj.weight[0, 0] = math.nan
    ids = torch.randint(61, (8, 64), generator=torch.Generator().manual_seed(0))
    names = ("sink_rate", "row_entropy", "hidden_peak", "token_probe", "token_identity_share", "induction_score")
    frame = measure(model, [*names, "loss"], ids)
    measured = frame[frame["control"].isna() & (frame["layer"] == 1)]
    for name in names:
        assert measured.loc[measured["metric"] == name, "value"].isna().all(), name
    assert frame[frame["metric"] == "loss"]["value"].isna().all()
    assert frame[(frame["metric"] == "hidden_peak") & (frame["layer"] == 0)]["value"].notna().all()


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_streamed_metrics_never_build_a_pattern(tiny):
    T, heads = 512, 4
    model = tiny(config={"n_ctx": T})
    ids = torch.randint(61, (1, T), generator=torch.Generator().manual_seed(0))
    with LargestTensor() as seen:
        measure(model, STREAMED, ids)
    assert 0 < seen.numel < heads * T * T / 2


@pytest.mark.slow
def test_measures_take_little_more_memory_than_the_bare_forward_whatever_the_vocabulary(tiny):
    """Logits of 8 x 24 x 40,000: a second copy of them would already be 1.9 times the forward."""
    model = tiny(config={"d_vocab": 40_000})
    ids = torch.randint(40_000, (16, 24), generator=torch.Generator().manual_seed(0))
    peaks = []
    for run in (lambda: model(ids[:8]), lambda: measure(model, ["loss", "sink_mass", "value_drain"], ids)):
        with torch.no_grad(), LiveBytes(model.parameters()) as live:
            run()
        peaks.append(live.peak)
    assert peaks[1] <= 1.3 * peaks[0]


@pytest.mark.slow
def test_sites_of_an_observed_model_wait_for_passes_of_their_own_rather_than_fill_memory(gpt, ids, monkeypatch):
    ids, name, peaks, found = ids[:, :16] % 31, "token_identity_share", [], []
    observed = observe(gpt, ids, quiet=True)
    for held in (forward_pass.HELD, 4 * ids.numel() * observed.config.n_layers * 2 * observed.config.d_model):
        monkeypatch.setattr(forward_pass, "HELD", held)
        with LiveBytes(gpt.parameters()) as live:
            found.append(measure(observed, ["loss", name], ids.repeat(4, 1)))
        peaks.append(live.peak)
    pd.testing.assert_frame_equal(*(f.drop(columns="provenance") for f in found))
    assert peaks[1] < 0.8 * peaks[0]


def test_some_sites_alone_are_kept_apart_from_all_of_them(measured_runs):
    run, name = measured_runs["transformer"], "token_identity_share"
    few = measure(run, name, n=5, sites={name: ("v",)})
    assert set(few["site"]) == {"v"}
    whole = measure(run, name, n=5)
    assert {"q", "own_v", "v"} <= set(whole["site"])
    assert len(measure(run, name, n=5, sites={name: ("v",)})) == len(whole), "all of them will do"
    with pytest.raises(UnknownName, match="site of token_identity_share"):
        measure(run, name, n=5, sites={name: ("w",)})
