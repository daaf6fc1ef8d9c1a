"""What goes to no token in models of ours: in caches, measures, maps, followed values, edits and the X-ray's sentence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from inputs import WIDE, tokens

import workbench
from workbench.interventions import edited
from workbench.prompts import attention_inputs, attention_map, attention_overview, check_model, value_flow
from workbench.reports.xray_sentences import sinks_text

POINT = "blocks.1.attn.hook_{}"


@pytest.fixture
def model(awake):
    return awake("sink_logit", dtype=WIDE, config={"n_key_value_heads": 2})


@torch.no_grad()
def test_measures_and_maps_count_it(model):
    ids = tokens(model, 20)
    _, cache = model.run_with_cache(ids)
    null, pattern = cache["null", 2, "attn"], cache["pattern", 1]
    torch.testing.assert_close(null, 1 - cache["pattern", 2].sum(-1))
    assert 0.05 < null.mean() < 0.95
    frame = workbench.measure(model, ["null_mass", "importance_entropy", "sink_mass"], ids)
    of = lambda name: frame[(frame.metric == name) & (frame.layer == 2) & frame.variant.isna() & frame.control.isna()]  # noqa: E731
    np.testing.assert_allclose(of("null_mass").sort_values("head")["value"], null.mean((0, 2)), atol=1e-6)
    p = torch.cat((cache["received", 2, "attn"] / 20, null.mean(-1, keepdim=True)), -1).mean(1)
    assert p.sum(-1).tolist() == pytest.approx([1, 1], abs=1e-9)
    assert of("importance_entropy")["value"].item() == pytest.approx(
        float(torch.special.entr(p).sum(-1).mean()), abs=1e-6
    )
    assert "a column that is no token" in sinks_text(frame)
    inputs, found = attention_inputs(model, ids[:1]), attention_overview(model, ids[:1])
    np.testing.assert_allclose(np.nan_to_num(attention_map(inputs, 1, 3).weights), pattern[0, 3], atol=1e-6)
    np.testing.assert_allclose(inputs.layers[2][0].null, null[0], atol=1e-6)
    heads = found.statistics[found.statistics.layer == 2]
    np.testing.assert_allclose(heads["null_mass"], null[0].mean(-1), atol=1e-6)
    assert check_model(model, ids[:1])["holds"].all()


@torch.no_grad()
def test_a_followed_value_gets_what_the_keys_keep(model):
    ids = tokens(model, 9)[:1]
    column = model.run_with_cache(ids)[1]["pattern", 1][0, :, :, 4].sum(-1)
    rows = value_flow(model, ids, 4, 1).readers.query("layer == 1 and way == 'attention'")
    assert rows["attention"].tolist() == pytest.approx(column.tolist(), abs=1e-6)


@torch.no_grad()
def test_what_replaces_a_pattern_leaves_the_rest_to_no_token(model):
    ids, names = tokens(model, 9), [POINT.format(x) for x in ("null", "pattern", "row_entropy")]
    with model.hooks([(names[1], lambda p, hook: 0.5 * p)]):
        _, cache = model.run_with_cache(ids, names_filter=names)
    null, pattern = cache[names[0]], cache[names[1]]
    torch.testing.assert_close(null, 1 - pattern.sum(-1))
    entropy = torch.special.entr(pattern).sum(-1) + torch.special.entr(null)
    torch.testing.assert_close(cache[names[2]], entropy)
    with edited(model, "sink:layer=1"):  # what the first token loses, the column shares
        _, cut = model.run_with_cache(ids, names_filter=names)
    assert (cut[names[0]][:, :, 1:] > model.run_with_cache(ids)[1][names[0]][:, :, 1:]).all()
    assert not cut[names[1]][:, :, 1:, 0].any()
