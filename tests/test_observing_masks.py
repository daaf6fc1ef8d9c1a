"""Attention masks of foreign decoders: named, their statistics exact; and metrics that read the same from outside."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from observed import BEFORE, PLACE, see, stranger
from strangers import GPT, VOCABULARY, large

import workbench
from workbench.errors import NotMeasured, WorkbenchError
from workbench.hook_names import STATISTICS
from workbench.kernels.full_pattern_reference import statistics_of
from workbench.metrics import METRICS
from workbench.observing.interception.masks import mask_kind

MASKS = {
    "sliding window": BEFORE & (PLACE[:, None] - PLACE < 8),
    "packed sequences": BEFORE & (PLACE[:, None] // 10 == PLACE // 10),
    "padding": BEFORE & (PLACE >= 5),
    "adds a bias": torch.where(BEFORE, (PLACE - PLACE[:, None]) * 0.1, -math.inf),
    "causal": BEFORE,
}


def masked(mask):
    return lambda q, k, v, layer: F.scaled_dot_product_attention(q, k, v, attn_mask=mask).nan_to_num()


@pytest.mark.fast(2)
@pytest.mark.parametrize("kind", MASKS)
@torch.no_grad()
def test_other_masks_are_named_and_their_statistics_exact(kind, ids):
    mask = MASKS[kind]
    assert mask_kind(mask, False, 40).startswith(kind)
    observed = see(large(GPT(attend=masked(mask))), ids)
    names = [n for n in observed.hook_dict if n.startswith("blocks.1.attn")]
    _, cache = observed.run_with_cache(ids, names_filter=names)
    assert ("blocks.1.attn.hook_rot_q" in observed.hook_dict) is (kind == "causal")
    q, k = cache["blocks.1.attn.hook_q"], cache["blocks.1.attn.hook_k"]  # nothing is rotated here
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / math.sqrt(8)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    pattern = scores.softmax(-1).nan_to_num(0.0)
    wanted = statistics_of(scores, pattern)
    for statistic in STATISTICS:
        found = cache[f"blocks.1.attn.hook_{statistic}"].double()
        torch.testing.assert_close(found, getattr(wanted, statistic), atol=2e-5, rtol=1e-5, msg=statistic)
    torch.testing.assert_close(cache["blocks.1.attn.hook_pattern"].double(), pattern, atol=1e-6, rtol=1e-5)


RELATIVE = {"importance_entropy": "deficit", "row_entropy": "normalised", "effective_keys": "share"}


def evenly(mask):
    """Attention to all visible keys alike."""
    return lambda q, k, v, layer: F.scaled_dot_product_attention(q * 0, k, v, attn_mask=mask)


@pytest.mark.slow
@pytest.mark.parametrize("width", [8, 40])
def test_uniform_attention_meets_its_baselines_within_any_window(width, ids):
    observed = see(large(GPT(attend=evenly(BEFORE & (PLACE[:, None] - PLACE < width)))), ids)
    metrics = [
        *RELATIVE,
        "sink_mass",
        "sink_power",
        "token_importance",
        "top_importance",
        "received_ratio",
        "concentration_parts",
    ]
    rows = workbench.measure(observed, metrics, ids)
    assert observed.attention_window(1) == (8 if width == 8 else None)
    observed.run_with_cache(ids, names_filter=["blocks.0.attn.hook_pattern"])
    assert observed.attention_window(0) == (8 if width == 8 else None), "also where the pattern alone is read"
    for metric, variant in RELATIVE.items():
        of = rows.loc[(rows["metric"] == metric) & (rows["variant"] == variant), "value"]
        assert of.to_numpy() == pytest.approx(0 if variant == "deficit" else 1, abs=1e-6), metric
    parts = rows.loc[rows["metric"] == "concentration_parts", "value"]
    assert parts.to_numpy() == pytest.approx(0, abs=1e-6)
    plain = rows[rows["variant"].isna() & (rows["metric"] != "concentration_parts")]
    even = plain[plain["control"] == "uniform_causal"]
    assert set(even["metric"]) == set(metrics) - {"concentration_parts"}
    for (metric, layer), of in plain[plain["control"].isna()].groupby(["metric", "layer"]):
        base = even[(even["metric"] == metric) & (even["layer"] == layer)]["value"].to_numpy()
        assert of["value"].to_numpy() == pytest.approx(np.resize(base, len(of)), rel=1e-5, abs=1e-6), metric


def test_a_mask_that_is_no_window_has_no_baseline_of_uniform_attention(ids):
    dilated = BEFORE & ((PLACE[:, None] - PLACE) % 3 == 0)
    observed = see(large(GPT(attend=evenly(dilated))), ids)
    unknown = "uniform attention is unknown where a mask hides some keys"
    with pytest.warns(NotMeasured, match=f"(received_ratio|found_sinks).*{unknown}"):
        rows = workbench.measure(observed, ["row_entropy", "sink_mass", "received_ratio", "found_sinks"], ids)
    with pytest.raises(WorkbenchError, match=f"sink_mass.*{unknown}"):
        workbench.measure(observed, "sink_mass", ids, positions="found")
    assert set(rows["metric"]) == {"row_entropy", "sink_mass"}
    assert rows["control"].isna().all()
    assert rows["variant"].isna().all()


@pytest.mark.parametrize(("width", "share"), [(8, 0), (16, 16 * 0.9 / 39)])
def test_a_sink_within_a_window_needs_a_quarter_of_the_queries(width, share, ids):
    """Keys of position 15 get 0.9 of the attention of all who see it, 8 or 16 of 40 queries."""
    mask = BEFORE & (PLACE[:, None] - PLACE < width)

    def resting(q, k, v, layer):
        k = torch.zeros_like(k)
        k[:, :, 15] = math.log(9 * (width - 1)) / 8**0.5
        return F.scaled_dot_product_attention(torch.ones_like(q), k, v, attn_mask=mask)

    observed = see(large(GPT(attend=resting)), ids)
    rows = workbench.measure(observed, "found_sinks", ids)
    assert rows.loc[rows["variant"].isna(), "value"].to_numpy() == pytest.approx(share, abs=1e-4)
    found = workbench.measure(observed, "sink_mass", ids, positions="found")
    assert found["value"].to_numpy() == pytest.approx(share, abs=1e-4)


# ---- measuring ------------------------------------------------------------------------------------------------------


STREAMED = [  # all but a slow one, and those that read an output matrix, which an observed module need not have
    name for name, metric in METRICS.items()
    if metric.form != "derived" and name != "token_probe"
    and {"W_O", "null", "router_logits", "router_scores", "expert_weights"}.isdisjoint(metric.arguments)
]  # fmt: skip


@pytest.mark.slow
def test_every_metric_reads_the_same_from_outside_as_from_inside(tiny):
    model = tiny("resformer")
    ids = torch.randint(61, (4, 64), generator=torch.Generator().manual_seed(3))
    inside, outside = (workbench.measure(m, STREAMED, ids) for m in (model, see(model, ids)))
    axes = ["metric", "layer", "head", "position", "site", "variant", "control", "part", "index", "source"]
    both = inside.merge(
        outside, on=[a for a in axes if a in inside], suffixes=("", "_outside"), how="outer", indicator=True
    )
    assert (both["_merge"] == "both").all(), both.loc[
        both["_merge"] != "both", ["metric", "layer", "site"]
    ].drop_duplicates()
    apart = (both["value"] - both["value_outside"]).abs() > 1e-4 * (1 + both["value"].abs())
    assert not apart.any(), both.loc[apart, ["metric", "layer", "site", "variant", "value", "value_outside"]]
    assert set(outside["metric"]) == set(STREAMED)
    assert (outside["architecture"] == "resformer").all()


def test_measures_of_weights_are_refused_by_name(ids):
    with pytest.raises(WorkbenchError, match=r"gradient_norm reads weights by our names"):
        workbench.measure(stranger("fused")[-1], "gradient_norm", ids)


def test_a_loss_needs_every_position_and_gets_it(ids):
    """nanoGPT without targets gives the last position only; so does `observed(ids)`, bit for bit."""
    module = large(GPT(last=True))
    observed = see(module, ids)
    assert observed(ids).shape == (2, 1, VOCABULARY)
    wanted = module(ids, targets=ids)[0]
    assert torch.equal(observed.everywhere(ids), wanted)
    loss = F.cross_entropy(wanted[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert torch.equal(observed(ids, return_type="loss"), loss)
    frame = workbench.measure(observed, "loss", ids)
    assert frame["value"].item() == pytest.approx(loss.item(), rel=1e-5)


@torch.inference_mode()
def test_flat_logits_and_inference_mode(ids):
    class Flat(GPT):
        def forward(self, idx):
            return super().forward(idx)[0].flatten(0, 1)

    module = large(Flat())
    observed = see(module, ids)
    logits, cache = observed.run_with_cache(ids, ["blocks.1.attn.hook_v"])
    assert torch.equal(logits.flatten(0, 1), module(ids))
    assert list(cache.keys()) == ["blocks.1.attn.hook_v"]
    assert workbench.measure(observed, "loss", ids)["value"].notna().all()


def test_a_module_without_logits_has_activations_but_no_loss(ids):
    class Body(GPT):
        def forward(self, idx):
            x, memory = self.transformer.wte(idx), {}
            for block in self.transformer.h:
                x = block(x, memory)
            return self.transformer.ln_f(x)

    observed = see(large(Body()), ids)
    assert not workbench.measure(observed, "value_norm", ids).empty
    with pytest.raises(WorkbenchError, match="no logits"):
        workbench.measure(observed, "loss", ids)
    with pytest.raises(WorkbenchError, match="no logits"):
        observed(ids, return_type="loss")
