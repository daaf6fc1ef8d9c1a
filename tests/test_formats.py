"""Files of training scripts: opened as what they are, with where they came from."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from foreign import EXAMPLE, GPT, IDS, SHAPE, adam_of, example_container, gpt2_args, llama_tensors, nanogpt, quietly
from safetensors.torch import load_file

import workbench
from workbench.checkpoints import formats
from workbench.checkpoints.format import formats as known
from workbench.checkpoints.loading import read_state
from workbench.checkpoints.paths import CONFIG, identify, series
from workbench.checkpoints.state_dicts import read
from workbench.checkpoints.transformers_modules import module_of
from workbench.errors import ArchitectureAssumed, BadCheckpoint, NotCovered, ObservedInstead, WorkbenchError
from workbench.runs.checkpoint_import import import_run

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def vanilla(tiny):
    """A small model with grouped heads."""
    return tiny(config={"n_key_value_heads": 2})


@pytest.mark.slow
def test_nanogpt_files_of_llamas_open_with_step_and_settings(tiny, tmp_path):
    model = tiny()
    torch.save(nanogpt(model), tmp_path / "ckpt.pt")
    with pytest.warns(ArchitectureAssumed) as told:
        loaded = workbench.load(tmp_path / "ckpt.pt")
    assert any("rope_theta=10000.0 is assumed" in str(w.message) for w in told)
    assert torch.equal(loaded(IDS), model(IDS))
    assert {k: loaded.source[k] for k in ("format", "step")} == {"format": "nanoGPT", "step": 500}
    assert loaded.config.n_ctx == 128


@pytest.mark.fast(1)
@pytest.mark.parametrize(("bias", "mask"), [(True, False), (False, True)])
def test_nanogpt_files_of_gpt2s_compute_the_same_in_transformers(tmp_path, bias, mask):
    gpt = GPT(bias=bias, mask=mask).eval()
    tensors = {f"_orig_mod.{name}": t for name, t in gpt.state_dict().items()}
    torch.save({"model": tensors, "model_args": gpt2_args(bias=bias), "iter_num": 7}, tmp_path / "ckpt.pt")
    state = read(identify(tmp_path / "ckpt.pt"))
    with pytest.warns(ObservedInstead, match="GPT2LMHeadModel"):
        module = module_of(state, NotCovered("not ours"))
    torch.testing.assert_close(module(IDS).logits, gpt(IDS), atol=2e-5, rtol=1e-4)
    with pytest.warns(ObservedInstead) as told:
        loaded = workbench.load(tmp_path / "ckpt.pt")
    assert "Fill the module" not in str(told[0].message)  # nothing is left to do
    torch.testing.assert_close(loaded(IDS), gpt(IDS), atol=2e-5, rtol=1e-4)
    with pytest.warns(ObservedInstead, match="GPT2LMHeadModel"):
        run = import_run(tmp_path / "ckpt.pt", tmp_path / "runs")
    torch.testing.assert_close(run.load()(IDS), loaded(IDS))
    with pytest.raises(NotCovered, match="Without settings of our decoder another library"):
        import_run(tmp_path / "ckpt.pt", tmp_path / "runs", name="other", architecture="resformer")
    with pytest.warns(ObservedInstead):
        assert torch.equal(workbench.load(tmp_path)(IDS), loaded(IDS))  # the only one in its folder
    with pytest.raises(WorkbenchError, match="no checkpoint at step 3"):
        workbench.load(tmp_path, step=3)
    assert {k: loaded.source[k] for k in ("step", "stripped")} == {"step": 7, "stripped": ["_orig_mod."]}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"use_rmsnorm": True}, "model_args has 'use_rmsnorm'"),
        ({"n_embd": "32"}, "n_embd='32'; it must be a positive whole number"),
        ({"n_head": 5}, "n_head=5 does not divide n_embd=32"),
        ({"n_layer": 3}, r"missing transformer\.h\.2\."),
        ({"n_layer": 1}, r"unexpected transformer\.h\.1\."),
        ({"n_layer": 10**9}, "there are 2[0-9] tensors"),
        ({"vocab_size": 60}, r"wte\.weight is \[61, 32\], wanted \[60, 32\]"),
        ({"bias": False}, r"unexpected transformer\.h\.0\.ln_1\.bias"),
    ],
)
def test_gpt2s_that_do_not_fit_their_settings_are_refused(tmp_path, settings, told):
    torch.save({"model": GPT(bias=True).state_dict(), "model_args": gpt2_args(**settings)}, tmp_path / "ckpt.pt")
    with pytest.raises(BadCheckpoint, match=told):
        workbench.load(tmp_path / "ckpt.pt")


def test_modded_nanogpt_is_refused_with_what_it_is_and_read_for_its_own_module(tmp_path):
    own = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    ran = tmp_path / "ran"
    tensors = {f"_orig_mod.{n}": t for n, t in own.state_dict().items()}
    file = tmp_path / "state_step000500.pt"
    torch.save({"step": 500, "code": f"open({str(ran)!r}, 'w')", "model": tensors, "optimizers": [adam_of(own)]}, file)
    with pytest.raises(
        NotCovered, match=r"modded-nanogpt checkpoint of step 500.*0\.weight.*workbench\.observe\(module, ids\)"
    ):
        workbench.load(file)
    found, info = read_state(file)
    other = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    other.load_state_dict(found)
    assert torch.equal(other(torch.ones(4)), own(torch.ones(4)))
    assert (info.format, info.step, info.stripped) == ("modded-nanogpt", 500, ("_orig_mod.",))
    assert "open(" in info.code
    assert not ran.exists()


def test_nanochat_files_are_read_with_their_meta_and_refused_as_models(tmp_path):
    tensors = {"transformer.wte.weight": torch.ones(61, 32), "transformer.h.0.attn.c_q.weight": torch.ones(32, 32)}
    torch.save(tensors, tmp_path / "model_000500.pt")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optim_000500_rank0.pt")
    (tmp_path / "meta_000500.json").write_text(json.dumps({"step": 500, "model_config": {"n_layer": 1, "n_head": 4}}))
    found, info = read_state(tmp_path / "model_000500.pt")
    assert (info.format, info.step, info.config) == ("nanochat", 500, {"n_layer": 1, "n_head": 4})
    assert found.keys() == tensors.keys()
    assert series(tmp_path) == [(500, tmp_path / "model_000500.pt")]
    with pytest.raises(NotCovered, match=r"nanochat checkpoint of step 500; its configuration: \{'n_layer': 1"):
        workbench.load(tmp_path / "model_000500.pt")
    with pytest.raises(BadCheckpoint, match="optimizer's state; open the file of the weights"):
        workbench.load(tmp_path / "optim_000500_rank0.pt")
    (tmp_path / "meta_000500.json").write_text(json.dumps({"step": 400}))
    with pytest.raises(BadCheckpoint, match="says step 400, its name 500"):
        workbench.load(tmp_path / "model_000500.pt")


@pytest.mark.slow
def test_denseformers_files_open_and_their_averages_are_recognised(tiny, tmp_path):
    model = tiny("denseformer", dilation=2, period=1)
    container = {"model": llama_tensors(model), "optimizer": adam_of(model), "scheduler": {"last_epoch": 9}, "itr": 9}
    torch.save(container, tmp_path / "ckpt.pt")
    loaded = quietly(tmp_path / "ckpt.pt", config=SHAPE)
    assert torch.equal(loaded(IDS), model(IDS))
    assert (loaded.architecture, loaded.options["dilation"], loaded.source["step"]) == ("denseformer", 2, 9)
    with pytest.raises(BadCheckpoint, match=r"nothing says n_heads and n_ctx; give config="):
        workbench.load(tmp_path / "ckpt.pt")


@pytest.mark.parametrize("name", ["svformer_gqa", "denseformer_dilation2_period1"])
def test_the_authors_weights_open_as_pickled_files_too(tmp_path, name):
    found = json.loads((GOLDEN / name / "expected.json").read_text())
    expected = load_file(GOLDEN / name / "expected.safetensors")
    torch.save(load_file(GOLDEN / name / "model.safetensors"), tmp_path / "pytorch_model.bin")
    shutil.copy(GOLDEN / name / CONFIG, tmp_path)
    options = {k: v for k, v in found.items() if k.startswith(("lambda", "neutreno", "dilation", "period"))}
    model = workbench.load(tmp_path, architecture=found["architecture"], **options)
    torch.testing.assert_close(model(expected["input_ids"]), expected["logits"], atol=1e-5, rtol=0)
    bare = workbench.load(tmp_path / "pytorch_model.bin", architecture=found["architecture"], **options)
    assert torch.equal(bare(expected["input_ids"]), model(expected["input_ids"]))


PREFIXES = (
    "module.module.", "_fsdp_wrapped_module.module.", "module._orig_mod.model.",
)  # fmt: skip


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_nesting_of_prefixes_is_taken_off_and_told(tmp_path, vanilla, prefix):
    tensors = {prefix + name: t for name, t in llama_tensors(vanilla).items()}
    torch.save(
        {"state_dict": tensors, "global_step": 31, "hyper_parameters": dict(SHAPE)}, tmp_path / "epoch=1-step=31.ckpt"
    )
    model = quietly(tmp_path / "epoch=1-step=31.ckpt", architecture="transformer")
    assert torch.equal(model(IDS), vanilla(IDS))
    assert (model.source["format"], model.source["step"]) == ("Lightning", 31)
    assert sorted("".join(model.source["stripped"]).split(".")) == sorted(prefix.split("."))


def test_names_that_meet_when_prefixes_come_off_are_refused(tmp_path):
    torch.save({"_orig_mod.a": torch.ones(1), "a": torch.zeros(1)}, tmp_path / "a.pt")
    with pytest.raises(BadCheckpoint, match=r"holds a more than once: as _orig_mod\.a and a"):
        read_state(tmp_path / "a.pt")


def test_shared_and_transposed_tensors_come_back_as_they_were(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {"a": base, "b": base, "t": base.T, "s": base[1:3, ::2], "n": torch.ones(0, 3), "o": torch.tensor(2.0)}
    torch.save(tensors, tmp_path / "a.pt")
    found, _ = read_state(tmp_path / "a.pt")
    assert all(torch.equal(found[name], t) for name, t in tensors.items())
    assert found["a"].data_ptr() == found["b"].data_ptr()


@pytest.fixture
def example(tmp_path, monkeypatch):
    """A code base's form as one more file in the folder of formats."""
    (tmp_path / "formats").mkdir()
    (tmp_path / "formats" / "example.py").write_text(EXAMPLE)
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path / "formats")])
    known.cache_clear()
    yield known()["example"]
    known.cache_clear()
    sys.modules.pop("workbench.checkpoints.formats.example")


def test_one_file_is_enough_for_a_code_base_to_be_recognised_and_opened(tiny, tmp_path, example):
    model = tiny()
    torch.save(saved := example_container(model), tmp_path / "latest.pt")
    loaded = quietly(tmp_path / "latest.pt")
    assert torch.equal(loaded(IDS), model(IDS))
    assert (loaded.source["format"], loaded.source["step"], loaded.config.n_ctx) == ("example", 7, 128)
    assert read_state(tmp_path / "latest.pt")[0].keys() == saved["params"].keys()
    saved["params"]["embed.weight"] = saved["params"]["tokens"]
    torch.save(saved, tmp_path / "twice.pt")
    with pytest.raises(BadCheckpoint, match=r"holds model\.embed_tokens\.weight twice: as tokens and embed\.weight"):
        quietly(tmp_path / "twice.pt")
