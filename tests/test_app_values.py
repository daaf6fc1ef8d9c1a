"""What pages send to the browser, number by number: Start, Training and Attention against the records and the model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from app_pages import charts, numbers, pictures, weights_sent

from workbench import plots
from workbench.plots.style import symbol
from workbench.runs.records import load_records
from workbench.runs.run import Run

A = "text-resformer-s0"


def chart(at, view):
    """The figure of a view."""
    (found,) = [c.spec for c in charts(at) if c.id.endswith(f"figure_{view}")]
    return json.loads(found)


def curve(at, view, name):
    """The curve of a series with its marks."""
    (found,) = [t for t in chart(at, view)["data"] if t.get("name") == name and "markers" in t.get("mode", "")]
    return found


def test_start_draws_the_records_of_the_chosen_run(browse, populated):
    at = browse(populated, "start", show="model", a=A, step=20)
    rows = load_records([populated / A]).query("metric == 'token_identity_share' and site == 'own_v' and step == 20")
    shown = curve(at, "token_share", "ResFormer")
    assert numbers(shown["y"]) == pytest.approx(rows.sort_values("layer")["value"].to_numpy())
    assert shown["line"]["color"] == plots.colour("resformer")
    assert shown["marker"]["symbol"] == symbol("resformer")


def test_training_draws_the_mean_over_domains_and_seeds_and_the_gradients_of_a_step(browse, populated):
    at = browse(populated, "training", show="loss", a=A)
    told = [Run.open(populated / f"text-resformer-s{seed}").telemetry() for seed in range(2)]
    mean = sum(t[t["metric"] == "validation_loss"].groupby("step")["value"].mean() for t in told) / 2
    shown = curve(at, "loss", "ResFormer")
    assert numbers(shown["x"]).tolist() == mean.index.tolist()
    assert numbers(shown["y"]) == pytest.approx(mean.to_numpy())
    at = browse(populated, "training", show="gradients", a=A, models="resformer", at=10)
    (map_,) = [t for t in chart(at, "gradients")["data"] if t["type"] == "heatmap"]
    rows = told[0][(told[0]["metric"] == "gradient_norm") & (told[0]["step"] == 10)]
    wanted = rows.pivot_table(index="layer", columns="part", values="value")[["W_Q", "W_V"]].to_numpy()
    assert list(map_["x"]) == ["W_Q", "W_V"]
    assert 10 ** numbers(map_["z"]) == pytest.approx(wanted, rel=1e-4), "on a logarithmic scale of colours"


def test_attention_sends_the_pattern_that_the_model_computes(browse, populated):
    at = browse(populated, "attention", a=A, step=20, prompt="return values", layer=1, head=1)
    (data,) = pictures(at)
    model = Run.open(populated / A).load()
    _, cache = model.run_with_cache(torch.tensor([model.tokenizer.encode("return values")]))
    pattern = cache["blocks.1.attn.hook_pattern"][0, 1].numpy()
    assert weights_sent(data) == pytest.approx(pattern[np.tril_indices(len(pattern))], abs=2e-5)
