"""Anyone's checkpoints: opened as what they are, with where they came from, and refused with the cause where they are not sound."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from foreign import GPT, IDS, adam_of, gpt2_args, llama_tensors, nanogpt, rezipped
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)  # fmt: skip

import workbench
from workbench.checkpoints import CONFIG, save
from workbench.errors import ArchitectureAssumed, BadCheckpoint, NotCovered, ObservedInstead, WorkbenchError
from workbench.formats import open_state, read_state, series
from workbench.formats.foreign import module_of
from workbench.importing import import_run
from workbench.runs import list_runs

GOLDEN = Path(__file__).parent / "golden"
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
SHAPE = {"n_heads": 4, "n_ctx": 128, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0}


@pytest.fixture
def vanilla(tiny):
    """A small model with grouped heads."""
    return tiny(config={"n_key_value_heads": 2})


def hugging_face(kind=LlamaForCausalLM, config=LlamaConfig, **changes):
    torch.manual_seed(0)
    return kind(config(**SIZES | changes)).eval()


def quietly(path, **settings):
    """Loaded without the warning that its architecture is assumed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ArchitectureAssumed)
        return workbench.load(path, **settings)


def same(model, logits):
    torch.testing.assert_close(model(IDS), logits, atol=1e-5, rtol=1e-5)


# ---- Hugging Face ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_directories_written_by_transformers_open_single_and_sharded(tmp_path, tied, shard):
    llama = hugging_face(tie_word_embeddings=tied)
    llama.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    model = quietly(tmp_path)
    same(model, llama(IDS).logits)
    assert model.source["format"] == "Hugging Face"
    assert set(model.source["sha256"]) == {p.name for p in tmp_path.glob("*.safetensors")}
    assert (model.embed.weight.data_ptr() == model.unembed.weight.data_ptr()) == tied


@pytest.mark.parametrize("spelling", [{"dtype": "bfloat16"}, {"torch_dtype": "bfloat16", "dtype": None}])
def test_both_spellings_of_the_type_are_read_and_weights_are_float32_unless_asked(tmp_path, spelling):
    hugging_face().to(torch.bfloat16).save_pretrained(tmp_path)
    llama = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    config = json.loads((tmp_path / CONFIG).read_text()) | spelling
    (tmp_path / CONFIG).write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    same(quietly(tmp_path), llama(IDS).logits)
    assert quietly(tmp_path, dtype=torch.bfloat16).embed.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("sharded", [False, True])
def test_directories_with_pickled_weights_open(tmp_path, sharded):
    llama = hugging_face()
    llama.config.save_pretrained(tmp_path)
    tensors = llama.state_dict()
    names = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(tensors)}
    for file in set(names.values()) if sharded else ():
        torch.save({n: t for n, t in tensors.items() if names[n] == file}, tmp_path / file)
    if sharded:
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    else:
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    same(quietly(tmp_path), llama(IDS).logits)


def test_a_tied_model_is_saved_with_one_matrix_and_comes_back(tmp_path):
    llama = hugging_face(tie_word_embeddings=True)
    llama.save_pretrained(tmp_path / "theirs")
    save(quietly(tmp_path / "theirs"), tmp_path / "ours")
    assert "lm_head.weight" not in load_file(tmp_path / "ours" / "model.safetensors")
    same(workbench.load(tmp_path / "ours"), llama(IDS).logits)
    same(lambda ids: AutoModelForCausalLM.from_pretrained(tmp_path / "ours")(ids).logits, llama(IDS).logits)


def test_mistral_opens_natively_where_its_window_covers_the_context(tmp_path):
    model = hugging_face(MistralForCausalLM, MistralConfig, sliding_window=64)
    model.save_pretrained(tmp_path)
    same(quietly(tmp_path), model(IDS).logits)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"sliding_window": 8}))
    with pytest.raises(NotCovered, match="sliding_window=8"):
        workbench.load(tmp_path, architecture="transformer")


@pytest.mark.parametrize(
    ("kind", "config", "changes", "reason"),
    [
        (Qwen2ForCausalLM, Qwen2Config, {}, "model_type 'qwen2'"),
        (LlamaForCausalLM, LlamaConfig, {"attention_bias": True}, "attention_bias=True"),
        (LlamaForCausalLM, LlamaConfig, {"head_dim": 16}, "head_dim=16"),
        (LlamaForCausalLM, LlamaConfig, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "linear"),
    ],
)  # fmt: skip
def test_what_the_decoder_does_not_compute_becomes_its_own_librarys_module_aloud(
    tmp_path, kind, config, changes, reason
):
    true = hugging_face(kind, config, **changes)
    true.save_pretrained(tmp_path)
    with pytest.warns(ObservedInstead, match=reason):
        model = workbench.load(tmp_path)
    same(model, true(IDS).logits)
    assert model.source["format"] == "Hugging Face"
    assert list(model.source["sha256"]) == ["model.safetensors"]


def test_gpt2_directories_are_observed(tmp_path):
    torch.manual_seed(0)
    true = GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    ).eval()
    true.save_pretrained(tmp_path)
    with pytest.warns(ObservedInstead, match="GPT2LMHeadModel"):
        same(workbench.load(tmp_path), true(IDS).logits)


def test_a_directory_that_transformers_cannot_fill_is_refused_not_filled_at_random(tmp_path):
    hugging_face(Qwen2ForCausalLM, Qwen2Config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"missing model\.layers\.1\.mlp\.up_proj\.weight"):
        workbench.load(tmp_path)


def test_code_in_a_directory_is_never_run(tmp_path):
    hugging_face().save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(BadCheckpoint, match="auto_map"):
        workbench.load(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_trainers_checkpoints_open_with_their_steps(tmp_path):
    from torch.utils.data import Dataset
    from transformers import Trainer, TrainingArguments

    class Rows(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            return {"input_ids": IDS[i % 2], "labels": IDS[i % 2]}

    llama = hugging_face()
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, max_steps=3, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(model=llama, args=arguments, train_dataset=Rows()).train()
    assert [step for step, _ in series(tmp_path)] == [1, 2, 3]
    model = quietly(tmp_path)
    assert (model.source["step"], model.source["format"]) == (3, "Hugging Face Trainer")
    same(model, llama.eval()(IDS).logits)
    assert quietly(tmp_path, step="first").source["step"] == 1
    with pytest.raises(WorkbenchError, match=r"no checkpoint at step 7; choose from .*1, 2, 3"):
        workbench.load(tmp_path, step=7)


# ---- training scripts' files -----------------------------------------------------------------------------------------


def test_nanogpt_files_of_llamas_open_with_step_and_settings(tiny, tmp_path):
    model = tiny()
    torch.save(nanogpt(model), tmp_path / "ckpt.pt")
    with pytest.warns(ArchitectureAssumed) as told:
        loaded = workbench.load(tmp_path / "ckpt.pt")
    assert any("rope_theta=10000.0 is assumed" in str(w.message) for w in told)
    assert torch.equal(loaded(IDS), model(IDS))
    assert {k: loaded.source[k] for k in ("format", "step")} == {"format": "nanoGPT", "step": 500}
    assert loaded.config.n_ctx == 128


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mask", [True, False])
def test_nanogpt_files_of_gpt2s_compute_the_same_in_transformers(tmp_path, bias, mask):
    gpt = GPT(bias=bias, mask=mask).eval()
    tensors = {f"_orig_mod.{name}": t for name, t in gpt.state_dict().items()}
    torch.save({"model": tensors, "model_args": gpt2_args(bias=bias), "iter_num": 7}, tmp_path / "ckpt.pt")
    state = open_state(tmp_path / "ckpt.pt")
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
    with pytest.raises(NotCovered, match="Without settings of our decoder it is kept"):
        import_run(tmp_path / "ckpt.pt", tmp_path / "runs", name="other", architecture="resformer")
    with pytest.raises(BadCheckpoint, match=r"names its step; give one of them, as .*ckpt\.pt, or"):
        workbench.load(tmp_path)
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


@pytest.mark.parametrize("legacy", [False, True])
def test_denseformers_files_open_and_their_averages_are_recognised(tiny, tmp_path, legacy):
    model = tiny("denseformer", dilation=2, period=1)
    container = {"model": llama_tensors(model), "optimizer": adam_of(model), "scheduler": {"last_epoch": 9}, "itr": 9}
    torch.save(container, tmp_path / "ckpt.pt", _use_new_zipfile_serialization=not legacy)
    loaded = quietly(tmp_path / "ckpt.pt", config=SHAPE)
    assert torch.equal(loaded(IDS), model(IDS))
    assert (loaded.architecture, loaded.options["dilation"], loaded.source["step"]) == ("denseformer", 2, 9)
    with pytest.raises(BadCheckpoint, match=r"nothing says n_heads and n_ctx; give config="):
        workbench.load(tmp_path / "ckpt.pt")


@pytest.mark.parametrize("name", ["resformer", "svformer_gqa", "neutreno_resformer", "denseformer_dilation2_period1"])
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


class Wrapped(torch.nn.Module):
    """What a LightningModule does with a model."""

    def __init__(self, model):
        super().__init__()
        self.model = model


def test_prefixes_of_real_wrappers_come_off_nested(tmp_path, vanilla):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        llama = hugging_face()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the compiler's own imports
            nested = torch.compile(torch.nn.parallel.DistributedDataParallel(torch.compile(Wrapped(llama))))
        names = list(nested.state_dict())
        assert names[0].startswith("_orig_mod.module._orig_mod.model.model.embed_tokens")
        torch.save({"model": nested.state_dict(), "step": 12, "config": llama.config.to_dict()}, tmp_path / "a.pt")
    finally:
        torch.distributed.destroy_process_group()
    model = quietly(tmp_path / "a.pt")
    same(model, llama(IDS).logits)
    assert model.source["stripped"] == ["_orig_mod.", "module.", "model."]
    assert (model.source["step"], model.source["format"]) == (12, "PyTorch container")


@pytest.mark.parametrize(
    "prefix",
    [
        "module.",
        "_orig_mod.",
        "model.",
        "module.module.",
        "_fsdp_wrapped_module.module.",
        "module._orig_mod.model.",
        "",
    ],
)
def test_every_nesting_of_prefixes_is_taken_off_and_told(tmp_path, vanilla, prefix):
    tensors = {prefix + name: t for name, t in llama_tensors(vanilla).items()}
    torch.save(
        {"state_dict": tensors, "global_step": 31, "hyper_parameters": dict(SHAPE)}, tmp_path / "epoch=1-step=31.ckpt"
    )
    model = quietly(tmp_path / "epoch=1-step=31.ckpt")
    assert torch.equal(model(IDS), vanilla(IDS))
    assert (model.source["format"], model.source["step"]) == ("Lightning", 31)
    assert sorted("".join(model.source["stripped"]).split(".")) == sorted(prefix.split("."))


def test_wrappers_inside_names_are_taken_off(tmp_path, vanilla):
    inside = {n.replace("mlp.", "mlp._checkpoint_wrapped_module."): t for n, t in llama_tensors(vanilla).items()}
    save_file(inside, tmp_path / "weights.safetensors")
    model = quietly(tmp_path / "weights.safetensors", config=SHAPE)
    assert torch.equal(model(IDS), vanilla(IDS))


def test_names_that_meet_when_prefixes_come_off_are_refused(tmp_path):
    torch.save({"_orig_mod.a": torch.ones(1), "a": torch.zeros(1)}, tmp_path / "a.pt")
    with pytest.raises(BadCheckpoint, match=r"holds a more than once: as _orig_mod\.a and a"):
        read_state(tmp_path / "a.pt")


def test_a_state_dict_of_our_own_model_opens_from_any_file(tmp_path, vanilla):
    torch.save(vanilla.state_dict(), tmp_path / "own.pt")
    assert torch.equal(quietly(tmp_path / "own.pt", config=SHAPE)(IDS), vanilla(IDS))


def test_shared_and_transposed_tensors_come_back_as_they_were(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {"a": base, "b": base, "t": base.T, "s": base[1:3, ::2], "n": torch.ones(0, 3), "o": torch.tensor(2.0)}
    torch.save(tensors, tmp_path / "a.pt")
    found, _ = read_state(tmp_path / "a.pt")
    assert all(torch.equal(found[name], t) for name, t in tensors.items())
    assert found["a"].data_ptr() == found["b"].data_ptr()


# ---- series and imports ----------------------------------------------------------------------------------------------


@pytest.fixture
def trained(tiny, tmp_path):
    """Three steps as files of a script, beside what is no checkpoint."""
    folder = tmp_path / "out"
    folder.mkdir()
    for step in (20, 3, 100):
        torch.save(nanogpt(tiny("resformer", seed=step), iter_num=step), folder / f"ckpt_{step}.pt")
    torch.save({}, folder / "optimizer_100.pt")
    (folder / "notes_7.txt").write_text("")
    return folder


def test_a_series_is_a_folder_a_glob_or_a_pattern_sorted_by_number(trained):
    expected = [(s, trained / f"ckpt_{s}.pt") for s in (3, 20, 100)]
    assert series(trained) == expected
    assert series(f"{trained}/ckpt_*.pt") == expected
    assert series(rf"{trained}/ckpt_(?P<step>\d+)\.pt") == expected
    assert workbench.series(trained) == expected
    for step, path in expected:
        (trained / f"step{step}").mkdir()
        shutil.copy(path, trained / f"step{step}" / "model.pt")
    assert [s for s, _ in series(f"{trained}/step*/model.pt")] == [3, 20, 100]


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("none_*.pt", "no checkpoint there names its step"),
        (r"(?P<step>\d+", "is no regular expression"),
        (r"ckpt_(?P<step>.*)", r"the step '\d+\.pt' is no whole number"),
        ("ckpt_3.pt", "is no folder, no glob and no pattern"),
    ],
)
def test_a_series_that_is_none_is_refused(trained, where, told):
    with pytest.raises(BadCheckpoint, match=told):
        series(f"{trained}/{where}")


def test_two_checkpoints_of_one_step_are_refused(trained):
    shutil.copy(trained / "ckpt_20.pt", trained / "step_020.pt")
    with pytest.raises(BadCheckpoint, match=r"are both step 20; give a pattern"):
        series(trained)
    (trained / "final.pt").write_bytes(b"")
    with pytest.raises(BadCheckpoint, match=r"final\.pt does not name its step"):
        series(f"{trained}/*.pt")


def test_a_series_is_measured_step_by_step(trained):
    paths = [path for _, path in series(trained)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ArchitectureAssumed)
        frame = workbench.measure(paths, "loss", IDS)
    assert list(frame["step"]) == [3, 20, 100]


def test_an_imported_series_is_a_run_that_loads_and_measures(trained, tmp_path, tiny):
    runs = tmp_path / "runs"
    run = import_run(
        trained, runs, name="theirs", architecture="resformer", config={"rms_norm_eps": 1e-5, "rope_theta": 1e4}
    )
    assert (run.name, run.architecture, run.steps, run.seed, run.finished) == (
        "theirs",
        "resformer",
        [3, 20, 100],
        0,
        True,
    )
    assert [r.name for r in list_runs(runs)[0]] == ["theirs"]
    with pytest.raises(BadCheckpoint, match=r"it holds runs: give one of them, as .*theirs"):
        workbench.load(runs)
    assert torch.equal(workbench.load(runs / "theirs", step=20)(IDS), tiny("resformer", seed=20)(IDS))
    frame = workbench.measure(run, "loss", IDS, steps="all")
    assert list(frame["step"]) == [3, 20, 100]
    origin = json.loads((runs / "theirs" / "step_000020" / CONFIG).read_text())["workbench"]["origin"]
    assert (origin["format"], list(origin["sha256"])) == ("nanoGPT", ["ckpt_20.pt"])
    with pytest.raises(BadCheckpoint, match="imported run was trained on; give data="):
        workbench.measure(run, "loss")
    with pytest.raises(WorkbenchError, match="exists; choose another name"):
        import_run(trained, runs, name="theirs")


def test_what_is_assumed_of_a_series_is_said_once(trained, tmp_path):
    with pytest.warns(ArchitectureAssumed) as told:
        import_run(trained, tmp_path / "runs", architecture="resformer")
    assert len([w for w in told if "--config" in str(w.message)]) == len(told) == 1


def test_an_import_that_fails_leaves_nothing(trained, tmp_path, tiny):
    torch.save(nanogpt(tiny(seed=1, config={"d_mlp": 24}), iter_num=200), trained / "ckpt_200.pt")
    with pytest.raises(BadCheckpoint, match="are not steps of one model: config"):
        import_run(
            trained, tmp_path / "runs", architecture="resformer", config={"rms_norm_eps": 1e-5, "rope_theta": 1e4}
        )
    assert list((tmp_path / "runs").iterdir()) == []


def test_import_and_export_from_the_command_line(tiny, tmp_path):
    from typer.testing import CliRunner

    from workbench.cli import app

    def command(*arguments):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ArchitectureAssumed)
            return CliRunner().invoke(app, [str(argument) for argument in arguments])

    torch.save(nanogpt(tiny()), tmp_path / "ckpt.pt")
    runs = tmp_path / "runs"
    done = command("import", tmp_path / "ckpt.pt", "--as", "mine", "--architecture", "transformer", "--runs", runs)
    assert done.exit_code == 0, done.output
    assert [run.steps for run in list_runs(runs)[0]] == [[500]]
    done = command("export", runs / "mine", tmp_path / "plain")
    assert done.exit_code == 0, done.output
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    same(lambda ids: llama(ids).logits, tiny()(IDS))
    done = command("import", tmp_path / "ckpt.pt", "--as", "../mine", "--runs", runs)
    assert "one plain folder name" in str(done.exception)


# ---- exports ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    from workbench.tokenizer import train_tokenizer

    return train_tokenizer(["the cat sat on the mat and the dog sat on the log " * 3] * 3, 270)


def test_an_exported_model_is_a_plain_directory_with_equal_logits_and_tokens(tiny, tmp_path, tokenizer):
    from transformers import AutoTokenizer

    model = tiny(config={"n_key_value_heads": 2, "d_vocab": 270})
    model.tokenizer = tokenizer
    workbench.checkpoints.export(model, tmp_path / "plain")
    assert "workbench" not in json.loads((tmp_path / "plain" / CONFIG).read_text())
    ids = tokenizer.encode("the cat")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "plain")
    assert theirs("the cat", add_special_tokens=False)["input_ids"] == ids
    assert (theirs.eos_token_id, theirs.bos_token_id) == (tokenizer.eos_id, tokenizer.bos_id)
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert isinstance(llama, LlamaForCausalLM)
    torch.testing.assert_close(llama(torch.tensor([ids])).logits, model(torch.tensor([ids])), atol=1e-5, rtol=1e-5)
    back = quietly(tmp_path / "plain")
    assert back.tokenizer.encode("the cat") == ids
    with pytest.raises(WorkbenchError, match="is not empty"):
        workbench.checkpoints.export(model, tmp_path / "plain")


def test_only_a_llama_is_exported_as_one(tiny, tmp_path):
    with pytest.raises(WorkbenchError, match=r"resformer is no Llama.*for_lm_eval"):
        workbench.checkpoints.export(tiny("resformer"), tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def foreign_tokenizer(folder, words):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<s>", "<unk>", *words])}, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))


def test_somebody_elses_tokenizer_comes_with_the_model(tmp_path):
    hugging_face().save_pretrained(tmp_path)
    foreign_tokenizer(tmp_path, ["the", "cat"])
    model = quietly(tmp_path)
    assert model.to_tokens("the cat").tolist() == [[2, 3]]
    assert model.to_str_tokens("the cat cat") == ["the", "cat", "cat"]
    assert (model.tokenizer.bos_id, model.tokenizer.vocab_size) == (0, 4)
    with pytest.raises(WorkbenchError, match="names no token that ends a document"):
        _ = model.tokenizer.eos_id


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    hugging_face().save_pretrained(tmp_path)
    foreign_tokenizer(tmp_path, [f"w{i}" for i in range(80)])
    with pytest.raises(
        BadCheckpoint, match=r"does not match the model: its ids go up to 81, the vocabulary to 60.*remove it"
    ):
        quietly(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadCheckpoint, match="no readable tokenizer"):
        quietly(tmp_path)


# ---- refusals --------------------------------------------------------------------------------------------------------


class Payload:
    """A pickle that touches a file when it is opened the unsafe way."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda p: {"model": {"a": torch.ones(2)}, "config": Payload(p)},
            r"would have to run code to be opened: it holds .*them$",
        ),
        (
            lambda p: torch.nn.Linear(2, 2),
            r"whole pickled module \(torch\.nn\.modules\.linear\.Linear\).*state_dict\(\)",
        ),
        (
            lambda p: {"model": {"a": torch.ones(2)}, "args": argparse.Namespace(lr=1)},
            r"safe_globals\(\[argparse\.Namespace\]\)",
        ),
        (lambda p: [1, 2], "holds no state dict but a list"),
        (lambda p: {"metrics": {"loss": 1.0}}, "no state dict under model, state_dict.*it has metrics"),
        (
            lambda p: {"model": {"a": torch.ones(2), "b": torch.ones(2), "c": 3}},
            "'c' among the weights is no tensor but a int",
        ),
        (lambda p: {"model": {}}, "no state dict under"),
    ],
)
def test_pickles_are_refused_with_the_cure_and_run_nothing(tmp_path, make, told, legacy):
    file, ran = tmp_path / "ckpt.pt", tmp_path / "ran"
    torch.save(make(ran), file, _use_new_zipfile_serialization=not legacy)
    if legacy and "whole" in told:
        told = "whole pickled module|would have to run code"  # only the first culprit of an old file is known
    with pytest.raises(BadCheckpoint, match=told):
        workbench.load(file)
    assert not ran.exists()


def test_a_bare_pickle_is_refused_and_runs_nothing(tmp_path):
    (tmp_path / "model.pt").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(BadCheckpoint, match="no PyTorch checkpoint"):
        workbench.load(tmp_path / "model.pt")
    assert not (tmp_path / "ran").exists()


def test_what_a_user_allows_by_name_is_read(tmp_path, tiny):
    torch.save(nanogpt(tiny(), config=argparse.Namespace(lr=1)), tmp_path / "ckpt.pt")
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert torch.equal(quietly(tmp_path / "ckpt.pt")(IDS), tiny()(IDS))
    with pytest.raises(BadCheckpoint, match="Namespace"):
        workbench.load(tmp_path / "ckpt.pt")


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("mp_rank_00_model_states.pt", "DeepSpeed shards.*zero_to_fp32"),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "DeepSpeed shards"),
        ("__0_0.distcp", "FSDP shards.*merge-weights"),
    ],
)
def test_shards_of_other_libraries_are_refused_with_the_cure(tmp_path, file, told):
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(BadCheckpoint, match=told):
        workbench.load(tmp_path)
    (tmp_path / CONFIG).write_text("{}")
    with pytest.raises(BadCheckpoint, match=told):
        workbench.load(tmp_path)


def test_a_bit_that_flipped_in_a_pickled_file_is_found(tmp_path, tiny):
    file = tmp_path / "ckpt.pt"
    torch.save(nanogpt(tiny()), file)
    data = bytearray(file.read_bytes())
    place = data.index(tiny().embed.weight.detach().numpy().tobytes()[:64]) + 40
    data[place] ^= 1
    file.write_bytes(data)
    with pytest.raises(BadCheckpoint, match=r"Bad CRC-32.*copy it again"):
        quietly(file)


@pytest.mark.parametrize("cut", [1, 200, 5000, 100_000])
def test_files_that_were_cut_off_are_refused(tmp_path, tiny, cut):
    file = tmp_path / "ckpt.pt"
    torch.save(nanogpt(tiny()), file)
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(BadCheckpoint, match="damaged or no PyTorch checkpoint"):
        workbench.load(file)


def test_a_tensor_that_claims_more_bytes_than_the_file_has_is_refused_before_memory_is_spent(tmp_path):
    file = tmp_path / "a.pt"
    torch.save({"a": torch.ones(40)}, file)
    huge = (10**9).to_bytes(4, "little")

    def change(name, data):
        return data.replace(b"K\x28\x85", b"J" + huge + b"\x85") if name.endswith("data.pkl") else data

    file.write_bytes(rezipped(file.read_bytes(), change))
    with pytest.raises(BadCheckpoint, match="damaged"):
        read_state(file)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_in_pickled_files(tmp_path, tiny, value):
    model = tiny()
    with torch.no_grad():
        model.embed.weight[7, 3] = value
    torch.save(nanogpt(tiny()) | {"model": llama_tensors(model)}, tmp_path / "ckpt.pt")
    with pytest.raises(BadCheckpoint, match=r"embed_tokens\.weight holds (NaN|Inf)"):
        quietly(tmp_path / "ckpt.pt")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_hidden_layers": 10**9}, "n_layers=1000000000, but there are only 21 tensors"),
        ({"rope_theta": 3.0, "rope_parameters": {"rope_type": "default", "rope_theta": 4.0}}, "contradicts itself: rope_theta is 3.0"),
        ({"num_hidden_layers": 1}, r"unexpected model\.layers\.1\."),
        ({"hidden_size": 10**12, "head_dim": None}, "no transformer can be built with|wanted"),
        ({"intermediate_size": 10**30}, "no transformer can be built with|wanted"),
        ({"vocab_size": 62}, r"embed_tokens\.weight is \[61, 32\], wanted \[62, 32\]"),
    ],
)  # fmt: skip
def test_configs_that_contradict_themselves_or_their_tensors_are_refused(tmp_path, changes, told):
    hugging_face().save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | changes))
    with pytest.raises(BadCheckpoint, match=told):
        workbench.load(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 10_000 + "}", "\ufeff", "null"])
def test_endless_and_empty_configs_are_refused(tmp_path, text):
    hugging_face().save_pretrained(tmp_path)
    (tmp_path / CONFIG).write_text(text, encoding="utf-8")
    with pytest.raises(BadCheckpoint, match=r"config\.json (cannot be read|holds a)"):
        workbench.load(tmp_path)


def test_a_path_that_is_not_there_names_its_neighbours(tmp_path):
    (tmp_path / "ckpt_500.pt").write_bytes(b"")
    with pytest.raises(BadCheckpoint, match=r"ckpt_600\.pt does not exist; did you mean ckpt_500\.pt"):
        workbench.load(tmp_path / "ckpt_600.pt")
    with pytest.raises(BadCheckpoint, match="damaged or no PyTorch checkpoint"):
        workbench.load(tmp_path / "ckpt_500.pt")


# ---- memory ----------------------------------------------------------------------------------------------------------

OPEN = """
import sys, warnings
warnings.simplefilter("ignore")
import workbench
from pathlib import Path
def kb(key):
    return int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key)).split()[1])
settings = {"config": {"n_heads": 4, "n_ctx": 128}, "architecture": "transformer"}
small, *large = sys.argv[1:]
for path in (small, small + ".pt"):
    workbench.load(path, **settings)
for path in large:
    Path("/proc/self/clear_refs").write_text("5")
    before = kb("VmRSS")
    model = workbench.load(path, **settings)
    print((kb("VmHWM") - before) * 1024)
    del model
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads peak memory from Linux's /proc")
@pytest.mark.slow
def test_opening_takes_the_memory_of_the_weights_and_no_more(tmp_path, tiny):
    """Peak resident memory in a fresh process against the file's bytes, at most 1.1 times."""
    size = {"n_layers": 3, "d_model": 512, "d_mlp": 1536, "d_vocab": 12_000}
    for name, model in {"small": tiny(), "large": tiny(config=size)}.items():
        save(model, tmp_path / name)
        torch.save(llama_tensors(model), tmp_path / f"{name}.pt")
    done = subprocess.run(
        [sys.executable, "-c", OPEN, tmp_path / "small", tmp_path / "large", tmp_path / "large.pt"],
        capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = (tmp_path / "large" / "model.safetensors", tmp_path / "large.pt")
    for file, peak in zip(files, done.stdout.split(), strict=True):
        ratio = int(peak) / file.stat().st_size
        assert 0.9 < ratio < 1.1, f"{file.name}: {ratio:.3f}"
