"""Checkpoint directories: written and read back bit by bit, opened by Llama's own library, refused when in doubt."""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from seams import COVERING
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import workbench
from workbench.checkpoints.paths import CONFIG, WEIGHTS
from workbench.checkpoints.saving import save, weights_hash
from workbench.errors import BadCheckpoint, UnknownName
from workbench.models import ARCHITECTURES

IDS = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))
OPTIONS = {
    "resformer": {"lambda_v1": 0.3}, "svformer": {"anchors": [0, 2]}, "neutreno": {"neutreno_lambda": 0.7},
    "denseformer": {"dilation": 2, "period": 1}, "resformer+neutreno": {"lambda_own": 0.9}, "residual_k": {"lambda_k1": 0.2},
}  # fmt: skip


def stir(model):
    """Every parameter away from its start."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator).to(p.dtype))
    return model


@pytest.fixture
def vanilla(tiny, tmp_path):
    """A saved vanilla step and its logits."""
    model = stir(tiny(config={"n_key_value_heads": 2}))
    save(model, tmp_path / "step")
    return tmp_path / "step", model(IDS)


def change_config(folder, **changes):
    """Edit `config.json`; None removes a key."""
    values = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def change_tensors(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


# ---- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.fast(7)
@pytest.mark.parametrize(
    "architecture", [name for name in (*ARCHITECTURES, "resformer+neutreno") if name in {*COVERING, *OPTIONS}][::2]
)
def test_a_saved_model_comes_back_bit_by_bit(tiny, tmp_path, architecture):
    options = OPTIONS.get(architecture, {})
    grouped = {} if "qa" in architecture else {"n_key_value_heads": 2}  # gqa and mqa say themselves how many
    model = stir(tiny(architecture, config=grouped, **options))
    save(model, tmp_path / "step", seed=3, step=40)
    loaded = workbench.load(tmp_path / "step")  # a warning would be an error
    assert (loaded.architecture, loaded.options, loaded.config) == (architecture, model.options, model.config)
    assert not loaded.assumed
    assert not loaded.training
    assert (loaded.source["seed"], loaded.source["step"]) == (3, 40)
    assert torch.equal(loaded(IDS), model(IDS))
    assert weights_hash(loaded) == weights_hash(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_come_back_bit_by_bit_when_asked_for(tiny, tmp_path, dtype):
    model = stir(tiny("resformer", dtype=dtype))
    save(model, tmp_path)
    loaded = workbench.load(tmp_path, dtype=dtype)
    assert torch.equal(loaded(IDS), model(IDS))
    assert workbench.load(tmp_path)(IDS).dtype == torch.float32


def test_a_dtype_may_be_a_name_and_must_be_a_type_of_weights(tiny, tmp_path):
    for asked in ("bfloat16", "torch.bfloat16", torch.bfloat16):
        model = tiny("resformer", dtype=asked)
        save(model, tmp_path)
        assert (
            model.dtype
            == model.new_cache(dtype=asked).dtype
            == workbench.load(tmp_path, dtype=asked).dtype
            == torch.bfloat16
        )
    for wrong in (torch.int8, "bf", "auto", float, torch.float8_e5m2):
        for take in (partial(workbench.load, tmp_path), partial(tiny, "resformer"), tiny("resformer").new_cache):
            with pytest.raises(UnknownName, match="unknown dtype"):
                take(dtype=wrong)


def test_weights_hash_sees_every_difference(tiny):
    base = weights_hash(tiny("resformer"))
    assert base == weights_hash(tiny("resformer", lambda_v1=0.5))
    others = [
        tiny("resformer", lambda_v1=0.4),
        tiny("neutreno"),
        tiny("resformer", seed=1),
        tiny("resformer", dtype=torch.float64),
    ]
    nudged = tiny("resformer")
    with torch.no_grad():
        nudged.ln_final.weight[3] = 1.0000001
    assert base not in {weights_hash(model) for model in (*others, nudged)}


@pytest.mark.parametrize("value", ["nan", "-inf"])
def test_weights_that_are_no_numbers_are_refused_by_name(vanilla, value):
    folder, _ = vanilla
    change_tensors(folder, lambda t: t["model.norm.weight"][3].fill_(float(value)))
    told = r"model\.norm\.weight holds (NaN|Inf).*choose an earlier step"
    with pytest.raises(BadCheckpoint, match=told):
        workbench.load(folder)


# ---- other people's readers and writers ------------------------------------------------------------------------------


def test_a_vanilla_step_opens_in_transformers(tiny, tmp_path):
    model = stir(tiny(config={"n_key_value_heads": 2, "rope_theta": 500.0, "rms_norm_eps": 1e-4}))
    save(model, tmp_path)
    llama = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(llama, LlamaForCausalLM)
    torch.testing.assert_close(llama(IDS).logits, model(IDS), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["resformer", "denseformer"])
def test_no_other_architecture_opens_as_a_llama(tiny, tmp_path, architecture):
    save(tiny(architecture), tmp_path)
    with pytest.raises(ValueError, match="workbench"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_sharded_directory_loads(vanilla):
    folder, logits = vanilla
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    files = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    (folder / WEIGHTS).unlink()
    index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    assert torch.equal(workbench.load(folder)(IDS), logits)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"model-00002-of-00002\.safetensors is missing"):
        workbench.load(folder)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 321.0, "rope_parameters": None},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 321.0}},
        {"rope_theta": 321.0, "rope_parameters": None, "rope_scaling": {"type": "default"}},
    ],
)
def test_older_and_newer_spellings_of_the_rotation(vanilla, spelling):
    folder, logits = vanilla
    change_config(folder, **spelling)
    model = workbench.load(folder)
    assert model.config.rope_theta == 321.0
    assert not torch.allclose(model(IDS), logits)


def test_defaults_of_older_configs(vanilla):
    """No kv heads, head width or rotation stated: as many as heads, hidden size / heads, 10,000."""
    folder, logits = vanilla
    change_config(folder, head_dim=None, rope_theta=None, rope_parameters=None, attention_bias=None, dtype=None)
    assert torch.equal(workbench.load(folder)(IDS), logits)
    change_config(folder, num_key_value_heads=None)
    with pytest.raises(BadCheckpoint, match=r"k_proj\.weight is \[16, 32\], wanted \[32, 32\]"):
        workbench.load(folder)


# ---- damage and contradiction ----------------------------------------------------------------------------------------


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


V1 = "model.layers.1.self_attn.v_proj.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (drop(V1), rf"missing {V1}"),
        (
            put("model.layers.1.self_attn.v_proj.bias", torch.ones(16)),
            r"unexpected model\.layers\.1\.self_attn\.v_proj\.bias \[16\]",
        ),
        (put(V1, torch.ones(32, 16)), rf"{V1} is \[32, 16\], wanted \[16, 32\]"),
        (put(V1, torch.ones(16, 32, dtype=torch.int8)), rf"{V1} is torch\.int8; quantised weights are not read"),
        (lambda t: t.update({"model.layers.1.self_attn.w_v.weight": t.pop(V1)}), rf"missing {V1}; did you mean"),
        (lambda t: t.clear(), r"does not hold a transformer(.|\n)*and \d+ more"),
    ],
)
def test_tensors_that_do_not_fit_are_named(vanilla, change, told):
    folder, _ = vanilla
    change_tensors(folder, change)
    with pytest.raises(BadCheckpoint, match=told):
        workbench.load(folder)


def test_a_contradiction_in_an_undeclared_directory_is_an_error_not_a_guess(vanilla):
    """No architecture has just these tensors: refused by name, without an assumption first."""
    folder, _ = vanilla
    change_config(folder, workbench=None)
    change_tensors(folder, drop(V1.replace("v_proj", "o_proj")))
    with pytest.raises(BadCheckpoint, match=r"missing model\.layers\.1\.self_attn\.o_proj\.weight"):
        workbench.load(folder)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rotary scaling .*llama3.* is not supported"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary scaling .*linear"),
        ({"head_dim": 16}, "head_dim=16, only hidden_size / heads = 8"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ({"workbench": None, "model_type": "gpt2"}, "model_type 'gpt2'; only llama and our own"),
        ({"hidden_size": "32"}, "d_model='32': must be a positive int"),
        ({"workbench": {"options": {}}}, r"config\.json does not name its architecture"),
        ({"workbench": {"architecture": "resformr"}}, r"config\.json .*unknown architecture 'resformr'.*resformer"),
    ],
)
def test_unreadable_configs_are_refused_with_the_reason(vanilla, changes, told):
    folder, _ = vanilla
    change_config(folder, **changes)
    with pytest.raises(BadCheckpoint, match=told):
        workbench.load(folder)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-100]), "damaged or no safetensors"),
        (lambda f: (f / WEIGHTS).write_bytes(b""), "damaged or no safetensors"),
        (lambda f: (f / WEIGHTS).unlink(), rf"{WEIGHTS} is missing"),
        (lambda f: (f / CONFIG).write_text("[1, 2]"), "holds a list, not a JSON object"),
        (lambda f: shutil.rmtree(f), "does not exist"),
    ],
)
def test_damaged_files_are_named(vanilla, damage, told):
    folder, _ = vanilla
    damage(folder)
    with pytest.raises(BadCheckpoint, match=told):
        workbench.load(folder)


@pytest.mark.parametrize("target", ["../secret.safetensors", "weights.bin"])
def test_an_index_cannot_point_outside_its_folder(vanilla, target):
    folder, _ = vanilla
    save_file({"x": torch.ones(1)}, folder.parent / "secret.safetensors")
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"x": target}}))
    with pytest.raises(BadCheckpoint, match="points outside its folder or at no safetensors file"):
        workbench.load(folder)


# ---- what tensors cannot tell ----------------------------------------------------------------------------------------


def test_denseformer_settings_that_tensors_cannot_tell_apart_must_be_named(tiny, tmp_path):
    """3 blocks, period 3: one average of 2 weights is dilation 2 or 3, which read different outputs."""
    model = stir(tiny("denseformer", dilation=3, period=3))
    save(model, tmp_path)
    assert torch.equal(workbench.load(tmp_path)(IDS), model(IDS))
    change_config(tmp_path, workbench=None, model_type="llama")
    for asked in ({}, {"architecture": "denseformer"}):
        with pytest.raises(BadCheckpoint, match=r"fit several settings, name one of .*'dilation': 2.*'dilation': 3"):
            workbench.load(tmp_path, **asked)
    named = workbench.load(tmp_path, architecture="denseformer", dilation=3)
    assert torch.equal(named(IDS), model(IDS))
    assert named.options.items() >= {"dilation": 3, "period": 3}.items()
