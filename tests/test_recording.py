"""What a recorder writes down: numbers by hand, against `measure` and full gradients, and which quantities it takes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from own_loop import GPT, PLAIN, loop, loss_of, tokens
from recordings import by_place, rows, value
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench import Recorder, observe
from workbench.errors import UnknownName, WorkbenchError
from workbench.measurement.measuring import measure
from workbench.runs.run import Run
from workbench.training.recorder import DEFAULT, NotRecorded, quantities
from workbench.training.recorder.quantities import StepRecord

FOREIGN_LOOP = """
import sys
from own_loop import GPT, PLAIN, loop
from workbench import Recorder
model = GPT()
with Recorder(model, 1, sys.argv[1] + "/r", quantities=PLAIN) as recorder:
    loop(model, recorder, 2)
imported = {"transformers", "transformer_lens", "workbench.models.hooked"} & sys.modules.keys()
assert not imported, imported
"""


class TwoByTwo(nn.Module):
    """loss = sum of W x over a fixed x: the gradient is x in every row."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))

    def forward(self, x):
        return self.weight @ x


def test_gradient_norms_weights_and_updates_by_hand(tmp_path):
    """x = (1, 2): gradient [[1, 2], [1, 2]], norm sqrt 10; ||W|| = 5; with SGD at 0.1 the change is 0.1 sqrt 10."""
    model = TwoByTwo()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, 1, tmp_path / "r", quantities=["gradient_norm", "weight_norm", "update_ratio"]) as recorder:
        loss = model(torch.tensor([1.0, 2.0])).sum()
        loss.backward()
        recorder.step(loss, learning_rate=0.1)
        optimizer.step()
    assert value(tmp_path / "r", "gradient_norm", part="W_weight") == pytest.approx(math.sqrt(10))
    assert value(tmp_path / "r", "gradient_norm", part="all") == pytest.approx(math.sqrt(10))
    assert value(tmp_path / "r", "weight_norm") == pytest.approx(5.0)
    assert value(tmp_path / "r", "update_ratio") == pytest.approx(0.1 * math.sqrt(10) / 5)
    assert value(tmp_path / "r", "train_loss") == pytest.approx(11.0)
    assert value(tmp_path / "r", "learning_rate") == pytest.approx(0.1)


def test_a_weight_of_zero_has_no_update_ratio(tmp_path):
    model = TwoByTwo()
    nn.init.zeros_(model.weight)
    with Recorder(model, 1, tmp_path / "r", quantities=["update_ratio"]) as recorder:
        model(torch.ones(2)).sum().backward()
        recorder.step()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert rows(tmp_path / "r", "update_ratio")["value"].isna().all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ours", "observed"])
def test_what_is_recorded_is_what_measure_says(tiny, gpt, tmp_path, kind):
    """Concentration, norms and drains on the batch trained on, per layer and head; the loop of the observed calls the module itself."""
    ids = torch.randint(31, (4, 64), generator=torch.Generator().manual_seed(1))
    model = tiny("resformer") if kind == "ours" else observe(gpt, ids, quiet=True)
    names = ["importance_entropy", "row_entropy", "sink_mass", "sink_rate", "hidden_norm", "value_norm", "value_drain"]
    reference = measure(model, names, ids)
    run = model.train() if kind == "ours" else gpt
    with Recorder(model, 1, tmp_path / "r", quantities=names) as recorder:
        loss_of(run, ids).backward()
        recorder.step()
    reference = reference[reference["variant"].isna() & reference["control"].isna()]
    expected, found = by_place(reference), by_place(Run.open(tmp_path / "r").telemetry())
    assert found.keys() == expected.keys()
    assert len(found) > (40 if kind == "ours" else 20)
    for key, number in expected.items():
        assert found[key] == pytest.approx(number, rel=2e-6), key


def test_activation_gradients_are_those_of_run_with_grads(tiny, tmp_path):
    model, ids = tiny("resformer"), torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    points = {("stream", 0): "blocks.0.hook_resid_pre", ("v", 1): "blocks.1.attn.hook_v",
              ("first_v", 2): "blocks.2.attn.source.0.hook_v", ("own_v", 2): "blocks.2.attn.own.hook_v",
              ("stream", 3): "blocks.2.hook_resid_post"}  # fmt: skip
    _, _, gradients = model.run_with_grads(ids, list(points.values()))
    model.train()
    with Recorder(model, 1, tmp_path / "r", quantities=["activation_gradient_norm"]) as recorder:
        model(ids, return_type="loss").backward()
        recorder.step()
    for (site, layer), point in points.items():
        found = value(tmp_path / "r", "activation_gradient_norm", site=site, layer=layer)
        assert found == pytest.approx(float(gradients[point].norm()), rel=1e-5)


def test_a_gradient_sink_is_that_of_the_summed_gradients_in_any_loop(tiny, gpt, tmp_path):
    """Ours against run_with_grads; a foreign one, observed or not, against the gradient of what its fused map reads; two micro-batches."""
    model, parts = tiny("resformer"), [tokens(step, batch=2, length=length) for step, length in ((0, 9), (1, 11))]
    observed = observe(gpt, parts[0], quiet=True)
    summed = dict.fromkeys(range(2), torch.zeros(11, 16))
    ours = dict.fromkeys(range(3), torch.zeros(11, 32))
    grown = lambda a, b: a + F.pad(b.sum(0), (0, 0, 0, 11 - b.shape[1]))  # noqa: E731
    for ids in parts:
        _, _, grads = model.run_with_grads(ids, [f"blocks.{n}.attn.hook_in" for n in range(3)])
        ours = {n: grown(ours[n], grads[f"blocks.{n}.attn.hook_in"]) for n in range(3)}
        kept = []
        hooks = [
            b.attn["c_attn"].register_forward_pre_hook(lambda m, read, kept=kept: kept.append(read[0])) for b in gpt.h
        ]
        found = torch.autograd.grad(loss_of(gpt, ids), kept)
        [hook.remove() for hook in hooks]
        summed = {n: grown(summed[n], found[n]) for n in range(2)}
    for name, module, call, expected in (
        ("ours", model.train(), model, ours), ("foreign", gpt, gpt, summed), ("observed", observed, gpt, summed),
    ):  # fmt: skip
        with Recorder(module, 1, tmp_path / name, quantities=["gradient_sink", "gradient_by_position"]) as recorder:
            for ids in parts:
                loss_of(call, ids).backward()
            recorder.step()
        for n, total in expected.items():
            norms = total.norm(dim=-1)
            assert value(tmp_path / name, "gradient_sink", layer=n) == pytest.approx(
                float(norms[0] / norms[1:].mean()), rel=1e-4
            )
            each = rows(tmp_path / name, "gradient_by_position", layer=n).sort_values("position")
            assert each["value"].to_numpy() == pytest.approx(norms.numpy(), rel=1e-4)
            assert each["position"].tolist() == list(range(11))


def test_a_foreign_module_by_hand(gpt, tmp_path):
    """Streams, values (the last third of the fused map) and their gradients, against a run with everything kept."""
    ids, kept, wide = tokens(0), {}, []
    x = gpt.wte(ids) + gpt.wpe.weight[: ids.shape[1]]
    for i, block in enumerate(gpt.h):
        kept["stream", i] = x
        hook = block.attn["c_attn"].register_forward_hook(lambda m, i, out: wide.append(out))
        x = block(x)
        hook.remove()
        kept["own_v", i] = wide[-1][..., 32:]
    kept["stream", 2] = x
    loss = F.cross_entropy(gpt.lm_head(gpt.ln_f(x))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    found = torch.autograd.grad(loss, [*(kept["stream", i] for i in range(3)), *wide])
    gradients = {("stream", i): g for i, g in enumerate(found[:3])}
    gradients |= {("own_v", i): g[..., 32:] for i, g in enumerate(found[3:])}
    with Recorder(gpt, 1, tmp_path / "r", quantities=PLAIN) as recorder:
        loss_of(gpt, ids).backward()
        recorder.step()
    for (site, layer), tensor in kept.items():
        metric = "hidden_norm" if site == "stream" else "value_norm"
        found = value(tmp_path / "r", metric, site=site, layer=layer)
        assert found == pytest.approx(float(tensor.detach().norm(dim=-1).mean()), rel=1e-5)
    for (site, layer), gradient in gradients.items():
        found = value(tmp_path / "r", "activation_gradient_norm", site=site, layer=layer)
        assert found == pytest.approx(float(gradient.norm()), rel=1e-4)
    parts = set(zip(*(rows(tmp_path / "r", "gradient_norm")[c] for c in ("part", "layer")), strict=True))
    assert {("W_QKV", 0), ("W_O", 1), ("W_mlp.0", 1)} <= parts
    assert value(tmp_path / "r", "gradient_norm", part="W_QKV", layer=1) == pytest.approx(
        float(gpt.h[1].attn["c_attn"].weight.grad.norm())
    )
    assert {"W_E", "W_pos", "W_U", "all"} <= set(rows(tmp_path / "r", "gradient_norm")["part"])


@pytest.mark.slow
def test_recording_changes_no_bit_of_the_training(gpt, tiny, tmp_path):
    ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    weights = []
    for recorded in (False, True):
        torch.manual_seed(0)
        plain, ours = GPT(), tiny("resformer").train()
        optimizer = torch.optim.AdamW([*plain.parameters(), *ours.parameters()], lr=1e-2)
        wanted = {"plain": (plain, PLAIN), "ours": (ours, DEFAULT)} if recorded else {}
        recorders = [Recorder(m, 2, tmp_path / name, quantities=q) for name, (m, q) in wanted.items()]
        for step in range(5):
            optimizer.zero_grad()
            (loss_of(plain, tokens(step)) + ours(ids, return_type="loss")).backward()
            for recorder in recorders:
                recorder.step()
            optimizer.step()
        for recorder in recorders:
            recorder.close()
        weights.append([p.detach().clone() for m in (plain, ours) for p in m.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_between_logging_steps_no_hook_stands_in_an_observed_module(gpt, tmp_path):
    """Also where a forward pass failed in the middle."""
    ids = tokens(0, batch=2, length=20)
    observed = observe(gpt, ids, quiet=True)
    recorder = Recorder(observed, 2, tmp_path / "r", quantities=["sink_mass"])
    with pytest.raises(IndexError):
        gpt(ids + 1000)
    loss_of(gpt, ids).backward()
    assert "forward" in vars(gpt)
    recorder.step()
    assert "forward" not in vars(gpt)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in gpt.modules())
    recorder.close()
    assert len(rows(tmp_path / "r", "sink_mass")) == 4


class Fetches(TorchDispatchMode):
    """Counts numbers that Python asks a tensor for: on a GPU each would wait for it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_a_record_is_fetched_once(tiny, tmp_path, monkeypatch):
    model, ids, fetched = tiny("resformer").train(), torch.randint(61, (2, 70)), []
    monkeypatch.setattr(StepRecord, "rows", lambda record: fetched.extend(map(len, record.pending.values())) or [])
    absent = ("coefficient", "null_mass", "router_entropy", "expert_load", "first_token_experts")
    names = [n for n in quantities() if n not in absent]  # which this model does not show
    with Recorder(model, 1, tmp_path / "r", quantities=names) as recorder, Fetches() as fetches:
        for _ in range(3):
            model(ids, return_type="loss").backward()
            recorder.step()
    assert len(fetched) == 3
    assert min(fetched) > 150
    assert fetches.count == 0


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_recording_a_foreign_module_imports_no_model_library(tmp_path):
    """transformers and TransformerLens take seconds to import, and a foreign loop needs neither."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", FOREIGN_LOOP, tmp_path], capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (here, here.parent)))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_unknown_and_impossible_quantities_are_refused(gpt, tiny, tmp_path):
    with pytest.raises(UnknownName, match="did you mean gradient_norm"):
        Recorder(gpt, folder=tmp_path / "r", quantities=["gradient_norms"])
    with pytest.raises(WorkbenchError, match="sink_mass cannot be recorded: GPT shows no sink"):
        Recorder(gpt, folder=tmp_path / "r", quantities=["gradient_norm", "sink_mass"])
    with pytest.raises(WorkbenchError, match="no quantities"):
        Recorder(gpt, folder=tmp_path / "r", quantities=[])
    with pytest.raises(WorkbenchError, match="every=0"):
        Recorder(gpt, 0, tmp_path / "r")
    assert not (tmp_path / "r").exists()
    assert set(DEFAULT) < set(quantities())
    assert "loss" not in quantities()


def test_what_the_default_cannot_show_is_said_and_written_down(gpt, tmp_path):
    with pytest.warns(
        NotRecorded, match=r"not recorded: .*row_entropy \(GPT shows no row_entropy; give workbench.observe"
    ) as told:
        recorder = Recorder(gpt, 1, tmp_path / "r")
    assert told[0].filename == __file__, "it points at the line that asked"
    loop(gpt, recorder, 1)
    recorder.close()
    recorder = json.loads((tmp_path / "r" / "run.json").read_text())["recorder"]
    matrices = sum(p.numel() for p in gpt.parameters() if p.ndim == 2)
    share = f"{matrices / sum(p.numel() for p in gpt.parameters()):.1%}"
    assert f"matrices with {share} of" in recorder["coverage"]
    assert recorder["coverage"].endswith("activations in 2 of 2 layers; attention of 0.")
    assert recorder["coverage"] in str(told[0].message)
    assert set(recorder["unavailable"]) == {"importance_entropy", "row_entropy", "sink_mass"}
    assert len(rows(tmp_path / "r", "hidden_norm")) == 3


def test_a_loop_that_fails_keeps_what_it_measured_and_no_update_that_may_not_have_been(gpt, tmp_path):
    with contextlib.suppress(ZeroDivisionError), Recorder(gpt, 1, tmp_path / "r", quantities=PLAIN) as recorder:
        loop(gpt, recorder, 2)
        loss_of(gpt, tokens(2)).backward()
        recorder.step()
        _ = 1 // 0
    assert set(rows(tmp_path / "r", "gradient_norm")["step"]) == {0, 1, 2}
    assert set(rows(tmp_path / "r", "update_ratio")["step"]) == {0, 1}


def test_a_step_without_gradients_says_where_it_belongs(gpt, tmp_path):
    with (
        Recorder(gpt, 1, tmp_path / "r", quantities=PLAIN) as recorder,
        pytest.warns(NotRecorded, match="call step after backward"),
    ):
        recorder.step(2.0)
    with pytest.warns(NotRecorded, match="closed"):
        recorder.step()
    assert rows(tmp_path / "r", "train_loss")["value"].tolist() == [2.0]
