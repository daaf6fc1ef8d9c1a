"""A recorder in loops of every kind: accumulation, scaling, compilation, several processes, a Trainer."""

from __future__ import annotations

import copy
import importlib
import json
import multiprocessing
import sys
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from own_loop import GPT, PLAIN, Block, loop, loss_of, tokens
from recordings import record_in_parallel, recorded_steps, rows, value
from torch import nn
from torch.utils.checkpoint import checkpoint

from workbench import Recorder, RecorderCallback
from workbench.errors import WorkbenchError
from workbench.runs.run import Run
from workbench.training.recorder import DEFAULT
from workbench.training.recorder.activation_capture import blocks_of


def test_accumulated_gradients_count_as_one_step(gpt, tmp_path):
    """Two half batches give the numbers of the whole batch, and a validation in between is not recorded."""
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("architecture", "options", "units"),
    [
        ("sink_logit", {"logit": "learned"}, {"sink_logit": "logits"}), ("value_scale", {}, {"value_threshold": "squared norm"}),
        ("attention_residuals", {}, {"depth_query": "norm"}),
        ("resformer_learnable", {}, {"lambda_v1": "weight", "lambda_own": "weight"}),
    ],
)  # fmt: skip
@torch.no_grad()
def test_a_coefficient_has_the_unit_of_what_it_is(architecture, options, units, tiny):
    (shortcut,) = tiny(architecture, **options).shortcuts
    found = [*shortcut.coefficient_rows()]
    assert {axes["part"]: axes["unit"] for axes, _ in found} == units
    known = {(p, n): x for p, values in shortcut.coefficients().items() for n, x in enumerate(values) if x == x}
    assert {(axes["part"], axes["layer"]): x for axes, x in found} == known


def test_coefficients_and_a_learned_average_are_followed(tiny, tmp_path):
    model = tiny("denseformer").train()
    with Recorder(model, 1, tmp_path / "r", quantities=["coefficient", "gradient_norm"]) as recorder:
        model(torch.randint(61, (2, 16)), return_type="loss").backward()
        recorder.step()
    assert value(tmp_path / "r", "coefficient", part="alpha_3", layer=2) == 1.0
    assert value(tmp_path / "r", "coefficient", part="alpha_0", layer=2) == 0.0
    assert set(rows(tmp_path / "r", "coefficient")["unit"]) == {"weight"}


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_two_processes_write_one_recording_of_averaged_gradients(gpt, tmp_path, forkserver, sharded):
    context = multiprocessing.get_context()
    started = [context.Process(target=record_in_parallel, args=(tmp_path, rank, 2, sharded)) for rank in (0, 1)]
    for process in started:
        process.start()
    recorded_steps(gpt, Recorder(gpt, 2, tmp_path / "one", quantities=PLAIN))
    for process in started:
        process.join(120)
    assert [process.exitcode for process in started] == [0, 0]
    for metric in ("gradient_norm", "update_ratio", "weight_norm"):
        one, two = (rows(tmp_path / name, metric)["value"].to_numpy() for name in ("one", "r"))
        assert two == pytest.approx(one, rel=1e-4)
    assert set(rows(tmp_path / "r", "hidden_norm")["n"]) == {2}


@pytest.fixture
def one_process():
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_module_is_recorded_under_its_own_name_through_every_wrapper(gpt, tmp_path, one_process):
    """Compiled, data-parallel, and one around the other."""
    parallel, compiled = torch.nn.parallel.DistributedDataParallel, partial(torch.compile, backend="eager")
    for number, model in enumerate((gpt, parallel(gpt), compiled(parallel(gpt)), parallel(compiled(gpt)))):
        with Recorder(model, 1, tmp_path / str(number), quantities=PLAIN) as recorder:
            assert recorder.model is gpt
    described = [json.loads((tmp_path / str(n) / "run.json").read_text())["model"] for n in range(4)]
    assert described == [described[0]] * 4
    assert described[0]["class"] == "GPT"


def test_a_module_whose_matrices_are_flat_is_refused(tmp_path):
    class FullyShardedDataParallel(nn.Sequential):
        """What FSDP1 makes of a module, by its name."""

    with pytest.raises(WorkbenchError, match=r"stores no separate matrices; shard with fully_shard"):
        Recorder(FullyShardedDataParallel(nn.Linear(2, 2)), 1, tmp_path / "r", quantities=["weight_norm"])
    assert not (tmp_path / "r").exists()


# ---- transformers ---------------------------------------------------------------------------------------------------


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


@pytest.mark.slow
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


def test_an_evaluation_of_a_trainer_is_at_the_step_of_its_weights(gpt, tmp_path):
    """Step s is the state after s updates: the loss of update 4 is at step 3, and the evaluation after it at step 4."""
    callback, state = (
        RecorderCallback(tmp_path / "r", every=2, quantities=["weight_norm"]),
        SimpleNamespace(global_step=0),
    )
    arguments = SimpleNamespace(seed=0, max_grad_norm=0.0)
    callback.on_train_begin(arguments, state, None, model=gpt)
    state.global_step = 4
    callback.on_log(arguments, state, None, logs={"loss": 3.0, "learning_rate": 0.1})
    callback.on_log(arguments, state, None, logs={"eval_loss": 2.0})
    callback.on_train_end(arguments, state, None)
    assert rows(tmp_path / "r", "train_loss")["step"].tolist() == [3]
    assert rows(tmp_path / "r", "validation_loss")["step"].tolist() == [4]


# ---- modules that are not what they look like -----------------------------------------------------------------------


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, x):
        return self.down(self.up(x))


class MixedBlock(Block):
    """Values are mixed with the first layer's; several experts in the place of the MLP."""

    def __init__(self, kept):
        super().__init__(16, 2)
        self.mlp, self.kept = nn.ModuleList(Expert() for _ in range(5)), kept
        self.v_proj = nn.Linear(16, 16)
        del self.attn

    def forward(self, x):
        v = self.v_proj(self.ln_1(x))
        v = 0.5 * self.kept.setdefault("v", v) + 0.5 * v
        return x + v + sum(expert(self.ln_2(x)) for expert in self.mlp)


class Seeing(GPT):
    """A decoder beside a longer tower."""

    def __init__(self):
        super().__init__()
        self.kept = {}
        self.tower = nn.ModuleDict(
            {"patches": nn.Embedding(9, 16), "layers": nn.ModuleList(Expert() for _ in range(7))}
        )
        self.h = nn.ModuleList(MixedBlock(self.kept) for _ in range(2))

    def forward(self, ids):
        self.kept.clear()
        return super().forward(ids)


def test_neither_experts_nor_a_longer_tower_are_blocks_and_projected_values_are_called_own(tmp_path):
    model = Seeing()
    assert blocks_of(model) == list(model.h)
    own = []
    for block in model.h:
        block.v_proj.register_forward_hook(lambda m, a, out: own.append(float(out.detach().norm(dim=-1).mean())))
    with Recorder(model, 1, tmp_path / "r", quantities=["value_norm"]) as recorder:
        loss_of(model, tokens(0)).backward()
        recorder.step()
    found = rows(tmp_path / "r", "value_norm")
    assert found["site"].tolist() == ["own_v"] * 2, "what attention reads is not shown by a bare module"
    assert found["value"].tolist() == pytest.approx(own)


def test_blocks_of_several_classes_with_like_parts_are_one_stack():
    model = GPT()
    model.h = nn.ModuleList([Block(16, 2), MixedBlock({}), Block(16, 2)])
    assert blocks_of(model) == list(model.h)
    assert blocks_of(nn.Sequential(model)) == list(model.h), "a list around the decoder is none of blocks"


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_recorded_once(reentrant, tmp_path):
    torch.manual_seed(0)
    model, found = GPT(), []

    def checkpointed(ids):
        x = model.wte(ids) + model.wpe.weight[: ids.shape[1]]
        for block in model.h:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return model.lm_head(model.ln_f(x))

    for name, run in (("plain", model), ("again", checkpointed)):
        with Recorder(model, 1, tmp_path / name, quantities=["activation_gradient_norm", "hidden_norm"]) as recorder:
            model.zero_grad()
            loss_of(run, tokens(0)).backward()
            recorder.step()
        kinds = ("activation_gradient_norm", "hidden_norm")
        found.append([rows(tmp_path / name, m).sort_values("layer")["value"].tolist() for m in kinds])
    for plain, again in zip(*found, strict=True):
        assert again == pytest.approx(plain, rel=1e-5)


# ---- Lightning ------------------------------------------------------------------------------------------------------


@pytest.fixture
def lightning_callback(monkeypatch):
    """The callback on a stand-in for Lightning's base class: its hooks are called in the order of Lightning's own loop."""
    monkeypatch.setitem(sys.modules, "lightning.pytorch.callbacks", SimpleNamespace(Callback=object))
    monkeypatch.delitem(sys.modules, "workbench.training.recorder.lightning_callback", raising=False)
    yield importlib.import_module("workbench.training.recorder.lightning_callback").LightningCallback
    del sys.modules["workbench.training.recorder.lightning_callback"]


def test_a_lightning_loop_is_recorded_before_it_clips(gpt, tmp_path, lightning_callback):
    callback, trainer = (
        lightning_callback(tmp_path / "r", 2, module="model", quantities=PLAIN),
        SimpleNamespace(global_step=0, accumulate_grad_batches=1),
    )
    module = nn.ModuleDict({"model": gpt})
    optimizer, twin = torch.optim.SGD(gpt.parameters(), lr=0.1), copy.deepcopy(gpt)
    callback.on_train_start(trainer, module)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(gpt, tokens(step))

        def closure(loss=loss):  # the precision plugin's: backward, callbacks, clipping, all inside optimizer.step
            loss.backward()
            callback.on_before_optimizer_step(trainer, module, optimizer)
            torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1e-3)

        optimizer.step(closure)
        callback.on_train_batch_end(trainer, module, {"loss": loss.detach()}, None, step)
    callback.on_train_end(trainer, module)
    assert sorted(rows(tmp_path / "r", "train_loss")["step"]) == [0, 2]
    loss_of(twin, tokens(0)).backward()
    whole = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters()])
    found = rows(tmp_path / "r", "gradient_norm", part="all", step=0)["value"].item()
    assert found == pytest.approx(float(whole), rel=1e-5)
    assert rows(tmp_path / "r", "learning_rate")["value"].tolist() == [0.1, 0.1]


def test_a_lightning_loss_is_the_mean_over_the_batches_of_its_optimiser_step(gpt, tmp_path, lightning_callback):
    """Lightning divides every loss by the number of accumulated batches, also of a last step with fewer."""
    callback = lightning_callback(tmp_path / "r", 2, module="model", quantities=["weight_norm"])
    trainer, module = SimpleNamespace(global_step=0, accumulate_grad_batches=2), nn.ModuleDict({"model": gpt})
    callback.on_train_start(trainer, module)
    loss_of(gpt, tokens(0)).backward()
    for batch, loss in enumerate([1.0, 3.0, 10.0, 20.0, 7.0]):
        if batch in (1, 3, 4):
            callback.on_before_optimizer_step(trainer, module, SimpleNamespace(param_groups=[{"lr": 0.1}]))
        callback.on_train_batch_end(trainer, module, {"loss": torch.tensor(loss / 2)}, None, batch)
    callback.on_train_end(trainer, module)
    losses = rows(tmp_path / "r", "train_loss")
    assert dict(zip(losses["step"], losses["value"], strict=True)) == {0: 2.0, 2: 7.0}


@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled"])
def test_a_scaled_lightning_loss_gives_unscaled_norms(gpt, tmp_path, lightning_callback, unscale):
    """Lightning takes the scale off the weights' gradients before the callback, unless the optimiser does; those of activations keep it."""
    optimizer, module = torch.optim.SGD(gpt.parameters(), lr=0.0), nn.ModuleDict({"model": gpt})
    for name, scaler in (("plain", None), ("scaled", torch.amp.GradScaler("cpu", init_scale=1024.0))):
        callback = lightning_callback(tmp_path / name, 1, module="model", quantities=PLAIN)
        trainer = SimpleNamespace(
            global_step=0, accumulate_grad_batches=1, precision_plugin=SimpleNamespace(scaler=scaler)
        )
        callback.on_train_start(trainer, module)
        optimizer.zero_grad()
        loss = loss_of(gpt, tokens(0))
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler and unscale:
            scaler.unscale_(optimizer)
        callback.on_before_optimizer_step(trainer, module, optimizer)
        callback.on_train_end(trainer, module)
    plain, scaled = (Run.open(tmp_path / name).telemetry() for name in ("plain", "scaled"))
    assert "activation_gradient_norm" in set(plain["metric"])
    assert plain["value"].to_numpy() == pytest.approx(scaled["value"].to_numpy(), rel=1e-4, abs=1e-9)


def test_without_lightning_its_callback_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    with pytest.raises(ImportError, match="needs Lightning: pip install lightning"):
        importlib.import_module("workbench.training.recorder.lightning_callback")
