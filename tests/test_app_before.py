"""Every page of the dashboard on a folder that an older version wrote: its numbers are drawn as they were stored."""

from __future__ import annotations

import shutil
from pathlib import Path

import dashboard
import numpy as np
import pytest
import torch
from app_pages import chart, charts, ignored, numbers, pictures, said, weights_sent

from workbench.runs.records import load_records
from workbench.runs.run import Run
from workbench.views.page_links import PAGES

GOLDEN = Path(__file__).parent / "golden" / "run_before"
RUN, PROMPT = "resformer-before-s0", "abcdef"
LINKS = {
    "start": {"show": "here"}, "training": {"show": "loss"}, "depth": {"metric": "importance_entropy"},
    "attention": {"layer": "2", "head": "1", "prompt": PROMPT}, "prompt": {"show": "next", "prompt": PROMPT},
    "heads": {"metric": "sink_mass"}, "maps": {"site": "own_v"}, "differences": {"quantity": "relative"},
    "intervene": {"edits": "remove:part=mlp,layer=1", "sweep": "remove:part=mlp", "prompt": PROMPT},
}  # fmt: skip


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """A copy of the older folder, which is not written into itself."""
    made = dashboard.listing(GOLDEN)
    yield shutil.copytree(GOLDEN, tmp_path_factory.mktemp("before") / "runs")
    assert dashboard.listing(GOLDEN) == made
    assert not (GOLDEN / ".index.json").exists()


@pytest.fixture(scope="module")
def run(before):
    return Run.open(before / RUN)


@pytest.fixture(scope="module")
def computed(run):
    """The model's ids of the prompt, and its log probabilities [position, token], patterns and losses without a sublayer."""
    model = run.load()
    ids = torch.tensor([[*range(len(PROMPT)), *range(len(PROMPT))]])  # letters are read twice
    with torch.no_grad():
        logits, cache = model.run_with_cache(ids)
        without = [("blocks.1.hook_mlp_out", lambda out, hook: torch.zeros_like(out))]
        changed = model.run_with_hooks(ids, fwd_hooks=without)
    losses = [-x[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0] for x in (logits, changed)]
    return ids, logits[0].log_softmax(-1), cache["blocks.2.attn.hook_pattern"][0, 1].numpy(), losses


def shown(browse, before, name, **more):
    """A page without anything left out, ignored or refused."""
    at = browse(before, name, **LINKS[name] | more)
    assert not ignored(at)
    assert not at.warning
    assert not at.error
    assert "Traceback" not in said(at)
    assert "could not be read" not in " ".join(e.label for e in at.expander)
    return at


def test_every_page_is_asked():
    assert set(LINKS) == set(PAGES)


def test_start_lists_the_run_and_what_is_stored_of_it(browse, before, run):
    table = shown(browse, before, "start").dataframe[0].value.set_index("run")
    assert table.loc[RUN, ["state", "trained to step"]].tolist() == ["finished", 24]
    assert table.loc[RUN, "measures"] == load_records([before / RUN])["metric"].nunique()


def test_training_draws_the_losses_that_were_written_down(browse, before, run):
    told = run.telemetry("metric == 'validation_loss'").sort_values("step")
    (line,) = [t for t in chart(shown(browse, before, "training"), "loss")["data"] if "markers" in t.get("mode", "")]
    assert numbers(line["x"]).tolist() == told["step"].tolist()
    assert numbers(line["y"]) == pytest.approx(told["value"].to_numpy())


@pytest.mark.slow
def test_depth_draws_a_stored_measure(browse, before):
    rows = load_records([before / RUN]).query("metric == 'importance_entropy'")
    rows = rows[rows["control"].isna() & rows["head"].isna() & rows["variant"].isna() & (rows["step"] == 24)]
    figure = chart(shown(browse, before, "depth", step="24"), "layers")
    (line,) = [t for t in figure["data"] if t.get("name") == "ResFormer" and "markers" in t["mode"]]
    assert numbers(line["y"]) == pytest.approx(rows.sort_values("layer")["value"].to_numpy())


def test_attention_sends_the_models_pattern(browse, before, computed):
    (data,) = pictures(shown(browse, before, "attention"))
    pattern = computed[2]
    assert weights_sent(data) == pytest.approx(pattern[np.tril_indices(len(pattern))], abs=2e-5)


def test_prompt_and_intervene_draw_what_the_model_computes(browse, before, computed):
    ids, log_p, _, (loss, changed) = computed
    at = shown(browse, before, "prompt")
    (bars,) = chart(at, "predictions")["data"]
    assert numbers(bars["x"])[0] == pytest.approx(float(log_p[-1].exp().max()), abs=1e-5)
    (line,) = chart(at, "surprise")["data"]
    assert numbers(line["y"])[1:] == pytest.approx(-log_p[:-1].gather(-1, ids[0, 1:, None])[:, 0].numpy(), abs=1e-5)
    at = shown(browse, before, "intervene")
    (bars,) = chart(at, "effect")["data"]
    assert numbers(bars["y"]) == pytest.approx((changed - loss).numpy(), abs=1e-5)


def test_maps_and_differences_are_drawn_with_their_numbers(browse, before):
    at = dashboard.settled(shown(browse, before, "maps", colour="document"))
    assert {"tokens", "layers"} == {
        name for name in ("tokens", "layers", "groups") if any(f"figure_{name}" in c.id for c in charts(at))
    }
    assert "Token identity share" in said(at)
    at = dashboard.settled(shown(browse, before, "differences", compare="1", a=RUN, b=RUN, step="24", step_b="0"))
    assert "equal settings" in said(at)
    assert chart(at, "weights")["data"][0]["type"] == "heatmap"
    assert "of these checkpoints, not of their models" in said(at)
