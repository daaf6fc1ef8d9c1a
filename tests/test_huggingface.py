"""Hugging Face directories and tokenizers: opened as what they are, written as that library reads them, never run."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from foreign import IDS, hugging_face, quietly, same
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
from transformers.utils import logging

import workbench
from workbench.checkpoints.paths import CONFIG, series
from workbench.checkpoints.saving import export, save
from workbench.errors import BadCheckpoint, NotCovered, ObservedInstead, WorkbenchError


@pytest.mark.parametrize(("tied", "shard"), [(False, "20KB"), (True, "1GB")])
def test_directories_written_by_transformers_open_single_and_sharded(tmp_path, tied, shard):
    rotation = {"rope_type": "default", "rope_theta": 700.0}
    llama = hugging_face(tie_word_embeddings=tied, rope_parameters=rotation)
    llama.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    model = quietly(tmp_path)
    same(model, llama(IDS).logits)
    assert (model.source["format"], model.config.rope_theta) == ("Hugging Face", 700.0)
    assert set(model.source["sha256"]) == {p.name for p in tmp_path.glob("*.safetensors")}
    assert (model.embed.weight.data_ptr() == model.unembed.weight.data_ptr()) == tied


@pytest.mark.parametrize("spelling", [{"torch_dtype": "bfloat16", "dtype": None}])
def test_both_spellings_of_the_type_are_read_and_weights_are_float32_unless_asked(tmp_path, spelling):
    hugging_face().to(torch.bfloat16).save_pretrained(tmp_path)
    llama = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    config = json.loads((tmp_path / CONFIG).read_text()) | spelling
    (tmp_path / CONFIG).write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    same(quietly(tmp_path), llama(IDS).logits)
    assert quietly(tmp_path, dtype=torch.bfloat16).embed.weight.dtype == torch.bfloat16
    assert logging.is_progress_bar_enabled(), "as it was before"


@pytest.mark.slow
@pytest.mark.fast(1)
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


def test_a_config_without_the_norms_epsilon_has_that_of_transformers(tmp_path):
    model = hugging_face(rms_norm_eps=1e-6)
    model.model.embed_tokens.weight.data.mul_(0.01)  # so small that the epsilon shows
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    del config["rms_norm_eps"]
    (tmp_path / CONFIG).write_text(json.dumps(config))
    same(quietly(tmp_path), model(IDS).logits)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("kind", "config", "changes", "reason"),
    [
        (Qwen2ForCausalLM, Qwen2Config, {}, "model_type 'qwen2'"),
        (LlamaForCausalLM, LlamaConfig, {"attention_bias": True}, "attention_bias=True"),
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


@pytest.mark.fast(1)
@pytest.mark.parametrize("prefix", ["", "_orig_mod.module."])
def test_gpt2_directories_are_observed_whatever_wrapped_the_model_when_it_was_saved(tmp_path, prefix):
    torch.manual_seed(0)
    true = GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    ).eval()
    true.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({prefix + name: tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    with pytest.warns(ObservedInstead, match="GPT2LMHeadModel"):
        model = workbench.load(tmp_path)
    same(model, true(IDS).logits)
    assert "".join(sorted(model.source["stripped"])) == prefix


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


# ---- exports ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    from workbench.data.tokenizer import train_tokenizer

    return train_tokenizer(["the cat sat on the mat and the dog sat on the log " * 3] * 3, 270)


def test_an_exported_model_is_a_plain_directory_with_equal_logits_and_tokens(tiny, tmp_path, tokenizer):
    from transformers import AutoTokenizer

    model = tiny(config={"n_key_value_heads": 2, "d_vocab": 270})
    model.tokenizer = tokenizer
    export(model, tmp_path / "plain")
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
        export(model, tmp_path / "plain")


def test_only_a_llama_is_exported_as_one(tiny, tmp_path):
    with pytest.raises(WorkbenchError, match=r"resformer is no Llama.*for_lm_eval"):
        export(tiny("resformer"), tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def foreign_tokenizer(folder, words):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<s>", "<unk>", *words])}, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))


def test_another_librarys_tokenizer_comes_with_the_model(tmp_path):
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


FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
FREQUENCIES = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
PLAIN, LINEAR = {"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}


def with_rotation(folder, changes):
    hugging_face().save_pretrained(folder)
    config = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))
    return folder


@pytest.mark.slow
@pytest.mark.fast(5)
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": LINEAR},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
        {"rope_scaling": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 8, **FACTORS}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8, **FREQUENCIES}},
        {"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5}},
        {"rope_parameters": LINEAR, "rope_scaling": PLAIN},
        {"rope_parameters": {**PLAIN, "rope_theta": 700.0}},
        {"partial_rotary_factor": 0.5},
        {"attn_implementation": "lab/kernel"},
    ],
)
def test_rotary_settings_are_read_as_transformers_reads_them(tmp_path, changes):
    folder = with_rotation(tmp_path, changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which library opens it
        model = workbench.load(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    same(model, theirs(IDS).logits)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_scaling": LINEAR | {"factor": -2.0}}, r"factor of the rotary settings is -2\.0"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "unknown rope_type 'ntk'"),
        ({"rope_scaling": LINEAR | {"partial_rotary_factor": 0.5}}, "transformers cannot run it"),
        ({"rope_scaling": LINEAR | {"partial_rotary_factor": [1.0]}}, r"partial_rotary_factor of the rotary settings is \[1\.0\]"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0], "long_factor": [2.0]}}, "must be a list"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}}, "must be below"),
        ({"rope_theta": 500.0}, "contradicts itself"),
        ({"rope_theta": None, "rope_parameters": "absent"}, "rope_theta is null"),
    ],
)  # fmt: skip
def test_rotary_settings_that_mean_nothing_are_refused_by_name(tmp_path, changes, said):
    folder = with_rotation(tmp_path, changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which library opens it
        with pytest.raises(BadCheckpoint, match=said):
            workbench.load(folder)


@pytest.mark.parametrize(
    "extra",
    [
        {"rope_scaling": LINEAR},
        {"use_scaled_rope": True},
        {"sliding_window": 16},
        {"hidden_act": "gelu"},
        {"logit_softcap": 30.0},
    ],
)
def test_settings_of_a_script_that_change_the_computation_are_not_passed_over(tmp_path, extra):
    llama = hugging_face()
    config = {"n_heads": 4, "n_ctx": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    torch.save({"model": llama.state_dict(), "config": config | extra}, tmp_path / "ckpt.pt")
    with pytest.raises(NotCovered, match=next(iter(extra)) + "|rotary"):
        quietly(tmp_path / "ckpt.pt")
