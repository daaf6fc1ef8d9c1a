"""Tokens per second by a clock that the tests turn, bytes by hand, and a model that is left as it was."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from foreign import GPT

import workbench
from workbench.interventions import INTERVENTIONS, throughput
from workbench.measurement.measuring import measure


def some_ids(n=3, T=40):
    return torch.randint(61, (n, T), generator=torch.Generator().manual_seed(n))


def read(frame, part, variant=None, control=None):
    """The one value of a row."""

    def same(column, wanted):
        return frame[column].isna() if wanted is None else frame[column] == wanted

    (value,) = frame[same("part", part) & same("variant", variant) & same("control", control)]["value"]
    return value


@pytest.fixture
def clock(monkeypatch):
    """`clock([2, 1])`: the first run of a round takes two seconds, the second one."""

    def turn(lengths):
        now, calls = 0.0, 0

        def perf_counter():
            nonlocal now, calls
            if calls % 2:
                now += lengths[calls // 2 % len(lengths)]
            calls += 1
            return now

        monkeypatch.setattr(throughput, "perf_counter", perf_counter)

    return turn


@pytest.fixture
def one_round(monkeypatch):
    """Where it is not asked what becomes of several."""
    monkeypatch.setattr(throughput, "ROUNDS", 1)


@pytest.mark.slow
def test_tokens_over_seconds_and_the_ratio_of_a_round_are_medians_without_the_first(tiny, clock):
    clock([90.0, 90.0, 7.0, 1.0, 3.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    frame = measure(tiny("resformer"), "throughput", some_ids())
    assert read(frame, "training") == 3 * 40 / 2
    assert read(frame, "prefill") == 3 * 24 / 2
    assert read(frame, "decode") == 3 * 16 / 2
    assert read(frame, "decode", control="vanilla") == 3 * 16
    for part in ("training", "prefill", "decode"):
        assert read(frame, part, "of_vanilla") == 0.5
    assert (frame["n"] == 3).all()
    assert (frame["T"] == 40).all()
    assert frame.groupby("unit").size().to_dict() == {"bytes": 6, "ratio": 3, "tokens/s": 6}


@pytest.mark.slow
def test_bytes_by_hand(tiny, one_round):
    """Decoding holds weights and cache; SVFormer has (L - 1) fewer matrices W_V and value caches than the vanilla decoder."""
    frame = measure(tiny("svformer"), "throughput", some_ids())
    weights = 4 * sum(p.numel() for p in tiny().parameters())
    matrices, values = 2 * 32 * 32 * 4, 2 * 3 * 40 * 32 * 4
    saved = read(frame, "decode", "peak", "vanilla") - read(frame, "decode", "peak")
    assert saved == pytest.approx(matrices + values, rel=0.03), "up to the activations of three tokens"
    assert read(frame, "training", "peak", "vanilla") > 4 * weights, "weights, gradients and two moments"
    again = measure(tiny("svformer"), "throughput", some_ids(3, 40).clone())
    assert read(again, "training", "peak") == read(frame, "training", "peak")
    longer = pd.DataFrame(INTERVENTIONS["throughput"].function(tiny("svformer"), Rows(some_ids(3, 80)), None, 1))
    assert read(longer, "training", "peak") > read(frame, "training", "peak")


class Rows:
    """As much of a sample as an experiment reads."""

    def __init__(self, ids):
        self.ids = ids


@pytest.mark.slow
def test_the_model_is_left_as_it_was(tiny, one_round):
    model = tiny("resformer_learnable")
    model.requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    measure(model, "throughput", some_ids())
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name
        assert p.grad is None
        assert not p.requires_grad


def test_a_foreign_module_is_trained_only_and_has_no_twin(clock, one_round):
    clock([1.0])
    module = GPT(bias=False).eval()
    before = [p.clone() for p in module.parameters()]
    frame = measure(workbench.observe(module, some_ids(2, 20), quiet=True), "throughput", some_ids(2, 20))
    assert set(frame["part"]) == {"training"}
    assert frame["control"].isna().all()
    assert read(frame, "training") == 40
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(module.parameters(), before, strict=True))
