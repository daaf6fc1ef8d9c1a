"""A recorder never ends the training that it watches: what it cannot record stops with one warning, everything else goes on."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
from own_loop import GPT, PLAIN, loop, loss_of, tokens
from recordings import rows
from torch import nn
from torch.nn.utils import prune

import workbench
from workbench import Recorder, observe
from workbench.errors import WorkbenchError
from workbench.runs.run import is_locked
from workbench.training.recorder import NotRecorded
from workbench.training.recorder import recorder as recording


def prune_matrix(model):
    prune.l1_unstructured(model.h[0].mlp[0], "weight", 0.5)


def delete(model):
    del model.h[1]


def replace(model):
    model.h[1] = copy.deepcopy(model.h[1])


def complex_weight(model):
    model.phases = nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))
    model.ln_f.register_forward_hook(lambda module, inputs, output: output * model.phases.abs().mean())


def train(change, recorder_of):
    """Four steps with a change of the module before the third; the weights at the end."""
    torch.manual_seed(0)
    model = GPT()
    recorder = recorder_of(model)
    for step in range(4):
        if step == 2:
            torch.manual_seed(1)
            change(model)
        loss_of(model, tokens(step)).backward()
        if recorder:
            recorder.step(float(step))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
        model.zero_grad()
    if recorder:
        recorder.close()
    return model.state_dict()


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("change", "ends", "begins"),
    [
        (prune_matrix, "W_mlp.0", "W_mlp.0.weight_orig"),
        (delete, "W_QKV", None),
        (replace, None, None),
        (complex_weight, None, "W_phases"),
    ],
)
def test_a_module_that_changes_while_it_trains_is_recorded_as_far_as_it_can_be(change, ends, begins, tmp_path):
    layer = {prune_matrix: 0, delete: 1}.get(change)

    def recorder_of(model):
        return Recorder(model, 1, tmp_path / "r", quantities=PLAIN)

    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always", NotRecorded)
        recorded = train(change, recorder_of)
    plain = train(change, lambda model: None)
    assert recorded.keys() == plain.keys()
    assert all(torch.equal(recorded[name], plain[name]) for name in plain), "the same training, bit for bit"
    losses = rows(tmp_path / "r", "train_loss")
    assert losses["step"].tolist() == losses["value"].tolist() == [0, 1, 2, 3]
    messages = [str(w.message) for w in issued]
    assert bool(ends) == any("frozen, removed or renamed at step 2" in m for m in messages), messages
    assert len(set(messages)) == len(messages), "one warning each"
    for part, steps in ((ends, [0, 1]), (begins, [2, 3])):
        if part is not None:
            frame = rows(tmp_path / "r", "gradient_norm", part=part)
            frame = frame[frame["layer"] == layer] if layer is not None else frame
            assert frame["step"].tolist() == steps
    assert rows(tmp_path / "r", "gradient_norm", part="W_U")["step"].tolist() == [0, 1, 2, 3]
    if change is replace:  # the hooks of step 2 were set before
        assert rows(tmp_path / "r", "hidden_norm", layer=1)["step"].tolist() == [0, 1, 3]


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"split": "val"}, "unknown axis 'split'; did you mean"),
        ({"layer": "a"}, "layer='a' is a str: give a whole number"),
        ({"part": 3}, "part=3 is a int: give text"),
        ({"site": "\ud800"}, "holds half a character"),
        ({"value": torch.ones(2)}, r"a tensor \[2\] of torch.float32, not one real number"),
        ({"step": "one"}, "step='one' is a str"),
    ],
)
def test_a_note_that_cannot_be_written_is_left_out_with_one_warning(arguments, reason, gpt, tmp_path):
    with Recorder(gpt, 1, tmp_path / "r", quantities=["gradient_norm"]) as recorder:
        loop(gpt, recorder, 1)
        with pytest.warns(NotRecorded, match=f"note 'val_loss' .*{reason}"):
            recorder.note("val_loss", **({"value": 2.0} | arguments))
        recorder.note("val_loss", **({"value": 2.0} | arguments))
        recorder.note("val_loss", torch.tensor([2.5]), layer=torch.tensor(3).numpy()[()], variant="ema")
    noted = rows(tmp_path / "r", "val_loss")
    assert noted[["step", "layer", "variant", "value"]].values.tolist() == [[1, 3, "ema", 2.5]]
    assert len(rows(tmp_path / "r", "gradient_norm"))


def full(*_):
    raise WorkbenchError("cannot write it: No space left on device")


def test_a_record_that_cannot_be_written_is_written_later_at_its_step(gpt, tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "SPAN", 2)
    monkeypatch.setattr(recording, "MIN_PAUSE", 0.0)
    monkeypatch.setattr(recording, "MAX_SHARE", float("inf"))
    recorder = Recorder(gpt, 1, tmp_path / "r", quantities=["gradient_norm"])
    loop(gpt, recorder, 3)
    write = recording.write_parquet
    monkeypatch.setattr(recording, "write_parquet", full)
    with pytest.warns(NotRecorded, match="No space left on device") as issued:
        loop(gpt, recorder, 5, first=3)
    monkeypatch.setattr(recording, "write_parquet", write)
    assert len(issued) == 1
    loop(gpt, recorder, 2, first=8)
    recorder.close()
    assert rows(tmp_path / "r", "gradient_norm", part="all")["step"].tolist() == list(range(10))


def test_records_that_are_lost_at_the_end_are_named_and_the_others_stay(gpt, tmp_path, monkeypatch):
    recorder = Recorder(gpt, 1, tmp_path / "r", quantities=["gradient_norm"])
    loop(gpt, recorder, 2)
    recorder.folder.flush()
    loop(gpt, recorder, 2, first=2)
    monkeypatch.setattr(recording, "write_parquet", full)
    with pytest.warns(NotRecorded, match="the records of steps 1 to 3 are lost: .*No space"):
        recorder.close()
    recorder.close()
    assert rows(tmp_path / "r", "gradient_norm", part="all")["step"].tolist() == [0]
    assert not is_locked(tmp_path / "r")


@pytest.mark.parametrize("fails", ["forward", "backward", "trackers"])
def test_a_failure_inside_a_hook_or_a_tracker_stops_that_quantity_alone(fails, gpt, tmp_path, monkeypatch):
    recorder = Recorder(gpt, 1, tmp_path / "r", quantities=PLAIN)
    wanted = {"forward": "hidden_norm", "backward": "activation_gradient_norm", "trackers": "numbers in Tracker"}[fails]

    def fail(*_):
        raise RuntimeError("out of memory")

    class Tracker:
        add = close = fail

    if fails == "forward":
        reduce = recorder.capture._reduce
        monkeypatch.setattr(recorder.capture, "_reduce", lambda *a: fail() if a[2].name == wanted else reduce(*a))
    elif fails == "backward":
        monkeypatch.setattr(recorder.capture, "_add_gradient", fail)
    else:
        recorder.trackers.append(Tracker())
    with pytest.warns(NotRecorded, match=f"{wanted} .*out of memory") as issued:
        loop(gpt, recorder, 3)
    recorder.close()
    assert len(issued) == 1
    assert not len(rows(tmp_path / "r", wanted))
    assert set(rows(tmp_path / "r", "value_norm")["step"]) == {0, 1, 2}


def test_a_loss_that_is_no_number_is_left_out_and_a_reused_buffer_is_copied(gpt, tmp_path):
    with Recorder(gpt, 1, tmp_path / "r", quantities=["gradient_norm"]) as recorder:
        loss_of(gpt, tokens(0)).backward()
        loss = torch.tensor([2.0])
        recorder.step(loss)
        loss.zero_()
        with pytest.warns(NotRecorded, match=r"train_loss \(a tensor \[3\]"):
            recorder.step(torch.ones(3))
        recorder.step(1.0)
    losses = rows(tmp_path / "r", "train_loss")
    assert losses[["step", "value"]].values.tolist() == [[0, 2.0]]
    assert losses["head"].isna().all()
    assert set(rows(tmp_path / "r", "gradient_norm")["step"]) == {0, 1, 2}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork a process")
def test_a_forked_process_leaves_the_recording_to_its_parent(gpt, tmp_path):
    recorder = Recorder(gpt, 1, tmp_path / "r", quantities=PLAIN)
    loop(gpt, recorder, 2)
    child = os.fork()
    if not child:
        with warnings.catch_warnings(record=True) as issued:
            warnings.simplefilter("always")
            recorder.step(7.0)
            recorder.note("mine", 1.0)
            recorder.close()
        os._exit(0 if ["forked" in str(w.message) for w in issued] == [True] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert is_locked(tmp_path / "r")
    loop(gpt, recorder, 2, first=2)
    recorder.close()
    assert rows(tmp_path / "r", "train_loss")["step"].tolist() == [0, 1, 2, 3]


def test_copies_and_pickles_of_a_module_that_is_recorded_carry_no_hook_of_the_recorder(gpt, tmp_path):
    ids = tokens(0)
    with Recorder(gpt, 1, tmp_path / "r", quantities=PLAIN) as recorder:
        copied, stored = copy.deepcopy(gpt), pickle.dumps(gpt)
        assert b"workbench" not in stored
        for other in (copied, pickle.loads(stored)):  # noqa: S301 - what this test has just written
            loss_of(other, ids).backward()
        loss_of(gpt, ids).backward()
        recorder.step()
        assert {n for _, n in recorder.capture.sums.values()} <= {3}, "three sequences, those of the module itself"
    assert len(rows(tmp_path / "r", "hidden_norm")) == 3


@pytest.mark.parametrize(("variables", "records"), [({"RANK": "1"}, True), ({"RANK": "1", "WORLD_SIZE": "2"}, False)])
def test_a_rank_counts_only_among_several_processes(variables, records, gpt, tmp_path, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        with Recorder(gpt, 1, tmp_path / "r", quantities=["gradient_norm"]) as recorder:
            loop(gpt, recorder, 1)
    assert (tmp_path / "r").exists() == records
    assert [("RANK is 1, and torch.distributed is not initialised" in str(w.message)) for w in issued] == [True] * (
        not records
    )


def test_an_attention_that_cannot_be_read_in_training_stops_its_own_quantities_alone(tmp_path):
    """Dropout inside attention is switched on by `train()`; the training is the same, bit for bit."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids, weights = tokens(0, batch=2, length=16), []
    for record in (True, False):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=31, attention_dropout=0.2, **sizes)).eval()
        observed = observe(model, ids, quiet=True)
        model.train()
        recorder = Recorder(observed, 1, tmp_path / "r", quantities=["hidden_norm", "sink_mass"]) if record else None
        torch.manual_seed(1)
        for _ in range(2):
            model(ids, labels=ids).loss.backward()
            if recorder:
                with (
                    pytest.warns(NotRecorded, match=r"sink_mass \(dropout of 0.2")
                    if not recorder.count
                    else nullcontext()
                ):
                    recorder.step()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            model.zero_grad()
        if recorder:
            recorder.close()
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][n], w) for n, w in weights[1].items())
    assert set(rows(tmp_path / "r", "hidden_norm")["step"]) == {0, 1}
    assert not len(rows(tmp_path / "r", "sink_mass"))


def test_a_window_counts_in_what_is_recorded_and_attention_to_no_token_is_refused(tiny, tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    ids = tokens(0, batch=2, length=16)
    model = MistralForCausalLM(MistralConfig(vocab_size=31, sliding_window=4, **sizes)).eval()
    observed = observe(model, ids, quiet=True)
    with Recorder(observed, 1, tmp_path / "r", quantities=["received_ratio"]) as recorder:
        model(ids, labels=ids).loss.backward()
        recorder.step()
    told = workbench.measure(observed, "received_ratio", ids).query("variant.isna() and control.isna()")
    means = [
        frame.groupby("layer")["value"].mean().tolist() for frame in (rows(tmp_path / "r", "received_ratio"), told)
    ]
    assert means[0] == pytest.approx(means[1], rel=1e-5)
    model = tiny("sink_logit")
    with Recorder(model, 1, tmp_path / "s", quantities=["importance_entropy", "sink_mass"]) as recorder:
        model(ids, return_type="loss").backward()
        with pytest.warns(NotRecorded, match=r"importance_entropy \(it counts attention to no token"):
            recorder.step()
    assert len(rows(tmp_path / "s", "sink_mass"))


class Turned(GPT):
    """Its blocks read [pos, batch, d_model]."""

    def forward(self, ids):
        x = (self.wte(ids) + self.wpe.weight[: ids.shape[1]]).transpose(0, 1)
        for block in self.h:
            x = block(x)
        return self.lm_head(x).transpose(0, 1)


def test_states_with_positions_before_the_batch_are_not_read_as_documents(tmp_path):
    model = Turned()
    quantities = ["hidden_peak", "activation_gradient_norm", "gradient_by_position"]
    with Recorder(model, 1, tmp_path / "r", quantities=quantities) as recorder:
        model(tokens(0, batch=2, length=12)).square().mean().backward()
        with pytest.warns(NotRecorded, match=r"hidden_peak \(stream \[12, 2, \d+\] holds positions before the batch"):
            recorder.step()
    assert not len(rows(tmp_path / "r", "hidden_peak"))
    assert not len(rows(tmp_path / "r", "gradient_by_position"))
    assert len(rows(tmp_path / "r", "activation_gradient_norm")), "a norm of everything does not depend on the order"


class Masked(GPT):
    """Takes a mask of padding, as Hugging Face's models do."""

    def forward(self, ids, attention_mask=None):
        return super().forward(ids)


def test_padding_counts_in_no_average_and_its_share_is_recorded(tmp_path):
    torch.manual_seed(0)
    model, ids = Masked(), tokens(0, batch=2, length=12)
    lengths = [5, 12]
    mask = torch.stack([(torch.arange(12) < n).long() for n in lengths])
    wanted = []
    model.h[1].register_forward_pre_hook(lambda module, inputs: wanted.append(inputs[0].detach()))
    quantities = ["hidden_norm", "token_similarity", "activation_gradient_norm", "gradient_sink"]
    with Recorder(model, 1, tmp_path / "r", quantities=quantities) as recorder:
        model(ids, attention_mask=mask).square().mean().backward()
        with pytest.warns(NotRecorded, match=r"gradient_sink \(batches hold padding"):
            recorder.step()
    each = [state[:n].norm(dim=-1).mean().item() for state, n in zip(wanted[0], lengths, strict=True)]
    value = rows(tmp_path / "r", "hidden_norm", site="stream", layer=1)
    assert value["value"].item() == pytest.approx(sum(each) / 2, rel=1e-5)
    assert value["n"].item() == 2
    assert rows(tmp_path / "r", "padding_share")["value"].item() == pytest.approx(7 / 24)
    assert len(rows(tmp_path / "r", "token_similarity"))
    assert len(rows(tmp_path / "r", "activation_gradient_norm"))
