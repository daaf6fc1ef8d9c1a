"""Claims of one loss below another's, and of what gates, scales and norms change beside sinks: verdicts on planted tables."""

import math

import pytest
from planted import from_losses, judged, losses, per_layer, row, run, runs, with_sinks

LOWER = {
    "attention_residuals_lower_the_loss": ("attention_residuals", "transformer"),
    "averages_by_content_beat_fixed_ones": ("attention_residuals", "denseformer"),
    "reuse_by_token_beats_constant_reuse": ("satformer", "resformer"),
    "deep_values_can_be_looked_up": ("bank_of_values", "transformer"),
    "half_of_the_heads_can_share_the_first_values": ("skip_v1", "transformer"),
}


@pytest.mark.parametrize(
    ("name", "loss", "status"),
    [(name, *case) for name, case in zip(LOWER, [(2.70, "supported"), (2.76, "refuted")] * 3, strict=False)],
)
def test_one_loss_below_anothers(name, loss, status):
    model, rival = LOWER[name]
    found = from_losses(name, {model: loss, rival: 2.73, "cla": 1.0})
    assert found.status == status
    assert found.table["value"].tolist() == pytest.approx([-0.03 if status == "supported" else 0.03])


@pytest.mark.parametrize(("blocks", "status"), [(2.72, "supported"), (2.76, "refuted")])
def test_every_form_of_an_architecture_must_end_lower(blocks, status):
    levels = {"transformer": 2.73, "attention_residuals": 2.70, "attention_residuals[depth_blocks=2]": blocks}
    found = from_losses("attention_residuals_lower_the_loss", levels)
    assert found.status == status
    assert len(found.table) == 2


def test_reuse_by_token_is_compared_with_every_constant_share_that_is_here():
    levels = {"satformer": 2.70, "resformer": 2.73, "resformer_learnable": 2.69, "transformer": 2.60}
    found = from_losses("reuse_by_token_beats_constant_reuse", levels)
    assert found.status == "refuted"
    assert found.table["value"].tolist() == pytest.approx([-0.03, 0.01]), "not with the decoder, which is here too"


def test_a_rival_of_other_seeds_is_left_out_and_alone_is_no_evidence():
    mine, shared, other = runs("satformer"), runs("resformer"), [run("resformer_learnable", seed) for seed in (3, 4)]
    level = {"satformer": 2.70, "resformer": 2.73, "resformer_learnable": 2.60}
    name = "reuse_by_token_beats_constant_reuse"
    both, alone = ([*mine, *shared, *other], [*mine, *other])
    found = judged(name, both, (), losses(both, lambda of: level[of["model"]]))
    assert found.table["value"].tolist() == pytest.approx([-0.03])
    assert found.status == "supported"
    found = judged(name, alone, (), losses(alone, lambda of: level[of["model"]]))
    assert found.status == "not_checkable"
    assert "No seed of satformer is one of resformer_learnable" in found.sentence


@pytest.mark.parametrize(
    ("its_mean", "random", "status"),
    [("abcd", "dcba", "supported"), ("dcba", "abcd", "refuted"), ("abcd", "abcd", "unresolved")],
)
def test_weights_must_tell_what_is_needed_better_than_what_a_random_vector_breaks(its_mean, random, status):
    """Costs rise in the order of the letters, weights from a to d: a place whose random vectors cost as much tells nothing."""
    made = runs("attention_residuals")
    rows = [
        row(of, metric, order.index(part) * (1 + of["seed"] / 10), layer=n, site="depth_weights", part=part, **axes)
        for metric, order, axes in (
            ("depth_routing", "abcd", {}), ("source_ablation", its_mean, {"variant": "mean"}),
            ("source_ablation", random, {"control": "random"}),
        )
        for of in made for n in range(3) for part in "abcd"
    ]  # fmt: skip
    assert judged("what_is_read_most_is_needed_most", made, rows).status == status


@pytest.mark.parametrize(("values", "status"), [(0.5, "supported"), (0.1, "refuted"), (0.3, "unresolved")])
def test_values_that_need_the_embedding_more(values, status):
    """Without it queries and keys lose .3 more than without the layer before, values so much."""
    made, luck = runs("attention_residuals"), [0.0, 0.01, -0.02]
    rows = []
    for site in ("q", "k", "v"):
        more = lambda of, n, s=site: 0.1 + (values if s == "v" else 0.3) + luck[of["seed"]] * (1 + (s == "v"))  # noqa: E731
        rows += per_layer(made, "reader_ablation", more, range(1, 4), site=site, part="embed")
        rows += per_layer(made, "reader_ablation", lambda of, n: 0.1, range(1, 4), site=site, part="latest")
    found = judged("values_read_the_embedding_queries_and_keys_the_latest", made, rows)
    assert found.status == status
    assert found.table["value"].tolist() == pytest.approx([values - 0.3 - 0.01 / 3] * 2)


# ---- exclusive attention ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("short", "long", "status"),
    [(-0.02, -0.05, "supported"), (-0.05, -0.02, "unresolved"), (-0.02, 0.03, "refuted"), (-0.02, None, "unresolved")],
)
def test_a_lead_of_exclusive_heads_must_grow_with_length(short, long, status):
    made = [of for T, change in ((128, short), (512, long)) if change is not None
            for of in runs("transformer", "exclusive_attention", T=T, batch=1024 // T)]  # fmt: skip
    made += [run("transformer", 4, T=128, batch=8)]  # whose seed the other model never had
    change = lambda of: (short if of["T"] == 128 else long) * (of["model"] != "transformer") * (1 + of["seed"] / 20)  # noqa: E731
    found = judged("exclusive_heads_lower_the_loss", made, (), losses(made, lambda of: 2.7 + change(of)))
    assert found.status == status
    assert ("needs runs of several" in found.sentence) == (long is None)
    if long is not None:
        grown = found.table.set_index("comparison").loc["longest - shortest", "value"]
        assert grown == pytest.approx((long - short) * 1.05)


# ---- beside sinks ----------------------------------------------------------------------------------------------------


def beside(name, model, *metrics, mine=2.0, others=8.0, kept=0.5, start=1.0):
    """Ratios of one model at `mine` in layer 2 and of vanilla at `others`, all others at 1, beside sinks of vanilla and `kept` ones."""
    made, rows = with_sinks(("transformer", model))
    rows = [r for r in rows if r["run"].startswith("transformer")]
    for of in (of for of in made if of["model"] == model):
        rows += [row(of, "sink_mass", kept, layer=2, head=0), row(of, "sink_rate", float(kept > 0.3), layer=2)]
    luck = [1.0, 1.01, 0.99, 1.02, 0.98]
    top = lambda of: (others if of["model"] == "transformer" else mine) * luck[of["seed"]]  # noqa: E731
    for metric, site in metrics:
        rows += per_layer(made, metric, lambda of, n: top(of) if n == 2 else 1.0, site=site)
        rows += per_layer(made, metric, lambda of, n: start * luck[of["seed"] - 1], site=site, step=0)
    return judged(name, made, rows, losses(made, lambda of: 2.7))


OUTLIERS = ("a_value_gate_removes_outliers", "value_gate", ("massive_activations", "stream"))
ANSWERS = (
    "sinks_gather_gradients_that_spikes_answer", "value_scale", ("gradient_sink", None), ("hidden_peak", "stream"),
)  # fmt: skip


NORMS = ("norms_remove_spikes_and_leave_sinks", "sandwich_norm", ("massive_activations", "stream"))


@pytest.mark.parametrize("claim", [OUTLIERS, NORMS])
def test_ratios_beside_sinks(claim):
    found = beside(*claim)
    assert found.status == "supported"
    assert found.table["value"].iloc[0] == pytest.approx(math.log(2 / 8) / 3, abs=1e-3), "one of three layers"
    assert beside(*claim, mine=20.0).status == "refuted"


def test_who_loses_the_sink_says_nothing_of_what_sinks_cause_and_a_gate_may_lose_it():
    for claim in (ANSWERS, NORMS):
        found = beside(*claim, kept=0.1)
        assert found.status == "unresolved"
        assert "has them in 0 of 5" in found.sentence
    assert beside(*OUTLIERS, kept=0.1).status == "supported"


def test_a_gradient_that_gathers_before_training_is_no_work_of_sinks():
    found = beside(*ANSWERS, start=20.0)
    assert found.status == "unresolved"
    assert found.table.set_index("comparison").loc["vanilla's gradient, trained - init", "high"] < 0


@pytest.mark.parametrize(("name", "model"), [OUTLIERS[:2], ANSWERS[:2]])
def test_without_a_sink_of_vanilla_nothing_is_tested(name, model):
    made, rows = with_sinks(("transformer", model), strongest=0.1)
    assert judged(name, made, rows).status == "gated"
