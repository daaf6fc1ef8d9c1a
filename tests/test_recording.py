"""A recorder in somebody's own loop: numbers by hand, loops of every kind, folders that stay readable."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from own_loop import GPT, PLAIN, loop, loss_of, tokens
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench import Recorder, RecorderCallback, observe
from workbench.errors import UnknownName, WorkbenchError
from workbench.listing import listing
from workbench.measuring import measure
from workbench.recording import DEFAULT, NotRecorded, quantities
from workbench.recording import recorder as recorder_file
from workbench.recording.folder import SPAN
from workbench.runs import Run, is_locked, list_runs


@pytest.fixture
def gpt():
    torch.manual_seed(0)
    return GPT()


def rows(folder, metric, **axes):
    """Values of a metric by (part or site, layer), or of one place."""
    frame = Run.open(folder).telemetry()
    frame = frame[frame["metric"] == metric]
    for name, value in axes.items():
        frame = frame[frame[name] == value]
    return frame


def value(folder, metric, **axes):
    return rows(folder, metric, **axes)["value"].item()


def by_place(frame):
    """Means over positions by everything that tells two rows of a step apart."""
    axes = ["metric", "site", "layer", "head", "unit", "n", "T"]
    named = frame[frame["T"].notna()].assign(**{axis: frame[axis].astype("str").fillna("") for axis in axes})
    return named.groupby(axes)["value"].mean().to_dict()


# ---- numbers ---------------------------------------------------------------------------------------------------------


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


def test_what_is_recorded_of_our_models_is_what_measure_says(tiny, tmp_path):
    """Concentration, norms and drains on the batch trained on, per layer and head."""
    model, ids = tiny("resformer"), torch.randint(61, (4, 70), generator=torch.Generator().manual_seed(1))
    names = ["importance_entropy", "row_entropy", "sink_mass", "sink_rate", "hidden_norm", "value_norm", "value_drain"]
    reference = measure(model, names, ids)
    model.train()
    with Recorder(model, 1, tmp_path / "r", quantities=names) as recorder:
        model(ids, return_type="loss").backward()
        recorder.step()
    reference = reference[reference["variant"].isna() & reference["control"].isna()]
    expected, found = by_place(reference), by_place(Run.open(tmp_path / "r").telemetry())
    assert found.keys() == expected.keys()
    assert len(found) > 40
    for key, number in expected.items():
        assert found[key] == pytest.approx(number, rel=2e-6), key


def test_activation_gradients_are_those_of_run_with_grads(tiny, tmp_path):
    model, ids = tiny("resformer"), torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    points = {("stream", 0): "blocks.0.hook_resid_pre", ("v", 1): "blocks.1.attn.hook_v",
              ("first_v", 2): "blocks.2.attn.first.hook_v", ("own_v", 2): "blocks.2.attn.own.hook_v",
              ("stream", 3): "blocks.2.hook_resid_post"}  # fmt: skip
    _, _, gradients = model.run_with_grads(ids, list(points.values()))
    model.train()
    with Recorder(model, 1, tmp_path / "r", quantities=["activation_gradient_norm"]) as recorder:
        model(ids, return_type="loss").backward()
        recorder.step()
    for (site, layer), point in points.items():
        found = value(tmp_path / "r", "activation_gradient_norm", site=site, layer=layer)
        assert found == pytest.approx(float(gradients[point].norm()), rel=1e-5)


def test_a_foreign_module_by_hand(gpt, tmp_path):
    """Streams, values (the last third of the fused map) and their gradients, against a run with everything kept."""
    ids, kept, wide = tokens(0), {}, []
    x = gpt.wte(ids) + gpt.wpe.weight[: ids.shape[1]]
    for i, block in enumerate(gpt.h):
        kept["stream", i] = x
        hook = block.attn["c_attn"].register_forward_hook(lambda m, i, out: wide.append(out))
        x = block(x)
        hook.remove()
        kept["v", i] = wide[-1][..., 32:]
    kept["stream", 2] = x
    loss = F.cross_entropy(gpt.lm_head(gpt.ln_f(x))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    found = torch.autograd.grad(loss, [*(kept["stream", i] for i in range(3)), *wide])
    gradients = {("stream", i): g for i, g in enumerate(found[:3])}
    gradients |= {("v", i): g[..., 32:] for i, g in enumerate(found[3:])}
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


def test_an_observed_module_shows_its_attention(gpt, tmp_path):
    """The loop calls the module itself; concentration against patterns formed whole, values and gradients as without."""
    ids = tokens(0, batch=2, length=20)
    observed = observe(gpt, ids, quiet=True)
    x = gpt.wte(ids) + gpt.wpe.weight[: ids.shape[1]]
    for layer, block in enumerate(gpt.h):
        q, k, _ = (
            y.unflatten(-1, (2, -1)).transpose(1, 2) for y in block.attn["c_attn"](block.ln_1(x)).detach().chunk(3, -1)
        )
        scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -math.inf)
        pattern = scores.softmax(-1)
        importance = pattern.mean(1).sum(1) / 20
        if layer == 0:
            with Recorder(observed, 1, tmp_path / "r") as recorder:
                loss_of(gpt, ids).backward()
                recorder.step()
            gradients = {n: p.grad.clone() for n, p in gpt.named_parameters()}
        found = value(tmp_path / "r", "importance_entropy", layer=layer)
        assert found == pytest.approx(float(-(importance * importance.log()).sum(-1).mean()), rel=1e-5)
        for head in range(2):
            sink = value(tmp_path / "r", "sink_mass", layer=layer, head=head)
            assert sink == pytest.approx(float(pattern[:, head, 1:, 0].mean()), rel=1e-4)
        x = block(x)
    with Recorder(gpt, 1, tmp_path / "plain", quantities=PLAIN) as recorder:
        gpt.zero_grad()
        loss_of(gpt, ids).backward()
        recorder.step()
    assert all(torch.equal(gradients[n], p.grad) for n, p in gpt.named_parameters())
    for site in ("stream", "v"):
        norms = [rows(tmp_path / n, "activation_gradient_norm", site=site)["value"].to_list() for n in ("plain", "r")]
        assert sorted(norms[0]) == pytest.approx(sorted(norms[1]), rel=1e-5)
    assert "W_QKV" in set(rows(tmp_path / "r", "update_ratio")["part"])


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


def test_between_logging_steps_no_hook_stands(gpt, tmp_path):
    recorder = Recorder(gpt, 3, tmp_path / "r", quantities=PLAIN)
    standing = []
    optimizer = torch.optim.SGD(gpt.parameters(), lr=0.1)
    for step in range(7):
        standing.append(any(m._forward_hooks or m._forward_pre_hooks for m in gpt.modules()))
        loss_of(gpt, tokens(step)).backward()
        recorder.step()
        optimizer.step()
    recorder.close()
    assert standing == [True, False, False, True, False, False, True]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in gpt.modules())
    assert sorted(rows(tmp_path / "r", "hidden_norm")["step"].unique()) == [0, 3, 6]


class Fetches(TorchDispatchMode):
    """Counts numbers that Python asks a tensor for: on a GPU each would wait for it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_record_is_fetched_once(tiny, tmp_path, monkeypatch):
    model, ids, fetched = tiny("resformer").train(), torch.randint(61, (2, 70)), []
    monkeypatch.setattr(recorder_file, "_fetched", lambda pending: fetched.append(len(pending)) or ())
    names = [n for n in quantities() if n != "coefficient"]
    with Recorder(model, 1, tmp_path / "r", quantities=names) as recorder, Fetches() as fetches:
        for _ in range(3):
            model(ids, return_type="loss").backward()
            recorder.step()
    assert len(fetched) == 3
    assert min(fetched) > 150
    assert fetches.count == 0


# ---- names -----------------------------------------------------------------------------------------------------------


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
    ):
        recorder = Recorder(gpt, 1, tmp_path / "r")
    loop(gpt, recorder, 1)
    recorder.close()
    said = json.loads((tmp_path / "r" / "run.json").read_text())["recorder"]["unavailable"]
    assert set(said) == {"importance_entropy", "row_entropy", "sink_mass"}
    assert len(rows(tmp_path / "r", "hidden_norm")) == 3


def test_sequences_too_short_for_a_measure_are_said(tiny, tmp_path):
    model = tiny().train()
    with Recorder(model, 1, tmp_path / "r", quantities=["sink_rate", "sink_mass"]) as recorder:
        model(torch.zeros(1, 9, dtype=torch.long), return_type="loss").backward()
        with pytest.warns(NotRecorded, match=r"not recorded: sink_rate \(needs sequences of 64 tokens"):
            recorder.step()
    assert len(rows(tmp_path / "r", "sink_mass")) == 12


def test_a_step_without_gradients_says_where_it_belongs(gpt, tmp_path):
    with (
        Recorder(gpt, 1, tmp_path / "r", quantities=PLAIN) as recorder,
        pytest.raises(WorkbenchError, match="after backward"),
    ):
        recorder.step()
    with pytest.raises(WorkbenchError, match="closed"):
        recorder.step()


# ---- loops of every kind ---------------------------------------------------------------------------------------------


def test_accumulated_gradients_count_as_one_step(gpt, tmp_path):
    """Two half batches give the numbers of the whole batch, and a validation in between is not heard."""
    ids, optimizer = tokens(0, batch=4), torch.optim.SGD(gpt.parameters(), lr=0.0)
    for name, parts in (("whole", [ids]), ("halves", ids.split(2))):
        with Recorder(gpt, 1, tmp_path / name, quantities=PLAIN) as recorder:
            optimizer.zero_grad()
            for part in parts:
                (loss_of(gpt, part) / len(parts)).backward()
                with torch.no_grad():
                    gpt(tokens(9))
            recorder.step()
    whole, halves = (Run.open(tmp_path / name).telemetry() for name in ("whole", "halves"))
    keys = ["metric", "part", "site", "layer", "n"]
    assert whole[keys].equals(halves[keys])
    assert whole["value"].to_numpy() == pytest.approx(halves["value"].to_numpy(), rel=1e-4)
    assert set(rows(tmp_path / "halves", "hidden_norm")["n"]) == {4}


@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled"])
def test_scaled_losses_give_unscaled_norms(gpt, tmp_path, unscale):
    optimizer = torch.optim.SGD(gpt.parameters(), lr=0.1)
    before = {n: p.detach().clone() for n, p in gpt.named_parameters()}
    for name, scaler in (("plain", None), ("scaled", torch.amp.GradScaler("cpu", init_scale=1024.0))):
        gpt.load_state_dict(before)
        with Recorder(gpt, 1, tmp_path / name, quantities=PLAIN) as recorder:
            loss = loss_of(gpt, tokens(0))
            optimizer.zero_grad()
            (scaler.scale(loss) if scaler else loss).backward()
            if scaler and unscale:
                scaler.unscale_(optimizer)
            recorder.step(loss, scaler=scaler)
            scaler.step(optimizer) if scaler else optimizer.step()
            if scaler:
                scaler.update()
    plain, scaled = (Run.open(tmp_path / name).telemetry() for name in ("plain", "scaled"))
    assert plain["value"].to_numpy() == pytest.approx(scaled["value"].to_numpy(), rel=1e-4, abs=1e-9)
    assert len(plain) > 30


def test_autocast_activations_are_read_in_float32(tiny, tmp_path):
    model = tiny().train()
    with Recorder(model, 1, tmp_path / "r") as recorder:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randint(61, (2, 16)), return_type="loss")
        loss.backward()
        recorder.step(loss)
    frame = Run.open(tmp_path / "r").telemetry()
    assert set(DEFAULT) - {"coefficient"} <= set(frame["metric"])
    assert frame["value"].notna().all()


def test_a_compiled_model_runs_uncompiled_for_logging_steps_alone(gpt, tmp_path):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(gpt, backend=backend)
    recorder = Recorder(compiled, 3, tmp_path / "r", quantities=PLAIN)
    loop(compiled, recorder, 7)
    recorder.close()
    assert len(graphs) == 1, "no compiled code is thrown away"
    found = rows(tmp_path / "r", "hidden_norm")
    assert sorted(found["step"].unique()) == [0, 3, 6]
    assert len(found) == 9
    assert "W_QKV" in set(rows(tmp_path / "r", "gradient_norm")["part"])
    torch._dynamo.reset()


def test_coefficients_and_a_learned_average_are_followed(tiny, tmp_path):
    model = tiny("denseformer").train()
    with Recorder(model, 1, tmp_path / "r", quantities=["coefficient", "gradient_norm"]) as recorder:
        model(torch.randint(61, (2, 16)), return_type="loss").backward()
        recorder.step()
    assert value(tmp_path / "r", "coefficient", part="alpha_3", layer=2) == 1.0
    assert value(tmp_path / "r", "coefficient", part="alpha_0", layer=2) == 0.0


CHILD = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from own_loop import GPT, PLAIN, loop, loss_of, tokens
from workbench import Recorder
torch.set_num_threads(1)
"""
DDP = (
    CHILD
    + """
import os
second = os.fork()  # two processes of one import
rank, world = (0 if second else 1), 2
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/meet", rank=rank, world_size=world)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(GPT())
recorder = Recorder(model, 2, sys.argv[2] + "/r", quantities=PLAIN)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = loss_of(model, tokens(step, batch=4)[rank::world])
    optimizer.zero_grad(); loss.backward(); recorder.step(loss); optimizer.step()
recorder.close()
torch.distributed.destroy_process_group()
if second:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]))
"""
)


def child(code, *arguments):
    command = [sys.executable, "-c", code, str(Path(__file__).parent), *map(str, arguments)]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True)


def test_two_processes_write_one_recording_of_averaged_gradients(gpt, tmp_path):
    process = child(DDP, tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-2000:]
    optimizer = torch.optim.SGD(gpt.parameters(), lr=0.1)
    recorder = Recorder(gpt, 2, tmp_path / "one", quantities=PLAIN)
    for step in range(3):
        loss = loss_of(gpt, tokens(step, batch=4))
        optimizer.zero_grad()
        loss.backward()
        recorder.step(loss)
        optimizer.step()
    recorder.close()
    for metric in ("gradient_norm", "update_ratio"):
        one, two = (rows(tmp_path / name, metric)["value"].to_numpy() for name in ("one", "r"))
        assert two == pytest.approx(one, rel=1e-4)
    assert set(rows(tmp_path / "r", "hidden_norm")["n"]) == {2}


# ---- the folder ------------------------------------------------------------------------------------------------------


def test_a_recording_is_listed_as_a_run(gpt, tmp_path):
    recorder = Recorder(gpt, 2, tmp_path / "mine", quantities=PLAIN, seed=3)
    loop(gpt, recorder, 5)
    assert is_locked(tmp_path / "mine")
    assert listing("runs", tmp_path)[0]["state"].item() == "training"
    recorder.close()
    found, problems = list_runs(tmp_path)
    assert not problems
    (run,) = found
    assert (run.recorded, run.finished, run.steps, run.seed, run.architecture) == (True, True, [], 3, "GPT")
    table, _ = listing("runs", tmp_path)
    assert table[["run", "steps", "state"]].values.tolist() == [["mine", "4 recorded", "finished"]]
    with pytest.raises(WorkbenchError, match="holds no checkpoints"):
        measure(run, "loss")


def test_it_goes_on_in_the_same_folder_where_it_is_told(gpt, tmp_path):
    """Steps 0..5, then again from 3: the same rows as without the interruption."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    start = {n: p.detach().clone() for n, p in gpt.named_parameters()}
    with Recorder(gpt, 1, straight, quantities=PLAIN) as recorder:
        loop(gpt, recorder, 6)
    gpt.load_state_dict(start)
    with Recorder(gpt, 1, broken, quantities=PLAIN) as recorder:
        loop(gpt, recorder, 3)
        halfway = {n: p.detach().clone() for n, p in gpt.named_parameters()}
        loop(gpt, recorder, 2, first=3)
    gpt.load_state_dict(halfway)
    with pytest.raises(WorkbenchError, match=r"up to step 4; say start= \(0 begins anew, 5 goes on\)"):
        Recorder(gpt, 1, broken, quantities=PLAIN)
    with Recorder(gpt, 1, broken, quantities=PLAIN, start=3) as recorder:
        loop(gpt, recorder, 3, first=3)
    keys = ["step", "metric", "part", "site", "layer", "value"]
    first, second = (Run.open(p).telemetry() for p in (straight, broken))
    kept = [f[~f["metric"].isin(["seconds_per_step", "recorder_share"])][keys].reset_index(drop=True) for f in (first, second)]  # fmt: skip
    assert kept[0].equals(kept[1])
    with Recorder(gpt, 1, broken, quantities=PLAIN, start=0) as recorder:
        loop(gpt, recorder, 1)
    assert set(Run.open(broken).telemetry()["step"]) == {0}


def test_long_recordings_have_few_files(gpt, tmp_path):
    with Recorder(gpt, 1, tmp_path / "r", quantities=["gradient_norm"]) as recorder:
        loop(gpt, recorder, 2 * SPAN + 3)
    assert len(Run.open(tmp_path / "r").telemetry_parts()) == 3
    assert rows(tmp_path / "r", "gradient_norm", part="all")["step"].tolist() == list(range(2 * SPAN + 3))


def test_foreign_folders_and_other_models_are_refused(gpt, tmp_path):
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "run.json").write_text('{"architecture": "resformer"}')
    with pytest.raises(WorkbenchError, match="training's run"):
        Recorder(gpt, 1, tmp_path / "trained", quantities=PLAIN)
    Recorder(gpt, 1, tmp_path / "r", quantities=PLAIN).close()
    with pytest.raises(WorkbenchError, match="another model"):
        Recorder(GPT(layers=3), 1, tmp_path / "r", quantities=PLAIN)
    assert not is_locked(tmp_path / "r")


def test_a_new_recorder_takes_the_folder_from_an_old_one_of_the_same_process(gpt, tmp_path):
    old = Recorder(gpt, 1, tmp_path / "r", quantities=PLAIN)
    loop(gpt, old, 1)
    new = Recorder(gpt, 1, tmp_path / "r", quantities=PLAIN, start=1)
    with pytest.raises(WorkbenchError, match="closed"):
        loop(gpt, old, 1)
    loop(gpt, new, 1, first=1)
    new.close()
    assert set(rows(tmp_path / "r", "train_loss")["step"]) == {0, 1}


def test_a_recorder_that_nobody_closes_writes_its_rows(gpt, tmp_path):
    recorder = Recorder(gpt, 1, tmp_path / "r", quantities=["gradient_norm"])
    loop(gpt, recorder, 4)
    del recorder
    assert set(rows(tmp_path / "r", "train_loss")["step"]) == {0, 1, 2}, "the last waited for its update"
    assert not is_locked(tmp_path / "r")


KILLED = (
    CHILD
    + """
model = GPT()
recorder = Recorder(model, 1, sys.argv[2] + "/r", quantities=PLAIN)
loop(model, recorder, 1_000_000)
"""
)


def test_a_killed_process_leaves_a_readable_folder(gpt, tmp_path):
    process = child(KILLED, tmp_path)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if list(tmp_path.glob("r/telemetry/*.parquet")):
            time.sleep(1.5)
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    run = Run.open(tmp_path / "r")
    steps = sorted(run.telemetry()["step"].unique())
    assert steps[:2] == [0, 1]
    with Recorder(gpt, 1, tmp_path / "r", quantities=PLAIN, start=int(steps[-1]) + 1) as recorder:
        loop(gpt, recorder, 2)
    assert int(run.telemetry()["step"].max()) == steps[-1] + 2


def test_only_as_much_is_written_as_a_hundredth_of_the_time(gpt, tmp_path, monkeypatch):
    recorder = Recorder(gpt, 1, tmp_path / "r", quantities=["gradient_norm"])
    writes = []
    monkeypatch.setattr("workbench.recording.folder.write_parquet", lambda frame, path: writes.append(len(frame)))
    loop(gpt, recorder, SPAN - 2)
    assert len(writes) == 1, "the first at once, the others when a second has passed"
    recorder.folder.written -= 1000.0
    loop(gpt, recorder, 1)
    assert len(writes) == 2
    recorder.close()


def test_it_says_what_it_costs(gpt, tmp_path):
    with Recorder(gpt, 5, tmp_path / "r", quantities=PLAIN) as recorder:
        loop(gpt, recorder, 11)
    shares = rows(tmp_path / "r", "recorder_share")
    assert shares["step"].tolist() == [5, 10]
    assert shares["value"].between(0.0, 0.9).all()
    assert (rows(tmp_path / "r", "seconds_per_step")["value"] > 0).all()


@pytest.fixture
def training_page(monkeypatch):
    """The Training page of a folder, as a browser at an address sees it."""
    from streamlit.testing.v1 import AppTest

    def show(folder, **address):
        monkeypatch.setenv("WORKBENCH_RUNS", str(folder))
        monkeypatch.setattr(sys, "argv", ["main.py"])
        at = AppTest.from_file(str(Path(__file__).parent.parent / "app" / "main.py"), default_timeout=60).run()
        at.switch_page("views/training.py")
        for key, value in address.items():
            at.query_params[key] = value
        at.run()
        assert not at.exception, [e.message for e in at.exception]
        assert not at.warning
        return at

    return show


def test_the_training_page_shows_a_recording_while_it_is_made(gpt, training_page, tmp_path):
    recorder = Recorder(gpt, 1, tmp_path / "mine", quantities=PLAIN)
    loop(gpt, recorder, 2)
    first = training_page(tmp_path, show="inside", quantity="hidden_norm")
    assert first.selectbox(key="w_quantity").value == "hidden_norm"
    assert set(first.selectbox(key="w_quantity").options) == {q.replace("_", " ") for q in PLAIN[1:]}
    recorder.folder.flush()
    loop(gpt, recorder, 5, first=2)
    recorder.close()
    shown = [training_page(tmp_path, show=part) for part in ("loss", "gradients", "inside", "pace")]
    charts = [chart.proto.alt for at in shown for chart in at.get("plotly_chart")]
    for title in ("Training loss", "Gradient norms", "Update ratio", "Seconds per step", "What recording costs"):
        assert any(title in alt for alt in charts), (title, charts)


# ---- transformers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, vocab_size=31,
            max_position_embeddings=64,
        )
    )  # fmt: skip


def trainer(model, folder, steps, **more):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder / "out"), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_steps=2, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-2,
        lr_scheduler_type="constant", **more,
    )  # fmt: skip
    data = [{"input_ids": ids, "labels": ids} for ids in tokens(0, batch=16)]
    callback = RecorderCallback(folder / "r", every=2, quantities=PLAIN)
    return Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback])


def test_a_trainer_records_and_goes_on_where_it_was(llama, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the Trainer's own
        trainer(llama, tmp_path, 4, max_grad_norm=0.0).train()
        first = Run.open(tmp_path / "r").telemetry()
        trainer(llama, tmp_path, 6, max_grad_norm=0.0).train(resume_from_checkpoint=True)
    frame = Run.open(tmp_path / "r").telemetry()
    assert sorted(frame[frame["metric"] == "hidden_norm"]["step"].unique()) == [0, 2, 4]
    assert len(frame[(frame["metric"] == "hidden_norm") & (frame["step"] == 2)]) == 3
    assert sorted(frame[frame["metric"] == "train_loss"]["step"]) == [1, 3, 5]
    assert set(frame[frame["metric"] == "hidden_norm"]["n"]) == {4}, "both halves of an accumulated batch"
    before = first[(first["metric"] == "gradient_norm") & (first["step"] == 0)]
    assert {"W_Q", "W_V", "W_down", "W_E", "W_U"} <= set(before["part"])
    assert before["variant"].isna().all()
    updates = frame[frame["metric"] == "update_ratio"]["value"]
    assert (updates > 1e-4).all()


def test_norms_that_a_trainer_clipped_say_so(llama, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(llama, tmp_path, 2, max_grad_norm=0.01).train()
    norms = rows(tmp_path / "r", "gradient_norm", part="all")
    clipped = norms[norms["variant"] == "clipped"]["value"]
    assert clipped.tolist() == pytest.approx([0.01], rel=1e-3)
    assert norms[norms["variant"].isna()]["value"].item() > 0.1, "the Trainer's own, before clipping"
