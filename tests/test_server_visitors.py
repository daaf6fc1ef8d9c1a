"""Six visitors at once of a dashboard that has just been started: each gets the right numbers, and nobody an error box."""

from __future__ import annotations

import zlib

import browsing
import dashboard
import numpy as np
import pytest
import torch
import visiting
from app_pages import is_of, numbers, weights_sent

from workbench.cli import dashboard_process
from workbench.runs.records import load_records
from workbench.runs.run import Run

pytestmark = pytest.mark.slow
A, TEXT = "text-resformer-s0", "return values"
OF = f"a={A}&step=20&prompt=return%20values"
PAGES = {
    "start": f"?show=model&{OF}", "training": f"training?show=loss&models=resformer&{OF}",
    "depth": f"depth?metric=importance_entropy&models=resformer&seed=0&{OF}", "attention": f"attention?layer=1&head=1&{OF}",
    "prompt": f"prompt?show=next&{OF}", "intervene": f"intervene?edits=remove:part%3Dmlp,layer%3D1&{OF}",
}  # fmt: skip
FIGURES = {"start": 4, "training": 3, "depth": 2, "attention": 0, "prompt": 2, "intervene": 2}


@pytest.fixture
def runs(populated, tmp_path):
    return dashboard.copied(populated, tmp_path / "runs")


@pytest.fixture
def cold(runs):
    """Address of a server that nobody has asked for anything yet."""
    server = dashboard_process.serve(runs, browsing.free_port())
    yield server.url
    dashboard_process.stop(server)


@pytest.fixture
def expected(runs):
    """Page -> view -> its numbers, from the records and from the model."""
    run = Run.open(runs / A)
    rows = load_records([runs / A]).query("step == 20 and layer.notna()")
    share = rows.query("metric == 'token_identity_share' and site == 'own_v'").sort_values("layer")["value"]
    entropy = rows[(rows["metric"] == "importance_entropy") & rows["control"].isna()].sort_values("layer")["value"]
    told = [Run.open(runs / f"text-resformer-s{seed}").telemetry("metric == 'validation_loss'") for seed in range(2)]
    model = run.load()
    ids = torch.tensor([model.tokenizer.encode(TEXT)])
    with torch.no_grad():
        logits, cache = model.run_with_cache(ids)
        without = [("blocks.1.hook_mlp_out", lambda out, hook: torch.zeros_like(out))]
        changed = model.run_with_hooks(ids, fwd_hooks=without)
    before, after = (-x[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0] for x in (logits, changed))
    pattern = cache["blocks.1.attn.hook_pattern"][0, 1].numpy()
    return {
        "start": ("token_share", share), "depth": ("layers", entropy),
        "training": ("loss", sum(t.groupby("step")["value"].mean() for t in told) / 2),
        "prompt": ("surprise", before.numpy()), "intervene": ("effect", (after - before).numpy()),
        "attention": ("", pattern[np.tril_indices(len(pattern))]),
    }  # fmt: skip


def drawn(visit, view):
    """Numbers of the curve, or the bars, that a view draws of the one model."""
    found = [t for t in visit.chart(view)["data"] if "y" in t and t.get("hoverinfo") != "skip"]
    named = [t for t in found if t.get("name") == "ResFormer" and "markers" in t.get("mode", "")]
    return numbers((named or found)[0]["y"])


def sent(visit):
    """Weights of the enlarged head that the attention element gets."""
    (element,) = (e for e in visit.of("bidi_component") if is_of(e, "attention"))
    return weights_sent(zlib.decompress(element.bytes))


def test_six_pages_of_a_cold_server_at_once_are_right(cold, expected):
    for page, visit in zip(PAGES, visiting.together(cold, list(PAGES.values())), strict=True):
        assert not visit.wrong, page
        assert len(visit.charts()) == FIGURES[page]
        view, wanted = expected[page]
        shown = drawn(visit, view) if view else sent(visit)
        assert shown[-len(wanted) :] == pytest.approx(np.asarray(wanted), abs=2e-5), page


def test_six_visitors_of_one_page_wait_for_one_computation_and_get_the_same(cold, expected):
    visits = visiting.together(cold, [PAGES["intervene"]] * 6)
    for visit in visits:
        assert not visit.wrong
        assert [c.spec for c in visit.charts()] == [c.spec for c in visits[0].charts()]
    assert drawn(visits[0], "effect") == pytest.approx(expected["intervene"][1], abs=2e-5)


def test_six_browsers_at_once_on_a_cold_server_show_no_error(browser, cold, expected):
    """What the front end makes of it: no box, no dialogue, and the same numbers."""
    wrong, contexts = [], [browser.new_context() for _ in PAGES]
    try:
        pages = [browsing.watched(context.new_page(), cold, wrong, wrong) for context in contexts]
        for page, address in zip(pages, PAGES.values(), strict=True):
            page.goto(f"{cold}/{address}", wait_until="commit")
        for name, page in zip(PAGES, pages, strict=True):
            page.locator("h1").first.wait_for()
            browsing.settled(page, FIGURES[name])
            assert page.locator('[data-testid="stAlertContentError"], [role="dialog"]').count() == 0
            view, wanted = expected[name]
            if name in ("prompt", "intervene"):
                assert browsing.drawn(page, f"figure_{view}")[-len(wanted) :] == pytest.approx(wanted, abs=2e-5)
            if name == "attention":
                page.locator(".attention .map canvas").first.wait_for()
    finally:
        for context in contexts:
            context.close()
    assert not wrong
